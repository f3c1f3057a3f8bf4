"""A server in this process, on a free port, for tests that speak HTTP to it."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slipstream import LLM
from slipstream.server.run import Server, bind
from slipstream.server.service import ServerSettings, Service


@contextmanager
def serving(llm: LLM, **settings: Any) -> Iterator[str]:
    """Serve a model; yields the address, and checks at the end that nothing leaked."""
    options: dict[str, Any] = {"model_names": ("tiny",)} | settings
    service = Service(llm.loaded, llm.engine, ServerSettings(**options))
    server = Server(service, bind("127.0.0.1", 0))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield server.url
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join()
    assert_idle(llm)


def assert_idle(llm: LLM) -> None:
    """No request is left, and every block is back."""
    llm.engine.check_integrity()
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
