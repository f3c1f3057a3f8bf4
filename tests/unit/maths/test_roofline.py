"""The cost model against counts by hand, published tables and brute force."""

import pytest

from slipstream.maths.roofline import (
    HARDWARE,
    ModelShape,
    StepCost,
    avx512_cpu,
    best_gamma,
    break_even_batch,
    expected_tokens,
    expected_tokens_along,
    matmul_intensity,
    speedup,
    step_cost,
    weight_intensity,
)
from slipstream.maths.trees import chain, path_products

H100 = HARDWARE["h100"]
LLAMA_8B = ModelShape(num_weights=7.5e9, num_layers=32, num_heads=32, num_kv_heads=8, head_size=128)
WEIGHTS_ONLY = ModelShape(num_weights=7.5e9, num_layers=0, num_heads=1, num_kv_heads=1, head_size=1)


def test_ridge_points() -> None:
    assert {name: round(device.ridge) for name, device in HARDWARE.items()} == {
        "a100": 153,
        "h100": 295,
        "h200": 206,
        "b200": 281,
        "mi300x": 247,
        "l40s": 419,
        "rtx-4090": 164,
        "apple-m4-max": 34,
        "apple-m2-ultra": 34,
    }
    assert H100.ridge_tokens(bytes_per_weight=2) == H100.ridge
    assert H100.ridge_tokens(bytes_per_weight=0.5) == H100.ridge / 4
    assert all(device.source for device in HARDWARE.values())


def test_a_cpu_is_its_cores_and_channels() -> None:
    cpu = avx512_cpu(num_cores=2, ghz=2.6, num_channels=1, megatransfers_per_sec=3200)
    assert cpu.flops_per_sec == pytest.approx(332.8e9)
    assert cpu.bytes_per_sec == pytest.approx(25.6e9)
    assert cpu.ridge_tokens(bytes_per_weight=4) == pytest.approx(26)
    assert avx512_cpu(2, 2.6, 1, 3200, flops_per_cycle=32).ridge == pytest.approx(cpu.ridge / 2)


def test_step_cost_counts_every_product_and_every_byte() -> None:
    shape = ModelShape(
        num_weights=1000,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        bytes_per_weight=0.5,
        bytes_per_kv=1,
        activation_bytes_per_token=7,
    )
    cost = step_cost(shape, batch=5, tokens_each=4, context=10)

    flops = num_bytes = 0.0
    num_bytes += 1000 * 0.5
    for _sequence in range(5):
        for token in range(1, 5):
            flops += 2 * 1000
            flops += 3 * 4 * (10 + token) * (2 * 8 + 2 * 8)  # q k, then weights v
            num_bytes += 7
        num_bytes += 3 * 2 * (2 * 8) * (10 + 4)  # a key and a value per token and K/V head
    assert cost == StepCost(flops, num_bytes)


def test_a_step_takes_as_long_as_its_slower_ceiling() -> None:
    assert StepCost(num_flops=989e12, num_bytes=1).seconds(H100) == pytest.approx(1)
    assert StepCost(num_flops=1, num_bytes=3.35e12).seconds(H100) == pytest.approx(1)
    at_the_ridge = StepCost(num_flops=H100.ridge, num_bytes=1)
    assert at_the_ridge.intensity == H100.ridge
    assert at_the_ridge.seconds(H100) == pytest.approx(1 / 3.35e12)


def test_intensity_of_weights_approaches_the_number_of_rows() -> None:
    assert matmul_intensity(1, 1, 1) == pytest.approx(2 / 6)
    assert matmul_intensity(8, 4096, 4096) == pytest.approx(8 / (1 + 2 * 8 / 4096))
    assert matmul_intensity(8, 10**8, 10**8) == pytest.approx(weight_intensity(8))
    assert weight_intensity(8, bytes_per_weight=2) == 8
    assert weight_intensity(8, bytes_per_weight=0.5) == 32
    assert step_cost(WEIGHTS_ONLY, 8, 3, context=100).intensity == weight_intensity(24)


def test_speculation_raises_the_intensity_of_attention_and_batching_does_not() -> None:
    attention = ModelShape(
        num_weights=0, num_layers=32, num_heads=32, num_kv_heads=8, head_size=128
    )
    alone, batched, drafted = (
        step_cost(attention, batch, tokens, context=1e9).intensity
        for batch, tokens in [(1, 1), (64, 1), (1, 6)]
    )
    assert alone == batched == pytest.approx(32 / 8)
    assert drafted == pytest.approx(6 * 32 / 8)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.999])
@pytest.mark.parametrize("gamma", [0, 1, 5, 20])
def test_expected_tokens_is_the_closed_form(alpha: float, gamma: int) -> None:
    closed_form = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert expected_tokens(alpha, gamma) == pytest.approx(closed_form, rel=1e-12)


