"""The engine on packed weights: a request gets the same bits whatever happens around it.

The measure is plain decoding of each request alone, natively too; log-probabilities are compared
as they are, so that a difference shows even where it would move no token. That the native model
is the right one is for `test_it_is_the_model_torch_computes`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from engines import EOS, METHODS, Request, answers, engine_for, requests, run
from packing import FLOATS, INTEGERS, K_TYPES, packed_model, packed_part, random_blocks
from slipstream import native, reference
from slipstream.build import build_engine
from slipstream.check.tiny import loaded
from slipstream.core.config import EngineConfig
from slipstream.core.outputs import CompletionOutput
from slipstream.core.params import SamplingParams
from slipstream.core.speculative import SpeculativeConfig
from slipstream.drafters.synthetic import SyntheticDrafter
from slipstream.kernels.packed import Format, PackedWeight
from slipstream.kv.blocks import BlockManager
from slipstream.kv.cache import KVCache
from slipstream.models import CausalLM
from slipstream.models.batch import Batch, Span, lay_out
from slipstream.models.runner import ModelRunner

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no native kernels here")

MODEL_TYPES = ("llama", "qwen2", "qwen3", "gemma3")
WIDE = {"hidden_size": 256, "head_dim": 64}  # enough columns for K types
TOKEN_BYTES = 2 * 2 * 2 * 32 * 2  # keys and values of 2 layers, 2 heads of 32 halves


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    native.use_threads(before)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return packed_model("llama")


def with_logprobs(wanted: Sequence[Request]) -> list[Request]:
    return [(prompt, replace(params, logprobs=1)) for prompt, params in wanted]


def alone(model: CausalLM, wanted: Sequence[Request]) -> list[CompletionOutput]:
    """Plain decoding, an engine for each."""
    return [answers(engine_for(model), [request])[0] for request in wanted]


def assert_same(given: Sequence[CompletionOutput], plain: Sequence[CompletionOutput]) -> None:
    for ours, theirs in zip(given, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == theirs.logprobs


def synthetic(
    plain: Sequence[CompletionOutput], hit_rate: float, *, trees: bool
) -> SyntheticDrafter:
    known = {f"r{i}": {0: answer.token_ids} for i, answer in enumerate(plain)}
    return SyntheticDrafter(known, 32, hit_rate, trees=trees)


def runner_and_batch(
    model: CausalLM, tokens: Sequence[int], taps: Sequence[int] = ()
) -> tuple[ModelRunner, Batch]:
    blocks = BlockManager(8, 16)
    blocks.allocate(0, [])
    blocks.reserve(0, 0, len(tokens))
    cache = KVCache.for_model(
        model.config, num_blocks=8, block_size=16, dtype=torch.float32, device="cpu"
    )
    span = Span(0, 0, tokens, range(len(tokens)), len(tokens))
    return ModelRunner(model, cache, taps), lay_out([span], blocks, "cpu")


TOKENS = [(7 * i * i + 3 * i) % 32 for i in range(50)]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_it_is_the_model_torch_computes(isa: str, model_type: str) -> None:
    """Of float weights to rounding; codes of activations may round otherwise now and then."""
    for kinds, changes, tolerance in (
        (FLOATS, {}, 1e-3),
        (INTEGERS, {}, 0.3),
        (K_TYPES, WIDE, 0.3),
    ):
        model = packed_model(model_type, kinds, **changes)
        runner, batch = runner_and_batch(model, TOKENS)
        logits = runner.forward(batch).logits
        expected = reference.logits(model, TOKENS)
        assert expected.std() > 0.5, "flat logits would agree whatever the model does"
        assert (logits - expected).abs().max() < tolerance * expected.std()


@pytest.mark.parametrize("model_type", ["llama", "gemma3"])
def test_taps_are_the_residual_stream(model_type: str) -> None:
    model = packed_model(model_type, FLOATS, num_layers=3)
    runner, batch = runner_and_batch(model, TOKENS, taps=(0, 2))
    out = runner.forward(batch)
    plain = runner_and_batch(model, TOKENS)[0].forward(batch)
    assert torch.equal(out.logits, plain.logits)
    assert list(out.taps) == [0, 2]
    embedded = model.model.embed_tokens.weight[torch.tensor(batch.ids)]
    if model_type == "gemma3":
        embedded = embedded * 8  # sqrt(64)
    assert torch.equal(out.taps[0], embedded)
    shorter = runner_and_batch(model, TOKENS, taps=(2,))[0].forward(batch)
    assert torch.equal(shorter.taps[2], out.taps[2])
    assert not torch.equal(out.taps[2], out.taps[0])


@pytest.mark.parametrize("stagger", [0, 2])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_batch_of_16(model_type: str, stagger: int) -> None:
    model = packed_model(model_type)
    wanted = with_logprobs(requests(16))
    assert_same(answers(engine_for(model), wanted, stagger=stagger), alone(model, wanted))


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "float16", "bfloat16"])
def test_chunked_prefill(model: CausalLM, kv_cache_dtype: str) -> None:
    wanted = with_logprobs(requests(6))
    plain = [
        answers(engine_for(model, kv_cache_dtype=kv_cache_dtype), [request])[0]
        for request in wanted
    ]
    for chunk in (1, 7, 16):
        engine = engine_for(model, max_num_batched_tokens=chunk, kv_cache_dtype=kv_cache_dtype)
        assert_same(answers(engine, wanted), plain)


@pytest.mark.parametrize("block_size", [1, 16])
def test_starved_pool(model: CausalLM, block_size: int) -> None:
    wanted = with_logprobs(requests(8))
    engine = engine_for(model, kv_cache_memory=72 * TOKEN_BYTES, block_size=block_size)
    assert_same(answers(engine, wanted), alone(model, wanted))
    assert engine.stats().num_preemptions > 0, "the pool was not scarce enough to test anything"


def test_prefix_hits(model: CausalLM) -> None:
    wanted = with_logprobs(requests(8))
    plain = alone(model, wanted)
    engine = engine_for(model, block_size=4)
    for _ in range(2):
        assert_same(answers(engine, wanted), plain)
    (again,) = answers(engine, wanted[1:2])
    assert again.metrics.num_cached_tokens >= 20


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_drafts_on_every_instruction_set(model: CausalLM, isa: str, trees: bool) -> None:
    wanted = with_logprobs(requests(4))
    plain = alone(model, wanted)
    engine = engine_for(model, drafter=synthetic(plain, 0.7, trees=trees), num_draft_tokens=9)
    assert_same(answers(engine, wanted, stagger=1), plain)


def test_drafts_on_two_threads(model: CausalLM, restored_threads: None) -> None:
    wanted = with_logprobs(requests(4))
    plain = alone(model, wanted)
    native.use_threads(2)
    native.take_threads()
    engine = engine_for(model, drafter=synthetic(plain, 0.7, trees=True), num_draft_tokens=9)
    assert_same(answers(engine, wanted, stagger=1), plain)
    assert native.load().num_threads() == 2


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("starved", [False, True], ids=["roomy", "starved"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_drafts_change_nothing(model_type: str, starved: bool, trees: bool) -> None:
    model = packed_model(model_type)
    wanted = with_logprobs(requests(16))
    plain = alone(model, wanted)
    settings = {"kv_cache_memory": 72 * TOKEN_BYTES, "block_size": 4} if starved else {}
    for hit_rate in (0.0, 0.7):
        drafter = synthetic(plain, hit_rate, trees=trees)
        engine = engine_for(model, drafter=drafter, num_draft_tokens=9, **settings)
        assert_same(answers(engine, wanted, stagger=1), plain)
        assert drafter.num_drafted > 0
        if starved:
            assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("kinds", [FLOATS, K_TYPES], ids=["floats", "K types"])
def test_other_formats(kinds: dict[str, Format]) -> None:
    model = packed_model("qwen3", kinds, **WIDE)
    wanted = with_logprobs(requests(6))
    plain = alone(model, wanted)
    drafter = synthetic(plain, 0.6, trees=True)
    engine = engine_for(model, drafter=drafter, num_draft_tokens=6)
    assert_same(answers(engine, wanted, stagger=1), plain)


@pytest.mark.parametrize("method", METHODS)
def test_every_method(model: CausalLM, method: str) -> None:
    draft = packed_model("llama", num_layers=1)
    # Phrases repeat, so that what looks for repetition finds some.
    wanted = with_logprobs([(prompt * 2, params) for prompt, params in requests(8)])
    plain = alone(model, wanted)
    engine = build_engine(
        loaded(model, EOS),
        EngineConfig(kv_cache_memory=2**20, block_size=4),
        SpeculativeConfig(controller="fixed", num_speculative_tokens=6, **METHODS[method]),
        draft=loaded(draft, EOS),
    )
    assert_same(answers(engine, wanted, stagger=1), plain)
    assert engine.stats().drafts.num_draft_tokens > 0, "nothing was drafted"


def test_a_poisoned_request_fails_alone() -> None:
    """One token whose embedding is NaN: whoever has it ends in error, the others do not notice."""
    model = packed_model("llama", tied=False)
    table = random_blocks(Format.F32, 32, 64)
    table[31] = 255  # NaN
    part = packed_part(Format.F32, table, 64)
    setattr(model.model.embed_tokens, "weight", PackedWeight([part], 64))  # noqa: B010
    # The others neither contain that token nor emit it.
    wanted = [
        (
            [t for t in prompt if t != 31] + [1],
            replace(params, logit_bias={**params.logit_bias, 31: -1e6}),
        )
        for prompt, params in requests(5)
    ]
    plain = [run(engine_for(model), [request])[0] for request in wanted]
    engine = engine_for(model, block_size=4)
    healthy = [engine.add(*request) for request in wanted]
    bad = engine.add([5, 6, 7, 8, 31, 9, 10, 11, 12], SamplingParams(max_tokens=5))
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert engine.output(bad).outputs[0].finish_reason == "error"
    # Its blocks, NaN and all, are reused by whoever comes next.
    assert run(engine, wanted) == plain
    assert [engine.output(r).outputs[0].token_ids for r in healthy] == plain
