"""The engine against the specification: the same tokens, whatever happens on the way.

`reference.generate` recomputes everything for every token. Here the same requests go through the
engine alone, together, in chunks, starved of blocks, over cached prefixes and behind drafts.
"""

import random
from dataclasses import replace

import pytest
import torch

from engines import EOS, SETTINGS, engine_for, prompts, requests, run
from slipstream import reference
from slipstream.build import build_engine
from slipstream.check.tiny import tiny_model
from slipstream.core.config import EngineConfig
from slipstream.core.params import SamplingParams
from slipstream.drafters.synthetic import SyntheticDrafter
from slipstream.engine.controller import FixedController


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def expected(model, prompt, params, branch=0) -> list[int]:
    return reference.generate(
        model,
        prompt,
        params,
        stop_ids=EOS if not params.ignore_eos else frozenset(),
        branch=branch,
        num_tokens=params.max_tokens,
    )


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_alone(model_type, setting):
    model = tiny_model(model_type)
    for prompt in prompts(3, seed=7):
        params = replace(SETTINGS[setting], max_tokens=20)
        assert run(engine_for(model), [(prompt, params)]) == [expected(model, prompt, params)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stagger", [0, 2])
def test_batch_of_16(stagger, dtype):
    model = tiny_model("llama", dtype=dtype)
    wanted = requests(16)
    assert run(engine_for(model), wanted, stagger=stagger) == [
        expected(model, *each) for each in wanted
    ]


@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 17])
def test_chunked_prefill(model, chunk):
    wanted = requests(6)
    engine = engine_for(model, max_num_batched_tokens=chunk)
    assert run(engine, wanted) == [expected(model, *each) for each in wanted]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_starved_pool(block_size, dtype):
    model = tiny_model("llama", dtype=dtype)
    wanted = requests(8)
    tokens_in_pool = 72  # one sequence has up to 63
    bytes_per_token = 2 * 3 * 2 * 8 * dtype.itemsize
    engine = engine_for(
        model, kv_cache_memory=tokens_in_pool * bytes_per_token, block_size=block_size
    )
    assert run(engine, wanted) == [expected(model, *each) for each in wanted]
    assert engine.stats().num_preemptions > 0, "the pool was not scarce enough to test anything"


def test_prefix_hits(model):
    engine = engine_for(model, block_size=4)
    wanted = requests(8)
    want = [expected(model, *each) for each in wanted]
    assert run(engine, wanted) == want
    assert run(engine, wanted) == want
    request = engine.add(*wanted[1])
    while engine.has_work:
        engine.step()
    metrics = engine.output(request).outputs[0].metrics
    assert metrics.num_cached_tokens >= 20


def test_salt_keeps_prefixes_apart(model):
    engine = engine_for(model, block_size=4)
    prompt, params = prompts(2)[1], SamplingParams(temperature=0, max_tokens=2)
    cached = []
    for salt in (b"", b"", b"other", b"other"):
        request = engine.add(prompt, params, salt=salt)
        while engine.has_work:
            engine.step()
        cached.append(engine.output(request).outputs[0].metrics.num_cached_tokens > 0)
    assert cached == [False, True, False, True]


