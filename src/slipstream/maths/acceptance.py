"""Which drafted tokens become final. The rules that make speculation lossless.

Drafts are trees, padded to one batch; a chain is the tree whose node i has parent i - 1. Sequence b
owns the target's distributions p(. | node) at the root (node -1: what follows the committed
tokens) and after each of its nodes.

`match` is the default rule. At each node the target is sampled exactly as plain decoding samples
it, and the walk goes down while a child carries the sampled token. The sample where it stops is
emitted as well: the recovered token inside the draft, the bonus token at a leaf. Every emitted
token is the target's own sample, so the output *is* the plain output, whatever was drafted.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Samples the target at A places: (sequences [A], nodes [A]) -> tokens [A].
Draw = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Drafts of B sequences, at most K nodes each.

    Attributes:
        tokens: [B, K] int64; -1 past the end of a draft.
        parents: [B, K] int64; -1 for children of the root, less than the node's own index.
            Children of one node carry different tokens.
    """

    tokens: Tensor
    parents: Tensor


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What became of B drafts.

    Attributes:
        accepted: [B, K] bool; the accepted nodes form a path, in order of index.
        next_tokens: [B] int64, the one further token of each sequence.
    """

    accepted: Tensor
    next_tokens: Tensor


def match(drafts: DraftBatch, draw: Draw) -> Verdicts:
    """Walk down each draft while the target's own sample is among the children.

    Args:
        drafts: of B sequences.
        draw: the plain sampler; asked once for every node the walk visits and for no other.
    """
    num_seqs = drafts.tokens.shape[0]
    accepted = torch.zeros_like(drafts.tokens, dtype=torch.bool)
    next_tokens = torch.full((num_seqs,), -1, dtype=torch.int64, device=drafts.tokens.device)
    seqs = torch.arange(num_seqs, device=drafts.tokens.device)
    nodes = torch.full_like(seqs, -1)
    while len(seqs) > 0:
        sampled = draw(seqs, nodes)
        next_tokens[seqs] = sampled
        child = drafts.tokens[seqs] == sampled.unsqueeze(1)
        child &= drafts.parents[seqs] == nodes.unsqueeze(1)
        which, nodes = child.nonzero(as_tuple=True)  # siblings differ, so at most one each
        seqs = seqs[which]
        accepted[seqs, nodes] = True
    return Verdicts(accepted, next_tokens)
