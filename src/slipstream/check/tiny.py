"""Models of a few thousand numbers and a tokenizer of letters: everything end to end in no time.

In float64 there is no room for near-ties, so equality of tokens is exact on any machine.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.build import LoadedModel
from slipstream.core.config import ExpertsConfig, LatentConfig, ModelConfig
from slipstream.maths.noise import Address, Key, Stream, uniform_at
from slipstream.models import CausalLM, build

_LATENT = LatentConfig(
    query_rank=12, rank=10, content_dim=6, rotary_dim=4, value_dim=5, is_interleaved=True
)
_EXPERTS = ExpertsConfig(
    first_layer=1,
    num_experts=8,
    num_chosen=3,
    num_groups=4,
    num_chosen_groups=2,
    num_shared=1,
    size=9,
    scale=2.5,
    is_normalised=True,
)


def tiny_config(model_type: str = "llama", **changes: Any) -> ModelConfig:
    """Three layers over a vocabulary of 32; Gemma's have windows of 5, DeepSeek's experts."""
    num_layers = changes.pop("num_layers", 3)
    head_dim = changes.get("head_dim", 8)
    is_gemma = model_type == "gemma3"
    windows = tuple(5 if is_gemma and i != 1 else None for i in range(num_layers))
    fields: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": num_layers,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": head_dim,
        "norm_eps": 1e-6,
        "context_length": 256,
        "windows": windows,
        "rope_thetas": tuple(100.0 if window else 10000.0 for window in windows),
        "rope_linear_factors": (1.0,) * num_layers,
        "attention_scale": head_dim**-0.5,
        "qkv_bias": model_type == "qwen2",
        "tied": model_type != "qwen2",
    }
    if model_type == "deepseek_v3":
        fields |= {"latent": _LATENT, "experts": _EXPERTS, "num_kv_heads": 1, "head_dim": 10 + 4}
    return ModelConfig(**(fields | changes))


def tiny_model(
    model_type: str = "llama",
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **changes: Any,
) -> CausalLM:
    """A tiny model with random weights, whose answers depend on all of the prompt."""
    model = build(tiny_config(model_type, **changes)).to(dtype)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        # Projections large enough for attention to outweigh a token's own embedding; otherwise
        # a model repeats its last token, and no mistake in the context would ever show.
        scale = 2.5 * parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.1
        if "embed_tokens" in name or "lm_head" in name:
            scale = 1.0
        centre = 1.0 if "norm" in name else 0.0
        parameter.data.copy_(centre + scale * _normal(seed, index, parameter.shape))
    return model.eval()


def _normal(seed: int, index: int, shape: torch.Size) -> Tensor:
    address = Address(Key(seed), Stream.DRAFT, index)
    uniform = uniform_at([address], torch.arange(shape.numel()).unsqueeze(0))
    return (math.sqrt(2) * torch.erfinv(2 * uniform - 1)).view(shape)


class LetterTokenizer:
    """Token i is a letter; the last two are the halves of a UTF-8 character."""

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

    def encode(self, text: str, **_: Any) -> list[int]:
        return [(ord(char) - ord("a")) % 26 for char in text]


def loaded(model: CausalLM, eos_ids: frozenset[int] = frozenset()) -> LoadedModel:
    """A tiny model as `build_engine` wants it."""
    tokenizer: Any = LetterTokenizer(model.config.vocab_size, eos_ids)
    return LoadedModel("tiny", Path("tiny"), model, tokenizer, None)
