"""One model behind the routes: what bodies ask for, as work for the engine's thread."""

import time
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from fastapi import Request, Response

from slipstream.build import LoadedModel
from slipstream.core.errors import RequestError
from slipstream.core.grammar import Grammar
from slipstream.drafters.prediction import PredictionDrafter
from slipstream.engine.engine import Engine
from slipstream.server.chat_form import ChatForm
from slipstream.server.completion_form import CompletionForm
from slipstream.server.engine_thread import EngineThread, Work
from slipstream.server.errors import ApiError
from slipstream.server.live import History
from slipstream.server.logs import RequestLog
from slipstream.server.metrics import Metrics
from slipstream.server.prompts import chat_prompt, completion_prompts, echoes, encode_messages
from slipstream.server.reply import Form
from slipstream.server.schema import ChatBody, CompletionBody, Generation, TokenizeBody
from slipstream.server.stream import Envelope, respond_streaming, respond_whole
from slipstream.server.structured import JSON_STYLE, Grammars
from slipstream.server.tools import forced_call, offered_tools, tool_format

MAX_STOP_STRINGS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How to serve.

    Attributes:
        model_names: what clients may call the model; responses carry the first.
        api_keys: any of them opens; with none there is no lock.
        allowed_origins: web pages elsewhere that may use the server; none by default.
        max_waiting: answers that may wait for a seat; more get 429.
        max_body_bytes: of a request.
        grace_sec: for what is not complete at shutdown.
        log_prompts: put prompts into the log.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_waiting: int = 256
    max_body_bytes: int = 10 * 2**20
    grace_sec: float = 10.0
    log_prompts: bool = False


class Service:
    """One model behind the routes.

    Args:
        engine: over `loaded`; the service's from now on, its drafter extended by predictions.
    """

    def __init__(self, loaded: LoadedModel, engine: Engine, settings: ServerSettings):
        self.loaded = loaded
        self.settings = settings
        self.started = int(time.time())
        self.context_length = engine.context_length
        self.history = History()
        self.metrics = Metrics(settings.model_names[0], self.history)
        self.grammars = Grammars(loaded.tokenizer, loaded.model.config.vocab_size)
        self.tool_format = tool_format(loaded.tokenizer.chat_template)
        drafter = PredictionDrafter(engine.parts.drafter)
        engine.parts = replace(engine.parts, drafter=drafter)
        log = RequestLog(with_prompts=settings.log_prompts)
        self.thread = EngineThread(
            engine,
            max_waiting=settings.max_waiting,
            observers=(self.history, self.metrics, log),
        )
        self._numbers = count()

    def envelope(self, kind: str, model: str | None) -> Envelope:
        """The names of a new response.

        Raises:
            ApiError: clients asked for another model.
        """
        names = self.settings.model_names
        if model is not None and model not in names:
            raise ApiError(
                404,
                f"model {model!r} is not served here; this is {names[0]!r}",
                param="model",
                code="model_not_found",
            )
        # Unique among all servers that were not started in the same second.
        request_id = f"{kind}-{self.started:x}-{next(self._numbers):x}"
        return Envelope(request_id, names[0], int(time.time()))

    async def answer(
        self,
        request: Request,
        body: Generation,
        envelope: Envelope,
        form: Form,
        work: Work,
    ) -> Response:
        """Run work through the engine, and write what comes of it."""
        stream = await self.thread.open(work)
        if body.stream:
            return respond_streaming(
                self.thread, stream, form, envelope, include_usage=body.include_usage
            )
        return await respond_whole(request, self.thread, stream, form, envelope)

    def work(
        self,
        envelope: Envelope,
        body: CompletionBody | ChatBody,
        prompts: list[list[int]],
        grammar: Grammar | None,
    ) -> Work:
        """What a body asks of the engine. Raises RequestError where it cannot be served."""
        if isinstance(body, ChatBody):
            limits = (body.max_completion_tokens, body.max_tokens)
            max_tokens = next((limit for limit in limits if limit is not None), None)
            if body.top_logprobs is not None and not body.logprobs:
                raise RequestError("top_logprobs needs logprobs to be true")
            logprobs = (body.top_logprobs or 0) if body.logprobs else None
        else:
            max_tokens, logprobs = body.max_tokens, body.logprobs
        params = body.sampling_params(max_tokens, logprobs)
        if len(params.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"{len(params.stop)} stop strings; most is {MAX_STOP_STRINGS}")
        predicted: list[int] = []
        if body.prediction is not None and body.prediction.text:
            predicted = self.loaded.tokenizer.encode(body.prediction.text, add_bos=False)
        return Work(
            envelope.request_id,
            prompts,
            params,
            salt=(body.cache_salt or "").encode("utf-8", "replace"),
            grammar=grammar,
            prediction=predicted,
        )

    def prepare_completion(
        self, body: CompletionBody, envelope: Envelope
    ) -> tuple[CompletionForm, Work]:
        prompts = completion_prompts(self.loaded, body)
        work = self.work(envelope, body, prompts, self.grammars.of(body))
        form = CompletionForm(
            self.loaded.tokenizer,
            work.params.n,
            echoes(self.loaded, body, prompts),
            show_origins=body.return_origins,
        )
        return form, work

    def prepare_chat(self, body: ChatBody, envelope: Envelope) -> tuple[ChatForm, Work]:
        tools = offered_tools(body, self.tool_format)
        grammar = self.grammars.of(body)
        if tools and body.tool_choice != "auto":
            if grammar is not None:
                raise RequestError("a request has either a grammar or a tool_choice, not both")
            assert self.tool_format is not None
            grammar = self.grammars.lark(forced_call(body, tools, self.tool_format, JSON_STYLE))
        work = self.work(envelope, body, [chat_prompt(self.loaded, body, tools)], grammar)
        form = ChatForm(
            self.loaded.tokenizer,
            envelope.request_id,
            self.tool_format if tools else None,
            show_origins=body.return_origins,
        )
        return form, work

    def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages")
        tokenizer = self.loaded.tokenizer
        if body.messages is not None:
            tokens = encode_messages(
                self.loaded, body.messages, add_generation_prompt=body.add_generation_prompt
            )
        else:
            add_bos = None if body.add_special_tokens else False
            tokens = tokenizer.encode(body.prompt or "", add_bos=add_bos)
        texts = [tokenizer.token_text(token) for token in tokens]
        return {
            "count": len(tokens),
            "max_model_len": self.context_length,
            "tokens": tokens,
            "token_strs": texts if body.return_token_strs else None,
        }

    def models(self) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [
                {
                    "id": name,
                    "object": "model",
                    "created": self.started,
                    "owned_by": "slipstream",
                    "root": str(self.loaded.name),
                    "max_model_len": self.context_length,
                }
                for name in self.settings.model_names
            ],
        }
