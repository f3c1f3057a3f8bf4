"""What clients may send: bodies of requests, and the sampling parameters they mean.

Names and defaults are the OpenAI API's, further ones vLLM's. Types are checked here and ranges by
`SamplingParams`; a field nobody knows is an error, so that none is dropped in silence.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slipstream.core.errors import RequestError
from slipstream.core.params import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # as the API has it


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # there is none to leave out


class Speculative(Body):
    """How to speculate for one request; the tokens are the same either way."""

    enabled: bool = True
    num_tokens: Annotated[int, Field(ge=0)] | None = None


class JsonSchema(Body):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's field of that name: one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class Prediction(Body):
    """The text the client expects."""

    type: Literal["content"] = "content"
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Generation(Body):
    """What completions and chats have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None  # for the client's own books

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    return_origins: bool = False
    speculative: Speculative = Speculative()
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None

    def sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The parameters this body means.

        Raises:
            RequestError: a value out of its range.
        """
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
        }
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
            logit_bias=_token_keys(self.logit_bias or {}),
            seed=self.seed,
            n=self.n,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(stop),
            include_stop_str_in_output=self.include_stop_str_in_output,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=logprobs,
            speculative=self.speculative.enabled,
            num_speculative_tokens=self.speculative.num_tokens,
        )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Generation):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    echo: bool = False
    logprobs: int | None = None


class FunctionSpec(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: FunctionSpec


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: FunctionName


class ChatBody(Generation):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None  # for the client's own books, as are these
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def _token_keys(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise RequestError("logit_bias must map token ids to numbers") from None
