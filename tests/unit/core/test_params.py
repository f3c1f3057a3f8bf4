"""Sampling parameters are checked at the door, with messages that name value and fix."""

import math
from typing import Any

import pytest

from slipstream.core.errors import RequestError
from slipstream.core.params import SamplingParams


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 (greedy) or positive, not -0.1"),
        ({"temperature": math.nan}, "temperature must be a finite number, not nan"),
        ({"temperature": math.inf}, "temperature must be a finite number, not inf"),
        ({"top_k": -2}, "top_k must be in [1, 2147483648], or 0 for no limit, not -2"),
        ({"top_p": 0.0}, "top_p must be in (0, 1], not 0.0"),
        ({"top_p": 1.01}, "top_p must be in (0, 1], not 1.01"),
        ({"min_p": -0.1}, "min_p must be in [0, 1], not -0.1"),
        ({"min_p": 1.1}, "min_p must be in [0, 1], not 1.1"),
        (
            {"top_k": 2**31 + 1},
            "top_k must be in [1, 2147483648], or 0 for no limit, not 2147483649",
        ),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be 0 or more, not -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be in [0.001, 1000], not 0.0"),
        ({"presence_penalty": 2.1}, "presence_penalty must be in [-2, 2], not 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be in [-2, 2], not -2.1"),
        ({"n": 0}, "n must be at least 1, not 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"min_tokens": -1}, "min_tokens must be 0 or more, not -1"),
        (
            {"min_tokens": 5, "max_tokens": 4},
            "min_tokens must be at most max_tokens (4), not 5",
        ),
        ({"seed": -1}, "seed must be an integer in [0, 2**64), not -1"),
        ({"seed": 2**64}, f"seed must be an integer in [0, 2**64), not {2**64}"),
        ({"stop": ("a", "")}, "stop must be made of non-empty strings, not ('a', '')"),
        ({"stop": ""}, "stop must be made of non-empty strings, not ('',)"),
        ({"logprobs": -1}, "logprobs must be in [0, 100], not -1"),
        ({"logprobs": 101}, "logprobs must be in [0, 100], not 101"),
        ({"logit_bias": {7: math.inf}}, "logit_bias[7] must be in [-1e6, 1e6], not inf"),
        ({"logit_bias": {7: -math.inf}}, "logit_bias[7] must be in [-1e6, 1e6], not -inf"),
        ({"logit_bias": {7: math.nan}}, "logit_bias[7] must be in [-1e6, 1e6], not nan"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**setting)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"temperature": 0},
        {"temperature": 1e-30},
        {"top_p": 1, "min_p": 1},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"max_tokens": 3, "min_tokens": 3},
        {"min_tokens": 3},
        {"logprobs": 0},
        {"logprobs": 100},
    ],
    ids=str,
)
def test_the_ends_of_each_range_are_served(setting: dict[str, Any]) -> None:
    params = SamplingParams(**setting)
    assert all(getattr(params, name) == value for name, value in setting.items())


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("stop", "end", ("end",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", None, ()),
        ("stop_token_ids", [3, 4], (3, 4)),
        ("stop_token_ids", None, ()),
        ("logit_bias", None, {}),
        ("top_k", -1, 0),
    ],
)
def test_spellings_of_other_libraries_are_understood(name: str, given: Any, kept: Any) -> None:
    assert getattr(SamplingParams(**{name: given}), name) == kept


def test_later_changes_of_an_argument_do_not_reach_in() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = math.nan
    assert params.logit_bias == {1: 2.0}


def test_parameters_are_immutable_and_by_name() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(0.5)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("setting", "penalised"),
    [
        ({}, False),
        ({"logit_bias": {1: 1.0}, "min_tokens": 2}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_penalised(setting: dict[str, Any], penalised: bool) -> None:
    assert SamplingParams(**setting).penalised is penalised
