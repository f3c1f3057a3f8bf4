"""From logits to the distribution that is sampled: one function for target, drafters and all.

The order is fixed, because it changes the result:

    logits + bias, penalties, bans -> / temperature -> min-p -> top-k -> top-p

What comes out is *scores*: float32 log-weights, -inf where a token is impossible, whose softmax
is p. Temperature 0 is the limit: only the largest logit (the lowest token id among equals) stays.

Sampling is the exponential race: with E(v) independent exponentials, argmin E(v) / p(v) has law p.
It is evaluated as E(v) * exp(max score - score(v)), which needs no normalisation and cannot
underflow: the most likely token has ratio 1 at any temperature, hopeless ones have infinity.

On a CPU with the native kernels every race is run by one of them, which looks at the scores and
leaves no noise in memory. Its tokens are those of the code below, but for times that round alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream import native
from slipstream.maths.noise import (
    SPARSE_SHARE,
    Address,
    address_words,
    exponential,
    exponential_at,
    first_argmax,
    first_argmin,
)
from slipstream.maths.truncation import truncate

_UNUSABLE = "logits contain NaN or +inf, or ban every token"


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes to one row's logits, given the tokens that lead to it.

    Attributes:
        add_ids, add_values: numbers added to logits (bias; -inf bans). [A]
        seen_ids: tokens of the prompt or the output, each once. [S]
        repetition: penalty on those.
        output_ids, output_counts: tokens of the output and how often each occurs. [O]
        presence, frequency: penalties on those.
        allowed: which tokens are possible at all; None allows all. [V] bool
    """

    add_ids: Tensor | None = None
    add_values: Tensor | None = None
    seen_ids: Tensor | None = None
    repetition: float = 1.0
    output_ids: Tensor | None = None
    output_counts: Tensor | None = None
    presence: float = 0.0
    frequency: float = 0.0
    allowed: Tensor | None = None

    def apply_(self, row: Tensor) -> None:
        """Edit one row of logits [V] in place."""
        if self.add_ids is not None and self.add_values is not None:
            row.index_add_(0, self.add_ids, self.add_values)
        if self.seen_ids is not None and self.repetition != 1.0:
            seen = row[self.seen_ids]
            row[self.seen_ids] = torch.where(
                seen > 0, seen / self.repetition, seen * self.repetition
            )
        if self.output_ids is not None and self.output_counts is not None:
            row[self.output_ids] -= self.presence + self.frequency * self.output_counts
        if self.allowed is not None:
            row.masked_fill_(~self.allowed, -torch.inf)


