"""Room in the pages that a drafter keeps beside the target's."""

from collections.abc import Callable, Iterable

from slipstream.kv.blocks import BlockManager, OutOfBlocks
from slipstream.kv.cache import KVCache


def reserve(
    blocks: BlockManager,
    cache: KVCache,
    seq_id: int,
    keys: range,
    *,
    held: Iterable[int],
    wanted: set[int],
    forget: Callable[[int], None],
) -> bool:
    """Slots for a sequence's keys, at the expense of those not drafted for now, or else of itself.

    Args:
        held: sequences with pages, those to be forgotten first at the front; read anew each time.
        wanted: those among them that must stay.
        forget: gives a sequence's pages back.

    Returns:
        Whether there is room; the sequence is forgotten where there is none.
    """
    while True:
        try:
            copies = blocks.reserve(seq_id, keys.start, keys.stop)
        except OutOfBlocks:
            idle = next((other for other in held if other not in wanted), seq_id)
            forget(idle)
            if idle == seq_id:
                return False
        else:
            cache.copy_blocks(copies)
            return True
