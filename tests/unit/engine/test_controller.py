"""Controllers on a machine on paper: steps take what a cost curve says, drafts come true as a
process says, and nothing is timed, so never slower than plain decoding can be judged exactly.
"""

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from slipstream.core.draft import Draft, Verdict
from slipstream.core.errors import ConfigError
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.engine.auto import AutoController, _non_increasing
from slipstream.engine.controller import Controller, FixedController, TableController
from slipstream.engine.costs import CostModel, CostTable
from slipstream.engine.scheduler import Plan
from slipstream.engine.step import StepResult
from slipstream.maths.noise import Key

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MAX_TOKENS = 8
CURVES: dict[str, Callable[[float], float]] = {
    "flat": lambda rows: 1.0,
    "gentle": lambda rows: 1.0 + 0.05 * (rows - 1),
    "linear": lambda rows: rows,
    "stairs": lambda rows: 1.0 + 0.5 * math.floor((rows - 1) / 8),
    "roofline": lambda rows: max(1.0, rows / 24) + 0.01 * rows,
    "jump": lambda rows: 1.0 if rows == 1 else 1.5 + 0.01 * rows,
}


def sequence(seq_id: int = 0, max_tokens: int = 10**6, **params: bool) -> Sequence:
    """One that has its prompt computed and generates."""
    return Sequence(
        seq_id=seq_id,
        request_id=str(seq_id),
        index=0,
        tokens=[0] * 17,
        num_prompt=16,
        params=SamplingParams(**params),
        max_tokens=max_tokens,
        stop_ids=frozenset(),
        key=Key(seq_id),
        num_computed=16,
    )


def plan_of(seqs: list[Sequence]) -> Plan:
    return Plan(seqs, [seq.num_pending for seq in seqs])


