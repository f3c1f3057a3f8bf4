"""EAGLE-3: features fused from three layers of the target, logits over a smaller vocabulary.

Source: Li et al., arXiv 2503.01840.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from slipstream import kernels
from slipstream.core.config import ModelConfig
from slipstream.core.target import TargetOutput
from slipstream.kernels import Angles
from slipstream.models.heads.base import Borrowed, fused, widened
from slipstream.models.layers import (
    MLP,
    Attend,
    Embedding,
    Linear,
    RMSNorm,
    inverse_frequencies,
    projection,
)


class PairAttention(nn.Module):
    """Attention whose queries, keys and values are made of an embedding and a feature."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.sizes = [n * config.head_dim for n in (config.num_heads, *[config.num_kv_heads] * 2)]
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), self.sizes, strict=True))
        self.qkv_proj = Linear(2 * config.hidden_size, parts, bias=config.qkv_bias)
        self.o_proj = projection(self.sizes[0], config.hidden_size, bias=config.output_bias)

    def forward(self, embedded: Tensor, features: Tensor, angles: Angles, attend: Attend) -> Tensor:
        q, k, v = (
            part.view(embedded.shape[0], -1, self.head_dim)
            for part in fused(self.qkv_proj, embedded, features).split(self.sizes, dim=-1)
        )
        q, k = kernels.rotate(q, angles), kernels.rotate(k, angles)
        out = attend(0, q, k, v, scale=self.scale, window=None)
        return self.o_proj(out.flatten(1))


class Eagle3Layer(nn.Module):
    """r + attention([norm(e); norm(g)]), then x + mlp(norm(x)).

    Args:
        norm_before_residual: r is the normed feature; else the feature as it came.
    """

    def __init__(self, config: ModelConfig, *, norm_before_residual: bool):
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = PairAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, embedded: Tensor, features: Tensor, angles: Angles, attend: Attend) -> Tensor:
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        attended = self.self_attn(self.input_layernorm(embedded), normed, angles, attend)
        x = residual + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(nn.Module):
    """Features of a pass are fc([low; middle; high]); its own come back as the layer left them.

    Args:
        config: of a model of one layer, with the target's vocabulary.
        taps: the three target layers whose input is read, low to high.
        target_size: width of these.
        target_ids: which token each draft token is, [V_d] int64, ascending.
        has_embedding: whether it has a table of its own.
        is_tied: the rows of its output head are the target's.
    """

    target_ids: Tensor

    def __init__(
        self,
        config: ModelConfig,
        borrowed: Borrowed,
        *,
        taps: Sequence[int],
        target_size: int,
        target_ids: Tensor,
        norm_before_residual: bool,
        has_embedding: bool,
        is_tied: bool = False,
    ):
        super().__init__()
        self.config = config
        self.borrowed = borrowed
        self.taps = tuple(taps)
        self.is_tied = is_tied
        self.embed_tokens = (
            Embedding(config.vocab_size, config.hidden_size) if has_embedding else None
        )
        self.fc = projection(3 * target_size, config.hidden_size)
        self.midlayer = Eagle3Layer(config, norm_before_residual=norm_before_residual)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = projection(config.hidden_size, len(target_ids))
        self.register_buffer("target_ids", target_ids)
        self._frequencies = inverse_frequencies(config, 0)

    def read(self, target: TargetOutput) -> Tensor:
        return torch.cat([target.taps[layer] for layer in self.taps], dim=-1)

    def fuse(self, states: Tensor) -> Tensor:
        return self.fc(states)

    def forward(self, ids: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        embedded = (self.embed_tokens or self.borrowed.embed)(ids)
        angles = kernels.rotary_angles(positions, self._frequencies)
        return self.midlayer(embedded, features, angles, attend)

    def final(self, features: Tensor) -> Tensor:
        """What the output head reads of features, [R, hidden]."""
        return self.norm(features)

    def logits(self, features: Tensor) -> Tensor:
        """[R, hidden] -> [R, V_d], float32 or wider."""
        return widened(self.lm_head(self.final(features)))
