"""Load on a running server, by the official client, and whether it stays right under it.

    slipstream serve smollm2-135m &
    python -m slipstream.bench.serve_load --url http://127.0.0.1:8000/v1 --seconds 300 --streams 64

Requests of all kinds (seeds, n, penalties, stop strings, JSON schemas, speculation on and off)
are each answered once alone; then many clients ask them again and again at the same time, some
hanging up in the middle. An answer must be what it was alone, and in the end the server idle with
every block back. Where library matrix products round by batch shape, answers can part at a
near-tie; so the count of those that did is printed, and `--strict` makes it an error.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI

from slipstream.core.errors import ConfigError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
PROMPTS = (
    "write a poem",
    "count to ten",
    "tell me more",
    "Name a pet, what it is and how old it is.",
    "what?",
)
_KINDS = 6
_HANGS_UP_EVERY = 7
_SETTLE_SEC = 30.0


@dataclass(slots=True)
class Case:
    """A request, and its answers when it was alone: texts and finish reasons."""

    body: dict[str, Any]
    is_json: bool
    texts: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Tally:
    """What came of the load.

    Attributes:
        counts: "answered", "hung up", and what went wrong, by name.
        num_tokens: of complete answers.
        first_token_sec: of streams.
        examples: the first of each thing that went wrong.
    """

    counts: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    first_token_sec: list[float] = field(default_factory=list)
    examples: dict[str, str] = field(default_factory=dict)

    def wrong(self, what: str, example: str) -> None:
        self.counts[what] += 1
        self.examples.setdefault(what, example)


def make_cases(model: str, count: int, max_tokens: int) -> list[Case]:
    """Requests of every kind in turn, all seeded."""
    cases = []
    for i in range(count):
        kind = i % _KINDS
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": PROMPTS[i % len(PROMPTS)]}],
            "seed": i,
            "temperature": (0.0, 0.7, 1.0)[i % 3],
            "max_tokens": max_tokens - i % 5,
            "extra_body": {"speculative": {"enabled": i % 4 != 3}},
        }
        if kind == 1:
            body["n"] = 3
        if kind == 2:
            body |= {"presence_penalty": 0.6, "frequency_penalty": 0.4}
            body["extra_body"] |= {"repetition_penalty": 1.2, "min_p": 0.02}
        if kind == 3:
            body["stop"] = ["e ", "."]
        if kind == 4:
            shape = {"name": "pet", "schema": SCHEMA}
            body["response_format"] = {"type": "json_schema", "json_schema": shape}
            body["max_tokens"] = max(max_tokens, 100)
        if kind == 5:
            body["extra_body"] |= {"top_k": 20, "ignore_eos": True}
        cases.append(Case(body, is_json=kind == 4))
    return cases


async def load(
    url: str, model: str, *, streams: int, seconds: float, max_tokens: int = 48, cases: int = 24
) -> Tally:
    """Put a server under load.

    Args:
        url: of its API, up to /v1.
        streams: clients at the same time.
        max_tokens: of most answers.
        cases: different requests.
    """
    tally = Tally()
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
        known = make_cases(model, cases, max_tokens)
        for case in known:
            # Alone, and with speculation the other way round: neither may matter.
            other = {"speculative": {"enabled": not case.body["extra_body"]["speculative"]}}
            case.texts, case.finishes = await _whole(client, case.body)
            texts, finishes = await _whole(
                client, case.body | {"extra_body": case.body["extra_body"] | other}
            )
            _compare(case, texts, finishes, tally, "other with speculation switched")
        deadline = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(_client(client, known, number, deadline, tally))
    await _settle(url.removesuffix("/v1"), tally)
    return tally


async def _client(
    client: AsyncOpenAI, cases: Seq[Case], number: int, deadline: float, tally: Tally
) -> None:
    """One client: cases in an order of its own, streamed or whole, until the time is over."""
    turn = number
    while time.monotonic() < deadline:
        case = cases[(turn * (2 * number + 1)) % len(cases)]
        turn += 1
        try:
            if turn % 3 == 0:
                texts, finishes = await _whole(client, case.body)
            else:
                hangs_up = turn % _HANGS_UP_EVERY == 1
                answer = await _streamed(client, case, tally, hang_up_after=3 if hangs_up else None)
                if answer is None:
                    tally.counts["hung up"] += 1
                    continue
                texts, finishes = answer
        except Exception as error:
            tally.wrong("failed", f"{type(error).__name__}: {error}")
            continue
        tally.counts["answered"] += 1
        _compare(case, texts, finishes, tally, "other than alone")


def _compare(case: Case, texts: list[str], finishes: list[str], tally: Tally, what: str) -> None:
    if texts != case.texts:
        tally.wrong(what, f"{texts} for {case.texts} to {case.body}")
    elif finishes != case.finishes:
        tally.wrong("finish reasons", f"{finishes} for {case.finishes} to {case.body}")
    if case.is_json:
        for text in texts:
            try:
                json.loads(text)
            except ValueError:
                tally.wrong("not JSON", text)


async def _whole(client: AsyncOpenAI, body: dict[str, Any]) -> tuple[list[str], list[str]]:
    answer = await client.chat.completions.create(**body)
    texts = [choice.message.content or "" for choice in answer.choices]
    return texts, [choice.finish_reason for choice in answer.choices]


async def _streamed(
    client: AsyncOpenAI, case: Case, tally: Tally, *, hang_up_after: int | None
) -> tuple[list[str], list[str]] | None:
    """Texts and finish reasons; None if it was hung up after so many chunks."""
    num_answers = len(case.texts)
    texts, finishes = [""] * num_answers, [""] * num_answers
    began = time.perf_counter()
    first_sec: float | None = None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answering: Any = await client.chat.completions.create(**case.body | options)
    async with answering as stream:
        num_chunks = 0
        async for chunk in stream:
            num_chunks += 1
            if num_chunks == hang_up_after:
                return None
            for choice in chunk.choices:
                if choice.delta.content:
                    first_sec = first_sec or time.perf_counter() - began
                    texts[choice.index] += choice.delta.content
                finishes[choice.index] = choice.finish_reason or finishes[choice.index]
            if chunk.usage:
                tally.num_tokens += chunk.usage.completion_tokens
    if first_sec is not None:
        tally.first_token_sec.append(first_sec)
    return texts, finishes


async def _settle(url: str, tally: Tally) -> None:
    """Wait until the server is idle; what it then still holds has leaked."""
    give_up = time.monotonic() + _SETTLE_SEC
    async with httpx.AsyncClient() as client:
        while True:
            data = (await client.get(f"{url}/live")).json()
            held = data["running"] + data["waiting"] + data["blocks"]["used"]
            if held == 0 or time.monotonic() > give_up:
                break
            await asyncio.sleep(0.05)
    if held:
        tally.wrong("leaked", json.dumps({key: data[key] for key in ("running", "blocks")}))


def main(argv: Seq[str] | None = None) -> int:
    """The script; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", metavar="URL")
    parser.add_argument("--streams", type=int, default=64, metavar="N")
    parser.add_argument("--seconds", type=float, default=300.0, metavar="S")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N")
    parser.add_argument("--strict", action="store_true", help="answers may not part either")
    args = parser.parse_args(argv)
    try:
        model = httpx.get(f"{args.url}/models").json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise ConfigError(f"no server answers at {args.url}: {error}") from None
    tally = asyncio.run(
        load(
            args.url, model, streams=args.streams, seconds=args.seconds, max_tokens=args.max_tokens
        )
    )
    result = {
        "argv": sys.argv[1:],
        "model": model,
        "counts": dict(tally.counts),
        "examples": tally.examples,
        "streamed_tokens_per_sec": tally.num_tokens / args.seconds,
        "median_first_token_ms": _median_ms(tally.first_token_sec),
    }
    print(json.dumps(result))
    forgiven = set() if args.strict else {"other than alone", "other with speculation switched"}
    return int(bool(tally.examples.keys() - forgiven))


def _median_ms(seconds: list[float]) -> float | None:
    return 1e3 * sorted(seconds)[len(seconds) // 2] if seconds else None


if __name__ == "__main__":
    sys.exit(main())
