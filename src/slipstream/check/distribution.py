"""Speculative answers against the law they must have, where they cannot equal the plain ones.

`ratio` and `block` spend other noise than plain decoding, so only laws can be compared. Every
emitted token is scored by the specification in a pass of its own, and what is summed over tokens
is a martingale if each was drawn from the p found there (see `stats.z_test`):

    emitted where p > q    what a wrong acceptance rule or residual shifts, seen most directly
    surprise               min(-log p, 4.6), moved by a wrong temperature or penalty
    most likely token      moved by anything that favours or neglects it
    place in the order     of p / q, as a uniform number: any error along that order, and
                           dependence between neighbours

The same tests judge plain decoding, which must pass, and a rule with a bias planted, which must
fail. All answers have a length fixed in advance: end tokens and stop strings are off, since to stop
at a token is to select.
"""

import math
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from tqdm import tqdm

from slipstream.check.margin import possible
from slipstream.check.report import Check, Histogram, Planted, Report, Reproducer
from slipstream.check.trial import POWER, Case, Trial, request_id
from slipstream.core.outputs import CompletionOutput
from slipstream.core.params import SamplingParams
from slipstream.drafters.synthetic import SyntheticDrafter
from slipstream.engine.verifier import RatioVerifier, Verifier, make_verifier
from slipstream.maths import stats
from slipstream.maths.acceptance import DraftBatch, FreshNoise, Target, Verdicts
from slipstream.maths.distributions import probabilities
from slipstream.maths.noise import Address, Key, Stream, uniform_at

FALSE_ALARM = 1e-6
HIT_RATE = 0.5
NUM_BINS = 20  # of `stats.pit_test`
# Below this probability surprise is capped: what lies beyond is too rare for a normal law, and
# where truncation cuts is uncertain to a few rare tokens.
_RARE = 0.01
_NUM_TESTS = 5
_NUM_SOURCES = 128
_LEAST_FOR_PLACES = 641  # `stats.pit_test`
# Drafted and plain answers are judged; a false alarm may come from either.
_LEVEL = FALSE_ALARM / 2


def samples_for(detect: float, tokens_per_sample: int) -> int:
    """Requests that show a total variation of `detect` along the order of p / q."""
    tokens = stats.samples_for_tv(detect, NUM_BINS, _LEVEL / _NUM_TESTS, POWER)
    return math.ceil(tokens / tokens_per_sample)


def detectable(num_tokens: int) -> float:
    """Inverse of `samples_for`, from tokens."""
    return stats.detectable_tv(num_tokens, NUM_BINS, _LEVEL / _NUM_TESTS, POWER)


def prove_distribution(trial: Trial, cases: Seq[Case], report: Report) -> None:
    """Fill a report: speculative answers, plain ones, and those of a planted bias."""
    cases = [Case(case.prompt, _endless(case.params, 0)) for case in cases]
    drafter = _drafter(trial, cases)

    def score(what: str, verifier: Verifier | None) -> Scores:
        drafts = drafter if verifier is not None else None
        answers = trial.run(what, cases, drafter=drafts, verifier=verifier)
        return _score(trial, what, cases, answers, drafter)

    verifier = make_verifier(trial.rule)
    assert isinstance(verifier, RatioVerifier)
    scores = score("Speculative", verifier)
    report.settings |= {"drafted": drafter.num_drafted, "accepted": drafter.num_accepted}
    report.cases = len(cases)
    report.detectable_tv = detectable(scores.num_tokens)
    report.reproducer = scores.impossible
    report.checks += [_possible(scores), _lawful("speculative tokens have the law p", scores)]
    report.histograms.append(scores.histogram("speculative tokens in the order of p / q"))

    scores = score("Plain", None)
    report.checks.append(_lawful("plain tokens have the law p, by the same tests", scores))

    scores = score("Planted bias", _Unresidual(verifier))
    check = _lawful("speculative tokens have the law p", scores)
    report.planted.append(
        Planted("recovered token drawn from p", not check.passed, check.name, check.detail)
    )
    report.histograms.append(scores.histogram("the same with a planted bias"))


@dataclass(slots=True)
class Scores:
    """What the specification says of emitted tokens.

    Attributes:
        deviations, variances: f(x) - E f and Var f of each token, by test.
        places: uniform numbers, if the tokens have the law p.
        impossible: the first token that the specification excludes.
    """

    deviations: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    variances: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    places: list[Tensor] = field(default_factory=list)
    impossible: Reproducer | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.places))

    def outcomes(self) -> dict[str, stats.Outcome]:
        """All tests that there are enough tokens for."""
        found = {}
        for name, deviations in self.deviations.items():
            variances = torch.cat(self.variances[name])
            if float(variances.sum()) > 0:
                found[name] = stats.z_test(torch.cat(deviations), variances)
        if self.num_tokens >= _LEAST_FOR_PLACES:
            uniformity, independence = stats.pit_test(torch.cat(self.places))
            found |= {"place in the order": uniformity, "neighbouring places": independence}
        return found

    def histogram(self, name: str) -> Histogram:
        bins = (torch.cat(self.places) * NUM_BINS).long().clamp(0, NUM_BINS - 1)
        expected = self.num_tokens / NUM_BINS
        observed = bins.bincount(minlength=NUM_BINS).tolist()
        return Histogram(name, observed, [expected] * NUM_BINS)


