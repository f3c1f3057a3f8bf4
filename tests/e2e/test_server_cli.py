"""`slipstream serve` as a process: flags, logs, and an orderly end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream.cli import main
from slipstream.server.run import bind

BODY = {"prompt": "hello", "max_tokens": 5, "temperature": 0}


@contextmanager
def served(*args: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its address; what it logged is left to be read."""
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli", "serve", *args, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "listening on " in line:
                yield process, line.split("listening on ")[1].strip()
                break
        else:
            raise AssertionError("the server ended before it listened")
    finally:
        process.kill()
        process.wait()


def test_it_serves_logs_and_ends(tiny_gguf: Path) -> None:
    with served(str(tiny_gguf), "--spec-method", "off", SLIPSTREAM_API_KEY="k") as (process, url):
        headers = {"Authorization": "Bearer k"}
        models = httpx.get(f"{url}/v1/models", headers=headers).json()["data"]
        assert [model["id"] for model in models] == ["tiny.gguf"]
        assert httpx.get(f"{url}/v1/models").status_code == 401
        answer = httpx.post(f"{url}/v1/completions", json=BODY, headers=headers)
        assert answer.json()["usage"]["completion_tokens"] == 5
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)
        assert process.stderr is not None
        entries: list[dict[str, Any]] = [json.loads(line) for line in process.stderr]
    (request,) = [entry for entry in entries if entry["event"] == "request"]
    assert request["output_tokens"] == [5]
    assert request["finish_reasons"] == ["length"]
    assert "prompt_token_ids" not in request


def test_prompts_are_logged_if_asked_for(tiny_gguf: Path) -> None:
    options = ("--enable-log-requests", "--served-model-name", "m", "--spec-method", "off")
    with served(str(tiny_gguf), *options) as (process, url):
        answer = httpx.post(f"{url}/v1/completions", json=BODY | {"model": "m"})
        assert answer.json()["model"] == "m"
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        assert process.stderr is not None
        entries = [json.loads(line) for line in process.stderr]
    (request,) = [entry for entry in entries if entry["event"] == "request"]
    assert len(request["prompt_token_ids"]) == 5


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "no-such-model", "--port", port]) == 2
    assert f"port {port}: Address already in use" in capsys.readouterr().err


def test_an_open_door_is_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no-such-model", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "--api-key locks it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port", "70000"], "port must be"),
        (["--max-waiting", "-1"], "max_waiting must be"),
        (["no-such-model", "--port", "0"], "no-such-model"),
    ],
)
def test_mistakes_are_one_line(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
