"""The facts that make a measurement comparable and repeatable; null where they are unknown."""

import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream import __version__, native


def circumstances(argv: Sequence[str]) -> dict[str, Any]:
    """Machine, versions and command of a measurement."""
    return {
        "argv": list(argv),
        "cpu": _cpu_name(),
        "threads": native.num_threads(),
        "slipstream": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu_name() -> str | None:
    """The processor's name for people."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or None


def _commit() -> str | None:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        here = Path(__file__).parent
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
