"""A head drafting on its own output, at every place of a row at once.

Step 0 pairs token i + 1 with the target's feature i, step j pairs token i + 1 + j with the feature
that step j - 1 made at place i. Each place is so the beginning of a chain of its own, which sees
what it would see when it drafts: the pairs of step 0 up to its own place, and its own steps. The
steps of a chain sit at place i in each, so the second part is one key a step, not a matrix.

Source: "training-time test", EAGLE-3, arXiv 2503.01840, section 3.2.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.models.heads import Eagle3Head, FeatureHead
from slipstream.train.rows import Rows
from slipstream.train.states import tap_name


class ChainAttention:
    """`Attend` of one layer over B rows of L places, called once a step.

    Args:
        visible: which pairs of step 0 a place sees, [B, L, L] bool.
    """

    def __init__(self, visible: Tensor):
        self._hidden = ~visible[:, None, None]  # [B, 1, 1, L, L]
        self._keys: list[Tensor] = []  # of each step, [B, H_kv, L, D]
        self._values: list[Tensor] = []

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        assert layer == 0 and window is None, "heads have one layer, without a window"
        num_rows, length = self._hidden.shape[0], self._hidden.shape[-1]

        def by_head(x: Tensor) -> Tensor:
            return x.view(num_rows, length, x.shape[1], -1).transpose(1, 2)

        self._keys.append(by_head(k))
        self._values.append(by_head(v))
        queries = (by_head(q) * scale).unflatten(1, (k.shape[1], -1))  # [B, H_kv, G, L, D]
        first = queries @ self._keys[0].unsqueeze(2).transpose(-1, -2)  # [B, H_kv, G, L, L]
        first = first.masked_fill(self._hidden, -torch.inf)
        own = [(queries * key.unsqueeze(2)).sum(-1, keepdim=True) for key in self._keys[1:]]
        scores = torch.cat([first, *own], dim=-1)
        weights = scores.softmax(-1, torch.promote_types(v.dtype, torch.float32)).to(v.dtype)
        out = weights[..., :length] @ self._values[0].unsqueeze(2)
        for step, value in enumerate(self._values[1:]):
            out = out + weights[..., length + step, None] * value.unsqueeze(2)
        return out.flatten(1, 2).transpose(1, 2).flatten(0, 1)  # [T, H, D]


def unrolled(head: FeatureHead, rows: Rows, num_steps: int) -> Iterator[Tensor]:
    """Features [B, L, hidden] of each step: those of step j at place i tell token i + 2 + j."""
    num_rows, length = rows.tokens.shape
    same_text = rows.text.unsqueeze(-1) == rows.text.unsqueeze(-2)
    attend = ChainAttention(same_text.tril())
    features = head.fuse(read(head, rows).flatten(0, 1))
    for step in range(num_steps):
        ids = ahead(rows.tokens, 1 + step).flatten()
        features = head(ids, features, (rows.place + step).flatten(), attend)
        yield features.view(num_rows, length, -1)


def read(head: FeatureHead, rows: Rows) -> Tensor:
    """What the head reads of the target at every place, [B, L, F]."""
    if isinstance(head, Eagle3Head):
        return torch.cat([rows.states[tap_name(layer)] for layer in head.taps], dim=-1)
    return rows.states["hidden"]


def ahead(x: Tensor, count: int) -> Tensor:
    """[B, L, ...] with what is `count` places ahead; zeros come in at the end."""
    out = torch.zeros_like(x)
    out[:, : x.shape[1] - count] = x[:, count:]
    return out


def is_known(rows: Rows, count: int) -> Tensor:
    """Where the token `count` places ahead is an answer's, of the same text, [B, L] bool."""
    is_same = ahead(rows.text, count) == rows.text
    is_same[:, rows.text.shape[1] - count :] = False
    return is_same & ahead(rows.is_answer, count)
