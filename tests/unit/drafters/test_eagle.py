"""Heads draft what their definition gives, from the features of all committed tokens.

An engine runs, and every draft is held to a computation of everything anew: no pages, no batch, no
tree. Whatever K/V is kept, replaced, shared or lost must not show.
"""

from dataclasses import replace

import pytest
import torch

import heads
from engines import EOS, SETTINGS, engine_for, prompts, run
from sequences import sequence
from slipstream import reference
from slipstream.check.tiny import tiny_model
from slipstream.core.controls import Row, controls
from slipstream.core.draft import Draft, Verdict
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.speculative import TreeConfig
from slipstream.core.target import TargetOutput
from slipstream.drafters.eagle import EagleDrafter
from slipstream.drafters.sampling import SHARPENING
from slipstream.maths.distributions import finishers, scores
from slipstream.maths.noise import Address, Stream
from slipstream.maths.trees import children, depths

TREE = TreeConfig(depth=3, topk=3, max_tokens=10)
KINDS = pytest.mark.parametrize("kind", heads.FEATURE_HEADS)
SHAPES = pytest.mark.parametrize("tree", [None, TREE], ids=["chains", "trees"])
SOME = (
    SETTINGS["greedy"],
    SETTINGS["sampled"],
    replace(SETTINGS["penalised"], min_tokens=0),
)


@pytest.fixture(scope="module")
def target():
    return tiny_model()


class Checked:
    """A drafter whose every draft is checked.

    Attributes:
        skipped: of each draft, how many pairs must have been left out to explain it.
        is_blind: it sees nothing of target passes.
    """

    def __init__(self, drafter: EagleDrafter, target, topk: int):
        self.drafter = drafter
        self.target = target
        self.topk = topk
        self.taps = drafter.taps
        self.skipped: list[int] = []
        self.is_blind = False

    def propose(self, seqs, budgets) -> list[Draft]:
        drafts = self.drafter.propose(seqs, budgets)
        self.drafter.blocks.check_integrity()
        blocks = self.drafter.blocks
        for seq, budget, draft in zip(seqs, budgets, drafts, strict=True):
            assert len(draft) <= budget
            if draft.token_ids:
                held = len(blocks.table(seq.seq_id))
                assert held <= blocks.blocks_for(len(seq.tokens) - 1), "nodes keep their blocks"
                # Before the tokens that the target had cached some pages may be missing.
                most = range(0, seq.num_cached + 1, 4)
                found = (n for n in most if self.explains(seq, draft, n))
                skipped = next(found, None)
                assert skipped is not None, f"nothing explains {draft}"
                self.skipped.append(skipped)
        return drafts

    def observe(self, seqs, target: TargetOutput, verdicts: list[Verdict | None]) -> None:
        if not self.is_blind:
            self.drafter.observe(seqs, target, verdicts)
            self.drafter.blocks.check_integrity()

    def forget(self, seq_id: int) -> None:
        self.drafter.forget(seq_id)

    def explains(self, seq: Sequence, draft: Draft, num_skipped: int) -> bool:
        """Whether the children of every node are the first in the race after its path."""
        skipped = range(seq.num_cached - num_skipped, seq.num_cached)
        paths: dict[int, list[int]] = {-1: []}
        for node, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
            paths[node] = [*paths[parent], token]
        for node, below in enumerate(children(draft.parents)):
            path = paths[node if node < len(draft) else -1]
            tokens = [draft.token_ids[child] for child in below]
            if tokens and tokens != self.ranked(seq, path, self.topk, skipped)[: len(tokens)]:
                return False
        return True

    def ranked(self, seq: Sequence, path: list[int], count: int, skipped: range) -> list[int]:
        logits = heads.head_logits(self.drafter.head, self.target, seq.tokens, path, skipped)
        row = Row(seq.params, [*seq.tokens, *path], seq.num_prompt, seq.stop_ids)
        if seq.params.temperature == 0:
            row = replace(row, params=replace(seq.params, temperature=1.0))
            return scores(logits, controls([row])).topk(count).indices[0].tolist()
        address = Address(seq.key, Stream.TARGET, len(row.tokens))
        weights = scores(logits, controls([row])) * SHARPENING
        return finishers(weights, [address], count)[0].tolist()


