"""What the target made of its texts, computed once and kept on disk in bfloat16.

Heads start from hidden states, and are taught by the logits these lead to. They come back from
the disk as needed: a million tokens of SmolLM2-135M are a gigabyte. Final states, `hidden`, and
those that enter a tapped layer, `tap.{layer}`, have folders of their own, so that heads which read
different ones share the others.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from slipstream.kv.blocks import BlockManager
from slipstream.kv.cache import KVCache
from slipstream.models import CausalLM
from slipstream.models.batch import Span, lay_out
from slipstream.models.runner import ModelRunner
from slipstream.train.texts import Texts, write_whole

_BLOCK_SIZE = 16
_PASS_TOKENS = 2048  # about so many in a pass


def write_states(
    shards: Sequence[Path],
    folder: Path,
    model: CausalLM,
    taps: Sequence[int] = (),
    progress: Callable[[int], None] = lambda num_texts: None,
) -> dict[str, list[Path]]:
    """Run the target over texts; what is there already is left as it is.

    Args:
        shards: of texts.
        folder: where the states go, each kind in a folder of files named as the shards.
        taps: layers whose input is kept as well.
        progress: called with how many texts are done.

    Returns:
        The files of each kind, in the order of the shards.
    """
    done = 0
    written: dict[str, list[Path]] = {
        name: [folder / name / shard.name for shard in shards]
        for name in ("hidden", *map(tap_name, taps))
    }
    for index, shard in enumerate(shards):
        texts = Texts.read(shard)
        missing = [name for name, files in written.items() if not files[index].exists()]
        if missing:
            states = _states(texts, model, taps)
            for name in missing:
                write_whole({name: states[name]}, written[name][index])
        done += len(texts.num_prompt)
        progress(done)
    return written


def tap_name(layer: int) -> str:
    return f"tap.{layer}"


def _states(texts: Texts, model: CausalLM, taps: Sequence[int]) -> dict[str, Tensor]:
    """Every kind of state, [N, hidden] in bfloat16."""
    starts = texts.starts.tolist()
    longest = max(stop - start for start, stop in pairwise(starts))
    num_blocks = 2 * -(-(longest + _PASS_TOKENS) // _BLOCK_SIZE)
    num_blocks += _PASS_TOKENS  # many short texts end in blocks that are nearly empty
    blocks = BlockManager(num_blocks, _BLOCK_SIZE, prefix_caching=False)
    cache = KVCache.for_model(
        model.config,
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        dtype=torch.float16 if model.is_packed else model.dtype,
        device=model.device,
    )
    runner = ModelRunner(model, cache, taps)
    kept: dict[str, list[Tensor]] = {}
    group: list[int] = []
    for index in range(len(starts) - 1):
        group.append(index)
        is_last = index == len(starts) - 2
        if is_last or starts[index + 2] - starts[group[0]] > _PASS_TOKENS:
            output = runner.forward(_batch(texts, group, blocks, model.device))
            named = {"hidden": output.hidden} | {tap_name(k): x for k, x in output.taps.items()}
            for name, states in named.items():
                kept.setdefault(name, []).append(states.bfloat16().cpu())
            for seq_id in group:
                blocks.free(seq_id)
            group = []
    return {name: torch.cat(states) for name, states in kept.items()}


def _batch(texts: Texts, group: Sequence[int], blocks: BlockManager, device: torch.device):
    """Some whole texts as a pass without logits."""
    spans = []
    for index in group:
        first, stop = int(texts.starts[index]), int(texts.starts[index + 1])
        tokens = texts.tokens[first:stop].tolist()
        blocks.allocate(index, tokens)
        blocks.reserve(index, 0, len(tokens))
        spans.append(Span(index, 0, tokens, range(len(tokens)), num_logits=0))
    return lay_out(spans, blocks, device)
