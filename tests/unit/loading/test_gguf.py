"""GGUF files: block formats, names and shapes, and files that are damaged in every way.

Files are written by the `gguf` package. What a block means, and what the conversion to GGUF did to
a checkpoint, is spelled out here once more.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save_file

from slipstream import reference
from slipstream.core.errors import ModelError, SlipstreamError
from slipstream.loading.directory import ModelDirectory
from slipstream.loading.gguf import SUPPORTED_TYPES, GGUFFile, read_metadata
from slipstream.loading.weights import load_model

WriteGGUF = Callable[[Path, Mapping[str, Any], Mapping[str, Any]], Path]
Weights = dict[str, np.ndarray]

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 32, 16, 4, 2, 8, 24
TOKENS = [(5 * i * i + i) % VOCAB for i in range(40)]

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


# The same checkpoint in both formats ----------------------------------------------------------


def make_weights(model_type: str, num_layers: int, *, bias: bool = False) -> Weights:
    """A random checkpoint under the names of Hugging Face."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        centre = 0.0 if model_type == "gemma3" else 1.0
        return (centre + 0.3 * rng.standard_normal(size)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN) * 4,
        "model.norm.weight": norm(HIDDEN),
    }
    norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
    if model_type in ("qwen3", "gemma3"):
        norms |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
    if model_type == "gemma3":
        norms |= {"pre_feedforward_layernorm": HIDDEN, "post_feedforward_layernorm": HIDDEN}
    matrices = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    for layer in range(num_layers):
        for name, size in norms.items():
            weights[f"model.layers.{layer}.{name}.weight"] = norm(size)
        for name, shape in matrices.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
            if bias and name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                weights[f"model.layers.{layer}.{name}.bias"] = norm(shape[0])
    return weights