@dataclass
class World:
    """Where a controller lives.

    Attributes:
        batch: sequences, always the same number.
        target_sec: seconds of a pass, by rows.
        acceptance: chance that a drafted token is accepted, by step and sequence.
        level_sec: seconds of drafting one token for everybody.
        offer: chance that the drafter has anything to offer a sequence.
        restart_sec: catching up, when a sequence was not drafted for in the step before.
        overhead_sec: of every step, unknown to the cost table.
        noise: passes vary by up to this share.
        speed: times of everything, by step.
        token: what every draft consists of.
        sec, plain_sec: time spent so far, and what plain decoding of the same tokens takes.
        budgets: of every step.
    """

    batch: int
    target_sec: Callable[[float], float]
    acceptance: Callable[[int, int], float]
    level_sec: float = 0.0
    offer: float = 1.0
    restart_sec: float = 0.0
    overhead_sec: float = 0.0
    noise: float = 0.0
    speed: Callable[[int], float] = lambda step: 1.0
    token: int = 0
    seed: int = 0
    sec: float = 0.0
    plain_sec: float = 0.0
    budgets: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seqs = [sequence(i) for i in range(self.batch)]
        self.source = random.Random(self.seed)
        self.drafting: set[int] = set()

    def auto(self, table_error: float = 1.0) -> AutoController:
        """A controller whose table, measured at load, is wrong by a factor."""
        sec = tuple(table_error * self.target_sec(rows) for rows in ROWS)
        return AutoController(CostModel(CostTable(ROWS, sec)), MAX_TOKENS)

    def run(self, controller: Controller, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step(controller)

    @property
    def slowdown(self) -> float:
        """Time taken, in times of plain decoding."""
        return self.sec / self.plain_sec

    def mean_budget(self, first: int, last: int | None) -> float:
        return float(np.mean(self.budgets[first:last]))

    def best_fixed_speedup(self) -> float:
        """Of the best draft size that never changes, the acceptance being stationary."""
        chance = self.acceptance(0, 0)
        plain = self.target_sec(self.batch) + self.overhead_sec

        def speedup(size: int) -> float:
            tokens = sum(chance**i for i in range(size + 1))
            sec = self.target_sec(self.batch * (1 + size)) + self.level_sec * size
            return tokens * plain / (sec + self.overhead_sec)

        return max(map(speedup, range(MAX_TOKENS + 1)))

    def _step(self, controller: Controller) -> None:
        now = len(self.budgets)
        plan = plan_of(self.seqs)
        budgets = controller.budgets(plan)
        drafts, verdicts = [], []
        for i, budget in enumerate(budgets):
            size = budget if self.source.random() < self.offer else 0
            accepted = 0
            while accepted < size and self.source.random() < self.acceptance(now, i):
                accepted += 1
            drafts.append(Draft([self.token] * size, list(range(-1, size - 1))))
            verdicts.append(Verdict(list(range(accepted)), self.token))
        drafting = {seq.seq_id for seq, size in zip(self.seqs, budgets, strict=True) if size}
        is_restart = not drafting <= self.drafting
        self.drafting = drafting
        draft_sec = self.level_sec * max(map(len, drafts)) + self.restart_sec * is_restart
        rows = self.batch + sum(map(len, drafts))
        jitter = 1 + self.noise * self.source.uniform(-1, 1)
        draft_sec *= self.speed(now)
        pass_sec = self.speed(now) * jitter * (self.target_sec(rows) + self.overhead_sec)
        controller.observe(
            StepResult(
                plan,
                budgets=budgets,
                drafts=drafts,
                verdicts=list(verdicts),
                draft_sec=draft_sec,
                verify_sec=pass_sec,
                total_sec=draft_sec + pass_sec,
            )
        )
        self.budgets.append(budgets)
        tokens = sum(1 + len(verdict.path) for verdict in verdicts)
        plain = self.speed(now) * (self.target_sec(self.batch) + self.overhead_sec)
        self.sec += draft_sec + pass_sec
        self.plain_sec += tokens * plain / self.batch


# ---------------------------------------------------------------------------------------------
# The simple ones


def test_fixed_says_what_it_does():
    plan = plan_of([sequence(i) for i in range(3)])
    on, off = FixedController(4), FixedController(0)
    assert on.budgets(plan) == [4, 4, 4] and on.reasons.last == "draft 4: fixed"
    assert off.budgets(plan) == [0, 0, 0] and off.reasons.last.startswith("off")
    assert on.reasons.counts == {"draft": 1}


CLASSIC = ((1, 8, 5), (9, 32, 2), (33, None, 0))


@pytest.mark.parametrize(
    ("batch", "size"), [(1, 5), (8, 5), (9, 2), (32, 2), (33, 0), (64, 0), (200, 0)]
)
def test_table_boundaries(batch, size):
    controller = TableController(CLASSIC)
    assert controller.budgets(plan_of([sequence(i) for i in range(batch)])) == [size] * batch
    assert f"batch {batch} " in controller.reasons.last


def test_table_counts_sequences_that_get_a_token():
    """A prompt that is still being computed is nobody to draft for."""
    seqs = [sequence(i) for i in range(9)]
    plan = plan_of(seqs)
    seqs[8].tokens += [0] * 40
    assert TableController(CLASSIC).budgets(plan)[0] == 5


def test_table_with_gaps_drafts_nothing_in_them():
    controller = TableController(((2, 3, 4), (6, 6, 1)))
    sizes = [controller.budgets(plan_of([sequence(i) for i in range(b)]))[0] for b in range(1, 8)]
    assert sizes == [0, 4, 4, 0, 0, 1, 0]


@pytest.mark.parametrize(
    "rows", [((1, 8, 5), (8, 9, 2)), ((0, 4, 1),), ((3, 2, 1),), ((1, None, 1), (5, 6, 1))]
)
def test_table_refuses_what_makes_no_sense(rows):
    with pytest.raises(ConfigError, match=re.escape(f"{rows[-1][0]}, {rows[-1][1]}")):
        TableController(rows)


# ---------------------------------------------------------------------------------------------
# Never slower, and nearly as fast as the best fixed size


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9])
def test_stationary_acceptance(curve, chance):
    cases = [(1, 0.0), (1, 0.25), (6, 0.1), (32, 0.1)]
    turn = int(10 * chance) + len(curve)  # each curve meets two of the four at every chance
    for case in (turn % 4, (turn + 1) % 4):
        batch, level_sec = cases[case]
        world = World(
            batch,
            CURVES[curve],
            lambda step, seq: chance,
            level_sec=level_sec,
            overhead_sec=0.1,
            noise=0.1,
            seed=case,
        )
        world.run(world.auto(table_error=1.4), 400 if batch < 32 else 160)
        assert world.slowdown <= 1.03, (batch, level_sec)
        assert 1 / world.slowdown >= 0.9 * world.best_fixed_speedup(), (batch, level_sec)


@pytest.mark.parametrize("batch", [1, 12])
@pytest.mark.parametrize("period", [20, 100])
def test_acceptance_that_comes_and_goes(batch, period):
    world = World(
        batch,
        CURVES["roofline"],
        lambda step, seq: 0.9 if step // period % 2 else 0.05,
        level_sec=0.2,
        seed=period,
    )
    world.run(world.auto(), 500)
    assert world.slowdown <= 1.03


