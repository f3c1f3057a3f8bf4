"""Which drafted nodes a grammar lets stand."""

from collections.abc import Sequence as Seq

import torch

from slipstream.core.draft import Draft
from slipstream.core.grammar import permitted


class Rising:
    """Every token is larger than the one before."""

    def allowed(self, output: Seq[int]) -> torch.Tensor:
        return torch.arange(10) > (output[-1] if output else -1)

    def accepts(self, output: Seq[int], token: int) -> bool:
        return bool(self.allowed(output)[token])

    def fork(self) -> "Rising":
        return self


def test_a_chain_is_cut_at_the_first_forbidden_token() -> None:
    draft = Draft([3, 5, 4, 9], [-1, 0, 1, 2], is_predicted=True)
    assert permitted(draft, [1], Rising()) == Draft([3, 5], [-1, 0], is_predicted=True)
    assert permitted(draft, [3], Rising()) == Draft([], [], is_predicted=True)


def test_a_tree_loses_branches_and_is_renumbered() -> None:
    #   2 -> 1 x, 4 -> 6;   0 x -> 9;   3 -> 5
    draft = Draft([2, 0, 1, 4, 9, 6, 3, 5], [-1, -1, 0, 0, 1, 3, -1, 6])
    assert permitted(draft, [1], Rising()) == Draft([2, 4, 6, 3, 5], [-1, 0, 1, -1, 3])


def test_what_was_drawn_from_q_stays() -> None:
    draft = Draft([0], [-1], torch.ones(1, 10) / 10)
    assert permitted(draft, [5], Rising()) is draft
