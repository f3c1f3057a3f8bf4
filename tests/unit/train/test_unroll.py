"""Training unrolls a head exactly as drafting will: same pairs, same keys, same positions."""

import pytest
import torch

import heads
from slipstream.check.tiny import tiny_model
from slipstream.train.rows import Rows
from slipstream.train.unroll import ahead, is_known, unrolled

FIRST = [3, 1, 4, 1, 5, 9, 2, 6]
SECOND = [5, 3, 5, 8]


@pytest.fixture(scope="module")
def target():
    return tiny_model()


def rows_of(target, taps, *texts: list[int], num_prompt: int = 0) -> Rows:
    """One row of texts, and what the target makes of each."""
    passes = [heads.target_pass(target, text, taps) for text in texts]
    states = {"hidden": torch.cat([one.hidden for one in passes]).unsqueeze(0)}
    for layer in taps:
        states[f"tap.{layer}"] = torch.cat([one.taps[layer] for one in passes]).unsqueeze(0)
    place = torch.cat([torch.arange(len(text)) for text in texts]).unsqueeze(0)
    return Rows(
        tokens=torch.tensor([[token for text in texts for token in text]]),
        text=torch.tensor([[index for index, text in enumerate(texts) for _ in text]]),
        place=place,
        is_answer=place >= num_prompt,
        states=states,
    )


@pytest.mark.parametrize("method", heads.FEATURE_HEADS)
def test_every_place_begins_a_chain_of_its_own(target, method):
    """Step j at place i is what drafting j tokens behind the first i + 2 computes."""
    head = heads.FEATURE_HEADS[method](target)
    rows = rows_of(target, head.taps, FIRST, SECOND)
    for step, features in enumerate(unrolled(head, rows, 3)):
        for text, offset in ((FIRST, 0), (SECOND, len(FIRST))):
            for place in range(len(text) - 1 - step):
                path = text[place + 2 : place + 2 + step]
                expected = heads.head_logits(head, target, text[: place + 2], path)
                found = heads.logits_of(head, features[0, offset + place].unsqueeze(0))
                torch.testing.assert_close(found, expected, msg=f"step {step}, place {place}")


def test_what_is_ahead():
    x = torch.arange(8).view(2, 4)
    assert ahead(x, 1).tolist() == [[1, 2, 3, 0], [5, 6, 7, 0]]
    assert ahead(x, 0).tolist() == x.tolist()


def test_tokens_that_teach_are_answers_of_the_same_text(target):
    rows = rows_of(target, (), FIRST, SECOND, num_prompt=2)
    known = is_known(rows, 2)[0].tolist()
    assert known == [True] * 6 + [False, False] + [True, True] + [False] * 2
    prompt = is_known(rows, 1)[0].tolist()
    assert prompt == [False] + [True] * 6 + [False] + [False] + [True] * 2 + [False]
