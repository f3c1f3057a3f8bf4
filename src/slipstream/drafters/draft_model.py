"""Drafting with a smaller model of the same tokenizer, in chains or small trees.

The model has pages of its own, which follow the committed tokens lazily: a sequence nobody drafts
for costs nothing. What its K/V holds after a step of drafting:

    keys     | committed ........................ | fed nodes of the tree |
              0 .. num_valid - 1 (== len(tokens))   num_valid ..

By the next time the target has committed more tokens. Those that run through fed nodes have their
K/V already, wherever in the tree; it is moved together, and only what is missing is computed. After
a chain accepted in full that is two tokens: the last drafted one, whose K/V nobody needed, and the
bonus token.

Under `match` a drafted token wins the draft model's race with the *target's* noise, so that the two
agree far more often than independent samples do, and the siblings of a node are the next to
finish. Under `ratio` and `block` noise is the drafter's own, q is returned as drawn from, and
which nodes are drafted never depends on what they carry.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.core.draft import Draft, Verdict
from slipstream.core.errors import ConfigError
from slipstream.core.sequence import Sequence
from slipstream.core.speculative import TreeConfig
from slipstream.core.target import TargetOutput
from slipstream.drafters.levels import (
    LevelGrower,
    Place,
    Run,
    by_run,
    drafts_of,
    node_span,
)
from slipstream.drafters.pages import reserve
from slipstream.drafters.tree_growth import Growth
from slipstream.drafters.vocabulary import DraftVocabulary
from slipstream.kv.blocks import BlockManager
from slipstream.kv.cache import KVCache
from slipstream.loading.tokenizer import Tokenizer
from slipstream.models import CausalLM
from slipstream.models.batch import Span, key_slots, lay_out
from slipstream.models.runner import ModelRunner

# Differing tokens an error names.
_NUM_NAMED = 3


@dataclass(slots=True)
class _Pages:
    """What a sequence's K/V holds: `num_valid` committed tokens, then the fed nodes of a tree."""

    num_valid: int
    growth: Growth = field(default_factory=Growth)


