"""Random sequences over paged K/V: chunks of prompts, single tokens, chains and trees.

Whatever belongs to no sequence is NaN here: free blocks, slots past the end, padding of tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.attention import AttentionPlan, dense_attention, paged_attention
from slipstream.maths import trees

SCALE = 0.4

BUSHY = [-1, -1, 0, 0, 1, 2, 2, 4]
COMB = [-1, 0, 0, 1, 1, 3, 3]
ROOTS = [-1, -1, -1]


@dataclass(frozen=True)
class Case:
    """One sequence: computed tokens, pending committed ones, and a draft behind them."""

    num_computed: int
    num_committed: int
    parents: Sequence[int] = ()

    @property
    def num_pending(self) -> int:
        return self.num_committed + len(self.parents)

    @property
    def num_keys(self) -> int:
        return self.num_computed + self.num_pending

    @property
    def positions(self) -> list[int]:
        first_node = self.num_computed + self.num_committed
        drafted = [first_node + depth for depth in trees.depths(self.parents)]
        return [*range(self.num_computed, first_node), *drafted]

    @property
    def ancestors(self) -> Tensor | None:
        if list(self.parents) == trees.chain(len(self.parents)):
            return None
        visible = torch.ones(self.num_pending, self.num_pending, dtype=torch.bool).tril()
        nodes = slice(self.num_committed, None)
        visible[nodes, nodes] = trees.ancestor_mask(self.parents)
        return visible

    @property
    def branches(self) -> list[list[int]]:
        """Key indices seen from each leaf, in order of position."""
        trunk = list(range(self.num_computed + self.num_committed))
        return [
            [*trunk, *(len(trunk) + n for n in path)] for path in trees.paths(self.parents)
        ] or [trunk]


class Pages:
    """Random sequences laid out in a shuffled pool."""

    def __init__(
        self,
        cases: Sequence[Case],
        *,
        block_size: int = 4,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 4,
        layout: int = 0,
        spare_per_table: int = 0,
        dtype: torch.dtype = torch.float64,
    ):
        numbers = torch.Generator().manual_seed(1)  # the same under every layout

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=numbers, dtype=torch.float64).to(dtype)

        self.cases = cases
        self.q = [random(case.num_pending, num_heads, head_dim) for case in cases]
        self.k = [random(case.num_keys, num_kv_heads, head_dim) for case in cases]
        self.v = [random(case.num_keys, num_kv_heads, head_dim) for case in cases]

        sizes = [-(-case.num_keys // block_size) + spare_per_table for case in cases]
        num_blocks = sum(sizes) + 3
        shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(layout))
        self.tables = [block.tolist() for block in shuffled[: sum(sizes)].split(sizes)]
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.keys = torch.full(shape, torch.nan, dtype=dtype)
        self.values = torch.full(shape, torch.nan, dtype=dtype)
        for case, table, k, v in zip(cases, self.tables, self.k, self.v, strict=True):
            index = torch.arange(case.num_keys)
            block, offset = torch.tensor(table)[index // block_size], index % block_size
            self.keys[block, offset], self.values[block, offset] = k, v
        self.plan = AttentionPlan(
            num_computed=[case.num_computed for case in cases],
            num_pending=[case.num_pending for case in cases],
            tables=self.tables,
            positions=[p for case in cases for p in case.positions],
            ancestors=[case.ancestors for case in cases],
        )

    def paged(self, window: int | None = None) -> Tensor:
        packed = torch.cat(self.q)
        return paged_attention(
            packed, self.keys, self.values, self.plan, scale=SCALE, window=window
        )

    def dense(self, window: int | None = None) -> Tensor:
        """Every branch of every sequence on its own."""
        out = []
        for case, q, k, v in zip(self.cases, self.q, self.k, self.v, strict=True):
            rows = torch.full_like(q, torch.nan)
            padded = torch.cat((q.new_zeros(case.num_computed, *q.shape[1:]), q))
            for branch in case.branches:
                attended = dense_attention(
                    padded[branch], k[branch], v[branch], scale=SCALE, window=window
                )
                pending = torch.tensor(branch[case.num_computed :]) - case.num_computed
                rows[pending] = attended[case.num_computed :]
            out.append(rows)
        return torch.cat(out)


MIXED = [
    Case(0, 9),  # a whole prompt
    Case(7, 5),  # a chunk in the middle of one
    Case(13, 1),
    Case(16, 1),
    Case(1, 1),
    Case(12, 1, trees.chain(4)),
    Case(30, 1, trees.chain(4)),
    Case(6, 1, BUSHY),
    Case(21, 1, BUSHY),
    Case(3, 2, COMB),
    Case(5, 1, ROOTS),
    Case(0, 4, ROOTS),  # a tree behind a prompt
]
