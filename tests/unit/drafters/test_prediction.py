"""Drafts from a client's prediction: followed, left, and found again."""

from collections.abc import Sequence as Seq

import pytest

from sequences import sequence
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.drafters.base import NoDrafter
from slipstream.drafters.prediction import PredictionDrafter

PREDICTION = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


class Fallback(NoDrafter):
    """Drafts one token that tells who drafted."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [Draft([99], [-1]) if budget else Draft() for budget in budgets]


def drafted(outputs: list[list[int]], prediction: list[int], budget: int = 3) -> list[list[int]]:
    """What one sequence is drafted as its output takes these values in turn."""
    drafter, seq = PredictionDrafter(Fallback()), sequence([8, 8], num_prompt=2)
    seq.prediction = prediction
    found = []
    for output in outputs:
        seq.tokens[seq.num_prompt :] = output
        (draft,) = drafter.propose([seq], [budget])
        assert draft.is_predicted == (draft.token_ids not in ([99], []))
        found.append(draft.token_ids)
    return found


def test_it_begins_before_anything_is_said() -> None:
    assert drafted([[]], PREDICTION) == [[10, 11, 12]]


def test_it_is_followed_to_its_end_and_then_left_to_others() -> None:
    outputs = [PREDICTION[:n] for n in (1, 4, 8, 10)]
    assert drafted(outputs, PREDICTION) == [[11, 12, 13], [14, 15, 16], [18, 19], [99]]


def test_an_edit_is_left_to_others_until_the_texts_meet_again() -> None:
    outputs = [[10, 11, 50], [10, 11, 50, 51], [10, 11, 50, 51, 14], [10, 11, 50, 51, 14, 15]]
    assert drafted(outputs, PREDICTION) == [[99], [99], [99], [16, 17, 18]]


def test_of_equal_places_the_nearest_is_taken() -> None:
    prediction = [1, 2, 3, 7, 7, 1, 2, 3, 8, 8, 1, 2, 3, 9, 9]
    # The second of three equal stretches, reached in order and after an edit just before it.
    outputs = [[], [1, 2, 3], [1, 2, 3, 7, 7], [1, 2, 3, 7, 7, 5, 2, 3]]
    assert drafted(outputs, prediction, budget=2) == [[1, 2], [7, 7], [1, 2], [8, 8]]


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_the_budget_is_kept(budget: int) -> None:
    assert drafted([[]], PREDICTION, budget) == [PREDICTION[:budget]]


def test_a_request_without_a_prediction_is_left_to_others() -> None:
    assert drafted([[], [1]], []) == [[99], [99]]
