"""What every answer carries whatever its form: usage, vLLM's metrics, llama.cpp's timings."""

from collections.abc import Sequence as Seq
from typing import Any, Protocol

from slipstream.core.counts import DraftCounts
from slipstream.core.outputs import CompletionOutput, Delta, RequestOutput
from slipstream.engine.detokenize import Detokenizer
from slipstream.loading.tokenizer import Tokenizer

Json = dict[str, Any]


class Form(Protocol):
    """How the answers of one request are written: as completions or as chat.

    Attributes:
        whole_object, chunk_object: what the API calls a response and a chunk of one.
    """

    whole_object: str
    chunk_object: str

    def opening(self, number: int) -> Json | None:
        """The choice that opens the stream of an answer, if one does."""

    def chunk(self, number: int, delta: Delta) -> list[Json]:
        """The choices that a delta becomes."""

    def whole(self, number: int, answer: CompletionOutput) -> Json:
        """The choice of a complete answer."""


def report(outputs: Seq[RequestOutput]) -> Json:
    """The blocks `usage`, `metrics` and `timings` over all answers."""
    answers = [answer for output in outputs for answer in output.outputs]
    counts = DraftCounts()
    for answer in answers:
        counts.merge(answer.draft_counts)
    return {
        "usage": _usage(outputs, answers, counts),
        "metrics": {"speculative_decoding": _speculation(counts)},
        "timings": _timings(outputs, answers, counts),
    }


def _usage(
    outputs: Seq[RequestOutput], answers: Seq[CompletionOutput], counts: DraftCounts
) -> Json:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(answer.token_ids) for answer in answers)
    accepted = counts.num_accepted_predicted_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": _num_cached(outputs)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": counts.num_predicted_tokens - accepted,
            "reasoning_tokens": 0,
        },
    }


def _speculation(counts: DraftCounts) -> Json:
    """vLLM's block; its acceptance length is of passes with a draft, ours of all passes."""
    length = None
    if counts.num_spec_steps:
        length = 1 + counts.num_accepted_draft_tokens / counts.num_spec_steps
    return counts.as_dict() | {
        "mean_acceptance_length": length,
        "draft_acceptance_rate": counts.acceptance_rate,
        "num_spec_tokens": max(counts.sizes, default=0),
        "tokens_per_pass": counts.mean_acceptance_length,
    }


def _timings(
    outputs: Seq[RequestOutput], answers: Seq[CompletionOutput], counts: DraftCounts
) -> Json:
    num_cached = _num_cached(outputs)
    num_output = sum(len(answer.token_ids) for answer in answers)
    first_sec = max(answer.metrics.time_to_first_token_sec for answer in answers)
    total_sec = max(answer.metrics.total_sec for answer in answers)
    decode_sec = total_sec - first_sec
    later = num_output - len(answers)  # first tokens belong to the prompt's passes
    return {
        "cache_n": num_cached,
        "prompt_n": sum(len(output.prompt_token_ids) for output in outputs) - num_cached,
        "prompt_ms": 1e3 * first_sec,
        "predicted_n": num_output,
        "predicted_ms": 1e3 * decode_sec,
        "predicted_per_second": later / decode_sec if decode_sec > 0 and later > 0 else None,
        "draft_n": counts.num_draft_tokens,
        "draft_n_accepted": counts.num_accepted_draft_tokens,
    }


def _num_cached(outputs: Seq[RequestOutput]) -> int:
    return sum(output.outputs[0].metrics.num_cached_tokens for output in outputs)


class Origins:
    """The tokens of streamed answers, each with its text and where it came from.

    A character of several tokens is the last one's.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._texts: dict[int, Detokenizer] = {}

    def of(self, number: int, delta: Delta) -> list[Json]:
        text = self._texts.setdefault(number, Detokenizer(self._tokenizer))
        return [
            {"text": text.push(token), "origin": origin}
            for token, origin in zip(delta.token_ids, delta.origins, strict=True)
        ]
