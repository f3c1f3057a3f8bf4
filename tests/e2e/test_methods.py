"""Every method, wired as users wire it, changes no token."""

import random
from dataclasses import replace

import pytest

from engines import EOS, METHODS
from slipstream import reference
from slipstream.build import build_engine
from slipstream.check.tiny import loaded, tiny_model
from slipstream.core.config import EngineConfig
from slipstream.core.params import SamplingParams
from slipstream.core.speculative import SpeculativeConfig
from slipstream.engine.calibration import calibrated
from slipstream.engine.costs import CostTable

SETTINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.9, seed=5, top_k=12, min_p=0.01, logprobs=2),
    SamplingParams(
        temperature=0.7, seed=6, repetition_penalty=1.2, logit_bias={4: 1.0}, min_tokens=5
    ),
)


@pytest.fixture(scope="module")
def models():
    return tiny_model("llama"), tiny_model("llama", num_layers=1)


def requests(count):
    source = random.Random(1)
    made = []
    for i in range(count):
        phrase = [source.randrange(1, 32) for _ in range(source.randint(2, 6))]
        params = replace(SETTINGS[i % len(SETTINGS)], max_tokens=20)
        made.append((phrase * source.randint(1, 4), params))
    return made


@pytest.mark.parametrize("controller", ["fixed", "table"])
@pytest.mark.parametrize("method", METHODS)
def test_same_tokens(models, method, controller):
    target, draft = models
    wanted = requests(9)
    config = SpeculativeConfig(controller=controller, num_speculative_tokens=6, **METHODS[method])
    engine = build_engine(
        loaded(target, EOS),
        EngineConfig(kv_cache_memory=2**17, block_size=4),
        config,
        draft=loaded(draft, EOS),
    )
    for i, (prompt, params) in enumerate(wanted):
        engine.add(prompt, params, request_id=str(i))
        engine.step()
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    for i, (prompt, params) in enumerate(wanted):
        (answer,) = engine.output(str(i)).outputs
        assert answer.token_ids == reference.generate(
            target, prompt, params, stop_ids=EOS, num_tokens=params.max_tokens
        )
    assert engine.stats().drafts.num_draft_tokens > 0, "nothing was drafted"
    assert engine.stats().num_used_blocks == 0


def test_a_request_may_decline(models):
    engine = build_engine(
        loaded(models[0]),
        EngineConfig(kv_cache_memory=2**17),
        SpeculativeConfig(method="ngram", controller="fixed", prompt_lookup_min=1),
    )
    repeated = [3, 4, 5] * 5
    for speculative in (True, False):
        params = SamplingParams(temperature=0, max_tokens=20, speculative=speculative)
        request = engine.add(repeated, params)
        while engine.has_work:
            engine.step()
        counts = engine.output(request).outputs[0].draft_counts
        assert (counts.num_draft_tokens > 0) == speculative


def test_auto_measures_once_and_remembers(models, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    config = SpeculativeConfig.from_dict({})
    for _ in range(2):
        engine = build_engine(loaded(models[0]), EngineConfig(kv_cache_memory=2**18), config)
        request = engine.add([3, 4, 5] * 6, SamplingParams(temperature=0, max_tokens=30))
        while engine.has_work:
            engine.step()
        assert engine.output(request).outputs[0].finish_reason == "length"
        assert sum(engine.parts.controller.reasons.counts.values()) > 0
        assert len(list((tmp_path / "costs").glob("*.json"))) == 1
    table = calibrated(engine.parts.runner, tmp_path / "costs")
    assert isinstance(table, CostTable)
