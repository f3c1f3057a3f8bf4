"""What parameters and tokens so far make of a row of logits."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.core.controls import Row, controls
from slipstream.core.params import SamplingParams
from slipstream.maths.distributions import edited, probabilities

LOGITS = [2.0, -2.0, 4.0, 1.0, 0.0]
PROMPT = [0, 1]
OUTPUT = [2, 2, 0]


def row(output: Iterable[int] = OUTPUT, stop_ids: Iterable[int] = (), **setting: Any) -> Row:
    params = SamplingParams(**setting)
    return Row(params, [*PROMPT, *output], len(PROMPT), frozenset(stop_ids))


def logits_of(*rows: Row) -> list[list[float]]:
    return edited(torch.tensor([LOGITS] * len(rows)), controls(rows)).tolist()


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({}, LOGITS),
        # Prompt and output, each token once.
        ({"repetition_penalty": 2.0}, [1.0, -4.0, 2.0, 1.0, 0.0]),
        # The output alone.
        ({"presence_penalty": 0.5}, [1.5, -2.0, 3.5, 1.0, 0.0]),
        ({"frequency_penalty": 0.5}, [1.5, -2.0, 3.0, 1.0, 0.0]),
        ({"presence_penalty": 0.25, "frequency_penalty": -1.0}, [2.75, -2.0, 5.75, 1.0, 0.0]),
        ({"logit_bias": {0: 1.5, 4: -3}}, [3.5, -2.0, 4.0, 1.0, -3.0]),
        # The bias comes first, so it decides which way a penalty pushes.
        ({"logit_bias": {1: 4.0}, "repetition_penalty": 2.0}, [1.0, 1.0, 2.0, 1.0, 0.0]),
        # Repetition before presence.
        ({"repetition_penalty": 2.0, "presence_penalty": 1.0}, [0.0, -4.0, 1.0, 1.0, 0.0]),
    ],
    ids=str,
)
def test_penalties_and_bias(setting: dict[str, Any], expected: list[float]) -> None:
    assert logits_of(row(**setting)) == [expected]


def test_biases_may_be_whole_numbers() -> None:
    assert logits_of(row(logit_bias={0: 1, 1: -1})) == [[3.0, -3.0, 4.0, 1.0, 0.0]]


def test_whole_numbers_elsewhere() -> None:
    whole = row(temperature=1, top_p=1, min_p=0, repetition_penalty=2, presence_penalty=1)
    exact = row(repetition_penalty=2.0, presence_penalty=1.0)
    logits = torch.tensor([LOGITS])
    assert torch.equal(
        probabilities(logits, controls([whole])), probabilities(logits, controls([exact]))
    )


@pytest.mark.parametrize(("num_output", "banned"), [(0, True), (2, True), (3, False), (4, False)])
def test_stop_tokens_are_impossible_before_min_tokens(num_output: int, banned: bool) -> None:
    [logits] = logits_of(row([3] * num_output, stop_ids={1, 4}, min_tokens=3))
    expected = -math.inf if banned else None
    assert logits == [2.0, expected or -2.0, 4.0, 1.0, expected or 0.0]


def test_no_bias_brings_a_banned_token_back() -> None:
    [logits] = logits_of(
        row(stop_ids={4}, min_tokens=9, logit_bias={4: 50.0}, repetition_penalty=0.5)
    )
    assert logits[4] == -math.inf


@pytest.mark.parametrize(
    ("output", "expected"), [([], [2.0, 4.0]), ([2], [2.0, 3.0]), ([2, 0, 2], [1.0, 2.0])]
)
def test_drafted_tokens_count_like_committed_ones(output: list[int], expected: list[float]) -> None:
    [logits] = logits_of(row(output, frequency_penalty=1.0))
    assert [logits[0], logits[2]] == expected


def test_every_row_has_its_own_controls() -> None:
    rows = [
        row(temperature=0.5, top_k=3),
        row(presence_penalty=1.0, top_p=0.5),
        row(min_p=0.1, top_k=-1),
        row(logit_bias={3: 1.0}),
    ]
    made = controls(rows)
    assert made.temperature.tolist() == [0.5, 1.0, 1.0, 1.0]
    assert made.top_k.tolist() == [3, 0, 0, 0]
    assert made.top_p.tolist() == [1.0, 0.5, 1.0, 1.0]
    torch.testing.assert_close(made.min_p, torch.tensor([0.0, 0.0, 0.1, 0.0]))
    assert set(made.edits) == {1, 3}
    assert logits_of(*rows) == [logits_of(one)[0] for one in rows]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({}, True),
        ({"top_p": 0.5, "min_p": 0.1, "top_k": 3}, True),
        ({"temperature": 0.5}, False),
        ({"logit_bias": {1: 2.0}}, False),
        ({"presence_penalty": 0.5}, False),
        ({"repetition_penalty": 1.5}, False),
        ({"min_tokens": 3}, True),
        ({"min_tokens": 4}, False),
        ({"min_tokens": 4, "stop_ids": ()}, True),
    ],
)
def test_argmax_needs_temperature_0_and_no_edits(setting: Any, expected: bool) -> None:
    given = row(**{"temperature": 0.0, "stop_ids": (3,)} | setting)
    assert given.is_argmax == expected


@pytest.mark.parametrize(
    "setting",
    [
        {"repetition_penalty": 2.0},
        {"presence_penalty": 0.5, "frequency_penalty": 0.25},
        {"min_tokens": 4, "stop_ids": (4,)},
        {"min_tokens": 3, "stop_ids": (4,)},
    ],
)
def test_drafted_tokens_count_as_output(setting: Any) -> None:
    whole = row(**setting)
    split = replace(whole, tokens=whole.tokens[:-2], drafted=whole.tokens[-2:])
    assert logits_of(split) == logits_of(whole)
    assert split.position == whole.position
