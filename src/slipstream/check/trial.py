"""Seeded requests on a real model, run plainly and behind drafts, and what the model says of them.

Knows how to run; what the answers prove is for `equality` and `distribution` to say.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from slipstream import reference
from slipstream.build import LoadedModel, build_engine, kv_dtype, make_drafter
from slipstream.check.report import Report
from slipstream.core.config import EngineConfig
from slipstream.core.controls import Row, controls
from slipstream.core.counts import DraftCounts
from slipstream.core.errors import ModelError
from slipstream.core.outputs import CompletionOutput
from slipstream.core.params import SamplingParams
from slipstream.core.speculative import SpeculativeConfig
from slipstream.drafters.base import Drafter
from slipstream.engine.controller import FixedController
from slipstream.engine.verifier import Verifier
from slipstream.kv.blocks import BlockManager
from slipstream.kv.cache import KVCache
from slipstream.maths.distributions import Controls
from slipstream.maths.noise import Address, Key, Stream
from slipstream.models.batch import Span, lay_out
from slipstream.models.runner import ModelRunner

# How surely a bias would have been seen that we say would have been seen.
POWER = 0.99

# Drafted tokens per sequence and step where nobody says.
DRAFT_TOKENS = 4

# How far two ways of computing the same logits may be apart, as a share of the largest, by what
# they compute in. Seen between the engine and the specification in bfloat16: up to 0.023. The
# native kernels have one way only.
LOGIT_SLACK = {
    "packed": 0.0,
    "float64": 2**-35,
    "float32": 2**-15,
    "float16": 2**-8,
    "bfloat16": 2**-5,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One seeded request."""

    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Trial:
    """A model on trial, and the settings that all runs share.

    Attributes:
        speculative: how to draft and by which rule to judge.
        config: of the engines.
        draft: the draft model, where the method needs one.
        synthetic: drafts are made up from known answers, in place of the method's own.
        quiet: no progress bars.
    """

    loaded: LoadedModel
    speculative: SpeculativeConfig
    config: EngineConfig
    draft: LoadedModel | None = None
    synthetic: bool = True
    quiet: bool = True

    @property
    def vocab_size(self) -> int:
        return self.loaded.model.config.vocab_size

    @property
    def rule(self) -> str:
        return self.speculative.rejection_sample_method

    @property
    def draft_tokens(self) -> int:
        """Most drafted tokens per sequence and step."""
        tokens, tree = self.speculative.num_speculative_tokens, self.speculative.tree
        if tokens is None:
            tokens = tree.max_tokens if tree is not None else DRAFT_TOKENS
        return tokens

    def drafter(self) -> Drafter:
        """The method's own drafter, new: engines count their sequences from zero.

        Raises:
            ConfigError: a method that cannot be wired to this model.
        """
        context_length = self.config.max_model_len or self.loaded.model.config.context_length
        return make_drafter(self.speculative, self.loaded, self.draft, self.config, context_length)

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Token ids that end an answer."""
        eos_ids = frozenset() if params.ignore_eos else self.loaded.tokenizer.eos_ids
        return eos_ids | frozenset(params.stop_token_ids)

    def slack(self, logits: Tensor) -> float:
        """How far these logits may be from those of another computation."""
        share = LOGIT_SLACK[self.loaded.model.kind]
        return share * float(logits.nan_to_num(0, 0, 0).abs().max())

    def note_drafts(self, answers: Seq[CompletionOutput], report: Report) -> None:
        """Report how much was drafted for answers; none at all is a proof of nothing."""
        counts = DraftCounts()
        for answer in answers:
            counts.merge(answer.draft_counts)
        drafted, accepted = counts.num_draft_tokens, counts.num_accepted_draft_tokens
        report.settings |= {"drafted": drafted, "accepted": accepted}
        if drafted == 0 and not self.synthetic:
            report.untested = (
                f"method {self.speculative.method} drafted nothing for these prompts, so nothing "
                "was put to the test; give it --prompts that it finds something in, or leave the "
                "method out to prove with synthetic drafts"
            )

    def run(
        self,
        what: str,
        cases: Seq[Case],
        *,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        stagger: bool = False,
    ) -> list[CompletionOutput]:
        """Answer all cases in one engine; without a drafter, plainly.

        Args:
            what: for the progress bar.
            stagger: add a request each step instead of all at once, so that the batch is another
                at every position.

        Raises:
            ModelError: the model computes NaN.
        """
        engine = build_engine(
            self.loaded,
            self.config,
            drafter=drafter,
            controller=FixedController(self.draft_tokens if drafter else 0),
            verifier=verifier,
        )
        waiting = list(enumerate(cases))
        with tqdm(total=len(cases), desc=what, unit="answer", disable=self.quiet) as bar:
            while waiting or engine.has_work:
                joining, waiting = (waiting[:1], waiting[1:]) if stagger else (waiting, [])
                for i, case in joining:
                    engine.add(case.prompt, case.params, request_id=request_id(i))
                bar.update(sum(delta.finish_reason is not None for delta in engine.step()))
        answers = [engine.output(request_id(i)).outputs[0] for i in range(len(cases))]
        if any(answer.finish_reason == "error" for answer in answers):
            raise ModelError(f"{self.loaded.name} computes NaN; there is nothing to compare")
        return answers

    @torch.inference_mode()
    def specified(
        self, case: Case, output: Seq[int], first: int = 0
    ) -> tuple[Tensor, Controls, list[Address]]:
        """What decides about `output[first:]`, by the specification: one pass, no cache.

        Returns:
            Logits [R, V] before each of those tokens, their controls, and where the noise of plain
            decoding is.
        """
        prompt, params = case.prompt, case.params
        tokens = [*prompt, *output]
        stop_ids = self.stop_ids(params)
        places = range(len(prompt) + first, len(tokens))
        logits = self._logits(tokens[:-1])[places.start - 1 :]
        rows = [Row(params, tokens[:place], len(prompt), stop_ids) for place in places]
        key = Key(params.seed or 0)
        addresses = [Address(key, Stream.TARGET, place) for place in places]
        return logits, controls(rows, logits.device), addresses

    def _logits(self, tokens: list[int]) -> Tensor:
        """Logits after every prefix, [T, V]: by the specification, or natively where that is exact.

        The specification rounds activations as the native kernels do, but adds in another order,
        which now and then rounds one the other way. What does not depend on the batch needs no
        second opinion: one pass over everything is plain decoding, bit for bit.
        """
        model, num_tokens = self.loaded.model, len(tokens)
        if model.grade != "bitwise":
            return reference.logits(model, tokens)
        block_size = self.config.block_size
        num_blocks = -(-num_tokens // block_size)
        cache = KVCache.for_model(
            model.config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=kv_dtype(self.config, model),
            device=model.device,
        )
        blocks = BlockManager(num_blocks, block_size)
        blocks.allocate(0, [])
        blocks.reserve(0, 0, num_tokens)
        whole = Span(0, 0, tokens, range(num_tokens), num_logits=num_tokens)
        return ModelRunner(model, cache).forward(lay_out([whole], blocks, model.device)).logits


def request_id(case: int) -> str:
    """What the request of a case is called; drafters know it by that."""
    return f"case-{case}"


def known(answers: Seq[CompletionOutput]) -> dict[str, dict[int, list[int]]]:
    """Answers as `SyntheticDrafter` wants to be told them."""
    return {request_id(i): {0: answer.token_ids} for i, answer in enumerate(answers)}
