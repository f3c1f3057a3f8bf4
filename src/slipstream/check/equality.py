"""Speculative answers against plain ones, token for token.

Under `match`, and at temperature 0 under any rule, losslessness is equality. Where the arithmetic
is not the same bits in every batch, two streams may part at a near-tie; the specification is asked
how near it was (`margin`), and a divergence it does not explain refutes.

What equality of n answers shows: both streams use the same noise, so the total variation between
their laws is at most the chance that they differ. Were that chance d, n answers would all be equal
with probability (1 - d)^n only. Answers that part at a near-tie are compared up to there: such a
one counts for the share of its tokens that were, as if a bias were as likely at any of them.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.check.margin import margins
from slipstream.check.report import Check, Planted, Report, Reproducer
from slipstream.check.trial import POWER, Case, Trial, known
from slipstream.core.draft import Draft, Verdict
from slipstream.core.outputs import CompletionOutput
from slipstream.core.sequence import Sequence
from slipstream.drafters.synthetic import SyntheticDrafter
from slipstream.engine.verifier import Verifier, make_verifier

HIT_RATE = 0.7
_NUM_PLANTED_CASES = 4


@dataclass(frozen=True, slots=True)
class Divergence:
    """Two answers to one case that part.

    Attributes:
        position: output tokens they have in common.
        margin: how far the specification is from emitting the worse of the two tokens there, in
            units of logits; infinite if it cannot, or if only one answer goes on.
        limit: up to which margin other arithmetic explains it.
    """

    case: Case
    position: int
    expected: CompletionOutput
    got: CompletionOutput
    margin: float
    limit: float

    @property
    def is_explained(self) -> bool:
        return self.margin <= self.limit

    @property
    def share_unseen(self) -> float:
        """Of the expected answer, what lies past the point where the two part."""
        return 1 - self.position / max(len(self.expected.token_ids), 1)


def samples_for(detect: float) -> int:
    """Equal answers that exclude a chance `detect` of differing."""
    return math.ceil(math.log(1 - POWER) / math.log(1 - detect))


def detectable(num_compared: float) -> float:
    """Inverse of `samples_for`."""
    return 1 - (1 - POWER) ** (1 / num_compared) if num_compared > 0 else 1.0


def prove_equality(trial: Trial, cases: Seq[Case], report: Report) -> float:
    """Fill a report: plain against itself, speculative against plain, and a planted bug.

    Returns:
        How many answers were compared, those that part at a near-tie in part.

    Raises:
        ConfigError: a method that cannot be wired to this model.
    """
    own = None if trial.synthetic else trial.drafter()  # it may refuse, so before all the work
    plain = trial.run("Plain", cases)
    again = trial.run("Plain, in another batch", cases, stagger=True)
    unstable = divergences(trial, cases, plain, again)
    report.checks.append(_check("plain decoding agrees with itself", again, unstable))

    trees = trial.rule != "block"
    drafter = own or SyntheticDrafter(known(plain), trial.vocab_size, HIT_RATE, trees=trees)
    verifier = make_verifier(trial.rule)
    drafted = trial.run("Speculative", cases, drafter=drafter, verifier=verifier, stagger=True)
    parted = divergences(trial, cases, plain, drafted)
    name = "speculation changes no token"
    report.checks.append(_check(name, drafted, parted))
    trial.note_drafts(drafted, report)
    report.cases = len(cases)
    report.equal = len(cases) - len(parted)
    num_compared = len(cases) - sum(each.share_unseen for each in parted)
    report.detectable_tv = detectable(num_compared)
    report.first_divergence_margins = sorted(each.margin for each in parted)
    report.reproducer = _smallest(parted) or _smallest(unstable)

    longest = sorted(range(len(cases)), key=lambda i: -len(plain[i].token_ids))
    some = longest[:_NUM_PLANTED_CASES]
    few, want = [cases[i] for i in some], [plain[i] for i in some]
    wrong = SyntheticDrafter({}, trial.vocab_size, 0.0, trees=trees)
    kept = trial.run("Planted bug", few, drafter=wrong, verifier=_KeepsOneToken(verifier))
    check = _check(name, kept, divergences(trial, few, want, kept))
    report.planted.append(Planted("one rejected token kept", not check.passed, name, check.detail))
    return num_compared


def divergences(
    trial: Trial,
    cases: Seq[Case],
    expected: Seq[CompletionOutput],
    got: Seq[CompletionOutput],
) -> list[Divergence]:
    """The cases whose answers differ, with their margins."""
    found = []
    for case, a, b in zip(cases, expected, got, strict=True):
        if (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason):
            continue
        pairs = zip(a.token_ids, b.token_ids, strict=False)
        shorter = min(len(a.token_ids), len(b.token_ids))
        position = next((i for i, (x, y) in enumerate(pairs) if x != y), shorter)
        margin, limit = math.inf, 0.0
        if position < shorter:
            margin, limit = _margin(trial, case, a, b, position)
        found.append(Divergence(case, position, a, b, margin, limit))
    return found


def _margin(
    trial: Trial, case: Case, a: CompletionOutput, b: CompletionOutput, position: int
) -> tuple[float, float]:
    """How far the worse of two tokens is from being emitted, and how far is near."""
    logits, controls, addresses = trial.specified(case, a.token_ids[: position + 1], position)
    limit = trial.slack(logits)
    worse = 0.0
    for answer in (a, b):
        token = torch.tensor([answer.token_ids[position]], device=logits.device)
        worse = max(worse, float(margins(logits, controls, addresses, token, limit)))
    return worse, limit


def _check(name: str, answers: Seq[CompletionOutput], parted: Seq[Divergence]) -> Check:
    explained = [each for each in parted if each.is_explained]
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    num_equal = len(answers) - len(parted)
    detail = f"{num_equal} of {len(answers)} answers equal, {num_tokens} tokens"
    if explained:
        widest = max(explained, key=lambda each: each.margin)
        detail += (
            f"; {len(explained)} part at a near-tie, by up to {widest.margin:.2g} in logits "
            f"(limit {widest.limit:.2g})"
        )
    if len(parted) > len(explained):
        detail += f"; no near-tie explains {len(parted) - len(explained)}"
    return Check(name, len(parted) == len(explained), detail)


def _smallest(parted: Seq[Divergence]) -> Reproducer | None:
    """The earliest divergence that no near-tie explains, behind the shortest prompt."""
    wrong = [each for each in parted if not each.is_explained]
    if not wrong:
        return None
    least = min(wrong, key=lambda each: (each.position, len(each.case.prompt)))
    stop = least.position + 1
    return Reproducer(
        prompt=least.case.prompt,
        seed=least.case.params.seed or 0,
        position=least.position,
        expected=least.expected.token_ids[:stop],
        got=least.got.token_ids[:stop],
    )


class _KeepsOneToken:
    """A planted bug: the first time a draft is rejected altogether, its first token stays."""

    def __init__(self, verifier: Verifier):
        self.verifier = verifier
        self.is_planted = False

    def __call__(
        self, logits: Tensor, first_rows: Seq[int], seqs: Seq[Sequence], drafts: Seq[Draft]
    ) -> list[Verdict]:
        verdicts = self.verifier(logits, first_rows, seqs, drafts)
        for i, (draft, verdict) in enumerate(zip(drafts, verdicts, strict=True)):
            if len(draft) > 0 and not verdict.path and not self.is_planted:
                verdicts[i] = Verdict([0], verdict.next_token)
                self.is_planted = True
        return verdicts
