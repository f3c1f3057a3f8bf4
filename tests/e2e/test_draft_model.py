"""A draft model in the engine: the tokens stay the target's, whatever the other model says.

The draft model is the target with its weights shaken, so it is right some of the time; under
every rule and shape, with both pools short of blocks, it may only change how many steps it takes.
"""

import random
from dataclasses import replace

import pytest
import torch

from slipstream import reference
from slipstream.build import build_engine
from slipstream.check.tiny import loaded, tiny_model
from slipstream.core.config import EngineConfig
from slipstream.core.controls import Row, controls
from slipstream.core.counts import DraftCounts
from slipstream.core.params import SamplingParams
from slipstream.core.speculative import TreeConfig
from slipstream.drafters import sampling
from slipstream.drafters.draft_model import DraftModelDrafter
from slipstream.engine.controller import FixedController
from slipstream.engine.engine import Engine
from slipstream.engine.verifier import make_verifier
from slipstream.maths.distributions import probabilities
from slipstream.maths.stats import g_test
from slipstream.models import CausalLM

EOS = frozenset({0})
SETTINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.02, seed=2**64 - 1),
    SamplingParams(
        temperature=0.8,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={3: 1.5, 4: -2.0},
        min_tokens=6,
        logprobs=2,
        stop=["abc"],
        seed=13,
    ),
    SamplingParams(temperature=0, frequency_penalty=1.0, min_tokens=4),
)
TREE = TreeConfig(depth=3, topk=3, max_tokens=8)
SHAPES = pytest.mark.parametrize("tree", [None, TREE], ids=["chains", "trees"])
BYTES_PER_TOKEN = 2 * 3 * 2 * 8 * 8
FALSE_ALARM = 1e-6


def shaken(model_type: str, **changes) -> CausalLM:
    """The tiny model of seed 0, every weight off by up to a tenth."""
    model = tiny_model(model_type, **changes)
    for parameter in model.parameters():
        waves = torch.arange(parameter.numel(), dtype=torch.float64).sin().view_as(parameter)
        parameter.data.mul_(1 + 0.1 * waves)
    return model


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def target(request) -> CausalLM:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def draft(target) -> CausalLM:
    return shaken(target.config.model_type)


@pytest.fixture(scope="module")
def wanted() -> list[tuple[list[int], SamplingParams]]:
    source = random.Random(3)
    common = [source.randrange(1, 32) for _ in range(12)]
    return [
        (
            common[: 6 * (i % 3)] + [source.randrange(1, 32) for _ in range(1 + i)],
            replace(SETTINGS[i % len(SETTINGS)], max_tokens=18 - i % 4),
        )
        for i in range(10)
    ]


@pytest.fixture(scope="module")
def plain(target, wanted) -> list[list[int]]:
    """What each request gets without drafts."""
    return run(engine_for(target), wanted)


def engine_for(target, drafter=None, *, num_tokens=6, rule="match", **settings) -> Engine:
    return build_engine(
        loaded(target, EOS),
        EngineConfig(**({"kv_cache_memory": 2**22, "block_size": 4} | settings)),
        drafter=drafter,
        controller=FixedController(0 if drafter is None else num_tokens),
        verifier=make_verifier(rule),
    )


def drafter_for(draft, *, num_blocks=256, tree=None, rule="match", vocab_size=32):
    return DraftModelDrafter.for_model(
        draft, vocab_size, num_blocks=num_blocks, block_size=4, tree=tree, rule=rule
    )


def run(engine: Engine, requests, counts: DraftCounts | None = None) -> list[list[int]]:
    """Run the requests, one joining every step, and see that nothing leaks from either pool."""
    drafter = engine.parts.drafter
    waiting = list(enumerate(requests))
    while waiting or engine.has_work:
        if waiting:
            index, (prompt, params) = waiting.pop(0)
            engine.add(prompt, params, request_id=f"r{index}")
        engine.step()
        engine.check_integrity()
        if isinstance(drafter, DraftModelDrafter):
            drafter.blocks.check_integrity()
    assert engine.parts.scheduler.blocks.num_used == 0
    if isinstance(drafter, DraftModelDrafter):
        assert drafter.blocks.num_used == 0
    outputs = [engine.output(f"r{i}").outputs[0] for i in range(len(requests))]
    for output in outputs:
        if counts is not None:
            counts.merge(output.draft_counts)
    return [output.token_ids for output in outputs]


