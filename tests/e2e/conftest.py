"""A whole model in one small file: random weights, a tokenizer and a chat template."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT, VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 256, 100, 32, 4, 2, 8, 48, 2


@pytest.fixture(scope="session")
def tiny_metadata() -> dict[str, Any]:
    """Printable ASCII one character each, a space, a newline, two merges, two control tokens."""
    tokens = [chr(c) for c in range(0x21, 0x7F)] + ["Ġ", "Ċ", "th", "the", *CONTROL_TOKENS]
    assert len(tokens) == VOCAB
    shape = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500.0,
    }
    return {
        "general.architecture": "qwen3",
        **{f"qwen3.{key}": value for key, value in shape.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (VOCAB - 2) + [3, 3],
        "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.eos_token_id": VOCAB - 1,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


@pytest.fixture(scope="session")
def tiny_tensors() -> dict[str, np.ndarray]:
    """Random weights, large enough that logits are far from flat."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (2 * rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    tensors = {
        "token_embd.weight": matrix(VOCAB, HIDDEN),
        "output.weight": matrix(VOCAB, HIDDEN),
        "output_norm.weight": norm(HIDDEN),
    }
    for layer in range(LAYERS):
        parts = {
            "attn_norm": norm(HIDDEN),
            "attn_q": matrix(HEADS * HEAD_DIM, HIDDEN),
            "attn_k": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": matrix(HIDDEN, HEADS * HEAD_DIM),
            "attn_q_norm": norm(HEAD_DIM),
            "attn_k_norm": norm(HEAD_DIM),
            "ffn_norm": norm(HIDDEN),
            "ffn_gate": matrix(FFN, HIDDEN),
            "ffn_up": matrix(FFN, HIDDEN),
            "ffn_down": matrix(HIDDEN, FFN),
        }
        tensors |= {f"blk.{layer}.{name}.weight": array for name, array in parts.items()}
    return tensors


@pytest.fixture(scope="session")
def tiny_gguf(
    tmp_path_factory: pytest.TempPathFactory,
    write_gguf: Callable[..., Path],
    tiny_metadata: dict[str, Any],
    tiny_tensors: dict[str, np.ndarray],
) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return write_gguf(path, tiny_metadata, tiny_tensors)
