"""Who runs in a step, and with how many tokens.

Sequences already running go first, oldest first; waiting ones are admitted while tokens, seats and
blocks last. When blocks run out the youngest running sequence is preempted: its blocks go back
and it recomputes later, from the same tokens and the same noise, so nothing it says changes.

After a step that raised, those who ran in it are suspects: each runs alone until it has a token.
"""

from collections import deque
from dataclasses import dataclass, field

from slipstream.core.sequence import Sequence, Status
from slipstream.kv.blocks import BlockManager, OutOfBlocks


@dataclass(slots=True)
class Plan:
    """One step.

    Attributes:
        seqs: who runs.
        num_tokens: how many committed tokens of each are computed.
        copies: blocks to copy before the pass writes, (source, destination).
        preempted: who lost their blocks while planning.
    """

    seqs: list[Sequence] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    def reaches_end(self, index: int) -> bool:
        """Whether the pass computes all pending tokens of a sequence, so that it can be sampled."""
        return self.num_tokens[index] == self.seqs[index].num_pending


class Scheduler:
    """Queues of sequences, and the rule that fills a step.

    Args:
        blocks: the pool; the scheduler reserves and frees, nobody else does.
        max_num_seqs: seats.
        max_num_batched_tokens: token budget of a step.
    """

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.suspects: set[int] = set()  # ids, all of waiting or running sequences

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def plan(self) -> Plan:
        """Fill a step. Every planned sequence holds the blocks its tokens need."""
        plan = Plan()
        budget = self.max_num_batched_tokens
        for seq in list(self.running):
            if budget == 0:
                break
            if seq.status is not Status.RUNNING:
                continue  # preempted by an older one a moment ago
            num_tokens = min(seq.num_pending, budget)
            if self._reserve_or_preempt(seq, num_tokens, plan):
                budget -= num_tokens
        # Someone who was just preempted would only be preempted again.
        if not plan.preempted:
            self._admit(plan, budget)
        return plan

    def reserve_draft(self, seq: Sequence, num_tokens: int, wanted: int, plan: Plan) -> int:
        """Room for a draft behind the tokens planned for a sequence, if it costs nobody else.

        Returns:
            How many drafted tokens fit, at most `wanted`.
        """
        base = seq.num_computed + num_tokens
        in_place = len(self.blocks.table(seq.seq_id)) * self.blocks.block_size - base
        fitting = min(wanted, in_place + self.blocks.num_available * self.blocks.block_size)
        if fitting > in_place:
            plan.copies += self.blocks.reserve(seq.seq_id, base, base + fitting)
        return max(fitting, 0)

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is, and return its blocks."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        if self.blocks.has(seq.seq_id):
            self.blocks.free(seq.seq_id)
        self.suspects.discard(seq.seq_id)
        seq.status = Status.FINISHED

    def isolate(self) -> None:
        """Make suspects of all running sequences; their blocks go back, they are next in line."""
        for seq in reversed(self.running):
            seq.leader = None  # whoever runs alone computes its own prompt
            self._step_aside(seq, 0)
            self.suspects.add(seq.seq_id)
        self.running.clear()

    def acquit(self, seq: Sequence) -> None:
        """A sequence had a step of its own; while others are suspects it waits behind them."""
        self.suspects.discard(seq.seq_id)
        if self.suspects:
            self.running.remove(seq)
            self._step_aside(seq, len(self.suspects))

    def _admit(self, plan: Plan, budget: int) -> None:
        passed_over: deque[Sequence] = deque()
        seats = 1 if self.suspects else self.max_num_seqs
        while self.waiting and budget > 0 and len(self.running) < seats:
            seq = self.waiting.popleft()
            if self._awaits_leader(seq):
                passed_over.append(seq)
                continue
            self._give_table(seq)
            num_tokens = min(seq.num_pending, budget)
            try:
                copies = self.blocks.reserve(
                    seq.seq_id, seq.num_computed, seq.num_computed + num_tokens
                )
            except OutOfBlocks:
                self._take_back(seq)
                self.waiting.appendleft(seq)
                break
            seq.status = Status.RUNNING
            self.running.append(seq)
            plan.seqs.append(seq)
            plan.num_tokens.append(num_tokens)
            plan.copies += copies
            budget -= num_tokens
        self.waiting.extendleft(reversed(passed_over))

    def _awaits_leader(self, seq: Sequence) -> bool:
        """Whether the prompt this answer could share is still being computed by a sibling."""
        leader = seq.leader
        return (
            leader is not None
            and leader.status is not Status.FINISHED
            and seq.num_output == 0
            and leader.num_computed < seq.num_prompt - 1
        )

    def _give_table(self, seq: Sequence) -> None:
        """Blocks that already hold the beginning: a sibling's prompt, or cached prefixes."""
        leader = seq.leader
        if leader is not None and seq.num_output == 0 and self.blocks.has(leader.seq_id):
            seq.num_computed = seq.num_prompt - 1
            self.blocks.fork(leader.seq_id, seq.seq_id, seq.num_computed)
        else:
            seq.num_computed = self.blocks.allocate(seq.seq_id, seq.tokens, seq.salt)
        seq.num_cached = min(seq.num_computed, seq.num_prompt)

    def _take_back(self, seq: Sequence) -> None:
        self.blocks.free(seq.seq_id)
        seq.num_computed = 0

    def _reserve_or_preempt(self, seq: Sequence, num_tokens: int, plan: Plan) -> bool:
        """Blocks for a running sequence, at the expense of younger ones or of itself."""
        while True:
            try:
                stop = seq.num_computed + num_tokens
                copies = self.blocks.reserve(seq.seq_id, seq.num_computed, stop)
            except OutOfBlocks:
                youngest = self.running[-1]
                self._preempt(youngest, plan)
                if youngest is seq:
                    return False
                continue
            plan.seqs.append(seq)
            plan.num_tokens.append(num_tokens)
            plan.copies += copies
            return True

    def _step_aside(self, seq: Sequence, place: int) -> None:
        self._take_back(seq)
        seq.status = Status.WAITING
        self.waiting.insert(place, seq)

    def _preempt(self, seq: Sequence, plan: Plan) -> None:
        assert seq not in plan.seqs, "only sequences younger than the planned ones are preempted"
        self.running.remove(seq)
        self._step_aside(seq, 0)
        seq.num_preemptions += 1
        plan.preempted.append(seq)
