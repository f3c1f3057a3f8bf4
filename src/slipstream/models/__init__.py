"""One architecture, one file, named after its `model_type`; each has `build(config)`."""

from slipstream.core.config import ModelConfig
from slipstream.core.errors import ModelError
from slipstream.models import deepseek_v3, gemma3, llama, qwen2, qwen3
from slipstream.models.layers import Attend, CausalLM

ARCHITECTURES = {
    "llama": llama.build,
    "mistral": llama.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
    "deepseek_v3": deepseek_v3.build,
    "gemma3": gemma3.build,
    "gemma3_text": gemma3.build,
}


def check_supported(model_type: str) -> None:
    """Raise `ModelError` unless there is a file here for this architecture."""
    if model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"architecture {model_type!r} is not supported; supported are {known}")


def build(config: ModelConfig) -> CausalLM:
    """An unfilled model: every parameter NaN until `loading.weights` has filled it."""
    check_supported(config.model_type)
    return ARCHITECTURES[config.model_type](config)


__all__ = ["ARCHITECTURES", "Attend", "CausalLM", "build", "check_supported"]