class DraftModelDrafter:
    """Drafts with a model of its own.

    Args:
        model: the draft model.
        cache, blocks: its K/V and who owns it; the drafter is their only user.
        vocab_size: of the target.
        rule: "match", "ratio" or "block", whichever judges the drafts.
        tree: the shape of drafts; None drafts chains as long as the budget.
        chunk_tokens: most committed tokens computed in a step; sequences further behind catch up
            over several steps and are drafted for when they have.
    """

    taps: Seq[int] = ()

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        blocks: BlockManager,
        vocab_size: int,
        *,
        rule: str = "match",
        tree: TreeConfig | None = None,
        chunk_tokens: int = 512,
    ):
        self.model = model
        self.blocks = blocks
        self.chunk_tokens = chunk_tokens
        self._grower = LevelGrower(rule, tree, DraftVocabulary(vocab_size))
        self._runner = ModelRunner(model, cache)
        self._pages: dict[int, _Pages] = {}  # least recently drafted first

    @classmethod
    def for_model(
        cls,
        model: CausalLM,
        vocab_size: int,
        *,
        num_blocks: int,
        block_size: int = 16,
        kv_dtype: torch.dtype | None = None,
        rule: str = "match",
        tree: TreeConfig | None = None,
        chunk_tokens: int = 512,
    ) -> "DraftModelDrafter":
        """A drafter with new pages: `num_blocks` of `block_size` tokens.

        Args:
            kv_dtype: of the pages; None is the model's own.
        """
        cache = KVCache.for_model(
            model.config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=kv_dtype or model.dtype,
            device=model.device,
        )
        blocks = BlockManager(num_blocks, block_size)
        return cls(
            model, cache, blocks, vocab_size, rule=rule, tree=tree, chunk_tokens=chunk_tokens
        )

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        runs, logits = self._catch_up(self._runs(seqs, budgets))
        self._grower.grow(runs, logits, self._feed)
        return drafts_of(runs, len(seqs))

    def observe(
        self, seqs: Seq[Sequence], target: TargetOutput, verdicts: Seq[Verdict | None]
    ) -> None:
        pass  # what was committed says it all, and is read when next drafting

    def forget(self, seq_id: int) -> None:
        if self._pages.pop(seq_id, None) is not None:
            self.blocks.free(seq_id)

    def _runs(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Run]:
        """Those to draft for, with everything about their K/V settled but what is missing."""
        runs = []
        for index, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            context_room = self.model.config.context_length - len(seq.tokens)
            run = self._grower.run(index, seq, budget, context_room)
            if run is not None and self._knows(seq):
                self._settle(seq).growth = run.growth
                runs.append(run)
        return runs

    def _knows(self, seq: Sequence) -> bool:
        """Whether the draft model has an embedding for every token it would be fed."""
        num_valid = self._pages[seq.seq_id].num_valid if seq.seq_id in self._pages else 0
        return max(seq.tokens[num_valid:], default=0) < self.model.config.vocab_size

    def _settle(self, seq: Sequence) -> _Pages:
        """Find what K/V of the committed tokens is there: in the tree drafted last, or cached."""
        pages = self._pages.pop(seq.seq_id, None)
        if pages is None:
            pages = _Pages(self.blocks.allocate(seq.seq_id, seq.tokens, seq.salt))
        self._pages[seq.seq_id] = pages  # now the last
        growth, base = pages.growth, pages.num_valid
        path = growth.follow(seq.tokens[base:], self._grower.acceptance)
        slot_of = {node: base + slot for slot, node in enumerate(growth.fed)}
        there = [slot_of[node] for node in path if node in slot_of]
        displaced = [(key, base + i) for i, key in enumerate(there) if key != base + i]
        source, destination = (
            key_slots(self.blocks, seq.seq_id, [move[end] for move in displaced]) for end in (0, 1)
        )
        self._runner.cache.move_slots(list(zip(source, destination, strict=True)))
        # The last token is computed in any case: its logits are wanted.
        pages.num_valid = min(base + len(there), len(seq.tokens) - 1)
        self.blocks.trim(seq.seq_id, pages.num_valid)
        return pages

    def _catch_up(self, runs: list[Run]) -> tuple[list[Run], Tensor]:
        """One pass over missing committed tokens, least behind first.

        Returns:
            The sequences that now have all of theirs, and the logits that follow, [R, V_d].
        """
        wanted = {run.seq.seq_id for run in runs}
        ready: list[Run] = []
        behind: list[Run] = []
        spans, left = [], self.chunk_tokens
        for run in sorted(runs, key=lambda run: self._num_missing(run.seq)):
            seq, pages = run.seq, self._pages[run.seq.seq_id]
            start = pages.num_valid
            stop = min(start + left, len(seq.tokens))
            is_ready = stop == len(seq.tokens)
            num_fed = (run.num_levels - 1) * min(self._grower.width, run.budget)
            num_nodes = num_fed if is_ready else 0
            if stop == start or not self._reserve(seq.seq_id, stop + num_nodes, wanted):
                continue
            spans.append(
                Span(seq.seq_id, start, seq.tokens[start:stop], range(start, stop), int(is_ready))
            )
            left -= stop - start
            pages.num_valid = stop
            (ready if is_ready else behind).append(run)
        logits = self._forward(spans)
        for run in ready + behind:
            seq_id = run.seq.seq_id
            self.blocks.commit(seq_id, run.seq.tokens, self._pages[seq_id].num_valid)
        return ready, logits

    def _num_missing(self, seq: Sequence) -> int:
        return len(seq.tokens) - self._pages[seq.seq_id].num_valid

    def _reserve(self, seq_id: int, num_tokens: int, wanted: set[int]) -> bool:
        """Slots for a sequence, at the expense of those not drafted for now, or else of itself."""
        return reserve(
            self.blocks,
            self._runner.cache,
            seq_id,
            range(self._pages[seq_id].num_valid, num_tokens),
            held=self._pages,
            wanted=wanted,
            forget=self.forget,
        )

    def _feed(self, places: Seq[Place], depth: int) -> Tensor:
        """Compute nodes of a level: the logits after each, [R, V_d]."""
        return self._forward(
            [node_span(run, nodes, len(run.seq.tokens), depth) for run, nodes in by_run(places)]
        )

    def _forward(self, spans: Seq[Span]) -> Tensor:
        """One pass of the draft model: logits [R, V_d]."""
        if not spans:
            return torch.empty(0, 0)
        batch = lay_out(spans, self.blocks, self._runner.device)
        return self._runner.forward(batch).logits


def check_same_tokenizer(target: Tokenizer, draft: Tokenizer) -> None:
    """Refuse a draft model whose token ids mean something else.

    Ids that only one of the two knows do no harm: padding of a table, or tokens added later.

    Raises:
        ConfigError: names the first tokens that differ.
    """
    different: list[str] = []
    for token_id in range(min(target.vocab_size, draft.vocab_size)):
        ours, theirs = (
            tokenizer.token_bytes(token_id, skip_special=False) for tokenizer in (target, draft)
        )
        if ours and theirs and ours != theirs:
            texts = (piece.decode(errors="replace") for piece in (ours, theirs))
            different.append("{}: {!r} and {!r}".format(token_id, *texts))
        if len(different) == _NUM_NAMED:
            break
    if different:
        raise ConfigError(
            "target and draft model have different tokenizers, beginning with the ids "
            f"{'; '.join(different)}. Choose a draft model of the target's family"
        )
