"""Fewer bits for matrices that a checkpoint stores as floats. Another model, and only on request.

Rows are cut into groups of 32, each with a scale, and a minimum where there are 4 bits: the types
Q8_0 and Q4_1 of GGUF, whose package does the rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.kernels.packed import GROUP, Format, RowBytes, StoredRows
from slipstream.loading.weights import StoredTensor

KINDS = {"int8": Format.Q8_0, "int4": Format.Q4_1}


def quantized(tensors: Mapping[str, StoredTensor], name: str) -> dict[str, StoredTensor]:
    """The same tensors, float matrices among them as `name` says.

    Raises:
        ConfigError: an unknown name, or nothing left to quantise.
    """
    if name not in KINDS:
        raise ConfigError(f"quantize must be one of {', '.join(KINDS)}, not {name!r}")
    coarse = {
        key: _coarser(tensor, KINDS[name])
        for key, tensor in tensors.items()
        if len(tensor.shape) == 2
        and tensor.kind in Format.__members__
        and Format[tensor.kind].is_float
        and tensor.shape[1] % GROUP == 0
    }
    if not coarse:
        raise ConfigError(
            f"--quantize {name} is for checkpoints of float weights; this one is quantised already"
        )
    return {**tensors, **coarse}


def _coarser(tensor: StoredTensor, kind: Format) -> StoredTensor:
    fine, coarse = GGMLQuantizationType[tensor.kind], GGMLQuantizationType[kind.name]

    def read() -> Tensor:
        blocks = gguf.quants.quantize(tensor.read().float().numpy(), coarse)
        return torch.from_numpy(gguf.quants.dequantize(blocks, coarse))

    def rows() -> StoredRows:
        assert tensor.rows is not None, "matrices of floats have rows"
        stored = tensor.rows()
        return StoredRows(_CoarseRows(stored.blocks, fine, coarse), stored.order)

    return StoredTensor(tensor.shape, kind.name, read, rows)


@dataclass(frozen=True, slots=True)
class _CoarseRows:
    """Rows of floats, quantised when a slice of them is asked for."""

    floats: RowBytes
    fine: GGMLQuantizationType
    coarse: GGMLQuantizationType

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        dense = gguf.quants.dequantize(self.floats[rows], self.fine)
        return gguf.quants.quantize(dense, self.coarse)
