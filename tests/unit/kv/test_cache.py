"""Where K/V lands in the pool, and that copies and moves read before they write."""

import gc
import sys

import psutil
import pytest
import torch

from slipstream.kv.cache import KVCache, promised_bytes

SHAPE = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 4, "num_blocks": 5, "block_size": 2}


def filled() -> tuple[KVCache, torch.Tensor]:
    """A cache in which every number is different, and a copy of its pool."""
    cache = KVCache(**SHAPE, dtype=torch.float32, device="cpu")
    cache.pool.copy_(torch.arange(cache.pool.numel()).view_as(cache.pool))
    return cache, cache.pool.clone()


def by_slot(pool: torch.Tensor) -> torch.Tensor:
    return pool.flatten(2, 3)


def test_write_puts_tokens_into_their_slots_and_nowhere_else() -> None:
    cache, before = filled()
    slots = torch.tensor([7, 0, 3])
    keys = -torch.arange(1.0, 37).view(3, 3, 4)
    values = keys * 100
    cache.write(1, slots, keys, values)

    expected = by_slot(before)
    expected[1, 0, slots], expected[1, 1, slots] = keys, values
    assert torch.equal(by_slot(cache.pool), expected)
    layer_keys, layer_values = cache.layer(1)
    assert layer_keys.shape == (5, 2, 3, 4)
    assert torch.equal(layer_keys[3, 1], keys[0])  # slot 7 is offset 1 of block 3
    assert torch.equal(layer_values[0, 0], values[1])


def test_write_converts_to_the_type_of_the_pool() -> None:
    cache = KVCache(**SHAPE, dtype=torch.bfloat16, device="cpu")
    keys = torch.full((1, 3, 4), 1 / 3)
    cache.write(0, torch.tensor([4]), keys, 2 * keys)
    assert torch.equal(cache.layer(0)[0][2, 0], keys[0].bfloat16())
    assert torch.equal(cache.layer(0)[1][2, 0], (2 * keys[0]).bfloat16())


@pytest.mark.parametrize(
    "copies", [[], [(0, 4)], [(0, 3), (0, 4)], [(1, 2), (2, 3)], [(1, 2), (2, 1)]]
)
def test_copy_blocks_copies_all_layers_at_once(copies: list[tuple[int, int]]) -> None:
    cache, before = filled()
    cache.copy_blocks(copies)
    expected = before.clone()
    for source, destination in copies:
        expected[:, :, destination] = before[:, :, source]
    assert torch.equal(cache.pool, expected)


@pytest.mark.parametrize("moves", [[], [(9, 1)], [(4, 3), (5, 4), (7, 5)], [(3, 4), (4, 3)]])
def test_move_slots_moves_all_layers_at_once(moves: list[tuple[int, int]]) -> None:
    cache, before = filled()
    cache.move_slots(moves)
    expected = by_slot(before).clone()
    for source, destination in moves:
        expected[:, :, destination] = by_slot(before)[:, :, source]
    assert torch.equal(by_slot(cache.pool), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_per_block_is_what_the_pool_takes(dtype: torch.dtype) -> None:
    cache = KVCache(**SHAPE, dtype=dtype, device="cpu")
    per_block = KVCache.bytes_per_block(2, 3, 4, 2, dtype)
    assert per_block * SHAPE["num_blocks"] == cache.pool.nbytes


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")
def test_a_pool_takes_memory_as_it_is_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = KVCache(**{**SHAPE, "num_blocks": 2**20}, dtype=torch.float32, device="cpu")
    keys, _ = cache.layer(1)
    assert not keys[-1].any()
    assert cache.pool.nbytes > 2**28
    assert process.memory_info().rss - before < 2**26


def test_pools_count_as_taken_while_they_live() -> None:
    gc.collect()  # what other tests left behind
    before = promised_bytes()
    cache = KVCache(**SHAPE, dtype=torch.float32, device="cpu")
    assert promised_bytes() - before == cache.pool.nbytes
    del cache
    assert promised_bytes() == before
