"""The block manager by hand: one promise, one example. Random sequences are in property/."""

from collections.abc import Callable

import pytest

from slipstream.kv.blocks import BlockManager, OutOfBlocks

SIZE = 4
PROMPT = list(range(10, 20))  # two full blocks and a half


def computed(
    blocks: BlockManager, seq_id: int, tokens: list[int] = PROMPT, salt: bytes = b""
) -> int:
    """Run a prompt through: allocate, reserve, commit. Returns the cached tokens."""
    num_cached = blocks.allocate(seq_id, tokens, salt)
    blocks.reserve(seq_id, num_cached, len(tokens))
    blocks.commit(seq_id, tokens, len(tokens))
    blocks.check_integrity()
    return num_cached


def state(blocks: BlockManager, *seq_ids: int) -> tuple[object, ...]:
    tables = [list(blocks.table(seq_id)) for seq_id in seq_ids]
    return blocks.num_free, blocks.num_cached, blocks.num_used, tables


def test_counts_cover_the_life_of_a_sequence() -> None:
    blocks = BlockManager(8, SIZE)
    assert not blocks.has(1)
    computed(blocks, 1)
    assert blocks.has(1)
    assert (blocks.num_free, blocks.num_cached, blocks.num_used) == (5, 0, 3)
    assert blocks.num_available == 5
    blocks.free(1)
    assert (blocks.num_free, blocks.num_cached, blocks.num_used) == (6, 2, 0)
    assert blocks.num_available == 8
    assert not blocks.has(1)


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for(num_tokens: int, expected: int) -> None:
    assert BlockManager(1, SIZE).blocks_for(num_tokens) == expected


# ---------------------------------------------------------------------------------------------
# Sharing by content


