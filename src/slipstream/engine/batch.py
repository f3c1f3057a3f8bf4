"""Packing a plan and its drafts into the tensors of one forward pass.

Sequences lie one after another, each its pending committed tokens and then its draft:

    packed     | a: pending | a: draft | b: pending | c: pending | c: draft |
    key index    C .. C+n-1   C+n ..                                            (C = num_computed)
    position     the same     len(tokens) + depth in the draft

Draft nodes get consecutive key slots but depth-aligned positions, so the accepted path is already
rotated as it must be when its K/V is moved together.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.engine.scheduler import Plan
from slipstream.kernels import AttentionPlan, plan_attention
from slipstream.kv.blocks import BlockManager
from slipstream.maths import trees


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything a pass needs, on the model's device.

    Attributes:
        ids, positions, slots: of T packed tokens, int64.
        attention: who sees what.
        logit_rows: packed tokens after which something can be sampled. [R]
        first_rows: per sequence, its first row in the logits; None if it has none.
        first_tokens: per sequence, where it begins in the packed tokens.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    attention: AttentionPlan
    logit_rows: Tensor
    first_rows: list[int | None]
    first_tokens: list[int]


def pack(plan: Plan, drafts: Seq[Draft], blocks: BlockManager, device: torch.device | str) -> Batch:
    """Lay out a step. Tensors are built once and moved once."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    first_rows: list[int | None] = []
    first_tokens: list[int] = []
    for index, (seq, draft) in enumerate(zip(plan.seqs, drafts, strict=True)):
        first_tokens.append(len(ids))
        start, stop = seq.num_computed, seq.num_computed + plan.num_tokens[index]
        ids += seq.tokens[start:stop]
        ids += draft.token_ids
        positions += range(start, stop)
        positions += [len(seq.tokens) + depth for depth in trees.depths(draft.parents)]
        slots += key_slots(blocks, seq.seq_id, range(start, stop + len(draft)))
        if plan.reaches_end(index):
            first_rows.append(len(logit_rows))
            logit_rows += range(len(ids) - len(draft) - 1, len(ids))
        else:
            assert not draft.token_ids, "only a sequence computed to its end can be drafted for"
            first_rows.append(None)

    place = torch.tensor([ids, positions, slots], dtype=torch.int64).to(device)
    num_pending = [n + len(draft) for n, draft in zip(plan.num_tokens, drafts, strict=True)]
    return Batch(
        ids=place[0],
        positions=place[1],
        slots=place[2],
        attention=plan_attention(
            num_computed=[seq.num_computed for seq in plan.seqs],
            num_pending=num_pending,
            tables=[blocks.table(seq.seq_id) for seq in plan.seqs],
            positions=place[1],
            ancestors=[
                None if draft.is_chain else _ancestors(n, draft)
                for n, draft in zip(plan.num_tokens, drafts, strict=True)
            ],
        ),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        first_rows=first_rows,
        first_tokens=first_tokens,
    )


def key_slots(blocks: BlockManager, seq_id: int, keys: Seq[int]) -> list[int]:
    """The cache slots of a sequence's keys."""
    table, size = blocks.table(seq_id), blocks.block_size
    return [table[key // size] * size + key % size for key in keys]


def _ancestors(num_committed: int, draft: Draft) -> Tensor:
    """Which pending tokens each one sees: committed ones causally, nodes their own path."""
    size = num_committed + len(draft)
    visible = torch.ones(size, size, dtype=torch.bool).tril()
    visible[num_committed:, num_committed:] = trees.ancestor_mask(draft.parents)
    return visible
