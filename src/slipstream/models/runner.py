"""One forward pass of a model over its pages of K/V, recorded where the native kernels run it."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from slipstream import kernels
from slipstream.core.target import TargetOutput
from slipstream.kv.cache import KVCache
from slipstream.models import Attend, CausalLM
from slipstream.models.batch import Batch
from slipstream.models.recorded import RecordedModel


class ModelRunner:
    """Runs a model on batches, reading and writing its pages.

    Args:
        model: the target, or a drafter's own.
        cache: its K/V.
        taps: layers whose incoming residual stream is kept for the drafter.
    """

    def __init__(self, model: CausalLM, cache: KVCache, taps: Seq[int] = ()):
        self.model = model
        self.cache = cache
        self.taps = taps
        self._recorded = RecordedModel(model, taps) if model.is_packed else None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @torch.inference_mode()
    def forward(self, batch: Batch) -> TargetOutput:
        """Compute every packed token; logits only where something can be sampled."""
        if self._recorded is not None:
            hidden, taps, logits = self._recorded.forward(batch, self.cache)
        else:
            attend = attend_pages(self.cache, batch)
            hidden, taps = self.model(
                batch.tensor(batch.ids), batch.tensor(batch.positions), attend, self.taps
            )
            logits = self.model.logits(hidden[batch.tensor(batch.logit_rows)])
        return TargetOutput(
            logits=logits,
            first_rows=batch.first_rows,
            hidden=hidden,
            taps=taps,
            first_tokens=batch.first_tokens,
        )


def attend_pages(cache: KVCache, batch: Batch) -> Attend:
    """Attention of a batch that writes its K/V to its pages and reads all it may see from them."""
    slots = batch.tensor(batch.slots)

    def attend(
        layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        cache.write(layer, slots, k, v)
        keys, values = cache.layer(layer)
        return kernels.paged_attention(q, keys, values, batch.attention, scale=scale, window=window)

    return attend
