"""Tiny models and a tokenizer for them: everything end to end, in milliseconds."""

from pathlib import Path

import torch

from slipstream.build import LoadedModel
from slipstream.core.config import ModelConfig
from slipstream.models import CausalLM, build


def tiny_config(model_type: str = "llama", **changes) -> ModelConfig:
    """Two or three layers over a vocabulary of 32, small enough for milliseconds."""
    num_layers = changes.pop("num_layers", 3)
    gemma = model_type == "gemma3"
    windows = tuple(5 if gemma and i != 1 else None for i in range(num_layers))
    fields = {
        "model_type": model_type,
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": num_layers,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "norm_eps": 1e-6,
        "context_length": 256,
        "windows": windows,
        "rope_thetas": tuple(100.0 if window else 10000.0 for window in windows),
        "rope_linear_factors": (1.0,) * num_layers,
        "attention_scale": 8**-0.5,
        "qkv_bias": model_type == "qwen2",
        "tied": model_type != "qwen2",
    }
    return ModelConfig(**(fields | changes))


def tiny_model(
    model_type: str = "llama", *, dtype: torch.dtype = torch.float64, seed: int = 0, **changes
) -> CausalLM:
    """A tiny model with random weights, peaked enough that its choices are not ties.

    float64 leaves no room for near-ties, so equality of tokens is exact on any machine.
    """
    model = build(tiny_config(model_type, **changes)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.1
        if name.endswith("embed_tokens.weight") or "lm_head" in name:
            scale = 1.0
        centre = 1.0 if "norm" in name else 0.0
        parameter.data.copy_(centre + scale * noise)
    return model.eval()


class LetterTokenizer:
    """Token i is a letter; token 0 ends a text; the last tokens are halves of UTF-8 characters."""

    strips_leading_space = False
    chat_template = None

    def __init__(self, vocab_size: int = 32, eos_ids: frozenset[int] = frozenset()):
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.special_ids = eos_ids
        self._pieces = [bytes([ord("a") + i % 26]) for i in range(vocab_size)]
        self._pieces[-2:] = [b"\xc3", b"\xa9"]

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        return b"" if skip_special and token_id in self.special_ids else self._pieces[token_id]

    def encode(self, text: str, **_) -> list[int]:
        return [(ord(char) - ord("a")) % 26 for char in text]


def loaded(model: CausalLM, eos_ids: frozenset[int] = frozenset()) -> LoadedModel:
    """A tiny model as the engine's builder wants it."""
    tokenizer = LetterTokenizer(model.config.vocab_size, eos_ids)
    return LoadedModel("tiny", Path("tiny"), model, tokenizer, None)  # type: ignore[arg-type]
