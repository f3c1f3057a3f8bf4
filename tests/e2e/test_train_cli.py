"""`slipstream train` on a tiny model, and the engine drafting with what it made."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slipstream import LLM, SamplingParams
from slipstream.cli import main

HOW = ("--dtype", "float32", "--device", "cpu", "--kv-cache-memory", "4M", "--quiet")
LENGTH = ("--texts", "12", "--steps", "3", "--max-tokens", "24", "--draft-vocab-size", "60")
BATCH = ("--batch-rows", "2", "--row-tokens", "32")


def train(method: str, model: Path, out: Path, *more: str) -> int:
    return main(
        ["train", method, "--model", str(model), "--out", str(out), *HOW, *LENGTH, *BATCH, *more]
    )


@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa", "mtp"])
def test_what_was_trained_drafts_and_changes_no_token(tiny_gguf, tmp_path, capsys, method):
    assert train(method, tiny_gguf, tmp_path / "head", "--json") == 0
    *_, said, how, last = capsys.readouterr().out.splitlines()
    assert "tokens a pass" in said
    assert how == f"use it with --spec-method {method} --spec-model {tmp_path / 'head'}"
    card = json.loads(last)
    assert card["method"] == method
    assert (card["target"], card["data"]) == (str(tiny_gguf), "builtin")
    assert card["num_texts"] == 12

    settings = {"device": "cpu", "dtype": "float64", "quiet": True, "kv_cache_memory": 2**20}
    drafts = {"method": method, "model": str(tmp_path / "head"), "controller": "fixed"}
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=20)
    answers = [
        LLM(str(tiny_gguf), speculative_config=config, **settings).generate("hello", params)[0]
        for config in ({"method": "off"}, drafts)
    ]
    plain, drafted = (answer.outputs[0] for answer in answers)
    assert drafted.token_ids == plain.token_ids
    assert drafted.draft_counts.num_draft_tokens > 0


def test_an_eagle3_head_for_vllm(tiny_gguf, tmp_path):
    other = tmp_path / "speculators"
    assert train("eagle3", tiny_gguf, tmp_path / "head", "--speculators", str(other)) == 0
    tensors = load_file(other / "model.safetensors")
    assert tensors["lm_head.weight"].shape == (60, 32)
    assert "layers.0.self_attn.q_proj.weight" in tensors
    config = json.loads((other / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["architectures"] == ["Qwen3ForCausalLM"]


def test_prompts_and_documents_of_files(tiny_gguf, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "a"}\n\n{"turns": ["b"]}\n{"messages": [{"role": "user", "content": "c"}]}\n'
    )
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "one.md").write_text("word " * 300)
    data = ["--data", str(prompts), "--data", str(documents)]
    assert train("medusa", tiny_gguf, tmp_path / "head", *data) == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--data", "nowhere"], "no data 'nowhere'"),
        (["--steps", "0"], "how long"),
        (["--texts", "-1"], "--texts"),
        (["--rate", "0"], "--rate"),
        (["--row-tokens", "4000"], "give more --texts"),
        (["--unroll", "0"], "--unroll"),
        (["--start", "shipped"], "no mtp head for"),
        (["--speculators", "there"], "--speculators is for eagle3"),
    ],
)
def test_mistakes_are_named(tiny_gguf, tmp_path, capsys, more, said):
    assert train("mtp", tiny_gguf, tmp_path / "head", *more) == 2
    assert said in capsys.readouterr().err


def test_files_that_are_none_are_named(tiny_gguf, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "fine"}\n{"text": 3}\n')
    assert train("mtp", tiny_gguf, tmp_path / "head", "--data", str(bad)) == 2
    assert "bad.jsonl, line 2" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert train("mtp", tiny_gguf, tmp_path / "other", "--data", str(tmp_path / "empty")) == 2
    assert "has no files" in capsys.readouterr().err
