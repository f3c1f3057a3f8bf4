"""Reading draft heads in the formats they are published in.

    eagle    SafeAILab: config.json of a one-layer model, `bias`; fc, layers.0, embed_tokens
    eagle3   the same with midlayer, norm, lm_head, d2t, t2d; or vllm-project's `speculators`
    medusa   FasterDecoding: config.json, medusa_lm_head.safetensors or .pt; {head}.{block}
    mtp      DeepSeek-V3: the layer after the last of a model's own checkpoint

`d2t` holds offsets: draft token i is token i + d2t[i] of the target. What a head may leave out (its
embedding, MTP's output head, Medusa's and EAGLE-3's with `original_lm_head`) is the target's where
it does; of the output head only the rows that d2t names, if there is one.
"""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.core.config import ModelConfig
from slipstream.core.errors import ModelError
from slipstream.loading.directory import read_config, read_json, read_shard, read_tensors
from slipstream.loading.pull import resolve
from slipstream.loading.weights import StoredTensor, cast, fill
from slipstream.models import CausalLM
from slipstream.models.deepseek_v3 import DeepseekV3Layer
from slipstream.models.heads import (
    Borrowed,
    Eagle3Head,
    EagleHead,
    FeatureHead,
    MedusaHead,
    MTPHead,
)
from slipstream.models.llama import LlamaLayer

Head = FeatureHead | MedusaHead
Tensors = dict[str, StoredTensor]

# Files that hold a whole head, the first that is there.
_FILES = (
    "model.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
)
# What an MTP module has besides the parts of its decoder layer.
_MTP_PARTS = ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head", "d2t", "t2d")
# The decoder layer of an MTP module is of its target's architecture.
_MTP_LAYERS: dict[str, Callable[[ModelConfig, int], nn.Module]] = {
    "llama": LlamaLayer,
    "mistral": LlamaLayer,
    "qwen2": LlamaLayer,
    "qwen3": partial(LlamaLayer, qk_norm=True),
    "deepseek_v3": DeepseekV3Layer,
}
# Ways to build an EAGLE-3 head that change what it computes and are not built here.
_EAGLE3_VARIANTS = ("norm_output", "norm_before_fc", "fc_norm")


def resolve_head(name: str) -> Path:
    """The directory a head's name stands for: a local one, or a repository of the hub.

    Raises:
        ModelError, DownloadError: as `pull.resolve`.
    """
    path = Path(name).expanduser()
    return path if path.is_dir() else resolve(name)


def load_head(method: str, path: Path, target: CausalLM) -> Head:
    """Read the head of a method, in the target's precision and on its device.

    Args:
        method: "eagle", "eagle3", "medusa" or "mtp".
        path: the head's directory; for mtp a model's, perhaps the target's own.

    Raises:
        ModelError: something is missing, surplus, or does not fit the target; it is named.
    """
    read = {"eagle": _eagle, "eagle3": _eagle3, "medusa": _medusa, "mtp": _mtp}[method]
    try:
        return read(path, target).to(target.device).eval()
    except ModelError as error:
        raise ModelError(f"{path} holds no {method} head for this target: {error}") from error


def _eagle(path: Path, target: CausalLM) -> Head:
    raw, tensors = read_json(path / "config.json"), _read(path)
    config = _layer_config(raw, tensors, "layers.0")
    _require_equal("hidden_size", config.hidden_size, target.config.hidden_size)
    _require_known_tokens(config, target)
    head = EagleHead(
        config,
        Borrowed.of(target),
        bias=bool(raw.get("bias", True)),
        has_embedding="embed_tokens.weight" in tensors,
        target_ids=_draft_vocabulary(tensors, target),
    )
    fill(cast(head, target.dtype), tensors)
    return head