@pytest.mark.parametrize("memory", [2**22, 72 * 2 * 3 * 2 * 8 * 8])
def test_several_answers_share_their_prompt(model, memory):
    prompt = prompts(2)[1]
    params = SamplingParams(temperature=1.2, seed=5, n=5, max_tokens=15)
    engine = engine_for(model, kv_cache_memory=memory, block_size=4)
    request = engine.add(prompt, params)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    outputs = engine.output(request).outputs
    assert [output.token_ids for output in outputs] == [
        expected(model, prompt, params, branch) for branch in range(5)
    ]
    assert len({tuple(output.token_ids) for output in outputs}) > 1
    if memory == 2**22:
        assert all(output.metrics.num_cached_tokens == len(prompt) - 1 for output in outputs[1:])
    assert engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("hit_rate", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("starved", [False, True], ids=["roomy", "starved"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3"])
def test_drafts_change_nothing(model_type, starved, hit_rate, trees):
    model = tiny_model(model_type)
    wanted = requests(10)
    want = [expected(model, *each) for each in wanted]
    answers = {f"r{i}": {0: tokens} for i, tokens in enumerate(want)}
    drafter = SyntheticDrafter(answers, 32, hit_rate, trees=trees)
    settings = {"kv_cache_memory": 72 * 2 * 3 * 2 * 8 * 8, "block_size": 4} if starved else {}
    engine = engine_for(model, drafter=drafter, num_draft_tokens=9, **settings)
    assert run(engine, wanted, stagger=1) == want
    stats = engine.stats()
    if hit_rate == 1.0 and not starved and not trees:
        assert stats.num_steps < 0.6 * max(map(len, want)) + len(want)
    if starved:
        assert stats.num_preemptions > 0


def test_aborts_disturb_nobody(model):
    wanted = requests(12)
    want = [expected(model, *each) for each in wanted]
    answers = {f"r{i}": {0: tokens} for i, tokens in enumerate(want)}
    drafter = SyntheticDrafter(answers, 32, 0.7, trees=True)
    engine = engine_for(model, drafter=drafter, num_draft_tokens=6, block_size=4)
    source = random.Random(3)
    for i, (prompt, params) in enumerate(wanted):
        engine.add(prompt, params, request_id=f"r{i}")
    aborted = set()
    while engine.has_work:
        engine.step()
        if source.random() < 0.3:
            victim = source.randrange(12)
            engine.abort(f"r{victim}")
            aborted.add(victim)
        engine.check_integrity()
    for i in range(12):
        output = engine.output(f"r{i}").outputs[0]
        if output.finish_reason == "abort":
            assert i in aborted
            assert output.token_ids == want[i][: len(output.token_ids)]
        else:
            assert output.token_ids == want[i]
    assert engine.stats().num_used_blocks == 0


def test_a_poisoned_request_fails_alone(model):
    """One prompt token whose embedding is NaN: that request ends in error, the others do not."""
    model = tiny_model("llama", tied=False)
    model.model.embed_tokens.weight.data[31] = torch.nan
    # The others neither contain that token nor emit it.
    wanted = [
        (
            [t for t in prompt if t != 31] + [1],
            replace(params, logit_bias={**params.logit_bias, 31: -1e6}),
        )
        for prompt, params in requests(5)
    ]
    want = [expected(model, *each) for each in wanted]
    engine = engine_for(model, block_size=4)
    healthy = [engine.add(*each) for each in wanted]
    bad = engine.add([5, 6, 7, 8, 31, 9, 10, 11, 12], SamplingParams(max_tokens=5))
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert engine.output(bad).outputs[0].finish_reason == "error"
    # Its blocks, NaN and all, are reused by whoever comes next.
    assert run(engine, wanted) == want
    assert [engine.output(r).outputs[0].token_ids for r in healthy] == want


@pytest.mark.weights
@pytest.mark.parametrize("alias", ["smollm2-135m"])
def test_real_weights(alias, model_path):
    """Float32, real weights: greedy and sampled, batched, chunked and drafted at once."""
    from slipstream.build import load

    model_path(alias)
    real = load(alias, dtype="float32", device="cpu", quiet=True)
    texts = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time"]
    wanted = [
        (
            real.tokenizer.encode(text),
            SamplingParams(temperature=temperature, seed=3, max_tokens=16, ignore_eos=True),
        )
        for text in texts
        for temperature in (0.0, 1.0)
    ]
    want = [expected(real.model, *each) for each in wanted]
    answers = {f"r{i}": {0: tokens} for i, tokens in enumerate(want)}
    drafter = SyntheticDrafter(answers, 49152, 0.7, trees=True)
    for settings in ({}, {"max_num_batched_tokens": 3}):
        engine = build_engine(
            real,
            EngineConfig(kv_cache_memory=2**27, **settings),
            drafter=drafter,
            controller=FixedController(6),
        )
        assert run(engine, wanted, stagger=1) == want
