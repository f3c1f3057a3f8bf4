"""Packed heads on the native kernels: the layer recorded as a whole, other matrices one by one."""

from typing import Any

import torch
from torch import Tensor, nn

from slipstream import kernels
from slipstream.kernels import PackedWeight, Recording
from slipstream.kv.cache import KVCache
from slipstream.models.batch import Batch
from slipstream.models.heads.base import packed_weights
from slipstream.models.heads.eagle import EagleHead
from slipstream.models.heads.eagle3 import Eagle3Head
from slipstream.models.heads.mtp import MTPHead
from slipstream.models.recorded import run_on_pages, run_on_rows
from slipstream.models.runner import attend_pages


class NativeLinear(nn.Module):
    """y = x W^T + b as a native program of its own; takes the place of a `Linear`."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None):
        super().__init__()
        self.weight = weight
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        recording = Recording()
        rows: Any = recording.rows(weight.shape[1])
        self._program = recording.program([kernels.linear(rows, weight, self.bias)])

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(len(x), self.weight.shape[0])
        run_on_rows(self._program, x.contiguous(), out)
        return out


class HeadRunner:
    """Runs a head on batches, reading and writing its pages.

    Args:
        head: as it was read, or packed (`loading.head_packing`).
        cache: its K/V.
    """

    def __init__(self, head: EagleHead | Eagle3Head | MTPHead, cache: KVCache):
        self.head = head
        self.cache = cache
        self._program: Any = None
        if packed_weights(head):
            body: Any = Recording()
            after: Any = head(body, body.rows(head.config.hidden_size), body, body.attend)
            self._program = body.program([after])

    def forward(self, batch: Batch, features: Tensor) -> Tensor:
        """The next features [T, hidden] of T packed pairs; writes the batch's K/V."""
        if self._program is None:
            attend = attend_pages(self.cache, batch)
            return self.head(batch.ids, features, batch.positions, attend)
        out = torch.empty_like(features)
        run_on_pages(self._program, batch, self.cache, features, [out])
        return out
