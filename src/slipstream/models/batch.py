"""Laying out several sequences' tokens for one forward pass over paged K/V.

Sequences lie one after another. Of each, key index and position are the same up to where a tree
begins; its nodes take consecutive key slots but depth-aligned positions, so that the K/V of an
accepted path is already rotated as it must be when it is moved together:

    packed     | a: committed | a: tree | b: committed | c: committed | c: tree |
    key index    C .. C+n-1     C+n ..                                    (C: start of the span)
    position     the same       C + n + depth in the tree
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels import AttentionPlan
from slipstream.kv.blocks import BlockManager


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's share of a pass: n tokens, whose K/V goes behind what it already has.

    Attributes:
        seq_id: owner of the block table.
        start: key index of the first token.
        tokens, positions: of the n tokens.
        num_logits: how many of the last of them are followed by something that can be sampled.
        ancestors: which of the last m >= n keys each token sees, [n, m] bool; None sees all
            before it and itself.
    """

    seq_id: int
    start: int
    tokens: Seq[int]
    positions: Seq[int]
    num_logits: int
    ancestors: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything a pass needs.

    Attributes:
        ids, positions, slots: of T packed tokens.
        attention: who sees what.
        logit_rows: packed tokens after which something can be sampled, R of them.
        first_rows: per sequence, its first row in the logits; None if it has none.
        first_tokens: per sequence, where it begins in the packed tokens.
        device: of the model.
    """

    ids: list[int]
    positions: list[int]
    slots: list[int]
    attention: AttentionPlan
    logit_rows: list[int]
    first_rows: list[int | None]
    first_tokens: list[int]
    device: torch.device | str

    def tensor(self, numbers: list[int]) -> Tensor:
        """Ids, positions, slots or rows as [T] or [R] int64 on the device."""
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)


def lay_out(spans: Seq[Span], blocks: BlockManager, device: torch.device | str) -> Batch:
    """Make a batch of spans whose slots are reserved."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    first_rows: list[int | None] = []
    first_tokens: list[int] = []
    for span in spans:
        first_tokens.append(len(ids))
        ids += span.tokens
        positions += span.positions
        keys = range(span.start, span.start + len(span.tokens))
        slots += key_slots(blocks, span.seq_id, keys)
        first_rows.append(len(logit_rows) if span.num_logits else None)
        logit_rows += range(len(ids) - span.num_logits, len(ids))

    return Batch(
        ids=ids,
        positions=positions,
        slots=slots,
        attention=AttentionPlan(
            num_computed=[span.start for span in spans],
            num_pending=[len(span.tokens) for span in spans],
            tables=[blocks.table(span.seq_id) for span in spans],
            positions=positions,
            ancestors=[span.ancestors for span in spans],
            device=device,
        ),
        logit_rows=logit_rows,
        first_rows=first_rows,
        first_tokens=first_tokens,
        device=device,
    )


def rows_at(rows: Tensor, index: list[int]) -> Tensor:
    """Some rows, copied only where they do not lie together."""
    first = index[0]
    if index == list(range(first, first + len(index))):
        return rows[first : first + len(index)]
    return rows[index]


def key_slots(blocks: BlockManager, seq_id: int, keys: Seq[int]) -> list[int]:
    """The cache slots of a sequence's keys."""
    table, size = blocks.table(seq_id), blocks.block_size
    return [table[key // size] * size + key % size for key in keys]