def test_expected_tokens_at_the_limits() -> None:
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(0.0, 7) == 1
    assert expected_tokens(0.8, 5) == pytest.approx(3.689, abs=5e-4)


def test_chains_and_trees_share_one_law() -> None:
    assert expected_tokens_along([]) == 1
    assert expected_tokens_along([0.9, 0.5, 0.4]) == pytest.approx(2.8)
    along_chain = expected_tokens_along(path_products(chain(5), [0.8] * 5))
    assert along_chain == pytest.approx(expected_tokens(0.8, 5))
    siblings = expected_tokens_along(path_products([-1, -1, 0], [0.6, 0.3, 0.5]))
    assert siblings == pytest.approx(1 + 0.6 + 0.3 + 0.3)


def test_the_check_value() -> None:
    assert speedup(0.8, 5, 0.05) == pytest.approx(2.951, abs=5e-4)
    assert best_gamma(0.8, 0.05) == 8
    assert speedup(0.8, 8, 0.05) == pytest.approx(3.09, abs=5e-3)


def test_verified_rows_cost_as_drafted_ones_do() -> None:
    assert speedup(0.8, 5, 0.03, row_cost=0.02) == pytest.approx(speedup(0.8, 5, 0.05))
    assert best_gamma(0.8, 0.0, row_cost=0.05) == 8


ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# cost of a draft step: best gamma / speedup there, for each alpha
BEST = {
    0.01: "5/1.88  7/2.30  9/2.97  14/4.23  24/7.49  40/12.54",
    0.02: "4/1.79  6/2.17  8/2.76  11/3.82  19/6.37  31/9.95",
    0.05: "3/1.63  4/1.92  6/2.35  8/3.09  13/4.67  21/6.60",
    0.10: "2/1.46  3/1.67  4/1.98  6/2.47  10/3.43  15/4.48",
    0.20: "1/1.25  2/1.40  3/1.58  4/1.87  7/2.37  10/2.87",
    0.30: "1/1.15  1/1.23  2/1.37  3/1.55  5/1.87  8/2.18",
    0.50: "0/1.00  1/1.07  1/1.13  2/1.22  3/1.38  5/1.51",
}


@pytest.mark.parametrize(
    ("draft_cost", "alpha", "cell"),
    [
        (cost, alpha, cell)
        for cost, row in BEST.items()
        for alpha, cell in zip(ALPHAS, row.split(), strict=True)
    ],
)
def test_best_gamma_and_its_speedup(draft_cost: float, alpha: float, cell: str) -> None:
    gamma, gain = cell.split("/")
    assert best_gamma(alpha, draft_cost) == int(gamma)
    assert speedup(alpha, int(gamma), draft_cost) == pytest.approx(float(gain), abs=0.0051)


def test_best_gamma_is_zero_where_speculation_cannot_pay() -> None:
    assert best_gamma(0.0, 0.01) == 0
    assert best_gamma(0.5, 0.5) == 0  # a tie at 1.00 goes to plain decoding
    assert best_gamma(1.0, 0.01, max_gamma=10) == 10


def test_break_even_without_kv_is_a_share_of_the_ridge() -> None:
    """Memory-bound plain decoding meets compute-bound verification."""
    share = (expected_tokens(0.8, 5) - 5 * 0.05) / 6
    batch = break_even_batch(H100, WEIGHTS_ONLY, 0, alpha=0.8, gamma=5, draft_cost=0.05)
    assert batch == int(share * H100.ridge) + 1 == 170


@pytest.mark.parametrize("context", [0, 256])
@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_break_even_is_the_first_batch_that_does_not_pay(context: int, gamma: int) -> None:
    def seconds_per_token(batch: int, drafted: int) -> float:
        plain = step_cost(LLAMA_8B, batch, 1, context).seconds(H100)
        step = step_cost(LLAMA_8B, batch, drafted + 1, context).seconds(H100)
        return (step + drafted * 0.05 * plain) / expected_tokens(0.6, drafted)

    batch = break_even_batch(H100, LLAMA_8B, context, alpha=0.6, gamma=gamma, draft_cost=0.05)
    first = next(
        b for b in range(1, 2000) if seconds_per_token(b, gamma) >= seconds_per_token(b, 0)
    )
    assert batch == first


def test_long_contexts_pay_at_any_batch_and_hopeless_drafts_at_none() -> None:
    assert break_even_batch(H100, LLAMA_8B, 32_768, alpha=0.8, gamma=5, draft_cost=0.05) is None
    assert break_even_batch(H100, LLAMA_8B, 1024, alpha=0.1, gamma=4, draft_cost=0.1) == 1
