"""From what clients write to token ids."""

from collections.abc import Sequence as Seq
from typing import Any

from slipstream.build import LoadedModel
from slipstream.core.errors import RequestError
from slipstream.loading.chat import encode_chat
from slipstream.server.schema import ChatBody, CompletionBody, Tool

# Arguments of the encoder, which are no variables of the template.
_RESERVED = {"tokenizer", "template", "messages", "tools", "add_generation_prompt"}


def completion_prompts(loaded: LoadedModel, body: CompletionBody) -> list[list[int]]:
    """The prompts of a completion: texts or token ids, one or several."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [loaded.tokenizer.encode(prompt)]
    if not prompt:
        raise RequestError("the prompt is empty; it needs at least one token")
    if isinstance(prompt[0], int):
        return [prompt]
    return [
        loaded.tokenizer.encode(each) if isinstance(each, str) else list(each) for each in prompt
    ]


def echoes(loaded: LoadedModel, body: CompletionBody, prompts: Seq[Seq[int]]) -> list[str]:
    """The text before each prompt's answers."""
    if not body.echo:
        return [""] * len(prompts)
    if body.logprobs is not None:
        raise RequestError(
            "log-probabilities of the prompt are not computed; drop echo or logprobs"
        )
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    texts = given if isinstance(given[0], str) else map(loaded.tokenizer.decode, prompts)
    return [str(text) for text in texts]


def chat_prompt(loaded: LoadedModel, body: ChatBody, tools: Seq[Tool] = ()) -> list[int]:
    """A conversation, up to where the assistant begins to speak."""
    variables = body.chat_template_kwargs or {}
    if reserved := sorted(_RESERVED & variables.keys()):
        raise RequestError(f"chat_template_kwargs cannot set {reserved[0]!r}; it has a field")
    return encode_messages(
        loaded,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        tools=[tool.model_dump(exclude_none=True) for tool in tools] or None,
        **variables,
    )


def encode_messages(
    loaded: LoadedModel, messages: Seq[dict[str, Any]], /, **variables: Any
) -> list[int]:
    """The token ids of a conversation.

    Raises:
        RequestError: a message is malformed, or there is no chat template.
    """
    # Clients send back what they were answered, with fields that say nothing.
    said = [{key: value for key, value in m.items() if value not in (None, [])} for m in messages]
    return encode_chat(loaded.tokenizer, loaded.chat_template, said, **variables)