def checked(kind, target, *, num_blocks=200, tree=None, **settings) -> Checked:
    head = heads.FEATURE_HEADS[kind](target)
    drafter = heads.drafter_for(head, num_blocks=num_blocks, tree=tree, **settings)
    return Checked(drafter, target, 1 if tree is None else tree.topk)


def engine_with(target, drafter, **settings):
    return engine_for(target, drafter=drafter, num_draft_tokens=6, block_size=4, **settings)


def some_requests(count, max_tokens=9):
    return [
        (prompt, replace(SOME[i % len(SOME)], max_tokens=max_tokens))
        for i, prompt in enumerate(prompts(count))
    ]


@KINDS
@SHAPES
def test_drafts_follow_from_features(target, kind, tree):
    """Ragged prompts in a batch and in chunks, tokens accepted and not."""
    drafter = checked(kind, target, tree=tree)
    run(engine_with(target, drafter, max_num_batched_tokens=16), some_requests(6), stagger=1)
    assert len(drafter.skipped) > 20
    # Their common beginning is five whole blocks, whose last pair has a token of one's own.
    assert set(drafter.skipped) == {0, 4}
    assert drafter.drafter.blocks.num_used == 0


def test_a_tree_has_levels_and_siblings(target):
    seen = []
    drafter = checked("eagle", target, tree=TREE)
    propose = drafter.propose

    def remembering(seqs, budgets):
        seen.extend(propose(seqs, budgets))
        return seen[-len(seqs) :]

    drafter.propose = remembering
    run(engine_with(target, drafter), some_requests(2))
    assert max(max(depths(draft.parents), default=0) for draft in seen) == TREE.depth - 1
    assert any(draft.parents.count(-1) > 1 for draft in seen)


@KINDS
def test_cached_prefixes_are_the_heads_too(target, kind):
    prompt = [1 + i % 29 for i in range(21)]
    drafter = checked(kind, target)
    engine = engine_with(target, drafter)
    for last in ([7], [7, 8], [11, 2, 3]):
        run(engine, [([*prompt, *last], SamplingParams(temperature=0, max_tokens=5))])
    assert engine.stats().num_cached_blocks > 0
    assert set(drafter.skipped) == {0}


def test_a_prefix_it_has_not_seen_is_done_without(target):
    prompt = [1 + i % 29 for i in range(19)]
    request = (prompt, SamplingParams(temperature=0, max_tokens=8))
    drafter = checked("eagle", target, tree=TREE)
    engine = engine_with(target, drafter)
    drafter.is_blind = True
    plain = run(engine, [request])
    assert drafter.skipped == []
    drafter.is_blind = False
    for _ in range(2):  # pages with a gap are nobody else's prefix
        assert run(engine, [request]) == plain
    assert set(drafter.skipped) == {16}


def test_another_first_token_makes_another_prefix(target):
    """No pair carries the first token, yet every feature depends on it."""
    drafter = checked("eagle", target)
    engine = engine_with(target, drafter)
    for first, is_blind in ((4, False), (5, True), (5, False)):
        drafter.is_blind = is_blind
        drafter.skipped.clear()
        prompt = [first, *(1 + i % 29 for i in range(18))]
        run(engine, [(prompt, SamplingParams(temperature=0, max_tokens=6))])
    assert 16 in drafter.skipped, "pages of another prompt were taken for its own"


