"""From a draft model's logits to the tokens it drafts, in the two ways the rules allow.

    coupled       for `match`: the draft's race is run with the target's own noise, so the two agree
                  whenever the same token wins both. Any choice is lossless.
    independent   for `ratio` and `block`: drawn with the drafter's noise, and q is handed over
                  exactly as it was drawn from.

Both take the controls of the request, penalties and bias included, as the target does.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from slipstream.core.controls import Row, controls
from slipstream.drafters.vocabulary import DraftVocabulary
from slipstream.maths import distributions
from slipstream.maths.distributions import Controls, finishers
from slipstream.maths.noise import Address, exponential_at

# log q times this, in a coupled race. A target knows more than its draft: even where q is right on
# average, each p is surer of some token than q is, and noise decides less of p's race than of q's.
SHARPENING = 1.125

# What the 1st, 2nd, ... sample is worth while nothing is known: this share of what is left.
_PRIOR_SHARE = 0.65
# Up to so many candidates are found one by one.
_FEW = 16


@dataclass(frozen=True, slots=True)
class Candidates:
    """What may follow each of R places: C candidates, best first.

    Attributes:
        tokens: [R][C].
        leads: rough chances that each is the one, in 0..1. [R][C]
        possible: whether a token can occur at all; a law may have fewer than C. [R][C]
        q: the laws that were drawn from, [R, V] float32; None where no rule asks.
    """

    tokens: list[list[int]]
    leads: list[list[float]]
    possible: list[list[bool]]
    q: Tensor | None = None


def coupled(
    logits: Tensor,  # [R, V_d]
    vocabulary: DraftVocabulary,
    rows: Seq[Row],
    addresses: Seq[Address],
    num_candidates: int,
) -> Candidates:
    """The first to finish each row's race; at temperature 0 the largest logits.

    Args:
        addresses: the target's noise at the positions that are drafted.

    A candidate leads by what it is ahead: log q plus Gumbel noise, softmax over the candidates.
    """
    if all(row.is_argmax for row in rows):
        columns, ahead = _largest(vocabulary.known(logits), num_candidates)
        tokens = vocabulary.tokens(columns)
    else:
        logits = vocabulary.widened(logits)
        tokens, ahead = _first_to_finish(logits, rows, addresses, num_candidates)
    return Candidates(
        tokens=tokens.tolist(),
        leads=[_softmax(row) for row in ahead.tolist()],
        possible=(ahead > -math.inf).tolist(),
    )


def independent(
    logits: Tensor,  # [R, V]
    rows: Seq[Row],
    addresses: Seq[Address],
    num_candidates: int,
) -> Candidates:
    """Samples of each row's law, drawn one after another without replacement, and the law.

    Args:
        addresses: noise that is used for nothing else.

    Leads are the same for all places: they may not depend on what was drawn.
    """
    weights = _scores(logits, controls(rows, logits.device))
    tokens = finishers(weights, addresses, num_candidates)
    possible = weights.gather(1, tokens) > -torch.inf
    leads = [_PRIOR_SHARE * (1 - _PRIOR_SHARE) ** rank for rank in range(num_candidates)]
    return Candidates(
        tokens.tolist(), [leads] * len(rows), possible.tolist(), torch.softmax(weights, -1)
    )


def _scores(logits: Tensor, settings: Controls) -> Tensor:
    """`distributions.scores`, but a row that cannot be sampled is impossible throughout.

    The target may be healthy where the draft model has NaN, or knows none of the allowed tokens.
    """
    logits = distributions.edited(logits, settings)
    settings = replace(settings, edits={})
    is_hopeless = ~distributions.usable(logits).unsqueeze(-1)
    if not is_hopeless.any():
        return distributions.scores(logits, settings)
    weights = distributions.scores(logits.masked_fill(is_hopeless, 0.0), settings)
    return weights.masked_fill(is_hopeless, -torch.inf)


def _first_to_finish(
    logits: Tensor, rows: Seq[Row], addresses: Seq[Address], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The candidates of `coupled`, and how far each is ahead: [R, count] each."""
    settings = controls(rows, logits.device)
    # The scores of temperature 0 have one possible token; runners-up are wanted too.
    temperature = torch.where(settings.temperature == 0, 1.0, settings.temperature)
    weights = _scores(logits, replace(settings, temperature=temperature))

    tokens, ahead = _largest(weights, count)
    racing = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if racing:
        noise = [addresses[i] for i in racing]
        sharper = weights[racing] * SHARPENING
        first = finishers(sharper, noise, count)
        tokens[racing] = first.cpu()
        ahead[racing] = sharper.gather(1, first).cpu()
        if count > 1:
            ahead[racing] -= exponential_at(noise, first).log().cpu().numpy()
    return tokens, ahead


def _largest(rows: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` largest of each row, in order: indices and values, [R, count] each.

    A row whose largest is not finite cannot be sampled; its values are -inf.
    """
    if rows.device.type == "cpu" and count <= _FEW:
        indices, values = _largest_in_turn(rows, count)
    else:
        values, indices = (part.numpy(force=True) for part in rows.topk(count, dim=-1))
    values[~np.isfinite(values[:, 0])] = -np.inf
    return indices, values


def _largest_in_turn(rows: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """One after another, which takes numpy a fraction of the time of torch's `topk`."""
    left = rows.numpy() if count == 1 else rows.numpy().copy()
    every = np.arange(len(left))
    indices = np.empty((len(left), count), np.int64)
    values = np.empty((len(left), count), left.dtype)
    for rank in range(count):
        best = left.argmax(-1)
        indices[:, rank], values[:, rank] = best, left[every, best]
        if rank + 1 < count:
            left[every, best] = -np.inf
    return indices, values


def _softmax(ahead: list[float]) -> list[float]:
    """Of numbers whose first is the largest; all 0 if that is not finite."""
    if not math.isfinite(ahead[0]):
        return [0.0] * len(ahead)
    shares = [math.exp(value - ahead[0]) for value in ahead]
    return [share / sum(shares) for share in shares]
