"""From a draft model's logits to the tokens it drafts, in the two ways the rules allow.

    coupled       for `match`: the draft's race is run with the target's own noise, so the two agree
                  whenever the same token wins both. Any choice is lossless.
    independent   for `ratio` and `block`: drawn with the drafter's noise, and q is handed over
                  exactly as it was drawn from.

Both take the controls of the request, penalties and bias included, as the target does.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.core.controls import Row, controls
from slipstream.maths import distributions
from slipstream.maths.distributions import Controls, finishers
from slipstream.maths.noise import Address, exponential_at

# What the 1st, 2nd, ... sample is worth while nothing is known: this share of what is left.
_PRIOR_SHARE = 0.65


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
    logits: Tensor,  # [R, V]
    rows: Seq[Row],
    addresses: Seq[Address],
    num_candidates: int,
) -> Candidates:
    """The first to finish each row's race; at temperature 0 the largest logits.

    Args:
        addresses: the target's noise at the positions that are drafted.

    A candidate leads by what it is ahead: log q plus Gumbel noise, softmax over the candidates.
    """
    settings = controls(rows, logits.device)
    is_greedy = settings.temperature == 0
    # The scores of temperature 0 have one possible token; runners-up are wanted too.
    temperature = torch.where(is_greedy, 1.0, settings.temperature)
    weights = _scores(logits, replace(settings, temperature=temperature))

    tokens = torch.empty(len(rows), num_candidates, dtype=torch.int64, device=logits.device)
    tokens[is_greedy] = _largest(weights[is_greedy], num_candidates)
    racing = (~is_greedy).nonzero().flatten().tolist()
    if racing:
        noise = [addresses[row] for row in racing]
        tokens[racing] = finishers(weights[racing], noise, num_candidates)

    ahead = weights.gather(1, tokens)
    possible = ahead > -torch.inf
    if num_candidates > 1 and racing:
        ahead[racing] -= exponential_at(noise, tokens[racing]).log()
    leads = torch.softmax(ahead, -1).nan_to_num()
    return Candidates(tokens.tolist(), leads.tolist(), possible.tolist())


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
    is_hopeless = ~torch.isfinite(logits.amax(-1, keepdim=True))
    if not is_hopeless.any():
        return distributions.scores(logits, settings)
    weights = distributions.scores(logits.masked_fill(is_hopeless, 0.0), settings)
    return weights.masked_fill(is_hopeless, -torch.inf)


def _largest(weights: Tensor, count: int) -> Tensor:
    """The `count` largest of each row; of one, the lowest token id among equals."""
    if count == 1:
        return weights.argmax(-1, keepdim=True)
    return weights.topk(count, dim=-1).indices
