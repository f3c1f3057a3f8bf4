"""A draft tree while it grows level by level, and what its nodes are worth.

Growth is EAGLE-2's (arXiv 2406.16858): every expanded node yields its best few continuations, the
best of those are expanded next, and the tree is cut to its budget at the end. A node's score is
the log of the chance that the path to it is accepted. With coupled drafts that chance is not the
draft model's q, since the noise is known already; what a candidate of some rank and lead is worth
is counted while serving (`Acceptance`).

It knows no model: candidates come from whoever drafts.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.core.draft import NO_DRAFT, Draft
from slipstream.drafters.sampling import Candidates
from slipstream.maths import trees

_NUM_BINS = 10
_PRIOR_TRIALS = 8.0  # so many trials outweigh the first guess
_MEMORY = 0.998  # older trials fade; some 500 count


class Acceptance:
    """How often candidates were what came next, by rank and by lead.

    Args:
        num_ranks: candidates of a place.
    """

    def __init__(self, num_ranks: int):
        self._tried = [[0.0] * _NUM_BINS for _ in range(num_ranks)]
        self._accepted = [[0.0] * _NUM_BINS for _ in range(num_ranks)]

    def chances(self, leads: Seq[float]) -> list[float]:
        """Chance of each candidate of a place, given their leads; falling with rank."""
        chances: list[float] = []
        for rank, lead in enumerate(leads):
            cell = _bin(lead)
            accepted = self._accepted[rank][cell] + _PRIOR_TRIALS * lead
            chance = accepted / (self._tried[rank][cell] + _PRIOR_TRIALS)
            # Siblings are drawn in turn, so a later one is never kept without the earlier.
            chances.append(min(chance, *chances[-1:], 1.0))
        return chances

    def add(self, rank: int, lead: float, *, is_accepted: bool) -> None:
        """Count one candidate whose parent was committed."""
        for counts, event in ((self._tried, True), (self._accepted, is_accepted)):
            counts[rank][_bin(lead)] = _MEMORY * counts[rank][_bin(lead)] + event


def _bin(lead: float) -> int:
    return min(int(lead * _NUM_BINS), _NUM_BINS - 1)


@dataclass(slots=True)
class Growth:
    """One sequence's tree.

    Attributes:
        tokens, parents, depths: of every node; parents as in `Draft`.
        ranks, leads: which candidate of its parent a node is, and by how much it leads.
        scores: log of the chance that the path to a node is accepted.
        possible: whether a node can occur; see `extend`.
        fed: nodes whose K/V was computed, in the order of their key slots.
        laws: per node, the q [V] it was drawn from; empty where no rule asks.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    possible: list[bool] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)

    def extend(
        self, parent: int, candidates: Candidates, place: int, acceptance: Acceptance
    ) -> None:
        """Add one place's candidates as children of a node, or of the root (-1).

        Where a rule asks for q, the shape of the tree must not depend on what was drawn. An
        impossible candidate then keeps its place, as token 0, until the tree is cut.
        """
        leads = candidates.leads[place]
        for rank, chance in enumerate(acceptance.chances(leads)):
            is_possible = candidates.possible[place][rank]
            if not is_possible and candidates.q is None:
                continue
            above = self.scores[parent] if parent >= 0 else 0.0
            self.tokens.append(candidates.tokens[place][rank] if is_possible else 0)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
            self.ranks.append(rank)
            self.leads.append(leads[rank])
            self.scores.append(above + (math.log(chance) if chance > 0 else -math.inf))
            self.possible.append(is_possible and (parent < 0 or self.possible[parent]))
            if candidates.q is not None:
                self.laws.append(candidates.q[place])

    def frontier(self, depth: int, width: int, budget: int) -> list[int]:
        """The nodes of a level worth expanding: its best `width`, if the cut may keep them."""
        _, kept = trees.rerank(self.parents, self.scores, budget)
        level = [node for node in kept if self.depths[node] == depth]
        return sorted(level, key=self.scores.__getitem__, reverse=True)[:width]

    def feed(self, nodes: Seq[int]) -> Tensor | None:
        """Give nodes the next key slots.

        Returns:
            Which of all fed nodes each of them sees, [n, m] bool; None if they are a chain.
        """
        self.fed += nodes
        if self._path(nodes[-1]) == self.fed:
            return None
        paths = [set(self._path(node)) for node in nodes]
        return torch.tensor([[node in path for node in self.fed] for path in paths])

    def path_tokens(self, node: int) -> list[int]:
        """The tokens from the root to a node, itself included."""
        return [self.tokens[node] for node in self._path(node)]

    def follow(self, committed: Seq[int], acceptance: Acceptance) -> list[int]:
        """The nodes that committed tokens run through; `acceptance` learns from them."""
        children = trees.children(self.parents)
        path: list[int] = []
        node = -1
        for token in committed:
            heir = None
            for child in filter(self.possible.__getitem__, children[node]):
                is_accepted = self.tokens[child] == token
                acceptance.add(self.ranks[child], self.leads[child], is_accepted=is_accepted)
                heir = child if is_accepted else heir
            if heir is None:
                break
            path.append(node := heir)
        return path

    def draft(self, budget: int) -> Draft:
        """The best `budget` nodes that are possible."""
        _, best = trees.rerank(self.parents, self.scores, budget)
        kept = [node for node in best if self.possible[node]]
        if not kept:
            return NO_DRAFT
        renumbered = {-1: -1} | {node: index for index, node in enumerate(kept)}
        return Draft(
            [self.tokens[node] for node in kept],
            [renumbered[self.parents[node]] for node in kept],
            torch.stack([self.laws[node] for node in kept]) if self.laws else None,
        )

    def _path(self, node: int) -> list[int]:
        """The nodes from the root to a node, itself included."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]
