"""The small operations against their formulas, spelled out in float64."""

import math

import pytest
import torch
from torch import Tensor

from slipstream.kernels.reference import Angles, gated_gelu, gated_silu, linear, rms_norm, rotate


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


def test_linear() -> None:
    x, weight, bias = random(3, 5), random(2, 5, seed=1), random(2, seed=2)
    close(linear(x, weight), torch.stack([(weight * row).sum(1) for row in x]))
    close(linear(x, weight, bias), linear(x, weight) + bias)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm(eps: float) -> None:
    x, weight = random(3, 8), random(8, seed=1)
    rms = [math.sqrt(sum(v * v for v in row) / 8 + eps) for row in x.tolist()]
    divisor = torch.tensor(rms, dtype=torch.float64).unsqueeze(1)
    close(rms_norm(x, weight, eps), x / divisor * weight)


def test_rms_norm_squares_in_float32() -> None:
    x = (300 * random(2, 64)).half()  # whose squares overflow
    weight = random(64, seed=1).half()
    expected = rms_norm(x.double(), weight.double(), 1e-6)
    actual = rms_norm(x, weight, 1e-6)
    assert actual.dtype == torch.float16
    torch.testing.assert_close(actual.double(), expected, atol=1e-3, rtol=2**-9)


def angles(positions: Tensor) -> Tensor:
    return positions.double().view(-1, 1, 1) * torch.tensor([1.0, 0.1, 0.01]).double()


def test_rotate_turns_pairs_half_a_head_apart() -> None:
    x, angle = random(4, 2, 6), angles(torch.tensor([0, 1, 5, 40]))
    turned = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones_like(angle), angle)
    close(
        rotate(x, Angles(angle.cos(), angle.sin())), torch.cat((turned.real, turned.imag), dim=-1)
    )


def test_rotated_products_depend_on_distance_alone() -> None:
    q, k = random(1, 1, 6), random(1, 1, 6, seed=1)

    def product(q_position: int, k_position: int) -> Tensor:
        q_angle, k_angle = angles(torch.tensor([q_position])), angles(torch.tensor([k_position]))
        turned = (
            rotate(q, Angles(q_angle.cos(), q_angle.sin())),
            rotate(k, Angles(k_angle.cos(), k_angle.sin())),
        )
        return (turned[0] * turned[1]).sum()

    close(product(7, 3), product(104, 100))
    assert abs(product(7, 3) - product(7, 4)) > 1e-3


def test_rotate_keeps_the_type_and_computes_in_that_of_the_angles() -> None:
    x = random(1, 1, 6).bfloat16()
    angle = angles(torch.tensor([3]))
    actual = rotate(x, Angles(angle.cos().float(), angle.sin().float()))
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, rotate(x.double(), Angles(angle.cos(), angle.sin())).bfloat16())


def test_gated_silu() -> None:
    gate, up = random(3, 4), random(3, 4, seed=1)
    close(gated_silu(torch.cat((gate, up), dim=-1)), gate / (1 + torch.exp(-gate)) * up)


def test_gated_gelu() -> None:
    gate, up = random(3, 4), random(3, 4, seed=1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    expected = 0.5 * gate * (1 + torch.tanh(inner)) * up
    close(gated_gelu(torch.cat((gate, up), dim=-1)), expected)
