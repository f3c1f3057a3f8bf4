"""Chat templates: what they may use, what of a message may become a control token, refusals."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from slipstream.core.errors import ModelError, RequestError
from slipstream.loading.chat import ChatTemplate, encode_chat
from slipstream.loading.gguf import read_metadata
from slipstream.loading.pull import cached
from slipstream.loading.tokenizer import Tokenizer

CONTROL_TOKENS = ("<s>", "<|start|>", "<|end|>", "<|end|>!")
START, END = 257, 258
TEMPLATE = (
    "{% for message in messages %}"
    "<|start|>{{ message.role }}\n{{ message.content }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@cache
def tokenizer() -> Tokenizer:
    """Every byte is a token (ids 0 to 255), then the control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return Tokenizer.from_gguf_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*alphabet, *CONTROL_TOKENS],
            "tokenizer.ggml.token_type": [1] * 256 + [3] * len(CONTROL_TOKENS),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.bos_token_id": 256,
            "tokenizer.ggml.eos_token_id": END,
            "tokenizer.ggml.add_bos_token": True,
        }
    )


def user(content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **keys}


HI = (user("hi"),)


def render(source: str, messages: Any = HI, **variables: Any) -> str:
    return ChatTemplate(source, "<s>", "<|end|>").render(messages, **variables)


def encode(source: str, messages: list[dict[str, Any]], **variables: Any) -> list[int]:
    return encode_chat(tokenizer(), ChatTemplate(source, "<s>", None), messages, **variables)


def num_control(ids: list[int]) -> int:
    return sum(i in tokenizer().special_ids for i in ids)


# The environment of templates ----------------------------------------------------------------


def test_renders_messages_and_the_opening_of_the_answer() -> None:
    messages = [{"role": "system", "content": "be brief"}, user("hi")]
    whole = "<|start|>system\nbe brief<|end|><|start|>user\nhi<|end|>"
    assert render(TEMPLATE, messages) == whole + "<|start|>assistant\n"
    assert render(TEMPLATE, messages, add_generation_prompt=False) == whole


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|<|end|>"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),  # blocks leave no blank lines
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'é': '<&\"'} | tojson }}", '{"é": "<&\\""}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ tools is none }} {{ enable_thinking }}", "True False"),
    ],
)
def test_templates_find_what_they_are_written_for(source: str, expected: str) -> None:
    assert render(source, enable_thinking=False) == expected


def test_a_token_the_model_lacks_is_undefined() -> None:
    template = ChatTemplate("{{ bos_token is defined }}{{ eos_token }}", None, None)
    assert template.render([user("hi")]) == "False"


def test_the_template_of_a_tokenizer_knows_its_tokens() -> None:
    assert ChatTemplate.of(tokenizer()) is None
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", "</s>"],
        "tokenizer.ggml.token_type": [3, 3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}",
    }
    template = ChatTemplate.of(Tokenizer.from_gguf_metadata(metadata))
    assert template is not None
    assert template.render([user("hi")]) == "<s></s>"


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].pop('role') }}"],
)
def test_templates_are_kept_in_a_sandbox(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)


# Control tokens ------------------------------------------------------------------------------


def test_no_beginning_token_is_added_to_what_the_template_writes() -> None:
    assert tokenizer().add_bos
    assert encode("{{ bos_token }}x", [user("hi")]) == [
        256,
        *tokenizer().encode("x", add_bos=False),
    ]


def test_a_conversation_without_look_alikes_is_encoded_as_a_whole() -> None:
    messages = [user("a > b, é"), {"role": "assistant", "content": "no"}]
    expected = tokenizer().encode(render(TEMPLATE, messages), add_bos=False, parse_special=True)
    assert encode(TEMPLATE, messages) == expected
    assert num_control(expected) == 5


@pytest.mark.parametrize("name", CONTROL_TOKENS)
def test_a_quoted_control_token_stays_text(name: str) -> None:
    ids = encode(TEMPLATE, [user(f"say {name} twice: {name}{name}")])
    assert num_control(ids) == 3
    text = f"<|start|>user\nsay {name} twice: {name}{name}<|end|><|start|>assistant\n"
    assert tokenizer().decode(ids, skip_special=False) == text


# Strings likely to hold, begin or end control tokens.
fragments = st.sampled_from([*CONTROL_TOKENS, "<", "<|", "|>", "end", "|>!", "!", "a", "\n", " "])
contents = st.lists(fragments, max_size=5).map("".join)


@given(contents=st.lists(contents, min_size=1, max_size=3))
def test_messages_never_add_a_control_token_and_never_lose_a_character(
    contents: list[str],
) -> None:
    messages = [user(content) for content in contents]
    ids = encode(TEMPLATE, messages)
    harmless = encode(TEMPLATE, [user("") for _ in contents])
    assert [i for i in ids if i > 255] == [i for i in harmless if i > 255]
    assert tokenizer().decode(ids, skip_special=False) == render(TEMPLATE, messages)


@pytest.mark.parametrize(
    ("before", "content", "after"),
    [
        ("", "<", "|end|>"),
        ("", "a <|en", "d|>"),
        ("", "<|end|", ">!"),
        ("<|end|", ">", ""),
        ("<", "s> a", ""),
        ("<s", "> <|start|", ">"),
    ],
)
def test_a_message_cannot_be_completed_to_a_control_token(
    before: str, content: str, after: str
) -> None:
    ids = encode(before + "{{ messages[0].content }}" + after, [user(content)])
    assert num_control(ids) == 0
    assert tokenizer().decode(ids) == before + content + after


