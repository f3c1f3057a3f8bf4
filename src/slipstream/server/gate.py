"""What is turned away before anybody reads it: wrong keys, and bodies that are too large."""

import hmac
from collections.abc import Sequence as Seq

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.server.errors import ApiError, respond

_GUARDED = ("/v1/", "/tokenize", "/detokenize")


class Gate:
    """ASGI middleware.

    Args:
        api_keys: any of them opens; none at all and everybody may enter.
        max_body_bytes: of a request.
    """

    def __init__(self, app: ASGIApp, api_keys: Seq[str] = (), max_body_bytes: int = 10 * 2**20):
        self.app = app
        self.api_keys = [key.encode() for key in api_keys]
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            body = await self._read(scope, receive)
        except ApiError as error:
            await respond(error)(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)

    def _check_key(self, scope: Scope) -> None:
        if not self.api_keys or not scope["path"].startswith(_GUARDED):
            return
        if scope["method"] == "OPTIONS":
            return  # browsers ask without a key whether they may send one
        header = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, given = header.partition(b" ")
        # Every key is compared, each in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(given.strip(), key) for key in self.api_keys]
        if kind.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "missing or wrong API key; send it as Authorization: Bearer KEY",
                "authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """The body, as long as it is not too large."""
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        size = int(announced) if announced.isdigit() else 0
        chunks: list[bytes] = []
        more = True
        while more and size <= self.max_body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            chunks.append(message.get("body", b""))
            more = message.get("more_body", False)
            size = max(size, sum(map(len, chunks)))
        if size > self.max_body_bytes:
            raise ApiError(
                413,
                f"the body is larger than {self.max_body_bytes:,} bytes",
                code="body_too_large",
                headers={"Connection": "close"},
            )
        return b"".join(chunks)
