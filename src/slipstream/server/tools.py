"""Tool calls: how a model writes them, and how they are found in its text again.

    hermes   <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>, among other text
    llama    {"name": "f", "parameters": {...}} and nothing else

Which one a model was taught shows in its chat template.
"""

import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.core.errors import RequestError
from slipstream.server.schema import ChatBody, NamedTool, Tool

Format = Literal["hermes", "llama"]

_BEGIN, _END = "<tool_call>", "</tool_call>"
_ARGUMENTS = {"hermes": "arguments", "llama": "parameters"}


@dataclass(frozen=True, slots=True)
class Call:
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str


def tool_format(chat_template: str | None) -> Format | None:
    """How a model with this template calls tools; None if it does not, or in no way we read."""
    if chat_template is None or "tools" not in chat_template:
        return None
    if _BEGIN in chat_template:
        return "hermes"
    return "llama" if '"parameters":' in chat_template else None


def offered_tools(body: ChatBody, form: Format | None) -> list[Tool]:
    """The tools a request lets the model call.

    Raises:
        RequestError: the model knows no tools, or the chosen one is not among them.
    """
    if not body.tools or body.tool_choice == "none":
        if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
            raise RequestError("tool_choice needs tools")
        return []
    if form is None:
        raise RequestError("the model's chat template has no tools; drop tools")
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        if name not in (tool.function.name for tool in body.tools):
            raise RequestError(f"tool_choice names {name!r}, which is not among the tools")
    return body.tools


def forced_call(body: ChatBody, tools: Seq[Tool], form: Format, style: dict[str, Any]) -> str:
    """A grammar, in Lark's notation, of exactly one call of the tools a request insists on.

    Args:
        style: of the JSON, for the grammar's compiler.
    """
    chosen = body.tool_choice
    if isinstance(chosen, NamedTool):
        tools = [tool for tool in tools if tool.function.name == chosen.function.name]
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                _ARGUMENTS[form]: tool.function.parameters or {"type": "object"},
            },
            "required": ["name", _ARGUMENTS[form]],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    call = json.dumps({"anyOf": calls, "x-guidance": style})
    before, after = (f"{_BEGIN}\n", f"\n{_END}") if form == "hermes" else ("", "")
    quoted = [json.dumps(text) for text in (before, after)]
    return f"start: {quoted[0]} call {quoted[1]}\ncall: %json {call}"


class CallReader:
    """Divides the text of one answer into content and calls, while it streams.

    Text is held back as long as it may belong to a call; a call that cannot be read is content.
    Models of the first kind, too, may write a call and nothing else: an answer that begins with a
    brace is judged at its end.
    """

    def __init__(self, form: Format):
        self.form = form
        self.num_calls = 0
        self._held = ""
        self._may_be_bare = True  # until something else than a brace has come

    def push(self, text: str) -> Iterator[str | Call]:
        """Add text; what is certain now."""
        self._held += text
        if self._may_be_bare:
            beginning = self._held.lstrip()
            if not beginning or beginning.startswith("{"):
                return
            self._may_be_bare = False
        if self.form == "llama":
            if self._held:
                yield self._release()
            return
        while True:
            before, found, rest = self._held.partition(_BEGIN)
            if not found:
                sure = len(self._held) - _overlap(self._held, _BEGIN)
                if sure:
                    content, self._held = self._held[:sure], self._held[sure:]
                    yield content
                return
            inside, found, after = rest.partition(_END)
            if not found:
                if before:
                    self._held = self._held[len(before) :]
                    yield before
                return
            if before:
                yield before
            self._held = after
            yield self._read(inside) or f"{_BEGIN}{inside}{_END}"

    def finish(self) -> Iterator[str | Call]:
        """What is left when the answer is over; a last call may lack its end."""
        text = self._release()
        if text:
            yield self._read(text.removeprefix(_BEGIN)) or text

    def _release(self) -> str:
        text, self._held = self._held, ""
        return text

    def _read(self, text: str) -> Call | None:
        try:
            call = json.loads(text)
        except ValueError:
            return None
        key = _ARGUMENTS[self.form]
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        if not isinstance(call.get(key), dict):
            return None
        self.num_calls += 1
        return Call(call["name"], json.dumps(call[key], ensure_ascii=False))


def _overlap(text: str, marker: str) -> int:
    """How many of the last characters of a text may be the beginning of a marker."""
    most = min(len(text), len(marker) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(marker[:n])), 0)
