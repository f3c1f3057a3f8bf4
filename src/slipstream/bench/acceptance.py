"""How long the acceptance rules take: `python -m slipstream.bench.acceptance`.

Two points. Many short drafts over a tiny vocabulary show what a draft costs; few over a real one
show what a token of vocabulary costs. Both include looking up noise, and the second starts from
logits. Its drafts are accepted whole, which is the most work: every node is visited. Sampling all
its rows at once shows what the race itself takes.

All cases of a round run one after another, so that a slow moment of the machine hits all alike.
Medians and quartiles; the last line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from statistics import quantiles
from time import perf_counter

import torch
from torch import Tensor

from slipstream.bench.circumstances import circumstances
from slipstream.maths import acceptance
from slipstream.maths.acceptance import DraftBatch
from slipstream.maths.distributions import Controls, probabilities, race, sample
from slipstream.maths.noise import Address, Key, StepNoise, Stream, exponential

Cases = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the acceptance rules.")
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each case, at least 2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    cases = many_short_drafts() | few_long_rows()
    times = measure(cases, args.rounds)
    width = max(map(len, times))
    print(f"{'':{width}}  median ms   quartiles")
    for name, (low, median, high) in times.items():
        print(f"{name:{width}}  {median:9.1f}   {low:.1f} to {high:.1f}")
    print(
        json.dumps(
            {"unit": "ms", "quartiles": times, "rounds": args.rounds} | circumstances(sys.argv[1:])
        )
    )


def measure(cases: Cases, rounds: int) -> dict[str, list[float]]:
    """Quartiles of each case in milliseconds."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for is_timed in [False] + [True] * rounds:
        for name, run in cases.items():
            start = perf_counter()
            run()
            if is_timed:
                samples[name].append(1e3 * (perf_counter() - start))
    return {name: [round(t, 3) for t in quantiles(times)] for name, times in samples.items()}


def many_short_drafts(num_seqs: int = 10_000, gamma: int = 4) -> Cases:
    """Chains over 8 tokens, drafted independently; p is a table."""
    p = torch.tensor([0.32, 0.24, 0.16, 0.10, 0.08, 0.05, 0.03, 0.02])
    q = torch.tensor([0.15, 0.30, 0.20, 0.15, 0.05, 0.05, 0.05, 0.05])
    keys = [Key(seed) for seed in range(num_seqs)]
    noise = StepNoise(keys, [0] * num_seqs)
    drawn = [Address(Key(0), Stream.DRAFT, row) for row in range(num_seqs * gamma)]
    tokens = race(q.log().float().expand(len(drawn), -1), drawn)
    drafts = _chains(tokens.view(num_seqs, gamma), q.expand(num_seqs, gamma, -1))

    def target(seqs: Tensor, nodes: Tensor) -> Tensor:
        return p.expand(len(seqs), -1)

    def draw(seqs: Tensor, nodes: Tensor) -> Tensor:
        logits = p.log().expand(len(seqs), -1)
        return sample(logits, _controls(len(seqs), 1.0), _addresses(keys, seqs, nodes))

    size = f"{num_seqs} chains of {gamma}, V = {len(p)}"
    return {
        f"match, {size}": lambda: acceptance.match(drafts, draw),
        f"ratio, {size}": lambda: acceptance.ratio(drafts, target, noise),
        f"block, {size}": lambda: acceptance.block(drafts, target, noise),
    }


def few_long_rows(num_seqs: int = 8, gamma: int = 8, vocab_size: int = 152_064) -> Cases:
    """Drafts over a real vocabulary, all accepted; p comes from logits [B, K + 1, V]."""
    rows = [Address(Key(0), Stream.DRAFT, row) for row in range(num_seqs * (gamma + 1))]
    # Gumbel noise spreads about as the logits of a language model do.
    gumbel = -exponential(rows, vocab_size).log()
    logits = 2 * gumbel.view(num_seqs, gamma + 1, vocab_size)
    keys = [Key(seed) for seed in range(num_seqs)]
    noise = StepNoise(keys, [0] * num_seqs)

    def draw_at(temperature: float) -> acceptance.Draw:
        def draw(seqs: Tensor, nodes: Tensor) -> Tensor:
            controls = _controls(len(seqs), temperature)
            return sample(logits[seqs, nodes + 1], controls, _addresses(keys, seqs, nodes))

        return draw

    def target(seqs: Tensor, nodes: Tensor) -> Tensor:
        return probabilities(logits[seqs, nodes + 1], _controls(len(seqs), 1.0))

    def own_choice(draw: acceptance.Draw) -> DraftBatch:
        """What the target samples at each node, so that all of it is accepted."""
        every = torch.arange(num_seqs)
        nodes = range(-1, gamma - 1)
        return _chains(torch.stack([draw(every, torch.full_like(every, n)) for n in nodes], dim=1))

    sampled, greedy = own_choice(draw_at(1.0)), own_choice(draw_at(0.0))
    every_seq = torch.arange(num_seqs).repeat_interleave(gamma)
    every_node = torch.arange(-1, gamma - 1).repeat(num_seqs)
    q = target(every_seq, every_node).view(num_seqs, gamma, vocab_size)
    equal = _chains(sampled.tokens, q)
    all_rows, plain = logits.flatten(0, 1), _controls(len(rows), 1.0)
    target_rows = [replace(row, stream=Stream.TARGET) for row in rows]

    size = f"{num_seqs} chains of {gamma}, V = {vocab_size}"
    return {
        f"sample at temperature 1, {len(rows)} rows of {vocab_size}": lambda: sample(
            all_rows, plain, target_rows
        ),
        f"match at temperature 1, {size}": lambda: acceptance.match(sampled, draw_at(1.0)),
        f"match at temperature 0, {size}": lambda: acceptance.match(greedy, draw_at(0.0)),
        f"ratio at temperature 1, {size}": lambda: acceptance.ratio(equal, target, noise),
        f"block at temperature 1, {size}": lambda: acceptance.block(equal, target, noise),
    }


def _chains(tokens: Tensor, q: Tensor | None = None) -> DraftBatch:
    return DraftBatch(tokens, torch.arange(-1, tokens.shape[1] - 1).expand_as(tokens), q)


def _controls(num_rows: int, temperature: float) -> Controls:
    return Controls(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.zeros(num_rows, dtype=torch.int64),
        top_p=torch.ones(num_rows),
        min_p=torch.zeros(num_rows),
        edits={},
    )


def _addresses(keys: list[Key], seqs: Tensor, nodes: Tensor) -> list[Address]:
    places = zip(seqs.tolist(), nodes.tolist(), strict=True)
    return [Address(keys[b], Stream.TARGET, node + 1) for b, node in places]


if __name__ == "__main__":
    main()
