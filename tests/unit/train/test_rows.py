"""Packing texts into rows: nothing lost, nothing twice, and an order that can be taken up again."""

from itertools import islice

import pytest
import torch

from slipstream.train.rows import Corpus, shuffled
from slipstream.train.texts import Texts, write_whole

LENGTHS = (5, 3, 9, 4, 6, 1)


@pytest.fixture
def corpus(tmp_path):
    """Two shards; token and state of place p of text t are both 100 t + p."""
    texts, states = [], []
    for shard, members in enumerate(((0, 1, 2), (3, 4, 5))):
        made = [[100 * t + place for place in range(LENGTHS[t])] for t in members]
        each = Texts.of([(tokens[:1], tokens[1:]) for tokens in made])
        texts.append(tmp_path / f"texts{shard}.safetensors")
        states.append(tmp_path / f"states{shard}.safetensors")
        each.write(texts[-1])
        hidden = each.tokens.bfloat16().unsqueeze(1).repeat(1, 2)
        write_whole({"hidden": hidden}, states[-1])
    return Corpus(texts, {"hidden": states})


def test_every_token_of_whole_batches_once_and_in_order(corpus):
    order = [4, 2, 0, 5, 1, 3]
    batches = list(corpus.rows(order, num_rows=2, length=4))
    everything = [100 * t + place for t in order for place in range(LENGTHS[t])]
    assert torch.cat([b.tokens.flatten() for b in batches]).tolist() == everything[:24]
    for rows in batches:
        assert (100 * rows.text + rows.place).tolist() == rows.tokens.tolist()
        assert rows.is_answer.tolist() == (rows.place >= 1).tolist()
        assert torch.equal(rows.states["hidden"][..., 0], rows.tokens.bfloat16())


def test_skipped_batches_are_those_at_the_beginning(corpus):
    order = range(6)
    (_, *rest) = corpus.rows(order, num_rows=1, length=7)
    again = list(corpus.rows(order, num_rows=1, length=7, skip=1))
    assert [rows.tokens.tolist() for rows in again] == [rows.tokens.tolist() for rows in rest]


def test_texts_are_held_out_and_counted(corpus):
    assert corpus.held_out == [0]
    assert corpus.training == [1, 2, 3, 4, 5]
    assert corpus.num_tokens(corpus.training) == sum(LENGTHS[1:])
    counts = corpus.counts(600)
    assert counts.sum() == sum(LENGTHS[1:]) - 5, "prompts are not counted"
    assert counts[101] == 1 and counts[100] == counts[1] == 0


def test_an_order_is_a_permutation_of_seed_and_epoch():
    indices = list(range(3, 50))
    orders = [shuffled(indices, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert all(sorted(order) == indices for order in orders)
    assert orders[0] == orders[3]
    assert len({tuple(order) for order in orders}) == 3
    assert list(islice(orders[0], 5)) != indices[:5]
