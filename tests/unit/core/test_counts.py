"""Counting drafts: every figure a user sees comes from here."""

import pytest

from slipstream.core.counts import DraftCounts
from slipstream.core.draft import NO_DRAFT, Draft, Verdict

CHAIN = Draft([5, 6, 7], [-1, 0, 1])
TREE = Draft([5, 6, 7], [-1, -1, 1])


def test_figures():
    counts = DraftCounts()
    counts.add(CHAIN, Verdict([0, 1], 9), num_committed=3)
    counts.add(TREE, Verdict([1, 2], 9), num_committed=3)
    counts.add(CHAIN, Verdict([], 9), num_committed=1)
    counts.add(NO_DRAFT, Verdict([], 9), num_committed=1)
    assert counts.as_dict() == {
        "num_steps": 4,
        "num_tokens": 8,
        "num_spec_steps": 3,
        "num_draft_tokens": 9,
        "num_accepted_draft_tokens": 4,
        "num_predicted_tokens": 0,
        "num_accepted_predicted_tokens": 0,
        "acceptance_rate": pytest.approx(4 / 9),
        "mean_acceptance_length": 2.0,
        "acceptance_by_position": [2 / 3, 2 / 3, 0.0],
        "acceptance_histogram": [1, 0, 2],
        "draft_size_histogram": [1, 0, 0, 3],
    }


def test_tokens_past_a_stop_do_not_count():
    counts = DraftCounts()
    counts.add(CHAIN, Verdict([0, 1, 2], 9), num_committed=2)
    assert counts.num_accepted_draft_tokens == 2
    assert counts.num_tokens == 2


def test_nothing_yet():
    assert DraftCounts().acceptance_rate is None
    assert DraftCounts().mean_acceptance_length is None


def test_merging_is_adding():
    one, other, both = DraftCounts(), DraftCounts(), DraftCounts()
    for counts in (one, both):
        counts.add(CHAIN, Verdict([0], 9), num_committed=2)
    for counts in (other, both):
        counts.add(TREE, Verdict([1, 2], 9), num_committed=3)
    one.merge(other)
    assert one == both


def test_what_a_client_predicted_is_counted_apart() -> None:
    counts = DraftCounts()
    counts.add(Draft([1, 2, 3], [-1, 0, 1], is_predicted=True), Verdict([0, 1], 9), 3)
    counts.add(Draft([1, 2], [-1, 0]), Verdict([0, 1], 9), 3)
    assert (counts.num_predicted_tokens, counts.num_accepted_predicted_tokens) == (3, 2)
    assert (counts.num_draft_tokens, counts.num_accepted_draft_tokens) == (5, 4)
