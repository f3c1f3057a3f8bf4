"""Files of one JSON object a line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from slipstream.core.errors import ConfigError

T = TypeVar("T")
_MALFORMED = (ValueError, KeyError, IndexError, TypeError, AttributeError, StopIteration)


def read_jsonl(path: Path, parse: Callable[[dict[str, Any]], T], expected: str) -> list[T]:
    """What `parse` makes of each line that is not blank.

    Args:
        parse: fails with a lookup, type or value error where it is not given what it wants.
        expected: what that is, for people.

    Raises:
        ConfigError: a line is not JSON, or `parse` failed on it.
    """
    parsed = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            parsed.append(parse(json.loads(line)))
        except _MALFORMED:
            raise ConfigError(f"{path}, line {number}: expected {expected}") from None
    return parsed
