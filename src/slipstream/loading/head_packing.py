"""Packing a head for the native kernels, beside a packed target.

Matrices become 5-bit (Q5_1: groups of 32 columns with a scale and a minimum, 6 bits a weight). A
draft may be anything, so all that rounding can cost is a little acceptance: 0.3 % of the tokens a
pass for SmolLM2's MTP head. A pass reads three eighths of what 16 bits would take.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import gguf
from torch import Tensor, nn

from slipstream.kernels import PackedWeight
from slipstream.kernels.packed import Format, StoredPart, StoredRows, pack_all
from slipstream.loading.heads import Head
from slipstream.models.heads import Eagle3Head, EagleHead, MedusaHead, MTPHead
from slipstream.models.heads.native import NativeLinear
from slipstream.models.layers import Embedding, Linear

_FORMAT = Format.Q5_1


def pack_head(head: Head) -> None:
    """Put packed weights in the place of a head's matrices, where the kernels know all its layers.

    Modifies the head; one that the kernels do not know stays as it is.
    """
    matrices = [module for module in head.modules() if isinstance(module, Linear | Embedding)]
    num_fused = {id(module): 2 for module in _fused(head)}
    for module in matrices:
        if module.weight.shape[1] // num_fused.get(id(module), 1) % _FORMAT.columns:
            return
    if not isinstance(head, MedusaHead) and head.config.latent is not None:
        return

    for parent, name, module in list(_outside(head)):
        weight = _packed(module.weight, list(module.parts.values()))
        setattr(parent, name, NativeLinear(weight, module.bias))
        matrices.remove(module)
    for module in matrices:
        rows = list(module.parts.values()) if isinstance(module, Linear) else [len(module.weight)]
        columns = module.weight.chunk(num_fused.get(id(module), 1), dim=1)
        weights = tuple(_packed(part, rows) for part in columns)
        packed: Any = weights if id(module) in num_fused else weights[0]
        del module.weight
        module.weight = packed


def _fused(head: Head) -> list[Linear]:
    """Layers of two inputs."""
    if isinstance(head, EagleHead):
        return [head.fc]
    if isinstance(head, Eagle3Head):
        return [head.midlayer.self_attn.qkv_proj]
    return [head.eh_proj] if isinstance(head, MTPHead) else []


def _outside(head: Head) -> Iterator[tuple[nn.Module, str, Linear]]:
    """Layers that are not part of a recorded pass: whose they are, as what, and the layer."""
    if isinstance(head, Eagle3Head):
        yield head, "fc", head.fc
    if isinstance(head, MedusaHead):
        if head.lm_head is not None:
            yield head, "lm_head", head.lm_head
        for parent in head.heads.modules():
            for name, module in parent.named_children():
                if isinstance(module, Linear):
                    yield parent, name, module


def _packed(weight: Tensor, rows: Sequence[int]) -> PackedWeight:
    """A matrix [O, I] in `_FORMAT`, its parts stacked."""
    stored = []
    for part in weight.detach().float().cpu().split(list(rows)):
        blocks = gguf.quants.quantize(part.numpy(), gguf.GGMLQuantizationType[_FORMAT.name])
        num_rows, num_columns = part.shape
        stored.append(StoredPart(_FORMAT, (num_rows, num_columns), partial(StoredRows, blocks)))
    parts, jobs = pack_all(stored)
    for job in jobs:
        job()
    return PackedWeight(parts, weight.shape[1])
