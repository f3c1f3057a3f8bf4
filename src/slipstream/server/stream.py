"""Answers over HTTP: one JSON object, or server-sent events while they come."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from slipstream.server.engine_thread import EngineThread, Stream
from slipstream.server.errors import ApiError, as_json
from slipstream.server.reply import Form, Json, report

T = TypeVar("T")

_CLIENT_CLOSED = 499  # as web servers log it; nobody is there to read it


@dataclass(frozen=True, slots=True)
class Envelope:
    """What frames choices: the names of a response."""

    request_id: str
    model: str
    created: int

    def around(self, kind: str, choices: list[Json], **more: object) -> Json:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


async def respond_whole(
    request: Request, thread: EngineThread, stream: Stream, form: Form, envelope: Envelope
) -> Response:
    """Wait for all answers; a client that leaves before takes its work with it."""
    try:
        outputs = await _unless_gone(request, stream.finish())
    finally:
        thread.close(stream)
    answers = [answer for output in outputs for answer in output.outputs]
    choices = [form.whole(number, answer) for number, answer in enumerate(answers)]
    body = envelope.around(form.whole_object, choices, **report(outputs))
    return Response(as_json(body), media_type="application/json")


def respond_streaming(
    thread: EngineThread, stream: Stream, form: Form, envelope: Envelope, *, include_usage: bool
) -> Response:
    """Send what the engine says as it says it."""
    return _EventResponse(thread, stream, _events(stream, form, envelope, include_usage))


class _EventResponse(StreamingResponse):
    """Server-sent events; gives the stream up however the response ends, even unbegun."""

    def __init__(self, thread: EngineThread, stream: Stream, events: AsyncIterator[str]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._thread = thread
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._thread.close(self._stream)


async def _events(
    stream: Stream, form: Form, envelope: Envelope, include_usage: bool
) -> AsyncIterator[str]:
    usage = {"usage": None} if include_usage else {}

    def event(choice: Json) -> str:
        return _event(envelope.around(form.chunk_object, [choice], **usage))

    try:
        for number in range(stream.work.num_answers):
            if (opening := form.opening(number)) is not None:
                yield event(opening)
        async for number, delta in stream:
            for choice in form.chunk(number, delta):
                yield event(choice)
        if include_usage:
            outputs = [output for output in stream.outputs if output is not None]
            yield _event(envelope.around(form.chunk_object, [], **report(outputs)))
    except ApiError as error:
        yield _event(error.body)
    yield "data: [DONE]\n\n"


def _event(body: Json) -> str:
    return f"data: {as_json(body)}\n\n"


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of work, or an error as soon as the client is gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(_CLIENT_CLOSED, "the client is gone")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
