"""The routes. What they do is in the files beside: bodies in `schema`, answers in `*_form`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

from slipstream import __version__
from slipstream.server import errors
from slipstream.server.gate import Gate
from slipstream.server.live import page_data, take_snapshot
from slipstream.server.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from slipstream.server.service import Service


def create_app(service: Service) -> FastAPI:
    """The routes around a service."""
    settings = service.settings

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.thread.start()
        yield
        await service.thread.stop(settings.grace_sec)

    # The pages FastAPI would make of the document load scripts from elsewhere.
    app = FastAPI(
        title="Slipstream", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    errors.install(app)
    app.add_middleware(Gate, api_keys=settings.api_keys, max_body_bytes=settings.max_body_bytes)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    _add_api(app, service)
    _add_views(app, service)
    return app


def _add_api(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        envelope = service.envelope("cmpl", body.model)
        # Tokenizing and compiling take their time; other streams go on meanwhile.
        form, work = await asyncio.to_thread(service.prepare_completion, body, envelope)
        return await service.answer(request, body, envelope, form, work)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        envelope = service.envelope("chatcmpl", body.model)
        form, work = await asyncio.to_thread(service.prepare_chat, body, envelope)
        return await service.answer(request, body, envelope, form, work)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return service.models()

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.envelope("model", name)
        return next(entry for entry in service.models()["data"] if entry["id"] == name)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        service.envelope("tokenize", body.model)
        return await asyncio.to_thread(service.tokenize, body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        service.envelope("detokenize", body.model)
        return {"prompt": service.loaded.tokenizer.decode(body.tokens, skip_special=False)}


def _add_views(app: FastAPI, service: Service) -> None:
    page = files("slipstream.server").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/live", include_in_schema=False)
    async def live() -> dict[str, Any]:
        data = await service.thread.ask(lambda engine: page_data(engine, service.history))
        return data | {"model": service.settings.model_names[0]}

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        snapshot = await service.thread.ask(take_snapshot)
        return Response(service.metrics.render(snapshot), media_type=CONTENT_TYPE_LATEST)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.thread.is_healthy else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}
