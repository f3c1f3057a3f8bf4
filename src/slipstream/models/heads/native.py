"""Packed heads on the native kernels: a pass recorded as a whole, what is beside it by itself."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
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
from slipstream.models.recorded import RecordedRows, chains_on_pages, run_on_pages
from slipstream.models.runner import attend_pages


class NativeLinear(nn.Module):
    """y = x W^T + b as a native program of its own; takes the place of a `Linear`."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None):
        super().__init__()
        self.weight = weight
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        out_width, width = weight.shape
        self._run = RecordedRows(lambda x: kernels.linear(x, weight, self.bias), width, out_width)

    def forward(self, x: Tensor) -> Tensor:
        return self._run(x)


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
            features = head(body, body.rows(head.config.hidden_size), body, body.attend)
            outputs = self._kept(features, body)
            self._widths = [symbol.width for symbol in outputs]
            self._program = body.program(outputs)

    def forward(self, batch: Batch, features: Tensor) -> tuple[Tensor, Tensor]:
        """One pass over T packed pairs; writes the batch's K/V.

        Args:
            features: of the pairs, [T, hidden].

        Returns:
            The next features [R, hidden] and their logits [R, V_d], at `batch.logit_rows`.
        """
        if self._program is None:
            attend = attend_pages(self.cache, batch)
            ids, positions = batch.tensor(batch.ids), batch.tensor(batch.positions)
            after = self.head(ids, features, positions, attend)
            return self._kept(after, batch.tensor(batch.logit_rows))
        kept, logits = (torch.empty(len(batch.logit_rows), width) for width in self._widths)
        run_on_pages(self._program, batch, self.cache, features, [kept, logits])
        return kept, logits

    @property
    def is_native(self) -> bool:
        return self._program is not None

    def chains(
        self, batch: Batch, features: Tensor, lengths: Seq[int], tokens: np.ndarray
    ) -> list[list[int]]:
        """What passes one after another make of the likeliest tokens (`chains_on_pages`)."""
        tokens = tokens[: self._widths[1]]
        return chains_on_pages(self._program, batch, self.cache, features, lengths, tokens)

    def _kept(self, features: Any, rows: Any) -> tuple[Any, Any]:
        kept = kernels.pick(features, rows)
        return kept, self.head.logits(kept)
