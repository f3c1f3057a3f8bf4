"""Weights in the types of their checkpoint, packed for the native kernels, and what they mean.

A packed weight stands for exactly the numbers its checkpoint holds. Where those are integers with
a scale per group, a product rounds the activations to 8 bits as well: in groups of 32 columns,
each to 127 times its largest magnitude. `linear` here is that definition in torch; the native
kernels differ from it by the order of float additions alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import native

GROUP = 32
_ROWS_PER_CHUNK = 4096
# Read and packed at a time: whole tiles, few enough to be small beside any model.
_ROWS_PER_READ = 128


class Format(IntEnum):
    """How numbers are stored; names are those of GGUF, the order is the kernels'."""

    Q4_0 = 0
    Q4_1 = 1
    Q5_0 = 2
    Q5_1 = 3
    Q8_0 = 4
    Q4_K = 5
    Q5_K = 6
    Q6_K = 7
    F32 = 8
    F16 = 9
    BF16 = 10

    @property
    def is_float(self) -> bool:
        return self >= Format.F32

    @property
    def columns(self) -> int:
        """A row's columns are a multiple of this."""
        return 256 if Format.Q4_K <= self <= Format.Q6_K else GROUP


class RowBytes(Protocol):
    """[rows, bytes of a row] uint8: an array, or what makes one of the rows that are asked for."""

    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A matrix as its checkpoint stores it.

    Attributes:
        blocks: [rows, bytes of a row] uint8; a few rows are asked for at a time.
        order: which stored row each row of the matrix is, int64; None is the stored order.
    """

    blocks: RowBytes
    order: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PackedPart:
    """Some output rows of a matrix, all in one format.

    Attributes:
        data: [bytes] uint8, in tiles of 16 rows; `csrc/formats.h` draws them.
    """

    format: Format
    data: Tensor
    num_rows: int


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part that has yet to be packed.

    Attributes:
        read: its rows as they are stored; called once.
    """

    format: Format
    shape: tuple[int, int]
    read: Callable[[], StoredRows]

    @property
    def num_bytes(self) -> int:
        return native.load().packed_bytes(self.format, *self.shape)


def pack_all(stored: Sequence[StoredPart]) -> tuple[list[PackedPart], list[Callable[[], None]]]:
    """Room for all parts in one stretch of memory, and the jobs that fill it, in any order.

    One stretch can have large pages: matrices are streamed end to end every step, and looking up
    an address every 4 kB would take longer than reading what is there.
    """
    starts = list(accumulate((-(-part.num_bytes // 64) * 64 for part in stored), initial=0))
    room = torch.empty(starts[-1], dtype=torch.uint8)
    native.load().use_large_pages(room)
    parts = [
        PackedPart(part.format, room[start : start + part.num_bytes], part.shape[0])
        for part, start in zip(stored, starts, strict=False)
    ]
    return parts, [partial(_fill, *pair) for pair in zip(parts, stored, strict=True)]


def _fill(part: PackedPart, stored: StoredPart) -> None:
    """Pack a part, a few rows at a time: what is read is never in memory as a whole."""
    rows, num_columns = stored.read(), stored.shape[1]
    whole = np.arange(part.num_rows) if rows.order is None else rows.order
    start = 0
    for first in range(0, part.num_rows, _ROWS_PER_READ):
        order = whole[first : first + _ROWS_PER_READ]
        # Orders move rows within a head, so these are hardly more than the rows wanted.
        lowest = int(order.min())
        blocks = np.ascontiguousarray(rows.blocks[lowest : int(order.max()) + 1])
        end = start + native.load().packed_bytes(part.format, len(order), num_columns)
        native.load().pack(part.format, blocks, order - lowest, num_columns, part.data[start:end])
        start = end


class PackedWeight:
    """A matrix [O, I] of one or several stacked parts; takes the place of a weight tensor."""

    def __init__(self, parts: Sequence[PackedPart], num_columns: int):
        self.parts = tuple(parts)
        self.shape = (sum(part.num_rows for part in parts), num_columns)

    @property
    def nbytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts)

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Some rows, unpacked: [R] -> [R, I] float32."""
        assert len(self.parts) == 1, "rows of a stacked weight are nobody's"
        return unpack(self.parts[0], rows, self.shape[1])

    def values(self) -> Tensor:
        """All rows, unpacked: [O, I] float32."""
        rows = [unpack(p, torch.arange(p.num_rows), self.shape[1]) for p in self.parts]
        return torch.cat(rows)


def unpack(part: PackedPart, rows: Tensor, num_columns: int) -> Tensor:
    """The values of rows [R] int64: [R, I] float32."""
    out = torch.empty(len(rows), num_columns)
    native.load().unpack(part.format, part.data, rows.contiguous(), out)
    return out


def rounded(x: Tensor) -> Tensor:
    """Activations [T, I] as the 8-bit codes of their groups stand for them."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    # A subnormal scale may have no inverse: too small to count, such a group is all zeros.
    inverse = torch.where(scale >= torch.finfo(scale.dtype).tiny, 1 / scale, 0)
    codes = (groups * inverse).clamp(-127, 127).round()
    return (codes * scale).flatten(-2)


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: [T, I] -> [T, O] float32, by the definition above and slowly."""
    coarse = rounded(x)
    outputs = []
    for part in weight.parts:
        given = x.float() if part.format.is_float else coarse
        for first in range(0, part.num_rows, _ROWS_PER_CHUNK):
            rows = torch.arange(first, min(first + _ROWS_PER_CHUNK, part.num_rows))
            outputs.append(F.linear(given, unpack(part, rows, weight.shape[1])))
    out = torch.cat(outputs, dim=-1)
    return out if bias is None else out + bias
