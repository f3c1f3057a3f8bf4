"""Candidates: the largest logits at temperature 0, the first of a sharpened race elsewhere."""

import math

import pytest
import torch

from slipstream.core.controls import Row
from slipstream.core.params import SamplingParams
from slipstream.drafters import sampling
from slipstream.drafters.sampling import SHARPENING, Candidates, coupled
from slipstream.drafters.vocabulary import DraftVocabulary
from slipstream.maths.coupling import coupled_chance
from slipstream.maths.noise import Address, Key, Stream

NAN, INF = math.nan, math.inf


def greedy(logits: list[list[float]], count: int, **setting) -> Candidates:
    row = Row(SamplingParams(temperature=0.0, **setting), [1, 2], 1)
    noise = [Address(Key(3), Stream.TARGET, 2)] * len(logits)
    vocabulary = DraftVocabulary(len(logits[0]))
    return coupled(torch.tensor(logits), vocabulary, [row] * len(logits), noise, count)


@pytest.mark.parametrize("few", [0, 16], ids=["topk", "in turn"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_largest_come_first(monkeypatch, few, count):
    monkeypatch.setattr(sampling, "_FEW", few)
    logits = [[0.0, 3.0, 1.0, 2.0], [5.0, -1.0, 4.0, 4.5]]
    found = greedy(logits, count)
    assert found.tokens == [[1, 3, 2][:count], [0, 3, 2][:count]]
    assert found.possible == [[True] * count] * 2
    values = torch.tensor([[3.0, 2.0, 1.0][:count], [5.0, 4.5, 4.0][:count]])
    torch.testing.assert_close(torch.tensor(found.leads), torch.softmax(values, -1))


def test_an_edit_that_changes_nothing_changes_nothing():
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(1)).tolist()
    plain, edited = greedy(logits, 4), greedy(logits, 4, logit_bias={0: 0.0})
    assert plain.tokens == edited.tokens
    torch.testing.assert_close(torch.tensor(plain.leads), torch.tensor(edited.leads))


@pytest.mark.parametrize("few", [0, 16], ids=["topk", "in turn"])
@pytest.mark.parametrize("hopeless", [[NAN, 1.0, 0.0], [INF, 1.0, 0.0], [-INF] * 3])
def test_a_row_that_cannot_be_sampled_is_impossible_throughout(monkeypatch, few, hopeless):
    monkeypatch.setattr(sampling, "_FEW", few)
    found = greedy([hopeless, [0.0, 1.0, 2.0]], 2)
    assert found.possible == [[False, False], [True, True]]
    assert found.leads[0] == [0.0, 0.0]


def test_no_token_is_a_candidate_twice():
    found = greedy([[-INF, 1.0, -INF]], 3)
    assert found.possible == [[True, False, False]]
    assert found.leads == [[1.0, 0.0, 0.0]]


def test_logits_are_left_as_they_are():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    row = Row(SamplingParams(temperature=0.0), [1], 1)
    coupled(logits, DraftVocabulary(3), [row], [Address(Key(3), Stream.TARGET, 1)], 2)
    assert logits.tolist() == [[0.0, 3.0, 1.0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_smaller_vocabulary_drafts_what_the_whole_one_would(temperature):
    """As if the columns stood where their tokens do, and nothing else could be drawn."""
    ids = torch.tensor([2, 3, 5, 11])
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    rows = [Row(SamplingParams(temperature=temperature), [1], 1)] * 6
    noise = [Address(Key(3), Stream.TARGET, place) for place in range(6)]
    reduced = DraftVocabulary(13, ids)
    found = coupled(logits, reduced, rows, noise, 3)
    whole = torch.full((6, 13), -INF)
    whole[:, ids] = logits
    assert torch.equal(reduced.widened(logits), whole)
    assert found == coupled(whole, DraftVocabulary(13), rows, noise, 3)


def test_padding_is_never_drafted():
    logits = torch.tensor([[0.0, 3.0, 1.0, 9.0]])
    found = coupled(
        logits, DraftVocabulary(3), [Row(SamplingParams(temperature=0.0), [1], 1)], [], 2
    )
    assert found.tokens == [[1, 2]]


def test_tokens_a_draft_model_does_not_know_are_impossible():
    assert DraftVocabulary(4).widened(torch.zeros(1, 2)).tolist() == [[0.0, 0.0, -INF, -INF]]


def test_sharpening_helps_where_the_target_knows_more():
    """Each p is a draw from a Dirichlet law around q: q on average, and surer than q."""
    torch.manual_seed(7)
    q = torch.distributions.Dirichlet(torch.full((50,), 0.1)).sample((400,)).clamp_min(1e-9)
    q /= q.sum(-1, keepdim=True)
    p = torch.distributions.Dirichlet(8 * q).sample()
    gain = coupled_chance(p, torch.softmax(SHARPENING * q.log(), -1)) - coupled_chance(p, q)
    assert float(gain.mean()) > 3 * float(gain.std()) / len(gain) ** 0.5
