"""Qwen3 (dense): Llama with every query and key head normalised before the rotation."""

from slipstream.core.config import ModelConfig
from slipstream.models.layers import Backbone, CausalLM
from slipstream.models.llama import LlamaLayer


def build(config: ModelConfig) -> CausalLM:
    layers = [LlamaLayer(config, i, qk_norm=True) for i in range(config.num_layers)]
    return CausalLM(config, Backbone(config, layers))