def _drafter(trial: Trial, cases: Seq[Case]) -> SyntheticDrafter:
    """Drafts for the cases, from plain answers to the same prompts under other seeds.

    Other seeds, because plain answers are to be judged by the same q.
    """
    others = [Case(c.prompt, _endless(c.params, len(cases))) for c in cases[:_NUM_SOURCES]]
    sources: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
    for other, answer in zip(others, trial.run("Answers to draft from", others), strict=True):
        sources[tuple(other.prompt)].append(answer.token_ids)
    answers = {}
    for i, case in enumerate(cases):
        mine = sources.get(tuple(case.prompt))
        if mine:
            answers[request_id(i)] = {0: mine[i % len(mine)]}
    return SyntheticDrafter(answers, trial.vocab_size, HIT_RATE, sampled=True)


def _score(
    trial: Trial,
    what: str,
    cases: Seq[Case],
    answers: Seq[CompletionOutput],
    drafter: SyntheticDrafter,
) -> Scores:
    scores = Scores()
    pairs = list(zip(cases, answers, strict=True))
    bar = tqdm(pairs, desc=f"{what}: scoring", unit="answer", disable=trial.quiet)
    for i, (case, answer) in enumerate(bar):
        output = answer.token_ids
        logits, controls, _ = trial.specified(case, output)
        tokens = torch.tensor(output, device=logits.device)
        excluded = ~possible(logits, controls, tokens, trial.slack(logits))
        if bool(excluded.any()) and scores.impossible is None:
            scores.impossible = _reproducer(case, output, logits, int(excluded.int().argmax()))
        p = probabilities(logits, controls).double()
        p /= p.sum(-1, keepdim=True)
        laws = [drafter.law(request_id(i), 0, output[:n]) for n in range(len(output))]
        q = torch.stack(laws).to(p.device)
        for name, f in _functions(p, q).items():
            mean = (p * f).sum(-1)
            scores.deviations[name].append((_at(f, tokens) - mean).cpu())
            scores.variances[name].append(((p * f * f).sum(-1) - mean**2).clamp(min=0).cpu())
        order = p.log() - q.clamp(min=1e-30).log()
        # Requests have one answer, so nothing else looks at the numbers of a second.
        address = Address(Key(case.params.seed or 0, 1), Stream.ACCEPT, 0)
        v = uniform_at([address], torch.arange(len(output)).unsqueeze(0))[0].to(p.device)
        scores.places.append(stats.randomised_pit(p, order, tokens, v).cpu())
    return scores


def _functions(p: Tensor, q: Tensor) -> dict[str, Tensor]:
    """What is summed over tokens, as a function of the token: [n, V] each."""
    best = torch.zeros_like(p).scatter_(-1, p.argmax(-1, keepdim=True), 1.0)
    return {
        "emitted where p > q": (p > q).double(),
        "surprise": -p.clamp(min=_RARE).log(),
        "most likely token": best,
    }


def _possible(scores: Scores) -> Check:
    detail = f"{scores.num_tokens} tokens"
    if scores.impossible is not None:
        detail += f", one of them excluded at position {scores.impossible.position}"
    return Check("no impossible token was emitted", scores.impossible is None, detail)


def _lawful(name: str, scores: Scores) -> Check:
    outcomes = scores.outcomes()
    adjusted = stats.holm([outcome.p_value for outcome in outcomes.values()])
    least = min(zip(adjusted, outcomes, strict=True), default=(1.0, "nothing varies"))
    return Check(
        name,
        least[0] > _LEVEL,
        f"{scores.num_tokens} tokens, least p-value of {len(outcomes)} tests {least[0]:.2g} "
        f"({least[1]}), alarm at {_LEVEL:.0e}",
    )


def _reproducer(case: Case, output: list[int], logits: Tensor, position: int) -> Reproducer:
    likely = int(logits[position].argmax())
    return Reproducer(
        prompt=case.prompt,
        seed=case.params.seed or 0,
        position=position,
        expected=[*output[:position], likely],
        got=output[: position + 1],
    )


def _endless(params: SamplingParams, seeds_on: int) -> SamplingParams:
    """The same sampling with nothing to stop it but max_tokens, and another seed."""
    seed = ((params.seed or 0) + seeds_on) % 2**64
    return replace(params, ignore_eos=True, stop=(), stop_token_ids=(), min_tokens=0, seed=seed)


def _at(rows: Tensor, tokens: Tensor) -> Tensor:
    return rows.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


class _Unresidual(RatioVerifier):
    """A planted bias: the token after a rejection comes from p and not from what is left of it."""

    def __init__(self, honest: RatioVerifier):
        def rule(drafts: DraftBatch, target: Target, noise: FreshNoise) -> Verdicts:
            accepted = honest.rule(drafts, target, noise).accepted
            every = torch.arange(len(accepted), device=accepted.device)
            # Accepted nodes of a chain are a run from its beginning.
            num_accepted = accepted.sum(1)
            p = target(every, num_accepted - 1)
            return Verdicts(accepted, noise.recovers(every, num_accepted, p))

        self.rule = rule
