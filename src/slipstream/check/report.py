"""What was checked, what was caught, and the verdict."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

PROVED, REFUTED, UNDERPOWERED = 0, 1, 3


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the code as it is.

    Attributes:
        name: what holds if it passed.
        detail: what was measured, in a line.
    """

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Planted:
    """A bug put in on purpose, and whether the check that claims to cover it failed.

    Attributes:
        by: name of that check.
    """

    name: str
    caught: bool
    by: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Reproducer:
    """The smallest case in which the output changed."""

    prompt: list[int]
    seed: int
    position: int
    expected: list[int]
    got: list[int]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts beside what they should be, for a plot."""

    name: str
    observed: list[int]
    expected: list[float]


@dataclass(slots=True)
class Report:
    """A whole proof or refutation.

    Attributes:
        title: what was on trial.
        settings: model, sampling parameters, versions and the like.
        checks: of the code as it is; all must pass.
        planted: bugs; all must be caught, or passing means nothing.
        cases, equal: level C, seeded requests compared and how many agreed to the end.
        first_divergence_margins: how far the specification is from the other token where streams
            parted, in units of logits; infinite where it excludes that token.
        detectable_tv, power: the smallest bias the samples would have shown, how surely.
        samples_needed: how many would be enough; None if there were enough.
        untested: why nothing was put to the test, whatever passed; None if something was.
        reproducer: of a refutation.
        histograms: for plots.
    """

    title: str
    settings: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    planted: list[Planted] = field(default_factory=list)
    cases: int | None = None
    equal: int | None = None
    first_divergence_margins: list[float] = field(default_factory=list)
    detectable_tv: float | None = None
    power: float | None = None
    samples_needed: int | None = None
    untested: str | None = None
    reproducer: Reproducer | None = None
    histograms: list[Histogram] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 proved, 1 refuted, 3 not enough power to say."""
        if not all(check.passed for check in self.checks):
            return REFUTED
        if self.untested is not None or self.samples_needed is not None:
            return UNDERPOWERED
        return PROVED if all(bug.caught for bug in self.planted) else REFUTED

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON, which has no infinity: null stands for it."""
        values = asdict(self)
        values["first_divergence_margins"] = [
            margin if math.isfinite(margin) else None for margin in self.first_divergence_margins
        ]
        return {"proved": self.exit_code == PROVED} | values
