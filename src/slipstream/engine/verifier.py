"""From the target's logits to verdicts, by the rules of `maths.acceptance`.

This file only arranges: it pads drafts into a batch, looks up the noise addresses of positions, and
evaluates sampling controls with the tokens that lead to each node.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from slipstream.core.controls import Row, controls
from slipstream.core.draft import Draft, Verdict
from slipstream.core.sequence import Sequence
from slipstream.maths.acceptance import DraftBatch, match
from slipstream.maths.distributions import sample
from slipstream.maths.noise import Address, Stream


class Verifier(Protocol):
    """A lossless rule, applied to B sequences."""

    def __call__(
        self,
        logits: Tensor,  # [R, V]
        first_rows: Seq[int],
        seqs: Seq[Sequence],
        drafts: Seq[Draft],
    ) -> list[Verdict]:
        """One verdict per sequence.

        Args:
            logits: rows of all sequences.
            first_rows: where each sequence's 1 + N rows begin.
        """


class MatchVerifier:
    """The speculative stream is the plain stream: `maths.acceptance.match`."""

    def __call__(
        self,
        logits: Tensor,
        first_rows: Seq[int],
        seqs: Seq[Sequence],
        drafts: Seq[Draft],
    ) -> list[Verdict]:
        batch = _pad(drafts, logits.device)

        def draw(which: Tensor, nodes: Tensor) -> Tensor:
            rows, where, addresses = [], [], []
            for b, node in zip(which.tolist(), nodes.tolist(), strict=True):
                seq = seqs[b]
                path = _path_tokens(drafts[b], node)
                tokens = seq.tokens + path if path else seq.tokens
                rows.append(Row(seq.params, tokens, seq.num_prompt, seq.stop_ids))
                where.append(first_rows[b] + 1 + node)
                addresses.append(Address(seq.key, Stream.TARGET, len(tokens)))
            return sample(logits[where], controls(rows, logits.device), addresses)

        verdicts = match(batch, draw)
        return [
            Verdict(accepted.nonzero().flatten().tolist(), token)
            for accepted, token in zip(
                verdicts.accepted.cpu(), verdicts.next_tokens.tolist(), strict=True
            )
        ]


def _pad(drafts: Seq[Draft], device: torch.device) -> DraftBatch:
    longest = max((len(draft) for draft in drafts), default=0)

    def padded(values: list[int]) -> list[int]:
        return values + [-1] * (longest - len(values))

    tokens = [padded(draft.token_ids) for draft in drafts]
    parents = [padded(draft.parents) for draft in drafts]
    both = torch.tensor([tokens, parents], dtype=torch.int64, device=device)
    return DraftBatch(both[0], both[1])


def _path_tokens(draft: Draft, node: int) -> list[int]:
    """The drafted tokens from the root to a node, itself included."""
    path = []
    while node >= 0:
        path.append(draft.token_ids[node])
        node = draft.parents[node]
    return path[::-1]
