"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values (`config.qkv_bias`)."""

from slipstream.models.llama import build

__all__ = ["build"]
