"""Loading packs a model while it reads it: the process never holds two copies of the weights."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

from packing import random_blocks
from slipstream import native
from slipstream.kernels.packed import Format

pytestmark = [
    pytest.mark.skipif(not native.is_available(), reason="no native kernels here"),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here"),
]

# 100 million weights, a third of them in one matrix: room enough for what else a process does.
VOCAB, HIDDEN, FFN, LAYERS = 32768, 1024, 4096, 4
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN, HIDDEN),
    "attn_v": (HIDDEN, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (FFN, HIDDEN),
    "ffn_up": (FFN, HIDDEN),
    "ffn_down": (HIDDEN, FFN),
}
NORMS = ("attn_norm", "ffn_norm")
HUB_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}

MEASURE = """
import sys
from pathlib import Path
from slipstream import native
from slipstream.loading.directory import ModelDirectory
from slipstream.loading.gguf import GGUFFile
from slipstream.loading.quantize import quantized
from slipstream.loading.weights import load_model

def num_bytes(name):
    return 1024 * int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])

path, *quantize = sys.argv[1:]
checkpoint = (ModelDirectory if Path(path).is_dir() else GGUFFile)(Path(path))
tensors = quantized(checkpoint.tensors, *quantize) if quantize else checkpoint.tensors
native.use_threads(1)
before = num_bytes("VmRSS")
model = load_model(checkpoint.config, tensors, dtype=None)
print((num_bytes("VmHWM") - before) / model.weight_bytes)
"""


def peak(path: Path, *quantize: str) -> float:
    """The most memory a process takes to load a model, in packed models; files' pages count."""
    command = [sys.executable, "-c", MEASURE, str(path), *quantize]
    # Every thread holds some rows; one does on any machine.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return float(
        subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    )


def test_gguf(
    tmp_path: Path, write_gguf: Callable[[Path, Mapping[str, Any], Mapping[str, Any]], Path]
) -> None:
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": 16,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    some = random_blocks(Format.Q8_0, 64, HIDDEN)

    def matrix(rows: int, columns: int) -> tuple[GGMLQuantizationType, np.ndarray]:
        return GGMLQuantizationType.Q8_0, np.resize(some, (rows, columns // 32 * 34))

    norm = np.ones(HIDDEN, np.float32)
    tensors: dict[str, Any] = {
        "token_embd.weight": matrix(VOCAB, HIDDEN),
        "output_norm.weight": norm,
    }
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.{name}.weight": matrix(*MATRICES[name]) for name in MATRICES}
        tensors |= {f"blk.{layer}.{name}.weight": norm for name in NORMS}
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors)
    assert peak(path) < 1.3


@pytest.mark.parametrize("quantize", [[], ["int8"]])
def test_directory(quantize: list[str], tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCAB, HIDDEN),
        "model.norm": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name, shape in {**MATRICES, **dict.fromkeys(NORMS, (HIDDEN,))}.items():
            shapes[f"model.layers.{layer}.{HUB_NAMES[name]}"] = shape
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(
        {
            f"{name}.weight": torch.ones(shape, dtype=torch.bfloat16)
            for name, shape in shapes.items()
        },
        tmp_path / "model.safetensors",
    )
    assert peak(tmp_path, *quantize) < 1.3
