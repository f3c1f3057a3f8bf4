"""How much to draft for each sequence of a step."""

from collections.abc import Sequence as Seq
from typing import Protocol

from slipstream.core.draft import Verdict
from slipstream.core.sequence import Sequence


class Controller(Protocol):
    """Chooses draft lengths and learns from what became of them."""

    def budgets(self, seqs: Seq[Sequence]) -> list[int]:
        """Drafted tokens allowed for each sequence."""

    def observe(self, seqs: Seq[Sequence], verdicts: Seq[Verdict | None]) -> None:
        """Learn from a step."""


class FixedController:
    """The same draft length always. 0 is plain decoding."""

    def __init__(self, num_tokens: int = 0):
        self.num_tokens = num_tokens

    def budgets(self, seqs: Seq[Sequence]) -> list[int]:
        return [self.num_tokens] * len(seqs)

    def observe(self, seqs: Seq[Sequence], verdicts: Seq[Verdict | None]) -> None:
        pass