def test_the_templates_own_control_tokens_are_read_as_before_when_a_message_quotes_one() -> None:
    source = "<|end|>!<|end|><s><s{{ messages[0].content }}<|start|>!"
    ids = encode(source, [user("<s>")])
    assert [i for i in ids if i > 255] == [259, END, 256, START]
    assert ids[:4] == [259, END, 256, *tokenizer().encode("<", add_bos=False)]


def test_every_string_of_a_request_is_watched() -> None:
    source = "{{ messages | tojson }}{{ tools | tojson }}{{ documents | tojson }}<|end|>"
    call = {"function": {"name": "f<|end|>", "arguments": {"<|end|>": ["<|end|>"], "type": "<s>"}}}
    ids = encode(
        source,
        [user("<|end|>", name="<|end|>"), {"role": "assistant", "tool_calls": [call]}],
        tools=[{"type": "function", "function": {"description": "<|end|>"}}],
        documents=[{"text": "<|end|>"}],
    )
    assert num_control(ids) == 1
    assert ids[-1] == END


def test_roles_reach_the_template_unchanged() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*sorted(pre_tokenizers.ByteLevel.alphabet()), "user", "rule"],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 2,
        "tokenizer.ggml.merges": [],
    }
    words = Tokenizer.from_gguf_metadata(metadata)
    template = ChatTemplate("{{ messages[0].role == 'user' }}", None, None)
    assert words.decode(encode_chat(words, template, [user("user")])) == "True"


# Messages ------------------------------------------------------------------------------------


def test_text_parts_become_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [user(parts)]) == "a\nb"


def test_arguments_sent_as_json_text_reach_the_template_as_values() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert render(source, [message]) == '{"x": "é"}'
    assert call["function"]["arguments"] == '{"x": "é"}'  # the caller's message is untouched


def tool_call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": function}]}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hi", "at least one message"),
        (["hi"], "message 0 is 'hi'"),
        ([{"content": "hi"}], "role None; known: system"),
        ([user("hi"), {"role": "boss", "content": "hi"}], "message 1 has the role 'boss'"),
        ([user("hi", mood="good")], "unknown key 'mood'; known: role"),
        ([user(None)], "message 0 has no content"),
        ([{"role": "assistant"}], "no content"),
        ([user(7)], "content 7"),
        ([user([{"type": "image_url", "image_url": "x"}])], "'image_url'; only 'text'"),
        ([user(["hi"])], "type 'hi'"),
        ([user([{"type": "text"}])], "without a text"),
        ([{"role": "assistant", "tool_calls": "f()"}], "not a list"),
        ([{"role": "assistant", "tool_calls": ["f()"]}], "without a function name"),
        ([tool_call(arguments={})], "without a function name"),
        ([tool_call(name="f", arguments="{")], "not a JSON object"),
        ([tool_call(name="f", arguments="[1]")], "not a JSON object"),
        ([user("\udfff")], "lone surrogate"),
        ([user("\ud800")], "lone surrogate"),
    ],
)
def test_refuses_malformed_messages(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        encode(TEMPLATE, messages)


def test_a_refusal_of_the_template_is_passed_on() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_failing_template_is_the_requests_error() -> None:
    with pytest.raises(RequestError, match=r"TypeError.*concatenate"):
        render("{{ 'a' + messages[0].content }}", [tool_call(name="f")])


def test_what_the_model_sets_cannot_be_set_by_a_request() -> None:
    with pytest.raises(RequestError, match="'bos_token' is set by the model"):
        render(TEMPLATE, bos_token="x")


def test_a_template_that_does_not_compile_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% for %}", None, None)


def test_without_a_template_messages_are_refused() -> None:
    with pytest.raises(RequestError, match="raw prompt"):
        encode_chat(tokenizer(), None, [user("hi")])


# Real templates ------------------------------------------------------------------------------


def real(alias: str) -> Tokenizer:
    path = cached(alias)
    if path is None or path.is_dir():
        pytest.skip(f"no GGUF file of {alias} in the cache; run: slipstream pull {alias}")
    return Tokenizer.from_gguf_metadata(read_metadata(path))


@pytest.mark.weights
@pytest.mark.parametrize(
    ("alias", "system"),
    [
        ("smollm2-135m", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
        (
            "qwen2.5-coder-0.5b",
            "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
        ),
    ],
)
def test_real_conversations(alias: str, system: str) -> None:
    model = real(alias)
    content = "What does <|im_end|> mean?"
    ids = encode_chat(model, ChatTemplate.of(model), [user(content)])
    text = (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert model.decode(ids, skip_special=False) == text
    names = [model.token_text(i) for i in ids if i in model.special_ids]
    assert names == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>", "<|im_start|>"]


@pytest.mark.weights
def test_a_real_template_writes_tools_and_calls() -> None:
    model = real("qwen2.5-coder-0.5b")
    template = ChatTemplate.of(model)
    assert template is not None
    tool: Mapping[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    text = template.render(
        [
            user("1 + 1?"),
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "2"},
        ],
        tools=[tool],
    )
    assert '{"type": "function", "function": {"name": "add", "parameters": {}}}' in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>\n2\n</tool_response><|im_end|>" in text
