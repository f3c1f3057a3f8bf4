"""What the page and `/metrics` are told of the latest steps."""

import pytest

from slipstream.build import build_engine
from slipstream.check.tiny import loaded, tiny_model
from slipstream.core.config import EngineConfig
from slipstream.core.params import SamplingParams
from slipstream.core.speculative import SpeculativeConfig
from slipstream.drafters.ngram import NgramDrafter
from slipstream.engine.auto import AutoController
from slipstream.engine.controller import Controller, FixedController
from slipstream.engine.costs import CostModel, CostTable
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Plan
from slipstream.engine.step import StepResult
from slipstream.server.live import History, page_data, take_snapshot

PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


class KnownCosts(AutoController):
    """A pass takes a second, and three tokens are always drafted."""

    def __init__(self) -> None:
        super().__init__(CostModel(CostTable(rows=(1, 64), sec=(1.0, 1.0))), 3)

    def budgets(self, plan: Plan) -> list[int]:
        return [3] * len(plan.seqs)

    def observe(self, result: StepResult) -> None:
        pass


def engine(controller: Controller) -> Engine:
    return build_engine(
        loaded(tiny_model()),
        EngineConfig(kv_cache_memory=2**20),
        SpeculativeConfig(method="off"),
        drafter=NgramDrafter(1, 3),
        controller=controller,
    )


def watched(engine: Engine, seconds: float, num_requests: int = 2) -> tuple[History, int]:
    """The history of some requests whose every step is said to have taken `seconds`."""
    history, num_decode_steps = History(), 0
    for i in range(num_requests):
        engine.add([1, 2, 3 + i], PARAMS)
    while engine.has_work:
        num_decode_steps += not engine.computes_prompts
        deltas = engine.step()
        history.saw_step(engine, deltas, seconds)
    return history, num_decode_steps


def test_only_steps_without_prompts_count() -> None:
    history, num_decode_steps = watched(engine(FixedController(3)), 1.0)
    assert len(history.moments) == num_decode_steps > 0
    assert {moment.batch for moment in history.moments} <= {1, 2}
    num_tokens = sum(moment.num_tokens for moment in history.moments)
    assert num_tokens == 2 * (30 - 1)  # the first ones came with the prompts
    assert max(moment.gamma for moment in history.moments) > 0


def test_the_speedup_is_of_tokens_at_plain_cost_over_time() -> None:
    history, _ = watched(engine(KnownCosts()), 0.5, num_requests=1)
    tokens_per_pass = sum(m.num_tokens for m in history.moments) / len(history.moments)
    assert tokens_per_pass > 1
    assert history.speedup() == pytest.approx(tokens_per_pass / 0.5)


def test_without_known_costs_there_is_no_speedup_and_no_roofline() -> None:
    plain = engine(FixedController(0))
    history, _ = watched(plain, 1.0)
    assert history.speedup() is None
    assert page_data(plain, history)["roofline"] is None
    assert History().speedup() is None


def test_the_roofline_has_the_slope_of_one_row_and_the_best_rate() -> None:
    table = CostTable(rows=(1, 2, 4, 8), sec=(1.0, 1.0, 1.25, 3.0))
    measured = engine(AutoController(CostModel(table), 4))
    roofline = page_data(measured, History())["roofline"]
    assert (roofline["slope"], roofline["peak"]) == (1.0, 3.2)


def test_a_snapshot_counts_drafts_of_requests_that_still_run() -> None:
    running = engine(FixedController(3))
    running.add([1, 2, 1, 2, 1, 2], PARAMS)
    while running.last_step is None or not any(running.last_step.drafts):
        running.step()
    assert running.stats().drafts.num_draft_tokens == 0
    assert take_snapshot(running).drafts.num_draft_tokens > 0
    assert take_snapshot(running).drafts.num_draft_tokens > 0  # and is no part of it
