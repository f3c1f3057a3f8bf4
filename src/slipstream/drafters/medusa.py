"""Drafting with Medusa's heads, all of which read one hidden state of the target.

There is nothing to compute level by level and no K/V: the state of the last token the target has
seen gives the logits of every level at once, the same for all nodes of a level. Which of the many
possible trees to draft is decided as it is for other networks, by the counted chances of
candidates of a rank and a lead (`tree_growth`): the tree with the most expected tokens.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.core.draft import Draft, Verdict
from slipstream.core.sequence import Sequence
from slipstream.core.speculative import TreeConfig
from slipstream.core.target import TargetOutput
from slipstream.drafters.levels import LevelGrower, Place, drafts_of
from slipstream.drafters.tree_growth import Growth
from slipstream.drafters.vocabulary import DraftVocabulary
from slipstream.models.batch import rows_at
from slipstream.models.heads import MedusaHead


@dataclass(slots=True)
class _Last:
    """A sequence's newest hidden state [hidden]; and the tree drafted last, which continued its
    first `root` tokens."""

    state: Tensor
    root: int = 0
    growth: Growth = field(default_factory=Growth)


class MedusaDrafter:
    """Drafts as many levels as there are heads.

    Args:
        head: the heads.
        vocab_size: of the target.
        rule: "match", "ratio" or "block", whichever judges the drafts.
        tree: the shape of drafts; None drafts chains as long as the budget.
    """

    taps: Seq[int] = ()

    def __init__(
        self,
        head: MedusaHead,
        vocab_size: int,
        *,
        rule: str = "match",
        tree: TreeConfig | None = None,
    ):
        self.head = head
        vocabulary = DraftVocabulary(vocab_size, head.target_ids)
        self._grower = LevelGrower(rule, tree, vocabulary)
        self._last: dict[int, _Last] = {}

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        runs = []
        for index, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            last = self._last.get(seq.seq_id)
            if last is None:
                continue  # its prompt is being computed
            last.growth.follow(seq.tokens[last.root :], self._grower.acceptance)
            last.growth = Growth()
            run = self._grower.run(index, seq, budget, most_levels=len(self.head.heads))
            if run is not None:
                last.growth, last.root = run.growth, len(seq.tokens)
                runs.append(run)
        if runs:
            states = torch.stack([self._last[run.seq.seq_id].state for run in runs])
            rows = {run.index: row for row, run in enumerate(runs)}
            logits = self.head.logits(states, max(run.num_levels for run in runs))

            def follow(places: Seq[Place], depth: int) -> Tensor:
                return rows_at(logits[depth + 1], [rows[run.index] for run, _ in places])

            self._grower.grow(runs, logits[0], follow)
        return drafts_of(runs, len(seqs))

    def observe(
        self, seqs: Seq[Sequence], target: TargetOutput, verdicts: Seq[Verdict | None]
    ) -> None:
        for seq, first, verdict in zip(seqs, target.first_tokens, verdicts, strict=True):
            if verdict is None:
                continue
            row = first + seq.num_pending - 1
            if verdict.path:
                row += 1 + verdict.path[-1]
            state = target.hidden[row].clone()  # the pass itself is large
            before = self._last.get(seq.seq_id, _Last(state))
            self._last[seq.seq_id] = _Last(state, before.root, before.growth)

    def forget(self, seq_id: int) -> None:
        self._last.pop(seq_id, None)
