"""Hugging Face directories: config.json in all its spellings, and damaged files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream.core.config import RopeScaling
from slipstream.core.errors import ModelError, SlipstreamError
from slipstream.loading.directory import ModelDirectory, read_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
GEMMA = LLAMA | {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 5}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FULL, SLIDING = "full_attention", "sliding_attention"

# (older spelling, newer spelling): what transformers 4 and 5 write for the same model.
SPELLINGS = {
    "base": ({"rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0}}),
    "default": (
        {"rope_theta": 500.0, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    ),
    "llama3": (
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "llama3", **LLAMA3}},
    ),
    "linear": (
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0}},
    ),
}


def save(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")


# The shape ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPELLINGS)
def test_both_spellings_of_rotary_settings_mean_the_same(name: str) -> None:
    older, newer = SPELLINGS[name]
    config = read_config(LLAMA | older)
    assert config == read_config(LLAMA | newer)
    assert config.rope_thetas == (500.0, 500.0)
    assert config.rope_linear_factors == ((4.0, 4.0) if name == "linear" else (1.0, 1.0))
    stretched = RopeScaling(8.0, 1.0, 4.0, 32) if name == "llama3" else None
    assert config.rope_scaling == stretched


def test_both_spellings_of_gemma_mean_the_same() -> None:
    older = GEMMA | {
        "rope_theta": 500.0,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 6,
    }
    newer = GEMMA | {
        "layer_types": [*[SLIDING] * 5, FULL, SLIDING],
        "rope_parameters": {
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
            SLIDING: {"rope_type": "default", "rope_theta": 50.0},
        },
    }
    config = read_config(older)
    assert config == read_config(newer)
    assert config.windows == (5, 5, 5, 5, 5, None, 5)
    assert config.rope_thetas == (50.0,) * 5 + (500.0, 50.0)
    assert config.rope_linear_factors == (1.0,) * 5 + (8.0, 1.0)
    assert config.norm_plus_one


def test_gemma_scale_comes_from_its_own_field() -> None:
    assert read_config(GEMMA | {"head_dim": 16}).attention_scale == 0.25
    changes = {"head_dim": 16, "query_pre_attn_scalar": 64}
    assert read_config(GEMMA | changes).attention_scale == 0.125


def test_what_is_left_out_follows_from_the_rest() -> None:
    absent = {"num_key_value_heads", "tie_word_embeddings"}
    config = read_config({key: value for key, value in LLAMA.items() if key not in absent})
    assert (config.head_dim, config.num_kv_heads, config.tied) == (4, 4, False)
    assert config.rope_thetas == (10000.0, 10000.0)
    assert read_config({k: v for k, v in GEMMA.items() if k not in absent}).tied


def test_null_counts_as_left_out() -> None:
    config = read_config(LLAMA | {"head_dim": None, "num_key_value_heads": None})
    assert (config.head_dim, config.num_kv_heads) == (4, 4)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, None)),
        ({"sliding_window": None}, (None, None)),
        ({"model_type": "mistral", "sliding_window": 5}, (5, 5)),
        ({"model_type": "qwen2", "sliding_window": 5}, (None, None)),
        (
            {"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": False},
            (None, None),
        ),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 5,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 5),
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 5,
                "use_sliding_window": True,
                "layer_types": [SLIDING, FULL],
            },
            (5, None),
        ),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read_config(LLAMA | changes).windows == windows


def test_only_qwen2_has_biases_unasked() -> None:
    asked = {"attention_bias": True}
    for model_type, changes, expected in (
        ("llama", {}, (False, False)),
        ("llama", asked, (True, True)),
        ("qwen2", {}, (True, False)),
        ("qwen3", {}, (False, False)),
        ("qwen3", asked, (True, True)),
    ):
        config = read_config(LLAMA | {"model_type": model_type} | changes)
        assert (config.qkv_bias, config.output_bias) == expected, (model_type, changes)


# What cannot be run ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported"),
        ({"model_type": None}, "not supported"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        ({"num_key_value_heads": 3}, "cannot be shared evenly"),
    ],
)
def test_refused_configs_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        read_config(LLAMA | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        {"model_type": "gemma3_text", "final_logit_softcapping": 30.0},
        {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
    ],
    ids=str,
)
def test_settings_we_do_not_compute_are_refused(changes: dict[str, Any]) -> None:
    """Ignoring them would give other logits without a word."""
    with pytest.raises(ModelError):
        read_config(LLAMA | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "silu", "partial_rotary_factor": 1.0},
        {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh"},
        {"model_type": "gemma3_text", "final_logit_softcapping": None},
        {"model_type": "gemma3_text", "use_bidirectional_attention": False},
    ],
    ids=str,
)
def test_settings_that_say_what_is_so_anyway(changes: dict[str, Any]) -> None:
    read_config(LLAMA | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"head_dim": 0},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": "linear"},
        {"rope_theta": "large"},
        {"layer_types": [FULL], "sliding_window": 5},
        {"text_config": None},
    ],
    ids=str,
)
def test_nonsense_in_a_config_is_a_model_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    save(tmp_path, LLAMA | changes, {})
    with pytest.raises(SlipstreamError):
        ModelDirectory(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"llama"'])
def test_config_that_is_no_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelDirectory(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelDirectory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        ModelDirectory(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save(tmp_path, LLAMA, {"a": torch.zeros(2)})
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-2\.safetensors"):
        ModelDirectory(tmp_path)


@pytest.mark.parametrize("index", ["[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_damaged_index(tmp_path: Path, index: str) -> None:
    save(tmp_path, LLAMA, {"a": torch.zeros(2)})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        ModelDirectory(tmp_path)


def test_truncated_safetensors(tmp_path: Path) -> None:
    save(tmp_path, LLAMA, {"a": torch.zeros(100)})
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for length in range(0, len(whole), 7):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            ModelDirectory(tmp_path)


# Tensors --------------------------------------------------------------------------------------


def test_only_gemma_norms_get_their_one_back(tmp_path: Path) -> None:
    tensors = {"model.norm.weight": torch.zeros(3), "model.embed_tokens.weight": torch.zeros(2, 3)}
    for config, expected in ((LLAMA, 0.0), (GEMMA, 1.0)):
        save(tmp_path, config, tensors)
        read = ModelDirectory(tmp_path).tensors
        assert torch.all(read["model.norm.weight"].read() == expected)
        assert torch.all(read["model.embed_tokens.weight"].read() == 0)


def test_gemma_norms_add_one_without_rounding(tmp_path: Path) -> None:
    """1 + w in bfloat16 would lose most of a small w."""
    small = torch.tensor([2.0**-10], dtype=torch.bfloat16)
    save(tmp_path, GEMMA, {"model.norm.weight": small})
    assert ModelDirectory(tmp_path).tensors["model.norm.weight"].read().item() == 1 + 2.0**-10


def test_old_rotary_buffers_are_skipped(tmp_path: Path) -> None:
    save(tmp_path, LLAMA, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)})
    assert not ModelDirectory(tmp_path).tensors


def test_rows_are_the_bytes_of_the_tensor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    numbers = torch.arange(24.0).view(6, 4)
    tensors = {"a": torch.ones(3), "b": numbers, "c": numbers.bfloat16() + 1}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = ModelDirectory(tmp_path).tensors
    for name in ("b", "c"):
        rows = read[name].rows
        assert rows is not None
        some = torch.from_numpy(rows().blocks[1:4]).view(tensors[name].dtype)
        assert torch.equal(some, tensors[name][1:4])
