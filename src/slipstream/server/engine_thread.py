"""The engine in a thread of its own, and streams of its answers for asyncio.

    event loop                              engine thread
    open(work) ---- inbox ------------->    add
                                            step, step, step ...
    async for ... in stream <-- deltas --   one call into the loop per step

Nobody but this thread touches the engine. A client that reads slowly has its deltas wait in its
stream; the thread never waits for anybody.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from slipstream.core.grammar import Grammar
from slipstream.core.outputs import Delta, RequestOutput
from slipstream.core.params import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.server.errors import ApiError, engine_failed, overloaded, shutting_down

_log = logging.getLogger(__name__)

T = TypeVar("T")

# What a stream is sent: what was added to an answer, all answers to a prompt, or why there is no
# more to come.
Item = Delta | RequestOutput | ApiError

# Of the running mean of how long an answer takes, what the past weighs.
_MEMORY = 0.9
_LONGEST_RETRY_SEC = 60


@dataclass(frozen=True, slots=True)
class Work:
    """One HTTP request's share of the engine: m prompts, each answered n times.

    Attributes:
        request_id: of the HTTP request; the engine's are made from it.
        prompts: token ids.
        salt, grammar, prediction: as `Engine.add` takes them.
    """

    request_id: str
    prompts: list[list[int]]
    params: SamplingParams
    salt: bytes = b""
    grammar: Grammar | None = None
    prediction: list[int] = field(default_factory=list)

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.params.n


class Observer(Protocol):
    """Who watches the engine, from its thread."""

    def saw_step(self, engine: Engine, deltas: Seq[Delta], seconds: float) -> None:
        """A step took so long and brought this."""

    def saw_end(self, output: RequestOutput) -> None:
        """A request of the engine ended, in whatever way."""


class Stream:
    """The answers to one `Work`, as they come. Answer a of prompt p is number p * n + a.

    Attributes:
        outputs: per prompt, once its answers are complete.
    """

    def __init__(self, work: Work):
        self.work = work
        self.outputs: list[RequestOutput | None] = [None] * len(work.prompts)
        self._queue: asyncio.Queue[tuple[int, Item]] = asyncio.Queue()

    @property
    def is_complete(self) -> bool:
        return None not in self.outputs

    def put(self, prompt: int, item: Item) -> None:
        """Called in the event loop."""
        self._queue.put_nowait((prompt, item))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        """Numbers of answers and what is added to them, until all are complete.

        Raises:
            ApiError: the answers were cut off; those that were complete are in `outputs`.
        """
        while not self.is_complete:
            prompt, item = await self._queue.get()
            if isinstance(item, ApiError):
                raise item
            if isinstance(item, Delta):
                yield prompt * self.work.params.n + item.index, item
            else:
                self.outputs[prompt] = item

    async def finish(self) -> list[RequestOutput]:
        """All outputs, once they are complete. Raises as iterating does."""
        async for _ in self:
            pass
        return [output for output in self.outputs if output is not None]


class EngineThread:
    """Runs an engine until stopped.

    Args:
        engine: nobody else's from now on.
        max_waiting: answers that may wait for a seat; more are refused.
        observers: see every step.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 256, observers: Seq[Observer] = ()):
        self.max_waiting = max_waiting
        self.num_seats = engine.parts.scheduler.max_num_seqs
        self._engine = engine
        self._observers = observers
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open: dict[str, tuple[Stream, int]] = {}  # the engine's request -> whose prompt
        self._num_answers = 0  # open ones, counted in the event loop
        self._answer_sec = 1.0
        self._deadline: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def is_healthy(self) -> bool:
        """Whether work is taken in."""
        return self._deadline is None and self._thread.is_alive()

    # In the event loop --------------------------------------------------------------------------

    def start(self) -> None:
        """Begin, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def drain(self, grace_sec: float) -> None:
        """Refuse new work; what is not complete after so many seconds is cut off."""
        deadline = time.monotonic() + grace_sec
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        self._inbox.put(lambda: None)  # wakes it

    async def stop(self, grace_sec: float) -> None:
        """Drain, and wait for the thread to end."""
        self.drain(grace_sec)
        await asyncio.to_thread(self._thread.join)

    async def open(self, work: Work) -> Stream:
        """Queue work; the stream must be read to its end or given to `close`.

        Raises:
            RequestError: a prompt or parameter that cannot be served.
            ApiError: the queue is full, or the server is shutting down.
        """
        if self._deadline is not None:
            raise shutting_down()
        most = self.num_seats + self.max_waiting
        if work.num_answers > most:
            raise ApiError(400, f"{work.num_answers} answers in a request; most is {most}")
        if self._num_answers + work.num_answers > most:
            waiting = max(self._num_answers - self.num_seats, 1)
            seconds = int(1 + self._answer_sec * waiting / self.num_seats)
            raise overloaded(
                f"{self._num_answers} answers are being generated or wait; try again later",
                min(seconds, _LONGEST_RETRY_SEC),
            )
        stream = Stream(work)
        self._num_answers += work.num_answers
        try:
            await self.ask(lambda engine: self._add(engine, stream))
        except BaseException:
            # Also when the client left meanwhile: then the work is, or will be, in the engine.
            self.close(stream)
            raise
        return stream

    def close(self, stream: Stream) -> None:
        """Give up a stream that was opened, read to its end or not; what still runs is aborted."""
        self._num_answers -= stream.work.num_answers
        if not stream.is_complete:
            self._inbox.put(lambda: self._abort(stream))

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """What a function says of the engine, asked between two steps."""
        assert self._loop is not None, "not started"
        answer: asyncio.Future[T] = self._loop.create_future()

        def job() -> None:
            try:
                result = question(self._engine)
            except Exception as error:
                self._tell(_resolve, answer, None, error)
            else:
                self._tell(_resolve, answer, result, None)

        self._inbox.put(job)
        if not self._thread.is_alive():
            raise shutting_down()
        return await answer

    # In the engine thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            _log.exception("the engine cannot go on; every request is ended")
            self._deadline = time.monotonic()
            self._cut_off()
            self._do_jobs()

    def _serve(self) -> None:
        while True:
            self._do_jobs()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._cut_off()
            if self._engine.has_work:
                self._step()
            elif self._deadline is not None:
                break
        self._do_jobs()

    def _do_jobs(self) -> None:
        """Everything in the inbox; with nothing else to do, wait for something to come."""
        try:
            idle = not self._engine.has_work and self._deadline is None
            self._inbox.get(block=idle)()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            pass

    def _step(self) -> None:
        began = time.perf_counter()
        try:
            deltas = self._engine.step()
        except Exception:
            _log.exception("a step failed; whoever was in it is tried alone")
            self._deliver(self._engine.recover())
            return
        seconds = time.perf_counter() - began
        self._deliver(deltas)
        for observer in self._observers:
            observer.saw_step(self._engine, deltas, seconds)

    def _deliver(self, deltas: Seq[Delta]) -> None:
        """Hand deltas over, all in one call, and after its last one the output of a request."""
        mail: list[tuple[Stream, int, Item]] = []
        for delta in deltas:
            mail.append((*self._open[delta.request_id], delta))
        # Several answers of a request may have ended in this step.
        ended = dict.fromkeys(d.request_id for d in deltas if d.finish_reason is not None)
        for request_id in filter(self._engine.is_finished, ended):
            stream, prompt = self._open.pop(request_id)
            output = self._take(request_id)
            failed = any(answer.finish_reason == "error" for answer in output.outputs)
            mail.append((stream, prompt, engine_failed(request_id) if failed else output))
        if mail:
            self._tell(_put, mail)

    def _take(self, request_id: str) -> RequestOutput:
        output = self._engine.output(request_id)
        for observer in self._observers:
            observer.saw_end(output)
        sec = max(answer.metrics.total_sec for answer in output.outputs)
        self._answer_sec = _MEMORY * self._answer_sec + (1 - _MEMORY) * sec
        return output

    def _add(self, engine: Engine, stream: Stream) -> None:
        work = stream.work
        try:
            for number, prompt in enumerate(work.prompts):
                request_id = engine.add(
                    prompt,
                    work.params,
                    request_id=f"{work.request_id}-{number}",
                    salt=work.salt,
                    grammar=work.grammar,
                    prediction=work.prediction,
                )
                self._open[request_id] = (stream, number)
        except Exception:
            self._abort(stream)
            raise

    def _abort(self, stream: Stream) -> None:
        for request_id in [key for key, (mine, _) in self._open.items() if mine is stream]:
            del self._open[request_id]
            self._engine.abort(request_id)
            self._take(request_id)

    def _cut_off(self) -> None:
        streams = {id(stream): stream for stream, _ in self._open.values()}.values()
        for stream in streams:
            self._abort(stream)
            self._tell(stream.put, 0, shutting_down())

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            _log.debug("the event loop is gone; nobody is left to be told")


def _put(mail: Seq[tuple[Stream, int, Item]]) -> None:
    for stream, prompt, item in mail:
        stream.put(prompt, item)


def _resolve(answer: "asyncio.Future[T]", result: T, error: Exception | None) -> None:
    if answer.cancelled():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
