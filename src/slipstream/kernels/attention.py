"""Attention over paged K/V, for chains and trees, and the dense form that judges it.

Keys are walked in tiles of whole blocks with a running maximum (Milakov and Gimelshein, arXiv
1805.02867), so one tile of the context is gathered at a time and never all of it. What a query of
a sequence with C computed tokens and n pending ones may see:

    key index      0 .. C-1 | C .. C+n-1
                   computed | pending: itself and its ancestors (in a chain, all before it)

A tree that is computed level by level has ancestors among the computed keys too; a mask then
begins before C. A sliding window is measured in positions, which in a tree differ from key indices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

# Keys per tile: large enough to amortise dispatch, small enough to stay in cache.
TILE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences of a batch with the same number of pending tokens, so they stack.

    Attributes:
        rows: [B, n] indices of their queries in the packed batch.
        tables: [B, num_blocks] block tables, padded with block 0.
        num_computed: [B] keys before the pending ones.
        max_keys: most keys any of them has.
        positions: [B, n] absolute positions of the pending tokens.
        ancestors: [B, n, m] bool, m >= n: which of the last m keys, the pending ones at the end,
            a pending token sees. It sees every key before those. None for chains.
    """

    rows: Tensor
    tables: Tensor
    num_computed: Tensor
    max_keys: int
    positions: Tensor
    ancestors: Tensor | None = None
    _hidden: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def hidden(self, start: int, stop: int, window: int | None) -> Tensor:
        """[B, n, stop - start] bool: keys of this tile the queries must not see.

        The same for every layer with the same window, hence remembered.
        """
        if (start, window) not in self._hidden:
            self._hidden[start, window] = ~self._visible(start, stop, window)
        return self._hidden[start, window]

    def past_end(self, start: int, stop: int) -> Tensor:
        """[B, stop - start] bool: keys of this tile that lie past the end of their sequence."""
        keys = torch.arange(start, stop, device=self.rows.device)
        return keys >= (self.num_computed + self.positions.shape[1]).unsqueeze(1)

    def _visible(self, start: int, stop: int, window: int | None) -> Tensor:
        num_pending = self.positions.shape[1]
        num_masked = num_pending if self.ancestors is None else self.ancestors.shape[2]
        keys = torch.arange(start, stop, device=self.rows.device)
        # Index among the keys a mask speaks of; negative for those before. [B, S]
        masked = keys - (self.num_computed + num_pending - num_masked).unsqueeze(1)
        distance = self.positions.unsqueeze(2) - keys
        if self.ancestors is None:
            visible = distance >= 0
        else:
            index = masked.clamp(0, num_masked - 1).unsqueeze(1).expand(-1, num_pending, -1)
            is_before = (masked < 0).unsqueeze(1)
            is_masked = ((masked >= 0) & (masked < num_masked)).unsqueeze(1)
            visible = self.ancestors.gather(2, index) & is_masked | is_before
            # What a token sees is its path, so keys it sees beyond one are steps between them.
            steps = self.ancestors.flip(2).cumsum(2).flip(2) - self.ancestors.long()
            distance = torch.where(is_before, distance, steps.gather(2, index))
        if window is not None:
            visible = visible & (distance < window)
        return visible


class AttentionPlan:
    """Everything attention needs to know about a packed batch.

    The sequences' queries lie one after another in it.

    Args:
        num_computed, num_pending: per sequence, keys before its queries, and queries.
        tables: per sequence, its blocks.
        positions: absolute positions of the T queries.
        ancestors: per sequence [n, m] bool as `AttentionGroup` has it, None for a chain.
        device: where its tensors are made.
    """

    def __init__(
        self,
        *,
        num_computed: Sequence[int],
        num_pending: Sequence[int],
        tables: Sequence[Sequence[int]],
        positions: Sequence[int],
        ancestors: Sequence[Tensor | None],
        device: torch.device | str = "cpu",
    ):
        self.num_computed = num_computed
        self.num_pending = num_pending
        self.tables = tables
        self.positions = positions
        self.ancestors = ancestors
        self._device = device
        self._groups: list[AttentionGroup] | None = None

    @property
    def groups(self) -> list[AttentionGroup]:
        """Sequences that stack; worked out once, when first asked for."""
        if self._groups is None:
            self._groups = self._stacked()
        return self._groups

    @property
    def first_rows(self) -> list[int]:
        """Per sequence, its first query."""
        return list(accumulate(self.num_pending, initial=0))[:-1]

    def _stacked(self) -> list[AttentionGroup]:
        device = self._device
        positions = torch.tensor(self.positions, dtype=torch.int64, device=device)
        members: dict[tuple[int, int], list[int]] = {}
        for seq, count in enumerate(self.num_pending):
            mask = self.ancestors[seq]
            members.setdefault((count, 0 if mask is None else mask.shape[1]), []).append(seq)
        first_rows = self.first_rows
        groups = []
        for (count, num_masked), seqs in members.items():
            longest = max(len(self.tables[seq]) for seq in seqs)
            padded = [[*self.tables[seq], *[0] * (longest - len(self.tables[seq]))] for seq in seqs]
            starts = torch.tensor([first_rows[seq] for seq in seqs], device=device)
            rows = starts.unsqueeze(1) + torch.arange(count, device=device)
            trees = [mask for seq in seqs if (mask := self.ancestors[seq]) is not None]
            groups.append(
                AttentionGroup(
                    rows=rows,
                    tables=torch.tensor(padded, device=device),
                    num_computed=torch.tensor(
                        [self.num_computed[seq] for seq in seqs], device=device
                    ),
                    max_keys=max(self.num_computed[seq] for seq in seqs) + count,
                    positions=positions[rows],
                    ancestors=torch.stack(trees).to(device) if num_masked else None,
                )
            )
        return groups


