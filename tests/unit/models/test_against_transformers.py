"""Every architecture against transformers: random weights saved there, loaded here, same logits.

Weights are far from their usual small values, so that every part of the model shows in the logits.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import reference
from slipstream.loading.directory import ModelDirectory
from slipstream.loading.weights import load_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")

NUM_TOKENS = 60
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
    "attn_implementation": "eager",
}
# Wavelengths run from 6 to 350 positions: kept below 16, stretched above 64, blended between.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# One layer without experts, two with; values narrower than keys.
DEEPSEEK = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 12,
    "routed_scaling_factor": 2.5,
}
# Rope settings are in the older spelling, which old and new transformers both take.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama without shared heads": ("Llama", {"num_key_value_heads": 4}),
    "llama with one shared head": ("Llama", {"num_key_value_heads": 1}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True}),
    "llama 3": ("Llama", {"head_dim": 16, "rope_theta": 100.0, "rope_scaling": LLAMA3}),
    "llama linear": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral with window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"sliding_window": 7, "use_sliding_window": False}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 with window": (
        "Qwen2",
        {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3 tied": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "deepseek v3": ("DeepseekV3", DEEPSEEK),
    "deepseek v3 variants": (
        "DeepseekV3",
        DEEPSEEK | {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False},
    ),
    "deepseek v3 yarn": ("DeepseekV3", DEEPSEEK | {"rope_scaling": YARN}),
    # Six layers, the last of which sees everything, and one more.
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 7,
            "head_dim": 16,
            "sliding_window": 9,
            "rope_theta": 5000.0,
            "rope_local_base_freq": 50.0,
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma3 linear": (
        "Gemma3Text",
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "sliding_window": 9,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
}


def random_model(case: str) -> Any:
    import transformers

    family, changes = CASES[case]
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = getattr(transformers, f"{family}Config")(**SHAPE | changes)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            centre = 0.0 if family == "Gemma3Text" else 1.0
            parameter.data.copy_(centre + 0.3 * noise)
        elif "embed_tokens" in name or name.endswith("bias"):
            parameter.data.copy_(noise)
        else:
            parameter.data.copy_(1.5 * parameter.shape[-1] ** -0.5 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.5 * torch.randn(buffer.shape, generator=generator))
    return model


def largest_difference(model: Any, path: Path, dtype: torch.dtype = torch.float32) -> float:
    checkpoint = ModelDirectory(path)
    ours = load_model(checkpoint.config, checkpoint.tensors, dtype=dtype)
    tokens = [(7 * i * i + 3 * i) % SHAPE["vocab_size"] for i in range(NUM_TOKENS)]
    with torch.inference_mode():
        expected = model.to(dtype)(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.5, "flat logits would agree whatever the model does"
    return (reference.logits(ours, tokens) - expected).abs().max().item()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = random_model(case)
    model.save_pretrained(tmp_path)
    assert largest_difference(model, tmp_path) < 1e-4


@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_logits_in_double_precision(case: str, tmp_path: Path) -> None:
    """transformers keeps norms and angles in float32, so they are not closer than in float32."""
    model = random_model(case)
    model.save_pretrained(tmp_path)
    assert largest_difference(model, tmp_path, torch.float64) < 1e-4


def test_shards_are_read_as_one_checkpoint(tmp_path: Path) -> None:
    model = random_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert largest_difference(model, tmp_path) < 1e-4
