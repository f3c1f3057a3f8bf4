"""Engines of tiny models, requests of every kind, and running them to their end."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slipstream.build import build_engine
from slipstream.check.tiny import loaded
from slipstream.core.config import EngineConfig
from slipstream.core.outputs import CompletionOutput
from slipstream.core.params import SamplingParams
from slipstream.core.speculative import TreeConfig
from slipstream.drafters.base import Drafter
from slipstream.engine.controller import FixedController
from slipstream.engine.engine import Engine
from slipstream.models import CausalLM

EOS = frozenset({0})
SETTINGS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=1.0, seed=11),
    "cold": SamplingParams(temperature=1e-4, seed=12),
    "truncated": SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.02, seed=2**64 - 1),
    "penalised": SamplingParams(
        temperature=0.8,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={3: 1.5, 4: -2.0},
        min_tokens=6,
        seed=13,
    ),
    "penalised greedy": SamplingParams(temperature=0, frequency_penalty=1.0, min_tokens=4),
}
TREE = TreeConfig(depth=3, topk=2, max_tokens=8)
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
    "suffix tree": {"method": "suffix", "tree": TREE},
    "draft model": {"method": "draft_model", "model": "tiny"},
    "draft tree": {"method": "draft_model", "model": "tiny", "tree": TREE},
    "combined": {"method": "combined", "model": "tiny"},
    "combined tree": {"method": "combined", "model": "tiny", "tree": TREE},
}


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 40 tokens, half of them with a common beginning."""
    source = random.Random(seed)
    common = [source.randrange(1, 32) for _ in range(20)]
    made = []
    for i in range(count):
        own = [source.randrange(1, 32) for _ in range(source.randint(1, 20))]
        made.append(common + own if i % 2 else own)
    return made


Request = tuple[list[int], SamplingParams]


def requests(count: int, max_tokens: int = 24) -> list[Request]:
    """That many prompts, each with one of the settings."""
    kinds = list(SETTINGS.values())
    return [
        (prompt, replace(kinds[i % len(kinds)], max_tokens=max_tokens - i % 5))
        for i, prompt in enumerate(prompts(count))
    ]


def run(engine: Engine, wanted: Sequence[Request], *, stagger: int = 0) -> list[list[int]]:
    """The tokens of each request, of which one is added every `stagger` steps."""
    return [answer.token_ids for answer in answers(engine, wanted, stagger=stagger)]


def answers(
    engine: Engine, wanted: Sequence[Request], *, stagger: int = 0
) -> list[CompletionOutput]:
    """Run requests to their end; check integrity all along."""
    waiting = list(enumerate(wanted))
    ids: dict[int, str] = {}
    steps = 0
    while waiting or engine.has_work:
        while waiting and (stagger == 0 or steps >= len(ids) * stagger):
            index, (prompt, params) = waiting.pop(0)
            ids[index] = engine.add(prompt, params, request_id=f"r{index}")
        engine.step()
        engine.check_integrity()
        steps += 1
        assert steps < 5000, "the engine does not come to an end"
    outputs = [engine.output(ids[i]).outputs[0] for i in range(len(wanted))]
    blocks = engine.parts.scheduler.blocks
    assert blocks.num_used == 0, "blocks leaked"
    return outputs


def engine_for(
    model: CausalLM, *, drafter: Drafter | None = None, num_draft_tokens: int = 0, **settings: Any
) -> Engine:
    """An engine whose every draft has as many tokens as it may."""
    settings = {"kv_cache_memory": 2**22} | settings
    return build_engine(
        loaded(model, EOS),
        EngineConfig(**settings),
        drafter=drafter,
        controller=FixedController(num_draft_tokens),
    )
