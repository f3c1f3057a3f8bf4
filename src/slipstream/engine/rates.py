"""How often drafted tokens come true: the live acceptance of drafts, node by node.

Node n of a draft is *offered* when a drafter with a budget for it filled it, and *accepted* when it
is on the accepted path. Both are counted as conditional chances, of n given that n - 1 was offered
and of n given that its parent was accepted, so that their products fall with depth by themselves.

Counts fade, and what they no longer say is filled in from the next wider source:

    this sequence, lately  ->  all sequences  ->  the node's parent, or a guess at the root

Under rules that weigh q (`ratio`, `block`) a decision must not depend on the drafted tokens it
decides about; these numbers are all from steps before.
"""

from collections.abc import Sequence as Seq

import numpy as np

from slipstream.core.draft import Draft, Verdict
from slipstream.engine.costs import Floats
from slipstream.maths import trees

# Acceptance at the root before anything is known: low enough not to draft deep, high enough to try.
FIRST_GUESS = 0.6
# Observations that the next wider source is worth.
SEQ_PRIOR, GLOBAL_PRIOR = 4.0, 2.0
# Counts halve in so many steps of the sequence, and in so many drafts of anybody.
SEQ_HALF_LIFE, GLOBAL_HALF_LIFE = 24, 128

_OFFERED, _ACCEPTED = 0, 1
_HITS, _TRIALS = 0, 1


class DraftRates:
    """Offers and acceptance per sequence and node.

    Args:
        num_nodes: N, the largest budget.
    """

    def __init__(self, num_nodes: int):
        self.num_nodes = num_nodes
        # Whose child each node is: a chain until drafters show otherwise.
        self.parents = trees.chain(num_nodes)
        self._all = np.zeros((2, 2, num_nodes))
        self._seqs: dict[int, Floats] = {}

    def offered(self, seq_ids: Seq[int]) -> Floats:
        """Chance that a drafter fills each node of its budget, [B, N]."""
        hits, trials = self._all[_OFFERED]
        everybody = (hits + GLOBAL_PRIOR) / (trials + GLOBAL_PRIOR)
        chances = self._blend(seq_ids, _OFFERED, everybody)
        return np.cumprod(chances, axis=1, dtype=np.float64)

    def accepted(self, seq_ids: Seq[int]) -> Floats:
        """Chance that each node, once offered, is on the accepted path, [B, N]."""
        chances = self._blend(seq_ids, _ACCEPTED, self._everybody())
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                chances[:, node] *= chances[:, parent]
        return chances

    def observe(self, seq_id: int, budget: int, draft: Draft, verdict: Verdict) -> None:
        """Learn from one sequence's step."""
        mine = self._seqs.get(seq_id)
        if mine is None:
            mine = self._seqs[seq_id] = np.zeros_like(self._all)
        mine *= 0.5 ** (1 / SEQ_HALF_LIFE)
        if budget == 0:
            return
        size = len(draft)
        self._all[_OFFERED if size == 0 else slice(None)] *= 0.5 ** (1 / GLOBAL_HALF_LIFE)
        self.parents[:size] = draft.parents
        on_path = set(verdict.path)
        tried = [n for n, p in enumerate(draft.parents) if p < 0 or p in on_path]
        for counts in (mine, self._all):
            counts[_OFFERED, _TRIALS, : min(size + 1, budget)] += 1
            counts[_OFFERED, _HITS, :size] += 1
            counts[_ACCEPTED, _TRIALS, tried] += 1
            counts[_ACCEPTED, _HITS, verdict.path] += 1

    def forget(self, seq_id: int) -> None:
        """The sequence is no more."""
        self._seqs.pop(seq_id, None)

    def _everybody(self) -> Floats:
        """Conditional acceptance over all sequences, [N]."""
        hits, trials = self._all[_ACCEPTED]
        chances = np.empty(self.num_nodes)
        # What is left of a parent's acceptance for its further children, which exclude each other.
        left = dict.fromkeys(self.parents, 1.0)
        for node, parent in enumerate(self.parents):
            guess = left[parent] * (chances[parent] if parent >= 0 else FIRST_GUESS)
            chances[node] = (hits[node] + GLOBAL_PRIOR * guess) / (trials[node] + GLOBAL_PRIOR)
            left[parent] = max(left[parent] - chances[node], 0.0)
        return chances

    def _blend(self, seq_ids: Seq[int], kind: int, everybody: Floats) -> Floats:
        """Each sequence's own counts, with everybody's chance as the prior, [B, N]."""
        nothing = np.zeros_like(self._all)
        counts = np.stack([self._seqs.get(seq_id, nothing)[kind] for seq_id in seq_ids])
        hits, trials = counts[:, _HITS], counts[:, _TRIALS]
        return (hits + SEQ_PRIOR * everybody) / (trials + SEQ_PRIOR)
