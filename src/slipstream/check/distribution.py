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
fail. Speculative and plain answers are also compared with each other, position by position, which
sees less but takes nobody's word for p. All answers have a length fixed in advance: end tokens and
stop strings are off, since to stop at a token is to select.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from slipstream.check.drafts import Drafts, OwnDrafts, SyntheticDrafts
from slipstream.check.margin import possible
from slipstream.check.report import Check, Histogram, Planted, Report, Reproducer
from slipstream.check.trial import POWER, Case, Trial
from slipstream.core.outputs import CompletionOutput
from slipstream.core.params import SamplingParams
from slipstream.engine.verifier import RatioVerifier, Verifier, make_verifier
from slipstream.maths import stats
from slipstream.maths.acceptance import DraftBatch, FreshNoise, Target, Verdicts
from slipstream.maths.distributions import probabilities
from slipstream.maths.noise import Address, Key, Stream, uniform_at

FALSE_ALARM = 1e-6
NUM_BINS = 20  # of `stats.pit_test`
# Below this probability surprise is capped: what lies beyond is too rare for a normal law, and
# where truncation cuts is uncertain to a few rare tokens.
_RARE = 0.01
_NUM_TESTS = 5
_LEAST_FOR_PLACES = 641  # `stats.pit_test`
# Speculative answers, plain ones, and the two together: a false alarm may come from any.
_LEVEL = FALSE_ALARM / 3


def samples_for(detect: float, tokens_per_sample: int) -> int:
    """Requests that show a total variation of `detect` along the order of p / q."""
    tokens = stats.samples_for_tv(detect, NUM_BINS, _LEVEL / _NUM_TESTS, POWER)
    return math.ceil(tokens / tokens_per_sample)


def detectable(num_tokens: int) -> float:
    """Inverse of `samples_for`, from tokens."""
    return stats.detectable_tv(num_tokens, NUM_BINS, _LEVEL / _NUM_TESTS, POWER)


def prove_distribution(trial: Trial, cases: Seq[Case], report: Report) -> float:
    """Fill a report: speculative answers, plain ones, and those of a planted bias.

    Returns:
        How many answers were judged: all of them.

    Raises:
        ConfigError: a method that cannot be wired to this model.
    """
    drafts: Drafts
    others = [Case(case.prompt, _endless(case.params, len(cases))) for case in cases]
    cases = [Case(case.prompt, _endless(case.params, 0)) for case in cases]
    drafts = SyntheticDrafts(trial, cases, others) if trial.synthetic else OwnDrafts(trial, cases)

    def answer(what: str, verifier: Verifier) -> list[CompletionOutput]:
        return trial.run(what, cases, drafter=drafts.drafter(), verifier=verifier)

    verifier = make_verifier(trial.rule)
    assert isinstance(verifier, RatioVerifier)
    answers = answer("Speculative", verifier)
    trial.note_drafts(answers, report)
    scores = _score(trial, "Speculative", cases, answers, drafts)
    report.cases = len(cases)
    report.detectable_tv = detectable(scores.num_tokens)
    report.reproducer = scores.impossible
    report.checks += [_possible(scores), _lawful("speculative tokens have the law p", scores)]
    report.histograms.append(scores.histogram("speculative tokens in the order of p / q"))

    plain = trial.run("Plain", cases)
    scores = _score(trial, "Plain", cases, plain, drafts)
    report.checks.append(_lawful("plain tokens have the law p, by the same tests", scores))
    report.checks.append(_alike(cases, answers, plain))

    biased = answer("Planted bias", _Unresidual(verifier))
    scores = _score(trial, "Planted bias", cases, biased, drafts)
    check = _lawful("speculative tokens have the law p", scores)
    report.planted.append(
        Planted("recovered token drawn from p", not check.passed, check.name, check.detail)
    )
    report.histograms.append(scores.histogram("the same with a planted bias"))
    return len(cases)


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


def _score(
    trial: Trial,
    what: str,
    cases: Seq[Case],
    answers: Seq[CompletionOutput],
    drafts: Drafts,
) -> Scores:
    scores = Scores()
    scored = zip(cases, answers, drafts.laws(answers), strict=True)
    title = f"{what}: scoring"
    for case, answer, law in tqdm(scored, title, len(cases), unit="answer", disable=trial.quiet):
        output = answer.token_ids
        logits, controls, _ = trial.specified(case, output)
        tokens = torch.tensor(output, device=logits.device)
        excluded = ~possible(logits, controls, tokens, trial.slack(logits))
        if bool(excluded.any()) and scores.impossible is None:
            scores.impossible = _reproducer(case, output, logits, int(excluded.int().argmax()))
        p = probabilities(logits, controls).double()
        p /= p.sum(-1, keepdim=True)
        q = law.to(p.device)
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


def _alike(
    cases: Seq[Case], speculative: Seq[CompletionOutput], plain: Seq[CompletionOutput]
) -> Check:
    """Two samples of answers, one position at a time: tokens of one answer are not independent."""
    outcomes = []
    for position in range(min(len(answer.token_ids) for answer in (*speculative, *plain))):
        ours, theirs = (
            Counter(
                (tuple(case.prompt), answer.token_ids[position])
                for case, answer in zip(cases, answers, strict=True)
            )
            for answers in (speculative, plain)
        )
        # Rare bins are pooled with their neighbours, so their order must not tell who saw them.
        bins = sorted(ours.keys() | theirs.keys())
        a, b = (torch.tensor([seen[each] for each in bins]) for seen in (ours, theirs))
        outcomes.append(stats.two_sample_test(a, b))
    least = min(stats.holm([outcome.p_value for outcome in outcomes]))
    detail = f"{len(cases)} answers of either kind at each of {len(outcomes)} positions, "
    num_bins = 1 + max(outcome.dof for outcome in outcomes)
    if num_bins > 1:
        # Two samples see what one of half their size sees of a known law.
        level = _LEVEL / len(outcomes)
        seen = stats.detectable_tv(len(cases) // 2, num_bins, level, POWER)
        detail += f"would show a total variation of {min(seen, 1.0):.2g} at one of them, "
    return Check(
        "speculative and plain answers have one law",
        least > _LEVEL,
        detail + f"least p-value {least:.2g}, alarm at {_LEVEL:.0e}",
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
            # The last accepted node; -1, the root, where there is none.
            nodes = torch.arange(accepted.shape[1], device=accepted.device).expand_as(accepted)
            last = F.pad(nodes.masked_fill(~accepted, -1), (1, 0), value=-1).amax(1)
            p = target(every, last)
            return Verdicts(accepted, noise.recovers(every, accepted.sum(1), p))

        self.rule = rule
