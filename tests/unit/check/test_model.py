"""Proving tiny models: what holds is proved, what was broken is refuted, little is not enough."""

import math
from dataclasses import replace

import pytest
import torch

from slipstream import reference
from slipstream.check import distribution, equality, text
from slipstream.check.model import prove_model
from slipstream.check.report import PROVED, REFUTED, UNDERPOWERED
from slipstream.check.tiny import loaded, tiny_model
from slipstream.check.trial import DRAFT_TOKENS, LOGIT_SLACK, Trial
from slipstream.core.config import EngineConfig
from slipstream.core.errors import ConfigError, ModelError, RequestError
from slipstream.core.params import SamplingParams
from slipstream.core.speculative import SpeculativeConfig, TreeConfig
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


@pytest.fixture(scope="module")
def small():
    """A draft model for `model`."""
    return loaded(tiny_model(num_layers=1), EOS)


def prove(model, params=SAMPLED, *, rule="match", **options):
    speculative = SpeculativeConfig(rejection_sample_method=rule)
    default = {"prompts": PROMPTS, "samples": 13, "detect": 0.3, "config": CONFIG}
    return prove_model(model, params, **(default | {"speculative": speculative} | options))


def prove_own(model, params=SAMPLED, *, rule="match", draft=None, method, **options):
    """With the method's own drafts."""
    if draft is not None:
        method = {"model": "a small one"} | method
    speculative = SpeculativeConfig(rejection_sample_method=rule, **method)
    return prove(model, params, speculative=speculative, draft=draft, synthetic=False, **options)


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
    assert len(report.checks) == 4 and all(bug.caught for bug in report.planted)
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


def test_speculative_and_plain_answers_are_compared_directly(model, monkeypatch):
    """Recovered tokens are always the same one: seen without asking the specification."""
    always = torch.eye(32)[1]
    monkeypatch.setattr(acceptance, "residual", lambda p, q: always.expand(p.shape))
    params = replace(SAMPLED, max_tokens=6)
    report = prove(model, params, rule="ratio", samples=64)
    failed = [check.name for check in report.checks if not check.passed]
    assert "speculative and plain answers have one law" in failed


def test_answers_that_are_all_different_are_no_evidence(model):
    """Every prompt is another and hardly a token comes twice: nothing to compare, no alarm."""
    prompts = [[1 + i // 8, 1 + i % 8, 9] for i in range(64)]
    params = replace(SAMPLED, temperature=2.0, max_tokens=4)
    report = prove(model, params, rule="ratio", samples=64, prompts=prompts)
    assert [check.name for check in report.checks if not check.passed] == []


@pytest.fixture
def tampered(monkeypatch):
    """Make one run of a trial emit another token at a place in its first two answers."""

    def tamper(run: str, position: int) -> None:
        honest = Trial.run

        def tampering(self, what, cases, **options):
            answers = honest(self, what, cases, **options)
            if what == run:
                for i in range(2):
                    token_ids = list(answers[i].token_ids)
                    token_ids[position] = (token_ids[position] + 1) % 32
                    answers[i] = replace(answers[i], token_ids=token_ids)
            return answers

        monkeypatch.setattr(Trial, "run", tampering)

    return tamper


def test_plain_decoding_that_disagrees_with_itself_is_refuted_with_a_case(model, tampered):
    params = replace(SAMPLED, ignore_eos=True)
    tampered("Plain, in another batch", 3)
    report = prove(model, params)
    assert report.exit_code == REFUTED
    assert [check.passed for check in report.checks] == [False, True]
    assert report.reproducer is not None and report.reproducer.position == 3


def test_answers_that_part_at_a_near_tie_count_for_what_was_compared(model, tampered, monkeypatch):
    params = replace(SAMPLED, ignore_eos=True)  # 12 tokens
    tampered("Speculative", 3)
    monkeypatch.setitem(LOGIT_SLACK, "float64", 1e3)  # every divergence is a near-tie
    report = prove(model, params)
    assert all(check.passed for check in report.checks)
    assert (report.cases, report.equal) == (13, 11)
    assert report.detectable_tv == pytest.approx(1 - 0.01 ** (1 / 11.5))
    assert report.exit_code == UNDERPOWERED
    assert report.samples_needed == math.ceil(13 * 13 / 11.5)


def test_coarse_arithmetic_asks_for_more_answers_by_itself():
    coarse = loaded(tiny_model(dtype=torch.bfloat16), EOS)
    report = prove(coarse, replace(SAMPLED, max_tokens=2), samples=None, detect=0.6)
    assert report.settings["samples"] == math.ceil(1.5 * equality.samples_for(0.6))


TREE = TreeConfig(depth=2, topk=2, max_tokens=5)
REPEATING = [[5, 6, 7] * 4, [9, 3] * 5]
METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
    "suffix tree": {"method": "suffix", "tree": TREE},
    "auto": {"method": "auto"},
    "draft model": {"method": "draft_model", "num_speculative_tokens": 3},
    "draft tree": {"method": "draft_model", "tree": TREE},
    "combined": {"method": "combined"},
    "combined tree": {"method": "combined", "tree": TREE},
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_proved_with_its_own_drafts(model, small, name):
    method = METHODS[name]
    has_model = method["method"] in ("draft_model", "combined")
    # So many repetitions that lookup has something to find.
    params = replace(SAMPLED, temperature=0.8, max_tokens=24)
    report = prove_own(
        model, params, method=method, draft=small if has_model else None, prompts=REPEATING
    )
    assert report.exit_code == PROVED
    settings = report.settings
    assert settings["method"] == method["method"]
    assert settings["drafted"] > settings["accepted"] > 0
    size = method.get("num_speculative_tokens", 5 if "tree" in method else DRAFT_TOKENS)
    assert settings["spec tokens"] == size and f"fixed at {size}" in settings["controller"]
    assert settings.get("draft model") == ("a small one" if has_model else None)
    assert settings["model"] == "tiny"
    assert ("tree" in settings) == ("tree" in method)
    assert settings.get("prompt_lookup_min") == method.get("prompt_lookup_min")


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("block", "draft model"),
        ("ratio", "draft tree"),
        ("ratio", "combined"),
        ("ratio", "ngram"),
        ("block", "suffix"),
    ],
)
def test_laws_are_proved_with_a_methods_own_drafts(model, small, rule, name):
    """The planted bias is caught, so what the tests look at has to do with what is drafted."""
    params = replace(SAMPLED, temperature=0.6, max_tokens=32)
    report = prove_own(
        model,
        params,
        rule=rule,
        method=METHODS[name],
        draft=small,
        prompts=REPEATING,
        samples=64,
        detect=0.15,
    )
    assert report.settings["drafted"] > 300
    assert all(check.passed for check in report.checks)
    assert [bug.caught for bug in report.planted] == [True]
    assert report.exit_code == PROVED