def _eagle3(path: Path, target: CausalLM) -> Head:
    raw, tensors = read_json(path / "config.json"), _read(path)
    for variant in _EAGLE3_VARIANTS:
        if raw.get(variant):
            raise ModelError(f"{variant} {raw[variant]!r} in config.json is not supported")
    tensors = {
        name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()
    }
    layer = raw.get("transformer_layer_config", raw)
    config = _layer_config(layer, tensors, "midlayer")
    width = int(raw.get("target_hidden_size") or config.hidden_size)
    _require_equal("target_hidden_size", width, target.config.hidden_size)
    has_embedding = "embed_tokens.weight" in tensors
    if has_embedding:
        _require_known_tokens(config, target)
    else:
        _require_equal("hidden_size", config.hidden_size, target.config.hidden_size)
    num_layers = target.config.num_layers
    taps = raw.get("eagle_aux_hidden_state_layer_ids") or (2, num_layers // 2, num_layers - 3)
    if len(taps) != 3 or not all(0 <= int(layer) < num_layers for layer in taps):
        raise ModelError(
            f"eagle_aux_hidden_state_layer_ids {list(taps)} must be three layers of the target, "
            f"0 to {num_layers - 1}"
        )
    is_tied = bool(raw.get("original_lm_head"))
    if not is_tied and "lm_head.weight" not in tensors:
        raise ModelError("the checkpoint lacks lm_head.weight")
    target_ids = _draft_vocabulary(tensors, target)
    if target_ids is None:
        if is_tied:
            raise ModelError("the checkpoint lacks d2t")
        target_ids = _whole_vocabulary(tensors["lm_head.weight"], target.config.vocab_size)
    head = Eagle3Head(
        config,
        Borrowed.of(target),
        taps=[int(layer) for layer in taps],
        target_size=width,
        target_ids=target_ids,
        norm_before_residual=bool(raw.get("norm_before_residual")),
        has_embedding=has_embedding,
        is_tied=is_tied,
    )
    fill(cast(head, target.dtype), tensors)
    return head


def _medusa(path: Path, target: CausalLM) -> Head:
    raw, tensors = read_json(path / "config.json"), _read(path)
    # Published configs are wrong about these numbers; the keys are not.
    num_heads = sum(f"{head}.0.linear.weight" in tensors for head in range(len(tensors)))
    num_blocks = sum(f"0.{block}.linear.weight" in tensors for block in range(len(tensors)))
    if num_heads == 0 or num_blocks == 0:
        raise ModelError("the checkpoint lacks 0.0.linear.weight")
    tensors = {f"heads.{name}" if name[0].isdigit() else name: t for name, t in tensors.items()}
    is_tied = bool(raw.get("original_lm_head"))
    head = MedusaHead(
        target.config.hidden_size,
        Borrowed.of(target),
        num_heads=num_heads,
        num_blocks=num_blocks,
        is_tied=is_tied,
        target_ids=_draft_vocabulary(tensors, target) if is_tied else None,
    )
    fill(cast(head, target.dtype), tensors)
    return head


def _mtp(path: Path, target: CausalLM) -> Head:
    raw = read_json(path / "config.json")
    num_modules = raw.get("num_nextn_predict_layers", 0)
    if num_modules != 1:
        raise ModelError(f"num_nextn_predict_layers in config.json is {num_modules!r}, expected 1")
    whole = read_config(raw)
    if whole.model_type not in _MTP_LAYERS:
        raise ModelError(f"MTP modules of architecture {whole.model_type!r} are not supported")
    _require_equal("hidden_size", whole.hidden_size, target.config.hidden_size)
    _require_known_tokens(whole, target)
    prefix = f"model.layers.{whole.num_layers}."
    tensors = {
        _mtp_name(name.removeprefix(prefix)): tensor
        for name, tensor in read_tensors(path).items()
        if name.startswith(prefix)
    }
    config = one_layer(whole)
    has_head = "shared_head.head.weight" in tensors
    head = MTPHead(
        config,
        _MTP_LAYERS[whole.model_type](config, 0),
        Borrowed.of(target),
        has_embedding="embed_tokens.weight" in tensors,
        has_head=has_head,
        target_ids=None if has_head else _draft_vocabulary(tensors, target),
    )
    fill(cast(head, target.dtype), tensors)
    return head


def _mtp_name(name: str) -> str:
    """Parts of the decoder layer lie beside the others in a checkpoint, and by themselves here."""
    return name if name.startswith(_MTP_PARTS) else f"layer.{name}"


def one_layer(config: ModelConfig) -> ModelConfig:
    """The last layer of a model, as a model of its own."""
    return replace(
        config,
        num_layers=1,
        windows=(None,),
        rope_thetas=config.rope_thetas[-1:],
        rope_linear_factors=config.rope_linear_factors[-1:],
        experts=None if config.experts is None else replace(config.experts, first_layer=0),
    )


def _layer_config(raw: Mapping[str, Any], tensors: Tensors, layer: str) -> ModelConfig:
    """The shape of a head's layer; whether it has biases is for the tensors to say."""
    config = one_layer(read_config(dict(raw)))
    attention = f"{layer}.self_attn"
    return replace(
        config,
        qkv_bias=f"{attention}.q_proj.bias" in tensors,
        output_bias=f"{attention}.o_proj.bias" in tensors,
    )


def _draft_vocabulary(tensors: Tensors, target: CausalLM) -> Tensor | None:
    """Which token each draft token is, [V_d]; None where the checkpoint does not say.

    Takes d2t and t2d out of the tensors. A missing output head becomes the target's rows.
    """
    offsets, is_known = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if offsets is None:
        return None
    vocab_size, num_draft = target.config.vocab_size, offsets.shape[0]
    if "lm_head.weight" in tensors:
        _require_equal("the length of d2t", num_draft, tensors["lm_head.weight"].shape[0])
    ids = torch.arange(num_draft) + offsets.read().long()
    if bool((ids.diff() <= 0).any()) or not 0 <= int(ids[0]) <= int(ids[-1]) < vocab_size:
        raise ModelError(
            f"tensor d2t does not lead to ascending token ids below {vocab_size}; it must hold "
            "offsets, not ids"
        )
    if is_known is not None:
        members = is_known.read().bool()
        if members.nonzero().flatten().tolist() != ids.tolist():
            raise ModelError("tensors d2t and t2d disagree about the draft vocabulary")
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = _stored(target.output_rows(ids))
    return ids


def _whole_vocabulary(output_head: StoredTensor, vocab_size: int) -> Tensor:
    """The draft vocabulary of an EAGLE-3 head that names none."""
    num_draft = output_head.shape[0]
    if num_draft != vocab_size:
        raise ModelError(
            f"the checkpoint lacks d2t, and its lm_head.weight has {num_draft} rows, not the "
            f"target's {vocab_size}"
        )
    return torch.arange(vocab_size)


def _require_equal(name: str, found: int, expected: int) -> None:
    if found != expected:
        raise ModelError(f"{name} is {found}, the target needs {expected}")


def _require_known_tokens(config: ModelConfig, target: CausalLM) -> None:
    if config.vocab_size < target.config.vocab_size:
        raise ModelError(
            f"vocab_size is {config.vocab_size}, the target needs {target.config.vocab_size}"
        )


def _read(path: Path) -> Tensors:
    """The tensors of a head's one file, under their names without `model.`."""
    file = next((path / name for name in _FILES if (path / name).exists()), None)
    if file is None:
        raise ModelError(f"it has none of {', '.join(_FILES)}")
    tensors = read_shard(file) if file.suffix == ".safetensors" else _read_pickle(file)
    return {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if not name.endswith("rotary_emb.inv_freq")
    }


def _read_pickle(path: Path) -> Tensors:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        return {name: _stored(tensor) for name, tensor in content.items()}
    except (pickle.UnpicklingError, RuntimeError, EOFError, AttributeError) as error:
        raise ModelError(f"{path.name} is not a file of tensors: {error}") from error


def _stored(tensor: Tensor) -> StoredTensor:
    """A tensor in memory as if it were in a file."""
    return StoredTensor(tuple(tensor.shape), str(tensor.dtype), lambda: tensor)
