"""How much to draft for each sequence of a step: the protocol, and the two simple answers.

`engine.auto` has the one that measures and decides.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from slipstream.core.errors import ConfigError
from slipstream.engine.scheduler import Plan

if TYPE_CHECKING:
    from slipstream.engine.step import StepResult


@dataclass(slots=True)
class Reasons:
    """Why steps drafted what they did.

    Attributes:
        last: of the latest step, in words and numbers.
        counts: steps by kind of reason: "draft", "probing", "off: ...".
    """

    last: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    _kind: str = ""

    def give(self, kind: str, words: str | None = None) -> None:
        """State the reason of a step; `words` where it has more to say than its kind."""
        self.counts[kind] += 1
        self.last = words or kind
        self._kind = kind

    def correct(self, kind: str) -> None:
        """Replace the reason just given: the step went otherwise."""
        self.counts[self._kind] -= 1
        self.give(kind)


class Controller(Protocol):
    """Chooses draft sizes and learns from what became of them."""

    reasons: Reasons

    def budgets(self, plan: Plan) -> list[int]:
        """Drafted tokens allowed for each planned sequence.

        Those of sequences that the pass does not compute to their end are not looked at.
        """

    def observe(self, result: "StepResult") -> None:
        """Learn from a step, before its tokens are committed."""

    def forget(self, seq_id: int) -> None:
        """A sequence finished or was aborted."""


class FixedController:
    """The same draft size always. 0 is plain decoding."""

    def __init__(self, num_tokens: int = 0):
        self.num_tokens = num_tokens
        self.reasons = Reasons()

    def budgets(self, plan: Plan) -> list[int]:
        if self.num_tokens:
            self.reasons.give("draft", f"draft {self.num_tokens}: fixed")
        else:
            self.reasons.give("off: fixed at 0")
        return [self.num_tokens] * len(plan.seqs)

    def observe(self, result: "StepResult") -> None:
        pass

    def forget(self, seq_id: int) -> None:
        pass


class TableController:
    """Draft size by batch size.

    Args:
        rows: first batch size, last batch size (None for no end), drafted tokens; ascending.
            Batch sizes in no row draft nothing.

    Raises:
        ConfigError: rows that overlap or make no sense.
    """

    def __init__(self, rows: Seq[tuple[int, int | None, int]]):
        end: int | None = 0
        for first, last, num_tokens in rows:
            follows = end is not None and first > end
            if not follows or (last is not None and last < first) or num_tokens < 0:
                raise ConfigError(
                    f"[{first}, {last}, {num_tokens}] cannot stand in a table of draft sizes; rows "
                    "are [first batch size, last, tokens], ascending and without overlap"
                )
            end = last
        self.rows = tuple(rows)
        self.reasons = Reasons()

    def budgets(self, plan: Plan) -> list[int]:
        batch = sum(map(plan.reaches_end, range(len(plan.seqs))))
        num_tokens = self._num_tokens(batch)
        if num_tokens:
            self.reasons.give("draft", f"draft {num_tokens}: batch {batch} in the table")
        else:
            self.reasons.give("off: by the table", f"off: batch {batch} in the table")
        return [num_tokens] * len(plan.seqs)

    def observe(self, result: "StepResult") -> None:
        pass

    def forget(self, seq_id: int) -> None:
        pass

    def _num_tokens(self, batch: int) -> int:
        for first, last, num_tokens in self.rows:
            if first <= batch and (last is None or batch <= last):
                return num_tokens
        return 0
