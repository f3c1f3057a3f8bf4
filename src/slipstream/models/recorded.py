"""A model of packed weights, recorded once and run by the native program ever after."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels import AttentionPlan, Recording, Symbol
from slipstream.kv.cache import KVCache
from slipstream.models.batch import Batch
from slipstream.models.layers import CausalLM

_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class RecordedModel:
    """Does what a `CausalLM` does, on pages.

    Every element of the result is computed in one order, whatever else is in the batch, so equal
    tokens get equal bits.

    Args:
        taps: layers whose incoming residual stream is kept.
    """

    def __init__(self, model: CausalLM, taps: Seq[int] = ()):
        self.config = model.config
        self.taps = list(taps)
        body = Recording()
        hidden, tapped = model(body, body, body.attend, taps)
        logits: Any = model.logits(kernels.pick(hidden, body))
        self._program = body.program([hidden, *(tapped[layer] for layer in self.taps), logits])

    def forward(self, batch: Batch, cache: KVCache) -> tuple[Tensor, dict[int, Tensor], Tensor]:
        """Final hidden states and taps, each [T, hidden], and logits [R, V] of `logit_rows`.

        Writes the batch's K/V.
        """
        width = self.config.hidden_size
        kept = [torch.empty(len(batch.ids), width) for _ in range(1 + len(self.taps))]
        logits = torch.empty(len(batch.logit_rows), self.config.vocab_size)
        run_on_pages(self._program, batch, cache, None, [*kept, logits])
        return kept[0], dict(zip(self.taps, kept[1:], strict=True)), logits


class RecordedRows:
    """A function of rows, each by itself, as a native program: [R, width] -> [R, out_width].

    Args:
        function: made of the operations of `kernels`. Given a symbol it is written down as part of
            what is being recorded.
    """

    def __init__(self, function: Callable[[Any], Any], width: int, out_width: int):
        self._function = function
        self._out_width = out_width
        recording = Recording()
        self._program = recording.program([function(recording.rows(width))])

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(x, Symbol):
            return self._function(x)
        out = torch.empty(len(x), self._out_width)
        self._program.run(rows=len(x), hidden=x.contiguous(), outputs=[out])
        return out


def run_on_pages(
    program: Any, batch: Batch, cache: KVCache, rows: Tensor | None, outputs: Seq[Tensor]
) -> None:
    """Run a native program that attends; writes the batch's K/V and the outputs [T or R, ...].

    Args:
        rows: what the program loads, [T, ...] float32.
    """
    spans, tables, ancestors = _packed(batch.attention)
    program.run(
        hidden=rows,
        outputs=list(outputs),
        spans=spans,
        tables=tables,
        ancestors=ancestors,
        **_rows(batch, cache),
    )


def chains_on_pages(
    program: Any, batch: Batch, cache: KVCache, rows: Tensor, lengths: Seq[int], tokens: np.ndarray
) -> list[list[int]]:
    """Run a head's native program pass after pass, each on the likeliest tokens of the one before.

    Args:
        batch: the first pass; every sequence's last token is followed by logits.
        rows: the features it loads, [T, hidden] float32.
        lengths: tokens wanted of each sequence; there are slots for all but the last.
        tokens: what the first columns of logits stand for, int64.

    Returns:
        The tokens of each sequence, fewer where logits are not finite.
    """
    spans, tables, ancestors = _packed(batch.attention)
    assert ancestors is None, "chains begin where committed tokens end"
    return program.chains(
        hidden=rows,
        lengths=list(lengths),
        tokens=tokens,
        spans=spans,
        tables=tables,
        **_rows(batch, cache),
    )


def _rows(batch: Batch, cache: KVCache) -> dict[str, Any]:
    return {
        "rows": len(batch.ids),
        "ids": batch.ids,
        "positions": batch.positions,
        "slots": batch.slots,
        "pool": cache.pool,
        "pool_kind": _KINDS[cache.pool.dtype],
        "picked": batch.logit_rows,
    }


def _packed(plan: AttentionPlan) -> tuple[list[int], list[int], np.ndarray | None]:
    """Spans, five numbers each, all tables and all masks, one after another."""
    spans: list[int] = []
    tables: list[int] = []
    masks = []
    for first_row, count, computed, table, mask in zip(
        plan.first_rows,
        plan.num_pending,
        plan.num_computed,
        plan.tables,
        plan.ancestors,
        strict=True,
    ):
        num_masked = 0 if mask is None else mask.shape[1]
        spans += (first_row, count, computed, num_masked, len(tables))
        tables += table
        if mask is not None:
            masks.append(mask.numpy().astype(np.uint8).ravel())
    return spans, tables, np.concatenate(masks) if masks else None
