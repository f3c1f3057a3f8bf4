"""Writing draft heads in the formats `heads` reads, and for vLLM in that of `speculators`."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from slipstream.core.config import ModelConfig, RopeScaling, YarnScaling
from slipstream.core.errors import ModelError
from slipstream.loading.heads import Head
from slipstream.loading.weights import parameter_slots
from slipstream.models.heads import Eagle3Head, EagleHead, MedusaHead, MTPHead

_SPECULATORS_VERSION = "0.3.0"
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def write_head(head: Head, path: Path, target: ModelConfig) -> None:
    """Write a head as its authors publish theirs: `path`/config.json and a safetensors file.

    Args:
        target: the shape of the model it drafts for.

    Raises:
        ModelError: a target of a kind that `config.json` is not written for here.
    """
    file = "model.safetensors"
    tensors = _tensors(head)
    is_own = isinstance(head, Eagle3Head) and not head.is_tied
    if not is_own:
        tensors.pop("lm_head.weight", None)  # the target's
    if isinstance(head, EagleHead):
        config = _layer_json(head.config) | {"bias": head.fc.bias is not None}
    elif isinstance(head, Eagle3Head):
        config = _layer_json(head.config) | _eagle3_json(head) | {"original_lm_head": head.is_tied}
    elif isinstance(head, MedusaHead):
        file = "medusa_lm_head.safetensors"
        config = {
            "medusa_num_heads": len(head.heads),
            "medusa_num_layers": head.num_blocks,
            "original_lm_head": head.is_tied,
        }
        tensors = {name.removeprefix("heads."): each for name, each in tensors.items()}
    else:
        config = _layer_json(target) | {"num_nextn_predict_layers": 1}
    if head.target_ids is not None:
        tensors |= _vocabulary_maps(head.target_ids, target.vocab_size)
    if isinstance(head, MTPHead):
        prefix = f"model.layers.{target.num_layers}."
        tensors = {prefix + name.removeprefix("layer."): each for name, each in tensors.items()}
    _write(path, config, file, tensors)


def write_speculators(
    head: Eagle3Head, path: Path, target: ModelConfig, verifier: str, *, num_tokens: int = 5
) -> None:
    """Write an EAGLE-3 head as vLLM loads it.

    Args:
        target: the shape of the model it drafts for.
        verifier: name or path of that, for whoever loads the head.
        num_tokens: drafted by default.
    """
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _SPECULATORS_VERSION,
        "transformer_layer_config": _layer_json(head.config),
        **_eagle3_json(head),
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": verifier,
                "architectures": [_ARCHITECTURES[target.model_type]],
            },
        },
    }
    maps = _vocabulary_maps(head.target_ids, head.borrowed.vocab_size)
    tensors = {
        name.replace("midlayer.", "layers.0.", 1): tensor
        for name, tensor in (_tensors(head) | maps).items()
    }
    _write(path, config, "model.safetensors", tensors)


def _eagle3_json(head: Eagle3Head) -> dict[str, Any]:
    return {
        "draft_vocab_size": len(head.target_ids),
        "target_hidden_size": head.fc.weight.shape[1] // 3,
        "eagle_aux_hidden_state_layer_ids": list(head.taps),
        # Loaders differ in what they take for granted.
        "norm_before_residual": head.midlayer.norm_before_residual,
    }


def _vocabulary_maps(target_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """d2t: offsets from draft to target ids; t2d: which tokens of the target can be drafted."""
    ids = target_ids.cpu()
    is_known = torch.zeros(vocab_size, dtype=torch.bool)
    is_known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": is_known}


def _layer_json(config: ModelConfig) -> dict[str, Any]:
    """`config.json` of a model of this shape, in Hugging Face's words."""
    if config.rope_factors is not None:
        raise ModelError(
            "this model's rotary factors have no name in config.json; load the target from its "
            "safetensors directory"
        )
    raw: dict[str, Any] = {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_thetas[-1],
        "max_position_embeddings": config.context_length,
        "hidden_act": "silu",
        "attention_bias": config.output_bias,
        "tie_word_embeddings": config.tied,
    }
    if config.latent is not None:
        raw |= _deepseek_json(config)
    if isinstance(config.rope_scaling, RopeScaling):
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_context,
        }
    elif isinstance(config.rope_scaling, YarnScaling):
        share = _yarn_share(config, config.rope_scaling.factor)
        raw["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": config.rope_scaling.factor,
            "beta_fast": config.rope_scaling.beta_fast,
            "beta_slow": config.rope_scaling.beta_slow,
            "original_max_position_embeddings": config.rope_scaling.original_context,
            "mscale": share,
            "mscale_all_dim": share,
        }
    elif config.rope_linear_factors[-1] != 1.0:
        raw["rope_scaling"] = {"rope_type": "linear", "factor": config.rope_linear_factors[-1]}
    return raw


def _deepseek_json(config: ModelConfig) -> dict[str, Any]:
    """What a DeepSeek-V3 has besides: its latent and its experts."""
    latent, experts = config.latent, config.experts
    assert latent is not None
    assert experts is not None
    return {
        "num_key_value_heads": config.num_heads,
        "head_dim": latent.rotary_dim,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_nope_head_dim": latent.content_dim,
        "qk_rope_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "rope_interleave": latent.is_interleaved,
        "first_k_dense_replace": experts.first_layer,
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_chosen,
        "n_group": experts.num_groups,
        "topk_group": experts.num_chosen_groups,
        "n_shared_experts": experts.num_shared,
        "moe_intermediate_size": experts.size,
        "routed_scaling_factor": experts.scale,
        "norm_topk_prob": experts.is_normalised,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _yarn_share(config: ModelConfig, factor: float) -> float:
    """How far YaRN sharpens softmax, `mscale_all_dim`; 1 where it does not say."""
    if config.latent is None or factor <= 1.0:
        return 1.0
    plain = (config.latent.content_dim + config.latent.rotary_dim) ** -0.5
    return round((math.sqrt(config.attention_scale / plain) - 1.0) / (0.1 * math.log(factor)), 9)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Everything a head holds, under the names of its format, each in memory of its own."""
    return {name: slot.cpu().clone() for name, slot in parameter_slots(module)}


def _write(path: Path, config: dict[str, Any], file: str, tensors: dict[str, Tensor]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / file, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
