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
from torch.nn import functional as F

from slipstream.core.controls import Row
from slipstream.core.draft import NO_DRAFT, Draft, Verdict
from slipstream.core.errors import ConfigError
from slipstream.core.sequence import Sequence
from slipstream.core.speculative import RULES, TreeConfig
from slipstream.core.target import TargetOutput
from slipstream.drafters.sampling import coupled, independent
from slipstream.drafters.tree_growth import Acceptance, Growth
from slipstream.kv.blocks import BlockManager, OutOfBlocks
from slipstream.kv.cache import KVCache
from slipstream.loading.tokenizer import Tokenizer
from slipstream.maths.noise import Address, StepNoise, Stream
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


@dataclass(frozen=True, slots=True)
class _Run:
    """A sequence drafted for in this step: at most `budget` nodes on `num_levels` levels."""

    index: int
    seq: Sequence
    pages: _Pages
    budget: int
    num_levels: int

    @property
    def num_missing(self) -> int:
        return len(self.seq.tokens) - self.pages.num_valid


_Place = tuple[_Run, int]  # a node of a sequence's tree; -1 is the root


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
        assert rule in RULES, rule
        assert tree is None or rule != "block", "block verification needs chains"
        self.model = model
        self.blocks = blocks
        self.vocab_size = vocab_size
        self.rule = rule
        self.tree = tree
        self.chunk_tokens = chunk_tokens
        self._width = 1 if tree is None else min(tree.topk, vocab_size)
        self._runner = ModelRunner(model, cache)
        self._pages: dict[int, _Pages] = {}  # least recently drafted first
        self._acceptance = Acceptance(self._width)

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
        places, depth = [(run, -1) for run in runs], 0
        while places:
            self._branch(places, depth, logits)
            places, logits = self._feed(runs, depth)
            depth += 1
        drafts = [NO_DRAFT] * len(seqs)
        for run in runs:
            drafts[run.index] = run.pages.growth.draft(run.budget)
        return drafts

    def observe(
        self, seqs: Seq[Sequence], target: TargetOutput, verdicts: Seq[Verdict | None]
    ) -> None:
        pass  # what was committed says it all, and is read when next drafting

    def forget(self, seq_id: int) -> None:
        if self._pages.pop(seq_id, None) is not None:
            self.blocks.free(seq_id)

    def _runs(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[_Run]:
        """Those to draft for, with everything about their K/V settled but what is missing."""
        runs = []
        for index, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            num_levels = budget
            if self.tree is not None:
                budget, num_levels = min(budget, self.tree.max_tokens), self.tree.depth
            # The target adds one token to whatever it accepts, and positions end at the context.
            context_room = self.model.config.context_length - len(seq.tokens)
            num_levels = min(num_levels, budget, seq.room - 1, context_room)
            if num_levels > 0 and self._knows(seq):
                runs.append(_Run(index, seq, self._settle(seq), budget, num_levels))
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
        path = growth.follow(seq.tokens[base:], self._acceptance)
        slot_of = {node: base + slot for slot, node in enumerate(growth.fed)}
        there = [slot_of[node] for node in path if node in slot_of]
        displaced = [(key, base + i) for i, key in enumerate(there) if key != base + i]
        source, destination = (
            key_slots(self.blocks, seq.seq_id, [move[end] for move in displaced]) for end in (0, 1)
        )
        self._runner.cache.move_slots(list(zip(source, destination, strict=True)))
        # The last token is computed in any case: its logits are wanted.
        pages.num_valid = min(base + len(there), len(seq.tokens) - 1)
        pages.growth = Growth()
        self.blocks.trim(seq.seq_id, pages.num_valid)
        return pages

    def _catch_up(self, runs: list[_Run]) -> tuple[list[_Run], Tensor]:
        """One pass over missing committed tokens, least behind first.

        Returns:
            The sequences that now have all of theirs, and the logits that follow, [R, V].
        """
        wanted = {run.seq.seq_id for run in runs}
        ready: list[_Run] = []
        behind: list[_Run] = []
        spans, left = [], self.chunk_tokens
        for run in sorted(runs, key=lambda run: run.num_missing):
            seq, start = run.seq, run.pages.num_valid
            stop = min(start + left, len(seq.tokens))
            is_ready = stop == len(seq.tokens)
            num_nodes = (run.num_levels - 1) * min(self._width, run.budget) if is_ready else 0
            if stop == start or not self._reserve(run, stop + num_nodes, wanted):
                continue
            spans.append(
                Span(seq.seq_id, start, seq.tokens[start:stop], range(start, stop), int(is_ready))
            )
            left -= stop - start
            run.pages.num_valid = stop
            (ready if is_ready else behind).append(run)
        logits = self._forward(spans)
        for run in ready + behind:
            self.blocks.commit(run.seq.seq_id, run.seq.tokens, run.pages.num_valid)
        return ready, logits

    def _reserve(self, run: _Run, num_tokens: int, wanted: set[int]) -> bool:
        """Slots for a sequence, at the expense of those not drafted for now, or else of itself."""
        seq_id = run.seq.seq_id
        while True:
            try:
                copies = self.blocks.reserve(seq_id, run.pages.num_valid, num_tokens)
            except OutOfBlocks:
                idle = next((other for other in self._pages if other not in wanted), seq_id)
                self.forget(idle)
                if idle == seq_id:
                    return False
            else:
                self._runner.cache.copy_blocks(copies)
                return True

    def _branch(self, places: Seq[_Place], depth: int, logits: Tensor) -> None:
        """Grow children, on level `depth`, from the logits [R, V] after R places."""
        seqs = [run.seq for run, _ in places]
        rows = [
            Row(
                run.seq.params,
                run.seq.tokens + run.pages.growth.path_tokens(node),
                run.seq.num_prompt,
                run.seq.stop_ids,
                run.seq.grammar,
            )
            for run, node in places
        ]
        if self.rule == "match":
            noise = [Address(seq.key, Stream.TARGET, len(seq.tokens) + depth) for seq in seqs]
            candidates = coupled(logits, rows, noise, self._width)
        else:
            fresh = StepNoise([seq.key for seq in seqs], [len(seq.tokens) for seq in seqs])
            every = torch.arange(len(seqs))
            noise = fresh.drafts(every, torch.full_like(every, depth))
            candidates = independent(logits, rows, noise, self._width)
        for place, (run, node) in enumerate(places):
            run.pages.growth.extend(node, candidates, place, self._acceptance)

    def _feed(self, runs: Seq[_Run], depth: int) -> tuple[list[_Place], Tensor]:
        """Compute the nodes of a level that are to be continued.

        Returns:
            Those nodes, and the logits after each, [R, V].
        """
        places: list[_Place] = []
        spans = []
        for run in runs:
            if depth + 1 == run.num_levels:
                continue
            growth, base = run.pages.growth, len(run.seq.tokens)
            nodes = growth.frontier(depth, self._width, run.budget)
            if nodes:
                places += [(run, node) for node in nodes]
                spans.append(
                    Span(
                        run.seq.seq_id,
                        start=base + len(growth.fed),
                        tokens=[growth.tokens[node] for node in nodes],
                        positions=[base + depth] * len(nodes),
                        num_logits=len(nodes),
                        ancestors=growth.feed(nodes),
                    )
                )
        return places, self._forward(spans)

    def _forward(self, spans: Seq[Span]) -> Tensor:
        """One pass of the draft model: logits [R, V], V being the target's vocabulary."""
        if not spans:
            return torch.empty(0, self.vocab_size)
        batch = lay_out(spans, self.blocks, self._runner.device)
        logits = self._runner.forward(batch).logits[:, : self.vocab_size]
        return F.pad(logits, (0, self.vocab_size - logits.shape[1]), value=-torch.inf)


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