def test_answers_to_one_prompt_share_its_pages(target):
    drafter = checked("eagle", target)
    engine = engine_with(target, drafter)
    params = SamplingParams(temperature=1.2, seed=3, max_tokens=8, n=3)
    request = engine.add([1 + i % 29 for i in range(15)], params)
    while engine.has_work:
        engine.step()
    assert len(engine.output(request).outputs) == 3
    assert set(drafter.skipped) == {0}


def test_a_leaders_answer_is_not_ones_own(target):
    """A second answer returns from preemption, more of it cached than the common prompt."""
    drafter = heads.drafter_for(heads.eagle(target))
    prompt = [1 + i % 29 for i in range(6)]
    leader = sequence([*prompt, *[9] * 10], seq_id=0, num_prompt=6, params=SETTINGS["greedy"])
    other = sequence([*prompt, *[7] * 10], seq_id=1, num_prompt=6, params=SETTINGS["greedy"])
    other.leader, other.num_computed = leader, 12
    # Of the leader's pages one block is the prompt's alone.
    for seq, skipped in ((leader, range(0)), (other, range(4, 12))):
        seen = heads.target_pass(target, seq.tokens)
        pending = TargetOutput(seen.logits, [0], seen.hidden[seq.num_computed :], {}, [0])
        drafter.observe([seq], pending, [Verdict([], 5)])
        seq.tokens.append(5)
        (draft,) = drafter.propose([seq], [1])
        logits = heads.head_logits(drafter.head, target, seq.tokens, [], skipped)
        assert draft.token_ids == [int(logits.argmax())]


def test_a_scarce_pool_and_preemption(target):
    """Both pools short of blocks: some drafts are missing or worse, every token is right."""
    wanted = some_requests(6, max_tokens=14)
    plain = [
        reference.generate(target, prompt, params, stop_ids=EOS, num_tokens=14)
        for prompt, params in wanted
    ]
    drafter = checked("eagle", target, tree=TREE, num_blocks=14)
    bytes_per_block = 2 * 3 * 2 * 8 * 8 * 4
    engine = engine_with(target, drafter, kv_cache_memory=16 * bytes_per_block)
    drafter.explains = lambda seq, draft, num_skipped: True
    assert run(engine, wanted, stagger=1) == plain
    assert engine.stats().num_preemptions > 0
    assert drafter.drafter.blocks.num_used == 0


def test_features_nobody_drafts_for_are_taken_in_all_the_same(target):
    """A request without drafts, then as if it were to have one: nothing has piled up."""
    drafter = checked("eagle", target)
    engine = engine_with(target, drafter)
    calls: list[int] = []
    drafter.drafter.head.register_forward_pre_hook(lambda _, given: calls.append(len(given[0])))
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, speculative=False)
    run(engine, [([3, 4, 5], params)])
    assert calls == [64, 64]


@pytest.mark.parametrize("tree", [None, replace(TREE, topk=2)], ids=["chains", "trees"])
def test_samples_come_with_their_law(target, tree):
    """Under `ratio` q is the head's own law after each node's path, and tokens are possible."""
    drafter = checked("eagle3", target, rule="ratio", tree=tree)
    seen: list[tuple[Sequence, list[int], Draft]] = []

    def remember(seq, draft, num_skipped):
        seen.append((seq, list(seq.tokens), draft))
        return True

    drafter.explains = remember
    params = SamplingParams(temperature=1.1, seed=4, max_tokens=6, ignore_eos=True)
    run(engine_with(target, drafter), [([9, 8, 7], params)])
    assert seen
    for seq, tokens, draft in seen:
        paths: dict[int, list[int]] = {-1: []}
        for node, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
            paths[node] = [*paths[parent], token]
            logits = heads.head_logits(drafter.drafter.head, target, tokens, paths[parent])
            row = Row(seq.params, [*tokens, *paths[parent]], seq.num_prompt)
            q = torch.softmax(scores(logits, controls([row])), -1)[0]
            assert draft.probs is not None
            torch.testing.assert_close(draft.probs[node], q, atol=1e-6, rtol=1e-5)
            assert q[token] > 0