@dataclass(frozen=True, slots=True)
class Controls:
    """The sampling controls of R rows; every row may differ.

    Attributes:
        temperature, top_p, min_p: [R] float32.
        top_k: [R] int64, 0 for no limit.
        edits: row -> its edits, for rows that have any.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    edits: dict[int, Edits]

    def truncates(self, vocab_size: int) -> Tensor:
        """Which rows have tokens taken away before they are sampled: [R] bool."""
        limited = (self.top_k > 0) & (self.top_k < vocab_size)
        return (self.temperature > 0) & (limited | (self.top_p < 1) | (self.min_p > 0))

    def at(self, rows: Tensor) -> "Controls":
        """The controls of some rows, without their edits."""
        return Controls(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], {}
        )


def usable(logits: Tensor) -> Tensor:
    """Rows that can be sampled, [R] bool: their largest logit is finite, so there is no NaN."""
    if logits.device.type == "cpu":  # where numpy is several times as fast as torch
        return torch.from_numpy(np.isfinite(logits.numpy().max(-1)))
    return torch.isfinite(logits.amax(-1))


def edited(logits: Tensor, controls: Controls) -> Tensor:
    """Logits [R, V] in float32 with bias, penalties and bans applied; the argument is kept."""
    if not controls.edits:
        return logits.float()
    logits = logits.to(torch.float32, copy=True)
    for row, edits in controls.edits.items():
        edits.apply_(logits[row])
    return logits


def scores(logits: Tensor, controls: Controls) -> Tensor:
    """Log-weights [R, V] of the distribution that is sampled; softmax of a row is p.

    Args:
        logits: [R, V], any float type.
        controls: of the same R rows, on the same device.

    Raises:
        ValueError: a row has NaN, or no possible token.
    """
    logits = edited(logits, controls)
    best = _usable(logits).amax(-1, keepdim=True)
    greedy = controls.temperature == 0
    if bool(greedy.all()):
        return _only(first_argmax(logits), like=logits)
    temperature = torch.where(greedy, 1.0, controls.temperature).unsqueeze(-1)
    weights = (logits - best).div_(temperature)
    weights = truncate(weights, controls.min_p, controls.top_k, controls.top_p)
    if bool(greedy.any()):
        weights[greedy] = _only(first_argmax(logits[greedy]), like=weights[greedy])
    return weights


def probabilities(logits: Tensor, controls: Controls) -> Tensor:
    """p [R, V] in float32: what `scores` means."""
    return torch.softmax(scores(logits, controls), dim=-1)


def sample(logits: Tensor, controls: Controls, addresses: Sequence[Address]) -> Tensor:
    """One token per row, [R] int64: row r of the distribution, decided by `addresses[r]`."""
    if _has_kernel(logits):
        return _sample(edited(logits, controls), controls, addresses)
    greedy = controls.temperature == 0
    if bool(greedy.all()):
        return first_argmax(_usable(edited(logits, controls)))
    return race(scores(logits, controls), addresses)


def race(weights: Tensor, addresses: Sequence[Address]) -> Tensor:
    """The winner of the exponential race under each row of scores [R, V]: [R] int64."""
    return finishers(weights, addresses, 1).squeeze(-1)


def finishers(weights: Tensor, addresses: Sequence[Address], count: int) -> Tensor:
    """The first `count` tokens to finish each row's race, in order: [R, count] int64.

    They are a sample without replacement from the softmax of `weights` [R, V]. Tokens of weight
    -inf never finish before possible ones.
    """
    if _has_kernel(weights) and weights.dtype == torch.float32:
        return _race(weights, torch.ones(len(weights)), addresses, count)[0]
    vocab_size = weights.shape[-1]
    num_possible = vocab_size
    if bool((weights.amin(-1) == -torch.inf).all()):  # truncated, so it may pay to count
        num_possible = int((weights > -torch.inf).sum(-1).max())
    if num_possible >= count and num_possible * SPARSE_SHARE < vocab_size:
        # In order of token id, so that equal times are resolved as on the dense path.
        tokens = weights.topk(num_possible, dim=-1).indices.sort(dim=-1).values
        noise = exponential_at(addresses, tokens)
        return tokens.gather(-1, _first(weights.gather(-1, tokens), noise, count))
    return _first(weights, exponential(addresses, vocab_size, weights.device), count)


def _has_kernel(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and native.is_available()


def _sample(logits: Tensor, controls: Controls, addresses: Sequence[Address]) -> Tensor:
    """`sample` of edited logits by the kernel, which is given what is not truncated as it is."""
    temperature = controls.temperature
    truncated = controls.truncates(logits.shape[-1])
    if bool(truncated.any()):
        rows = truncated.nonzero().flatten()
        logits = logits.index_copy(0, rows, scores(logits[rows], controls.at(rows)))
        temperature = temperature.masked_fill(truncated, 1.0)
    tokens, is_usable = _race(logits, temperature, addresses, 1)
    if not is_usable:
        raise ValueError(_UNUSABLE)
    return tokens.squeeze(-1)


def _race(
    logits: Tensor, temperature: Tensor, addresses: Sequence[Address], count: int
) -> tuple[Tensor, bool]:
    """The first `count` finishers of each row, and whether all rows have some possible token."""
    tokens = torch.empty(len(logits), count, dtype=torch.int64)
    words = address_words(addresses)
    is_usable = native.load().race(logits.contiguous(), temperature.contiguous(), words, tokens)
    return tokens, is_usable


def _usable(logits: Tensor) -> Tensor:
    if not bool(usable(logits).all()):
        raise ValueError(_UNUSABLE)
    return logits


def _first(weights: Tensor, noise: Tensor, count: int) -> Tensor:
    if count == 1:
        # E / p up to a factor per row; infinite where p is 0 or hopeless.
        ratios = (weights.amax(-1, keepdim=True) - weights).exp_()
        return first_argmin(ratios.mul_(noise)).unsqueeze(-1)
    # Among the later finishers hopeless tokens still come before impossible ones.
    return (weights - noise.log()).topk(count, dim=-1, sorted=True).indices


def _only(tokens: Tensor, *, like: Tensor) -> Tensor:
    return torch.full_like(like, -torch.inf).scatter_(-1, tokens.unsqueeze(-1), 0.0)
