"""Reading GGUF files: metadata, shapes, and tensors, as they are stored or dequantised.

The container is read by the `gguf` package. This file knows what its names mean, and undoes what
the conversion to GGUF did: rows of Llama's q and k are stored for interleaved rotary pairs.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from slipstream.core.config import ModelConfig
from slipstream.core.errors import ModelError
from slipstream.kernels.packed import StoredRows
from slipstream.loading.weights import FileRows, StoredTensor
from slipstream.models import check_supported

SUPPORTED_TYPES = frozenset(
    ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
)

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GGUFFile:
    """One GGUF file.

    Attributes:
        metadata: key -> value, arrays as lists.
        config: the model's shape.
        tensors: by their Hugging Face names.

    Raises:
        ModelError: not a whole GGUF file, or of an architecture or type we do not run.
    """

    def __init__(self, path: Path):
        self.path = path
        reader = _open(path)
        self.metadata = _metadata(reader)
        self.config = _config(self.metadata, reader)
        self.tensors = dict(_tensors(path, reader, self.config))


class _Reader(gguf.GGUFReader):
    """The package's reader, which steps through arrays in one loop instead of four calls an item.

    Vocabularies are arrays of some 10^5 strings, so this decides how long opening a file takes.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int):
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        item_type = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        (count,) = self._get(orig_offs + 4, np.uint64)
        parts: list[Any] = []
        offset = orig_offs + 12
        if item_type is gguf.GGUFValueType.STRING:
            view = self.data.data
            for _ in range(count):
                (length,) = struct.unpack_from("<Q", view, offset)
                parts.append(view[offset + 8 : offset + 8 + length])
                offset += 8 + length
                if offset > len(view):
                    raise ValueError("a string runs past the end of the file")
        elif (dtype := self.gguf_scalar_to_np.get(item_type)) is not None:
            parts.append(self._get(offset, dtype, int(count)))
            offset += parts[0].nbytes
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        types = [gguf.GGUFValueType.ARRAY, item_type]
        return offset - orig_offs, parts, list(range(len(parts))), types


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file alone."""
    return _metadata(_open(path))


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return _Reader(path)
    except FileNotFoundError:
        raise ModelError(f"no such file: {path}") from None
    except Exception as error:  # the reader fails in many ways on damaged files
        raise ModelError(f"{path} is not a whole GGUF file: {error}") from error


def _metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    try:
        return {
            key: field.contents()
            for key, field in reader.fields.items()
            if not key.startswith("GGUF.")
        }
    except UnicodeDecodeError as error:
        raise ModelError(f"the GGUF metadata has text that is not UTF-8: {error}") from error


def _config(metadata: dict[str, Any], reader: gguf.GGUFReader) -> ModelConfig:
    arch = str(metadata.get("general.architecture"))
    check_supported(arch)
    try:
        return _decoder_config(arch, metadata, reader)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"the GGUF metadata does not describe a {arch} model: {error}") from error


def _decoder_config(arch: str, metadata: dict[str, Any], reader: gguf.GGUFReader) -> ModelConfig:

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise ModelError(f"GGUF metadata lacks {arch}.{key}")
        return value

    num_layers, num_heads = int(get("block_count")), int(get("attention.head_count"))
    hidden_size = int(get("embedding_length"))
    head_dim = int(get("attention.key_length", hidden_size // num_heads))
    if not 0 < num_layers <= len(reader.tensors):
        raise ModelError(f"{arch}.block_count is {num_layers}; the file cannot hold such a model")
    _refuse_unknown(arch, metadata, head_dim)
    theta = float(get("rope.freq_base", 10000.0))
    factor = 1.0
    if metadata.get(f"{arch}.rope.scaling.type") == "linear":
        factor = float(get("rope.scaling.factor"))
    windows: list[int | None] = [None] * num_layers
    thetas, factors = [theta] * num_layers, [factor] * num_layers
    if window := metadata.get(f"{arch}.attention.sliding_window"):
        # Gemma 3 attends to everything in every sixth layer only.
        pattern = 6 if arch == "gemma3" else None
        for layer in range(num_layers):
            if pattern is None or (layer + 1) % pattern:
                windows[layer] = int(window)
                if arch == "gemma3":
                    thetas[layer] = float(get("rope.local.freq_base", 10000.0))
                    factors[layer] = 1.0
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("the checkpoint lacks tensor token_embd.weight")
    rope_factors = tensors.get("rope_freqs.weight")
    return ModelConfig(
        model_type=arch,
        vocab_size=int(embedding.shape[1]),
        hidden_size=hidden_size,
        intermediate_size=int(get("feed_forward_length")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(get("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        context_length=int(get("context_length")),
        windows=tuple(windows),
        rope_thetas=tuple(thetas),
        rope_linear_factors=tuple(factors),
        rope_factors=None if rope_factors is None else tuple(map(float, rope_factors.data)),
        attention_scale=_attention_scale(arch, num_layers, hidden_size // num_heads, head_dim),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        tied="output.weight" not in tensors,
    )


def _attention_scale(arch: str, num_layers: int, share: int, head_dim: int) -> float:
    # GGUF does not record it; of the Gemmas, the one of 27B has a scale of its own.
    return (share if arch == "gemma3" and num_layers == 62 else head_dim) ** -0.5


def _refuse_unknown(arch: str, metadata: dict[str, Any], head_dim: int) -> None:
    """Refuse what would change the model and is not built here, rather than leave it out."""
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ModelError(f"rope scaling {scaling!r} is not supported in GGUF; linear is")
    rotated = metadata.get(f"{arch}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(f"{arch}.rope.dimension_count {rotated} of {head_dim} is not supported")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if metadata.get(f"{arch}.{key}"):
            raise ModelError(f"{arch}.{key} is not supported")


def _tensors(
    path: Path, reader: gguf.GGUFReader, config: ModelConfig
) -> Iterator[tuple[str, StoredTensor]]:
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            continue  # already in the config
        kind = tensor.tensor_type.name
        if kind not in SUPPORTED_TYPES:
            known = ", ".join(sorted(SUPPORTED_TYPES))
            raise ModelError(f"tensor {tensor.name} is of type {kind}; supported are {known}")
        name = _hub_name(tensor.name, config.model_type)
        num_heads = 0
        if config.model_type == "llama" and name.endswith(("q_proj.weight", "q_proj.bias")):
            num_heads = config.num_heads
        elif config.model_type == "llama" and name.endswith(("k_proj.weight", "k_proj.bias")):
            num_heads = config.num_kv_heads

        shape = tuple(int(size) for size in reversed(tensor.shape))
        blocks = FileRows.of(path, tensor.data_offset, shape, tensor.n_bytes)
        yield name, _stored_tensor(shape, tensor.tensor_type, blocks, num_heads)


def _stored_tensor(
    shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, blocks: FileRows, num_heads: int
) -> StoredTensor:
    """A tensor of the file, its rows interleaved within so many heads; 0 is rows in order."""

    def read() -> Tensor:
        dense = torch.from_numpy(gguf.quants.dequantize(blocks[:], kind)).view(shape)
        return _half_split(dense, num_heads) if num_heads else dense

    def rows() -> StoredRows:
        if not num_heads:
            return StoredRows(blocks)
        order = torch.arange(shape[0]).unsqueeze(1)
        return StoredRows(blocks, _half_split(order, num_heads).squeeze(1).numpy())

    return StoredTensor(shape, kind.name, read, rows)


def _hub_name(name: str, arch: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    names = _GEMMA_LAYER_NAMES if arch == "gemma3" else _LAYER_NAMES
    if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)) and match[2] in names:
        return f"model.layers.{match[1]}.{names[match[2]]}.{kind}"
    return name  # unknown: reported as surplus under its own name


def _half_split(rows: Tensor, num_heads: int) -> Tensor:
    """Undo the interleaving of rotary pairs: rows (0, 1), (2, 3), .. back to (i, i + D / 2)."""
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(rows.shape)
