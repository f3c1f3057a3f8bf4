"""The step: draft, verify in one pass, accept, roll back. The whole algorithm is here.

Plain decoding is this very code with empty drafts, and a prompt is just many pending tokens.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.core.draft import NO_DRAFT, Draft, Verdict
from slipstream.core.grammar import permitted
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOutput
from slipstream.drafters.base import Drafter
from slipstream.engine.batch import pack
from slipstream.engine.controller import Controller
from slipstream.engine.scheduler import Plan, Scheduler
from slipstream.engine.verifier import Verifier
from slipstream.maths import distributions
from slipstream.models.batch import key_slots
from slipstream.models.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Parts:
    """What a step works with; `build.py` chooses the concrete classes."""

    scheduler: Scheduler
    controller: Controller
    drafter: Drafter
    runner: ModelRunner
    verifier: Verifier


@dataclass(slots=True)
class StepResult:
    """What a step did.

    Attributes:
        plan: who ran.
        budgets: per planned sequence, nodes its draft was allowed.
        drafts, verdicts: per planned sequence; no verdict where the pass stopped short of the end
            of the committed tokens, or where the logits were unusable.
        poisoned: sequences whose logits contained NaN; nothing else was touched by it.
        target: the pass; until its tokens are committed.
        draft_sec, verify_sec, total_sec: where the time went; `total` includes both.
    """

    plan: Plan
    budgets: list[int] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    verdicts: list[Verdict | None] = field(default_factory=list)
    poisoned: list[Sequence] = field(default_factory=list)
    target: TargetOutput | None = None
    draft_sec: float = 0.0
    verify_sec: float = 0.0
    total_sec: float = 0.0


def step(parts: Parts) -> StepResult:
    """Decide one step's tokens. K/V of the accepted path ends up contiguous; the caller commits."""
    began = time.perf_counter()
    plan = parts.scheduler.plan()
    for seq in plan.preempted:
        parts.drafter.forget(seq.seq_id)
    result = StepResult(plan)
    if not plan.seqs:
        return result

    # 1. Draft, for sequences the pass will reach the end of, into room that costs nobody else.
    result.budgets, result.drafts = _propose(parts, plan)
    drafted = time.perf_counter()

    # 2. Verify: one pass over everything pending.
    blocks, cache = parts.scheduler.blocks, parts.runner.cache
    cache.copy_blocks(plan.copies)
    target = parts.runner.forward(pack(plan, result.drafts, blocks, parts.runner.device))
    verified = time.perf_counter()

    # 3. Accept: a pure function of logits, drafts and noise.
    result.verdicts, result.poisoned = _accept(parts.verifier, target, plan, result.drafts)
    parts.drafter.observe(plan.seqs, target, result.verdicts)

    # 4. Roll back: the accepted path moves together; blocks past it go back when committed.
    cache.move_slots(_moves(parts, plan, result.verdicts))

    result.target = target
    result.draft_sec = drafted - began
    result.verify_sec = verified - drafted
    result.total_sec = time.perf_counter() - began
    parts.controller.observe(result)
    return result


def _propose(parts: Parts, plan: Plan) -> tuple[list[int], list[Draft]]:
    """What each planned sequence was allowed, and what was drafted."""
    wanted = parts.controller.budgets(plan)
    budgets = [0] * len(plan.seqs)
    drafts = [NO_DRAFT] * len(plan.seqs)
    ready = [i for i in range(len(plan.seqs)) if plan.reaches_end(i)]
    for i in ready:
        seq = plan.seqs[i]
        # The pass always yields one token more than it accepts.
        if seq.room > 1 and (size := seq.params.draft_limit(wanted[i])):
            budgets[i] = parts.scheduler.reserve_draft(seq, plan.num_tokens[i], size, plan)
    proposed = parts.drafter.propose([plan.seqs[i] for i in ready], [budgets[i] for i in ready])
    for i, draft in zip(ready, proposed, strict=True):
        assert len(draft) <= budgets[i], f"{len(draft)} nodes drafted, {budgets[i]} allowed"
        seq = plan.seqs[i]
        drafts[i] = draft.clipped(seq.room - 1)
        if seq.grammar is not None:
            drafts[i] = permitted(drafts[i], seq.output, seq.grammar)
    return budgets, drafts


def _accept(
    verifier: Verifier, target: TargetOutput, plan: Plan, drafts: Seq[Draft]
) -> tuple[list[Verdict | None], list[Sequence]]:
    verdicts: list[Verdict | None] = [None] * len(plan.seqs)
    poisoned = []
    usable = distributions.usable(target.logits).tolist()
    healthy, first_rows = [], []
    for i, first_row in enumerate(target.first_rows):
        if first_row is None:
            continue
        if all(usable[first_row : first_row + 1 + len(drafts[i])]):
            healthy.append(i)
            first_rows.append(first_row)
        else:
            poisoned.append(plan.seqs[i])
    if healthy:
        decided = verifier(
            target.logits, first_rows, [plan.seqs[i] for i in healthy], [drafts[i] for i in healthy]
        )
        for i, verdict in zip(healthy, decided, strict=True):
            verdicts[i] = verdict
    return verdicts, poisoned


def _moves(parts: Parts, plan: Plan, verdicts: Seq[Verdict | None]) -> list[tuple[int, int]]:
    """Cache slots of accepted nodes that are not yet where a chain would have put them."""
    moves: list[tuple[int, int]] = []
    for seq, verdict in zip(plan.seqs, verdicts, strict=True):
        if verdict is None:
            continue
        base = len(seq.tokens)  # key index of node 0
        displaced = [(node, rank) for rank, node in enumerate(verdict.path) if node != rank]
        blocks = parts.scheduler.blocks
        source = key_slots(blocks, seq.seq_id, [base + node for node, _ in displaced])
        destination = key_slots(blocks, seq.seq_id, [base + rank for _, rank in displaced])
        moves += zip(source, destination, strict=True)
    return moves
