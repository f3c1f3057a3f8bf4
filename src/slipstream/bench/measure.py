"""Head to head: methods take turns on the same prompts in one process.

Every batch is answered by every method, plain decoding among them, before the next batch is, in an
order that turns batch by batch: what slows the machine for a while slows all of them. There is one
untimed warm-up. Rates count tokens of passes in which nobody's prompt was computed; medians over
rounds. Outputs are compared with plain decoding's while measuring: a method that changed a token
would show here.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any

from slipstream.build import draft_bytes
from slipstream.core.counts import DraftCounts
from slipstream.core.params import SamplingParams
from slipstream.engine.engine import Engine


@dataclass(slots=True)
class Run:
    """One pass of a method over all batches."""

    decode_sec: float = 0.0
    decode_tokens: int = 0
    draft_sec: float = 0.0
    total_sec: float = 0.0
    counts: DraftCounts = field(default_factory=DraftCounts)
    outputs: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    """What one method did at one batch size and temperature.

    Attributes:
        tokens_per_sec: median over rounds, of decoding alone; `spread` are its quartiles.
        speedup: against plain decoding in the same rounds.
        acceptance_length: tokens per target pass and sequence.
        draft_share: of the time, spent drafting.
        draft_bytes: of weights that drafting needs beside the target's.
        identical_outputs: answers equal to plain decoding's, of all.
    """

    method: str
    batch_size: int
    temperature: float
    tokens_per_sec: float
    spread: tuple[float, float]
    speedup: float
    acceptance_length: float | None
    acceptance_by_position: list[float]
    draft_share: float
    draft_bytes: int
    identical_outputs: int
    num_outputs: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


PLAIN = "plain"


def head_to_head(
    engines: dict[str, Engine],
    prompts: Sequence[list[int]],
    *,
    batch_size: int,
    temperature: float,
    max_tokens: int,
    rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Measure every engine on the same prompts.

    Args:
        engines: method -> engine over one and the same model; `PLAIN` must be among them.
        prompts: token ids.
        batch_size: prompts answered together; each batch runs to its end before the next.
        progress: told what runs next.
    """
    assert PLAIN in engines, "there is no speedup without the plain engine"
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens)
        for i in range(len(prompts))
    ]
    order = list(engines)
    batches = [slice(first, first + batch_size) for first in range(0, len(prompts), batch_size)]
    for method in order:
        progress(f"{method}: warm-up")
        answer(engines[method], prompts[batches[0]], params[batches[0]], Run())
    runs: dict[str, list[Run]] = {method: [] for method in engines}
    for number in range(rounds):
        for method in engines:
            runs[method].append(Run())
        for index, batch in enumerate(batches):
            progress(f"round {number + 1} of {rounds}, batch {index + 1} of {len(batches)}")
            for method in order:
                answer(engines[method], prompts[batch], params[batch], runs[method][-1])
            order = order[1:] + order[:1]
    return [
        _row(
            method,
            runs[method],
            runs[PLAIN],
            batch_size,
            temperature,
            draft_bytes(engine.parts.drafter),
        )
        for method, engine in engines.items()
    ]


def answer(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], run: Run
) -> None:
    """Answer prompts together, to the end of all; added to a run."""
    before = engine.stats().draft_sec
    ids = [engine.add(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    while engine.has_work:
        is_decoding = not engine.computes_prompts
        began = time.perf_counter()
        deltas = engine.step()
        seconds = time.perf_counter() - began
        run.total_sec += seconds
        if is_decoding:
            run.decode_sec += seconds
            run.decode_tokens += sum(len(delta.token_ids) for delta in deltas)
    for request_id in ids:
        (output,) = engine.output(request_id).outputs
        run.outputs.append(output.token_ids)
        run.counts.merge(output.draft_counts)
    run.draft_sec += engine.stats().draft_sec - before


def _row(
    method: str,
    runs: list[Run],
    plain: list[Run],
    batch_size: int,
    temperature: float,
    num_bytes: int,
) -> Row:
    rates = [run.decode_tokens / run.decode_sec for run in runs]
    speedups = [
        rate / (base.decode_tokens / base.decode_sec)
        for rate, base in zip(rates, plain, strict=True)
    ]
    spread = quantiles(rates, n=4) if len(rates) > 1 else [rates[0]] * 3
    counts = DraftCounts()
    for run in runs:
        counts.merge(run.counts)
    pairs = list(zip(runs[0].outputs, plain[0].outputs, strict=True))
    return Row(
        method=method,
        batch_size=batch_size,
        temperature=temperature,
        tokens_per_sec=median(rates),
        spread=(spread[0], spread[2]),
        speedup=median(speedups),
        acceptance_length=counts.mean_acceptance_length,
        acceptance_by_position=counts.acceptance_by_position,
        draft_share=sum(run.draft_sec for run in runs) / sum(run.total_sec for run in runs),
        draft_bytes=num_bytes,
        identical_outputs=sum(mine == base for mine, base in pairs),
        num_outputs=len(pairs),
    )