def paged_attention(
    q: Tensor,  # [T, H, D]
    keys: Tensor,  # [num_blocks, block_size, H_kv, D]
    values: Tensor,  # [num_blocks, block_size, H_kv, D]
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of every packed query over its own sequence's pages: [T, H, D]."""
    out = torch.empty_like(q)
    for group in plan.groups:
        out[group.rows] = _attend_group(q[group.rows], keys, values, group, scale, window)
    return out


def _attend_group(
    q: Tensor,  # [B, n, H, D]
    keys: Tensor,
    values: Tensor,
    group: AttentionGroup,
    scale: float,
    window: int | None,
) -> Tensor:
    batch, n, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = keys.shape
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    # Query heads that share a key head become rows of one matrix: [B, H_kv, n * G, D].
    q = (q.to(wide) * scale).view(batch, n, num_kv_heads, -1, head_dim)
    q = q.transpose(1, 2).flatten(2, 3)
    shared = num_heads // num_kv_heads

    best = q.new_full((*q.shape[:3], 1), -torch.inf)
    total = torch.zeros_like(best)
    out = torch.zeros_like(q)
    blocks_per_tile = max(TILE_TOKENS // block_size, 1)
    for first in range(0, -(-group.max_keys // block_size), blocks_per_tile):
        blocks = group.tables[:, first : first + blocks_per_tile]
        start = first * block_size
        stop = min(start + blocks.shape[1] * block_size, group.max_keys)
        tile = stop - start

        def gather(pages: Tensor, blocks: Tensor = blocks, tile: int = tile) -> Tensor:
            return pages[blocks].flatten(1, 2)[:, :tile].transpose(1, 2).to(wide).contiguous()

        logits = q @ gather(keys).transpose(-1, -2)  # [B, H_kv, n * G, S]
        hidden = group.hidden(start, stop, window).repeat_interleave(shared, dim=1)
        logits.masked_fill_(hidden.unsqueeze(1), -torch.inf)
        new_best = torch.maximum(best, logits.amax(-1, keepdim=True))
        # A row that has seen no key yet keeps -inf; 0 stands in so that no NaN appears.
        shift = new_best.masked_fill(new_best == -torch.inf, 0.0)
        weights = torch.exp(logits.sub_(shift))
        fade = torch.exp(best - shift)
        total = total * fade + weights.sum(-1, keepdim=True)
        tile_values = gather(values)
        if batch > 1:
            # Slots past a sequence's end may hold anything, and 0 * NaN would spread it.
            garbage = group.past_end(start, stop)
            tile_values.masked_fill_(garbage.unsqueeze(1).unsqueeze(-1), 0.0)
        out = out * fade + weights @ tile_values
        best = new_best
    out = (out / total).view(batch, num_kv_heads, n, shared, head_dim)
    return out.transpose(1, 2).reshape(batch, n, num_heads, head_dim).to(dtype)


def dense_attention(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [T, H_kv, D]
    v: Tensor,  # [T, H_kv, D]
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention of one whole sequence over itself, spelled out: [T, H, D]."""
    length, num_heads, _ = q.shape
    shared = num_heads // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(shared, dim=1).to(wide)
    v = v.repeat_interleave(shared, dim=1).to(wide)
    logits = torch.einsum("qhd,khd->hqk", q.to(wide), k) * scale
    position = torch.arange(length, device=q.device)
    distance = position.unsqueeze(1) - position
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    weights = torch.softmax(logits.masked_fill(hidden, -torch.inf), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
