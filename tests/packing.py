"""Packed weights for tests: random blocks of every format, whole models of them, and runs.

What blocks stand for is gguf's word, never ours.
"""

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from slipstream.check.tiny import tiny_config
from slipstream.core.config import ModelConfig
from slipstream.kernels.packed import (
    Format,
    PackedPart,
    PackedWeight,
    StoredPart,
    StoredRows,
    pack_all,
)
from slipstream.loading.weights import StoredTensor, load_model, parameter_slots
from slipstream.models import CausalLM, build

# Bytes of a block; where its f16 scale is (and its f16 minimum, right behind); and the scale that
# gives random codes unit variance with, for a minimum, a mean near zero.
_K_BLOCKS = {
    Format.Q4_K: (144, 0, 1 / 200, 7.5),
    Format.Q5_K: (176, 0, 1 / 400, 15.5),
    Format.Q6_K: (210, 208, 1 / 1400, None),
}

NO_MASKS = np.empty(0, np.uint8)


def random_blocks(
    format: Format, num_rows: int, num_columns: int, *, std: float = 1.0, seed: int = 0
) -> np.ndarray:
    """Rows of about that standard deviation as a GGUF file holds them, [rows, bytes] uint8."""
    numbers = np.random.default_rng(seed)
    if format not in _K_BLOCKS:  # gguf can quantise to the others
        dense = std * numbers.standard_normal((num_rows, num_columns)).astype(np.float32)
        blocks = gguf.quants.quantize(dense, _gguf_type(format))
        return np.ascontiguousarray(blocks).view(np.uint8).reshape(num_rows, -1)
    size, start, unit, minimum = _K_BLOCKS[format]
    count = num_rows * num_columns // 256
    blocks = numbers.integers(0, 256, (count, size)).astype(np.uint8)
    scale = (std * unit * numbers.uniform(0.5, 1.5, (count, 1))).astype(np.float16)
    blocks[:, start : start + 2] = scale.view(np.uint8)
    if minimum is not None:
        blocks[:, 2:4] = (scale * np.float16(minimum)).view(np.uint8)
    return blocks.reshape(num_rows, -1)


def dense(format: Format, blocks: np.ndarray) -> Tensor:
    """What blocks stand for: [rows, columns] float32."""
    return torch.from_numpy(np.array(gguf.quants.dequantize(blocks, _gguf_type(format)))).float()


def _gguf_type(format: Format) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[format.name]


def packed_part(
    format: Format, blocks: np.ndarray, num_columns: int, order: np.ndarray | None = None
) -> PackedPart:
    stored = StoredPart(format, (len(blocks), num_columns), lambda: StoredRows(blocks, order))
    (part,), (fill,) = pack_all([stored])
    fill()
    return part


def random_weight(
    formats: Sequence[Format], rows: Sequence[int], num_columns: int, *, seed: int = 0
) -> PackedWeight:
    """Parts stacked, whose products with unit activations have unit variance."""
    parts = [
        packed_part(
            format,
            random_blocks(format, count, num_columns, std=num_columns**-0.5, seed=seed + i),
            num_columns,
        )
        for i, (format, count) in enumerate(zip(formats, rows, strict=True))
    ]
    return PackedWeight(parts, num_columns)


def run(program: Any, hidden: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """A program that begins with rows of floats, without attention; its outputs."""
    outputs = [torch.empty(len(hidden), width) for width in widths]
    run_into(program, hidden, outputs)
    return outputs


def run_into(
    program: Any, hidden: Tensor, outputs: Sequence[Tensor], picked: Sequence[int] = ()
) -> None:
    """The same, with the rows that `pick` keeps."""
    program.run(
        rows=len(hidden),
        hidden=hidden,
        outputs=list(outputs),
        positions=list(range(len(hidden))),
        picked=picked,
    )


# Of a model's matrices, by the end of their names; K types where 256 columns are.
INTEGERS = {
    "embed_tokens": Format.Q5_0,
    "lm_head": Format.Q8_0,
    "q_proj": Format.Q4_0,
    "k_proj": Format.Q4_1,
    "v_proj": Format.Q8_0,
    "o_proj": Format.Q5_1,
    "gate_proj": Format.Q4_0,
    "up_proj": Format.Q4_0,
    "down_proj": Format.Q6_K,
}
K_TYPES = {name: (Format.Q4_K, Format.Q5_K, Format.Q6_K)[i % 3] for i, name in enumerate(INTEGERS)}
FLOATS = {name: (Format.F32, Format.F16, Format.BF16)[i % 3] for i, name in enumerate(INTEGERS)}


def packed_model(
    model_type: str = "llama", kinds: Mapping[str, Format] = INTEGERS, **changes: Any
) -> CausalLM:
    """A tiny model with random weights, packed; its answers depend on all of the prompt."""
    shape = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 32, "num_layers": 2}
    config = tiny_config(model_type, **(shape | changes))
    return load_model(config, _checkpoint(config, kinds), dtype=None)


def _checkpoint(config: ModelConfig, kinds: Mapping[str, Format]) -> dict[str, StoredTensor]:
    tensors = {}
    with torch.device("meta"):
        slots = list(parameter_slots(build(config)))
    for name, slot in slots:
        seed = zlib.crc32(name.encode())
        if slot.dim() == 2:
            format = kinds[name.split(".")[-2]]
            rows, columns = slot.shape
            # As in `tiny_model`: attention must outweigh a token's own embedding.
            is_table = "embed_tokens" in name or "lm_head" in name
            std = 1.0 if is_table else 2.5 * columns**-0.5
            blocks = random_blocks(format, rows, columns, std=std, seed=seed)
            tensors[name] = StoredTensor(
                (rows, columns),
                format.name,
                partial(dense, format, blocks),
                partial(StoredRows, blocks),
            )
        else:
            numbers = torch.Generator().manual_seed(seed)
            vector = 0.1 * torch.randn(slot.shape, generator=numbers) + ("norm" in name)
            tensors[name] = StoredTensor(tuple(slot.shape), "F32", lambda vector=vector: vector)
    return tensors
