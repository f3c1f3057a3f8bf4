"""Drafting with a head that continues the target's features: EAGLE-1, 2 and 3, and MTP.

The head's layer has pages of its own. Its key j is the pair of token j + 1 and feature j:

    tokens     t0   t1   t2   t3   t4                  t4: committed, not yet seen by the target
    features   f0   f1   f2   f3
    pairs      t1f0 t2f1 t3f2 t4f3                     the last one says what may follow t4

Features come with every target pass and wait until the sequence is next drafted for, when one pass
of the head takes in all that wait. Nodes of a draft are paired with the head's own features; their
K/V is only good for that draft, and the target's features replace it.

Where the target found the beginning of a prompt in its prefix cache there are no features for it.
The head's own pages are cached alike. What even they do not have is skipped: those pairs are in no
page, and the others close ranks. That costs acceptance, never a token.

Chains are EAGLE-1's. Trees grow as EAGLE-2's: by the chance that the path to a node is accepted,
level by level, and are cut to their best nodes in the end (`tree_growth`).
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.core.draft import NO_DRAFT, Draft, Verdict
from slipstream.core.sequence import Sequence
from slipstream.core.speculative import TreeConfig
from slipstream.core.target import TargetOutput
from slipstream.drafters.levels import (
    LevelGrower,
    Place,
    Run,
    by_run,
    node_span,
)
from slipstream.drafters.pages import reserve
from slipstream.drafters.tree_growth import Growth
from slipstream.drafters.vocabulary import DraftVocabulary
from slipstream.kv.blocks import BlockManager
from slipstream.kv.cache import KVCache
from slipstream.maths.trees import chain
from slipstream.models.batch import Batch, Span, lay_out, rows_at
from slipstream.models.heads import FeatureHead
from slipstream.models.heads.native import HeadRunner

# Features of sequences that nobody drafts for wait in vain; so many are taken in all the same.
_MOST_WAITING = 64


@dataclass(slots=True)
class _Pages:
    """What the head knows of a sequence.

    Attributes:
        num_valid: pairs with K/V, at key indices 0 .. num_valid - 1.
        num_skipped: pairs of the prompt left out because their features were never seen.
        waiting: what the head reads of the pairs behind all those, [n, F] each.
        num_waiting: how many these are.
        root, growth: the tree drafted last, and how many tokens were committed then. Nothing is
            kept of a chain drafted in one call: nobody chooses by what it was worth.
    """

    num_valid: int
    num_skipped: int
    waiting: list[Tensor] = field(default_factory=list)
    num_waiting: int = 0
    root: int = 0
    growth: Growth = field(default_factory=Growth)

    @property
    def num_known(self) -> int:
        """The first position without a feature."""
        return self.num_skipped + self.num_valid + self.num_waiting


class EagleDrafter:
    """Drafts with a head that has K/V.

    Args:
        head: EAGLE's, EAGLE-3's or an MTP module.
        num_blocks, block_size, kv_dtype: of its pages; blocks as large as the target's, so that
            both cache the same prefixes.
        device: of the head.
        vocab_size: of the target.
        rule: "match", "ratio" or "block", whichever judges the drafts.
        tree: the shape of drafts; None drafts chains as long as the budget.
    """

    def __init__(
        self,
        head: FeatureHead,
        vocab_size: int,
        *,
        num_blocks: int,
        block_size: int,
        kv_dtype: torch.dtype,
        device: torch.device,
        rule: str = "match",
        tree: TreeConfig | None = None,
    ):
        self.head = head
        self.taps: Seq[int] = head.taps
        self.device = device
        self.blocks = BlockManager(num_blocks, block_size)
        self._cache = KVCache.for_model(
            head.config, num_blocks=num_blocks, block_size=block_size, dtype=kv_dtype, device=device
        )
        self._runner = HeadRunner(head, self._cache)
        vocabulary = DraftVocabulary(vocab_size, head.target_ids)
        self._grower = LevelGrower(rule, tree, vocabulary)
        self._pages: dict[int, _Pages] = {}  # least recently drafted first

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        runs: list[Run] = []
        overdue: list[Sequence] = []
        for index, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            pages = self._pages.get(seq.seq_id)
            if pages is None or pages.num_known < len(seq.tokens) - 1 or not pages.num_waiting:
                continue  # nothing to continue from: its prompt is being computed
            if pages.growth.tokens:
                pages.growth.follow(seq.tokens[pages.root :], self._grower.acceptance)
                pages.growth = Growth()
            run = self._grower.run(index, seq, budget)
            if run is not None:
                runs.append(run)
            elif pages.num_waiting >= _MOST_WAITING:
                overdue.append(seq)
        wanted = {seq.seq_id for seq in (*overdue, *(run.seq for run in runs))}
        if overdue:
            self._take_in(overdue, wanted)
        drafts = [NO_DRAFT] * len(seqs)
        if runs:
            is_chain = self._runner.is_native and self._grower.wants_likeliest(runs)
            for run, draft in (self._chains if is_chain else self._grow)(runs, wanted):
                drafts[run.index] = draft
        return drafts

    @torch.inference_mode()
    def observe(
        self, seqs: Seq[Sequence], target: TargetOutput, verdicts: Seq[Verdict | None]
    ) -> None:
        states = self.head.read(target)  # [T, F]
        ends = [*target.first_tokens[1:], len(states)]
        in_chunks = []
        for seq, first, end, first_row, verdict in zip(
            seqs, target.first_tokens, ends, target.first_rows, verdicts, strict=True
        ):
            if first_row is None:
                rows = list(range(first, end))
                in_chunks.append(seq)
            elif verdict is not None:
                first_node = first + seq.num_pending
                rows = [*range(first, first_node), *(first_node + node for node in verdict.path)]
            else:
                continue  # its logits were NaN; it ends here
            pages = self._pages.get(seq.seq_id)
            if pages is None or pages.num_known != seq.num_computed:
                pages = self._begin(seq)
            pages.waiting.append(rows_at(states, rows).clone())  # the pass itself is large
            pages.num_waiting += len(rows)
        # The rest of a prompt must not wait for its end, or the first draft would be late.
        if in_chunks:
            self._take_in(in_chunks, {seq.seq_id for seq in in_chunks})

    def forget(self, seq_id: int) -> None:
        if self._pages.pop(seq_id, None) is not None:
            self.blocks.free(seq_id)

    def _begin(self, seq: Sequence) -> _Pages:
        """Pages whose next pair is at `seq.num_computed`, with what there is of those before."""
        self.forget(seq.seq_id)
        wanted = seq.num_computed
        if seq.leader is not None and self._has_prompt_of(seq, seq.leader.seq_id):
            self.blocks.fork(seq.leader.seq_id, seq.seq_id, wanted)
            num_there = wanted
        else:
            # A block of pairs is named by its tokens, and by the first one of all, which no pair
            # carries. The name of the pair after the last is never looked at.
            names = [*seq.tokens[1 : wanted + 1], 0]
            num_there = self.blocks.allocate(seq.seq_id, names, _salt(seq))
        self._pages[seq.seq_id] = _Pages(num_there, wanted - num_there)
        return self._pages[seq.seq_id]

    def _has_prompt_of(self, seq: Sequence, leader_id: int) -> bool:
        """Whether all a sequence needs is in its leader's pages, and part of their prompt."""
        leader = self._pages.get(leader_id)
        if leader is None or leader.num_skipped:
            return False
        return 0 < seq.num_computed < seq.num_prompt and leader.num_valid >= seq.num_computed

    def _chains(self, runs: list[Run], wanted: set[int]) -> list[tuple[Run, Draft]]:
        """The likeliest tokens of those there is room for, in one call for all passes."""
        num_fed = [run.num_levels - 1 for run in runs]
        first, is_there = self._first_pass([run.seq for run in runs], wanted, num_fed)
        if first is None:
            return []
        runs = [run for run, there in zip(runs, is_there, strict=True) if there]
        lengths = [run.num_levels for run in runs]
        chains = self._runner.chains(*first, lengths, self._grower.vocabulary.columns)
        for run in runs:
            self.blocks.trim(run.seq.seq_id, self._pages[run.seq.seq_id].num_valid)
        return [
            (run, Draft(tokens, chain(len(tokens))))
            for run, tokens in zip(runs, chains, strict=True)
        ]

    def _grow(self, runs: list[Run], wanted: set[int]) -> list[tuple[Run, Draft]]:
        """The trees of those there is room for, level by level."""
        width = self._grower.width
        num_fed = [(run.num_levels - 1) * min(width, run.budget) for run in runs]
        features, logits, is_there = self._take_in([run.seq for run in runs], wanted, num_fed)
        runs = [run for run, there in zip(runs, is_there, strict=True) if there]
        rows = {(run.index, -1): row for row, run in enumerate(runs)}

        def follow(places: Seq[Place], depth: int) -> Tensor:
            nonlocal features, rows
            before = [rows[run.index, run.growth.parents[node]] for run, node in places]
            spans = [
                node_span(run, nodes, self._pages[run.seq.seq_id].num_valid, depth)
                for run, nodes in by_run(places)
            ]
            batch = lay_out(spans, self.blocks, self.device)
            features, logits = self._runner.forward(batch, rows_at(features, before))
            rows = {(run.index, node): row for row, (run, node) in enumerate(places)}
            return logits

        if runs:
            self._grower.grow(runs, logits, follow)
        for run in runs:
            pages = self._pages[run.seq.seq_id]
            pages.growth, pages.root = run.growth, len(run.seq.tokens)
            self.blocks.trim(run.seq.seq_id, pages.num_valid)
        return [(run, run.growth.draft(run.budget)) for run in runs]

    def _take_in(
        self, seqs: Seq[Sequence], wanted: set[int], num_nodes: Seq[int] | None = None
    ) -> tuple[Tensor, Tensor, list[bool]]:
        """One pass over the pairs that wait; arguments as of `_first_pass`.

        Returns:
            The feature after the last pair of each sequence that has its K/V now, [R, hidden];
            its logits, [R, V_d], both if something is to follow; and which sequences these are.
        """
        first, is_there = self._first_pass(seqs, wanted, num_nodes)
        if first is None:
            return torch.empty(0), torch.empty(0), is_there
        return *self._runner.forward(*first), is_there

    def _first_pass(
        self, seqs: Seq[Sequence], wanted: set[int], num_nodes: Seq[int] | None
    ) -> tuple[tuple[Batch, Tensor] | None, list[bool]]:
        """The pairs that wait as a pass, after which they count as taken in.

        Args:
            wanted: sequences whose pages are not to be taken.
            num_nodes: key slots behind them, for nodes; None if nothing is to follow.

        Returns:
            The pass and what the head reads in it, if there is anything to read; and which
            sequences have room.
        """
        is_there: list[bool] = []
        spans, states = [], []
        for seq, room in zip(seqs, num_nodes or [0] * len(seqs), strict=True):
            is_there.append(self._reserve(seq.seq_id, room, wanted))
            if not is_there[-1]:
                continue
            pages = self._pages.pop(seq.seq_id)
            self._pages[seq.seq_id] = pages  # now the last
            first = pages.num_skipped + pages.num_valid + 1
            stop = pages.num_valid + pages.num_waiting
            spans.append(
                Span(
                    seq.seq_id,
                    start=pages.num_valid,
                    tokens=seq.tokens[first : first + pages.num_waiting],
                    positions=range(pages.num_valid, stop),
                    num_logits=0 if num_nodes is None else 1,
                )
            )
            states += pages.waiting
            pages.num_valid, pages.num_waiting, pages.waiting = stop, 0, []
            if pages.num_skipped == 0:
                self.blocks.commit(seq.seq_id, seq.tokens[1:], pages.num_valid)
        if not spans:
            return None, is_there
        batch = lay_out(spans, self.blocks, self.device)
        return (batch, self.head.fuse(torch.cat(states))), is_there

    def _reserve(self, seq_id: int, num_nodes: int, wanted: set[int]) -> bool:
        """Slots for a sequence, at the expense of those not drafted for now, or else of itself."""
        pages = self._pages[seq_id]
        stop = pages.num_valid + pages.num_waiting + num_nodes
        return reserve(
            self.blocks,
            self._cache,
            seq_id,
            range(pages.num_valid, stop),
            held=self._pages,
            wanted=wanted,
            forget=self.forget,
        )


def _salt(seq: Sequence) -> bytes:
    return seq.salt + seq.tokens[0].to_bytes(8, "little")
