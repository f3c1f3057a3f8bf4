"""Plain torch versions of the small operations, on packed tokens [T, ...]."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines of a batch's rotary angles, each [T, 1, D / 2]."""

    cos: Tensor
    sin: Tensor


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of a table: [T] int64 -> [T, I]."""
    return weight[ids]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: [T, I] -> [T, O], weight [O, I]."""
    return F.linear(x, weight, bias)


def scale(x: Tensor, factor: float) -> Tensor:
    """x times a factor that is rounded to its dtype first."""
    return x * torch.tensor(factor, dtype=x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32 or wider."""
    wide = x if x.dtype == torch.float64 else x.float()
    return F.rms_norm(wide, weight.shape, eps=eps).to(x.dtype) * weight


def rotary_angles(positions: Tensor, inv_freq: Tensor) -> Angles:
    """Angles of positions [T] at the inverse frequencies [D / 2]."""
    inv_freq = inv_freq.to(positions.device)
    angles = (positions.to(inv_freq.dtype).unsqueeze(-1) * inv_freq).unsqueeze(1)
    return Angles(angles.cos(), angles.sin())


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotary embedding of [T, H, D]; pairs are (i, i + D / 2).

    Source: Su et al., "RoFormer", arXiv 2104.09864, in the half-split layout of GPT-NeoX.
    """
    cos, sin = angles.cos, angles.sin
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2 F] -> [T, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gated_gelu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up of [T, 2 F] -> [T, F], with the tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
