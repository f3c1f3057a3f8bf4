"""How close a decision was: whether another computation of the same logits may decide otherwise.

Two ways to multiply the same matrices differ in the last bits. A token that wins by less than that
may lose in the other computation, and neither is wrong. Here a decision is given as the logits of
the specification, and numbers say how far from winning a token was. Truncation makes edges of its
own: a token just outside top-k, top-p or min-p may be inside for the other computation.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.maths.distributions import Controls, edited, scores
from slipstream.maths.noise import Address, exponential


def margins(
    logits: Tensor,  # [R, V]
    controls: Controls,
    addresses: Sequence[Address],
    tokens: Tensor,  # [R] int64
    slack: float,
) -> Tensor:
    """By how much each token lost its race, in units of logits: [R] float64.

    0 for the winner, infinite for a token that was not in the race. Race scores are
    logit - temperature * log E; at temperature 0 they are the logits.

    Args:
        slack: how much logits may be off; decides who may have been in the race at all.
    """
    race = edited(logits, controls).double()
    if bool((controls.temperature > 0).any()):
        noise = exponential(addresses, logits.shape[-1], logits.device).double()
        race -= controls.temperature.double().unsqueeze(-1) * noise.log()
    surely = _support(logits, controls, -slack)
    best = race.masked_fill(~surely, -torch.inf).amax(-1)
    lost_by = (best - _at(race, tokens)).clamp(min=0)
    return lost_by.masked_fill(~possible(logits, controls, tokens, slack), torch.inf)


def possible(logits: Tensor, controls: Controls, tokens: Tensor, slack: float) -> Tensor:
    """Whether each token may have been in its race: [R] bool."""
    return _at(_support(logits, controls, slack), tokens)


def _support(logits: Tensor, controls: Controls, slack: float) -> Tensor:
    """Tokens in the race for some logits within `slack`; negative: for all of them. [R, V] bool"""
    # At temperature 0 everyone who is not banned runs, and only the first place counts.
    greedy = controls.temperature == 0
    moved = replace(
        controls,
        temperature=torch.where(greedy, 1.0, controls.temperature),
        top_k=torch.where(greedy, 0, _moved_top_k(logits, controls, slack)),
        top_p=torch.where(greedy, 1.0, _moved_top_p(controls, slack)),
        min_p=torch.where(greedy, 0.0, _moved_min_p(controls, slack)),
    )
    return scores(logits, moved) > -torch.inf


def _moved_top_k(logits: Tensor, controls: Controls, slack: float) -> Tensor:
    """How many may be among the k largest, or surely are: two logits move 2 slack apart."""
    vocab_size = logits.shape[-1]
    limited = (controls.top_k > 0) & (controls.top_k < vocab_size)
    if not bool(limited.any()):
        return controls.top_k
    ordered = edited(logits, controls).sort(dim=-1, descending=True).values
    last_in = torch.where(limited, controls.top_k - 1, 0)
    if slack > 0:
        count = (ordered >= _at(ordered, last_in).unsqueeze(-1) - 2 * slack).sum(-1)
    else:
        first_out = (last_in + 1).clamp(max=vocab_size - 1)
        count = (ordered > _at(ordered, first_out).unsqueeze(-1) - 2 * slack).sum(-1)
    return torch.where(limited, count.clamp(min=1), 0)


def _moved_top_p(controls: Controls, slack: float) -> Tensor:
    """The odds of any set of tokens change by at most `_factor`."""
    top_p = controls.top_p.double()
    odds = top_p / (1 - top_p) * _factor(controls, slack)
    moved = torch.where(odds.isfinite(), odds / (1 + odds), 1.0)
    return torch.where(top_p < 1, moved, 1.0).clamp(min=1e-9).float()


def _moved_min_p(controls: Controls, slack: float) -> Tensor:
    """And so does p / max p."""
    moved = controls.min_p.double() / _factor(controls, slack)
    return torch.where(controls.min_p > 0, moved, 0.0).clamp(max=1.0).float()


def _factor(controls: Controls, slack: float) -> Tensor:
    return torch.exp(2 * slack / controls.temperature.double().clamp(min=1e-30))


def _at(rows: Tensor, tokens: Tensor) -> Tensor:
    return rows.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
