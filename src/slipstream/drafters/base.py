"""What a drafter is to the engine.

A new drafter is one file beside this one. It may guess however it likes: the verifier decides, so
a bad drafter costs time and never changes a token.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

from slipstream.core.draft import NO_DRAFT, Draft, Verdict
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOutput


class Drafter(Protocol):
    """Guesses continuations of sequences.

    Attributes:
        taps: target layers whose incoming residual stream `observe` wants to see.
    """

    taps: Seq[int]

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """One draft per sequence, of at most that many nodes; fewer or none is always fine."""

    def observe(
        self, seqs: Seq[Sequence], target: TargetOutput, verdicts: Seq[Verdict | None]
    ) -> None:
        """Learn from a target pass, prompt chunks included.

        Called before the verdicts are committed. A verdict is None where the pass did not reach
        the end of the committed tokens.
        """

    def forget(self, seq_id: int) -> None:
        """A sequence finished, was aborted, or lost its K/V to preemption."""


class NoDrafter:
    """Drafts nothing; plain decoding is speculation with empty drafts."""

    taps: Seq[int] = ()

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [NO_DRAFT] * len(seqs)

    def observe(
        self, seqs: Seq[Sequence], target: TargetOutput, verdicts: Seq[Verdict | None]
    ) -> None:
        pass

    def forget(self, seq_id: int) -> None:
        pass
