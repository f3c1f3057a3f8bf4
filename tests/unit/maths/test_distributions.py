"""From logits to the sampled token: edges, order and law. Random rows: property/."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.maths import distributions
from slipstream.maths.distributions import (
    Controls,
    Edits,
    edited,
    finishers,
    probabilities,
    race,
    sample,
    scores,
)
from slipstream.maths.noise import Address, Key, Stream
from slipstream.maths.stats import chi_square_test, detectable_tv

FALSE_ALARM = 1e-6
NUM_SAMPLES = 20_000
INF = math.inf


def rows(
    num_rows: int = 1,
    *,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    edits: dict[int, Edits] | None = None,
) -> Controls:
    def spread(value: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(value, dtype=dtype).expand(num_rows)

    return Controls(
        temperature=spread(temperature),
        top_k=spread(top_k, torch.int64),
        top_p=spread(top_p),
        min_p=spread(min_p),
        edits=edits or {},
    )


def logs(*p: float) -> Tensor:
    return torch.tensor([p]).log()


def at(num_rows: int, *, seed: int = 1) -> list[Address]:
    return [Address(Key(seed), Stream.TARGET, position) for position in range(num_rows)]


def close(actual: Tensor, *expected: float) -> None:
    torch.testing.assert_close(
        actual, torch.tensor([expected], dtype=torch.float32), atol=1e-6, rtol=0
    )


# ---------------------------------------------------------------------------------------------
# Truncation


def test_nothing_set_is_softmax() -> None:
    close(probabilities(logs(0.5, 0.3, 0.2), rows()), 0.5, 0.3, 0.2)


@pytest.mark.parametrize(
    ("controls", "expected"),
    [
        # Temperature 1/2 squares p: min-p then judges 0.25 : 0.09 : 0.04.
        ({"temperature": 0.5, "min_p": 0.3}, [25 / 34, 9 / 34, 0]),
        ({"min_p": 0.3}, [0.5, 0.3, 0.2]),
        # Top-k leaves 0.625 and 0.375, so top-p needs the first alone.
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0]),
        ({"top_p": 0.6}, [0.625, 0.375, 0]),
        # Min-p leaves the same two before top-p counts.
        ({"min_p": 0.5, "top_p": 0.6}, [1, 0, 0]),
        # Temperature before top-p: 25 / 38 suffices.
        ({"temperature": 0.5, "top_p": 0.6}, [1, 0, 0]),
    ],
)
def test_the_order_of_operations(controls: dict[str, float], expected: list[float]) -> None:
    close(probabilities(logs(0.5, 0.3, 0.2), rows(**controls)), *expected)


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [(1, [1, 0, 0, 0]), (2, [0.5, 0.25, 0.25, 0]), (3, [0.5, 0.25, 0.25, 0])],
)
def test_all_that_equal_the_kth_stay(top_k: int, expected: list[float]) -> None:
    logits = torch.tensor([[4.0, 4.0 - math.log(2), 4.0 - math.log(2), -9.0]])
    close(probabilities(logits, rows(top_k=top_k)), *expected)


@pytest.mark.parametrize("top_k", [4, 5, 10**9])
def test_top_k_of_everything_keeps_everything(top_k: int) -> None:
    logits = logs(0.4, 0.3, 0.2, 0.1)
    assert torch.equal(scores(logits, rows(top_k=top_k)), scores(logits, rows()))


@pytest.mark.parametrize(
    ("top_p", "num_kept"), [(1e-50, 1), (1e-9, 1), (0.0005, 1), (0.0015, 2), (0.0995, 100)]
)
def test_top_p_breaks_ties_by_token_id(top_p: float, num_kept: int) -> None:
    weights = scores(torch.zeros(1, 1000), rows(top_p=top_p))
    assert (weights[0] > -INF).nonzero().flatten().tolist() == list(range(num_kept))


def test_min_p_of_one_keeps_the_largest_alone() -> None:
    close(probabilities(torch.tensor([[1.0, 3.0, 3.0, 2.9]]), rows(min_p=1.0)), 0, 0.5, 0.5, 0)


def test_min_p_sees_logits_after_penalties() -> None:
    penalty = Edits(
        output_ids=torch.tensor([0]), output_counts=torch.tensor([2]), presence=1.0, frequency=0.5
    )
    logits = torch.tensor([[3.0, 2.0, 0.0]])  # 1, 2, 0 after the penalty of 2
    close(probabilities(logits, rows(min_p=0.5, edits={0: penalty})), 0, 1, 0)
    close(probabilities(logits, rows(top_p=0.5, edits={0: penalty})), 0, 1, 0)


def test_impossible_tokens_stay_impossible() -> None:
    logits = torch.tensor([[-INF, 0.0, -INF, 0.0]])
    for controls in (rows(), rows(top_k=3), rows(top_p=0.9), rows(min_p=0.1), rows(temperature=9)):
        close(probabilities(logits, controls), 0, 0.5, 0, 0.5)


# ---------------------------------------------------------------------------------------------
# Temperature


@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
def test_a_tiny_temperature_neither_underflows_nor_spreads(temperature: float) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0 - 1e-3, -INF, -4e4]]).expand(200, -1)
    controls = rows(200, temperature=temperature)
    p = probabilities(logits, controls)
    assert torch.equal(p[0], torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]))
    assert (sample(logits, controls, at(200)) == 1).all()


def test_ties_survive_a_tiny_temperature() -> None:
    logits = torch.tensor([[2.0, 7.0, 7.0]]).expand(100, -1)
    controls = rows(100, temperature=1e-30)
    close(probabilities(logits, controls)[:1], 0, 0.5, 0.5)
    assert sample(logits, controls, at(100)).unique().tolist() == [1, 2]


def test_temperature_zero_is_the_first_of_the_largest() -> None:
    logits = torch.tensor([[1.0, 7.0, 7.0], [5.0, 0.0, 5.0]])
    expected = [1, 0]
    for controls in (rows(2, temperature=0), rows(2, temperature=0, top_k=1, top_p=0.1)):
        assert sample(logits, controls, at(2)).tolist() == expected
        assert race(scores(logits, controls), at(2)).tolist() == expected
        assert probabilities(logits, controls).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_temperature_zero_among_others() -> None:
    logits = torch.tensor([[1.0, 7.0, 7.0]]).expand(100, -1)
    temperature = [0.0, 1.0] * 50
    tokens = sample(logits, rows(100, temperature=temperature), at(100))
    assert (tokens[::2] == 1).all()
    assert torch.equal(tokens[1::2], sample(logits[1::2], rows(50), at(100)[1::2]))


# ---------------------------------------------------------------------------------------------
# Edits and errors


def test_edits_by_hand() -> None:
    edits = Edits(
        add_ids=torch.tensor([0, 3]),
        add_values=torch.tensor([1.5, -INF]),
        seen_ids=torch.tensor([0, 1, 2]),
        repetition=2.0,
        output_ids=torch.tensor([1, 2]),
        output_counts=torch.tensor([1, 3]),
        presence=0.25,
        frequency=0.5,
    )
    logits = torch.tensor([[0.5, -3.0, 4.0, 9.0, 1.0]] * 2)
    before = logits.clone()
    out = edited(logits, rows(2, edits={1: edits}))
    assert torch.equal(logits, before)  # the argument is kept
    assert torch.equal(out[0], before[0])
    assert out[1].tolist() == [1.0, -6.75, 0.25, -INF, 1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_everything_is_float32(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 2.0]], dtype=dtype)
    for controls in (rows(), rows(temperature=0), rows(edits={0: Edits()})):
        assert edited(logits, controls).dtype == torch.float32
        assert scores(logits, controls).dtype == torch.float32


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [INF, 1.0], [-INF, -INF]])
@pytest.mark.parametrize("temperature", [[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
@pytest.mark.parametrize("function", [scores, sample])
def test_unusable_logits_are_refused(
    bad: list[float], temperature: list[float], function: Any
) -> None:
    logits = torch.tensor([[1.0, 2.0], bad])
    arguments = [logits, rows(2, temperature=temperature)]
    with pytest.raises(ValueError, match="NaN or \\+inf, or ban every token"):
        function(*arguments, at(2)) if function is sample else function(*arguments)


def test_banning_every_token_is_refused() -> None:
    ban = Edits(add_ids=torch.tensor([0, 1]), add_values=torch.tensor([-INF, -INF]))
    with pytest.raises(ValueError, match="ban every token"):
        scores(torch.zeros(1, 2), rows(edits={0: ban}))


# ---------------------------------------------------------------------------------------------
# The race


@pytest.mark.parametrize(
    "controls",
    [
        {},
        {"temperature": 0.4},
        {"temperature": 3.0, "top_p": 0.9},
        {"top_k": 3, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("by_seed", [True, False])
def test_samples_have_the_law(controls: dict[str, float], by_seed: bool) -> None:
    logits = torch.tensor([[0.0, 1.0, -1.5, 0.5, 0.4, -3.0, -INF]])
    setting = rows(NUM_SAMPLES, **controls)
    where = at(NUM_SAMPLES, seed=3)
    if by_seed:
        where = [Address(Key(seed), Stream.TARGET, 40) for seed in range(NUM_SAMPLES)]
    tokens = sample(logits.expand(NUM_SAMPLES, -1), setting, where)
    p = probabilities(logits, rows(**controls))[0]
    outcome = chi_square_test(tokens.bincount(minlength=7), p, min_expected=100)
    assert outcome.p_value > FALSE_ALARM
    # What this would have seen, nearly always.
    assert detectable_tv(NUM_SAMPLES, 7, FALSE_ALARM, power=0.99) < 0.03


def test_finishers_are_a_sample_without_replacement() -> None:
    p = torch.tensor([0.6, 0.3, 0.1])
    pairs = finishers(p.log().expand(NUM_SAMPLES, -1), at(NUM_SAMPLES), 2)
    law = torch.zeros(3, 3)
    for first in range(3):
        for second in set(range(3)) - {first}:
            law[first, second] = p[first] * p[second] / (1 - p[first])
    counts = (pairs[:, 0] * 3 + pairs[:, 1]).bincount(minlength=9)
    assert chi_square_test(counts, law.flatten(), min_expected=100).p_value > FALSE_ALARM


def test_finishers_begin_with_the_winner_and_go_on_in_order() -> None:
    weights = logs(0.3, 0.3, 0.2, 0.1, 0.1).expand(50, -1)
    all_places = finishers(weights, at(50), 5)
    assert torch.equal(all_places[:, 0], race(weights, at(50)))
    assert torch.equal(all_places[:, :3], finishers(weights, at(50), 3))
    assert (all_places.sort(dim=-1).values == torch.arange(5)).all()


def test_the_impossible_never_finishes_before_the_possible() -> None:
    weights = torch.tensor([[-INF, 0.0, -INF, -3.0, -INF]]).expand(200, -1)
    assert (finishers(weights, at(200), 2).sort(dim=-1).values == torch.tensor([1, 3])).all()


def test_nor_before_the_hopeless() -> None:
    """Weights so far apart that exp of their difference overflows."""
    weights = torch.tensor([[-INF, 0.0, -INF, -200.0, -INF, -100.0]]).expand(50, -1)
    assert (finishers(weights, at(50), 3) == torch.tensor([1, 5, 3])).all()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_possible_tokens_race_as_among_many(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.full((100, 500), -INF)
    for row in range(100):  # 3 to 5 possible tokens, some of them equally likely
        possible = [(37 * row + 101 * i) % 500 for i in range(3 + row % 3)]
        weights[row, possible] = torch.tensor([0.0, -0.5, 0.0, -2.0, 0.0])[: len(possible)]
    sparse = finishers(weights, at(100), count)
    monkeypatch.setattr(distributions, "SPARSE_SHARE", 500)
    assert torch.equal(finishers(weights, at(100), count), sparse)
    assert (weights.gather(1, sparse) > -INF).all()
