"""Tool calls found in text, whole and in every pair of pieces."""

import json
from typing import Any

import pytest

from slipstream.core.errors import RequestError
from slipstream.server.schema import ChatBody
from slipstream.server.tools import Call, CallReader, Format, offered_tools, tool_format

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = [{"function": {"name": "f"}}, {"function": {"name": "g"}}]


def read(form: Format, *texts: str) -> tuple[str, list[Call]]:
    reader = CallReader(form)
    pieces = [piece for text in texts for piece in reader.push(text)]
    pieces += reader.finish()
    calls = [piece for piece in pieces if isinstance(piece, Call)]
    assert reader.num_calls == len(calls)
    return "".join(piece for piece in pieces if isinstance(piece, str)), calls


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", "plain < text <tool", "plain < text <tool", []),
        ("hermes", CALL, "", ["f"]),
        ("hermes", f"Look: {CALL} and {CALL}.", "Look:  and .", ["f", "f"]),
        ("hermes", CALL.removesuffix("</tool_call>"), "", ["f"]),
        ("hermes", "<tool_call>{broken</tool_call>!", "<tool_call>{broken</tool_call>!", []),
        ("hermes", ' {"name": "f", "arguments": {"x": 1}}', "", ["f"]),
        ("hermes", '{"name": "f", "parameters": {"x": 1}}', None, []),
        ("hermes", "<tool_call>[]", "<tool_call>[]", []),
        ("llama", '{"name": "f", "parameters": {"x": 1}}', "", ["f"]),
        ("llama", '{"no": "call"}', '{"no": "call"}', []),
        ("llama", ' text {"name": "f", "parameters": {}}', None, []),
    ],
)
def test_calls_in_every_pair_of_pieces(
    form: Format, text: str, content: str | None, calls: list[str]
) -> None:
    for cut in range(len(text) + 1):
        found, read_calls = read(form, text[:cut], text[cut:])
        assert found == (text if content is None else content)
        assert [call.name for call in read_calls] == calls
        assert all(json.loads(call.arguments) == {"x": 1} for call in read_calls)


def test_content_is_not_held_back_longer_than_needed() -> None:
    reader = CallReader("hermes")
    assert list(reader.push("hello <tool")) == ["hello "]
    assert list(reader.push("box")) == ["<toolbox"]
    assert list(reader.push(" {")) == [" {"]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{{ tools }} <tool_call>", "hermes"),
        ('{{ tools }} "parameters": dict', "llama"),
        ("{{ tools }} [TOOL_CALLS]", None),
    ],
)
def test_the_template_says_how_calls_are_written(template: str | None, form: Format | None) -> None:
    assert tool_format(template) == form


@pytest.mark.parametrize(
    ("fields", "form", "says"),
    [
        ({"tools": TOOLS}, None, "has no tools"),
        ({"tool_choice": "required"}, "hermes", "needs tools"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "h"}}}, "hermes", "'h'"),
    ],
)
def test_tools_that_cannot_be(fields: dict[str, Any], form: Format | None, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        offered_tools(ChatBody.model_validate({"messages": []} | fields), form)


def test_tools_that_may_not_be_called_are_not_offered() -> None:
    body = ChatBody.model_validate({"messages": [], "tools": TOOLS, "tool_choice": "none"})
    assert offered_tools(body, None) == []
