"""What a step costs, and when speculation pays: the roofline, and the law of accepted tokens.

A decode step streams every weight and every sequence's K/V once, however few tokens it computes.
Until the arithmetic catches up, at the ridge, more tokens per step cost next to nothing; that
slack is what speculation spends. Peaks and bandwidths are datasheet ceilings, so times are lower
bounds: a controller decides on measured step times, not on these.

Sources: Williams et al. 2009 (roofline); Leviathan et al. 2023 (arXiv 2211.17192, eq. 1 and
theorem 3.8: expected tokens and speedup); MagicDec (arXiv 2408.11049: K/V traffic at large batch).
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

LARGEST_BATCH = 1 << 20

# ---------------------------------------------------------------------------------------------
# Devices


@dataclass(frozen=True, slots=True)
class Device:
    """The two ceilings of a machine.

    Attributes:
        flops_per_sec: dense peak (no sparsity) of the arithmetic named in `arithmetic`.
        bytes_per_sec: peak memory bandwidth.
        arithmetic: number format of the products and sums.
        source: where the two numbers come from.
    """

    flops_per_sec: float
    bytes_per_sec: float
    arithmetic: str
    source: str

    @property
    def ridge(self) -> float:
        """Operations per byte at which memory and arithmetic take equally long."""
        return self.flops_per_sec / self.bytes_per_sec

    def ridge_tokens(self, bytes_per_weight: float) -> float:
        """Tokens per step at which streaming the weights stops being the bottleneck."""
        return self.ridge * bytes_per_weight / 2


HARDWARE: dict[str, Device] = {
    "a100": Device(312e12, 2.039e12, "bf16", "NVIDIA A100 datasheet, 80 GB SXM"),
    "h100": Device(989e12, 3.35e12, "bf16", "NVIDIA H100 datasheet, SXM5"),
    "h200": Device(989e12, 4.8e12, "bf16", "NVIDIA H200 datasheet, SXM"),
    "b200": Device(2250e12, 8.0e12, "bf16", "NVIDIA Blackwell datasheet, HGX B200"),
    "mi300x": Device(1307.4e12, 5.3e12, "bf16", "AMD Instinct MI300X datasheet"),
    "l40s": Device(362e12, 0.864e12, "bf16", "NVIDIA L40S datasheet"),
    "rtx-4090": Device(
        165.2e12, 1.008e12, "fp16, fp32 accumulate", "NVIDIA Ada GPU architecture whitepaper"
    ),
    "apple-m4-max": Device(
        18.4e12, 0.546e12, "fp32", "Apple (bandwidth); 40-core GPU peak estimated, not published"
    ),
    "apple-m2-ultra": Device(
        27e12, 0.8e12, "fp32", "Apple (bandwidth); 76-core GPU peak estimated, not published"
    ),
}


def avx512_cpu(
    num_cores: int,
    ghz: float,
    num_channels: int,
    megatransfers_per_sec: float,
    flops_per_cycle: int = 64,
) -> Device:
    """Build the ceilings of an x86 processor from its data sheet.

    Args:
        num_cores: cores used.
        ghz: sustained clock under AVX-512 load.
        num_channels: populated 64-bit memory channels.
        megatransfers_per_sec: memory speed, such as 4800 for DDR5-4800.
        flops_per_cycle: float32 operations per core and cycle: 64 with two 512-bit
            multiply-add units, 32 with one, or with AVX2.
    """
    return Device(
        flops_per_sec=num_cores * ghz * 1e9 * flops_per_cycle,
        bytes_per_sec=num_channels * megatransfers_per_sec * 1e6 * 8,
        arithmetic="fp32",
        source=f"{num_cores} cores * {ghz} GHz * {flops_per_cycle} FLOP per cycle; "
        f"{num_channels} channels * {megatransfers_per_sec} MT/s * 8 bytes",
    )


# ---------------------------------------------------------------------------------------------
# One step


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a dense decoder that decide what a step costs.

    Attributes:
        num_weights: weights in matrix products, LM head included, embedding lookup not.
        num_layers, num_heads, num_kv_heads, head_size: attention.
        bytes_per_weight: 2 for bf16, 0.5625 for blocks of 4-bit weights with a 16-bit scale per 32.
        bytes_per_kv: of one stored key or value element.
        activation_bytes_per_token: traffic of activations that are not fused away.
    """

    num_weights: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    bytes_per_weight: float = 2.0
    bytes_per_kv: float = 2.0
    activation_bytes_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Operations and memory traffic of one forward pass."""

    num_flops: float
    num_bytes: float

    @property
    def intensity(self) -> float:
        """Operations per byte, exact for the whole step."""
        return self.num_flops / self.num_bytes

    def seconds(self, device: Device) -> float:
        """Return the time of the slower ceiling; the other one hides behind it."""
        return max(self.num_flops / device.flops_per_sec, self.num_bytes / device.bytes_per_sec)


def step_cost(shape: ModelShape, batch: int, tokens_each: int, context: float) -> StepCost:
    """Cost a step of `batch` sequences, each with `tokens_each` new tokens after `context` old.

    Plain decoding has 1 new token, verification gamma + 1. Weights are read once for the batch,
    K/V once per sequence: batching raises the intensity of the former only, speculation of both.
    """
    num_tokens = batch * tokens_each
    # New token i of n looks at the context and at i tokens of its own: (n + 1) / 2 on average.
    pairs = num_tokens * (context + (tokens_each + 1) / 2)
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_size * pairs
    kv_elements = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size
    return StepCost(
        num_flops=2 * shape.num_weights * num_tokens + attention,
        num_bytes=shape.num_weights * shape.bytes_per_weight
        + batch * (context + tokens_each) * kv_elements * shape.bytes_per_kv
        + num_tokens * shape.activation_bytes_per_token,
    )


def matmul_intensity(
    num_rows: int,
    d_in: int,
    d_out: int,
    bytes_per_weight: float = 2.0,
    bytes_per_value: float = 2.0,
) -> float:
    """Return I(N), operations per byte of one [N, d_in] x [d_in, d_out] product, exactly."""
    weights = d_in * d_out
    traffic = weights * bytes_per_weight + num_rows * (d_in + d_out) * bytes_per_value
    return 2 * num_rows * weights / traffic


def weight_intensity(num_rows: int, bytes_per_weight: float = 2.0) -> float:
    """Return I(N) ~ 2 N / b: the limit of `matmul_intensity` for matrices much larger than N."""
    return 2 * num_rows / bytes_per_weight


# ---------------------------------------------------------------------------------------------
# Tokens per step


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return E = (1 - alpha^(gamma+1)) / (1 - alpha), and gamma + 1 at alpha = 1.

    The mean acceptance length of a chain of `gamma` drafted tokens, each accepted with chance
    `alpha` once those before it are. Summed as a series, which needs no limit. A mean alpha over
    tokens of different difficulty understates E (Jensen); `expected_tokens_along` does not.
    """
    return expected_tokens_along(alpha**i for i in range(1, gamma + 1))


