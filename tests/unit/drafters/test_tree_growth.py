"""Trees that grow by what their nodes were found to be worth."""

import pytest
import torch

from slipstream.core.draft import NO_DRAFT
from slipstream.drafters.sampling import Candidates
from slipstream.drafters.tree_growth import Acceptance, Growth


def candidates(*leads, q=None, possible=None) -> Candidates:
    """One place's candidates 10, 11, ... with these leads."""
    tokens = [10 + rank for rank in range(len(leads))]
    return Candidates([tokens], [list(leads)], [possible or [True] * len(leads)], q)


def test_leads_are_believed_until_counted():
    acceptance = Acceptance(2)
    assert acceptance.chances([0.7, 0.2]) == pytest.approx([0.7, 0.2])
    for _ in range(200):
        acceptance.add(0, 0.7, is_accepted=False)
        acceptance.add(1, 0.2, is_accepted=False)
        acceptance.add(1, 0.45, is_accepted=True)
    first, second = acceptance.chances([0.7, 0.2])
    assert first < 0.05
    assert second < 0.01
    assert acceptance.chances([0.3, 0.45]) == pytest.approx([0.3, 0.3]), "rises with rank"


def test_old_trials_fade():
    acceptance = Acceptance(1)
    for is_accepted in [False] * 5000 + [True] * 2000:
        acceptance.add(0, 0.5, is_accepted=is_accepted)
    assert acceptance.chances([0.5])[0] > 0.95


def test_the_frontier_is_what_the_cut_may_keep():
    growth, acceptance = Growth(), Acceptance(3)
    growth.extend(-1, candidates(0.6, 0.3, 0.1), 0, acceptance)
    assert growth.frontier(0, 3, budget=2) == [0, 1]
    assert growth.frontier(0, 1, budget=2) == [0]
    growth.extend(0, candidates(0.9, 0.05, 0.05), 0, acceptance)  # .54 .03 .03
    assert growth.frontier(1, 3, budget=2) == [3]
    assert growth.frontier(0, 3, budget=2) == [0]
    draft = growth.draft(3)
    assert (draft.token_ids, draft.parents) == ([10, 11, 10], [-1, -1, 0])


def test_masks_speak_of_everything_fed():
    growth, acceptance = Growth(), Acceptance(2)
    growth.extend(-1, candidates(0.6, 0.4), 0, acceptance)
    mask = growth.feed([0, 1])
    assert mask is not None
    assert mask.tolist() == [[True, False], [False, True]]
    growth.extend(1, candidates(0.6, 0.4), 0, acceptance)
    mask = growth.feed([2])
    assert mask is not None
    assert mask.tolist() == [[False, True, True]]

    chain = Growth()
    chain.extend(-1, candidates(1.0), 0, Acceptance(1))
    assert chain.feed([0]) is None


def test_following_committed_tokens_teaches():
    growth, acceptance = Growth(), Acceptance(2)
    growth.extend(-1, candidates(0.6, 0.4), 0, acceptance)
    growth.extend(1, candidates(0.6, 0.4), 0, acceptance)
    before = acceptance.chances([0.6, 0.4])
    assert growth.follow([], acceptance) == []
    assert acceptance.chances([0.6, 0.4]) == before
    assert growth.follow([11, 10, 10], acceptance) == [1, 2]
    # Rank 0 failed and then held; rank 1 held and then failed.
    assert acceptance.chances([0.6, 0.4]) == pytest.approx([5.8 / 10, 4.2 / 10], abs=2e-3)
    assert growth.follow([9], acceptance) == []


def test_the_impossible_holds_its_place_only_where_q_is_asked_for():
    some = [True, False]
    for q, num_nodes in ((None, 1), (torch.ones(1, 20), 2)):
        growth, acceptance = Growth(), Acceptance(2)
        growth.extend(-1, candidates(0.6, 0.4, q=q, possible=some), 0, acceptance)
        assert len(growth.tokens) == num_nodes
        assert growth.draft(2).token_ids == [10]
    growth.extend(1, candidates(0.9, 0.1, q=q), 0, acceptance)
    assert growth.follow([0, 10], acceptance) == []
    assert growth.draft(4).token_ids == [10]
    assert Growth().draft(4) is NO_DRAFT
