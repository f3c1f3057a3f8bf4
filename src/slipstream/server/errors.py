"""Errors in the shape of the OpenAI API: {"error": {message, type, param, code}}."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from slipstream.core.errors import SlipstreamError

_log = logging.getLogger(__name__)


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: one line for people.
        kind: of error, as the API names it.
        param: the field at fault.
        code: for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def overloaded(message: str, retry_after_sec: int) -> ApiError:
    """429: come back later."""
    headers = {"Retry-After": str(retry_after_sec)}
    return ApiError(429, message, "overloaded_error", code="queue_full", headers=headers)


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", "server_error", code="shutting_down")


def engine_failed(request_id: str) -> ApiError:
    return ApiError(
        500,
        f"the engine failed on request {request_id}; others were not affected",
        "server_error",
        code="engine_error",
    )


def as_json(content: Any) -> str:
    """JSON of anything; half a surrogate pair, which no client can decode, becomes "?"."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()


def respond(error: ApiError) -> Response:
    return Response(as_json(error.body), error.status, error.headers, "application/json")


def install(app: FastAPI) -> None:
    """Make every error of an app one of these."""

    @app.exception_handler(ApiError)
    async def _(request: Request, error: ApiError) -> Response:
        return respond(error)

    @app.exception_handler(SlipstreamError)
    async def _(request: Request, error: SlipstreamError) -> Response:
        return respond(ApiError(400, str(error)))

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        # Of a union every member complains, each under its own name; the field is before those.
        where = [str(part) for part in first["loc"] if part != "body"]
        param = ".".join(where) or None
        message = f"{param}: {first['msg']}" if param else first["msg"]
        return respond(ApiError(400, message, param=param))

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {request.url.path}"
        headers = error.headers
        return respond(ApiError(error.status_code, message, headers=headers))

    @app.exception_handler(Exception)
    async def _(request: Request, error: Exception) -> Response:
        _log.error("a request failed", exc_info=error)
        return respond(ApiError(500, "internal error; the log has more", "server_error"))
