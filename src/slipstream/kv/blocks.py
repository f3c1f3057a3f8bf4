"""Which KV blocks belong to whom. Pure Python; it knows ids and hashes, never tensors.

Every block is in exactly one state:

    free    nobody's, content worthless
    used    in the tables of one or more sequences (reference count > 0)
    cached  in no table, but full of committed tokens that a later prompt may begin with

    free + used + cached = total                                 (`check_integrity` says so)

A full block of committed tokens is named by a hash chained over everything before it, so equal
names mean equal prefixes. Drafted tokens are never hashed. Cached blocks are evicted least
recently used first, and of one sequence the tail before the head.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


class OutOfBlocks(Exception):
    """The pool cannot satisfy a reservation; nothing was changed."""


@dataclass(slots=True)
class _Table:
    """One sequence's blocks, the hashes of its full committed ones, and its sharing domain."""

    blocks: list[int]
    salt: bytes
    hashes: list[bytes] = field(default_factory=list)


class BlockManager:
    """Allocates, shares, forks, trims and frees blocks.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        prefix_caching: whether freed blocks stay findable by content.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, *, prefix_caching: bool = True):
        assert num_blocks > 0 and block_size > 0, (num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._tables: dict[int, _Table] = {}
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks a reservation can take: free ones, and cached ones by eviction."""
        return self.num_free + self.num_cached

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def has(self, seq_id: int) -> bool:
        return seq_id in self._tables

    def table(self, seq_id: int) -> list[int]:
        """The sequence's blocks, in order of position. Not to be modified."""
        return self._tables[seq_id].blocks

    def allocate(self, seq_id: int, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Give a new sequence a table that begins with every cached block its prompt matches.

        At least the last token is left to compute, since its logits are wanted.

        Returns:
            The number of tokens whose K/V is already there.
        """
        assert seq_id not in self._tables, f"sequence {seq_id} already has a table"
        table = _Table([], salt)
        if self.prefix_caching:
            for index in range((len(tokens) - 1) // self.block_size):
                digest = self._digest(table, tokens, index)
                block = self._by_hash.get(digest)
                if block is None:
                    break
                self._acquire(block)
                table.blocks.append(block)
                table.hashes.append(digest)
        self._tables[seq_id] = table
        return len(table.blocks) * self.block_size

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Give a new sequence the first `num_tokens` of another's K/V without copying any."""
        assert child_id not in self._tables, f"sequence {child_id} already has a table"
        parent = self._tables[parent_id]
        count = self.blocks_for(num_tokens)
        assert count <= len(parent.blocks), f"{parent_id} holds fewer than {num_tokens} tokens"
        for block in parent.blocks[:count]:
            self._acquire(block)
        hashes = parent.hashes[: num_tokens // self.block_size]
        self._tables[child_id] = _Table(parent.blocks[:count], parent.salt, hashes)

    def reserve(self, seq_id: int, num_computed: int, num_tokens: int) -> list[tuple[int, int]]:
        """Make slots num_computed .. num_tokens - 1 writable by this sequence alone.

        Returns:
            Copies (source block, destination block) to make before anything is written: a
            partial block that is shared becomes private.

        Raises:
            OutOfBlocks: the pool has too few blocks; nothing was changed.
        """
        table = self._tables[seq_id].blocks
        first = num_computed // self.block_size
        shared = [i for i in range(first, len(table)) if self._ref_counts[table[i]] > 1]
        num_new = max(self.blocks_for(num_tokens) - len(table), 0)
        if num_new + len(shared) > self.num_available:
            raise OutOfBlocks
        copies = []
        for i in shared:
            private = self._take()
            copies.append((table[i], private))
            self._release(table[i])
            table[i] = private
        for block in table[first:]:
            self._unname(block)
        table.extend(self._take() for _ in range(num_new))
        return copies

    def commit(self, seq_id: int, tokens: Sequence[int], num_computed: int) -> None:
        """Make blocks that are now full of committed, computed tokens findable by content."""
        if not self.prefix_caching:
            return
        table = self._tables[seq_id]
        for index in range(len(table.hashes), min(num_computed, len(tokens)) // self.block_size):
            digest = self._digest(table, tokens, index)
            table.hashes.append(digest)
            block = table.blocks[index]
            # If the same content is known already, this copy simply stays anonymous.
            if digest not in self._by_hash and block not in self._hash_of:
                self._by_hash[digest] = block
                self._hash_of[block] = digest

    def trim(self, seq_id: int, num_tokens: int) -> None:
        """Return the tail blocks that no slot below `num_tokens` lies in. This is rollback."""
        table = self._tables[seq_id]
        keep = self.blocks_for(num_tokens)
        for block in reversed(table.blocks[keep:]):
            self._release(block)
        del table.blocks[keep:]
        del table.hashes[num_tokens // self.block_size :]

    def free(self, seq_id: int, *, reusable: bool = True) -> None:
        """Return every block of a sequence and forget it.

        Args:
            reusable: whether its full blocks may be found by later prompts.
        """
        if not reusable:
            for block in self._tables[seq_id].blocks:
                self._unname(block)
        self.trim(seq_id, 0)
        del self._tables[seq_id]

    def check_integrity(self) -> None:
        """Assert every invariant; O(pool). Run after each step in tests and when idle."""
        counts = Counter(block for table in self._tables.values() for block in table.blocks)
        free, cached, used = set(self._free), set(self._cached), set(counts)
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & cached or free & used or cached & used), "a block has two states"
        assert len(free) + len(cached) + len(used) == self.num_blocks, "a block was lost"
        for block, count in enumerate(self._ref_counts):
            assert count == counts[block], f"block {block}: {count} owners, not {counts[block]}"
        for seq_id, table in self._tables.items():
            assert len(set(table.blocks)) == len(table.blocks), f"{seq_id} holds a block twice"
            assert len(table.hashes) <= len(table.blocks), f"{seq_id} hashed more than it holds"
        assert {b: h for h, b in self._by_hash.items()} == self._hash_of, "hash maps disagree"
        assert cached <= self._hash_of.keys(), "a cached block cannot be found"
        assert not free & self._hash_of.keys(), "a free block can be found"

    def _digest(self, table: _Table, tokens: Sequence[int], index: int) -> bytes:
        """The name of block `index`: a hash over everything from the salt to its last token."""
        before = table.hashes[index - 1] if index else table.salt
        content = array("q", tokens[index * self.block_size : (index + 1) * self.block_size])
        chained = hashlib.blake2b(digest_size=16)
        chained.update(len(before).to_bytes(8, "little") + before + content.tobytes())
        return chained.digest()

    def _acquire(self, block: int) -> None:
        self._cached.pop(block, None)
        self._ref_counts[block] += 1

    def _release(self, block: int) -> None:
        self._ref_counts[block] -= 1
        assert self._ref_counts[block] >= 0, f"block {block} freed twice"
        if self._ref_counts[block] == 0:
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def _take(self) -> int:
        """A block for writing, by eviction if need be."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._unname(block)
        self._ref_counts[block] = 1
        return block

    def _unname(self, block: int) -> None:
        """A block about to be written no longer is what its name says."""
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._by_hash[digest]
