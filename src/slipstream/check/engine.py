"""Level B: the whole engine on a tiny model, against the oracle and against exact laws."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from slipstream import reference
from slipstream.build import build_engine
from slipstream.check.report import Check
from slipstream.check.tiny import loaded, tiny_model
from slipstream.core.config import EngineConfig
from slipstream.core.controls import Row, controls
from slipstream.core.params import SamplingParams
from slipstream.drafters.synthetic import SyntheticDrafter
from slipstream.engine.controller import FixedController
from slipstream.engine.engine import Engine
from slipstream.engine.verifier import make_verifier
from slipstream.maths.distributions import probabilities
from slipstream.maths.stats import detectable_tv, g_test
from slipstream.models import CausalLM

FALSE_ALARM = 1e-6
EOS = frozenset({0})

Request = tuple[list[int], SamplingParams]
Answers = dict[str, dict[int, list[int]]]  # request id -> answer index -> output tokens

_COMMON = [7, 3, 19, 4, 28, 11, 5, 9]
_SETTINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.1, seed=1),
    SamplingParams(
        temperature=0.9,
        repetition_penalty=1.5,
        presence_penalty=0.8,
        frequency_penalty=1.2,
        logit_bias={3: 1.0},
        min_tokens=4,
        seed=2,
    ),
    SamplingParams(temperature=1.4, top_k=12, top_p=0.9, min_p=0.01, seed=3),
    SamplingParams(temperature=0, frequency_penalty=2.0),
)
REQUESTS: tuple[Request, ...] = tuple(
    ([*_COMMON[: 3 * (i % 3)], 1 + i, 2 + i], replace(_SETTINGS[i % 5], max_tokens=18 - i % 4))
    for i in range(10)
)


def drafts_change_nothing(*, trees: bool) -> Check:
    """Ten requests of all kinds in one starved batch, behind drafts that are often right."""
    model = tiny_model()
    engine = _engine(model, _answers(model, REQUESTS), trees=trees, block_size=4, num_blocks=32)
    kind = "trees" if trees else "chains"
    return _equal(f"{kind} of drafts change no token", model, engine, REQUESTS)


def windows_hold_in_trees() -> Check:
    """Sliding windows count positions, which in a tree are not key indices."""
    model = tiny_model("gemma3")
    engine = _engine(model, _answers(model, REQUESTS), trees=True)
    return _equal("sliding windows hold in trees", model, engine, REQUESTS)


def sharing_changes_nothing() -> Check:
    """Several answers to one prompt, and prompts whose blocks coincide but not their beginnings."""
    model = tiny_model()
    block = [6, 14, 22, 30]
    sampled = SamplingParams(temperature=1.2, seed=9, max_tokens=10)
    requests: list[Request] = [
        ([1, 2, 3, 4, *block, 5, 6], replace(sampled, n=3)),
        ([9, 8, 7, 6, 1, 1, 1, 1, 2], sampled),
        ([9, 8, 7, 6, *block, 5, 6], sampled),
        ([1, 2, 3, 4, *block, 5, 6], sampled),
    ]
    engine = _engine(model, _answers(model, requests), trees=False, block_size=4)
    return _equal("shared and cached prompts change no token", model, engine, requests)


def engine_law(rule: str, num_samples: int = 6000) -> Check:
    """Thousands of sampled requests through the engine: the joint law of their three tokens."""
    model = tiny_model(vocab_size=5, num_layers=1, seed=3)
    params = SamplingParams(temperature=1.5, frequency_penalty=0.7, max_tokens=3, ignore_eos=True)
    prompt = [1, 3, 2]
    # Nobody's answer: it only gives the drafter habits, some stronger than others.
    habits = {"nobody": {0: [0, 1] * 6 + [2, 3] * 5 + [4, 0] * 4 + [2, 1, 3, 0, 3, 4, 2, 4, 1]}}
    drafter = SyntheticDrafter(habits, vocab_size=5, hit_rate=0.0, sampled=rule != "match")
    engine = build_engine(
        loaded(model),
        EngineConfig(max_num_seqs=256, kv_cache_memory=2**21, block_size=4),
        drafter=drafter,
        controller=FixedController(2),
        verifier=make_verifier(rule),
    )
    ids = [engine.add(prompt, replace(params, seed=seed)) for seed in range(num_samples)]
    while engine.has_work:
        engine.step()
    outputs = torch.tensor([engine.output(i).outputs[0].token_ids for i in ids])
    counts = torch.bincount(outputs @ torch.tensor([25, 5, 1]), minlength=125)
    outcome = g_test(counts, _joint(model, prompt, params, 3))
    detectable = detectable_tv(num_samples, 125, FALSE_ALARM, 0.99)
    return Check(
        f"the engine under {rule} has the target's joint law",
        outcome.p_value >= FALSE_ALARM,
        f"{num_samples} answers of 3 tokens, {drafter.num_accepted} of {drafter.num_drafted} "
        f"drafted accepted, p-value {outcome.p_value:.2g}, "
        f"alarm at {FALSE_ALARM:.0e}, would show a total variation of {detectable:.3f}",
    )


CHECKS: tuple[Callable[[], Check], ...] = (
    partial(drafts_change_nothing, trees=False),
    partial(drafts_change_nothing, trees=True),
    windows_hold_in_trees,
    sharing_changes_nothing,
    partial(engine_law, "match"),
    partial(engine_law, "ratio"),
    partial(engine_law, "block"),
)


def _engine(
    model: CausalLM,
    answers: Answers,
    *,
    trees: bool,
    block_size: int = 16,
    num_blocks: int = 512,
) -> Engine:
    config = model.config
    bytes_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 8
    return build_engine(
        loaded(model, EOS),
        EngineConfig(
            kv_cache_memory=num_blocks * block_size * bytes_per_token, block_size=block_size
        ),
        drafter=SyntheticDrafter(answers, config.vocab_size, hit_rate=0.7, trees=trees),
        controller=FixedController(7),
    )


def _plain(model: CausalLM, prompt: list[int], params: SamplingParams, branch: int) -> list[int]:
    assert params.max_tokens is not None
    return reference.generate(
        model, prompt, params, stop_ids=EOS, branch=branch, num_tokens=params.max_tokens
    )


def _answers(model: CausalLM, requests: Sequence[Request]) -> Answers:
    return {
        f"case-{i}": {branch: _plain(model, prompt, params, branch) for branch in range(params.n)}
        for i, (prompt, params) in enumerate(requests)
    }


def _equal(name: str, model: CausalLM, engine: Engine, requests: Sequence[Request]) -> Check:
    """Run the requests, one joining every step, and compare every answer with the oracle's."""
    want = _answers(model, requests)
    waiting = list(enumerate(requests))
    while waiting or engine.has_work:
        if waiting:
            i, (prompt, params) = waiting.pop(0)
            engine.add(prompt, params, request_id=f"case-{i}")
        engine.step()
        engine.check_integrity()
    num_tokens, wrong = 0, []
    for i in range(len(requests)):
        for output in engine.output(f"case-{i}").outputs:
            expected = want[f"case-{i}"][output.index]
            num_tokens += len(expected)
            if output.token_ids != expected:
                wrong.append(f"case-{i}.{output.index}: {output.token_ids} for {expected}")
    drafter = engine.parts.drafter
    assert isinstance(drafter, SyntheticDrafter)
    drafted, accepted = drafter.num_drafted, drafter.num_accepted
    detail = f"{num_tokens} tokens equal the oracle's; {accepted} of {drafted} drafted accepted"
    return Check(name, not wrong, wrong[0] if wrong else detail)


def _joint(model: CausalLM, prompt: list[int], params: SamplingParams, length: int) -> torch.Tensor:
    """The exact law of the first `length` tokens, flattened: [V ** length] float64."""
    if length == 0:
        return torch.ones(1, dtype=torch.float64)

    def after(output: list[int]) -> torch.Tensor:
        tokens = prompt + output
        row = Row(params, tokens, len(prompt))
        p = probabilities(reference.logits(model, tokens)[-1:], controls([row]))[0].double()
        p = p / p.sum()
        if len(output) + 1 == length:
            return p
        return torch.cat([p[token] * after([*output, token]) for token in range(len(p))])

    return after([])