def to_gguf(weights: Weights, arch: str) -> Weights:
    """What the conversion does: other names, interleaved rows, and whole norm weights."""
    names = GEMMA_NAMES if arch == "gemma3" else GGUF_NAMES
    converted = {}
    for name, array in weights.items():
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            new_name = f"blk.{layer}.{names[part]}.{kind}"
        else:
            new_name = f"{names[stem]}.{kind}"
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            array = interleave(array, HEADS if stem.endswith("q_proj") else KV_HEADS)
        if arch == "gemma3" and stem.endswith("norm"):
            array = array + np.float32(1)
        converted[new_name] = array
    return converted


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from the order 0 1 2 | 3 4 5 to 0 3 1 4 2 5."""
    order = np.arange(HEAD_DIM).reshape(2, -1).T.ravel()
    heads = [h * HEAD_DIM + order for h in range(num_heads)]
    return rows[np.concatenate(heads)]


def gguf_metadata(arch: str, num_layers: int, **more: Any) -> dict[str, Any]:
    shape = {
        "block_count": num_layers,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-3,
        "rope.freq_base": 500.0,
    }
    prefixed = {f"{arch}.{key}": value for key, value in (shape | more).items()}
    return {"general.architecture": arch, **prefixed}


def write_directory(
    path: Path, model_type: str, num_layers: int, weights: Weights, **more: Any
) -> Path:
    config = {
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-3,
        "max_position_embeddings": 64,
        "rope_theta": 500.0,
        "tie_word_embeddings": "lm_head.weight" not in weights,
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | more))
    save_file(weights, path / "model.safetensors")
    return path


def logits(checkpoint: GGUFFile | ModelDirectory) -> torch.Tensor:
    model = load_model(checkpoint.config, checkpoint.tensors, dtype=torch.float32)
    return reference.logits(model, TOKENS)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_and_directory_give_the_same_logits(
    model_type: str, tied: bool, tmp_path: Path, write_gguf: WriteGGUF
) -> None:
    weights = make_weights(model_type, 2, bias=model_type == "qwen2")
    if not tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"][::-1].copy()
    directory = write_directory(tmp_path / "directory", model_type, 2, weights)
    file = write_gguf(
        tmp_path / "model.gguf", gguf_metadata(model_type, 2), to_gguf(weights, model_type)
    )
    assert torch.equal(logits(GGUFFile(file)), logits(ModelDirectory(directory)))


def test_biases_are_interleaved_like_their_rows(tmp_path: Path, write_gguf: WriteGGUF) -> None:
    weights = make_weights("llama", 1, bias=True)
    file = write_gguf(tmp_path / "model.gguf", gguf_metadata("llama", 1), to_gguf(weights, "llama"))
    read = GGUFFile(file).tensors
    for name in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.0.self_attn.{name}.bias"
        np.testing.assert_array_equal(read[name].read().numpy(), weights[name])


@pytest.mark.parametrize("scaled", [False, True])
def test_gemma_norms_windows_and_bases(scaled: bool, tmp_path: Path, write_gguf: WriteGGUF) -> None:
    """Seven layers: five with windows, one that sees everything, and one more with a window."""
    weights = make_weights("gemma3", 7)
    directory = write_directory(
        tmp_path / "directory",
        "gemma3_text",
        7,
        weights,
        sliding_window=5,
        query_pre_attn_scalar=HEAD_DIM,
        rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0} if scaled else None,
    )
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0} if scaled else {}
    metadata = gguf_metadata("gemma3", 7, **{"attention.sliding_window": 5}, **scaling)
    file = write_gguf(tmp_path / "model.gguf", metadata, to_gguf(weights, "gemma3"))
    config = GGUFFile(file).config
    assert config.windows == (5, 5, 5, 5, 5, None, 5)
    assert config.rope_thetas == (10000.0,) * 5 + (500.0, 10000.0)
    assert torch.equal(logits(GGUFFile(file)), logits(ModelDirectory(directory)))


def test_linear_scaling(tmp_path: Path, write_gguf: WriteGGUF) -> None:
    weights = make_weights("llama", 2)
    directory = write_directory(
        tmp_path / "directory",
        "llama",
        2,
        weights,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    )
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    file = write_gguf(
        tmp_path / "model.gguf",
        gguf_metadata("llama", 2, **scaling),
        to_gguf(weights, "llama"),
    )
    assert torch.equal(logits(GGUFFile(file)), logits(ModelDirectory(directory)))


def test_rope_freqs_are_the_stretching_of_llama3(tmp_path: Path, write_gguf: WriteGGUF) -> None:
    """The conversion writes the divisors that config.json only describes."""
    factor, low, high, context = 8.0, 1.0, 4.0, 64
    divisors = []
    for i in range(HEAD_DIM // 2):
        wavelength = 2 * math.pi * 500.0 ** (2 * i / HEAD_DIM)
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(factor)
        else:
            kept = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - kept) / factor + kept))
    assert divisors[0] == 1.0 and 1.0 < divisors[1] < factor and divisors[-1] == factor

    weights = make_weights("llama", 2)
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
    directory = write_directory(tmp_path / "directory", "llama", 2, weights, rope_scaling=scaling)
    tensors = to_gguf(weights, "llama") | {"rope_freqs.weight": np.array(divisors, np.float32)}
    file = write_gguf(tmp_path / "model.gguf", gguf_metadata("llama", 2), tensors)
    expected = logits(ModelDirectory(directory))
    torch.testing.assert_close(logits(GGUFFile(file)), expected, rtol=0, atol=1e-4)


# Metadata -------------------------------------------------------------------------------------


def test_metadata_is_what_the_package_reads(tmp_path: Path) -> None:
    """Our reader of arrays is a shortcut through the package's own, so both must agree."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"uint{bits}", 2**bits - 1)
        getattr(writer, f"add_int{bits}")(f"int{bits}", -(2 ** (bits - 1)))
    writer.add_float32("float32", 0.5)
    writer.add_float64("float64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "naïve 文\n")
    writer.add_array("texts", ["", "a", "naïve", "▁文", "x" * 1000])
    writer.add_array("integers", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("flags", [True, False, True])
    writer.add_array("lists", [[1, 2], [3, 4]])
    writer.add_string("last", "end")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    fields = gguf.GGUFReader(path).fields
    expected = {key: field.contents() for key, field in fields.items() if "GGUF." not in key}
    metadata = read_metadata(path)
    assert metadata == expected
    assert metadata["texts"][3] == "▁文" and metadata["integers"] == [1, -2, 3]
    assert metadata["flags"] == [True, False, True] and metadata["last"] == "end"


def test_what_is_left_out_follows_from_the_rest(tmp_path: Path, write_gguf: WriteGGUF) -> None:
    metadata = gguf_metadata("llama", 2)
    for key in ("attention.head_count_kv", "attention.key_length", "rope.freq_base"):
        del metadata[f"llama.{key}"]
    file = write_gguf(tmp_path / "a.gguf", metadata, to_gguf(make_weights("llama", 2), "llama"))
    config = GGUFFile(file).config
    assert config.num_kv_heads == HEADS
    assert config.head_dim == HIDDEN // HEADS
    assert config.rope_thetas == (10000.0, 10000.0)


# Blocks, decoded one element at a time ---------------------------------------------------------


def half(block: bytes, at: int) -> float:
    return struct.unpack_from("<e", block, at)[0]


def nibbles(block: bytes) -> list[int]:
    """Low halves of all bytes, then high halves."""
    return [byte & 15 for byte in block] + [byte >> 4 for byte in block]


def fifth_bits(block: bytes) -> list[int]:
    word = int.from_bytes(block, "little")
    return [word >> i & 1 for i in range(32)]


def decode_q8_0(b: bytes) -> Iterator[float]:
    for q in struct.unpack_from("<32b", b, 2):
        yield half(b, 0) * q


def decode_q4_0(b: bytes) -> Iterator[float]:
    for n in nibbles(b[2:18]):
        yield half(b, 0) * (n - 8)


def decode_q4_1(b: bytes) -> Iterator[float]:
    for n in nibbles(b[4:20]):
        yield half(b, 0) * n + half(b, 2)


def decode_q5_0(b: bytes) -> Iterator[float]:
    for n, bit in zip(nibbles(b[6:22]), fifth_bits(b[2:6]), strict=True):
        yield half(b, 0) * (n + 16 * bit - 16)


def decode_q5_1(b: bytes) -> Iterator[float]:
    for n, bit in zip(nibbles(b[8:24]), fifth_bits(b[4:8]), strict=True):
        yield half(b, 0) * (n + 16 * bit) + half(b, 2)


def packed_scales(s: bytes) -> Iterator[tuple[int, int]]:
    """Scale and minimum of each of 8 sub-blocks, 6 bits each, from 12 bytes."""
    for j in range(4):
        yield s[j] & 63, s[j + 4] & 63
    for j in range(4, 8):
        yield (
            s[j + 4] & 15 | s[j - 4] >> 6 << 4,
            s[j + 4] >> 4 | s[j] >> 6 << 4,
        )


def decode_q4_k(b: bytes) -> Iterator[float]:
    for j, (scale, minimum) in enumerate(packed_scales(b[4:16])):
        pair = nibbles(b[16 + 32 * (j // 2) : 48 + 32 * (j // 2)])
        for n in pair[32 * (j % 2) :][:32]:
            yield half(b, 0) * scale * n - half(b, 2) * minimum


def decode_q5_k(b: bytes) -> Iterator[float]:
    for j, (scale, minimum) in enumerate(packed_scales(b[4:16])):
        pair = nibbles(b[48 + 32 * (j // 2) : 80 + 32 * (j // 2)])
        for n, high in zip(pair[32 * (j % 2) :][:32], b[16:48], strict=True):
            yield half(b, 0) * scale * (n + 16 * (high >> j & 1)) - half(b, 2) * minimum


def decode_q6_k(b: bytes) -> Iterator[float]:
    for h in range(2):
        low, high = b[64 * h : 64 * h + 64], b[128 + 32 * h : 160 + 32 * h]
        scales = struct.unpack_from("<8b", b, 192 + 8 * h)
        for e in range(128):
            n = low[e % 64] >> (4 if e >= 64 else 0) & 15
            n |= (high[e % 32] >> 2 * (e // 32) & 3) << 4
            yield half(b, 208) * scales[e // 16] * (n - 32)


DECODERS = {
    "F32": (4, lambda b: struct.unpack("<f", b)),
    "F16": (2, lambda b: struct.unpack("<e", b)),
    "BF16": (2, lambda b: struct.unpack("<f", b"\0\0" + b)),
    "Q8_0": (34, decode_q8_0),
    "Q4_0": (18, decode_q4_0),
    "Q4_1": (20, decode_q4_1),
    "Q5_0": (22, decode_q5_0),
    "Q5_1": (24, decode_q5_1),
    "Q4_K": (144, decode_q4_k),
    "Q5_K": (176, decode_q5_k),
    "Q6_K": (210, decode_q6_k),
}
# Where the float16 scales of a block lie; everything else in it may be anything.
SCALES = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
}


def random_blocks(kind: str, num_elements: int, rng: np.random.Generator) -> bytes:
    if kind in ("F32", "F16", "BF16"):
        values = rng.standard_normal(num_elements).astype(np.float32)
        if kind == "BF16":  # the upper halves of float32
            return values.view(np.uint16)[1::2].tobytes()
        return values.astype(np.float32 if kind == "F32" else np.float16).tobytes()
    block_size = 256 if kind.endswith("K") else 32
    blocks = []
    for _ in range(num_elements // block_size):
        block = bytearray(rng.bytes(DECODERS[kind][0]))
        for at in SCALES[kind]:
            struct.pack_into("<e", block, at, rng.uniform(-2, 2))
        blocks.append(bytes(block))
    return b"".join(blocks)


def with_down_proj(tensors: Weights, kind: str, data: bytes, rows: int) -> dict[str, Any]:
    array = np.frombuffer(data, np.uint8).reshape(rows, -1)
    return {**tensors, "blk.0.ffn_down.weight": (Kind[kind], array)}


def test_every_supported_type_has_a_decoder_here() -> None:
    assert DECODERS.keys() == SUPPORTED_TYPES


@pytest.mark.parametrize("kind", sorted(SUPPORTED_TYPES))
def test_blocks_mean_what_their_layout_says(
    kind: str, tmp_path: Path, write_gguf: WriteGGUF
) -> None:
    num_rows, num_columns = 6, 512
    data = random_blocks(kind, num_rows * num_columns, np.random.default_rng(1))
    tensors = with_down_proj(to_gguf(make_weights("llama", 1), "llama"), kind, data, num_rows)
    file = write_gguf(tmp_path / "model.gguf", gguf_metadata("llama", 1), tensors)

    stored = GGUFFile(file).tensors["model.layers.0.mlp.down_proj.weight"]
    assert stored.kind == kind and stored.shape == (num_rows, num_columns)
    num_bytes, decode = DECODERS[kind]
    blocks = (data[at : at + num_bytes] for at in range(0, len(data), num_bytes))
    expected = np.array([value for block in blocks for value in decode(block)])
    read = stored.read()
    assert read.dtype == torch.float32
    # The reader multiplies in float32, and values reach 2 * 127 * 63.
    np.testing.assert_allclose(
        read.numpy(), expected.reshape(num_rows, num_columns), rtol=1e-6, atol=1e-3
    )
    assert stored.rows is not None
    rows = np.frombuffer(data, np.uint8).reshape(num_rows, -1)
    np.testing.assert_array_equal(stored.rows().blocks[2:5], rows[2:5])


@pytest.mark.parametrize(
    ("kind", "largest_error"),
    [
        ("F32", 0.0),
        ("F16", 2**-11),
        ("BF16", 2**-8),
        ("Q8_0", 0.5 / 127 + 2**-11),
        ("Q5_0", 1 / 16),
        ("Q5_1", 1 / 31),
        ("Q4_0", 1 / 8),
        ("Q4_1", 1 / 15),
    ],
)
def test_quantised_weights_stay_close_to_what_they_were(
    kind: str, largest_error: float, tmp_path: Path, write_gguf: WriteGGUF
) -> None:
    """Element order and orientation, with blocks the package packed."""
    weights = np.random.default_rng(2).uniform(-1, 1, (6, 64)).astype(np.float32)
    packed = gguf.quants.quantize(weights, Kind[kind])
    tensors = {**to_gguf(make_weights("llama", 1), "llama")}
    tensors["blk.0.ffn_down.weight"] = (Kind[kind], packed)
    file = write_gguf(tmp_path / "model.gguf", gguf_metadata("llama", 1), tensors)
    read = GGUFFile(file).tensors["model.layers.0.mlp.down_proj.weight"].read().numpy()
    assert np.abs(read - weights).max() <= largest_error


def test_rows_of_quantised_queries_are_put_back_as_well(
    tmp_path: Path, write_gguf: WriteGGUF
) -> None:
    weights = np.random.default_rng(3).uniform(-1, 1, (HEADS * HEAD_DIM, 32)).astype(np.float32)
    packed = gguf.quants.quantize(interleave(weights, HEADS), Kind.Q8_0)
    tensors = {**to_gguf(make_weights("llama", 1), "llama")}
    tensors["blk.0.attn_q.weight"] = (Kind.Q8_0, packed)
    file = write_gguf(tmp_path / "model.gguf", gguf_metadata("llama", 1), tensors)
    stored = GGUFFile(file).tensors["model.layers.0.self_attn.q_proj.weight"]
    read = stored.read().numpy()
    assert np.abs(read - weights).max() < 0.005
    assert stored.rows is not None
    rows = stored.rows()
    as_stored = gguf.quants.dequantize(rows.blocks[0 : len(weights)], Kind.Q8_0)
    np.testing.assert_array_equal(as_stored[rows.order], read)


# Damage ---------------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path: Path, write_gguf: WriteGGUF) -> Path:
    """A small file with every kind of thing in it."""
    metadata = gguf_metadata("llama", 1) | {
        "tokenizer.ggml.tokens": ["a", "b", "naïve"],
        "tokenizer.ggml.scores": [0.5, 1.5, 2.5],
        "tokenizer.chat_template": "{{ messages }}",
    }
    return write_gguf(tmp_path / "whole.gguf", metadata, to_gguf(make_weights("llama", 1), "llama"))


def damaged(whole: Path, data: bytes) -> Path:
    path = whole.with_name("damaged.gguf")
    path.write_bytes(data)
    return path


def test_a_whole_file_can_be_loaded(whole: Path) -> None:
    assert logits(GGUFFile(whole)).isfinite().all()


def test_a_file_cut_off_anywhere(whole: Path) -> None:
    data = whole.read_bytes()
    first_tensor = min(int(t.data_offset) for t in gguf.GGUFReader(whole).tensors)
    header = range(0, first_tensor, 17)
    body = [first_tensor, (first_tensor + len(data)) // 2, len(data) - 1]
    for length in [*range(40), *header, *body]:
        with pytest.raises(ModelError, match="not a whole GGUF file"):
            GGUFFile(damaged(whole, data[:length]))


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 100, b"GGUF", b"GGUF" + b"\xff" * 200, b"GGML" + b"\0" * 200, b"{}" * 100],
)
def test_garbage(data: bytes, whole: Path) -> None:
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        GGUFFile(damaged(whole, data))


def test_wrong_magic_and_version(whole: Path) -> None:
    data = whole.read_bytes()
    for change in (b"GGUX" + data[4:], data[:4] + struct.pack("<I", 99) + data[8:]):
        with pytest.raises(ModelError, match="not a whole GGUF file"):
            GGUFFile(damaged(whole, change))


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        GGUFFile(tmp_path / "absent.gguf")


@pytest.mark.parametrize("length", [1000, 2**31, 2**63, 2**64 - 1])
@pytest.mark.parametrize("text", ["general.architecture", "llama", "a", "naïve"])
def test_strings_longer_than_the_file(text: str, length: int, whole: Path) -> None:
    """The length before a key, a value, the first item and the last item of an array."""
    data = whole.read_bytes()
    content = text.encode()
    marked = struct.pack("<Q", len(content)) + content
    assert marked in data
    with pytest.raises(ModelError):
        GGUFFile(damaged(whole, data.replace(marked, struct.pack("<Q", length) + content, 1)))


@pytest.mark.parametrize("count", [1000, 2**31, 2**63, 2**64 - 1])
@pytest.mark.parametrize("what", ["tensors", "keys"])
def test_counts_larger_than_the_file(what: str, count: int, whole: Path) -> None:
    data = bytearray(whole.read_bytes())
    struct.pack_into("<Q", data, 8 if what == "tensors" else 16, count)
    with pytest.raises(ModelError):
        GGUFFile(damaged(whole, bytes(data)))


def test_arrays_longer_than_the_file(whole: Path) -> None:
    data = whole.read_bytes()
    for item_type in (gguf.GGUFValueType.STRING, gguf.GGUFValueType.FLOAT32):
        header = struct.pack("<IQ", item_type, 3)
        assert header in data
        for count in (1000, 2**31, 2**63, 2**64 - 1):
            longer = struct.pack("<IQ", item_type, count)
            with pytest.raises(ModelError):
                GGUFFile(damaged(whole, data.replace(header, longer, 1)))


def test_text_that_is_not_utf8(whole: Path) -> None:
    data = whole.read_bytes()
    for text in ("naïve".encode(), b"{{ messages }}", b"llama.block_count", b"blk.0.ffn_up"):
        assert text in data
        changed = data.replace(text, b"\xff" + text[1:], 1)
        with pytest.raises(ModelError):
            GGUFFile(damaged(whole, changed))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("block_count", 50),
        ("block_count", 2**32 - 1),
        ("embedding_length", 0),
        ("embedding_length", 2**31),
        ("feed_forward_length", 0),
        ("feed_forward_length", 2**31),
        ("attention.head_count", 0),
        ("attention.head_count", 2**31),
        ("attention.head_count_kv", 0),
        ("attention.head_count_kv", 2**31),
        ("attention.head_count_kv", 3),
        ("attention.head_count_kv", [2]),
        ("attention.key_length", 0),
        ("attention.key_length", 7),
        ("attention.layer_norm_rms_epsilon", "small"),
    ],
    ids=str,
)
def test_numbers_that_cannot_be(
    key: str, value: Any, tmp_path: Path, write_gguf: WriteGGUF
) -> None:
    tensors = to_gguf(make_weights("llama", 1), "llama")
    file = write_gguf(tmp_path / "model.gguf", gguf_metadata("llama", 1, **{key: value}), tensors)
    with pytest.raises(SlipstreamError):
        logits(GGUFFile(file))


# What does not fit ----------------------------------------------------------------------------


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        logits(GGUFFile(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_unsupported_architecture(tmp_path: Path, write_gguf: WriteGGUF) -> None:
    tensors = to_gguf(make_weights("llama", 1), "llama")
    message = refusal(write_gguf(tmp_path / "a.gguf", gguf_metadata("mamba", 1), tensors))
    assert "'mamba' is not supported" in message and "llama" in message


@pytest.mark.parametrize(("kind", "num_bytes"), [("Q2_K", 84), ("IQ4_NL", 144), ("F64", 2048)])
def test_unsupported_type(kind: str, num_bytes: int, tmp_path: Path, write_gguf: WriteGGUF) -> None:
    tensors = with_down_proj(
        to_gguf(make_weights("llama", 1), "llama"), kind, bytes(HIDDEN * num_bytes), HIDDEN
    )
    message = refusal(write_gguf(tmp_path / "a.gguf", gguf_metadata("llama", 1), tensors))
    assert f"blk.0.ffn_down.weight is of type {kind}" in message and "Q4_K" in message


@pytest.mark.parametrize(
    "key", ["block_count", "embedding_length", "attention.layer_norm_rms_epsilon"]
)
def test_missing_metadata(key: str, tmp_path: Path, write_gguf: WriteGGUF) -> None:
    metadata = gguf_metadata("llama", 1)
    del metadata[f"llama.{key}"]
    tensors = to_gguf(make_weights("llama", 1), "llama")
    assert f"lacks llama.{key}" in refusal(write_gguf(tmp_path / "a.gguf", metadata, tensors))


@pytest.mark.parametrize("stem", ["token_embd", "output_norm", "blk.0.attn_k", "blk.0.ffn_norm"])
def test_missing_tensor(stem: str, tmp_path: Path, write_gguf: WriteGGUF) -> None:
    tensors = to_gguf(make_weights("llama", 1), "llama")
    del tensors[f"{stem}.weight"]
    file = write_gguf(tmp_path / "a.gguf", gguf_metadata("llama", 1), tensors)
    names = {gguf_name: name for name, gguf_name in GGUF_NAMES.items()}
    message = refusal(file)
    assert "lacks" in message
    assert stem in message or names[stem.removeprefix("blk.0.")] in message


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.0.ffn_gate_inp.weight", "x"])
def test_surplus_tensor(name: str, tmp_path: Path, write_gguf: WriteGGUF) -> None:
    tensors = to_gguf(make_weights("llama", 1), "llama") | {name: np.ones(4, np.float32)}
    message = refusal(write_gguf(tmp_path / "a.gguf", gguf_metadata("llama", 1), tensors))
    assert "no layer uses" in message
    assert name in message or "model.layers.0.self_attn.q_norm.weight" in message


def test_wrong_shape(tmp_path: Path, write_gguf: WriteGGUF) -> None:
    tensors = to_gguf(make_weights("llama", 1), "llama")
    tensors["blk.0.ffn_up.weight"] = tensors["blk.0.ffn_up.weight"].T.copy()
    message = refusal(write_gguf(tmp_path / "a.gguf", gguf_metadata("llama", 1), tensors))
    assert "model.layers.0.mlp.up_proj.weight" in message
    assert "[16, 24]" in message and "[24, 16]" in message


def test_one_nan_is_found(tmp_path: Path, write_gguf: WriteGGUF) -> None:
    tensors = to_gguf(make_weights("llama", 1), "llama")
    tensors["blk.0.attn_v.weight"][3, 5] = np.nan
    message = refusal(write_gguf(tmp_path / "a.gguf", gguf_metadata("llama", 1), tensors))
    assert "model.layers.0.self_attn.v_proj.weight contains NaN" in message


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "yarn"),
        ({"rope.dimension_count": HEAD_DIM // 2}, "rope.dimension_count"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_settings_we_do_not_compute_are_refused(
    settings: dict[str, Any], named: str, tmp_path: Path, write_gguf: WriteGGUF
) -> None:
    """Ignoring them would give other logits without a word."""
    tensors = to_gguf(make_weights("llama", 1), "llama")
    metadata = gguf_metadata("llama", 1, **settings)
    assert named in refusal(write_gguf(tmp_path / "a.gguf", metadata, tensors))


def test_settings_that_say_what_is_so_anyway(tmp_path: Path, write_gguf: WriteGGUF) -> None:
    tensors = to_gguf(make_weights("llama", 1), "llama")
    settings = {"rope.scaling.type": "none", "rope.dimension_count": HEAD_DIM}
    GGUFFile(write_gguf(tmp_path / "a.gguf", gguf_metadata("llama", 1, **settings), tensors))
