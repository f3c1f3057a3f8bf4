"""Answers as POST /v1/completions writes them."""

from collections.abc import Sequence as Seq
from typing import Any

from slipstream.core.outputs import CompletionOutput, Delta, TokenLogprobs
from slipstream.loading.tokenizer import Tokenizer
from slipstream.server.reply import Json, Origins


class CompletionForm:
    """Completions.

    Args:
        tokenizer: of the model.
        n: answers per prompt.
        echoes: per prompt, the text that is put before its answers.
        show_origins: say of every streamed token where it came from.
    """

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, tokenizer: Tokenizer, n: int, echoes: Seq[str], *, show_origins: bool = False
    ):
        self._tokenizer = tokenizer
        self._n = n
        self._echoes = echoes
        self._origins = Origins(tokenizer) if show_origins else None
        self._offsets: dict[int, int] = {}  # characters of an answer whose tokens were reported

    def opening(self, number: int) -> Json | None:
        echo = self._echoes[number // self._n]
        return self._choice(number, echo) if echo else None

    def chunk(self, number: int, delta: Delta) -> list[Json]:
        if not (delta.text or delta.token_ids or delta.finish_reason):
            return []
        choice = self._choice(number, delta.text, delta.finish_reason, delta.stop_reason)
        if delta.logprobs:
            choice["logprobs"] = self._logprobs(number, delta.logprobs)
        if self._origins is not None:
            choice["tokens"] = self._origins.of(number, delta)
        return [choice]

    def whole(self, number: int, answer: CompletionOutput) -> Json:
        text = self._echoes[number // self._n] + answer.text
        choice = self._choice(number, text, answer.finish_reason, answer.stop_reason)
        if answer.logprobs is not None:
            choice["logprobs"] = self._logprobs(number, answer.logprobs)
        return choice

    def _choice(self, number: int, text: str, finish: str | None = None, stop: Any = None) -> Json:
        return {
            "index": number,
            "text": text,
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": stop,
        }

    def _logprobs(self, number: int, entries: Seq[TokenLogprobs]) -> Json:
        offset = self._offsets.get(number, len(self._echoes[number // self._n]))
        offsets = []
        for entry in entries:
            offsets.append(offset)
            offset += len(self._tokenizer.decode([entry.token_id]))
        self._offsets[number] = offset
        return {
            "tokens": [self._text(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {self._text(token): value for token, value in entry.top}
                | {self._text(entry.token_id): entry.logprob}
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special=False)
