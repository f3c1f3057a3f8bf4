"""What the engine is doing, in numbers: for `/metrics`, and for the page."""

import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream.core.counts import DraftCounts
from slipstream.core.outputs import Delta, RequestOutput
from slipstream.engine.auto import AutoController
from slipstream.engine.engine import Engine, EngineStats
from slipstream.engine.step import StepResult

# Steps the page draws, and steps that count for the speedup.
HISTORY, SPEEDUP_STEPS = 240, 64


@dataclass(frozen=True, slots=True)
class Moment:
    """One step in which tokens were committed and no prompt was computed.

    Attributes:
        at_sec: when, by the wall clock.
        batch: sequences in it.
        rows: tokens computed; more than `batch` where something was drafted.
        num_tokens: committed.
        total_sec: what it took.
        plain_sec: what plain decoding would have taken for these tokens; None if unknown.
    """

    at_sec: float
    batch: int
    rows: int
    num_tokens: int
    total_sec: float
    plain_sec: float | None

    @property
    def gamma(self) -> float:
        """Drafted tokens per sequence."""
        return (self.rows - self.batch) / self.batch


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine between two steps."""

    stats: EngineStats
    drafts: DraftCounts
    num_blocks: int
    reasons: dict[str, int]
    last_reason: str


def take_snapshot(engine: Engine) -> Snapshot:
    """Read an engine; only its own thread may."""
    scheduler = engine.parts.scheduler
    stats = engine.stats()
    drafts = DraftCounts()
    drafts.merge(stats.drafts)
    for seq in (*scheduler.running, *scheduler.waiting):
        drafts.merge(seq.draft_counts)
    reasons = engine.parts.controller.reasons
    return Snapshot(
        stats=stats,
        drafts=drafts,
        num_blocks=scheduler.blocks.num_blocks,
        reasons=dict(reasons.counts),
        last_reason=reasons.last,
    )


class History:
    """The latest steps, as an observer of the engine's thread."""

    def __init__(self) -> None:
        self.moments: deque[Moment] = deque(maxlen=HISTORY)

    def saw_step(self, engine: Engine, deltas: Seq[Delta], seconds: float) -> None:
        result = engine.last_step
        assert result is not None
        plan = result.plan
        batch, rows = len(plan.seqs), sum(plan.num_tokens) + sum(map(len, result.drafts))
        if not batch or sum(plan.num_tokens) != batch:
            return
        num_tokens = sum(len(delta.token_ids) for delta in deltas)
        plain_sec = _plain_sec(engine, result, num_tokens)
        self.moments.append(Moment(time.time(), batch, rows, num_tokens, seconds, plain_sec))

    def saw_end(self, output: RequestOutput) -> None:
        pass

    def speedup(self) -> float | None:
        """Against plain decoding, over the latest steps; None if its cost is not known."""
        latest = list(self.moments)[-SPEEDUP_STEPS:]
        plain = [moment.plain_sec for moment in latest if moment.plain_sec is not None]
        if not plain or len(plain) < len(latest):
            return None
        return sum(plain) / sum(moment.total_sec for moment in latest)


def _plain_sec(engine: Engine, result: StepResult, num_tokens: int) -> float | None:
    """Only a controller that measures costs can say."""
    controller = engine.parts.controller
    if not isinstance(controller, AutoController):
        return None
    batch = len(result.plan.seqs)
    context = sum(seq.num_computed for seq in result.plan.seqs)
    return float(controller.costs.predict(batch, context, batch)) * num_tokens / batch


def page_data(engine: Engine, history: History) -> dict[str, Any]:
    """What the page draws; only the engine's thread may ask."""
    snapshot = take_snapshot(engine)
    stats = snapshot.stats
    controller = engine.parts.controller
    costs = controller.costs if isinstance(controller, AutoController) else None
    return {
        "gamma_reason": snapshot.last_reason,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "blocks": {
            "used": stats.num_used_blocks,
            "cached": stats.num_cached_blocks,
            "free": stats.num_free_blocks,
        },
        "acceptance_by_position": snapshot.drafts.acceptance_by_position,
        "tokens_per_pass": snapshot.drafts.mean_acceptance_length,
        "speedup": history.speedup(),
        "seconds": {
            "draft": stats.draft_sec,
            "verify": stats.verify_sec,
            "rest": max(stats.total_sec - stats.draft_sec - stats.verify_sec, 0.0),
        },
        "steps": [
            {
                "at": moment.at_sec,
                "gamma": moment.gamma,
                "rows": moment.rows,
                "tokens": moment.num_tokens,
                "batch": moment.batch,
                "sec": moment.total_sec,
            }
            for moment in history.moments
        ],
        "roofline": None if costs is None else _roofline(costs.table.rows, costs.table.sec),
    }


def _roofline(rows: Seq[int], sec: Seq[float]) -> dict[str, Any]:
    """The two ceilings, in rows per second: one pass for any number of rows, and all rows' work.

    The slope is what a pass of one row costs: reading the weights. The flat is the best rate seen.
    """
    peak = max(n / s for n, s in zip(rows, sec, strict=True))
    return {"rows": list(rows), "sec": list(sec), "slope": rows[0] / sec[0], "peak": peak}
