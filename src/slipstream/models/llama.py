"""Llama, and what is built like it: SmolLM2, Llama 2 and 3, Mistral."""

from torch import Tensor, nn

from slipstream.core.config import ModelConfig
from slipstream.kernels import Angles
from slipstream.models.layers import MLP, Attend, Attention, Backbone, CausalLM, RMSNorm


class LlamaLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, *, qk_norm: bool = False):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer, qk_norm=qk_norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


def build(config: ModelConfig) -> CausalLM:
    layers = [LlamaLayer(config, i) for i in range(config.num_layers)]
    return CausalLM(config, Backbone(config, layers))
