"""Predicted outputs: the text a client expects, as a draft.

Around the drafter of the engine: while an answer follows its prediction, that is drafted, and
where it has left it the other drafter is asked. After an edit the two meet again, and the last
tokens of the answer, looked up in the prediction, say where.

    prediction   a b c d e f g h
    answer       a b X Y e f          -> g h
                 at the start nothing is known but the start itself

A prediction is one request's own and reaches no other.
"""

from collections.abc import Sequence as Seq

from slipstream.core.draft import NO_DRAFT, Draft, Verdict
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOutput
from slipstream.drafters.base import Drafter
from slipstream.drafters.suffix import SuffixIndex
from slipstream.maths.trees import chain

# Before both texts stand two tokens that no text has: so their beginnings match like any place.
_START = [-2, -1]
# Shorter matches are chance, and longer ones say nothing more.
_SHORTEST, _LONGEST = len(_START), 24


class _Follower:
    """One answer's place in its prediction."""

    def __init__(self, prediction: list[int]):
        self._index = SuffixIndex()
        self._index.add([*_START, *prediction])
        self._index.catch_up()
        self._end = 0  # where the answer went on in the prediction, when it was asked last
        self._num_output = 0

    def continuation(self, output: list[int], length: int) -> list[int]:
        """What the prediction goes on with behind `output`; nothing where the two have parted.

        Of equally long matches the one nearest to where the answer should be by now.
        """
        expected = self._end + len(output) - self._num_output
        found = self._index.matches([*_START, *output], _LONGEST)
        found = [match for match in found if match.length >= _SHORTEST]
        if not found:
            return []
        best = max(found, key=lambda match: (match.length, -abs(match.end - expected)))
        self._end, self._num_output = best.end, len(output)
        return best.text[best.end : best.end + length]


class PredictionDrafter:
    """Drafts from predictions, and leaves the rest to another drafter.

    Args:
        drafter: for requests without a prediction, and where an answer has left its own.
    """

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.taps: Seq[int] = drafter.taps
        self._followers: dict[int, _Follower] = {}

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        predicted = [
            self._predict(seq, budget) if budget and seq.prediction else NO_DRAFT
            for seq, budget in zip(seqs, budgets, strict=True)
        ]
        left = [
            0 if draft.token_ids else budget
            for draft, budget in zip(predicted, budgets, strict=True)
        ]
        others = self.drafter.propose(seqs, left)
        return [
            draft if draft.token_ids else other
            for draft, other in zip(predicted, others, strict=True)
        ]

    def observe(
        self, seqs: Seq[Sequence], target: TargetOutput, verdicts: Seq[Verdict | None]
    ) -> None:
        self.drafter.observe(seqs, target, verdicts)

    def forget(self, seq_id: int) -> None:
        self._followers.pop(seq_id, None)
        self.drafter.forget(seq_id)

    def _predict(self, seq: Sequence, budget: int) -> Draft:
        follower = self._followers.get(seq.seq_id)
        if follower is None:
            follower = self._followers[seq.seq_id] = _Follower(seq.prediction)
        tokens = follower.continuation(seq.output, budget)
        return Draft(tokens, chain(len(tokens)), is_predicted=True)
