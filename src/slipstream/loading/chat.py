"""Chat messages to token ids, through the Jinja template a model carries.

Templates are written for the environment Hugging Face renders them in, so that is rebuilt here,
inside a sandbox: a template is code from a model file.

Control tokens come from the template and never from a message: `special_text` keeps the two apart.
Known limit: a template that writes "<|" + tool name + "|>" around a string of a message makes a
control token by its own will, and it is taken as such.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.core.errors import ModelError, RequestError
from slipstream.loading.tokenizer import Tokenizer

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


class ChatTemplate:
    """A compiled chat template, with the token names it may write."""

    def __init__(self, source: str, bos_token: str | None, eos_token: str | None) -> None:
        """Compile `source`.

        Raises:
            ModelError: it is not a Jinja template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        names = {"bos_token": bos_token, "eos_token": eos_token}
        self._names = {name: token for name, token in names.items() if token is not None}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """The template of a tokenizer, if it has one."""
        if tokenizer.chat_template is None:
            return None
        bos_token, eos_token = (
            None if token_id is None else tokenizer.token_text(token_id)
            for token_id in (tokenizer.bos_id, tokenizer.eos_id)
        )
        return cls(tokenizer.chat_template, bos_token, eos_token)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of `messages`; to get token ids use `encode_chat`.

        Args:
            messages: in the form of the OpenAI API.
            tools: descriptions of functions the model may call.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: further ones the template knows, such as `enable_thinking`.

        Raises:
            RequestError: a message is malformed, or the template refuses the conversation.
        """
        return self._render(_checked_messages(messages), tools, add_generation_prompt, variables)

    def _render(
        self,
        messages: list[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        if reserved := sorted(self._names.keys() & variables):
            raise RequestError(f"chat template variable {reserved[0]!r} is set by the model")
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **self._names,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # code from a model file may fail in any way
            raise RequestError(
                f"the chat template fails on these messages ({type(error).__name__}: {error}); "
                "give every message a text content"
            ) from error


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> list[int]:
    """The token ids of a conversation; see `ChatTemplate.render` for the arguments.

    No beginning-of-sequence token is added: a template writes its own.

    Raises:
        RequestError: as `render`, or the model has no chat template.
    """
    if template is None:
        raise RequestError("the model has no chat template; send a raw prompt instead of messages")
    checked = _checked_messages(messages)
    special = tokenizer.special_text
    # The role is one of a fixed list, and templates compare it.
    marked = [
        {**_map_strings(message, special.mark), "role": message["role"]} for message in checked
    ]
    marked_tools, marked_variables = _map_strings([tools, variables], special.mark)
    text = template._render(marked, marked_tools, add_generation_prompt, marked_variables)
    if [marked, marked_tools, marked_variables] == [checked, tools, variables]:
        return tokenizer.encode(text, add_bos=False, parse_special=True)
    ids: list[int] = []
    for part in special.split(text):
        ids += [part] if isinstance(part, int) else tokenizer.encode(part, add_bos=False)
    return ids


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages as templates expect them: known keys, one text, arguments as objects."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list with at least one message")
    return [_checked_message(i, message) for i, message in enumerate(messages)]


def _checked_message(index: int, message: Mapping[str, Any]) -> Message:
    where = f"message {index}"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {message!r}; send an object with role and content")
    # A key that is null says nothing; clients send back answers with many of those.
    checked = {key: value for key, value in message.items() if value is not None}
    if unknown := sorted(checked.keys() - set(_KEYS)):
        raise RequestError(f"{where} has the unknown key {unknown[0]!r}; known: {', '.join(_KEYS)}")
    role = checked.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where} has the role {role!r}; known: {', '.join(_ROLES)}")
    if "tool_calls" in checked:
        checked["tool_calls"] = _checked_tool_calls(where, checked["tool_calls"])
    content = checked.get("content")
    if content is None and not checked.get("tool_calls"):
        raise RequestError(f"{where} has no content; give it a text")
    checked["content"] = None if content is None else _joined_text(where, content)
    return checked


def _joined_text(where: str, content: Any) -> str:
    """The text of a content that is a string or a list of text parts, which become lines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} has the content {content!r}; send a text or a list of parts")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind != "text":
            raise RequestError(f"{where} has a content part of type {kind!r}; only 'text' is known")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where} has a text part without a text")
        texts.append(part["text"])
    return "\n".join(texts)


def _checked_tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects; the API sends them as JSON text."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} has tool_calls that are not a list")
    checked: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where} has a tool call without a function name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = None
        if not isinstance(arguments, Mapping):
            raise RequestError(f"{where} has tool call arguments that are not a JSON object")
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON-like data with every string changed, except keys a template could name."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            key if key.isidentifier() else change(key): _map_strings(item, change)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`: plain JSON, where Jinja's own would escape it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
