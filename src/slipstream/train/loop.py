"""The steps of a training run, in a directory it can be taken up in again.

    OUT/checkpoint.pt     head, optimiser and step, replaced as a whole every so many steps

A step is a function of the settings and of what came before, so a run that was killed ends like
one that was not.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.core.errors import ConfigError
from slipstream.loading.heads import Head
from slipstream.models.heads import MedusaHead
from slipstream.train.files import written_whole
from slipstream.train.objectives import Objective, acceptance, loss
from slipstream.train.rows import Corpus, Rows, shuffled


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a head is trained.

    Attributes:
        num_steps: updates.
        num_rows, length: of a batch, in tokens.
        rate: the highest learning rate, reached after `warmup` of the steps and then lowered to
            nothing along a cosine.
        seed: of the order of texts.
        num_measured: batches of held-out texts that acceptance is measured on.
        every: steps between checkpoints, each with a measurement.
    """

    num_steps: int
    num_rows: int = 8
    length: int = 256
    rate: float = 1e-3
    warmup: float = 0.04
    clip: float = 1.0
    seed: int = 0
    num_measured: int = 8
    every: int = 200

    def rate_at(self, step: int) -> float:
        num_warm = max(1, round(self.warmup * self.num_steps))
        if step < num_warm:
            return self.rate * (step + 1) / num_warm
        passed = (step - num_warm) / max(1, self.num_steps - num_warm)
        return self.rate * (1 + math.cos(math.pi * passed)) / 2


@dataclass(frozen=True, slots=True)
class Progress:
    """After a step: how far, the loss, and when last measured the acceptance by depth."""

    step: int
    loss: float
    acceptance: list[float]


def train(
    head: Head,
    corpus: Corpus,
    objective: Objective,
    schedule: Schedule,
    out: Path,
    progress: Callable[[Progress], None] = lambda state: None,
) -> list[float]:
    """Train a head, or go on training it where a checkpoint in `out` left off.

    Modifies the head.

    Returns:
        Acceptance by depth on held-out texts (`objectives.acceptance`).

    Raises:
        ConfigError: the loss is not finite.
    """
    head.to(corpus.device)
    optimiser = torch.optim.AdamW(
        [parameter for parameter in head.parameters() if parameter.requires_grad],
        lr=schedule.rate,
        betas=(0.9, 0.95),
        weight_decay=0.01,
    )
    path = out / "checkpoint.pt"
    first, measured = _resume(path, head, optimiser)
    batches = training_rows(corpus, schedule, first)
    for step in range(first, schedule.num_steps):
        for group in optimiser.param_groups:
            group["lr"] = schedule.rate_at(step)
        with torch.autocast(corpus.device.type, torch.bfloat16):
            value = loss(head, next(batches), objective)
        if not math.isfinite(value.item()):
            raise ConfigError(f"the loss is {value.item()} at step {step + 1}; lower --rate")
        optimiser.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(optimiser.param_groups[0]["params"], schedule.clip)
        optimiser.step()
        if (step + 1) % schedule.every == 0 or step + 1 == schedule.num_steps:
            measured = measure(head, corpus, objective, schedule)
            _keep(path, head, optimiser, step + 1, measured)
        progress(Progress(step + 1, value.item(), measured))
    return measured


def measure(head: Head, corpus: Corpus, objective: Objective, schedule: Schedule) -> list[float]:
    """Acceptance by depth on the first held-out texts."""
    num_steps = len(head.heads) if isinstance(head, MedusaHead) else objective.unroll
    rows = corpus.rows(corpus.held_out, num_rows=schedule.num_rows, length=schedule.length)
    batches = (batch for _, batch in zip(range(schedule.num_measured), rows, strict=False))
    with torch.autocast(corpus.device.type, torch.bfloat16):
        return acceptance(head, batches, num_steps)


def training_rows(corpus: Corpus, schedule: Schedule, first: int) -> Iterator[Rows]:
    """The batches of all steps from `first` on, epoch after epoch."""
    size = schedule.num_rows * schedule.length
    per_epoch = corpus.num_tokens(corpus.training) // size
    epoch, skip = divmod(first, per_epoch)
    while True:
        order = shuffled(corpus.training, schedule.seed, epoch)
        yield from corpus.rows(order, num_rows=schedule.num_rows, length=schedule.length, skip=skip)
        epoch, skip = epoch + 1, 0


def _resume(path: Path, head: Head, optimiser: torch.optim.Optimizer) -> tuple[int, list[float]]:
    """Where to go on, after the head and the optimiser have been put there."""
    if not path.exists():
        return 0, []
    kept = torch.load(path, weights_only=True)
    head.load_state_dict(kept["head"])
    optimiser.load_state_dict(kept["optimiser"])
    return kept["step"], kept["acceptance"]


def _keep(
    path: Path, head: Head, optimiser: torch.optim.Optimizer, step: int, measured: list[float]
) -> None:
    kept: dict[str, Any] = {
        "head": head.state_dict(),
        "optimiser": optimiser.state_dict(),
        "step": step,
        "acceptance": measured,
    }
    with written_whole(path) as part:
        torch.save(kept, part)
