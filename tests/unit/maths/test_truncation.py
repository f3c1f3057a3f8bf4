"""Looking at the likeliest tokens alone keeps what the plain definitions keep."""

import pytest
import torch

from slipstream.maths.truncation import by_top_k, by_top_p, truncate

VOCAB = 3000
SHAPES = {
    "peaked": lambda source: 6 * torch.randn(VOCAB, generator=source),
    "flat": lambda source: 0.1 * torch.randn(VOCAB, generator=source),
    "tied": lambda source: torch.randint(-9, 1, (VOCAB,), generator=source).float(),
    "alike": lambda source: torch.zeros(VOCAB),
    "few possible": lambda source: torch.randn(VOCAB, generator=source).masked_fill(
        torch.arange(VOCAB) % 700 > 0, -torch.inf
    ),
    "far behind": lambda source: torch.cat([torch.zeros(1), torch.full((VOCAB - 1,), -40.0)]),
}


def plain(weights, top_k, top_p):
    return by_top_p(by_top_k(weights, top_k), top_p)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("top_k", [0, 1, 3, 40, 2999, 3000, 10**9])
@pytest.mark.parametrize("top_p", [1.0, 0.9999999, 0.95, 0.5, 1e-9])
def test_it_keeps_what_the_plain_definitions_keep(shape, top_k, top_p):
    source = torch.Generator().manual_seed(3)
    weights = torch.stack([SHAPES[shape](source) for _ in range(4)])
    weights -= weights.amax(-1, keepdim=True)
    before = weights.clone()
    k, p = torch.full((4,), top_k), torch.full((4,), top_p, dtype=torch.float64)
    assert torch.equal(truncate(weights, torch.zeros(4), k, p), plain(weights, k, p))
    assert torch.equal(weights, before)


def test_each_row_has_settings_of_its_own():
    source = torch.Generator().manual_seed(5)
    weights = 3 * torch.randn(5, VOCAB, generator=source)
    weights -= weights.amax(-1, keepdim=True)
    min_p = torch.tensor([0, 0, 0.1, 0, 0.001])
    k, p = torch.tensor([0, 9, 0, 0, 50]), torch.tensor([1, 1, 1, 0.8, 0.9])
    together = truncate(weights, min_p, k, p)
    for r in range(5):
        alone = truncate(*(setting[r : r + 1] for setting in (weights, min_p, k, p)))
        assert torch.equal(together[r : r + 1], alone)
    assert torch.equal(together[0], weights[0])
    assert [int((row > -torch.inf).sum()) < VOCAB for row in together] == [0, 1, 1, 1, 1]
