"""Losses: the fused cross-entropy is the plain one, and nothing to learn is nothing lost."""

from dataclasses import replace

import pytest
import torch

import heads
from slipstream.check.tiny import tiny_model
from slipstream.models.heads import EagleHead
from slipstream.train.objectives import Objective, acceptance, cross_entropy, loss
from slipstream.train.rows import Rows
from slipstream.train.start import new_head

IDS = torch.arange(0, 32, 2)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.fixture(scope="module")
def target():
    return tiny_model(dtype=torch.float32)


def rows_of(target, tokens: list[int], taps=()) -> Rows:
    one = heads.target_pass(target, tokens, taps)
    place = torch.arange(len(tokens)).unsqueeze(0)
    states = {"hidden": one.hidden} | {f"tap.{layer}": one.taps[layer] for layer in taps}
    return Rows(
        tokens=torch.tensor([tokens]),
        text=torch.zeros_like(place),
        place=place,
        is_answer=place >= 0,
        states={name: each.unsqueeze(0).bfloat16() for name, each in states.items()},
    )


def test_cross_entropy_and_its_gradient_are_the_plain_ones():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(300, 16, generator=generator, requires_grad=True)
    weight = torch.randn(40, 16, generator=generator).bfloat16()
    law = torch.randn(350, 40, generator=generator).softmax(-1).bfloat16()
    where = torch.arange(25, 325)
    fused = cross_entropy(x, weight, law, where)
    (found,) = torch.autograd.grad(3 * fused, x)
    logits = torch.nn.functional.linear(x.bfloat16(), weight).float()
    plain = -(logits.log_softmax(-1) * law[where].float()).sum(-1).mean()
    (expected,) = torch.autograd.grad(3 * plain, x)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=2e-4)


@pytest.mark.parametrize("is_hard", [False, True])
@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa", "mtp"])
def test_rows_without_anything_to_learn_lose_nothing(target, method, is_hard):
    head = new_head(method, target, IDS, num_heads=2, typical_size=1.0)
    rows = rows_of(target, TOKENS, getattr(head, "taps", ()))
    rows = replace(rows, is_answer=torch.zeros_like(rows.is_answer))
    objective = Objective(unroll=2, feature_weight=1.0, is_hard=is_hard)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(head, rows, objective)
    value.backward()
    assert value.item() == 0


def test_places_ahead_of_tokens_that_cannot_be_drafted_teach_nothing(target):
    """With odd tokens all over, only the even ones, which have rows, count."""
    head = new_head("medusa", target, IDS, num_heads=1, typical_size=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        odd = loss(head, rows_of(target, [2 * (token // 2) + 1 for token in TOKENS]), Objective())
        even = loss(head, rows_of(target, [2 * (token // 2) for token in TOKENS]), Objective())
    assert odd.item() == 0 < even.item()


def test_acceptance_counts_chains_that_are_right_from_the_beginning(target):
    """A head that always says the same: right where that is what comes."""
    head = new_head("eagle", target, IDS, num_heads=1, typical_size=1.0)
    assert isinstance(head, EagleHead)
    for parameter in (head.fc.weight, head.lm_head.weight):
        parameter.data.zero_()
    tokens = [8, 8, 0, 0, 8, 0, 0, 0]  # of equal logits the first is said, which is token 0
    with torch.autocast("cpu", torch.bfloat16):
        measured = acceptance(head, iter([rows_of(target, tokens)]), 2)
    # Of the 6 tokens two ahead five are 0; of the 5 pairs two and three ahead, three are.
    assert measured == [5 / 6, 3 / 5]
