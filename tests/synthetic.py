"""Drafters that need no second model: they know the answer, or know nothing, or anything between."""

import random
from collections.abc import Sequence as Seq

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence


class SyntheticDrafter:
    """Drafts random trees, now and then with the true continuation on a random path.

    Args:
        answers: request id -> its plain output, by answer index; the truth that may be drafted.
        vocab_size: random tokens are below this.
        hit_rate: how often a node carries the true next token of its path.
        trees: draw tree shapes; chains otherwise.
    """

    taps: Seq[int] = ()

    def __init__(self, answers, vocab_size: int, hit_rate: float, *, trees: bool, seed: int = 0):
        self.answers = answers
        self.vocab_size = vocab_size
        self.hit_rate = hit_rate
        self.trees = trees
        self.random = random.Random(seed)
        self.forgotten: list[int] = []

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._draft(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def observe(self, seqs, target, verdicts) -> None:
        assert len(seqs) == len(verdicts) == len(target.first_rows)

    def forget(self, seq_id: int) -> None:
        self.forgotten.append(seq_id)

    def _draft(self, seq: Sequence, budget: int) -> Draft:
        truth = self.answers.get(seq.request_id, {}).get(seq.index, [])
        tokens: list[int] = []
        parents: list[int] = []
        true_depth = {-1: 0}  # node -> how many true tokens lead to it, for nodes on the true path
        taken: set[tuple[int, int]] = set()
        for node in range(self.random.randint(0, budget)):
            parent = self.random.randint(-1, node - 1) if self.trees else node - 1
            token = self.random.randrange(self.vocab_size)
            at = seq.num_output + true_depth.get(parent, len(truth))
            if self.random.random() < self.hit_rate and at < len(truth):
                token = truth[at]
            if (parent, token) in taken:
                break
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            if parent in true_depth and at < len(truth) and token == truth[at]:
                true_depth[node] = true_depth[parent] + 1
        return Draft(tokens, parents)
