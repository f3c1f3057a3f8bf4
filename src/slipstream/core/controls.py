"""From sampling parameters and the tokens so far to the controls of logits rows.

Counts are taken from the token lists on every call: the prefix of a drafted position differs from
its neighbour's, and state that is never kept can never be wrong.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.core.grammar import Grammar
from slipstream.core.params import SamplingParams
from slipstream.maths.distributions import Controls, Edits


@dataclass(frozen=True, slots=True)
class Row:
    """One position to be sampled.

    Attributes:
        params: of its request.
        tokens: everything before the position: prompt, output, drafted tokens that lead here.
        num_prompt: how many of them are the prompt.
        stop_ids: tokens that end the request, impossible before `min_tokens`, unless the grammar
            allows nothing else.
        grammar: what the output must obey.
    """

    params: SamplingParams
    tokens: Sequence[int]
    num_prompt: int
    stop_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None


def controls(rows: Sequence[Row], device: torch.device | str = "cpu") -> Controls:
    """The controls of R rows, as tensors on `device`."""
    params = [row.params for row in rows]
    shares = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
    temperature, top_p, min_p = torch.tensor(shares, dtype=torch.float32, device=device)
    edits = {i: e for i, row in enumerate(rows) if (e := _edits(row, device)) is not None}
    return Controls(
        temperature=temperature,
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
        top_p=top_p,
        min_p=min_p,
        edits=edits,
    )


def _edits(row: Row, device: torch.device | str) -> Edits | None:
    params = row.params
    added = dict(params.logit_bias)
    allowed = None
    if row.grammar is not None:
        allowed = row.grammar.allowed(row.tokens[row.num_prompt :])
    if len(row.tokens) - row.num_prompt < params.min_tokens and _may_go_on(allowed, row.stop_ids):
        added.update(dict.fromkeys(row.stop_ids, -torch.inf))
    if not added and not params.penalised and allowed is None:
        return None

    def ids(tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=device)

    counts = Counter(row.tokens[row.num_prompt :]) if params.penalised else Counter()
    seen = sorted(set(row.tokens)) if params.repetition_penalty != 1.0 else []
    values = torch.tensor(list(added.values()), dtype=torch.float32, device=device)
    return Edits(
        add_ids=ids(list(added)) if added else None,
        add_values=values if added else None,
        seen_ids=ids(seen) if seen else None,
        repetition=params.repetition_penalty,
        output_ids=ids(list(counts)) if counts else None,
        output_counts=torch.tensor(list(counts.values()), device=device) if counts else None,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        allowed=None if allowed is None else allowed.to(device),
    )


def _may_go_on(allowed: torch.Tensor | None, stop_ids: frozenset[int]) -> bool:
    """Whether anything but the end is possible."""
    if allowed is None:
        return True
    ends = sum(bool(allowed[token]) for token in stop_ids)
    return int(allowed.sum()) > ends