def test_speculates_again_once_acceptance_improves():
    world = World(1, CURVES["gentle"], lambda step, seq: 0.0 if step < 400 else 0.85, level_sec=0.2)
    controller = world.auto()
    world.run(controller, 700)
    assert world.mean_budget(200, 400) < 0.1, "it kept drafting what was never accepted"
    assert world.mean_budget(550, 700) > 2, "it never noticed"
    assert controller.reasons.counts["probing"] > 0


def test_stops_once_acceptance_is_gone():
    world = World(1, CURVES["gentle"], lambda step, seq: 0.85 if step < 200 else 0.0, level_sec=0.2)
    world.run(world.auto(), 500)
    assert world.mean_budget(100, 200) > 2
    assert world.mean_budget(300, 500) < 0.1


@pytest.mark.parametrize("chance", [0.0, 0.9])
def test_lookup_that_finds_little(chance):
    """Finding nothing costs nothing, and what is found now and then is judged by itself."""
    world = World(1, CURVES["gentle"], lambda step, seq: chance, offer=0.05)
    controller = world.auto()
    world.run(controller, 1000)
    assert world.slowdown <= 1.01
    assert controller.reasons.counts["off: lookup found nothing"] > 100
    if chance:
        assert world.slowdown < 0.9, "what it found was not used"


@pytest.mark.parametrize("chance", [0.0, 0.85])
def test_a_drafter_that_must_catch_up(chance):
    """The investment is made once, pays if the drafts are good, and is not repeated if not."""
    world = World(
        1, CURVES["gentle"], lambda step, seq: chance, level_sec=0.25, restart_sec=6.0, seed=1
    )
    world.run(world.auto(), 1000)
    assert world.slowdown <= 1.03
    assert 1 / world.slowdown >= 0.9 * world.best_fixed_speedup()


def test_short_answers_are_not_caught_up_with():
    world = World(1, CURVES["gentle"], lambda step, seq: 0.85, level_sec=0.25, restart_sec=20.0)
    controller = world.auto()

    def answer(seq_id: int, num_tokens: int, num_steps: int) -> float:
        world.seqs = [sequence(seq_id, num_tokens)]
        world.run(controller, num_steps)
        return world.mean_budget(-num_steps, None)

    assert answer(1, 1000, 200) > 1.5, "what is worth an investment"
    before = world.sec - world.plain_sec
    assert np.mean([answer(seq_id, 12, 4) for seq_id in range(10, 60)]) < 0.2
    assert controller.reasons.counts["off: catching up would not pay"] > 30
    assert world.sec - world.plain_sec < before + 3 * world.restart_sec
    assert answer(2, 1000, 50) > 1.5
    # It is tried again some day: it may have become cheaper.
    world.restart_sec = 0.0
    assert np.mean([answer(seq_id, 12, 4) for seq_id in range(100, 600)][-40:]) > 1.0


@pytest.mark.parametrize("chance", [0.0, 0.7])
def test_a_machine_that_others_use_too(chance):
    """Everything is twice as slow for a while; speculation is neither blamed nor credited."""
    worlds = [
        World(
            1,
            CURVES["gentle"],
            lambda step, seq: chance,
            level_sec=0.1,
            speed=lambda step: 2.0 if 200 <= step < 400 else 1.0,
            seed=seed,
        )
        for seed in range(4)
    ]
    for world in worlds:
        world.run(world.auto(), 600)
        assert world.slowdown <= 1.03
    if chance:
        assert np.mean([world.mean_budget(210, 400) for world in worlds]) > 3
        assert np.mean([world.mean_budget(410, 600) for world in worlds]) > 3


def test_a_wrong_belief_costs_no_more_than_the_ledger_allows():
    """Steps cost more than any model here can say: the debt, not the estimate, ends it."""
    world = World(1, CURVES["gentle"], lambda step, seq: 0.5)
    controller = world.auto()
    # Every draft is followed by a plain step that pays for it: no single step looks dear.
    honest = world.target_sec

    def target_sec(rows: float) -> float:
        return honest(rows) + (0.0 if len(world.budgets) % 2 else 1.5 * (rows > 1))

    world.target_sec = target_sec
    world.run(controller, 1000)
    assert world.slowdown <= 1.03


# ---------------------------------------------------------------------------------------------
# What it decides, and why


def test_little_gained_by_few_is_left_alone():
    """One of eight would gain a few percent of all tokens while seven wait; eight gain a lot."""
    for num_good, drafts in ((1, False), (8, True)):
        world = World(8, CURVES["gentle"], lambda step, seq, n=num_good: 0.5 if seq < n else 0.0)
        world.run(world.auto(), 800)
        budget = world.mean_budget(0, 800)
        assert budget > 0.8 if drafts else budget < 0.1, "probes alone are left"


