"""Reading a Hugging Face model directory: `config.json` and safetensors, single or sharded."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.core.config import (
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    RopeScaling,
    YarnScaling,
)
from slipstream.core.errors import ModelError
from slipstream.kernels.packed import StoredRows
from slipstream.loading.weights import FileRows, StoredTensor
from slipstream.models import check_supported

# Buffers that old checkpoints carry and no one needs.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
# The parts of a multimodal checkpoint that are not its text model, and how it names that.
_VISION = ("vision_tower.", "multi_modal_projector.")
_TEXT_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
_MOST_LAYERS = 4096


class ModelDirectory:
    """One model directory.

    Attributes:
        config: the model's shape.
        tensors: by name.

    Raises:
        ModelError: a file is missing or damaged, or the architecture is not supported.
    """

    def __init__(self, path: Path):
        self.path = path
        raw = read_json(path / "config.json")
        self.config = read_config(raw)
        self.tensors = read_tensors(path, plus_one=self.config.norm_plus_one)
        if raw.get("num_nextn_predict_layers"):
            # Layers past the last are MTP modules, which `heads` reads.
            last = self.config.num_layers
            extra = [name for name in self.tensors if name.startswith(f"model.layers.{last}.")]
            for name in extra:
                del self.tensors[name]


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """The shape of a model from the contents of its `config.json`."""
    model_type = str(raw.get("model_type"))
    check_supported(model_type)
    try:
        text_config = dict(raw.get("text_config", raw))
        _refuse_unknown(text_config, model_type)
        return _decoder_config(text_config, model_type)
    except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
        raise ModelError(
            f"config.json does not describe a {model_type} model: {error!r}"
        ) from error


def _refuse_unknown(raw: dict[str, Any], model_type: str) -> None:
    """Refuse what would change the model and is not built here, rather than leave it out."""
    expected = "gelu_pytorch_tanh" if model_type.startswith("gemma3") else "silu"
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or expected
    if activation != expected:
        raise ModelError(f"activation {activation!r} is not supported; {expected!r} is")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(key):
            raise ModelError(f"{key} {raw[key]!r} in config.json is not supported")
    for key, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if raw.get(key, known) != known:
            raise ModelError(f"{key} {raw[key]!r} in config.json is not supported; {known!r} is")
    rope = raw.get("rope_parameters") or {}
    rotated = raw.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
    if rotated != 1.0:
        raise ModelError("partial_rotary_factor in config.json is not supported")


def _decoder_config(raw: dict[str, Any], model_type: str) -> ModelConfig:

    def get(key: str, default: Any = None) -> Any:
        value = raw.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"config.json lacks {key}")
        return value

    num_layers, num_heads = int(get("num_hidden_layers")), int(get("num_attention_heads"))
    if not 0 < num_layers <= _MOST_LAYERS:
        raise ModelError(f"num_hidden_layers is {num_layers}; it must be 1 to {_MOST_LAYERS}")
    latent = _latent(raw) if model_type == "deepseek_v3" else None
    head_dim = int(get("head_dim", int(get("hidden_size")) // num_heads))
    num_kv_heads = int(get("num_key_value_heads", num_heads))
    if latent is not None:
        head_dim, num_kv_heads = latent.rank + latent.rotary_dim, 1
    is_gemma = model_type.startswith("gemma3")
    windows = _windows(raw, model_type, num_layers)
    ropes = [_rope(raw, window is not None and is_gemma) for window in windows]
    scale = float(raw.get("query_pre_attn_scalar") or head_dim) ** -0.5
    if latent is not None:
        scale = _latent_scale(raw, latent)
    return ModelConfig(
        model_type=model_type,
        vocab_size=int(get("vocab_size")),
        hidden_size=int(get("hidden_size")),
        intermediate_size=int(get("intermediate_size")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(get("rms_norm_eps")),
        context_length=int(get("max_position_embeddings")),
        windows=tuple(windows),
        rope_thetas=tuple(theta for theta, _, _ in ropes),
        rope_linear_factors=tuple(factor for _, factor, _ in ropes),
        rope_scaling=ropes[0][2],
        attention_scale=scale,
        qkv_bias=model_type == "qwen2" or bool(raw.get("attention_bias")),
        output_bias=model_type != "qwen2" and bool(raw.get("attention_bias")),
        tied=bool(get("tie_word_embeddings", is_gemma)),
        norm_plus_one=is_gemma,
        latent=latent,
        experts=None if latent is None else _experts(raw),
    )


def _latent(raw: dict[str, Any]) -> LatentConfig:
    """Attention of DeepSeek-V3."""
    query_rank = raw.get("q_lora_rank")
    return LatentConfig(
        query_rank=None if query_rank is None else int(query_rank),
        rank=int(raw["kv_lora_rank"]),
        content_dim=int(raw["qk_nope_head_dim"]),
        rotary_dim=int(raw["qk_rope_head_dim"]),
        value_dim=int(raw["v_head_dim"]),
        is_interleaved=bool(raw.get("rope_interleave", True)),
    )


def _latent_scale(raw: dict[str, Any], latent: LatentConfig) -> float:
    """D^-1/2, and more where YaRN stretches positions: then softmax must be sharper."""
    scale = (latent.content_dim + latent.rotary_dim) ** -0.5
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    share = float(rope.get("mscale_all_dim") or 0.0)
    return scale * (0.1 * share * math.log(max(float(rope.get("factor") or 1.0), 1.0)) + 1.0) ** 2


def _experts(raw: dict[str, Any]) -> ExpertsConfig:
    """Experts of DeepSeek-V3."""
    return ExpertsConfig(
        first_layer=int(raw["first_k_dense_replace"]),
        num_experts=int(raw["n_routed_experts"]),
        num_chosen=int(raw["num_experts_per_tok"]),
        num_groups=int(raw["n_group"]),
        num_chosen_groups=int(raw["topk_group"]),
        num_shared=int(raw.get("n_shared_experts") or 0),
        size=int(raw["moe_intermediate_size"]),
        scale=float(raw["routed_scaling_factor"]),
        is_normalised=bool(raw.get("norm_topk_prob", True)),
    )


def _windows(raw: dict[str, Any], model_type: str, num_layers: int) -> list[int | None]:
    window = raw.get("sliding_window")
    if not window or raw.get("use_sliding_window") is False:
        return [None] * num_layers
    if model_type.startswith("qwen") and "use_sliding_window" not in raw:
        return [None] * num_layers
    kinds = raw.get("layer_types")
    if kinds is None and model_type.startswith("gemma3"):
        period = raw.get("sliding_window_pattern") or 6
        kinds = ["sliding_attention" if (i + 1) % period else "full" for i in range(num_layers)]
    if kinds is None and model_type.startswith("qwen"):
        first = raw.get("max_window_layers", 0)
        kinds = ["sliding_attention" if i >= first else "full" for i in range(num_layers)]
    if kinds is None:
        return [int(window)] * num_layers
    if len(kinds) != num_layers:
        raise ValueError(f"{len(kinds)} layer_types for {num_layers} layers")
    return [int(window) if kind == "sliding_attention" else None for kind in kinds]


def _rope(
    raw: dict[str, Any], is_local: bool
) -> tuple[float, float, RopeScaling | YarnScaling | None]:
    """Base, linear factor and other scaling of a layer; older and newer spellings."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = "sliding_attention" if is_local else "full_attention"
    if kind in rope:
        rope = dict(rope[kind])
    elif is_local:
        return float(raw.get("rope_local_base_freq") or 10000.0), 1.0, None
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    name = rope.get("rope_type") or rope.get("type") or "default"
    if name == "default":
        return theta, 1.0, None
    if name == "linear":
        return theta, float(rope["factor"]), None
    if name == "llama3":
        scaling = RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_context=int(rope["original_max_position_embeddings"]),
        )
        return theta, 1.0, scaling
    # Only where these two are equal are angles turned without being scaled as well.
    if name == "yarn" and rope.get("mscale") == rope.get("mscale_all_dim", 0) != 0:
        stretched = YarnScaling(
            factor=float(rope["factor"]),
            beta_fast=float(rope.get("beta_fast") or 32),
            beta_slow=float(rope.get("beta_slow") or 1),
            original_context=int(rope["original_max_position_embeddings"]),
        )
        return theta, 1.0, stretched
    raise ModelError(
        f"rope scaling {name!r} is not supported; supported are linear, llama3, and yarn with "
        "mscale equal to mscale_all_dim"
    )


