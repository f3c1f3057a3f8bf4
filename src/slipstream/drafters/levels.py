"""Growing the trees of several sequences together, a level at a time.

Every drafter that runs a network works like this: logits after some places become candidates,
the best of these become the places of the next level, and whoever drafts computes what follows
them. Under `match` the draws share the target's noise; under `ratio` and `block` noise is the
drafter's own and q comes with the tokens (`sampling`).
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.core.controls import Row
from slipstream.core.draft import NO_DRAFT, Draft
from slipstream.core.sequence import Sequence
from slipstream.core.speculative import RULES, TreeConfig
from slipstream.drafters.sampling import Candidates, coupled, independent
from slipstream.drafters.tree_growth import Acceptance, Growth
from slipstream.drafters.vocabulary import DraftVocabulary
from slipstream.maths.noise import Address, StepNoise, Stream
from slipstream.models.batch import Span


@dataclass(frozen=True, slots=True)
class Run:
    """A sequence drafted for in this step: at most `budget` nodes on `num_levels` levels.

    Attributes:
        index: among the sequences of the step.
    """

    index: int
    seq: Sequence
    budget: int
    num_levels: int
    growth: Growth = field(default_factory=Growth)


Place = tuple[Run, int]  # a node of a sequence's tree; -1 is the root


class LevelGrower:
    """How trees are drawn, and what their candidates have been worth.

    Args:
        rule: "match", "ratio" or "block", whichever judges the drafts.
        tree: the shape of drafts; None drafts chains as long as the budget.
        vocabulary: what logits are over.
    """

    def __init__(self, rule: str, tree: TreeConfig | None, vocabulary: DraftVocabulary):
        assert rule in RULES, rule
        assert tree is None or rule != "block", "block verification needs chains"
        self.rule = rule
        self.tree = tree
        self.vocabulary = vocabulary
        self.width = 1 if tree is None else min(tree.topk, vocabulary.vocab_size)
        self.acceptance = Acceptance(self.width)

    def run(
        self, index: int, seq: Sequence, budget: int, most_levels: int | None = None
    ) -> Run | None:
        """What to draft for a sequence, on at most so many levels; None is nothing."""
        num_levels = budget
        if self.tree is not None:
            budget, num_levels = min(budget, self.tree.max_tokens), self.tree.depth
        # The target adds one token to whatever it accepts.
        num_levels = min(num_levels, budget, seq.room - 1)
        if most_levels is not None:
            num_levels = min(num_levels, most_levels)
        return Run(index, seq, budget, num_levels) if num_levels > 0 else None

    def wants_likeliest(self, runs: Seq[Run]) -> bool:
        """Whether each run is to be the chain of likeliest tokens, whatever they turn out to be."""
        return (
            self.width == 1
            and self.rule == "match"
            and all(Row.after(run.seq, ()).is_argmax for run in runs)
        )

    def grow(
        self,
        runs: Seq[Run],
        logits: Tensor,  # [len(runs), V_d], after the committed tokens
        follow: Callable[[Seq[Place], int], Tensor],
    ) -> None:
        """Grow every run's tree.

        Args:
            follow: of the nodes to be continued and their level, the logits after each, [R, V_d].
                The nodes of one run are neighbours.
        """
        places: list[Place] = [(run, -1) for run in runs]
        depth = 0
        while places:
            candidates = self._draw(places, depth, logits)
            for place, (run, node) in enumerate(places):
                run.growth.extend(node, candidates, place, self.acceptance)
            places = [
                (run, node)
                for run in runs
                if depth + 1 < run.num_levels
                for node in run.growth.frontier(depth, self.width, run.budget)
            ]
            if places:
                logits = follow(places, depth)
            depth += 1

    def _draw(self, places: Seq[Place], depth: int, logits: Tensor) -> Candidates:
        seqs = [run.seq for run, _ in places]
        rows = [Row.after(run.seq, run.growth.path_tokens(node)) for run, node in places]
        if self.rule == "match":
            noise = [Address(seq.key, Stream.TARGET, len(seq.tokens) + depth) for seq in seqs]
            return coupled(logits, self.vocabulary, rows, noise, self.width)
        fresh = StepNoise([seq.key for seq in seqs], [len(seq.tokens) for seq in seqs])
        every = torch.arange(len(seqs))
        noise = fresh.drafts(every, torch.full_like(every, depth))
        return independent(self.vocabulary.widened(logits), rows, noise, self.width)


def by_run(places: Seq[Place]) -> list[tuple[Run, list[int]]]:
    """The nodes of each run, runs in order."""
    grouped: dict[int, tuple[Run, list[int]]] = {}
    for run, node in places:
        grouped.setdefault(run.index, (run, []))[1].append(node)
    return list(grouped.values())


def node_span(run: Run, nodes: list[int], base: int, depth: int) -> Span:
    """Nodes of one level, behind `base` keys and the levels fed before; they count as fed now."""
    growth = run.growth
    return Span(
        run.seq.seq_id,
        start=base + len(growth.fed),
        tokens=[growth.tokens[node] for node in nodes],
        positions=[base + depth] * len(nodes),
        num_logits=len(nodes),
        ancestors=growth.feed(nodes),
    )


def drafts_of(runs: Seq[Run], num_seqs: int) -> list[Draft]:
    """The drafts of a step's sequences; none for those without a run."""
    drafts = [NO_DRAFT] * num_seqs
    for run in runs:
        drafts[run.index] = run.growth.draft(run.budget)
    return drafts
