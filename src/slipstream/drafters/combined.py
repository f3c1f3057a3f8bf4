"""Lookup where it is sure, a draft model where it is not; or one tree that has both.

Lookup costs nothing and is right for long stretches or not at all; a model costs a pass a token
and is right half of the time anywhere. So each sequence's lookup is asked first, with what it
expects to have accepted, and the model drafts only where it has been doing better lately.
"""

import math
from collections.abc import Sequence as Seq
from typing import Protocol

from slipstream.core.draft import NO_DRAFT, Draft, Verdict
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOutput
from slipstream.drafters.base import Drafter

# A free draft is preferred to a better one that costs passes of a model.
_WORTH_OF_FREE = 1.5
_MEMORY = 0.95  # weight of the past in the model's running mean
_MEMORY_OF_REACH = 0.9


class ScoredDrafter(Drafter, Protocol):
    """A drafter that says how many tokens of a draft it expects to be accepted."""

    def propose_scored(self, seq: Sequence, budget: int) -> tuple[Draft, float]: ...


class CombinedDrafter:
    """Two drafters, asked in turn.

    Args:
        lookup: free and sometimes right.
        model: costly and often right.
        merge: where both draft, offer their union as a tree. Only `match` judges such drafts.
        in_chains: the model drafts chains. They are no longer than has been of use, however much
            lookup may try.
    """

    def __init__(
        self,
        lookup: ScoredDrafter,
        model: Drafter,
        *,
        merge: bool = False,
        in_chains: bool = True,
    ):
        self.lookup = lookup
        self.model = model
        self.merge = merge
        self.in_chains = in_chains
        self.taps: Seq[int] = tuple({*lookup.taps, *model.taps})
        self._model_gain = 2.0  # accepted tokens of the model's drafts, a running mean
        self._model_reach = 4.0  # the same, where a draft accepted in full counts one more
        self._drafted_by_model: dict[int, int] = {}  # how many tokens for whom

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        found = [
            self.lookup.propose_scored(seq, budget) if budget else (NO_DRAFT, 0.0)
            for seq, budget in zip(seqs, budgets, strict=True)
        ]
        most = math.ceil(self._model_reach) if self.in_chains else max(budgets, default=0)
        wanted = [
            min(budget, most) if gain * _WORTH_OF_FREE < min(self._model_gain, budget) else 0
            for (_, gain), budget in zip(found, budgets, strict=True)
        ]
        modelled = self.model.propose(seqs, wanted)
        self._drafted_by_model = {
            seq.seq_id: len(draft)
            for seq, draft in zip(seqs, modelled, strict=True)
            if draft.token_ids
        }
        return [
            self._choose(free, costly, budget)
            for (free, _), costly, budget in zip(found, modelled, budgets, strict=True)
        ]

    def observe(
        self, seqs: Seq[Sequence], target: TargetOutput, verdicts: Seq[Verdict | None]
    ) -> None:
        self.lookup.observe(seqs, target, verdicts)
        self.model.observe(seqs, target, verdicts)
        for seq, verdict in zip(seqs, verdicts, strict=True):
            drafted = self._drafted_by_model.get(seq.seq_id)
            if verdict is None or drafted is None:
                continue
            gain = len(verdict.path)
            reach = gain + (gain >= drafted)
            self._model_gain += (1 - _MEMORY) * (gain - self._model_gain)
            self._model_reach += (1 - _MEMORY_OF_REACH) * (reach - self._model_reach)

    def forget(self, seq_id: int) -> None:
        self.lookup.forget(seq_id)
        self.model.forget(seq_id)

    def _choose(self, free: Draft, costly: Draft, budget: int) -> Draft:
        if not costly.token_ids:
            return free
        return merged(costly, free, budget) if self.merge else costly


def merged(first: Draft, second: Draft, budget: int) -> Draft:
    """The union of two drafts as one tree of at most `budget` nodes; `first` has precedence."""
    tokens, parents = list(first.token_ids), list(first.parents)
    place = {edge: node for node, edge in enumerate(zip(parents, tokens, strict=True))}
    renumbered = {-1: -1}
    for node, (parent, token) in enumerate(zip(second.parents, second.token_ids, strict=True)):
        if parent not in renumbered:
            continue  # its parent did not fit
        edge = (renumbered[parent], token)
        if edge not in place:
            if len(tokens) >= budget:
                continue
            place[edge] = len(tokens)
            parents.append(edge[0])
            tokens.append(token)
        renumbered[node] = place[edge]
    return Draft(tokens, parents)