@pytest.mark.parametrize(
    ("tokens", "salt", "num_cached"),
    [
        (PROMPT, b"a", 8),
        (PROMPT[:9], b"a", 8),
        (PROMPT[:8], b"a", 4),  # the last token is always computed
        ([*PROMPT[:7], 99, *PROMPT[8:]], b"a", 4),  # differs in its second block
        ([99, *PROMPT[1:]], b"a", 0),  # an equal second block does not count
        ([*PROMPT[4:8], *PROMPT[4:8], 0], b"a", 0),  # nor does equal content further up
        (PROMPT, b"b", 0),
        (PROMPT, b"", 0),
        ([10], b"a", 0),
    ],
)
@pytest.mark.parametrize("still_running", [True, False])
def test_a_prompt_hits_exactly_its_equal_beginning(
    tokens: list[int], salt: bytes, num_cached: int, still_running: bool
) -> None:
    blocks = BlockManager(8, SIZE)
    assert computed(blocks, 1, salt=b"a") == 0
    shared = list(blocks.table(1))[: num_cached // SIZE]
    if not still_running:
        blocks.free(1)
    assert blocks.allocate(2, tokens, salt) == num_cached
    assert blocks.table(2) == shared
    blocks.check_integrity()


def test_trimmed_blocks_stay_findable() -> None:
    blocks = BlockManager(8, SIZE)
    computed(blocks, 1)
    blocks.trim(1, 0)
    assert blocks.num_cached == 2
    assert blocks.allocate(2, PROMPT) == 8


def test_unreusable_blocks_are_never_found() -> None:
    blocks = BlockManager(8, SIZE)
    computed(blocks, 1)
    blocks.free(1, reusable=False)
    blocks.check_integrity()
    assert blocks.num_free == 8
    assert blocks.allocate(2, PROMPT) == 0


def test_unreusable_blocks_stay_with_whoever_shares_them() -> None:
    blocks = BlockManager(8, SIZE)
    computed(blocks, 1)
    blocks.fork(1, 2, 8)
    blocks.free(1, reusable=False)
    blocks.check_integrity()
    assert blocks.num_used == 2
    assert blocks.allocate(3, PROMPT) == 0


def test_only_committed_and_computed_tokens_are_found() -> None:
    blocks = BlockManager(8, SIZE)
    blocks.allocate(1, PROMPT)
    blocks.reserve(1, 0, 12)
    blocks.commit(1, PROMPT, 7)  # one block computed
    assert blocks.allocate(2, PROMPT) == 4
    blocks.commit(1, PROMPT[:6], 12)  # computed, but drafted past 6
    assert blocks.allocate(3, PROMPT) == 4
    for seq_id in (1, 2, 3):
        blocks.free(seq_id)
    assert blocks.num_cached == 1


def test_without_prefix_caching_nothing_is_found() -> None:
    blocks = BlockManager(8, SIZE, prefix_caching=False)
    computed(blocks, 1)
    assert blocks.allocate(2, PROMPT) == 0
    blocks.free(1)
    assert blocks.num_cached == 0
    assert blocks.allocate(3, PROMPT) == 0


def test_a_rewritten_block_loses_its_name() -> None:
    blocks = BlockManager(8, SIZE)
    computed(blocks, 1)
    blocks.trim(1, 6)
    blocks.reserve(1, 6, 8)  # slots 6 and 7 will be written over
    blocks.free(1)
    assert blocks.allocate(2, PROMPT) == 4


def test_what_replaces_a_rolled_back_token_gets_a_new_name() -> None:
    blocks = BlockManager(8, SIZE)
    computed(blocks, 1)
    blocks.fork(1, 2, 8)
    tokens = [*PROMPT[:6], 50, 51, *range(60, 65)]
    blocks.trim(2, 6)
    blocks.reserve(2, 6, 12)
    blocks.commit(2, tokens, 12)
    assert blocks.allocate(3, tokens) == 12
    assert blocks.allocate(4, [*PROMPT[:8], *range(60, 65)]) == 8


def test_two_computations_of_one_content_share_its_name() -> None:
    blocks = BlockManager(8, SIZE)
    for seq_id in (1, 2):
        blocks.allocate(seq_id, PROMPT)
        blocks.reserve(seq_id, 0, 10)
    for seq_id in (1, 2):
        blocks.commit(seq_id, PROMPT, 10)
    blocks.free(2)  # the copies without a name
    assert blocks.num_cached == 0
    blocks.free(1)
    assert blocks.num_cached == 2
    blocks.check_integrity()


def test_cached_blocks_go_least_recently_used_and_tail_first() -> None:
    blocks = BlockManager(6, SIZE)
    old, new = PROMPT[:9], [*range(30, 38), 0]
    for seq_id, tokens in ((1, old), (2, new)):
        computed(blocks, seq_id, tokens)
        blocks.free(seq_id)
    assert (blocks.num_free, blocks.num_cached) == (2, 4)

    def evict_down_to(num_cached: int) -> list[int]:
        """What is left of (old, new) after enough blocks were taken."""
        blocks.allocate(9, [0])
        blocks.reserve(9, 0, SIZE * (6 - num_cached))
        found = []
        for seq_id, tokens in ((3, old), (4, new)):
            found.append(blocks.allocate(seq_id, tokens))
        for seq_id in (3, 4, 9):
            blocks.free(seq_id)
        blocks.check_integrity()
        return found

    assert evict_down_to(4) == [8, 8]
    assert evict_down_to(3) == [4, 8]
    assert evict_down_to(2) == [0, 8]
    assert evict_down_to(1) == [0, 4]


def test_a_hit_makes_blocks_recently_used() -> None:
    blocks = BlockManager(4, SIZE)
    old, new = PROMPT[:5], [30, 31, 32, 33, 0]
    for seq_id, tokens in ((1, old), (2, new), (3, old)):
        computed(blocks, seq_id, tokens)
        blocks.free(seq_id)
    blocks.allocate(4, [0])
    blocks.reserve(4, 0, 3 * SIZE)  # evicts one of the two
    assert blocks.allocate(5, new) == 0
    assert blocks.allocate(6, old) == 4


# ---------------------------------------------------------------------------------------------
# Forks and copies


def test_a_fork_shares_until_it_writes() -> None:
    blocks = BlockManager(8, SIZE)
    computed(blocks, 1)
    parent = list(blocks.table(1))
    blocks.fork(1, 2, 10)
    assert blocks.table(2) == parent
    assert blocks.num_used == 3

    (copy,) = blocks.reserve(2, 10, 11)
    assert copy == (parent[2], blocks.table(2)[2])
    assert blocks.table(1) == parent
    assert blocks.table(2)[:2] == parent[:2]
    assert blocks.table(2)[2] not in parent
    assert blocks.reserve(1, 10, 11) == []  # by now it is the only owner
    blocks.check_integrity()


@pytest.mark.parametrize(("num_tokens", "num_shared"), [(0, 0), (4, 1), (5, 2), (8, 2), (10, 3)])
def test_a_fork_takes_only_what_it_needs(num_tokens: int, num_shared: int) -> None:
    blocks = BlockManager(8, SIZE)
    computed(blocks, 1)
    blocks.fork(1, 2, num_tokens)
    assert blocks.table(2) == blocks.table(1)[:num_shared]


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    blocks = BlockManager(8, SIZE)
    computed(blocks, 1)
    blocks.fork(1, 2, 8)
    assert blocks.reserve(2, 8, 9) == []
    assert not set(blocks.table(2)[2:]) & set(blocks.table(1))


def test_a_fork_keeps_the_salt() -> None:
    blocks = BlockManager(8, SIZE)
    computed(blocks, 1, salt=b"a")
    blocks.fork(1, 2, 3)
    tokens = [*PROMPT[:3], 50, 51]
    blocks.reserve(2, 3, 5)
    blocks.commit(2, tokens, 5)
    assert blocks.allocate(3, tokens, b"a") == 4
    assert blocks.allocate(4, tokens) == 0


# ---------------------------------------------------------------------------------------------
# Running out


@pytest.mark.parametrize("wanted", [13, 100])
def test_a_failed_reservation_changes_nothing(wanted: int) -> None:
    blocks = BlockManager(4, SIZE)
    computed(blocks, 1)
    blocks.fork(1, 2, 10)
    before = state(blocks, 1, 2)
    with pytest.raises(OutOfBlocks):
        blocks.reserve(2, 10, wanted)  # one new block and one copy, but a single free block
    assert state(blocks, 1, 2) == before
    blocks.check_integrity()
    assert len(blocks.reserve(2, 10, 12)) == 1  # what fits still works


def test_a_reservation_can_take_the_whole_pool() -> None:
    blocks = BlockManager(4, SIZE)
    computed(blocks, 1)
    blocks.free(1)
    blocks.allocate(2, [0])
    assert blocks.reserve(2, 0, 16) == []
    assert (blocks.num_free, blocks.num_cached, blocks.num_used) == (0, 0, 4)
    blocks.check_integrity()


def test_reserving_what_is_held_takes_nothing() -> None:
    blocks = BlockManager(4, SIZE)
    computed(blocks, 1)
    before = state(blocks, 1)
    assert blocks.reserve(1, 10, 12) == []
    assert state(blocks, 1) == before


@pytest.mark.parametrize(("num_tokens", "num_left"), [(12, 3), (9, 3), (8, 2), (1, 1), (0, 0)])
def test_trim_returns_the_tail(num_tokens: int, num_left: int) -> None:
    blocks = BlockManager(8, SIZE)
    computed(blocks, 1)
    kept = blocks.table(1)[:num_left]
    blocks.trim(1, num_tokens)
    assert blocks.table(1) == kept
    blocks.check_integrity()


# ---------------------------------------------------------------------------------------------
# Impossible states


def test_a_sequence_has_one_table() -> None:
    blocks = BlockManager(8, SIZE)
    computed(blocks, 1)
    with pytest.raises(AssertionError, match="already has a table"):
        blocks.allocate(1, PROMPT)
    with pytest.raises(AssertionError, match="already has a table"):
        blocks.fork(1, 1, 4)
    with pytest.raises(AssertionError, match="fewer than"):
        blocks.fork(1, 2, 13)


@pytest.mark.parametrize(
    ("corrupt", "complaint"),
    [
        (lambda blocks: blocks._free.append(blocks._free[-1]), "free twice"),
        (lambda blocks: blocks._free.append(blocks.table(1)[0]), "two states"),
        (lambda blocks: blocks._free.pop(), "lost"),
        (lambda blocks: blocks._acquire(blocks.table(1)[0]), "owners"),
        (lambda blocks: blocks._hash_of.popitem(), "hash maps"),
        (lambda blocks: blocks._tables[1].hashes.extend([b"", b""]), "hashed more"),
    ],
)
def test_check_integrity_sees(corrupt: Callable[[BlockManager], object], complaint: str) -> None:
    blocks = BlockManager(8, SIZE)
    computed(blocks, 1)
    corrupt(blocks)
    with pytest.raises(AssertionError, match=complaint):
        blocks.check_integrity()
