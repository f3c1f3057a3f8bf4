"""Drafts: what is a chain, and what is left of a tree that may not be so deep."""

import pytest
import torch

from slipstream.core.draft import NO_DRAFT, Draft

#  0   1        depth 1
#  |\  |
#  2 3 4        depth 2
#  |
#  5            depth 3
TREE = [-1, -1, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("parents", "is_chain"),
    [
        ([], True),
        ([-1], True),
        ([-1, 0, 1], True),
        ([-1, -1], False),
        ([-1, 0, 0], False),
        (TREE, False),
    ],
)
def test_is_chain(parents: list[int], is_chain: bool) -> None:
    draft = Draft(list(range(len(parents))), parents)
    assert draft.is_chain is is_chain
    assert len(draft) == len(parents)


@pytest.mark.parametrize(
    ("parents", "max_depth", "kept", "clipped"),
    [
        (TREE, 0, [], []),
        (TREE, 1, [0, 1], [-1, -1]),
        (TREE, 2, [0, 1, 2, 3, 4], [-1, -1, 0, 0, 1]),
        (TREE, 3, [0, 1, 2, 3, 4, 5], TREE),
        (TREE, 99, [0, 1, 2, 3, 4, 5], TREE),
        ([-1, 0, 1, 2], 2, [0, 1], [-1, 0]),
        ([-1, 0, 1, -1, 3], 2, [0, 1, 3, 4], [-1, 0, -1, 2]),  # depth first: numbers close up
        ([-1, -1, -1], 1, [0, 1, 2], [-1, -1, -1]),  # more nodes than levels
        ([], 0, [], []),
    ],
)
def test_clipped(parents: list[int], max_depth: int, kept: list[int], clipped: list[int]) -> None:
    tokens = [10 + node for node in range(len(parents))]
    probs = torch.arange(2.0 * len(parents)).view(-1, 2)
    draft = Draft(tokens, parents, probs).clipped(max_depth)
    assert draft.token_ids == [10 + node for node in kept]
    assert draft.parents == clipped
    assert draft.probs is not None
    assert torch.equal(draft.probs, probs[kept])
    assert Draft(tokens, parents).clipped(max_depth).probs is None


def test_no_draft_is_empty() -> None:
    assert len(NO_DRAFT) == 0
    assert NO_DRAFT.is_chain
    assert NO_DRAFT.clipped(0) is NO_DRAFT