def read_tensors(path: Path, *, plus_one: bool = False) -> dict[str, StoredTensor]:
    """The tensors of a directory, still in their files.

    Args:
        plus_one: norms are stored less 1.

    Raises:
        ModelError: a file is missing or damaged.
    """
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(map(Path, read_json(index)["weight_map"].values())))
        except (KeyError, TypeError, AttributeError):
            raise ModelError(f"{index} has no weight_map of tensors to files") from None
    else:
        names = [Path("model.safetensors")]
    tensors = {}
    for name in names:
        tensors.update(read_shard(path / name, plus_one=plus_one))
    return tensors


def read_shard(path: Path, *, plus_one: bool = False) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; see `read_tensors`."""
    try:
        shard = safe_open(path, framework="pt")
        spans = _spans(path)
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}") from None
    except SafetensorError as error:
        raise ModelError(f"{path} is not a whole safetensors file: {error}") from error
    tensors = {}
    for name, (start, end) in spans.items():
        if name.endswith(_IGNORED_SUFFIXES) or name.removeprefix("model.").startswith(_VISION):
            continue
        view = shard.get_slice(name)
        is_norm = plus_one and name.endswith("norm.weight")

        def read(name: str = name, is_norm: bool = is_norm) -> Tensor:
            tensor = shard.get_tensor(name)
            return tensor.float() + 1 if is_norm else tensor

        shape = tuple(view.get_shape())
        rows = FileRows.of(path, start, shape, end - start)
        tensors[_text_name(name)] = StoredTensor(
            shape, view.get_dtype(), read, partial(StoredRows, rows)
        )
    return tensors


def _spans(path: Path) -> dict[str, tuple[int, int]]:
    """Where in a safetensors file each tensor begins and ends, which `safe_open` keeps to itself.

    The file is 8 bytes N, N bytes of JSON, and the tensors, counted from there.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    ends = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: (8 + size + start, 8 + size + end) for name, (start, end) in ends.items()}


def _text_name(name: str) -> str:
    """A tensor's name in a checkpoint of the text model alone."""
    for prefix, plain in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name