def test_lenient_acceptance_of_a_draft_model_is_refuted(model, small, monkeypatch):
    honest = StepNoise.accepts
    monkeypatch.setattr(StepNoise, "accepts", lambda self, s, n, p, q: honest(self, s, n, 2 * p, q))
    params = replace(SAMPLED, max_tokens=32, temperature=0.7)
    method = METHODS["draft model"]
    report = prove_own(model, params, rule="ratio", method=method, draft=small, samples=40)
    failed = [check.name for check in report.checks if not check.passed]
    assert failed == ["speculative tokens have the law p"]


@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_nothing_drafted_is_nothing_proved(model, rule):
    """Prompts and answers without any n-gram of five twice."""
    method = {"method": "ngram", "prompt_lookup_min": 5}
    report = prove_own(model, method=method, rule=rule, prompts=[[1, 2, 3]], samples=6, detect=0.9)
    assert report.settings["drafted"] == 0
    assert all(check.passed for check in report.checks)
    assert report.exit_code == UNDERPOWERED
    assert report.samples_needed is None, "more of the same would not help"
    assert report.detectable_tv is None, "nothing would have been seen"
    word, sentence = text.verdict(report)
    assert word == "NOTHING TESTED"
    assert "ngram drafted nothing" in sentence and "--prompts" in sentence


@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_a_method_that_cannot_be_wired_is_an_error_before_any_work(model, rule, monkeypatch):
    monkeypatch.setattr(Trial, "run", lambda *_, **__: pytest.fail("work was done"))
    with pytest.raises(ConfigError, match="combined needs a draft model"):
        prove_own(model, method={"method": "combined"}, rule=rule)


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
        ({"prompts": []}, "prompts"),
        ({"samples": 0}, "samples"),
        ({"speculative": SpeculativeConfig(num_speculative_tokens=0)}, "spec_tokens"),
        ({"speculative": SpeculativeConfig(method="off")}, "method off"),
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
        speculative=SpeculativeConfig(rejection_sample_method=rule),
        prompts=prompts,
        samples=4,
        detect=0.7,
        config=EngineConfig(kv_cache_memory=2**26),
    )
    assert all(check.passed for check in report.checks)
    assert report.exit_code == (PROVED if rule == "match" else UNDERPOWERED)
