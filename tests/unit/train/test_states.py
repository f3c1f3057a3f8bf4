"""States on disk are what the target computes of each text by itself, once."""

import pytest
import torch
from safetensors.torch import load_file

import heads
from packing import packed_model
from slipstream import native
from slipstream.check.tiny import tiny_model
from slipstream.train.states import write_states
from slipstream.train.texts import Texts

TEXTS = [([3, 1], [4, 1, 5]), ([2], [7, 1, 8, 2, 8]), ([9, 9, 8], [1])]


def written(tmp_path, model, taps=()):
    shard = tmp_path / "0-3.safetensors"
    Texts.of(TEXTS).write(shard)
    files = write_states([shard], tmp_path / "states", model, taps)
    return {name: load_file(path)[name] for name, (path,) in files.items()}


def test_each_text_is_read_by_itself(tmp_path):
    model = tiny_model()
    states = written(tmp_path, model, taps=(0, 2))
    passes = [heads.target_pass(model, prompt + answer, (0, 2)) for prompt, answer in TEXTS]
    expected = {
        "hidden": torch.cat([one.hidden for one in passes]),
        "tap.0": torch.cat([one.taps[0] for one in passes]),
        "tap.2": torch.cat([one.taps[2] for one in passes]),
    }
    assert states.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(states[name], each.bfloat16()), name


@pytest.mark.skipif(not native.is_available(), reason="no native kernels here")
def test_a_packed_target_is_read_natively(tmp_path):
    states = written(tmp_path, packed_model("llama"))
    assert states["hidden"].shape == (15, packed_model("llama").config.hidden_size)
    assert bool(states["hidden"].isfinite().all())


def test_only_what_is_missing_is_written(tmp_path):
    model = tiny_model()
    before = written(tmp_path, model)
    kept = tmp_path / "states" / "hidden" / "0-3.safetensors"
    stamp = kept.stat().st_mtime_ns
    after = written(tmp_path, model, taps=(1,))
    assert kept.stat().st_mtime_ns == stamp
    assert torch.equal(before["hidden"], after["hidden"])
    assert "tap.1" in after
