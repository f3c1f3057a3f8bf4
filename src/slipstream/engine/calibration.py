"""Measuring a target step at load, and remembering the result on disk.

One sequence that verifies a chain stands for every batch of so many rows: streaming the weights
does not depend on whose rows they are. What does depend is corrected while serving.
"""

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from slipstream import native
from slipstream.engine.costs import CostTable
from slipstream.kv.blocks import BlockManager
from slipstream.models.batch import Span, lay_out
from slipstream.models.runner import ModelRunner

# Passes in order of what they tell, coarse to fine: (rows, whether over a long context). Slow
# models get through the first few only, and the rest is read between those.
SIZES = (
    *((rows, False) for rows in (1, 8, 64, 2, 16, 4, 32)),
    *((rows, True) for rows in (1, 16)),
    *((rows, False) for rows in (128, 3, 6, 12, 24, 48, 96)),
)
# The first few are timed twice in any case: everything else leans on them.
NUM_COARSE = 3
SHORT_CONTEXT, LONG_CONTEXT = 16, 1024
MAX_SEC = 2.0
MAX_ROUNDS = 5


def calibrated(runner: ModelRunner, folder: Path) -> CostTable:
    """The cost table of a runner on this machine: from disk, else measured and put there.

    A file that cannot be read or written is no reason not to run; it is measured again then.

    Args:
        runner: its cache must not be in use yet; what it holds is overwritten.
        folder: where tables are kept.
    """
    key = cache_key(runner)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    path = folder / f"{name}.json"
    table = read_table(path, key)
    if table is None:
        table = measure(runner)
        write_table(path, key, table)
    return table


def cache_key(runner: ModelRunner) -> dict[str, Any]:
    """Everything a step's time depends on: equal keys, equal times."""
    device = runner.device
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        machine = f"{_cpu_name()}, {os.cpu_count()} cores"
    return {
        "model": repr(runner.model.config),
        "weight_bytes": runner.model.weight_bytes,
        "dtype": runner.model.kind,
        "kernels": [native.describe(), native.digest()],
        "device": device.type,
        "machine": machine,
        "threads": native.num_threads(),
        "versions": [version("slipstream"), torch.__version__],
        "sizes": [list(size) for size in SIZES],
    }


def read_table(path: Path, key: dict[str, Any]) -> CostTable | None:
    """The table in a file, or None where there is none, or none that makes sense."""
    try:
        content = json.loads(path.read_text())
        table = content["table"]
        read = CostTable(
            rows=tuple(int(rows) for rows in table["rows"]),
            sec=tuple(float(sec) for sec in table["sec"]),
            sec_per_key=float(table["sec_per_key"]),
            sec_per_pair=float(table["sec_per_pair"]),
        )
        is_sound = (
            content["key"] == key
            and len(read.rows) == len(read.sec) > 0
            and all(few < many for few, many in pairwise(read.rows))
            and all(few <= many for few, many in pairwise(read.sec))
            and all(0 < sec < math.inf for sec in read.sec)
            and all(0 <= sec < math.inf for sec in (read.sec_per_key, read.sec_per_pair))
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return read if is_sound else None


def write_table(path: Path, key: dict[str, Any], table: CostTable) -> None:
    """Put a table on disk, whole or not at all; a disk that refuses is let be."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"key": key, "table": asdict(table)}, indent=1))
        partial.replace(path)
    except OSError:
        return


def measure(runner: ModelRunner, clock: Callable[[], float] = time.perf_counter) -> CostTable:
    """Time passes of every size in rounds for about `MAX_SEC`, and keep the fastest of each.

    Interruptions only ever add time, so the fastest is the best estimate, and no pass can really
    take longer than one of more rows. Pools too small for the larger passes leave those out.
    """
    num_blocks, block_size = runner.cache.pool.shape[2:4]
    room = min(num_blocks * block_size, runner.model.config.context_length)
    short, long = min(SHORT_CONTEXT, room - 1), min(LONG_CONTEXT, room // 2)
    sizes = [(rows, long if is_long else short) for rows, is_long in SIZES]
    sizes = [size for size in sizes if sum(size) <= room]
    blocks = BlockManager(num_blocks, block_size, prefix_caching=False)
    blocks.allocate(0, [])
    blocks.reserve(0, 0, max(map(sum, sizes)))

    _pass(runner, blocks, *sizes[0])  # not timed: it sets up kernels and caches
    best: dict[tuple[int, int], float] = {}
    began = clock()
    coarse = sizes[:NUM_COARSE]
    for turn, size in enumerate(coarse + sizes * MAX_ROUNDS):
        start = clock()
        if turn >= 2 * len(coarse) and start - began > MAX_SEC:
            break
        _pass(runner, blocks, *size)
        best[size] = min(best.get(size, math.inf), clock() - start)

    rows = sorted(rows for rows, context in best if context == short)
    sec = [best[n, short] for n in rows]
    sec = [min(sec[i:]) for i in range(len(sec))]
    per_key, per_pair = _attention(best, short, long)
    return CostTable(tuple(rows), tuple(sec), per_key, per_pair)


def _pass(runner: ModelRunner, blocks: BlockManager, num_rows: int, context: int) -> None:
    positions = range(context, context + num_rows)
    span = Span(0, context, [0] * num_rows, positions, num_logits=num_rows)
    target = runner.forward(lay_out([span], blocks, runner.device))
    torch.isfinite(target.logits.amax(-1)).tolist()  # a step reads this too, which waits for it


def _attention(best: dict[tuple[int, int], float], short: int, long: int) -> tuple[float, float]:
    """Seconds per key read and per (row, key): the line through what context added, by rows."""
    added = {
        rows: (best[rows, long] - best[rows, short]) / (long - short)
        for rows, context in best
        if context == long > short and (rows, short) in best
    }
    if len(added) < 2:
        return 0.0, 0.0
    few, many = min(added), max(added)
    per_pair = max((added[many] - added[few]) / (many - few), 0.0)
    return max(added[few] - few * per_pair, 0.0), per_pair


def _cpu_name() -> str:
    """The processor's marketing name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