def test_batch_past_break_even():
    small = World(4, CURVES["roofline"], lambda step, seq: 0.6, level_sec=0.05)
    large = World(48, CURVES["roofline"], lambda step, seq: 0.6, level_sec=0.05)
    controllers = [world.auto() for world in (small, large)]
    for world, controller in zip((small, large), controllers, strict=True):
        world.run(controller, 150)
    assert small.mean_budget(100, 150) > 1
    assert large.mean_budget(100, 150) < 0.05
    reason = controllers[1].reasons
    assert reason.counts["off: batch is past break-even"] > 100
    said = re.fullmatch(r"off: batch 48 is past break-even (\d+)", reason.last)
    assert said and 4 < int(said[1]) < 48


def test_reasons_carry_numbers():
    world = World(1, CURVES["flat"], lambda step, seq: 1.0)
    controller = world.auto()
    world.run(controller, 40)
    assert controller.reasons.last == "draft 8: expects 9.0 tokens for 1.0 plain steps"
    world = World(1, CURVES["linear"], lambda step, seq: 0.0)
    controller = world.auto()
    world.run(controller, 40)
    assert re.fullmatch(r"off: acceptance 0\.\d\d does not pay", controller.reasons.last)
    assert sum(controller.reasons.counts.values()) == 40, "one reason per step"


def test_plain_decoding_is_measured_first_and_again():
    world = World(1, CURVES["flat"], lambda step, seq: 0.9)
    controller = world.auto()
    world.run(controller, 500)
    assert world.budgets[:2] == [[0], [0]]
    assert 4 <= controller.reasons.counts["off: measuring plain decoding"] <= 8


def test_sequences_are_told_apart():
    """In one batch, half of the drafts always come true and half never do."""
    world = World(8, CURVES["gentle"], lambda step, seq: 0.95 if seq % 2 else 0.0, level_sec=0.02)
    world.run(world.auto(), 200)
    sizes = np.mean(world.budgets[100:], axis=0)
    assert min(sizes[1::2]) > 3 and max(sizes[0::2]) < 0.7


def test_decisions_know_only_the_past():
    """What a draft says has no part in how long it is: the tokens are others, the sizes equal."""
    worlds = [
        World(3, CURVES["gentle"], lambda step, seq: 0.6, level_sec=0.1, token=t) for t in (0, 7)
    ]
    for world in worlds:
        world.run(world.auto(), 200)
    assert worlds[0].budgets == worlds[1].budgets


def test_respects_room_and_those_who_want_no_drafts():
    world = World(4, CURVES["flat"], lambda step, seq: 1.0)
    controller = world.auto()
    world.run(controller, 20)
    world.seqs[0].max_tokens = 1 + 3  # one token out, one is always yielded, so two can be drafted
    world.seqs[1].max_tokens = 1 + 1
    world.seqs[2].params = replace(world.seqs[2].params, speculative=False)
    assert controller.budgets(plan_of(world.seqs)) == [2, 0, 0, MAX_TOKENS]


def test_prompt_chunks_are_not_drafted_for():
    controller = World(1, CURVES["flat"], lambda step, seq: 1.0).auto()
    seq = sequence()
    plan = plan_of([seq])
    seq.tokens += [0] * 40
    assert controller.budgets(plan) == [0]


def test_a_good_child_after_a_poor_sibling_is_reached():
    gains = np.array([[0.6, 0.1, 0.4, 0.2], [0.5, 0.4, 0.3, 0.2]])
    smooth = _non_increasing(gains)
    assert smooth[0].tolist() == pytest.approx([0.6, 0.25, 0.25, 0.2])
    assert smooth[1].tolist() == gains[1].tolist()


def test_a_decision_stands_for_a_while(monkeypatch):
    """Deciding anew costs a tenth of a small model's step; while lookup finds nothing, nothing new
    is known."""
    world = World(1, CURVES["flat"], lambda step, seq: 0.9)
    controller = world.auto()
    world.run(controller, 50)
    assert world.budgets[-1] != [0]

    decided = []
    monkeypatch.setattr(
        AutoController,
        "_best",
        lambda self, *args, best=AutoController._best: decided.append(0) or best(self, *args),
    )
    world.run(controller, 12)
    assert len(decided) == 3, "drafts teach, so every fourth step decides anew"
    world.offer = 0.0
    decided.clear()
    while not decided:  # the last decision stands to its end
        world.run(controller, 1)
    world.run(controller, 16)
    assert len(decided) == 3
    world.seqs[0] = sequence(5)
    world.run(controller, 1)
    assert len(decided) == 4, "another sequence is another matter"