@SHAPES
def test_drafts_change_no_token(target, draft, wanted, plain, tree):
    counts = DraftCounts()
    assert run(engine_for(target, drafter_for(draft, tree=tree)), wanted, counts) == plain
    rate = counts.num_accepted_draft_tokens / counts.num_draft_tokens
    assert 0.02 < rate < 0.9, f"{rate:.2f} of the drafts accepted: too few or too many to tell"


@SHAPES
@pytest.mark.parametrize("num_blocks", [12, 24])
def test_starved_pools(target, draft, wanted, plain, tree, num_blocks):
    drafter = drafter_for(draft, tree=tree, num_blocks=num_blocks)
    engine = engine_for(target, drafter, kv_cache_memory=48 * BYTES_PER_TOKEN)
    assert run(engine, wanted) == plain
    assert engine.stats().num_preemptions > 0, "the pool was not scarce enough to test anything"


@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
def test_its_own_drafts_are_all_accepted(target, wanted, rule, monkeypatch):
    """The target as its own draft model: only the end of an answer cuts a draft short."""
    monkeypatch.setattr(sampling, "SHARPENING", 1.0)  # the same race, not a sharper one
    counts = DraftCounts()
    requests = [(prompt, replace(params, ignore_eos=True, stop=())) for prompt, params in wanted]
    run(engine_for(target, drafter_for(target, rule=rule), rule=rule), requests, counts)
    assert counts.num_accepted_draft_tokens == counts.num_draft_tokens > 50


def test_its_own_trees_are_followed_to_a_leaf(target, wanted):
    counts = DraftCounts()
    requests = [(prompt, replace(params, ignore_eos=True, stop=())) for prompt, params in wanted]
    run(engine_for(target, drafter_for(target, tree=TREE)), requests, counts)
    assert counts.acceptance_by_position == [1.0] * TREE.depth


@pytest.mark.parametrize("top_k", [0, 2])
def test_sampled_trees_keep_the_law(top_k):
    """`ratio` over trees that were drawn without replacement: the law of two tokens is exact."""
    changes = {"vocab_size": 5, "num_layers": 1, "seed": 3}
    target, draft = tiny_model("llama", **changes), shaken("llama", **changes)
    params = SamplingParams(temperature=1.5, top_k=top_k, max_tokens=3, ignore_eos=True)
    prompt = [1, 3, 2]
    tree = TreeConfig(depth=2, topk=3, max_tokens=6)
    drafter = drafter_for(draft, num_blocks=2048, tree=tree, rule="ratio", vocab_size=5)
    engine = engine_for(target, drafter, rule="ratio", max_num_seqs=256, kv_cache_memory=2**21)
    ids = [engine.add(prompt, replace(params, seed=seed)) for seed in range(4000)]
    while engine.has_work:
        engine.step()
    outputs = [engine.output(request).outputs[0] for request in ids]
    counts = torch.zeros(5, 5)
    for output in outputs:
        counts[output.token_ids[0], output.token_ids[1]] += 1
    assert sum(output.draft_counts.num_accepted_draft_tokens for output in outputs) > 2000

    def after(tokens: list[int]) -> torch.Tensor:
        row = Row(params, tokens, len(prompt))
        return probabilities(reference.logits(target, tokens)[-1:], controls([row]))[0].double()

    law = after(prompt).unsqueeze(1) * torch.stack([after([*prompt, t]) for t in range(5)])
    assert g_test(counts.flatten(), (law / law.sum()).flatten()).p_value >= FALSE_ALARM
