"""From sampling parameters and the tokens so far to the controls of logits rows.

Counts are taken from the token lists on every call: the prefix of a drafted position differs from
its neighbour's, and state that is never kept can never be wrong.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from slipstream.core.grammar import Grammar
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.maths.distributions import Controls, Edits


@dataclass(frozen=True, slots=True)
class Row:
    """One position to be sampled.

    Attributes:
        params: of its request.
        tokens: the committed tokens before the position, prompt and output.
        num_prompt: how many of them are the prompt.
        stop_ids: tokens that end the request, impossible before `min_tokens`, unless the grammar
            allows nothing else.
        grammar: what the output must obey.
        drafted: the tokens behind those that lead here.
    """

    params: SamplingParams
    tokens: Seq[int]
    num_prompt: int
    stop_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    drafted: Seq[int] = ()

    @classmethod
    def after(cls, seq: Sequence, drafted: Seq[int]) -> "Row":
        """The position behind drafted tokens of a sequence."""
        return cls(seq.params, seq.tokens, seq.num_prompt, seq.stop_ids, seq.grammar, drafted)

    @property
    def position(self) -> int:
        """Index of the token to be sampled."""
        return len(self.tokens) + len(self.drafted)

    @property
    def output(self) -> list[int]:
        return [*self.tokens[self.num_prompt :], *self.drafted]

    @property
    def bans_stops(self) -> bool:
        """Whether the request may not end yet."""
        return self.position - self.num_prompt < self.params.min_tokens

    @property
    def has_edits(self) -> bool:
        """Whether anything but the model has a say in the logits."""
        return (
            bool(self.params.logit_bias)
            or self.params.penalised
            or self.grammar is not None
            or (self.bans_stops and bool(self.stop_ids))
        )

    @property
    def is_argmax(self) -> bool:
        """Whether the token is that of the largest logit: nothing else need be known."""
        return self.params.temperature == 0 and not self.has_edits


def controls(rows: Seq[Row], device: torch.device | str = "cpu") -> Controls:
    """The controls of R rows, as tensors on `device`."""
    params = [row.params for row in rows]
    shares = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
    temperature, top_p, min_p = torch.tensor(shares, dtype=torch.float32, device=device)
    edits = {i: _edits(row, device) for i, row in enumerate(rows) if row.has_edits}
    return Controls(
        temperature=temperature,
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
        top_p=top_p,
        min_p=min_p,
        edits=edits,
    )


def _edits(row: Row, device: torch.device | str) -> Edits:
    params = row.params
    added = dict(params.logit_bias)
    allowed = None if row.grammar is None else row.grammar.allowed(row.output)
    if row.bans_stops and _may_go_on(allowed, row.stop_ids):
        added.update(dict.fromkeys(row.stop_ids, -torch.inf))

    def ids(tokens: Seq[int]) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=device)

    counts = Counter(row.output) if params.penalised else Counter()
    seen = sorted({*row.tokens, *row.drafted}) if params.repetition_penalty != 1.0 else []
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
