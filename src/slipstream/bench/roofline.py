"""A machine's two ceilings, measured, and where a model's steps sit below them.

Bandwidth is that of reading one large tensor, compute that of one large matrix product in the
model's own number format: what this library reaches here, not what a datasheet promises.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from slipstream import native
from slipstream.core.errors import ConfigError
from slipstream.engine.calibration import SHORT_CONTEXT, measure
from slipstream.maths.roofline import (
    HARDWARE,
    Device,
    ModelShape,
    StepCost,
    expected_tokens,
    step_cost,
)
from slipstream.models import CausalLM
from slipstream.models.recorded import RecordedRows
from slipstream.models.runner import ModelRunner

_READ_BYTES = 1 << 29  # beyond any cache
_PRODUCT_SIZE = 2048
_PACKED_ROWS = 128
_REPETITIONS = 5


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A target pass over so many rows; measured is None on a machine that is not this one."""

    rows: int
    measured_ms: float | None
    predicted_ms: float
    cost: StepCost


@dataclass(frozen=True, slots=True)
class Roofline:
    """Ceilings and steps.

    Attributes:
        ridge_rows: rows at which streaming weights stops being the bottleneck.
    """

    device: Device
    ridge_rows: float
    steps: list[StepPoint]

    def speedup(self, alpha: float, gamma: int, *, measured: bool) -> float | None:
        """Against plain decoding, of free drafts accepted with chance `alpha` each."""
        sec = {
            step.rows: step.measured_ms if measured else step.predicted_ms for step in self.steps
        }
        plain, verify = sec.get(1), sec.get(gamma + 1)
        if plain is None or verify is None:
            return None
        return expected_tokens(alpha, gamma) * plain / verify

    def as_dict(self, alpha: float) -> dict[str, Any]:
        gammas = [step.rows - 1 for step in self.steps if step.rows > 1]
        return {
            "bandwidth_gb_per_sec": self.device.bytes_per_sec / 1e9,
            "compute_tera_ops_per_sec": self.device.flops_per_sec / 1e12,
            "arithmetic": self.device.arithmetic,
            "source": self.device.source,
            "ridge_rows": self.ridge_rows,
            "steps": [
                {
                    "rows": step.rows,
                    "measured_ms": step.measured_ms,
                    "predicted_ms": step.predicted_ms,
                }
                for step in self.steps
            ],
            "speedups": [
                {
                    "gamma": gamma,
                    "acceptance": alpha,
                    "predicted": self.speedup(alpha, gamma, measured=False),
                    "measured": self.speedup(alpha, gamma, measured=True),
                }
                for gamma in gammas
            ],
        }


def measured_roofline(runner: ModelRunner) -> Roofline:
    """This machine, and this model's passes on it. The runner's cache must not be in use."""
    model = runner.model
    device = measure_device(model)
    table = measure(runner)
    times: dict[int, float | None] = dict(zip(table.rows, table.sec, strict=True))
    return _roofline(device, shape_of(model), times)


def datasheet_roofline(name: str, model: CausalLM) -> Roofline:
    """Another machine by its datasheet, with the model in two-byte weights."""
    if name not in HARDWARE:
        raise ConfigError(f"no datasheet of {name!r}; known are {', '.join(HARDWARE)}")
    times: dict[int, float | None] = dict.fromkeys((1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
    return _roofline(HARDWARE[name], shape_of(model), times)


def shape_of(model: CausalLM) -> ModelShape:
    """What of a model decides the cost of its steps."""
    config = model.config
    num_weights = model.num_weights
    if not config.tied:  # the embedding is looked up, not multiplied
        num_weights -= config.vocab_size * config.hidden_size
    return ModelShape(
        num_weights=num_weights,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_dim,
        bytes_per_weight=model.weight_bytes / model.num_weights,
        bytes_per_kv=2 if model.is_packed else model.dtype.itemsize,
    )


def measure_device(model: CausalLM) -> Device:
    """Read bandwidth, and matrix throughput in the model's arithmetic, the best of a few."""
    return Device(
        flops_per_sec=_packed_product_rate(model) if model.is_packed else _product_rate(model),
        bytes_per_sec=_READ_BYTES / _read_sec(model.device),
        arithmetic=model.kind,
        source=f"measured here, {native.num_threads()} threads",
    )


def _product_rate(model: CausalLM) -> float:
    """Operations per second of a large matrix product."""
    size = _PRODUCT_SIZE
    a, b = (torch.ones(size, size, dtype=model.dtype, device=model.device) for _ in range(2))
    return 2 * size**3 / _fastest(lambda: (a @ b)[0, 0].item())


def _packed_product_rate(model: CausalLM) -> float:
    """The same of many rows and the model's largest packed matrix."""
    config = model.config
    logits = RecordedRows(model.logits, config.hidden_size, config.vocab_size)
    rows = torch.ones(_PACKED_ROWS, config.hidden_size)
    seconds = _fastest(lambda: logits(rows))
    return 2 * _PACKED_ROWS * config.vocab_size * config.hidden_size / seconds


def _read_sec(device: torch.device) -> float:
    block = torch.empty(_READ_BYTES // 4, dtype=torch.float32, device=device)
    if device.type == "cpu" and native.is_available():
        native.load().use_large_pages(block.view(torch.uint8))
    block.fill_(1.0)
    return _fastest(lambda: block.sum().item())


def draw(roofline: Roofline, path: str) -> None:
    """The classic picture: attainable operations per second over operations per byte."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("--plot needs matplotlib; pip install 'slipstream[plot]'") from None
    device = roofline.device
    figure, axes = pyplot.subplots(figsize=(6, 4))
    reach = [0.25, device.ridge, max(8 * device.ridge, 2 * roofline.steps[-1].cost.intensity)]
    roof = [min(x * device.bytes_per_sec, device.flops_per_sec) / 1e12 for x in reach]
    axes.loglog(reach, roof, color="black")
    axes.axvline(device.ridge, color="grey", linewidth=0.8, linestyle=":")
    for step in roofline.steps:
        ms = step.predicted_ms if step.measured_ms is None else step.measured_ms
        point = (step.cost.intensity, step.cost.num_flops / (ms / 1e3) / 1e12)
        axes.plot(*point, "o", color="#4c78a8")
        axes.annotate(str(step.rows), point, fontsize=7)
    axes.set_xlabel("operations per byte (points: rows of a pass; 1 decodes, more verify)")
    axes.set_ylabel("tera-operations per second")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _roofline(device: Device, shape: ModelShape, times: dict[int, float | None]) -> Roofline:
    steps = []
    for rows, sec in times.items():
        cost = step_cost(shape, batch=1, tokens_each=rows, context=SHORT_CONTEXT)
        measured_ms = None if sec is None else 1e3 * sec
        steps.append(StepPoint(rows, measured_ms, 1e3 * cost.seconds(device), cost))
    return Roofline(device, device.ridge_tokens(shape.bytes_per_weight), steps)


def _fastest(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_REPETITIONS):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best
