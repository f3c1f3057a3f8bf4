"""The examples run, say that all is well, and would say otherwise."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> int:
    """The exit status of an example run as a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def test_verify_lossless_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify_lossless.py") == 0
    report = capsys.readouterr().out
    assert report.count("ok\n") == 5
    assert "WRONG" not in report
    assert "A perfect sampler shows a TV of 0.0094" in report
    assert "slipstream prove" in report


def test_verify_lossless_fails_on_a_biased_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forgets_the_draft(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return p

    monkeypatch.setattr("slipstream.maths.acceptance.residual", forgets_the_draft)
    assert run("verify_lossless.py") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("WRONG")] == ["ratio"]
    assert "FAILED." in lines


def test_coupling_prints_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("coupling.py", "--drafts", "40") == 0
    rows = [
        line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if "0.05" in line
    ]
    chains, siblings = ([float(cell) for cell in row] for row in rows)
    assert len(chains) == 8
    assert all(1 <= length <= 5 for length in chains[1:])
    assert len(siblings) == 4
    assert all(1 <= length <= 2 for length in siblings[1:])
