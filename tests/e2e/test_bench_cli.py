"""`slipstream bench` and `slipstream roofline` on a tiny model: shape of the results, not speed."""

import json

import pytest

from slipstream.check.tiny import loaded, tiny_model
from slipstream.cli import main


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    model = loaded(tiny_model("llama", context_length=512, vocab_size=64))
    monkeypatch.setattr("slipstream.llm.load", lambda *args, **kwargs: model)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))


FLAGS = ("--quiet", "--kv-cache-memory", "1M", "--json")


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_bench(capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abcabcabc"}\n{"turns": ["xyxyxy", "?"], "category": "x"}\n')
    args = ["--workload", str(prompts), "--methods", "ngram,suffix", "--rounds", "2"]
    args += ["--max-tokens", "12", "--batch-sizes", "1,2", "--temperatures", "0,1"]
    assert main(["bench", *args, *FLAGS]) == 0
    result = last_line(capsys)
    assert result["num_prompts"] == 2
    rows = result["rows"]
    assert [(r["method"], r["batch_size"], r["temperature"]) for r in rows] == [
        (method, batch, temperature)
        for batch in (1, 2)
        for temperature in (0.0, 1.0)
        for method in ("plain", "ngram", "suffix")
    ]
    for row in rows:
        assert row["identical_outputs"] == row["num_outputs"] == 2
        assert row["tokens_per_sec"] > 0
        if row["method"] == "plain":
            assert row["speedup"] == 1.0
            assert row["acceptance_length"] == 1.0


@pytest.mark.parametrize("methods", ["ngram,suffix", "suffix"])
def test_bench_draws(tmp_path, methods):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "speedups.png"
    args = ["--methods", methods, "--rounds", "1", "--limit", "1", "--max-tokens", "4"]
    assert main(["bench", *args, "--batch-sizes", "1,2", "--plot", str(picture), *FLAGS]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--workload", "nothing"], "no workload 'nothing'"),
        (["--methods", "magic"], "no method 'magic'"),
        (["--batch-sizes", "one"], "--batch-sizes must be numbers"),
    ],
)
def test_bench_says_what_is_wrong(capsys, args, message):
    assert main(["bench", *args, *FLAGS]) == 2
    assert message in capsys.readouterr().err


def test_a_damaged_workload_names_its_line(capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    assert main(["bench", "--workload", str(prompts), *FLAGS]) == 2
    assert "line 2" in capsys.readouterr().err


def test_roofline_of_a_datasheet(capsys):
    assert main(["roofline", "--device", "h100", *FLAGS]) == 0
    result = last_line(capsys)
    assert result["bandwidth_gb_per_sec"] == pytest.approx(3350)
    assert result["compute_tera_ops_per_sec"] == pytest.approx(989)
    assert {step["measured_ms"] for step in result["steps"]} == {None}
    assert all(step["predicted_ms"] > 0 for step in result["steps"])


def test_roofline_of_this_machine(capsys, monkeypatch):
    monkeypatch.setattr("slipstream.bench.roofline._READ_BYTES", 1 << 16)
    monkeypatch.setattr("slipstream.bench.roofline._PRODUCT_SIZE", 32)
    assert main(["roofline", *FLAGS]) == 0
    result = last_line(capsys)
    assert result["ridge_rows"] > 0
    assert all(step["measured_ms"] > 0 for step in result["steps"])
    assert {row["acceptance"] for row in result["speedups"]} == {0.8}
