"""Proving tiny models: what holds is proved, what was broken is refuted, little is not enough."""

import math
from dataclasses import replace

import pytest

from slipstream import reference
from slipstream.check import distribution, equality
from slipstream.check.model import prove_model
from slipstream.check.report import PROVED, REFUTED, UNDERPOWERED
from slipstream.check.tiny import loaded, tiny_model
from slipstream.core.config import EngineConfig
from slipstream.core.errors import ConfigError, ModelError, RequestError
from slipstream.core.params import SamplingParams
from slipstream.drafters.synthetic import SyntheticDrafter
from slipstream.engine import step
from slipstream.maths import acceptance
from slipstream.maths.noise import StepNoise

EOS = frozenset({0})
PROMPTS = [[5, 6, 7, 8], [9, 3], [4, 11, 12, 13, 14, 15]]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, seed=3)
CONFIG = EngineConfig(kv_cache_memory=2**23, max_num_seqs=128)


@pytest.fixture(scope="module")
def model():
    return loaded(tiny_model(), EOS)


def prove(model, params=SAMPLED, **options):
    options = {"prompts": PROMPTS, "samples": 13, "detect": 0.3, "config": CONFIG} | options
    return prove_model(model, params, **options)


@pytest.mark.parametrize(
    ("rule", "params"),
    [
        ("match", SAMPLED),
        ("match", replace(SAMPLED, top_p=0.9, frequency_penalty=0.8, min_tokens=4, seed=2**64 - 2)),
        ("block", replace(SAMPLED, temperature=0)),
        ("ratio", replace(SAMPLED, temperature=0)),
    ],
)
def test_equality_is_proved(model, rule, params):
    report = prove(model, params, rule=rule)
    assert report.exit_code == PROVED
    assert report.cases == report.equal == 13
    assert report.settings["accepted"] > 30, "too few drafts were accepted to prove anything"
    assert report.settings["drafted"] > report.settings["accepted"]
    assert [bug.caught for bug in report.planted] == [True]
    assert report.detectable_tv == pytest.approx(1 - 0.01 ** (1 / 13))


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_laws_are_proved(model, rule):
    params = replace(SAMPLED, max_tokens=32)
    report = prove(model, params, rule=rule, samples=64, detect=0.15)
    assert report.exit_code == PROVED
    assert report.detectable_tv <= 0.15
    assert len(report.checks) == 3 and all(bug.caught for bug in report.planted)
    assert report.settings["accepted"] > 100
    for histogram in report.histograms:
        assert sum(histogram.observed) == pytest.approx(sum(histogram.expected))


def test_lenient_acceptance_is_refuted(model, monkeypatch):
    honest = StepNoise.accepts
    monkeypatch.setattr(StepNoise, "accepts", lambda self, s, n, p, q: honest(self, s, n, 2 * p, q))
    params = replace(SAMPLED, max_tokens=32, temperature=0.7)
    report = prove(model, params, rule="ratio", samples=40)
    assert report.exit_code == REFUTED
    failed = [check.name for check in report.checks if not check.passed]
    assert failed == ["speculative tokens have the law p"], "plain decoding is not to blame"


def test_an_impossible_token_is_refuted_with_its_place(model, monkeypatch):
    """A residual that forgets top-k emits what plain sampling cannot."""
    monkeypatch.setattr(acceptance, "residual", lambda p, q: (p == 0).to(p.dtype))
    params = replace(SAMPLED, top_k=5)
    report = prove(model, params, rule="ratio", samples=4)
    assert report.exit_code == REFUTED
    case = report.reproducer
    tokens = case.prompt + case.got
    logits = reference.logits(model.model, tokens[:-1])[-1]
    assert len(case.got) == case.position + 1
    assert int((logits > logits[case.got[-1]]).sum()) >= 5, "it is among the five"


def test_a_tree_that_is_not_moved_together_is_refuted_with_the_smallest_case(model, monkeypatch):
    """K/V of rejected nodes stays where that of accepted ones belongs."""
    monkeypatch.setattr(step, "_moves", lambda *_: [])
    report = prove(model)
    assert report.exit_code == REFUTED
    assert report.equal < report.cases
    assert max(report.first_divergence_margins) > 1e-3
    case = report.reproducer
    expected = reference.generate(
        model.model,
        case.prompt,
        replace(SAMPLED, seed=case.seed),
        stop_ids=EOS,
        num_tokens=case.position + 1,
    )
    assert case.expected == expected
    assert case.got[:-1] == expected[:-1] and case.got != expected


def test_blindness_is_not_proof(model, monkeypatch):
    """Without drafts nothing is planted and nothing is tested."""
    monkeypatch.setattr(SyntheticDrafter, "_guess", lambda *_: step.NO_DRAFT)
    report = prove(model)
    assert all(check.passed for check in report.checks)
    assert report.exit_code == REFUTED


@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_few_samples_are_not_enough(model, rule):
    report = prove(model, rule=rule, samples=4, detect=0.2)
    assert report.exit_code == UNDERPOWERED
    enough = {"match": 21, "ratio": distribution.samples_for(0.2, SAMPLED.max_tokens)}
    assert report.samples_needed == enough[rule]


def test_a_bias_too_weak_to_be_seen_asks_for_more(model):
    """So cold that nothing is left to chance: the planted bias changes nothing either."""
    report = prove(model, replace(SAMPLED, temperature=1e-4), rule="ratio", samples=8, detect=0.9)
    assert report.exit_code == UNDERPOWERED
    assert report.samples_needed == 32


def test_samples_and_what_they_show_are_inverse():
    for detect in (0.01, 0.05, 0.2):
        assert equality.detectable(equality.samples_for(detect)) <= detect
        assert equality.detectable(equality.samples_for(detect) - 1) > detect
        num_tokens = distribution.samples_for(detect, 1)
        assert distribution.detectable(num_tokens) <= detect
        assert distribution.detectable(int(0.99 * num_tokens)) > detect


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"rule": "typical"}, "typical"),
        ({"prompts": []}, "prompts"),
        ({"samples": 0}, "samples"),
        ({"draft_tokens": 0}, "spec_tokens"),
        ({"detect": 1.0}, "detect"),
        ({"params": replace(SAMPLED, max_tokens=1)}, "max_tokens"),
    ],
)
def test_what_cannot_be_tested_is_refused(model, options, names):
    with pytest.raises((ConfigError, RequestError), match=names):
        prove(model, **options)


def test_a_model_that_computes_nan_is_an_error(model):
    broken = tiny_model()
    broken.model.norm.weight.data.fill_(math.nan)
    with pytest.raises(ModelError, match="NaN"):
        prove(loaded(broken, EOS))


@pytest.mark.weights
@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_real_weights(rule, model_path):
    from slipstream.build import load

    model_path("smollm2-135m")
    real = load("smollm2-135m", dtype="float32", device="cpu", quiet=True)
    prompts = [real.tokenizer.encode("The capital of France is")]
    params = SamplingParams(temperature=0.8, max_tokens=8)
    report = prove_model(
        real,
        params,
        rule=rule,
        prompts=prompts,
        samples=4,
        detect=0.7,
        config=EngineConfig(kv_cache_memory=2**26),
    )
    assert all(check.passed for check in report.checks)
    assert report.exit_code == (PROVED if rule == "match" else UNDERPOWERED)
