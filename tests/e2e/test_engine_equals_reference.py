"""The engine against the specification: the same tokens, whatever happens on the way.

`reference.generate` recomputes everything for every token. Here the same requests go through the
engine alone, together, in chunks, starved of blocks, over cached prefixes and behind drafts.
"""

import random
from dataclasses import replace

import pytest
import torch

from slipstream import reference
from slipstream.build import build_engine
from slipstream.check.tiny import loaded, tiny_model
from slipstream.core.config import EngineConfig
from slipstream.core.params import SamplingParams
from slipstream.drafters.synthetic import SyntheticDrafter
from slipstream.engine.controller import FixedController
from slipstream.engine.engine import Engine

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


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 40 tokens, half of them with a common beginning."""
    source = random.Random(seed)
    common = [source.randrange(1, 32) for _ in range(20)]
    made = []
    for i in range(count):
        own = [source.randrange(1, 32) for _ in range(source.randint(1, 20))]
        made.append(common + own if i % 2 else own)
    return made


def requests(count: int, max_tokens: int = 24) -> list[tuple[list[int], SamplingParams]]:
    kinds = list(SETTINGS.values())
    return [
        (prompt, replace(kinds[i % len(kinds)], max_tokens=max_tokens - i % 5))
        for i, prompt in enumerate(prompts(count))
    ]


def expected(model, prompt, params, branch=0) -> list[int]:
    return reference.generate(
        model,
        prompt,
        params,
        stop_ids=EOS if not params.ignore_eos else frozenset(),
        branch=branch,
        num_tokens=params.max_tokens,
    )


def run(engine: Engine, wanted, *, stagger: int = 0) -> list[list[int]]:
    """Run requests to their end, adding one every `stagger` steps; check integrity all along."""
    waiting = list(enumerate(wanted))
    ids = {}
    steps = 0
    while waiting or engine.has_work:
        while waiting and (stagger == 0 or steps >= len(ids) * stagger):
            index, (prompt, params) = waiting.pop(0)
            ids[index] = engine.add(prompt, params, request_id=f"r{index}")
        engine.step()
        engine.check_integrity()
        steps += 1
        assert steps < 5000, "the engine does not come to an end"
    outputs = [engine.output(ids[i]).outputs[0].token_ids for i in range(len(wanted))]
    blocks = engine.parts.scheduler.blocks
    assert blocks.num_used == 0, "blocks leaked"
    return outputs


def engine_for(model, *, drafter=None, num_draft_tokens=0, **settings) -> Engine:
    settings = {"kv_cache_memory": 2**22} | settings
    return build_engine(
        loaded(model, EOS),
        EngineConfig(**settings),
        drafter=drafter,
        controller=FixedController(num_draft_tokens),
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
