"""Who runs: budgets, seats, preemption, siblings, and room for drafts that costs nobody else."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence, Status
from slipstream.engine.scheduler import Plan, Scheduler
from slipstream.kv.blocks import BlockManager
from slipstream.maths.noise import Key

SIZE = 4


@dataclass
class Desk:
    """A scheduler, everybody who ever came, and an engine that emits a token when it can."""

    scheduler: Scheduler
    everybody: list[Sequence] = field(default_factory=list)

    @property
    def blocks(self) -> BlockManager:
        return self.scheduler.blocks

    def add(self, prompt: Iterable[int], *, n: int = 1, max_tokens: int = 20) -> list[Sequence]:
        """Queue a request of n answers."""
        seqs: list[Sequence] = []
        for index in range(n):
            tokens = list(prompt)
            seq = Sequence(
                seq_id=len(self.everybody),
                request_id="",
                index=index,
                tokens=tokens,
                num_prompt=len(tokens),
                params=SamplingParams(),
                max_tokens=max_tokens,
                stop_ids=frozenset(),
                key=Key(0),
                leader=seqs[0] if seqs else None,
            )
            seqs.append(seq)
            self.everybody.append(seq)
            self.scheduler.add(seq)
        return seqs

    def carry_out(self, plan: Plan) -> None:
        """What the engine does with a plan."""
        for index, seq in enumerate(plan.seqs):
            emits = plan.reaches_end(index)
            seq.num_computed += plan.num_tokens[index]
            if emits:
                seq.tokens.append((seq.index + len(seq.tokens)) % 5)
            self.blocks.commit(seq.seq_id, seq.tokens, seq.num_computed)
            self.blocks.trim(seq.seq_id, seq.num_computed)
            if seq.room == 0:
                self.scheduler.finish(seq)
        self.blocks.check_integrity()

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        self.carry_out(plan)
        return plan


def desk(num_blocks: int = 50, *, seats: int = 8, budget: int = 100) -> Desk:
    return Desk(Scheduler(BlockManager(num_blocks, SIZE), seats, budget))


def planned(plan: Plan) -> list[tuple[Sequence, int]]:
    return list(zip(plan.seqs, plan.num_tokens, strict=True))


# ---------------------------------------------------------------------------------------------
# Tokens and seats


def test_a_long_prompt_is_computed_in_chunks() -> None:
    here = desk(budget=4)
    [seq] = here.add(range(10))
    chunks = []
    for _ in range(4):
        plan = here.scheduler.plan()
        chunks.append((plan.num_tokens, plan.reaches_end(0)))
        here.carry_out(plan)
    assert chunks == [([4], False), ([4], False), ([2], True), ([1], True)]
    assert seq.num_computed == len(seq.tokens) - 1


def test_who_runs_goes_first_and_prompts_take_the_rest() -> None:
    here = desk(budget=10)
    [a], [b] = here.add(range(4)), here.add(range(100, 104))
    here.step()
    [c], [d] = here.add(range(200, 206)), here.add(range(300, 306))
    assert planned(here.step()) == [(a, 1), (b, 1), (c, 6), (d, 2)]
    assert planned(here.step()) == [(a, 1), (b, 1), (c, 1), (d, 4)]


def test_the_budget_may_end_before_all_who_run() -> None:
    here = desk(budget=3)
    seqs = [here.add([i])[0] for i in range(3)]
    assert planned(here.step()) == [(seq, 1) for seq in seqs]
    here.scheduler.max_num_batched_tokens = 2
    assert planned(here.step()) == [(seq, 1) for seq in seqs[:2]]


def test_no_more_run_than_there_are_seats() -> None:
    here = desk(seats=2)
    seqs = [here.add([i], max_tokens=2)[0] for i in range(3)]
    assert here.step().seqs == seqs[:2]
    assert here.step().seqs == seqs[:2]  # their last
    assert here.step().seqs == seqs[2:]


def test_nobody_overtakes_who_does_not_fit() -> None:
    here = desk(4)
    [a], [large], [small] = here.add(range(9)), here.add(range(100, 108)), here.add([7])
    assert here.step().seqs == [a]
    assert list(here.scheduler.waiting) == [large, small]
    assert large.num_computed == 0
    assert not here.blocks.has(large.seq_id)


def test_an_equal_prompt_is_found_in_the_cache() -> None:
    here = desk()
    here.add(range(10))
    here.step()
    [again] = here.add(range(10))
    assert (again, 2) in planned(here.step())
    assert again.num_cached == 8


@pytest.mark.parametrize("status", Status)
def test_finish_takes_a_sequence_out_wherever_it_is(status: Status) -> None:
    here = desk(seats=1)
    [first], [second] = here.add(range(9)), here.add(range(100, 109))
    here.step()
    seq = second if status is Status.WAITING else first
    if status is Status.FINISHED:
        here.scheduler.finish(seq)
    here.scheduler.finish(seq)
    assert seq.status is Status.FINISHED
    assert seq not in here.scheduler.running
    assert seq not in here.scheduler.waiting
    assert not here.blocks.has(seq.seq_id)
    other = first if seq is second else second
    assert here.step().seqs == [other]


# ---------------------------------------------------------------------------------------------
# Preemption


def test_the_youngest_makes_room_and_comes_back_first() -> None:
    here = desk(4, seats=3)
    [old], [young] = here.add(range(7)), here.add(range(100, 107))
    [newcomer] = here.add([55])
    assert here.step().seqs == [old, young]
    assert here.step().seqs == [old, young]  # 8 tokens each: the pool is full
    tokens = list(young.tokens)

    plan = here.step()
    assert plan.seqs == [old]
    assert plan.preempted == [young]
    assert (young.status, young.num_computed, young.num_preemptions) == (Status.WAITING, 0, 1)
    assert young.tokens == tokens
    assert list(here.scheduler.waiting) == [young, newcomer]

    here.scheduler.finish(old)
    plan = here.step()
    assert plan.seqs == [young, newcomer]
    assert plan.num_tokens[0] < len(tokens)  # some of what it computed was still there


def test_the_youngest_may_have_to_preempt_itself() -> None:
    here = desk(5)
    [old], [young] = here.add(range(7)), here.add(range(100, 107))
    here.step()
    here.step()
    plan = here.scheduler.plan()  # both need a third block, and there is one
    assert plan.seqs == [old]
    assert plan.preempted == [young]


def test_several_make_room_and_keep_their_order() -> None:
    here = desk(6)
    seqs = [here.add(range(100 * i, 100 * i + 8))[0] for i in range(3)]
    here.scheduler.plan()
    for seq in seqs:
        seq.num_computed = 8
    seqs[0].tokens += range(12)  # wants three more blocks, as two others have to give
    plan = here.scheduler.plan()
    assert plan.seqs == [seqs[0]]
    assert plan.preempted == [seqs[2], seqs[1]]
    assert list(here.scheduler.waiting) == seqs[1:]


# ---------------------------------------------------------------------------------------------
# Siblings


def test_siblings_wait_for_the_prompt_and_share_it() -> None:
    here = desk(budget=6)
    leader, *others = here.add(range(10), n=3)
    assert here.step().seqs == [leader]
    assert here.step().seqs == [leader]

    plan = here.scheduler.plan()
    assert planned(plan) == [(leader, 1), *((seq, 1) for seq in others)]
    table = here.blocks.table(leader.seq_id)
    for seq in others:
        assert (seq.num_computed, seq.num_cached) == (9, 9)
        mine = here.blocks.table(seq.seq_id)
        assert mine[:2] == table[:2]
        assert (table[2], mine[2]) in plan.copies
    assert len(plan.copies) == 2
    assert len({here.blocks.table(seq.seq_id)[2] for seq in (leader, *others)}) == 3


def test_siblings_hold_up_nobody_and_keep_their_place() -> None:
    here = desk(budget=6, seats=2)
    leader, *others = here.add(range(8), n=3)
    [stranger], [last] = here.add([77]), here.add([78])
    assert here.step().seqs == [leader]
    assert here.step().seqs == [leader, stranger]
    assert list(here.scheduler.waiting) == [*others, last]
    here.scheduler.finish(stranger)
    assert here.step().seqs == [leader, others[0]]


def test_a_sibling_whose_leader_is_gone_helps_itself() -> None:
    here = desk(seats=1)
    leader, other = here.add(range(10), n=2)
    here.step()
    here.scheduler.finish(leader)
    assert planned(here.step()) == [(other, 2)]  # two blocks were still in the cache


def test_a_sibling_that_already_speaks_does_not_go_back_to_the_prompt() -> None:
    here = desk()
    leader, other = here.add(range(10), n=2)
    for _ in range(4):
        here.step()
    assert other.num_computed == 12
    here.scheduler._preempt(other, Plan())
    # Of the leader it could have 9 tokens; its own 12 are still in the cache.
    assert planned(here.step()) == [(leader, 1), (other, 1)]


def test_nor_does_it_wait_for_its_leader_again() -> None:
    here = Desk(Scheduler(BlockManager(50, SIZE, prefix_caching=False), 8, 100))
    leader, other = here.add(range(10), n=2)
    for _ in range(4):
        here.step()
    for seq in (other, leader):
        here.scheduler._preempt(seq, Plan())
    assert here.step().seqs == [leader, other]


def test_siblings_of_a_single_token_need_not_wait() -> None:
    here = desk()
    seqs = here.add([3], n=3)
    plan = here.step()
    assert plan.seqs == seqs
    assert plan.copies == []


# ---------------------------------------------------------------------------------------------
# Room for drafts


@pytest.mark.parametrize(
    ("num_free", "wanted", "fitting"),
    [
        (3, 0, 0),
        (3, 2, 2),
        (3, 9, 9),
        (3, 99, 14),  # 2 in its own last block, 12 in free ones
        (0, 1, 1),
        (0, 9, 2),
    ],
)
def test_a_draft_gets_what_is_free(num_free: int, wanted: int, fitting: int) -> None:
    here = desk(4 + num_free)
    [seq], [other] = here.add(range(6)), here.add(range(100, 106))
    plan = here.scheduler.plan()
    others_table = list(here.blocks.table(other.seq_id))
    assert here.scheduler.reserve_draft(seq, 6, wanted, plan) == fitting
    assert len(here.blocks.table(seq.seq_id)) * SIZE >= 6 + fitting
    assert here.blocks.table(other.seq_id) == others_table
    assert plan.preempted == []
    here.blocks.check_integrity()


def test_a_draft_behind_a_full_block_in_a_full_pool_gets_nothing() -> None:
    here = desk(1)
    [seq] = here.add(range(4))
    plan = here.scheduler.plan()
    assert here.scheduler.reserve_draft(seq, 4, 5, plan) == 0


# ---------------------------------------------------------------------------------------------
# All at once

Requests = list[tuple[int, int, int, int, int]]

requests = st.lists(
    st.tuples(
        st.integers(0, 6),  # arrives in this step
        st.integers(1, 13),  # prompt tokens
        st.integers(0, 2),  # which prompt
        st.integers(1, 3),  # n
        st.integers(1, 7),  # max_tokens
    ),
    min_size=1,
    max_size=6,
)


def check(here: Desk, plan: Plan, ran_before: list[Sequence]) -> None:
    """What every plan promises."""
    scheduler, blocks = here.scheduler, here.blocks
    assert len(set(plan.seqs)) == len(plan.seqs), "planned twice"
    assert sum(plan.num_tokens) <= scheduler.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert plan.seqs or not (scheduler.running or scheduler.waiting), "nobody moves"
    assert [seq for seq in scheduler.running if seq in plan.seqs] == plan.seqs, "out of order"
    for seq, num_tokens in planned(plan):
        assert seq.status is Status.RUNNING
        assert 1 <= num_tokens <= seq.num_pending
        held = len(blocks.table(seq.seq_id)) * blocks.block_size
        assert held >= seq.num_computed + num_tokens
    for seq in plan.preempted:
        assert seq.status is Status.WAITING
        assert not blocks.has(seq.seq_id)
        older = ran_before[: ran_before.index(seq)]
        assert all(other in older for other in plan.seqs), "an older one made room"
    for seq in here.everybody:
        places = (seq in scheduler.running) + (seq in scheduler.waiting)
        assert places == (seq.status is not Status.FINISHED)
    written = [destination for _, destination in plan.copies]
    assert len(set(written)) == len(written)
    blocks.check_integrity()


@given(
    requests,
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 20),
    st.integers(0, 6),
    st.integers(0, 4),
)
def test_any_load_is_served_in_order(
    load: Requests, block_size: int, seats: int, budget: int, spare: int, wanted: int
) -> None:
    needed = max(prompt + max_tokens - 1 for _, prompt, _, _, max_tokens in load)
    pool = BlockManager(-(-needed // block_size) + spare, block_size)
    here = Desk(Scheduler(pool, seats, budget))
    admitted: list[Sequence] = []
    for now in range(1000):
        for arrives, num_prompt, family, n, max_tokens in load:
            if arrives == now:
                here.add(range(family, family + num_prompt), n=n, max_tokens=max_tokens)
        ran_before = list(here.scheduler.running)
        plan = here.scheduler.plan()
        check(here, plan, ran_before)
        admitted += [s for s in plan.seqs if s.leader is None and s not in admitted]
        tables = {seq: list(pool.table(seq.seq_id)) for seq in here.scheduler.running}
        for index, (seq, num_tokens) in enumerate(planned(plan)):
            if plan.reaches_end(index):
                fitting = here.scheduler.reserve_draft(seq, num_tokens, wanted, plan)
                assert 0 <= fitting <= wanted
                tables[seq] += pool.table(seq.seq_id)[len(tables[seq]) :]
        assert tables == {seq: pool.table(seq.seq_id) for seq in here.scheduler.running}
        here.carry_out(plan)
        if now > 6 and not (here.scheduler.running or here.scheduler.waiting):
            break
    assert all(seq.num_output == seq.max_tokens for seq in here.everybody)
    assert admitted == [seq for seq in here.everybody if seq.leader is None]
    assert pool.num_used == 0
