"""What comes back: token by token while streaming, and as a whole at the end."""

from dataclasses import dataclass, field
from typing import Literal

from slipstream.core.counts import DraftCounts

# Where a token came from: a draft, the target's correction of one, the target's addition to a
# wholly accepted one, or a pass without a draft.
Origin = Literal["accepted", "recovered", "bonus", "plain"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position, under the model's own distribution.

    Attributes:
        token_id: the token that was emitted.
        logprob: its log-probability.
        top: the most likely tokens, best first, as (token id, log-probability).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one answer."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Metrics:
    """Where a request's time went, in seconds from its arrival; counts in tokens."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    time_to_first_token_sec: float
    total_sec: float

    @property
    def decode_tokens_per_sec(self) -> float | None:
        """Output tokens after the first, over the time they took; None for a single token."""
        decode_sec = self.total_sec - self.time_to_first_token_sec
        if self.num_output_tokens < 2 or decode_sec <= 0:
            return None
        return (self.num_output_tokens - 1) / decode_sec


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished answer.

    Attributes:
        finish_reason: "stop" (end token or stop string), "length" (max_tokens or the context),
            "abort", or "error".
        stop_reason: the stop string or token id that ended it; None for the model's own end.
        draft_counts: what became of its drafts.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None
    metrics: Metrics
    draft_counts: DraftCounts


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request: the prompt and its n answers."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text
