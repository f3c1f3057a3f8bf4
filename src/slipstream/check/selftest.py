"""`slipstream prove --self-test`: is this build lossless, and would we know if it were not?"""

from collections.abc import Callable

import torch

from slipstream import __version__
from slipstream.check import engine, planted, rules
from slipstream.check.report import Report


def run_self_test(progress: Callable[[str, int, int], None] | None = None) -> Report:
    """Levels A and B, and every planted bug. No weights.

    Args:
        progress: called with what comes next, how much is done, and how much there is.
    """
    report = Report(
        "Slipstream self-test",
        settings={"slipstream": __version__, "torch": torch.__version__},
    )
    checks = [*rules.CHECKS, *engine.CHECKS]
    total = len(checks) + len(planted.BUGS)
    for done, check in enumerate(checks):
        if progress:
            progress("checks", done, total)
        report.checks.append(check())
    for done, bug in enumerate(planted.BUGS, start=len(checks)):
        if progress:
            progress(f"planted: {bug.name}", done, total)
        report.planted.append(planted.trial(bug))
    if progress:
        progress("done", total, total)
    return report
