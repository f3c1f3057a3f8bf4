"""What a model is asked when it is on trial."""

import json
from collections.abc import Iterator
from pathlib import Path

from slipstream.core.errors import RequestError

# Short, since every answer is computed again for every token, and of many kinds.
PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tell me a short story about a lighthouse.",
    "List three fruits and a colour for each.",
    "Explain why the sky is blue to a child.",
    "Repeat the word banana five times, then stop.",
    "Translate into German: The train leaves at seven.",
    "What is 17 times 23? Think step by step.",
)


def read_prompts(path: str) -> list[str]:
    """Prompts of a file: one a line, or JSON lines with `prompt` or `turns` (the first counts).

    Raises:
        RequestError: a file that cannot be read or has no prompts, or a line that is neither.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read prompts from {path}: {error}") from error
    prompts = list(_prompts(path, text))
    if not prompts:
        raise RequestError(f"{path} has no prompts; write one a line")
    return prompts


def _prompts(path: str, text: str) -> Iterator[str]:
    is_json = text.lstrip().startswith("{")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        prompt = _from_json(line) if is_json else line
        if not isinstance(prompt, str) or not prompt:
            raise RequestError(f'{path}, line {number}: needs "prompt": TEXT or "turns": [TEXT]')
        yield prompt


def _from_json(line: str) -> object:
    """The prompt of one JSON line; None where there is none."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    turns = entry.get("turns")
    return entry.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