def expected_tokens_along(survival: Iterable[float]) -> float:
    """Return E = 1 + the sum of `survival`: the mean acceptance length of any draft.

    `survival` has, for each drafted node, the chance that it is on the accepted path: for a chain
    the cumulative acceptances P(accepted >= i), i = 1..gamma; for a tree the path products.
    """
    return 1.0 + sum(survival)


# ---------------------------------------------------------------------------------------------
# Speedup


def speedup(alpha: float, gamma: int, draft_cost: float, row_cost: float = 0.0) -> float:
    """Return tokens per second over plain decoding: E / (1 + gamma (c + eps)).

    Args:
        alpha: chance that a drafted token is accepted.
        gamma: drafted tokens per step.
        draft_cost: c, time of one draft step in plain target steps.
        row_cost: eps, what each further verified token adds to the target step, same unit.
    """
    return expected_tokens(alpha, gamma) / (1 + gamma * (draft_cost + row_cost))


def best_gamma(alpha: float, draft_cost: float, row_cost: float = 0.0, max_gamma: int = 64) -> int:
    """Return the gamma of the highest speedup, the shortest among equals; 0 is not to speculate."""
    return max(range(max_gamma + 1), key=lambda g: speedup(alpha, g, draft_cost, row_cost))


def break_even_batch(
    device: Device, shape: ModelShape, context: float, alpha: float, gamma: int, draft_cost: float
) -> int | None:
    """Return the smallest batch at which drafting `gamma` tokens is no faster than plain decoding.

    None where it still pays at 2^20 sequences. Enough K/V per sequence makes it so: reading it is
    then the bottleneck at every batch size, and all tokens of a sequence share one reading.

    Args:
        device: the ceilings.
        shape: the target model.
        context: committed tokens of each sequence.
        alpha, gamma, draft_cost: as in `speedup`, the cost relative to a plain step of that batch.
    """

    def is_no_faster(batch: int) -> bool:
        plain = step_cost(shape, batch, 1, context).seconds(device)
        verify = step_cost(shape, batch, gamma + 1, context).seconds(device)
        return expected_tokens(alpha, gamma) * plain <= verify + gamma * draft_cost * plain

    # verify / plain never falls as the batch grows: verification reads more bytes per sequence
    # and reaches the ridge first. So there is one crossing, and bisection finds it.
    batches = range(1, LARGEST_BATCH + 1)
    crossing = bisect.bisect_left(batches, True, key=is_no_faster)
    return batches[crossing] if crossing < len(batches) else None
