"""Any rows of logits and controls, against one row at a time in plain Python."""

import math
from dataclasses import dataclass, field

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.maths.distributions import Controls, Edits, finishers, sample, scores
from slipstream.maths.noise import Address, Key, Stream

INF = math.inf
VOCAB_SIZE = 7

# A coarse grid, exact in float32: ties are common, and equal means equal.
grid = st.integers(-24, 24).map(lambda i: i / 8)
token_sets = st.lists(st.integers(0, VOCAB_SIZE - 1), unique=True, max_size=4)


@dataclass(frozen=True)
class Row:
    logits: list[float]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    bias: dict[int, float] = field(default_factory=dict)
    banned: list[int] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    repetition: float = 1.0
    counts: dict[int, int] = field(default_factory=dict)
    presence: float = 0.0
    frequency: float = 0.0

    def edits(self) -> Edits:
        added = {**self.bias, **dict.fromkeys(self.banned, -INF)}

        def ids(tokens: list[int]) -> Tensor:
            return torch.tensor(tokens, dtype=torch.int64)

        return Edits(
            add_ids=ids(list(added)),
            add_values=torch.tensor(list(added.values()), dtype=torch.float32),
            seen_ids=ids(self.seen),
            repetition=self.repetition,
            output_ids=ids(list(self.counts)),
            output_counts=torch.tensor(list(self.counts.values()), dtype=torch.float32),
            presence=self.presence,
            frequency=self.frequency,
        )

    def edited(self) -> list[float]:
        logits = [x + self.bias.get(v, 0.0) for v, x in enumerate(self.logits)]
        for v in self.banned:
            logits[v] = -INF
        for v in self.seen:
            logits[v] = (
                logits[v] / self.repetition if logits[v] > 0 else logits[v] * self.repetition
            )
        for v, count in self.counts.items():
            logits[v] -= self.presence + self.frequency * count
        return logits


rows = st.builds(
    Row,
    logits=st.lists(st.one_of(grid, grid, grid, st.just(-INF)), min_size=7, max_size=7),
    temperature=st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 6, 7, 50]),
    top_p=st.one_of(st.just(1.0), st.floats(1 / 32, 1.0, width=32)),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.2, 0.7, 1.0]),  # no logarithm is near the grid
    bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), grid, max_size=2),
    banned=token_sets,
    seen=token_sets,
    repetition=st.sampled_from([0.5, 1.0, 2.0]),
    counts=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.integers(1, 3), max_size=3),
    presence=st.sampled_from([0.0, 0.25, -1.0]),
    frequency=st.sampled_from([0.0, 0.5, -0.125]),
).filter(lambda row: max(row.edited()) > -INF)


def naive(row: Row) -> list[float]:
    """p by the definitions, in the documented order."""
    logits = row.edited()
    best = max(logits)
    if row.temperature == 0:
        return [float(v == logits.index(best)) for v in range(VOCAB_SIZE)]
    mass = [math.exp((x - best) / row.temperature) for x in logits]
    mass = [m if m >= row.min_p else 0.0 for m in mass]
    if 0 < row.top_k < VOCAB_SIZE:
        kth = sorted(mass, reverse=True)[row.top_k - 1]
        mass = [m if m >= kth else 0.0 for m in mass]
    if row.top_p < 1:
        total, before = sum(mass), 0.0
        for v in sorted(range(VOCAB_SIZE), key=lambda v: -mass[v]):
            # A hair's breadth from the limit, rounding decides, and both answers are right.
            assume(abs(before / total - row.top_p) > 1e-5 or mass[v] == 0)
            kept = before == 0 or before / total < row.top_p
            before += mass[v]
            mass[v] *= kept
    return [m / sum(mass) for m in mass]


def stacked(batch: list[Row]) -> tuple[Tensor, Controls]:
    return torch.tensor([row.logits for row in batch]), Controls(
        temperature=torch.tensor([row.temperature for row in batch]),
        top_k=torch.tensor([row.top_k for row in batch]),
        top_p=torch.tensor([row.top_p for row in batch]),
        min_p=torch.tensor([row.min_p for row in batch]),
        edits={i: row.edits() for i, row in enumerate(batch)},
    )


@given(rows)
def test_a_row_has_the_law_of_its_definition(row: Row) -> None:
    expected = torch.tensor([naive(row)])
    weights = scores(*stacked([row]))
    assert torch.equal(weights > -INF, expected > 0)
    torch.testing.assert_close(weights.softmax(-1), expected, atol=1e-6, rtol=0)


@settings(max_examples=50)
@given(st.lists(rows, min_size=2, max_size=5))
def test_a_row_does_not_see_the_batch(batch: list[Row]) -> None:
    addresses = [Address(Key(3), Stream.TARGET, position) for position in range(len(batch))]
    weights, tokens = scores(*stacked(batch)), sample(*stacked(batch), addresses)
    for i, row in enumerate(batch):
        assert torch.equal(weights[i : i + 1], scores(*stacked([row])))
        assert torch.equal(tokens[i : i + 1], sample(*stacked([row]), addresses[i : i + 1]))


@given(rows, st.integers(0, 2**64 - 1), st.integers(1, VOCAB_SIZE))
def test_finishers_are_distinct_and_possible_ones_come_first(
    row: Row, seed: int, count: int
) -> None:
    weights = scores(*stacked([row]))
    places = finishers(weights, [Address(Key(seed), Stream.TARGET, 0)], count)[0]
    assert len(set(places.tolist())) == count
    possible = weights[0, places] > -INF
    assert possible.sum() == min(count, int((weights > -INF).sum()))
    assert torch.equal(possible, possible.sort(descending=True).values)
