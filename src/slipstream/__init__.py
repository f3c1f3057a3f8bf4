"""Slipstream: lossless speculative decoding for language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.core.outputs import Delta, RequestOutput
    from slipstream.core.params import SamplingParams
    from slipstream.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "RequestOutput", "Delta", "__version__"]

_HOMES = {
    "LLM": "slipstream.llm",
    "SamplingParams": "slipstream.core.params",
    "RequestOutput": "slipstream.core.outputs",
    "Delta": "slipstream.core.outputs",
}


def __getattr__(name: str) -> Any:
    # Lazily, so that `slipstream --help` need not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
