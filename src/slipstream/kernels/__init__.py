"""The operations a model is made of. Models import them from here and know no backend.

On tensors an operation computes: `reference` holds the plain torch versions, `packed` those on
weights in the types of their checkpoint. On symbols it is written down instead, to be run
natively (`recorder`). Every fast path is tested against the plain one.
"""

from torch import Tensor

from slipstream.kernels import packed, reference
from slipstream.kernels.attention import (
    AttentionGroup,
    AttentionPlan,
    dense_attention,
    paged_attention,
)
from slipstream.kernels.packed import PackedWeight
from slipstream.kernels.recorder import Recording, Symbol
from slipstream.kernels.reference import Angles

# What models are written for: a weight of either kind, rows that are there or stand for them.
Weight = Tensor | PackedWeight


def embed(ids, weight):
    """Rows of a table [V, I]: [T] int64 -> [T, I]."""
    if isinstance(ids, Recording):
        return ids.embed(weight)
    return reference.embed(ids, weight)


def linear(x, weight, bias=None):
    """x W^T + b: [T, I] -> [T, O], weight [O, I]."""
    if isinstance(x, Symbol):
        return x.value.recording.linear(x, weight, bias)
    if isinstance(weight, PackedWeight):
        return packed.linear(x, weight, bias)
    return reference.linear(x, weight, bias)


def scale(x, factor: float):
    """x times a factor that is rounded to its dtype first."""
    if isinstance(x, Symbol):
        return x.value.recording.scale(x, factor)
    return reference.scale(x, factor)


def pick(x, rows):
    """Some rows [R] int64 of x [T, I] -> [R, I]; while recording, those that a run names."""
    if isinstance(x, Symbol):
        return x.value.recording.pick(x)
    return x[rows]


def rms_norm(x, weight, eps: float):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    if isinstance(x, Symbol):
        return x.value.recording.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def rotary_angles(positions, inv_freq):
    """Angles of positions [T] at the inverse frequencies [D / 2]."""
    if isinstance(positions, Recording):
        return positions.rotary_angles(inv_freq)
    return reference.rotary_angles(positions, inv_freq)


def rotate(x, angles):
    """Rotary embedding of [T, H, D]; pairs are (i, i + D / 2)."""
    if isinstance(x, Symbol):
        return x.value.recording.rotate(x, angles)
    return reference.rotate(x, angles)


def gated_silu(gate_up):
    """silu(gate) * up of [T, 2 F] -> [T, F]."""
    if isinstance(gate_up, Symbol):
        return gate_up.value.recording.gated(gate_up, "gated_silu")
    return reference.gated_silu(gate_up)


def gated_gelu(gate_up):
    """gelu(gate) * up of [T, 2 F] -> [T, F], with the tanh approximation."""
    if isinstance(gate_up, Symbol):
        return gate_up.value.recording.gated(gate_up, "gated_gelu")
    return reference.gated_gelu(gate_up)


__all__ = [
    "Angles",
    "AttentionGroup",
    "AttentionPlan",
    "PackedWeight",
    "Recording",
    "Symbol",
    "Weight",
    "dense_attention",
    "embed",
    "gated_gelu",
    "gated_silu",
    "linear",
    "paged_attention",
    "pick",
    "rms_norm",
    "rotary_angles",
    "rotate",
    "scale",
]
