"""Training runs on a tiny target: what they leave behind, and that being killed changes nothing."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import reference
from slipstream.check.tiny import tiny_model
from slipstream.core.errors import ConfigError
from slipstream.loading.heads import load_head
from slipstream.models.heads import tensor_bytes
from slipstream.train import run as runs
from slipstream.train import texts
from slipstream.train.loop import Schedule
from slipstream.train.objectives import Objective
from slipstream.train.run import Settings, Watcher, draft_vocabulary, run

METHODS = ("eagle", "eagle3", "medusa", "mtp")


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def target():
    return tiny_model(dtype=torch.float32)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(texts, "NUM_TEXTS", 8)
    monkeypatch.setattr(runs, "NUM_TEXTS", 8)


def ask(indices):
    return [[1 + index % 7, index % 5, 2] for index in indices]


@pytest.fixture(scope="module")
def answer(target):
    known = {}

    def answers(prompts, params):
        return [
            known.setdefault((*prompt, each.temperature, each.seed), answer_one(prompt, each))
            for prompt, each in zip(prompts, params, strict=True)
        ]

    def answer_one(prompt, each):
        return reference.generate(target, prompt, each, stop_ids=frozenset(), num_tokens=9)

    return answers


def settings_for(method, num_steps=12, **changes):
    settings = Settings(
        method=method,
        target="tiny",
        data="made up",
        num_texts=40,
        max_tokens=9,
        draft_vocab_size=24,
        num_heads=3,
        objective=Objective(unroll=3, feature_weight=1.0 if method == "eagle" else 0.0),
        schedule=Schedule(num_steps, num_rows=2, length=16, rate=1e-2, num_measured=1, every=4),
    )
    return replace(settings, **changes)


def tensors(folder):
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_leaves_a_head_that_loads_and_its_card(target, answer, tmp_path, method):
    card = run(settings_for(method), target, ask, answer, tmp_path, facts={"commit": "0"})
    assert card == json.loads((tmp_path / "card.json").read_text())
    assert (card["target"], card["commit"]) == ("tiny", "0")
    assert card["schedule"]["num_steps"] == 12
    assert card["num_texts"] == 40
    head = load_head(method, tmp_path, target)
    assert len(head.target_ids) == 24
    # Stored in 2 bytes; here in 4, beside ids of 8.
    assert tensor_bytes(head) - 24 * 8 == 2 * (card["head_bytes"] - 24 * 8)
    measured = card["held_out"]
    assert len(measured["acceptance_by_position"]) == 3
    assert measured["acceptance_length"] == 1 + sum(measured["acceptance_by_position"])


@pytest.mark.parametrize("method", METHODS)
def test_training_teaches(target, answer, tmp_path, method):
    losses = []
    watcher = Watcher(stepped=lambda state, total: losses.append(state.loss))
    settings = settings_for(method, num_steps=60)
    run(settings, target, ask, answer, tmp_path, watcher=watcher)
    assert len(losses) == 60
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


@pytest.mark.parametrize("method", METHODS)
def test_a_run_goes_on_from_another_head(target, answer, tmp_path, method):
    first = settings_for(method, num_steps=60)
    losses = []
    watcher = Watcher(stepped=lambda state, total: losses.append(state.loss))
    run(first, target, ask, answer, tmp_path / "first", watcher=watcher)
    # What a new head would be given does not matter: vocabulary and size are the head's own.
    further = settings_for(method, draft_vocab_size=20, start="first")
    card = run(
        further, target, ask, answer, tmp_path / "second", start=tmp_path / "first", watcher=watcher
    )
    assert sum(losses[60:66]) < 0.9 * sum(losses[:6])
    assert (card["start"], card["draft_vocab_size"]) == ("first", 24)
    assert card["started_from"]["schedule"]["num_steps"] == 60
    before, after = (load_head(method, tmp_path / name, target) for name in ("first", "second"))
    assert after.target_ids.tolist() == before.target_ids.tolist()


def test_a_head_without_a_draft_vocabulary_is_not_trained_further(target, answer, tmp_path):
    run(settings_for("mtp"), target, ask, answer, tmp_path / "first")
    file = tmp_path / "first" / "model.safetensors"
    rest = {name: x for name, x in load_file(file).items() if not name.endswith(("d2t", "t2d"))}
    save_file(rest, file)
    with pytest.raises(ConfigError, match="no draft vocabulary"):
        run(
            settings_for("mtp", start="first"),
            target,
            ask,
            answer,
            tmp_path / "second",
            start=tmp_path / "first",
        )


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
@pytest.mark.parametrize("last_step", [3, 4, 9])
def test_killed_and_taken_up_again_it_ends_the_same(target, answer, tmp_path, method, last_step):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    wanted = run(settings_for(method), target, ask, answer, whole)

    def kill(state, total):
        if state.step == last_step:
            raise Killed

    with pytest.raises(Killed):
        run(settings_for(method), target, ask, answer, broken, watcher=Watcher(stepped=kill))
    steps = []
    watcher = Watcher(stepped=lambda state, total: steps.append(state.step))
    found = run(settings_for(method), target, ask, answer, broken, watcher=watcher)
    assert steps[0] == last_step // 4 * 4 + 1
    assert found["held_out"] == wanted["held_out"]
    expected = tensors(whole)
    for name, tensor in tensors(broken).items():
        assert torch.equal(tensor, expected[name]), name


def test_killed_while_answering_it_keeps_what_was_answered(target, answer, tmp_path):
    calls = []

    def answers_twice(prompts, params):
        calls.append(len(prompts))
        if len(calls) == 3:
            raise Killed
        return answer(prompts, params)

    with pytest.raises(Killed):
        run(settings_for("medusa"), target, ask, answers_twice, tmp_path)
    kept = sorted((tmp_path / "corpus" / "texts").iterdir())
    assert [path.suffix for path in kept] == [".safetensors"] * 2
    run(settings_for("medusa"), target, ask, answers_twice, tmp_path)
    assert calls == [8] * 6


def test_minutes_decide_what_was_left_open(target, answer, tmp_path):
    settings = settings_for("medusa", num_steps=0, num_texts=0)
    card = run(settings, target, ask, answer, tmp_path, minutes=1e-6)
    assert (card["num_texts"], card["schedule"]["num_steps"]) == (8, 4)
    kept = json.loads((tmp_path / "run.json").read_text())
    assert (kept["num_texts"], kept["schedule"]["num_steps"]) == (8, 4)
    again = run(settings, target, ask, answer, tmp_path, minutes=1e-6)
    assert again["held_out"] == card["held_out"]


def test_runs_share_texts(target, answer, tmp_path):
    corpus = tmp_path / "corpus"
    run(settings_for("medusa"), target, ask, answer, tmp_path / "medusa", corpus=corpus)

    def nothing(prompts, params):
        raise AssertionError("everything is answered already")

    run(settings_for("mtp"), target, ask, nothing, tmp_path / "mtp", corpus=corpus)


def test_texts_of_another_target_are_refused(target, answer, tmp_path):
    corpus = tmp_path / "corpus"
    run(settings_for("medusa"), target, ask, answer, tmp_path / "one", corpus=corpus)
    with pytest.raises(ConfigError, match="holds texts with target 'tiny', not 'other'"):
        other = settings_for("mtp", target="other")
        run(other, target, ask, answer, tmp_path / "two", corpus=corpus)


def test_a_loss_that_is_not_finite_ends_the_run(target, answer, tmp_path):
    settings = settings_for("medusa")
    wild = replace(settings, schedule=replace(settings.schedule, rate=1e30))
    with pytest.raises(ConfigError, match="lower --rate"):
        run(wild, target, ask, answer, tmp_path)


def test_a_run_with_other_settings_is_refused(target, answer, tmp_path):
    run(settings_for("medusa"), target, ask, answer, tmp_path)
    with pytest.raises(ConfigError, match="draft_vocab_size 24, not 20"):
        run(settings_for("medusa", draft_vocab_size=20), target, ask, answer, tmp_path)


def test_the_draft_vocabulary_is_what_is_frequent():
    counts = torch.tensor([0, 5, 2, 5, 9, 2])
    assert draft_vocabulary(counts, 4).tolist() == [1, 2, 3, 4]
    assert draft_vocabulary(counts, 0).tolist() == [0, 1, 2, 3, 4, 5]
