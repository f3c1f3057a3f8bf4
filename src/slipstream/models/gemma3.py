"""Gemma 3 (text): norms before and after each branch, windows on five layers of six.

Embeddings are multiplied by sqrt(hidden), rounded to the dtype of the weights as the checkpoint
was trained. Window layers turn with a rotary base of their own (`config.rope_thetas`). Norm
weights arrive as the factors they are; the loader adds the 1 that safetensors leave out.
"""

import math

from torch import Tensor, nn

from slipstream import kernels
from slipstream.core.config import ModelConfig
from slipstream.kernels import Angles
from slipstream.models.layers import MLP, Attend, Attention, Backbone, CausalLM, RMSNorm


class Gemma3Layer(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer, qk_norm=True)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config, gated=kernels.gated_gelu)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), angles, attend)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


def build(config: ModelConfig) -> CausalLM:
    layers = [Gemma3Layer(config, i) for i in range(config.num_layers)]
    scale = math.sqrt(config.hidden_size)
    return CausalLM(config, Backbone(config, layers, embedding_scale=scale))
