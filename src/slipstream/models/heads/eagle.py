"""EAGLE-1 and EAGLE-2, which share their head: one decoder layer over (token, feature) pairs.

A feature is the target's final hidden state. Source: Li et al., arXiv 2401.15077, 2406.16858.
"""

from torch import Tensor, nn

from slipstream import kernels
from slipstream.core.config import ModelConfig
from slipstream.core.target import TargetOutput
from slipstream.kernels import Angles
from slipstream.models.heads.base import Borrowed, draft_head, fused, widened
from slipstream.models.layers import (
    MLP,
    Attend,
    Attention,
    Embedding,
    RMSNorm,
    inverse_frequencies,
    projection,
)


class EagleLayer(nn.Module):
    """x + attention(x), then x + mlp(norm(x)): attention has no norm before it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attn = Attention(config, 0)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        x = x + self.self_attn(x, angles, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """layer(fc([embedding; feature])), read out by the target's own output head.

    Args:
        config: of a model of one layer; its hidden size is the target's.
        bias: whether fc has one.
        has_embedding: whether it has a table of its own.
        target_ids: the tokens it may draft, [V_d] int64, ascending; None is every token.
    """

    taps = ()
    target_ids: Tensor | None

    def __init__(
        self,
        config: ModelConfig,
        borrowed: Borrowed,
        *,
        bias: bool,
        has_embedding: bool,
        target_ids: Tensor | None = None,
    ):
        super().__init__()
        self.config = config
        self.borrowed = borrowed
        self.embed_tokens = (
            Embedding(config.vocab_size, config.hidden_size) if has_embedding else None
        )
        self.fc = projection(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.lm_head = draft_head(config.hidden_size, target_ids)
        self.register_buffer("target_ids", target_ids)
        self._frequencies = inverse_frequencies(config, 0)

    def read(self, target: TargetOutput) -> Tensor:
        return target.hidden

    def fuse(self, states: Tensor) -> Tensor:
        return states

    def forward(self, ids: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        embedded = (self.embed_tokens or self.borrowed.embed)(ids)
        angles = kernels.rotary_angles(positions, self._frequencies)
        return self.layers[0](fused(self.fc, embedded, features), angles, attend)

    def final(self, features: Tensor) -> Tensor:
        """What the output head reads of features, [R, hidden]."""
        return features

    def logits(self, features: Tensor) -> Tensor:
        """[R, hidden] -> [R, V_d], float32 or wider."""
        return widened((self.lm_head or self.borrowed.logits)(features))
