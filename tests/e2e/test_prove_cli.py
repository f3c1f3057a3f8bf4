"""`slipstream prove` from arguments to exit codes."""

import json
from pathlib import Path

import pytest

from slipstream.check import selftest
from slipstream.check.report import Check, Planted, Report
from slipstream.cli import main
from slipstream.engine import step

KEYS = (
    "proved",
    "checks",
    "planted",
    "cases",
    "equal",
    "first_divergence_margins",
    "detectable_tv",
    "power",
)


def prove(model: Path, *flags: str) -> int:
    engine = ["--dtype", "float32", "--kv-cache-memory", "1M"]
    sampling = ["--temperature", "0.8", "--max-tokens", "6"]
    return main(["prove", "--model", str(model), *engine, *sampling, *flags])


def printed(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_proved(tiny_gguf, tmp_path, capsys):
    page = tmp_path / "report.html"
    code = prove(tiny_gguf, "--samples", "14", "--detect", "0.3", "--json", "--html", str(page))
    captured = capsys.readouterr()
    assert code == 0
    assert captured.err == ""
    assert captured.out.startswith(f"PROVED: {tiny_gguf}")
    report = json.loads(captured.out.splitlines()[-1])
    assert report["proved"] is True
    assert all(key in report for key in KEYS)
    assert report["cases"] == report["equal"] == 14
    assert report["settings"]["temperature"] == 0.8
    assert "PROVED" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_too_few_samples(rule, tiny_gguf, capsys):
    assert prove(tiny_gguf, "--rule", rule, "--samples", "3", "--json") == 3
    report = printed(capsys)
    assert report["proved"] is False
    assert report["samples_needed"] > 1000


def test_refuted_with_a_reproducer(tiny_gguf, monkeypatch, capsys):
    monkeypatch.setattr(step, "_moves", lambda *_: [])
    flags = ["--samples", "14", "--detect", "0.3", "--max-tokens", "24", "--spec-tokens", "8"]
    assert prove(tiny_gguf, *flags, "--json") == 1
    out = capsys.readouterr().out
    assert out.startswith("REFUTED")
    assert "Smallest reproducer" in out
    case = json.loads(out.splitlines()[-1])["reproducer"]
    assert case["got"][:-1] == case["expected"][:-1] and case["got"] != case["expected"]


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (["--spec-method", "suffix"], {"method": "suffix", "spec tokens": 4, "rule": "match"}),
        (
            ["--spec-model", "{model}", "--spec-tokens", "2"],
            {"method": "draft_model", "draft model": "{model}", "spec tokens": 2},
        ),
        (
            ["--speculative-config", '{"model": "{model}", "tree": {"max_tokens": 5}}'],
            {"method": "draft_model", "tree": "depth 4, topk 4, max_tokens 5", "spec tokens": 5},
        ),
        (
            ["--speculative-config", '{"method": "ngram", "rejection_sample_method": "block"}'],
            {"method": "ngram", "rule": "block"},
        ),
        (["--spec-tokens", "3"], {"method": "synthetic drafts", "spec tokens": 3}),
    ],
)
def test_drafts_are_those_of_the_method_asked_for(flags, settings, tiny_gguf, capsys):
    flags = [flag.replace("{model}", str(tiny_gguf)) for flag in flags]
    # Greedy answers of a tiny model soon repeat themselves, so that lookup finds something.
    greedy = ["--temperature", "0", "--ignore-eos", "--max-tokens", "40"]
    few = ["--samples", "2", "--detect", "0.95"]
    assert prove(tiny_gguf, *flags, *greedy, *few, "--json") == 0
    report = printed(capsys)
    for name, value in settings.items():
        said = value.replace("{model}", str(tiny_gguf)) if isinstance(value, str) else value
        assert report["settings"][name] == said
    assert report["settings"]["drafted"] > 0


def test_nothing_drafted_is_not_proved(tiny_gguf, capsys):
    flags = ["--samples", "2", "--detect", "0.95", "--spec-method", "ngram", "--raw"]
    config = ["--speculative-config", '{"prompt_lookup_min": 5}']
    assert prove(tiny_gguf, *flags, *config, "--json") == 3
    out = capsys.readouterr().out
    assert out.startswith("NOTHING TESTED") and "ngram drafted nothing" in out
    assert json.loads(out.splitlines()[-1])["proved"] is False


def test_prompts_from_a_file(tiny_gguf, tmp_path, capsys):
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\n\ntwo\n", encoding="utf-8")
    turns = tmp_path / "prompts.jsonl"
    turns.write_text('{"prompt": "one"}\n{"turns": ["two", "three"]}\n', encoding="utf-8")
    flags = ["--samples", "2", "--detect", "0.9", "--raw", "--json"]
    reports = []
    for file in (lines, turns):
        assert prove(tiny_gguf, *flags, "--prompts", str(file)) == 0
        reports.append(printed(capsys))
    assert reports[0]["settings"]["prompts"] == 2
    assert reports[0] == reports[1]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rule", "typical"], "typical"),
        (
            ["--rule", "block", "--speculative-config", '{"rejection_sample_method": "ratio"}'],
            "--rule block and rejection_sample_method ratio",
        ),
        (["--spec-method", "off"], "method off"),
        (["--spec-method", "combined"], "draft model"),
        (["--samples", "0"], "samples"),
        (["--detect", "2"], "detect"),
        (["--spec-tokens", "0"], "spec"),
        (["--prompts", "{tmp}/missing"], "missing"),
        (["--prompts", "{tmp}/empty"], "no prompts"),
        (["--prompts", "{tmp}/bad"], "line 2"),
        (["--html", "{tmp}/no/such/folder"], "folder"),
        (["--raw", "--system", "Be brief."], "--system"),
    ],
)
def test_a_mistake_is_one_line(flags, says, tiny_gguf, tmp_path, capsys):
    (tmp_path / "empty").write_text("\n", encoding="utf-8")
    (tmp_path / "bad").write_text('{"prompt": "fine"}\n{"prompt": 7}\n', encoding="utf-8")
    assert prove(tiny_gguf, *(flag.replace("{tmp}", str(tmp_path)) for flag in flags)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("slipstream: error: ") and captured.err.count("\n") == 1
    assert says in captured.err


@pytest.mark.parametrize("caught", [True, False])
def test_self_test(caught, monkeypatch, capsys):
    def stub(progress=None) -> Report:
        progress("checks", 0, 2)
        progress("done", 2, 2)
        bug = Planted("residual from p", caught, "exact laws", "off by 0.15")
        return Report("self-test", checks=[Check("exact laws", True, "fine")], planted=[bug])

    monkeypatch.setattr(selftest, "run_self_test", stub)
    assert main(["prove", "--self-test", "--json"]) == (0 if caught else 1)
    out = capsys.readouterr().out
    assert out.startswith("PROVED" if caught else "REFUTED")
    assert json.loads(out.splitlines()[-1])["planted"][0]["caught"] is caught
