"""Drafts from known answers: as good as asked for, and drawn from the q they state."""

from collections import Counter
from itertools import pairwise

import pytest
import torch

from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.drafters.synthetic import SyntheticDrafter
from slipstream.maths.noise import Key
from slipstream.maths.stats import g_test

ANSWER = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
ANSWERS = {"request": {0: ANSWER, 1: [7, 7, 7]}}
VOCAB_SIZE = 10


def sequence(output=(), *, seq_id: int = 0, seed: int = 0, index: int = 0) -> Sequence:
    return Sequence(
        seq_id=seq_id,
        request_id="request",
        index=index,
        tokens=[0, 0, *output],
        num_prompt=2,
        params=SamplingParams(),
        max_tokens=50,
        stop_ids=frozenset(),
        key=Key(seed, index),
    )


def drafter(hit_rate: float, **options) -> SyntheticDrafter:
    return SyntheticDrafter(ANSWERS, VOCAB_SIZE, hit_rate, **options)


def test_a_perfect_chain_is_the_answer():
    seqs = [sequence(ANSWER[:3], seq_id=i) for i in range(40)]
    drafts = drafter(1.0).propose(seqs, [4] * 40)
    assert {len(draft) for draft in drafts} == {0, 1, 2, 3, 4}
    for draft in drafts:
        assert draft.token_ids == ANSWER[3 : 3 + len(draft)]
        assert draft.is_chain and draft.probs is None


def test_each_answer_of_a_request_is_its_own():
    seqs = [sequence(seq_id=i, index=i % 2) for i in range(20)]
    for seq, draft in zip(seqs, drafter(1.0).propose(seqs, [2] * 20), strict=True):
        assert draft.token_ids == ANSWERS["request"][seq.index][: len(draft)]


@pytest.mark.parametrize("hit_rate", [0.0, 0.6])
def test_tokens_hit_as_often_as_asked(hit_rate):
    seqs = [sequence(seq_id=i) for i in range(2000)]
    drafts = drafter(hit_rate).propose(seqs, [1] * 2000)
    first = [draft.token_ids[0] for draft in drafts if draft.token_ids]
    expected = hit_rate + (1 - hit_rate) / VOCAB_SIZE
    assert first.count(ANSWER[0]) / len(first) == pytest.approx(expected, abs=0.06)


def test_trees_are_trees_whose_siblings_differ():
    seqs = [sequence(seq_id=i) for i in range(50)]
    drafts = drafter(0.7, trees=True).propose(seqs, [9] * 50)
    assert any(not draft.is_chain for draft in drafts)
    for draft in drafts:
        assert all(-1 <= parent < node for node, parent in enumerate(draft.parents))
        children = Counter(zip(draft.parents, draft.token_ids, strict=True))
        assert all(count == 1 for count in children.values())


@pytest.mark.parametrize("options", [{}, {"trees": True}, {"sampled": True}])
def test_drafts_are_a_function_of_the_sequence(options):
    seqs = [sequence(ANSWER[:i], seq_id=i) for i in range(8)]
    together = drafter(0.5, **options).propose(seqs, [5] * 8)
    alone = [drafter(0.5, **options).propose([seq], [5])[0] for seq in seqs]
    assert [draft.token_ids for draft in together] == [draft.token_ids for draft in alone]
    assert len({tuple(draft.token_ids) for draft in together}) > 1


def test_the_law_mixes_the_truth_with_what_followed_before():
    made = drafter(0.5, sampled=True)
    q = made.law("request", 0, [3])  # 3 is followed by 1 once, by 5 once; the truth is 1
    expected = torch.zeros(VOCAB_SIZE)
    expected[1], expected[5] = 0.75, 0.25
    assert torch.equal(q, expected)
    off_path = made.law("request", 0, [9, 3])
    assert off_path[1] == off_path[5] == 0.5


@pytest.mark.parametrize("answers", [ANSWERS, {}])
def test_every_law_is_one(answers):
    made = SyntheticDrafter(answers, VOCAB_SIZE, 0.3, sampled=True)
    for output in ([], [3], [8], ANSWER[:5], ANSWER, [0, 0]):
        q = made.law("request", 0, output)
        assert float(q.sum()) == pytest.approx(1, abs=1e-6)
        assert int((q > 0).sum()) >= 1


def test_samples_come_with_the_law_they_were_drawn_from():
    made = drafter(0.5, sampled=True)
    seqs = [sequence(seq_id=i, seed=i) for i in range(1500)]
    drafts = made.propose(seqs, [2] * 1500)
    counts = torch.zeros(VOCAB_SIZE)
    pairs: Counter[tuple[int, int]] = Counter()
    for draft in drafts:
        assert draft.is_chain
        for node in range(len(draft)):
            law = made.law("request", 0, draft.token_ids[:node])
            assert torch.equal(draft.probs[node], law)
            assert law[draft.token_ids[node]] > 0
        if draft.token_ids:
            counts[draft.token_ids[0]] += 1
        pairs.update(pairwise(draft.token_ids))
    assert g_test(counts, made.law("request", 0, [])).p_value > 1e-6
    first = ANSWER[0]
    seconds = torch.tensor([float(pairs[first, token]) for token in range(VOCAB_SIZE)])
    assert g_test(seconds, made.law("request", 0, [first])).p_value > 1e-6


def test_a_request_with_the_drafters_seed_draws_no_differently():
    """The size of a draft says nothing of its tokens, even where all keys are equal."""
    made = SyntheticDrafter({}, VOCAB_SIZE, 0.0, sampled=True, seed=4)
    long, short = torch.zeros(VOCAB_SIZE), torch.zeros(VOCAB_SIZE)
    for length in range(400):
        seq = sequence([0] * length, seed=4)
        draft = made.propose([seq], [2])[0]
        if draft.token_ids:
            (long if len(draft) == 2 else short)[draft.token_ids[0]] += 1
    law = made.law("request", 0, [0])
    for counts in (long, short):
        assert g_test(counts, law).p_value > 1e-6
