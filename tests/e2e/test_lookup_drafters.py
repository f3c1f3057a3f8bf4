"""Lookup drafters in the engine: tokens equal the specification's, in fewer steps than tokens.

A tiny model that may say four letters only repeats itself enough for lookup to find something,
and is surprising enough for much of it to be rejected.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from slipstream import reference
from slipstream.build import build_engine
from slipstream.check.tiny import loaded, tiny_model
from slipstream.core.config import EngineConfig
from slipstream.core.params import SamplingParams
from slipstream.drafters.base import Drafter
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.engine.controller import FixedController
from slipstream.engine.engine import Engine

EOS = frozenset({0})
FEW_LETTERS = dict.fromkeys(range(1, 5), 50.0)
SETTINGS = (
    SamplingParams(temperature=0, logit_bias=FEW_LETTERS),
    SamplingParams(temperature=3.0, seed=11, logit_bias=FEW_LETTERS),
    SamplingParams(temperature=2.0, seed=12, logit_bias=FEW_LETTERS, frequency_penalty=0.5),
    SamplingParams(temperature=9.0, seed=13, logit_bias=FEW_LETTERS, top_k=3, stop=["dcdcc"]),
)
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "ngram frequent": lambda: NgramDrafter(1, 3, prefer="frequent"),
    "suffix chains": lambda: SuffixDrafter(trees=False),
    "suffix trees": lambda: SuffixDrafter(max_spec_factor=4.0, min_token_prob=0.02),
    "suffix pool": lambda: SuffixDrafter(max_spec_factor=4.0, max_cached_requests=3),
}
BYTES_PER_TOKEN = 2 * 3 * 2 * 8 * 8


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def wanted() -> list[tuple[list[int], SamplingParams]]:
    source = random.Random(5)
    return [
        (
            [source.randrange(1, 5) for _ in range(source.randint(1, 12))],
            replace(SETTINGS[i % len(SETTINGS)], max_tokens=24 + i),
        )
        for i in range(6)
    ]


@pytest.fixture(scope="module")
def plain(model, wanted) -> list[list[int]]:
    """What each request gets without drafts."""
    return run(engine_for(model, None), wanted)


def engine_for(model, drafter: Drafter | None, **settings) -> Engine:
    return build_engine(
        loaded(model, EOS),
        EngineConfig(**({"kv_cache_memory": 2**22, "block_size": 4} | settings)),
        drafter=drafter,
        controller=FixedController(8),
    )


def run(engine: Engine, requests) -> list[list[int]]:
    """Run the requests, one joining every other step, and see that nothing leaks."""
    waiting = list(enumerate(requests))
    num_steps = 0
    while waiting or engine.has_work:
        if waiting and num_steps % 2 == 0:
            index, (prompt, params) = waiting.pop(0)
            engine.add(prompt, params, request_id=str(index))
        engine.step()
        engine.check_integrity()
        num_steps += 1
    assert engine.stats().num_used_blocks == 0
    return [engine.output(str(i)).outputs[0].token_ids for i in range(len(requests))]


def test_plain_is_the_specification(model, wanted, plain) -> None:
    for (prompt, params), tokens in zip(wanted, plain, strict=True):
        stop_ids = frozenset() if params.ignore_eos else EOS
        want = reference.generate(
            model, prompt, params, stop_ids=stop_ids, num_tokens=params.max_tokens
        )
        # Stop strings are the engine's business; the tokens up to one are not.
        assert tokens == (want[: len(tokens)] if params.stop else want)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("starved", [False, True], ids=["roomy", "starved"])
def test_drafts_change_nothing(model, wanted, plain, name, starved) -> None:
    settings = {"kv_cache_memory": 48 * BYTES_PER_TOKEN} if starved else {}
    engine = engine_for(model, DRAFTERS[name](), **settings)
    assert run(engine, wanted) == plain
    assert (engine.stats().num_preemptions > 0) == starved


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_accepted(model, wanted, plain, name) -> None:
    engine = engine_for(model, DRAFTERS[name]())
    [tokens] = run(engine, wanted[4:5])  # greedy, and soon a loop
    assert tokens == plain[4]
    assert engine.stats().num_steps < 0.8 * len(tokens)


def test_what_one_request_said_helps_the_next(model, wanted) -> None:
    """Twice the same request, one after the other: the second time its answer is in the pool."""
    steps = []
    engine = engine_for(model, DRAFTERS["suffix pool"]())
    for request_id in ("first", "second"):
        before = engine.stats().num_steps
        engine.add(*wanted[2], request_id=request_id)
        while engine.has_work:
            engine.step()
        steps.append(engine.stats().num_steps - before)
    first, second = (engine.output(name).outputs[0].token_ids for name in ("first", "second"))
    assert first == second
    assert steps[1] < 0.7 * steps[0]
