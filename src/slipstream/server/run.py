"""Serving until a signal comes, and then ending well."""

import socket
import sys
from types import FrameType

import uvicorn

from slipstream.core.errors import ConfigError
from slipstream.server.app import create_app
from slipstream.server.service import Service

# What is sent last must still reach its client.
_LAST_WORDS_SEC = 3
_SWITCH_SEC = 5e-4


def bind(host: str, port: int) -> socket.socket:
    """Take an address; 0 is any free port. Nobody can connect before a server runs on it.

    Raises:
        ConfigError: somebody else has it, or it is none.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, or asyncio leaves Nagle's algorithm on and chunks of a stream wait 40 ms.
    taken = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((host, port))
    except OSError as error:
        taken.close()
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error.strerror}; choose another --port"
        ) from None
    return taken


class Server(uvicorn.Server):
    """Stops taking work as soon as it is told to end; running answers have their grace.

    Args:
        address: from `bind`.
    """

    def __init__(self, service: Service, address: socket.socket):
        grace_sec = service.settings.grace_sec
        super().__init__(
            uvicorn.Config(
                create_app(service),
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=int(grace_sec) + _LAST_WORDS_SEC,
            )
        )
        self._service = service
        self._address = address

    @property
    def url(self) -> str:
        host, port = self._address.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        # The event loop and the engine take turns; neither should wait as long as Python's 5 ms.
        sys.setswitchinterval(_SWITCH_SEC)
        super().run(sockets or [self._address])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.thread.drain(self._service.settings.grace_sec)
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(f"slipstream: listening on {self.url}", file=sys.stderr)
