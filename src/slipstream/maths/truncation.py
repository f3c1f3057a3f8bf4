"""Top-k, top-p and min-p: which tokens of each row of log-weights stay possible.

Rows are log-weights whose largest is 0, in float32; what does not stay becomes -inf. On a CPU the
few likeliest tokens are looked at row by row: sorting a whole vocabulary, as the plain definitions
at the end do, takes 10 to 30 ms of every row of 152k.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Row = NDArray[np.float32]
Tokens = NDArray[np.int64]

# Log-weights down to which tokens are looked at, as deep as a row needs.
_DEPTHS = (4, 6, 8, 10, 12, 14, 16, 20, 24, np.inf)
# Mass within reach must exceed top_p by this, so that rounding in the total decides nothing.
_MARGIN = 1e-5


def truncate(weights: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Rows [R, V] after min-p, top-k and top-p, in this order; settings are [R], on their device.

    top-k keeps the k largest and all that equal the k-th, 0 is no limit; top-p the shortest prefix
    of the tokens in order whose mass reaches it, lower ids first among equals, at least one.
    """
    if bool((min_p > 0).any()):
        weights = weights.masked_fill(weights < min_p.log().unsqueeze(-1), -torch.inf)
    limited = ((top_k > 0) & (top_k < weights.shape[-1])) | (top_p < 1)
    if not bool(limited.any()):
        return weights
    if weights.device.type != "cpu":
        return by_top_p(by_top_k(weights, top_k), top_p)
    weights = weights.clone()
    rows = weights.numpy()
    for r in limited.nonzero().flatten().tolist():
        tokens = _kept(rows[r], int(top_k[r]), float(top_p[r]))
        values = rows[r][tokens]
        rows[r] = -np.inf
        rows[r][tokens] = values
    return weights


def _kept(row: Row, top_k: int, top_p: float) -> Tokens:
    """The tokens of a row that top-k and top-p keep."""
    tokens: Tokens | None = None
    if 0 < top_k < len(row):
        tokens = _likeliest(row, lambda tokens: len(tokens) >= top_k)
        values = row[tokens]
        kth = np.partition(values, len(values) - top_k)[len(values) - top_k]
        tokens = tokens[values >= kth]
    if top_p >= 1:
        assert tokens is not None, "a row without limits"
        return tokens
    rest = 0.0  # mass of the tokens that are not looked at
    if tokens is None:
        total = _mass(row)
        tokens = _likeliest(row, lambda tokens: _mass(row[tokens]) >= (top_p + _MARGIN) * total)
        if len(tokens) < len(row):
            rest = total - _mass(row[tokens])
    values = row[tokens]
    order = np.argsort(-values, kind="stable")
    mass = np.exp(values[order].astype(np.float64))
    before = mass.cumsum() - mass
    num_kept = np.count_nonzero(before < top_p * (mass.sum() + rest))
    return tokens[order[: max(num_kept, 1)]]


def _likeliest(row: Row, is_enough: Callable[[Tokens], bool]) -> Tokens:
    """All tokens above some log-weight, in order of id, deep enough or else the whole row."""
    for depth in _DEPTHS:
        tokens = np.flatnonzero(row >= -depth)
        if is_enough(tokens):
            break
    return tokens


def _mass(values: Row) -> float:
    return float(np.exp(values).sum(dtype=np.float64))


# The plain definitions, and what other devices run ------------------------------------------------


def by_top_k(weights: Tensor, top_k: Tensor) -> Tensor:
    vocab_size = weights.shape[-1]
    limited = (top_k > 0) & (top_k < vocab_size)
    if not bool(limited.any()):
        return weights
    k = torch.where(limited, top_k, vocab_size)
    largest = weights.topk(int(k[limited].max()), dim=-1).values
    kth = largest.gather(-1, (k.clamp(max=largest.shape[-1]) - 1).unsqueeze(-1))
    below = (weights < kth) & limited.unsqueeze(-1)
    return weights.masked_fill(below, -torch.inf)


def by_top_p(weights: Tensor, top_p: Tensor) -> Tensor:
    limited = top_p < 1
    if not bool(limited.any()):
        return weights
    weights = weights.clone()
    rows = weights[limited]
    ordered, tokens = rows.sort(dim=-1, descending=True, stable=True)
    mass = ordered.double().exp()
    before = mass.cumsum(-1) - mass
    reached_before = before >= (top_p[limited] * mass.sum(-1)).unsqueeze(-1)
    reached_before[:, 0] = False
    rows.scatter_(-1, tokens, ordered.masked_fill(reached_before, -torch.inf))
    weights[limited] = rows
    return weights
