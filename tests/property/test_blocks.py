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
        num_blocks=st.integers(6, 16), block_size=st.integers(1, 4), no_caching=st.integers(0, 4)
    )
    def build(self, num_blocks: int, block_size: int, no_caching: int) -> None:
        self.blocks = BlockManager(num_blocks, block_size, prefix_caching=no_caching < 4)
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

    @rule(prompt=st.lists(tokens, min_size=1, max_size=10), salt=salts, missing=st.integers(0, 3))
    def admit(self, prompt: list[int], salt: bytes, missing: int) -> None:
        """A prompt arrives and is computed, perhaps not to its end."""
        seq_id = self.next_id
        num_cached = self.blocks.allocate(seq_id, prompt, salt)
        assert num_cached < len(prompt)
        assert num_cached == len(self.blocks.table(seq_id)) * self.size
        assert not self.tainted & set(self.blocks.table(seq_id))
        self.add(Owner(prompt, salt, num_cached))
        self.every_table_leads_to_its_own_prefix()  # what was hit is what was asked for
        self.compute(seq_id, max(len(prompt) - missing, num_cached), 0)

    @precondition(lambda self: self.owners)
    @rule(
        data=st.data(),
        back=st.integers(0, 2),
        behind=st.lists(tokens, min_size=1, max_size=4),
        writes=st.booleans(),
    )
    def fork(self, data: st.DataObject, back: int, behind: list[int], writes: bool) -> None:
        parent_id, child_id = self.pick(data), self.next_id
        parent = self.owners[parent_id]
        num_tokens = max(parent.num_computed - back, 0)
        self.blocks.fork(parent_id, child_id, num_tokens)
        self.add(Owner(parent.tokens[:num_tokens] + behind, parent.salt, num_tokens))
        if writes:
            self.compute(child_id, num_tokens + 1, 0)

    @precondition(lambda self: self.owners)
    @rule(
        data=st.data(),
        missing=st.integers(0, 2),
        num_drafted=st.integers(0, 4),
        emitted=st.lists(tokens, max_size=3),
        trims=st.booleans(),
    )
    def step(
        self,
        data: st.DataObject,
        missing: int,
        num_drafted: int,
        emitted: list[int],
        trims: bool,
    ) -> None:
        """Pending tokens and a draft are computed, then the answer grows."""
        seq_id = self.pick(data)
        owner = self.owners[seq_id]
        stop = max(len(owner.tokens) - missing, owner.num_computed)
        if self.compute(seq_id, stop, num_drafted):
            owner.tokens += emitted
            if trims:
                self.blocks.trim(seq_id, stop)

    def compute(self, seq_id: int, stop: int, num_drafted: int) -> bool:
        owner = self.owners[seq_id]
        start, end = owner.num_computed, stop + num_drafted
        if not self.reserve(seq_id, start, end):
            return False
        for index in range(start, end):
            slot = self.slot(seq_id, index)
            self.slots[slot] = owner.content(index) if index < stop else f"draft of {seq_id}"
            self.tainted.discard(slot // self.size)
        owner.num_computed = stop
        self.blocks.commit(seq_id, owner.tokens, stop)
        return True

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
            self.release(max(self.owners), reusable=True)  # as if the youngest were preempted
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
    @rule(data=st.data(), back=st.integers(1, 4), instead=st.lists(tokens, min_size=1, max_size=4))
    def roll_back(self, data: st.DataObject, back: int, instead: list[int]) -> None:
        """The counter goes back, and other tokens take the place of those past it."""
        seq_id = self.pick(data)
        owner = self.owners[seq_id]
        owner.num_computed = max(owner.num_computed - back, 0)
        owner.tokens = owner.tokens[: owner.num_computed] + instead
        self.blocks.trim(seq_id, owner.num_computed)
        self.compute(seq_id, len(owner.tokens), 0)

    @precondition(lambda self: len(self.owners) > 2)
    @rule(data=st.data(), reusable=st.booleans())
    def free(self, data: st.DataObject, reusable: bool) -> None:
        self.release(self.pick(data), reusable)

    def release(self, seq_id: int, reusable: bool) -> None:
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
TestPool.settings = settings(max_examples=120, stateful_step_count=40)
