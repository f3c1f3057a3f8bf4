"""Seeded requests on a real model, run plainly and behind drafts, and what the model says of them.

Knows how to run; what the answers prove is for `equality` and `distribution` to say.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from slipstream import reference
from slipstream.build import LoadedModel, build_engine
from slipstream.core.config import EngineConfig
from slipstream.core.controls import Row, controls
from slipstream.core.errors import ModelError
from slipstream.core.outputs import CompletionOutput
from slipstream.core.params import SamplingParams
from slipstream.drafters.base import Drafter
from slipstream.engine.controller import FixedController
from slipstream.engine.verifier import Verifier
from slipstream.maths.distributions import Controls
from slipstream.maths.noise import Address, Key, Stream

# How surely a bias would have been seen that we say would have been seen.
POWER = 0.99

# How far two ways of computing the same logits may be apart, as a share of the largest, by the type
# they compute in. Seen between the engine and the specification in bfloat16: up to 0.023.
LOGIT_SLACK = {
    torch.float64: 2**-35,
    torch.float32: 2**-15,
    torch.float16: 2**-8,
    torch.bfloat16: 2**-5,
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
        rule: of the verifier.
        draft_tokens: most drafted tokens per sequence and step.
        config: of the engines.
        quiet: no progress bars.
    """

    loaded: LoadedModel
    rule: str
    draft_tokens: int
    config: EngineConfig
    quiet: bool = True

    @property
    def vocab_size(self) -> int:
        return self.loaded.model.config.vocab_size

    def slack(self, logits: Tensor) -> float:
        """How far these logits may be from those of another computation."""
        return LOGIT_SLACK[self.loaded.model.dtype] * float(logits.nan_to_num(0, 0, 0).abs().max())

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
        eos_ids = frozenset() if params.ignore_eos else self.loaded.tokenizer.eos_ids
        stop_ids = eos_ids | frozenset(params.stop_token_ids)
        places = range(len(prompt) + first, len(tokens))
        logits = reference.logits(self.loaded.model, tokens[:-1])[places.start - 1 :]
        rows = [Row(params, tokens[:place], len(prompt), stop_ids) for place in places]
        key = Key(params.seed or 0)
        addresses = [Address(key, Stream.TARGET, place) for place in places]
        return logits, controls(rows, logits.device), addresses


def request_id(case: int) -> str:
    """What the request of a case is called; drafters know it by that."""
    return f"case-{case}"


def known(answers: Seq[CompletionOutput]) -> dict[str, dict[int, list[int]]]:
    """Answers as `SyntheticDrafter` wants to be told them."""
    return {request_id(i): {0: answer.token_ids} for i, answer in enumerate(answers)}
