"""The engine: requests in, tokens out, many at a time.

    add -> waiting -> running -> finished
                 \\___preempted___/

`step()` advances every running sequence and returns what it added. The engine is single-threaded;
whoever shares it between threads brings a lock.
"""

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.core.counts import DraftCounts
from slipstream.core.errors import RequestError
from slipstream.core.grammar import Grammar
from slipstream.core.outputs import CompletionOutput, Delta, Metrics, RequestOutput
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence, Status
from slipstream.engine.commit import commit
from slipstream.engine.detokenize import Detokenizer
from slipstream.engine.step import Parts, StepResult, step
from slipstream.loading.tokenizer import Tokenizer
from slipstream.maths.noise import Key, fresh_seed

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was built, and the pool as it is now.

    Attributes:
        num_steps, num_computed_tokens, num_output_tokens: totals.
        num_preemptions: sequences that lost their blocks.
        draft_sec, verify_sec, total_sec: time in steps; `total` includes both.
        num_running, num_waiting: sequences.
        num_free_blocks, num_cached_blocks, num_used_blocks: of the KV pool.
        drafts: of all requests that have ended.
    """

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    draft_sec: float = 0.0
    verify_sec: float = 0.0
    total_sec: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_used_blocks: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)


class Engine:
    """Continuous batching over one model.

    Args:
        parts: the wired step.
        tokenizer: of the model.
        context_length: most tokens a sequence may have, prompt and output together.

    Attributes:
        last_step: what the latest step did, for whoever watches.
    """

    def __init__(self, parts: Parts, tokenizer: Tokenizer, context_length: int):
        self.parts = parts
        self.tokenizer = tokenizer
        self.context_length = context_length
        self._vocab_size = parts.runner.model.config.vocab_size
        self._requests: dict[str, list[Sequence]] = {}
        self._detokenizers: dict[int, Detokenizer] = {}
        self._next_id = 0
        self._stats = EngineStats()
        self.last_step: StepResult | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.parts.scheduler.running or self.parts.scheduler.waiting)

    @property
    def computes_prompts(self) -> bool:
        """Whether the next step will compute anybody's prompt."""
        scheduler = self.parts.scheduler
        return bool(scheduler.waiting) or any(seq.num_pending > 1 for seq in scheduler.running)

    def add(
        self,
        prompt: Seq[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        salt: bytes = b"",
        grammar: Grammar | None = None,
        prediction: Seq[int] = (),
    ) -> str:
        """Queue a request.

        Args:
            prompt: token ids.
            params: how to sample; the defaults if None.
            request_id: must be unused; made up if None.
            salt: cached prefixes are shared only between requests with equal salts.
            grammar: what every answer must obey.
            prediction: token ids an answer is expected to be; they serve as a draft.

        Returns:
            The request's id.

        Raises:
            RequestError: a prompt or parameter that cannot be served; nothing was queued.
        """
        params = params or SamplingParams()
        max_tokens = self._check(prompt, params)
        request_id = request_id or f"request-{self._next_id}"
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is already in use")
        eos_ids = frozenset() if params.ignore_eos else self.tokenizer.eos_ids
        seed = fresh_seed() if params.seed is None else params.seed
        seqs: list[Sequence] = []
        for index in range(params.n):
            seq = Sequence(
                seq_id=self._next_id,
                request_id=request_id,
                index=index,
                tokens=list(prompt),
                num_prompt=len(prompt),
                params=params,
                max_tokens=max_tokens,
                stop_ids=eos_ids | frozenset(params.stop_token_ids),
                key=Key(seed, index),
                salt=salt,
                leader=seqs[0] if seqs else None,
                grammar=None if grammar is None else grammar.fork(),
                prediction=list(prediction),
                arrival_sec=time.perf_counter(),
            )
            self._next_id += 1
            self._detokenizers[seq.seq_id] = Detokenizer(
                self.tokenizer,
                params.stop,
                skip_special=params.skip_special_tokens,
                include_stop=params.include_stop_str_in_output,
            )
            seqs.append(seq)
            self.parts.scheduler.add(seq)
        self._requests[request_id] = seqs
        return request_id

    def step(self) -> list[Delta]:
        """Advance by one forward pass; what it added, per answer that it added to."""
        result = step(self.parts)
        deltas = [
            *(self._commit(result, i) for i, v in enumerate(result.verdicts) if v is not None),
            *(self._fail(seq) for seq in result.poisoned),
        ]
        for i, verdict in enumerate(result.verdicts):
            if verdict is None and result.plan.seqs[i].status is Status.RUNNING:
                self._advance(result.plan.seqs[i], result.plan.num_tokens[i])
        self._count(result, deltas)
        result.target = None  # by far the largest part, and of no more use
        self.last_step = result
        return deltas

    def recover(self) -> list[Delta]:
        """Go on after a `step` that raised, so that only whoever caused it fails.

        Nothing of that step was committed. Everybody who ran in it starts again from its tokens,
        alone at first; who was alone already ends with finish reason "error".
        """
        scheduler = self.parts.scheduler
        ran = list(scheduler.running)
        assert ran, "the step raised before anybody ran"
        for seq in ran:
            self.parts.drafter.forget(seq.seq_id)
        if len(ran) == 1:
            return [self._fail(ran[0])]
        scheduler.isolate()
        return []

    def abort(self, request_id: str) -> list[Delta]:
        """End a request now; what it has so far stays available as its output."""
        if request_id not in self._requests:
            raise RequestError(f"no request {request_id!r}")
        return [
            self._end(seq, "abort")
            for seq in self._requests[request_id]
            if seq.status is not Status.FINISHED
        ]

    def is_finished(self, request_id: str) -> bool:
        return all(seq.status is Status.FINISHED for seq in self._requests[request_id])

    def output(self, request_id: str) -> RequestOutput:
        """Hand over a finished request and forget it."""
        assert self.is_finished(request_id), f"{request_id} is still running"
        seqs = self._requests.pop(request_id)
        first = seqs[0]
        return RequestOutput(
            request_id=request_id,
            prompt_token_ids=first.tokens[: first.num_prompt],
            outputs=[_completion(seq) for seq in seqs],
        )

    def stats(self) -> EngineStats:
        """Counters so far and the state of the pool."""
        scheduler, blocks = self.parts.scheduler, self.parts.scheduler.blocks
        stats = self._stats
        stats.num_running, stats.num_waiting = len(scheduler.running), len(scheduler.waiting)
        stats.num_free_blocks = blocks.num_free
        stats.num_cached_blocks = blocks.num_cached
        stats.num_used_blocks = blocks.num_used
        return stats

    def check_integrity(self) -> None:
        """Assert that blocks are conserved and that every sequence is where its status says."""
        scheduler = self.parts.scheduler
        scheduler.blocks.check_integrity()
        live = [seq for seqs in self._requests.values() for seq in seqs]
        live = [seq for seq in live if seq.status is not Status.FINISHED]
        assert len(live) == len(scheduler.running) + len(scheduler.waiting), "a sequence was lost"
        assert self._detokenizers.keys() == {seq.seq_id for seq in live}, "a detokenizer leaked"
        for seq in scheduler.running:
            held = len(scheduler.blocks.table(seq.seq_id))
            needed = scheduler.blocks.blocks_for(seq.num_computed)
            assert held == needed, f"{seq.seq_id} holds {held} blocks, needs {needed}"
            assert seq.num_output == 0 or seq.num_computed < len(seq.tokens), seq.seq_id
        for seq in scheduler.waiting:
            assert not scheduler.blocks.has(seq.seq_id), f"{seq.seq_id} waits with blocks"

    def _check(self, prompt: Seq[int], params: SamplingParams) -> int:
        """Refuse what cannot be served; the output limit of what can."""
        blocks = self.parts.scheduler.blocks
        if not prompt:
            raise RequestError("the prompt is empty; it needs at least one token")
        if len(prompt) >= self.context_length:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; with room for an answer the context of "
                f"{self.context_length} allows {self.context_length - 1}"
            )
        for name, ids in (
            ("prompt", prompt),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            for token in ids:
                if not 0 <= token < self._vocab_size:
                    last = self._vocab_size - 1
                    raise RequestError(f"{name} has token id {token}; the last one is {last}")
        room = self.context_length - len(prompt)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        # The last token is never computed, so it needs no slot.
        capacity = blocks.num_blocks * blocks.block_size
        needed = len(prompt) + (max_tokens if params.max_tokens is not None else 1) - 1
        if needed > capacity:
            raise RequestError(
                f"{len(prompt)} prompt and {max_tokens} output tokens need "
                f"{blocks.blocks_for(needed)} KV blocks of {blocks.block_size}, the pool has "
                f"{blocks.num_blocks}; shorten the prompt, lower max_tokens, or raise "
                "--kv-cache-memory"
            )
        return min(max_tokens, capacity - len(prompt) + 1)

    def _commit(self, result: StepResult, i: int) -> Delta:
        seq, draft, verdict = result.plan.seqs[i], result.drafts[i], result.verdicts[i]
        assert verdict is not None and result.target is not None
        first_row = result.target.first_rows[i]
        assert first_row is not None
        rows = result.target.logits[first_row : first_row + 1 + len(draft)]
        try:
            delta = commit(seq, draft, verdict, rows, self._detokenizers[seq.seq_id])
        except Exception:
            # Tokens, text and log-probabilities may disagree now, but only this sequence's.
            _log.exception("an answer of %s failed", seq.request_id)
            return self._fail(seq)
        if seq.first_token_sec is None:
            seq.first_token_sec = time.perf_counter()
        self._advance(seq, len(seq.tokens) - 1 - seq.num_computed)
        if seq.finish_reason is not None:
            self._retire(seq)
        elif self.parts.scheduler.suspects:
            self.parts.drafter.forget(seq.seq_id)
            self.parts.scheduler.acquit(seq)
        return delta

    def _advance(self, seq: Sequence, num_tokens: int) -> None:
        """Count computed tokens, name full blocks, and return those past the counter."""
        blocks = self.parts.scheduler.blocks
        seq.num_computed += num_tokens
        blocks.commit(seq.seq_id, seq.tokens, seq.num_computed)
        blocks.trim(seq.seq_id, seq.num_computed)

    def _fail(self, seq: Sequence) -> Delta:
        # Its K/V may be as bad as its logits and must not be found by another prompt.
        self.parts.scheduler.blocks.free(seq.seq_id, reusable=False)
        return self._end(seq, "error")

    def _end(self, seq: Sequence, reason: str) -> Delta:
        seq.finish_reason = reason
        text = self._detokenizers[seq.seq_id].finish()
        seq.text += text
        self._retire(seq)
        return Delta(seq.request_id, seq.index, text, [], finish_reason=reason)

    def _retire(self, seq: Sequence) -> None:
        self.parts.scheduler.finish(seq)
        self.parts.drafter.forget(seq.seq_id)
        self.parts.controller.forget(seq.seq_id)
        del self._detokenizers[seq.seq_id]
        self._stats.drafts.merge(seq.draft_counts)
        seq.finished_sec = time.perf_counter()

    def _count(self, result: StepResult, deltas: Seq[Delta]) -> None:
        stats = self._stats
        stats.num_steps += 1
        stats.num_computed_tokens += sum(result.plan.num_tokens) + sum(map(len, result.drafts))
        stats.num_output_tokens += sum(len(delta.token_ids) for delta in deltas)
        stats.num_preemptions += len(result.plan.preempted)
        stats.draft_sec += result.draft_sec
        stats.verify_sec += result.verify_sec
        stats.total_sec += result.total_sec


def _completion(seq: Sequence) -> CompletionOutput:
    assert seq.finish_reason is not None and seq.finished_sec is not None
    first_token_sec = seq.finished_sec if seq.first_token_sec is None else seq.first_token_sec
    return CompletionOutput(
        index=seq.index,
        text=seq.text,
        token_ids=seq.output,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        logprobs=None if seq.params.logprobs is None else seq.logprobs,
        metrics=Metrics(
            num_prompt_tokens=seq.num_prompt,
            num_cached_tokens=seq.num_cached,
            num_output_tokens=seq.num_output,
            num_preemptions=seq.num_preemptions,
            time_to_first_token_sec=first_token_sec - seq.arrival_sec,
            total_sec=seq.finished_sec - seq.arrival_sec,
        ),
        draft_counts=seq.draft_counts,
    )
