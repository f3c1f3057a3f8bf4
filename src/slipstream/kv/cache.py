"""The tensors that block ids index. One pool for all layers' K and V.

    pool   [L, 2, num_blocks, block_size, H_kv, D]       2: keys, values; 1 if they are the same
    slot   block * block_size + offset                    the address of one token

Slots past a sequence's `num_computed` hold garbage by definition and are never cleared.
"""

import math
import mmap
import os
from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from slipstream.core.config import ModelConfig

_on_cpu: "WeakSet[KVCache]" = WeakSet()


def promised_bytes() -> int:
    """Of all pools in main memory: the system counts what is not yet written of them as free."""
    return sum(cache.pool.nbytes for cache in _on_cpu)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose pages, on a CPU, come into being as they are written.

    A pool that takes a quarter of memory and serves one chat then costs what the chat uses.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Of pages of the common size: the first write to a large one costs 3 us in every step where
    # a virtual machine keeps track of them.
    kind = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, **kind)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class KVCache:
    """Pre-allocated K/V of `num_blocks` blocks.

    Args:
        num_layers, num_kv_heads, head_dim: of the model.
        num_blocks, block_size: of the pool.
        num_planes: 2; or 1 where keys and values are one latent, kept once.
        dtype, device: of the tensors.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_planes: int = 2,
    ):
        shape = (num_layers, num_planes, num_blocks, block_size, num_kv_heads, head_dim)
        self.pool = _zeros(shape, dtype, torch.device(device))
        if self.pool.device.type == "cpu":
            _on_cpu.add(self)
        self._slots = self.pool.flatten(2, 3)  # [L, 2 or 1, num_slots, H_kv, D]

    @classmethod
    def for_model(
        cls,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "KVCache":
        """A cache of the shape a model needs."""
        return cls(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            device=device,
            num_planes=config.num_kv_planes,
        )

    @staticmethod
    def bytes_per_block(
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        num_planes: int = 2,
    ) -> int:
        return num_planes * num_layers * num_kv_heads * head_dim * block_size * dtype.itemsize

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [num_blocks, block_size, H_kv, D]."""
        return self.pool[index, 0], self.pool[index, -1]

    def write(
        self,
        layer: int,
        slots: Tensor,  # [T] int64
        keys: Tensor,  # [T, H_kv, D]
        values: Tensor,  # [T, H_kv, D]
    ) -> None:
        """Store one layer's K/V of T tokens."""
        self._slots[layer, 0].index_copy_(0, slots, keys.to(self.pool.dtype))
        if self.pool.shape[1] == 2:
            self._slots[layer, 1].index_copy_(0, slots, values.to(self.pool.dtype))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, for shared blocks that become private."""
        if copies:
            source, destination = self._indices(copies)
            self.pool.index_copy_(2, destination, self.pool.index_select(2, source))

    def move_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move tokens between slots in all layers. All are read before any is written."""
        if moves:
            source, destination = self._indices(moves)
            self._slots.index_copy_(2, destination, self._slots.index_select(2, source))

    def _indices(self, pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        source, destination = torch.tensor(pairs, device=self.pool.device).unbind(1)
        return source, destination
