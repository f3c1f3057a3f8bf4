"""How close decisions were, on logits made for it."""

import math

import torch
from pytest import approx

from slipstream.check.margin import margins, possible
from slipstream.core.controls import Row, controls
from slipstream.core.params import SamplingParams
from slipstream.maths.distributions import sample
from slipstream.maths.noise import Address, Key, Stream, exponential

ADDRESS = Address(Key(7), Stream.TARGET, 3)


def lost_by(logits, params, *, slack=0.1) -> list[float]:
    """The margin of every token under one row of logits."""
    rows = torch.tensor([logits] * len(logits))
    settings = controls([Row(params, [0, 1, 2], 3)] * len(logits))
    tokens = torch.arange(len(logits))
    return margins(rows, settings, [ADDRESS] * len(logits), tokens, slack).tolist()


def may_win(logits, params, *, slack) -> list[bool]:
    rows = torch.tensor([logits] * len(logits))
    settings = controls([Row(params, [0, 1, 2], 3)] * len(logits))
    return possible(rows, settings, torch.arange(len(logits)), slack).tolist()


def test_greedy_margins_are_gaps_of_edited_logits():
    params = SamplingParams(temperature=0, logit_bias={2: -1.0})
    assert lost_by([1.0, 3.0, 3.5, 2.75], params) == approx([2.0, 0.0, 0.5, 0.25])


def test_the_sampled_token_has_margin_zero_and_others_do_not():
    logits = torch.linspace(0, 3, 12).tolist()
    for temperature in (0.1, 1.0, 5.0):
        params = SamplingParams(temperature=temperature)
        settings = controls([Row(params, [0], 1)])
        winner = int(sample(torch.tensor([logits]), settings, [ADDRESS]))
        found = lost_by(logits, params)
        assert found[winner] == 0
        assert min(m for token, m in enumerate(found) if token != winner) > 0


def test_sampled_margins_are_in_units_of_logits():
    """Raising a logit by its margin makes its token win, and by less does not."""
    logits = [0.3, 1.0, 0.2, 0.9]
    params = SamplingParams(temperature=0.5)
    settings = controls([Row(params, [0], 1)])
    for token, margin in enumerate(lost_by(logits, params)):
        for share, wins in ((1.01, True), (0.99, margin == 0)):
            raised = torch.tensor([logits])
            raised[0, token] += share * margin
            assert (int(sample(raised, settings, [ADDRESS])) == token) is wins


def test_a_token_outside_the_race_has_no_margin():
    truncated = SamplingParams(temperature=1.0, top_k=2)
    assert [math.isinf(m) for m in lost_by([3.0, 2.9, 1.0, 0.0], truncated)] == [0, 0, 1, 1]
    banned = SamplingParams(temperature=1.0, logit_bias={1: -1e6})
    assert lost_by([0.0, 5.0], banned)[1] > 9e5


def test_truncation_has_soft_edges():
    logits = [3.0, 2.0, 1.9, -4.0]
    for params in (
        SamplingParams(top_k=2),
        SamplingParams(min_p=math.exp(-1.05)),
        SamplingParams(top_p=0.79),  # the first two have .79003 of the mass
    ):
        assert may_win(logits, params, slack=1e-6) == [True, True, False, False]
        assert may_win(logits, params, slack=0.06) == [True, True, True, False]


def test_who_may_be_out_does_not_beat_anybody():
    """The winner of a race is no winner if it may not have run; who else won is then no error."""
    noise = exponential([ADDRESS], 3)[0]
    first = int(noise.argmin())
    others = [token for token in range(3) if token != first]
    logits = [1.0, 1.0, 1.0]
    logits[first] = 0.999  # third of a top 2, by a hair
    params = SamplingParams(top_k=2)
    runner_up = min(others, key=lambda token: float(noise[token]))
    assert lost_by(logits, params, slack=0.01)[runner_up] == 0
    assert lost_by(logits, params, slack=0.01)[first] == 0
    assert math.isinf(lost_by(logits, params, slack=1e-6)[first])
