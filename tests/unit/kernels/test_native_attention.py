"""Native attention equals the torch form, and a token's output has its own bits.

They are the same alone, in a chunk, in a batch, split over threads, and as a node of a tree whose
path lies scattered among others: what a token sees is all that counts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from packing import NO_MASKS
from paged import BUSHY, COMB, MIXED, ROOTS, SCALE, Case, Pages
from slipstream import native
from slipstream.kernels import Recording
from slipstream.maths import trees

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no native kernels here")

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
LAYER = 1  # of two: the other's pages stay NaN


@pytest.fixture(autouse=True)
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads; one afterwards."""
    yield native.load().use_threads
    native.load().use_threads(1)


@dataclass(frozen=True)
class Share:
    """One sequence's share of a run.

    Attributes:
        rows: [n, (H + 2 H_kv) D] queries, keys and values of its pending tokens, side by side.
        mask: [n, m] bool, which of the last m keys each sees; None for chains.
    """

    num_computed: int
    rows: Tensor
    table: Sequence[int]
    mask: Tensor | None = None


class Attention:
    """One attention over a pool of pages of its own."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 16,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 32,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
    ):
        self.block_size, self.head_dim = block_size, head_dim
        self.sizes = [n * head_dim for n in (num_heads, num_kv_heads, num_kv_heads)]
        shape = (2, 2, num_blocks, block_size, num_kv_heads, head_dim)
        self.pool = torch.full(shape, torch.nan, dtype=dtype)
        recording = Recording()
        q, k, v = recording.rows(sum(self.sizes)).split(self.sizes)
        heads = q.view(None, -1, head_dim)
        out = recording.attend(LAYER, heads, k, v, scale=SCALE, window=window)
        self.program: Any = recording.program([out])

    def __call__(self, shares: Sequence[Share]) -> Tensor:
        """Outputs [T, H D]; keys and values are written to the pool."""
        spans, slots, tables, masks, num_rows = [], [], [], [NO_MASKS], 0
        for share in shares:
            count = len(share.rows)
            num_masked = 0 if share.mask is None else share.mask.shape[1]
            spans += (num_rows, count, share.num_computed, num_masked, len(tables))
            num_rows += count
            for key in range(share.num_computed, share.num_computed + count):
                block = share.table[key // self.block_size]
                slots.append(block * self.block_size + key % self.block_size)
            tables += share.table
            if share.mask is not None:
                masks.append(share.mask.numpy().astype(np.uint8).ravel())
        out = torch.empty(num_rows, self.sizes[0])
        self.program.run(
            rows=num_rows,
            slots=slots,
            spans=spans,
            tables=tables,
            ancestors=np.concatenate(masks),
            pool=self.pool,
            pool_kind=KINDS[self.pool.dtype],
            hidden=torch.cat([share.rows for share in shares]),
            outputs=[out],
        )
        return out


def natively(pages: Pages, window: int | None = None) -> Tensor:
    """What `pages.paged` computes, with pending keys and values written on the way. [T, H, D]"""
    num_blocks, block_size, num_kv_heads, head_dim = pages.keys.shape
    num_heads = pages.q[0].shape[1]
    attention = Attention(
        num_blocks=num_blocks,
        block_size=block_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=pages.keys.dtype,
        window=window,
    )
    shares = []
    for case, q, k, v, table in zip(
        pages.cases, pages.q, pages.k, pages.v, pages.tables, strict=True
    ):
        index = torch.arange(case.num_computed)
        block, offset = torch.tensor(table)[index // block_size], index % block_size
        attention.pool[LAYER, 0, block, offset] = k[: case.num_computed]
        attention.pool[LAYER, 1, block, offset] = v[: case.num_computed]
        pending = (q, k[case.num_computed :], v[case.num_computed :])
        rows = torch.cat([part.flatten(1) for part in pending], dim=1).float()
        shares.append(Share(case.num_computed, rows, table, case.ancestors))
    out = attention(shares)
    assert torch.equal(attention.pool[LAYER, 0].nan_to_num(), pages.keys.nan_to_num())
    assert torch.equal(attention.pool[LAYER, 1].nan_to_num(), pages.values.nan_to_num())
    assert attention.pool[1 - LAYER].isnan().all()
    return out.unflatten(1, (num_heads, head_dim))


def assert_close(out: Tensor, pages: Pages, window: int | None = None) -> None:
    exact = pages.dense(window)
    # Queries and the torch form's own result are rounded to the type of the pages.
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[exact.dtype]
    torch.testing.assert_close(out, exact.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_a_mixed_batch(isa: str, num_heads: int, num_kv_heads: int, block_size: int) -> None:
    for window in (None, 5, 1):
        pages = Pages(
            MIXED,
            block_size=block_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=16,
            dtype=torch.float32,
        )
        assert_close(natively(pages, window), pages, window)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("head_dim", [16, 20, 32, 64, 72, 80, 128, 256])
def test_heads_of_any_size_and_pages_of_any_type(
    isa: str, head_dim: int, dtype: torch.dtype
) -> None:
    cases = [Case(0, 9), Case(29, 1), Case(18, 1, BUSHY), Case(5, 1, trees.chain(3))]
    pages = Pages(cases, head_dim=head_dim, dtype=dtype)
    assert_close(natively(pages), pages)
    # Rounded to the type of the pages, both forms round the same number.
    paged = pages.paged().float()
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(natively(pages), paged, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 600])
def test_contexts_of_several_partitions(
    isa: str, window: int | None, threads: Callable[[int], None]
) -> None:
    threads(2)
    cases = [
        Case(511, 1),  # ends with a partition
        Case(512, 1),
        Case(1300, 3),
        Case(505, 20),
        Case(1018, 2, BUSHY),  # its nodes straddle two partitions
        Case(508, 1, COMB),
        Case(1021, 1, trees.chain(5)),
    ]
    # Alone, the work is split over partitions; together it is not.
    for batch in (cases, *([case] for case in cases)):
        pages = Pages(
            batch,
            block_size=16,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            dtype=torch.float32,
        )
        assert_close(natively(pages, window), pages, window)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_windows_in_trees_are_measured_in_positions(isa: str, window: int) -> None:
    for parents in (BUSHY, COMB, ROOTS):
        pages = Pages([Case(6, 1, parents)], head_dim=16, dtype=torch.float32)
        assert_close(natively(pages, window), pages, window)


# What a chain's rows are made of: seeds and numbers, the same for every way to compute them.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 48
WIDTH = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
NUM_TOKENS, BLOCK = 40, 16


def chain_rows(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("num_before", "window", "dtype"),
    [
        (0, None, torch.float32),
        (3, 9, torch.float16),
        (495, None, torch.float16),  # the end of a partition comes within
        (495, 9, torch.float32),
        (1010, 530, torch.bfloat16),
    ],
    ids=str,
)
def test_a_token_has_its_own_bits(
    isa: str,
    num_before: int,
    window: int | None,
    dtype: torch.dtype,
    threads: Callable[[int], None],
) -> None:
    """The last tokens of a chain, computed in every way there is."""
    rows = chain_rows(num_before + NUM_TOKENS)
    last = rows[num_before:]

    def fresh() -> Chain:
        return Chain(rows[:num_before], window=window, dtype=dtype)

    chain = fresh()
    one_by_one = torch.cat([chain(i, row) for i, row in enumerate(last.split(1))])
    assert one_by_one.isfinite().all()

    for num_threads in (1, 2):
        threads(num_threads)
        assert torch.equal(fresh()(0, last), one_by_one), "as a chunk"

        chain, outs = fresh(), []
        for start in range(0, NUM_TOKENS, 7):
            company = Share(start, chain_rows(7, seed=start), chain.other_table)
            share = chain.share(start, last[start : start + 7])
            outs.append(chain.attention([company, share])[7:])
        assert torch.equal(torch.cat(outs), one_by_one), "in company"

        if num_before < 10:
            whole = Chain(rows[:0], window=window, dtype=dtype)
            assert torch.equal(whole(0, rows)[num_before:], one_by_one), "at once"

        for num_trunk in (1, 11):
            out = tree_bits(fresh(), last, num_trunk)
            assert torch.equal(out, one_by_one), f"as a tree behind {num_trunk} tokens"
        assert torch.equal(level_bits(fresh(), last), one_by_one), "as a tree level by level"


class Chain:
    """A sequence whose first tokens are computed, in blocks out of order among another's."""

    def __init__(self, computed: Tensor, *, window: int | None, dtype: torch.dtype):
        self.num_computed = len(computed)
        count = -(-(self.num_computed + 2 * NUM_TOKENS) // BLOCK)
        order = np.random.default_rng(0).permutation(2 * count).tolist()
        self.table, self.other_table = order[:count], order[count:]
        self.attention = Attention(
            num_blocks=2 * count,
            block_size=BLOCK,
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=dtype,
            window=window,
        )
        index = torch.arange(self.num_computed)
        block, offset = torch.tensor(self.table)[index // BLOCK], index % BLOCK
        _, *stored = computed.split(self.attention.sizes, dim=1)
        for kind, numbers in enumerate(stored):
            heads = numbers.unflatten(1, (NUM_KV_HEADS, HEAD_DIM)).to(dtype)
            self.attention.pool[LAYER, kind, block, offset] = heads

    def share(self, start: int, rows: Tensor, mask: Tensor | None = None) -> Share:
        """Rows that begin so many tokens after those that were computed first."""
        return Share(self.num_computed + start, rows, self.table, mask)

    def __call__(self, start: int, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attention([self.share(start, rows, mask)])


def scattered_tree(num_nodes: int) -> tuple[list[int], list[int]]:
    """A tree of twice as many nodes with a path of that length in it; parents, and the path."""
    source = np.random.default_rng(3)
    parents: list[int] = []
    path: list[int] = []
    for on_path in source.permutation(np.repeat([True, False], num_nodes)):
        if on_path:
            parents.append(path[-1] if path else -1)
            path.append(len(parents) - 1)
        else:
            parents.append(int(source.integers(-1, len(parents))))
    return parents, path


def tree_bits(chain: Chain, last: Tensor, num_trunk: int) -> Tensor:
    """The chain's last tokens: a trunk, and nodes scattered over a tree behind it."""
    parents, path = scattered_tree(NUM_TOKENS - num_trunk)
    nodes = chain_rows(len(parents), seed=9)
    nodes[path] = last[num_trunk:]
    count = num_trunk + len(parents)
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    mask[num_trunk:, num_trunk:] = trees.ancestor_mask(parents)
    out = chain(0, torch.cat((last[:num_trunk], nodes)), mask)
    return torch.cat((out[:num_trunk], out[num_trunk:][path]))


def level_bits(chain: Chain, last: Tensor) -> Tensor:
    """The same without a trunk, computed in stretches: masks begin before `num_computed`."""
    parents, path = scattered_tree(NUM_TOKENS)
    nodes = chain_rows(len(parents), seed=9)
    nodes[path] = last
    seen = trees.ancestor_mask(parents)
    outs = []
    for start in range(0, len(parents), 13):
        stop = min(start + 13, len(parents))
        outs.append(chain(start, nodes[start:stop], seen[start:stop, :stop]))
    return torch.cat(outs)[path]


def test_a_poisoned_sequence_poisons_nobody_else(isa: str) -> None:
    chain = Chain(chain_rows(0), window=None, dtype=torch.float32)
    made, first, second = chain.attention, chain.table, chain.other_table
    rows, others = chain_rows(30), chain_rows(30, seed=1)
    healthy = made([Share(0, rows, first), Share(0, others, second)])
    for column in range(0, WIDTH, HEAD_DIM):  # a query, a key or a value of every head
        sick = others.clone()
        sick[10, column] = torch.nan
        out = made([Share(0, rows, first), Share(0, sick, second)])
        assert torch.equal(out[:40], healthy[:40])
        assert out[40].isnan().any()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_keys_and_values_are_rounded_as_torch_does(isa: str, dtype: torch.dtype) -> None:
    """Ties, subnormal halves, overflow and NaN, in whole vectors and in what is left over."""
    head_dim = 20
    numbers = torch.randn(60, 3 * head_dim, generator=torch.Generator().manual_seed(0))
    numbers *= torch.logspace(-30, 30, 60).unsqueeze(1).clamp(1e-12, 1e38)
    numbers[0] = torch.arange(3 * head_dim) * 2**-25  # ties between subnormal halves
    numbers[1] = 1 + torch.arange(3 * head_dim) * 2**-12
    numbers[2] = 65504 + torch.arange(3 * head_dim)
    numbers[3] = torch.arange(3 * head_dim) * 1e-41
    numbers[4, ::3], numbers[4, 1::3] = torch.inf, torch.nan
    numbers[5] = -numbers[0]
    made = Attention(num_blocks=4, num_heads=1, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    made([Share(0, numbers, [2, 0, 3, 1])])
    for index, start in enumerate((head_dim, 2 * head_dim)):
        stored = made.pool[LAYER, index][[2, 0, 3, 1]].flatten(0, 1)[:60, 0]
        expected = numbers[:, start : start + head_dim].to(dtype)
        torch.testing.assert_close(stored, expected, rtol=0, atol=0, equal_nan=True)
