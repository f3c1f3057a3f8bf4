"""A request that makes steps raise, among others: it alone gets an error, streamed or whole."""

import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch import Tensor

from serving import serving
from slipstream import LLM
from slipstream.core.draft import Draft, Verdict
from slipstream.core.sequence import Sequence
from slipstream.engine.verifier import MatchVerifier

BODY = {"prompt": "hello", "temperature": 0, "max_tokens": 40, "ignore_eos": True}


class Poisoned(MatchVerifier):
    """Cannot judge a request with the salt `poison` after its fifth token."""

    def __call__(
        self, logits: Tensor, first_rows: Seq[int], seqs: Seq[Sequence], drafts: Seq[Draft]
    ) -> list[Verdict]:
        assert not any(seq.salt == b"poison" and seq.num_output >= 5 for seq in seqs), "planted"
        return super().__call__(logits, first_rows, seqs, drafts)


@pytest.fixture
def url(tiny_gguf: Path) -> Iterator[str]:
    llm = LLM(str(tiny_gguf), dtype="float64", device="cpu", quiet=True, kv_cache_memory=2**20)
    llm.engine.parts = replace(llm.engine.parts, verifier=Poisoned())
    with serving(llm) as url:
        yield url


def post(url: str, **changes: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=BODY | changes, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_it_fails_alone(url: str, stream: bool) -> None:
    alone = post(url).json()["choices"][0]["text"]
    with ThreadPoolExecutor(5) as clients:
        good = [clients.submit(post, url) for _ in range(4)]
        bad = clients.submit(post, url, cache_salt="poison", stream=stream)
    for answer in good:
        assert answer.result().json()["choices"][0]["text"] == alone
    answer = bad.result()
    if stream:
        assert answer.status_code == 200
        *_, last, _ = answer.text.strip().split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 500
        error = answer.json()["error"]
    assert error["code"] == "engine_error"
    assert "planted" not in error["message"]
    assert post(url).json()["choices"][0]["text"] == alone
    assert httpx.get(f"{url}/health").status_code == 200
