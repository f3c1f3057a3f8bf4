"""Plain torch versions of the small operations, on packed tokens [T, ...]."""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: [T, I] -> [T, O], weight [O, I]."""
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32 or wider."""
    wide = x if x.dtype == torch.float64 else x.float()
    return F.rms_norm(wide, weight.shape, eps=eps).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [T, H, D] by angles [T, 1, D / 2]; pairs are (i, i + D / 2).

    Source: Su et al., "RoFormer", arXiv 2104.09864, in the half-split layout of GPT-NeoX.
    """
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
