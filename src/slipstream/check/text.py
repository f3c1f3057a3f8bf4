"""A report in words: for the terminal, the verdict first, then what it rests on."""

import shutil
import textwrap
from collections.abc import Sequence as Seq

from slipstream.check.report import PROVED, REFUTED, Report

Rows = Seq[tuple[str, str]]

_MAX_COLUMNS = 120


def verdict(report: Report) -> tuple[str, str]:
    """A word, and a sentence that says what it means."""
    failed = [check.name for check in report.checks if not check.passed]
    missed = [bug.name for bug in report.planted if not bug.caught]
    if report.exit_code == PROVED:
        rests_on = _count(len(report.checks), "check") + " passed"
        if report.planted:
            rests_on += f", {_count(len(report.planted), 'planted bug')} caught"
        return "PROVED", rests_on
    if report.exit_code == REFUTED and failed:
        return "REFUTED", f"does not hold: {'; '.join(failed)}"
    if report.exit_code == REFUTED:
        return "REFUTED", f"the checks pass, but would not see: {'; '.join(missed)}"
    if report.untested is not None:
        return "NOTHING TESTED", report.untested
    return (
        "NOT ENOUGH SAMPLES",
        f"nothing wrong was seen, but too little was looked at; use --samples "
        f"{report.samples_needed}",
    )


def settings(report: Report) -> Rows:
    """What was on trial, as names and values."""
    return [(name, str(value)) for name, value in report.settings.items()]


def power(report: Report) -> str | None:
    """What the samples would have shown, in a sentence."""
    if report.detectable_tv is None or report.power is None:
        return None
    return (
        f"A bias of {report.detectable_tv:.3g} in total variation would have been seen with "
        f"{report.power:.0%} certainty."
    )


def reproducer(report: Report) -> Rows:
    """The smallest case in which the output changed, as names and values; empty without one."""
    case = report.reproducer
    if case is None:
        return []
    return [
        ("prompt", str(case.prompt)),
        ("seed", str(case.seed)),
        ("position", str(case.position)),
        ("expected", str(case.expected)),
        ("got", str(case.got)),
    ]


def render(report: Report) -> str:
    """The whole report, as wide as the terminal."""
    columns = min(shutil.get_terminal_size((100, 24)).columns, _MAX_COLUMNS)
    word, sentence = verdict(report)
    checks = [("ok" if c.passed else "FAILED", c.name, c.detail) for c in report.checks]
    planted = [
        ("caught" if bug.caught else "MISSED", bug.name, f"by {bug.by}; {bug.detail}".rstrip("; "))
        for bug in report.planted
    ]
    lines = [f"{word}: {report.title}", *_wrapped(sentence, columns)]
    for heading, body in (
        ("Settings", _table(settings(report), columns)),
        ("Checks", _items(checks, columns)),
        ("Planted bugs", _items(planted, columns)),
        ("Power", _wrapped(power(report) or "", columns)),
        ("Smallest reproducer, in token ids", _table(reproducer(report), columns)),
    ):
        if body:
            lines += ["", heading, *body]
    return "\n".join(lines)


def _table(rows: Rows, columns: int) -> list[str]:
    """Names, and values in a column of their own."""
    width = max((len(name) for name, _ in rows), default=0) + 2
    return [line for name, value in rows for line in _wrapped(value, columns, f"{name:<{width}}")]


def _items(rows: Seq[tuple[str, str, str]], columns: int) -> list[str]:
    """A mark and a name, and details below."""
    width = max((len(mark) for mark, _, _ in rows), default=0) + 2
    lines = []
    for mark, name, detail in rows:
        lines += _wrapped(name, columns, f"{mark:<{width}}")
        lines += _wrapped(detail, columns, " " * width)
    return lines


def _wrapped(text: str, columns: int, first: str = "") -> list[str]:
    """Indented lines; `first` stands before the first and leaves its width free in the others."""
    margin = "  " + " " * len(first)
    return textwrap.wrap(text, columns, initial_indent="  " + first, subsequent_indent=margin)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
