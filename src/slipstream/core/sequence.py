"""One request being generated. There are no phases: `tokens` and `num_computed` say it all."""

from dataclasses import dataclass, field
from enum import Enum

from slipstream.core.counts import DraftCounts
from slipstream.core.grammar import Grammar
from slipstream.core.outputs import TokenLogprobs
from slipstream.core.params import SamplingParams
from slipstream.maths.noise import Key


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the answer growing behind it.

        tokens        | prompt ............ | output ....... |
        num_computed  | valid K/V .................... |       (== len(tokens) - 1 while generating)

    Attributes:
        seq_id: unique in the engine; the block manager and drafters know sequences by it.
        request_id, index: which request, and which of its n answers.
        tokens: committed tokens, prompt first.
        num_prompt: how many of them are the prompt.
        max_tokens: output limit after the context length is taken into account.
        stop_ids: every token id that ends this sequence.
        key: addresses this sequence's random numbers.
        salt: sequences share cached prefixes only under equal salts.
        leader: the first answer of an n > 1 request, whose prompt K/V this one may share.
        grammar: what the output must obey.
        prediction: what the client expects the output to be; a draft, and never more.
        num_computed: tokens whose K/V is valid; slots past it are garbage.
        num_cached: prompt tokens whose K/V came from the prefix cache.
    """

    seq_id: int
    request_id: str
    index: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    key: Key
    salt: bytes = b""
    leader: "Sequence | None" = None
    grammar: Grammar | None = None
    prediction: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    draft_counts: DraftCounts = field(default_factory=DraftCounts)
    arrival_sec: float = 0.0
    first_token_sec: float | None = None
    finished_sec: float | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Committed tokens whose K/V is still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def room(self) -> int:
        """Output tokens that may still be committed."""
        return self.max_tokens - self.num_output
