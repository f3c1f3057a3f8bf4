"""Heads before their first step: what comes in goes out, nearly.

A head that starts at random must first learn the space its target's output head reads, which takes
most of a small budget. So features pass through, and the layer is the target's last one, its
contributions scaled down: all that is left to learn is what comes next.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.core.errors import ConfigError
from slipstream.kernels import PackedWeight
from slipstream.loading.heads import Head, load_head, one_layer
from slipstream.models import CausalLM
from slipstream.models.heads import Borrowed, Eagle3Head, EagleHead, MedusaHead, MTPHead
from slipstream.models.layers import Linear
from slipstream.models.llama import LlamaLayer

_CONTRIBUTION = 0.05  # of the copied layer's two branches, to what passes through
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def new_head(
    method: str, target: CausalLM, target_ids: Tensor, *, num_heads: int, typical_size: float
) -> Head:
    """A head to be trained, in float32.

    Args:
        method: "eagle", "eagle3", "medusa" or "mtp".
        target_ids: the tokens it may draft, [V_d] ascending; their output rows are the target's.
        num_heads: Medusa's.
        typical_size: root mean square of the target's final hidden states.

    Raises:
        ConfigError: a target whose layers are of another kind.
    """
    if target.config.model_type not in ARCHITECTURES:
        raise ConfigError(
            f"heads for {target.config.model_type} models cannot be trained; only for "
            f"{', '.join(ARCHITECTURES)}"
        )
    build = {"eagle": _eagle, "eagle3": _eagle3, "medusa": _medusa, "mtp": _mtp}[method]
    head: Any = build(target, target_ids, num_heads, typical_size)
    head.lm_head.weight.data = target.output_rows(target_ids).float()
    return _teachable(head)


def taught_head(method: str, path: Path, target: CausalLM) -> Head:
    """A head that was trained before, to be trained further, in float32.

    Raises:
        ConfigError: one whose draft vocabulary is not rows of an output head it has at hand.
        ModelError: as `load_head`.
    """
    head = load_head(method, path, target).float()
    if head.lm_head is None or head.target_ids is None:
        raise ConfigError(f"{path} has no draft vocabulary (d2t); such a head is not trained here")
    return _teachable(head)


def _teachable(head: Head) -> Head:
    for name, parameter in head.named_parameters():
        assert not bool(parameter.isnan().any()), f"{name} has no start"
        parameter.requires_grad_(not name.startswith("lm_head."))
    return head


def eagle3_taps(num_layers: int) -> tuple[int, int, int]:
    """Early, middle, and as late as can be: what passes through is then nearly the final state."""
    last = num_layers - 1
    return (min(2, num_layers // 4), num_layers // 2, last)


def _eagle(target: CausalLM, ids: Tensor, num_heads: int, typical_size: float) -> EagleHead:
    config = one_layer(target.config)
    head = EagleHead(config, Borrowed.of(target), bias=False, has_embedding=False, target_ids=ids)
    _pass_second(head.fc)
    _copy_layer(head.layers[0], target)
    return head


def _mtp(target: CausalLM, ids: Tensor, num_heads: int, typical_size: float) -> MTPHead:
    config = one_layer(target.config)
    layer = LlamaLayer(config, 0, qk_norm=config.model_type == "qwen3")
    head = MTPHead(
        config, layer, Borrowed.of(target), has_embedding=False, has_head=False, target_ids=ids
    )
    head.enorm.weight.data.fill_(1.0)
    head.hnorm.weight.data.fill_(1.0)
    # The norm takes the size of what passes through away, and the last one puts it back.
    head.shared_head.norm.weight.data.fill_(typical_size)
    _pass_second(head.eh_proj)
    _copy_layer(head.layer, target)
    return head


def _eagle3(target: CausalLM, ids: Tensor, num_heads: int, typical_size: float) -> Eagle3Head:
    config = one_layer(target.config)
    head = Eagle3Head(
        config,
        Borrowed.of(target),
        taps=eagle3_taps(target.config.num_layers),
        target_size=config.hidden_size,
        target_ids=ids,
        norm_before_residual=False,
        has_embedding=False,
        is_tied=True,
    )
    size = config.hidden_size
    head.fc.weight.data.zero_()
    head.fc.weight.data[:, 2 * size :] = torch.eye(size)
    head.norm.weight.data.copy_(target.model.norm.weight)
    _copy_layer(head.midlayer, target)
    return head


def _medusa(target: CausalLM, ids: Tensor, num_heads: int, typical_size: float) -> MedusaHead:
    head = MedusaHead(
        target.config.hidden_size,
        Borrowed.of(target),
        num_heads=num_heads,
        num_blocks=1,
        is_tied=True,
        target_ids=ids,
    )
    for parameter in head.heads.parameters():
        parameter.data.zero_()
    return head


def _pass_second(layer: Linear) -> None:
    """Of two inputs side by side the second goes through."""
    size = layer.weight.shape[0]
    layer.weight.data.zero_()
    layer.weight.data[:, size:] = torch.eye(size)


def _copy_layer(layer: nn.Module, target: CausalLM) -> None:
    """The target's last layer into a head's, whose attention may have two inputs side by side."""
    source = dict(target.model.layers[-1].named_modules())
    for name, module in layer.named_modules():
        if name == "hidden_norm":
            module.weight.data.copy_(_values(source["input_layernorm"].weight))
        elif getattr(module, "weight", None) is not None:
            given = source[name]
            values = _values(given.weight)
            if name.endswith(("o_proj", "down_proj")):
                values = values * _CONTRIBUTION
            if module.weight.dim() == 2 and module.weight.shape[1] == 2 * values.shape[1]:
                values = torch.cat([values, values], dim=1)
            module.weight.data.copy_(values)
            if getattr(module, "bias", None) is not None:
                module.bias.data.copy_(given.bias)


def _values(weight: Tensor | PackedWeight) -> Tensor:
    return weight.values() if isinstance(weight, PackedWeight) else weight.float()


def root_mean_square(states: Sequence[Tensor]) -> float:
    """Of hidden states, each [..., hidden]."""
    return float(torch.cat([x.flatten(0, -2).float() for x in states]).square().mean().sqrt())
