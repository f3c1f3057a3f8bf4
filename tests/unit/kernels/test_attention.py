"""Paged attention equals dense attention of each sequence alone, to rounding of float64."""

import pytest
import torch
from torch import Tensor

from paged import BUSHY, COMB, MIXED, ROOTS, SCALE, Case, Pages
from slipstream.kernels import attention
from slipstream.kernels.attention import AttentionPlan, dense_attention, paged_attention
from slipstream.maths import trees

HEAD_DIM = 4


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 2), (3, 1)])
def test_a_mixed_batch_equals_each_sequence_alone(
    block_size: int, num_heads: int, num_kv_heads: int
) -> None:
    pages = Pages(MIXED, block_size=block_size, num_heads=num_heads, num_kv_heads=num_kv_heads)
    # Layers with different windows share a plan.
    for window in (None, 5, 1, None):
        torch.testing.assert_close(pages.paged(window), pages.dense(window), atol=1e-12, rtol=0)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 3, 40])
def test_contexts_longer_than_a_tile(
    block_size: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "TILE_TOKENS", 32)
    pages = Pages(
        [
            Case(97, 1),
            Case(5, 1),
            Case(63, 1),  # ends with a tile
            Case(64, 1),
            Case(0, 70),
            Case(33, 40),
            Case(60, 2, BUSHY),  # its nodes straddle two tiles
            Case(2, 2, BUSHY),
            Case(95, 1, trees.chain(3)),
        ],
        block_size=block_size,
    )
    torch.testing.assert_close(pages.paged(window), pages.dense(window), atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
@pytest.mark.parametrize("parents", [BUSHY, COMB, ROOTS])
def test_windows_in_trees_are_measured_in_positions(window: int, parents: list[int]) -> None:
    pages = Pages([Case(6, 1, parents)])
    torch.testing.assert_close(pages.paged(window), pages.dense(window), atol=1e-12, rtol=0)


def mask_from(num_before: int) -> Tensor:
    """Who sees whom in BUSHY, by a mask that begins with committed tokens before the tree."""
    seen = torch.ones(len(BUSHY), num_before, dtype=torch.bool)
    return torch.cat((seen, trees.ancestor_mask(BUSHY)), dim=1)


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_before", [0, 2])
def test_a_tree_level_by_level_equals_the_tree_at_once(
    block_size: int, window: int | None, num_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier levels count as computed; masks begin with them, or even before the tree."""
    monkeypatch.setattr(attention, "TILE_TOKENS", 8)
    num_committed = [7, 12]
    pages = Pages([Case(n - 1, 1, BUSHY) for n in num_committed], block_size=block_size)
    at_once = pages.paged(window).unflatten(0, (2, -1))[:, 1:]
    queries = torch.stack(pages.q)[:, 1:]
    masks = [mask_from(num_before), mask_from(num_before + 1)]
    depths = trees.depths(BUSHY)
    for depth in range(max(depths) + 1):
        level = [node for node in range(len(BUSHY)) if depths[node] == depth]
        plan = AttentionPlan(
            num_computed=[n + level[0] for n in num_committed],
            num_pending=[len(level)] * 2,
            tables=pages.tables,
            positions=[n + depth for n in num_committed for _ in level],
            ancestors=[mask[level, : mask.shape[1] - len(BUSHY) + level[-1] + 1] for mask in masks],
        )
        packed = queries[:, level].flatten(0, 1)
        out = paged_attention(packed, pages.keys, pages.values, plan, scale=SCALE, window=window)
        expected = at_once[:, level].flatten(0, 1)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("case", MIXED, ids=str)
def test_a_sequence_alone_with_blocks_to_spare(case: Case) -> None:
    pages = Pages([case], spare_per_table=3)
    torch.testing.assert_close(pages.paged(), pages.dense(), atol=1e-12, rtol=0)


def test_neighbours_with_blocks_to_spare() -> None:
    pages = Pages([Case(2, 1), Case(9, 1), Case(25, 1)], spare_per_table=3)
    torch.testing.assert_close(pages.paged(), pages.dense(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [None, 5])
def test_it_does_not_matter_where_the_blocks_lie(window: int | None) -> None:
    outs = [Pages(MIXED, layout=layout).paged(window) for layout in range(3)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_a_poisoned_sequence_poisons_nobody_else() -> None:
    healthy, sick = Pages(MIXED), Pages(MIXED)
    block = sick.tables[2][0]
    sick.keys[block], sick.values[block] = torch.nan, torch.nan
    row = sum(case.num_pending for case in MIXED[:2])
    others = torch.arange(len(healthy.paged())) != row
    assert sick.paged()[row].isnan().all()
    assert torch.equal(sick.paged()[others], healthy.paged()[others])


def test_a_child_does_not_see_its_siblings() -> None:
    pages = Pages([Case(6, 1, BUSHY)])
    before = pages.paged()
    block, offset = divmod(7 + 1, 4)  # key of node 1
    pages.values[pages.tables[0][block], offset] += 1
    changed = (pages.paged() != before).flatten(1).any(1).nonzero().flatten() - 1
    assert changed.tolist() == [1, 4, 7]  # node 1 and what descends from it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_computed_in_float32(dtype: torch.dtype) -> None:
    pages = Pages(MIXED, dtype=dtype)
    exact = [
        dense_attention(
            torch.cat((q.new_zeros(case.num_computed, *q.shape[1:]), q)).double(),
            k.double(),
            v.double(),
            scale=SCALE,
        )[case.num_computed :]
        for case, q, k, v in zip(MIXED, pages.q, pages.k, pages.v, strict=True)
        if case.ancestors is None
    ]
    chains = torch.cat([torch.full((case.num_pending,), case.ancestors is None) for case in MIXED])
    paged = pages.paged()[chains]
    assert paged.dtype == dtype
    # Rounded once, at the end.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(paged.double(), torch.cat(exact), atol=1e-5, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 3])
def test_dense_attention_by_hand(window: int | None) -> None:
    numbers = torch.Generator().manual_seed(2)
    q = torch.randn(5, 2, HEAD_DIM, generator=numbers, dtype=torch.float64)
    k, v = torch.randn(2, 5, 1, HEAD_DIM, generator=numbers, dtype=torch.float64)
    out = dense_attention(q, k, v, scale=SCALE, window=window)
    for t in range(5):
        first = 0 if window is None else max(0, t - window + 1)
        for head in range(2):
            weights = torch.exp(SCALE * (k[first : t + 1, 0] @ q[t, head]))
            expected = weights @ v[first : t + 1, 0] / weights.sum()
            torch.testing.assert_close(out[t, head], expected, atol=1e-12, rtol=0)
