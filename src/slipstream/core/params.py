"""What a user asks for: sampling parameters, immutable and validated at the door."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from slipstream.core.errors import RequestError

MAX_LOGPROBS = 100
MAX_TEMPERATURE = 1e6
MAX_TOP_K = 2**31
# Beyond these float32 logits could become infinite.
MAX_REPETITION_PENALTY = 1e3
MAX_BIAS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Names and defaults are those of vLLM and the OpenAI API.

    The distribution is built in one fixed order: logit bias and penalties, then temperature,
    then min-p, top-k, top-p (see `maths.distributions`).

    Attributes:
        temperature: 0 is argmax; any positive value is safe, however small.
        top_k: keep the k most likely tokens; 0 (or -1) keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches this.
        min_p: keep tokens at least this fraction as likely as the most likely one.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in the
            prompt or the output.
        presence_penalty: subtracted once from the logit of every token seen in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: token id -> number added to its logit.
        seed: same seed, same tokens. None draws a fresh one.
        n: number of independent answers; answer i of a seeded request is always the same.
        max_tokens: limit on output tokens; None means as many as the context allows.
        min_tokens: before this many, end-of-sequence and stop tokens are impossible and stop
            strings are ignored.
        stop: strings that end the answer; they are not part of it.
        include_stop_str_in_output: keep the stop string at the end of the text after all.
        stop_token_ids: further token ids that end the answer.
        ignore_eos: go on past the model's own end-of-sequence tokens.
        skip_special_tokens: leave control tokens out of the text.
        logprobs: return the log-probability of each token and of this many most likely ones,
            under the model's own distribution (before bias, penalties and temperature).
        speculative: whether drafts may be used; the tokens are the same either way.
        num_speculative_tokens: most drafted tokens in a step; None leaves it to the engine.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    speculative: bool = True
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        object.__setattr__(self, "top_k", max(self.top_k, 0) if self.top_k == -1 else self.top_k)

        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise RequestError(f"{spec.name} must be a finite number, not {value}")
        for name in (
            *("top_k", "n", "max_tokens", "min_tokens", "seed", "logprobs"),
            "num_speculative_tokens",
        ):
            value = getattr(self, name)
            whole = value is None or (isinstance(value, int) and not isinstance(value, bool))
            self._require(whole, name, "a whole number")
        self._require(self.temperature >= 0, "temperature", "0 (greedy) or positive")
        self._require(self.temperature <= MAX_TEMPERATURE, "temperature", "at most 1e6")
        self._require(
            0 <= self.top_k <= MAX_TOP_K, "top_k", f"in [1, {MAX_TOP_K}], or 0 for no limit"
        )
        self._require(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        self._require(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        self._require(
            1 / MAX_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
            "repetition_penalty",
            "in [0.001, 1000]",
        )
        self._require(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]")
        self._require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]")
        self._require(self.n >= 1, "n", "at least 1")
        self._require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        self._require(self.min_tokens >= 0, "min_tokens", "0 or more")
        num_drafted = self.num_speculative_tokens
        self._require(
            num_drafted is None or num_drafted >= 0, "num_speculative_tokens", "0 or more"
        )
        self._require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"at most max_tokens ({self.max_tokens})",
        )
        self._require(
            self.seed is None or 0 <= self.seed < 2**64, "seed", "an integer in [0, 2**64)"
        )
        self._require(all(self.stop), "stop", "made of non-empty strings")
        self._require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            f"in [0, {MAX_LOGPROBS}]",
        )
        for token, bias in self.logit_bias.items():
            self._require(abs(bias) <= MAX_BIAS, f"logit_bias[{token}]", "in [-1e6, 1e6]", bias)

    def _require(self, holds: bool, name: str, rule: str, value: object = None) -> None:
        if not holds:
            shown = getattr(self, name) if value is None else value
            raise RequestError(f"{name} must be {rule}, not {shown!r}")

    def draft_limit(self, wanted: int) -> int:
        """Of so many drafted tokens in a step, those the request allows."""
        if not self.speculative:
            return 0
        limit = self.num_speculative_tokens
        return wanted if limit is None else min(wanted, limit)

    @property
    def penalised(self) -> bool:
        """Whether the distribution depends on the tokens seen so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
