"""Any sequence of block operations keeps every promise, judged by the K/V they would leave.

Beside the manager stands a simulated cache: each slot remembers the whole prefix it was computed
for. Copies are made and tokens written exactly as the engine does, drafts included. If a table
ever leads to a slot with other content, some block was shared, named, evicted or copied wrongly.
"""

from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.kv.blocks import BlockManager, OutOfBlocks

# A tiny alphabet, so that equal prefixes are common.
tokens = st.integers(0, 1)
salts = st.sampled_from([b"", b"", b"other"])


@dataclass
class Owner:
    """A sequence: what it holds, and how far its K/V is valid."""

    tokens: list[int]
    salt: bytes
    num_computed: int

    def content(self, index: int) -> tuple[bytes, tuple[int, ...]]:
        """What K/V at this position depends on, and who may look at it."""
        return self.salt, tuple(self.tokens[: index + 1])


class Pool(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 9), block_size=st.integers(1, 3), caching=st.integers(0, 4)
    )
    def build(self, num_blocks: int, block_size: int, caching: int) -> None:
        self.blocks = BlockManager(num_blocks, block_size, prefix_caching=caching > 0)
        self.size = block_size
        self.slots: list[object] = [None] * (num_blocks * block_size)
        self.owners: dict[int, Owner] = {}
        self.tainted: set[int] = set()  # blocks that no prompt may find
        self.next_id = 0

    def add(self, owner: Owner) -> None:
        self.owners[self.next_id] = owner
        self.next_id += 1

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.owners)), label="sequence")

    def slot(self, seq_id: int, index: int) -> int:
        return self.blocks.table(seq_id)[index // self.size] * self.size + index % self.size

    def snapshot(self) -> object:
        tables = {seq_id: list(self.blocks.table(seq_id)) for seq_id in self.owners}
        return tables, self.blocks.num_free, self.blocks.num_cached

    @rule(prompt=st.lists(tokens, min_size=1, max_size=8), salt=salts)
    def allocate(self, prompt: list[int], salt: bytes) -> None:
        num_cached = self.blocks.allocate(self.next_id, prompt, salt)
        assert num_cached < len(prompt)
        assert num_cached == len(self.blocks.table(self.next_id)) * self.size
        assert not self.tainted & set(self.blocks.table(self.next_id))
        self.add(Owner(prompt, salt, num_cached))  # what was hit is judged by the invariant

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), behind=st.lists(tokens, min_size=1, max_size=4))
    def fork(self, data: st.DataObject, behind: list[int]) -> None:
        parent_id = self.pick(data)
        parent = self.owners[parent_id]
        num_tokens = data.draw(st.integers(0, parent.num_computed), label="num_tokens")
        self.blocks.fork(parent_id, self.next_id, num_tokens)
        self.add(Owner(parent.tokens[:num_tokens] + behind, parent.salt, num_tokens))

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), emitted=st.lists(tokens, max_size=3), num_drafted=st.integers(0, 4))
    def compute(self, data: st.DataObject, emitted: list[int], num_drafted: int) -> None:
        """A step: pending tokens and a draft are written, then the answer grows."""
        seq_id = self.pick(data)
        owner = self.owners[seq_id]
        start = owner.num_computed
        stop = data.draw(st.integers(start, len(owner.tokens)), label="stop")
        end = stop + num_drafted
        if not self.reserve(seq_id, start, end):
            return
        for index in range(start, end):
            slot = self.slot(seq_id, index)
            self.slots[slot] = owner.content(index) if index < stop else f"draft of {seq_id}"
            self.tainted.discard(slot // self.size)
        owner.num_computed = stop
        owner.tokens += emitted
        self.blocks.commit(seq_id, owner.tokens, stop)
        if data.draw(st.booleans(), label="trim"):
            self.blocks.trim(seq_id, stop)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), num_tokens=st.integers(0, 30))
    def only_reserve(self, data: st.DataObject, num_tokens: int) -> None:
        seq_id = self.pick(data)
        start = self.owners[seq_id].num_computed
        self.reserve(seq_id, start, start + num_tokens)

    def reserve(self, seq_id: int, start: int, stop: int) -> bool:
        before = self.snapshot()
        held = self.blocks.table(seq_id)
        owners = Counter(b for other in self.owners for b in self.blocks.table(other))
        num_shared = sum(owners[block] > 1 for block in held[start // self.size :])
        num_new = max(-(-stop // self.size) - len(held), 0)
        fits = num_shared + num_new <= self.blocks.num_available
        try:
            copies = self.blocks.reserve(seq_id, start, stop)
        except OutOfBlocks:
            assert not fits, "refused although there was room"
            assert self.snapshot() == before
            return False
        assert fits
        contents = [self.slots[s * self.size : (s + 1) * self.size] for s, _ in copies]
        for (_, destination), content in zip(copies, contents, strict=True):
            self.slots[destination * self.size : (destination + 1) * self.size] = content
        owners = Counter(b for other in self.owners for b in self.blocks.table(other))
        for index in range(start, stop):
            assert owners[self.slot(seq_id, index) // self.size] == 1, "written by two owners"
        return True

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), instead=st.lists(tokens, min_size=1, max_size=4))
    def roll_back(self, data: st.DataObject, instead: list[int]) -> None:
        """The counter goes back, and other tokens take the place of those past it."""
        seq_id = self.pick(data)
        owner = self.owners[seq_id]
        owner.num_computed = data.draw(st.integers(0, owner.num_computed), label="num_computed")
        owner.tokens = owner.tokens[: owner.num_computed] + instead
        self.blocks.trim(seq_id, owner.num_computed)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), reusable=st.booleans())
    def free(self, data: st.DataObject, reusable: bool) -> None:
        seq_id = self.pick(data)
        if not reusable:
            self.tainted |= set(self.blocks.table(seq_id))
        self.blocks.free(seq_id, reusable=reusable)
        del self.owners[seq_id]

    @invariant()
    def bookkeeping_holds(self) -> None:
        self.blocks.check_integrity()

    @invariant()
    def every_table_leads_to_its_own_prefix(self) -> None:
        for seq_id, owner in self.owners.items():
            for index in range(owner.num_computed):
                assert self.slots[self.slot(seq_id, index)] == owner.content(index)

    def teardown(self) -> None:
        for seq_id in getattr(self, "owners", ()):
            self.blocks.free(seq_id)
        if hasattr(self, "blocks"):
            self.blocks.check_integrity()
            assert self.blocks.num_used == 0


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=30)
