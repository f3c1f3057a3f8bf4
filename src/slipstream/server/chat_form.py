"""Answers as POST /v1/chat/completions writes them, tool calls among them."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.core.outputs import CompletionOutput, Delta, TokenLogprobs
from slipstream.loading.tokenizer import Tokenizer
from slipstream.server.reply import Json, Origins
from slipstream.server.tools import Call, CallReader, Format


class ChatForm:
    """Chat completions.

    Args:
        tokenizer: of the model.
        request_id: begins the ids of tool calls.
        calls: how the model writes tool calls, where it may make any.
        show_origins: say of every streamed token where it came from.
    """

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: Tokenizer,
        request_id: str,
        calls: Format | None = None,
        *,
        show_origins: bool = False,
    ):
        self._tokenizer = tokenizer
        self._request_id = request_id
        self._calls = calls
        self._origins = Origins(tokenizer) if show_origins else None
        self._readers: dict[int, CallReader] = {}

    def opening(self, number: int) -> Json:
        return self._chunk(number, {"role": "assistant", "content": ""})

    def chunk(self, number: int, delta: Delta) -> list[Json]:
        choices = [self._chunk(number, part) for part in self._parts(number, delta)]
        if not choices and (delta.logprobs or self._origins is not None):
            choices = [self._chunk(number, {})]
        if choices and delta.logprobs:
            choices[0]["logprobs"] = self._logprobs(delta.logprobs)
        if choices and self._origins is not None:
            choices[0]["tokens"] = self._origins.of(number, delta)
        if delta.finish_reason is not None:
            finish = self._finish(delta.finish_reason, self._readers.get(number))
            choices.append(self._chunk(number, {}, finish, delta.stop_reason))
        return choices

    def whole(self, number: int, answer: CompletionOutput) -> Json:
        content, reader, calls = answer.text, None, []
        if self._calls is not None:
            reader = CallReader(self._calls)
            pieces = [*reader.push(answer.text), *reader.finish()]
            content = "".join(piece for piece in pieces if isinstance(piece, str))
            calls = [piece for piece in pieces if isinstance(piece, Call)]
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content.strip() or None
            message["tool_calls"] = [self._call(number, i, call) for i, call in enumerate(calls)]
        return {
            "index": number,
            "message": message,
            "logprobs": None if answer.logprobs is None else self._logprobs(answer.logprobs),
            "finish_reason": self._finish(answer.finish_reason, reader),
            "stop_reason": answer.stop_reason,
        }

    def _parts(self, number: int, delta: Delta) -> Iterable[Json]:
        """What a delta adds to the message."""
        if self._calls is None:
            return [{"content": delta.text}] if delta.text else []
        reader = self._readers.setdefault(number, CallReader(self._calls))
        num_before = reader.num_calls
        pieces = list(reader.push(delta.text))
        if delta.finish_reason is not None:
            pieces += reader.finish()
        parts: list[Json] = []
        for piece in pieces:
            if isinstance(piece, str):
                parts.append({"content": piece})
            else:
                call = self._call(number, num_before, piece)
                parts.append({"tool_calls": [{"index": num_before} | call]})
                num_before += 1
        return parts

    def _chunk(self, number: int, delta: Json, finish: str | None = None, stop: Any = None) -> Json:
        return {
            "index": number,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": stop,
        }

    def _call(self, number: int, index: int, call: Call) -> Json:
        return {
            "id": f"call_{self._request_id}_{number}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _finish(self, reason: str, reader: CallReader | None) -> str:
        called = reader is not None and reader.num_calls > 0
        return "tool_calls" if called and reason == "stop" else reason

    def _logprobs(self, entries: Seq[TokenLogprobs]) -> Json:
        return {
            "content": [
                self._logprob(entry.token_id, entry.logprob)
                | {"top_logprobs": [self._logprob(*pair) for pair in entry.top]}
                for entry in entries
            ],
            "refusal": None,
        }

    def _logprob(self, token: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token, skip_special=False)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}
