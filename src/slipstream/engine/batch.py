"""Packing a plan and its drafts into one forward pass: of each sequence its pending committed
tokens, and then its draft. `models.batch` has the layout."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.engine.scheduler import Plan
from slipstream.kv.blocks import BlockManager
from slipstream.maths import trees
from slipstream.models.batch import Batch, Span, lay_out


def pack(plan: Plan, drafts: Seq[Draft], blocks: BlockManager, device: torch.device | str) -> Batch:
    """Lay out a step, with logits after the committed tokens and after every node."""
    spans = []
    for index, (seq, draft) in enumerate(zip(plan.seqs, drafts, strict=True)):
        start, stop = seq.num_computed, seq.num_computed + plan.num_tokens[index]
        reaches_end = plan.reaches_end(index)
        assert reaches_end or not draft.token_ids, "only what is computed to its end has a draft"
        depths = trees.depths(draft.parents)
        spans.append(
            Span(
                seq.seq_id,
                start,
                tokens=seq.tokens[start:stop] + draft.token_ids,
                positions=[*range(start, stop), *(len(seq.tokens) + depth for depth in depths)],
                num_logits=1 + len(draft) if reaches_end else 0,
                ancestors=None if draft.is_chain else _ancestors(stop - start, draft.parents),
            )
        )
    return lay_out(spans, blocks, device)


def _ancestors(num_committed: int, parents: Seq[int]) -> Tensor:
    """Which pending tokens each one sees: of one tree, whose trunk is the committed ones."""
    trunk = trees.chain(num_committed)
    return trees.ancestor_mask([*trunk, *(num_committed + parent for parent in parents)])
