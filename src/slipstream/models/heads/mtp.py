"""DeepSeek-V3's module for multi-token prediction: one more decoder layer of the target's kind.

It reads the target's final hidden states and was trained for one token ahead; further ones come
from chaining it, with the layer's output in the place of the hidden state. Source: arXiv
2412.19437, section 2.2; the embedding comes first, as in the weights and not as in the paper.
"""

from torch import Tensor, nn

from slipstream import kernels
from slipstream.core.config import ModelConfig
from slipstream.core.target import TargetOutput
from slipstream.models.heads.base import (
    Borrowed,
    draft_head,
    fused,
    widened,
)
from slipstream.models.layers import (
    Attend,
    Embedding,
    Linear,
    RMSNorm,
    inverse_frequencies,
    projection,
)


class SharedHead(nn.Module):
    """The norm before the output head, and that head where it is not the target's."""

    def __init__(self, config: ModelConfig, *, has_head: bool):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head: Linear | None = None
        if has_head:
            self.head = projection(config.hidden_size, config.vocab_size)


class MTPHead(nn.Module):
    """layer(eh_proj([enorm(embedding); hnorm(feature)])), then norm and output head.

    Args:
        config: of the target, but of one layer.
        layer: maps (x, angles, attend) to x; its K/V are those of layer 0.
        has_embedding, has_head: whether it has tables of its own.
        target_ids: the tokens it may draft where it has no head, [V_d] int64, ascending; None is
            every token.
    """

    taps = ()
    target_ids: Tensor | None

    def __init__(
        self,
        config: ModelConfig,
        layer: nn.Module,
        borrowed: Borrowed,
        *,
        has_embedding: bool,
        has_head: bool,
        target_ids: Tensor | None = None,
    ):
        assert not has_head or target_ids is None, "a head of its own has its own vocabulary"
        super().__init__()
        self.config = config
        self.borrowed = borrowed
        self.embed_tokens = (
            Embedding(config.vocab_size, config.hidden_size) if has_embedding else None
        )
        self.enorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.eh_proj = projection(2 * config.hidden_size, config.hidden_size)
        self.layer = layer
        self.shared_head = SharedHead(config, has_head=has_head)
        self.lm_head = draft_head(config.hidden_size, target_ids)
        self.register_buffer("target_ids", target_ids)
        self._frequencies = inverse_frequencies(config, 0)

    def read(self, target: TargetOutput) -> Tensor:
        return target.hidden

    def fuse(self, states: Tensor) -> Tensor:
        return states

    def forward(self, ids: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        embedded = self.enorm((self.embed_tokens or self.borrowed.embed)(ids))
        angles = kernels.rotary_angles(positions, self._frequencies)
        return self.layer(fused(self.eh_proj, embedded, self.hnorm(features)), angles, attend)

    def final(self, features: Tensor) -> Tensor:
        """What the output head reads of features, [R, hidden]."""
        return self.shared_head.norm(features)

    def logits(self, features: Tensor) -> Tensor:
        """[R, hidden] -> [R, V_d], float32 or wider."""
        head = self.lm_head or self.shared_head.head or self.borrowed.logits
        return widened(head(self.final(features)))
