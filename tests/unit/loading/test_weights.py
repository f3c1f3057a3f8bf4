"""Filling a model: every parameter once, every tensor used, rows of stacked layers in order."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from slipstream.check.tiny import tiny_config
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ModelError
from slipstream.loading.weights import StoredTensor, load_model, parameter_slots
from slipstream.models import ARCHITECTURES, build


def checkpoint(config: ModelConfig) -> dict[str, Tensor]:
    """A different random tensor under every name the model asks for."""
    generator = torch.Generator().manual_seed(0)
    slots = parameter_slots(build(config))
    return {name: torch.randn(slot.shape, generator=generator) for name, slot in slots}


def stored(tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(tuple(tensor.shape), "float32", lambda tensor=tensor: tensor)
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_filled(model_type: str, tied: bool) -> None:
    config = tiny_config(model_type, tied=tied)
    model = load_model(config, stored(checkpoint(config)), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        assert not parameter.requires_grad
    assert not model.training


def test_an_unfilled_model_is_nothing_but_nan() -> None:
    for name, parameter in build(tiny_config("qwen2")).named_parameters():
        assert parameter.isnan().all(), name


def test_stacked_rows_are_in_order() -> None:
    config = tiny_config("qwen2")
    tensors = checkpoint(config)
    model = load_model(config, stored(tensors), dtype=torch.float32)
    for layer in range(config.num_layers):
        attention, prefix = model.model.layers[layer].self_attn, f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            names = [f"{prefix}.self_attn.{part}_proj.{kind}" for part in "qkv"]
            expected = torch.cat([tensors[name] for name in names])
            assert torch.equal(getattr(attention.qkv_proj, kind), expected)
        gate_up = [tensors[f"{prefix}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        mlp = model.model.layers[layer].mlp
        assert torch.equal(mlp.gate_up_proj.weight, torch.cat(gate_up))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_are_rounded_to_the_precision_asked_for(dtype: torch.dtype) -> None:
    config = tiny_config("llama")
    tensors = checkpoint(config)
    model = load_model(config, stored(tensors), dtype=dtype)
    assert model.dtype == dtype
    for name, slot in parameter_slots(model):
        assert torch.equal(slot, tensors[name].to(dtype))


def test_a_tied_head_may_be_stored_a_second_time() -> None:
    config = tiny_config("llama", tied=True)
    tensors = checkpoint(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model = load_model(config, stored(tensors), dtype=torch.float32)
    assert model.lm_head is None


def test_an_untied_head_must_be_there() -> None:
    config = tiny_config("llama", tied=False)
    tensors = checkpoint(config)
    del tensors["lm_head.weight"]
    with pytest.raises(ModelError, match=r"lacks 1 tensors, the first: lm_head\.weight"):
        load_model(config, stored(tensors), dtype=torch.float32)


def test_missing_and_surplus_tensors_are_counted_and_named() -> None:
    config = tiny_config("llama")
    tensors = checkpoint(config)
    more = tensors | {"model.layers.9.mlp.up_proj.weight": torch.zeros(1), "zzz": torch.zeros(1)}
    with pytest.raises(ModelError, match=r"has 2 tensors no layer uses, .*model\.layers\.9"):
        load_model(config, stored(more), dtype=torch.float32)
    fewer = {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}
    with pytest.raises(ModelError, match=r"lacks 9 tensors, .*model\.layers\.1"):
        load_model(config, stored(fewer), dtype=torch.float32)


def test_transposed_and_broadcastable_tensors_are_refused() -> None:
    """`copy_` would spread a single row over all of them."""
    config = tiny_config("llama")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = checkpoint(config)
    for wrong in (tensors[name].T, tensors[name][:1], tensors[name][0]):
        with pytest.raises(ModelError, match=r"down_proj\.weight has shape"):
            load_model(config, stored(tensors | {name: wrong}), dtype=torch.float32)


def test_an_error_while_reading_is_not_lost() -> None:
    config = tiny_config("llama")
    tensors = stored(checkpoint(config))

    def fail() -> Tensor:
        raise OSError("the disk went away")

    name = "model.norm.weight"
    tensors[name] = StoredTensor(tensors[name].shape, "float32", fail)
    with pytest.raises(OSError, match="went away"):
        load_model(config, tensors, dtype=torch.float32)
