"""Noise by address: two implementations of one generator, its published vectors, and its law."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.maths import noise
from slipstream.maths.noise import (
    Address,
    Key,
    StepNoise,
    Stream,
    exponential,
    exponential_at,
    first_argmax,
    first_argmin,
    fresh_seed,
    philox,
    uniform_at,
)

FALSE_ALARM = 1e-6
ONES = 2**64 - 1

addresses = st.builds(
    Address,
    st.builds(Key, st.integers(0, ONES), st.integers(0, 2**31)),
    st.sampled_from(Stream),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
)


def python_philox(key: Sequence[int], counter: Sequence[int]) -> list[int]:
    """Philox 4x64-10 in unbounded integers, straight from the paper."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c0, 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * c2, 2**64)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & ONES, (k1 + 0xBB67AE8584CAA73B) & ONES
    return [c0, c1, c2, c3]


def python_uniform(address: Address, token: int) -> float:
    counter = [1 + token // 4, address.position, address.stream, address.origin]
    word = python_philox([address.key.seed, address.key.branch], counter)[token % 4]
    return ((word >> 11) + 0.5) * 2.0**-53


def signed(word: int) -> Tensor:
    return torch.tensor(np.array(word, dtype=np.uint64).astype(np.int64))


def uniforms(address: Address, num_tokens: int) -> Tensor:
    return uniform_at([address], torch.arange(num_tokens).unsqueeze(0))[0]


# ---------------------------------------------------------------------------------------------
# The generator


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (
            [0, 0, 0, 0],
            [0, 0],
            [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B],
        ),
        (
            [ONES, ONES, ONES, ONES],
            [ONES, ONES],
            [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0],
        ),
        (
            [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
            [0x452821E638D01377, 0xBE5466CF34E90C6C],
            [0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    """The vectors published with Random123."""
    assert python_philox(key, counter) == words
    k0, k1 = map(signed, key)
    c0, c1, c2, c3 = map(signed, counter)
    out = philox((k0, k1), (c0, c1, c2, c3))
    assert [word.item() % 2**64 for word in out] == words


@given(st.lists(addresses, min_size=1, max_size=4), st.lists(st.integers(0, 200_000), min_size=1))
def test_uniforms_are_the_words_of_the_paper(rows: list[Address], tokens: list[int]) -> None:
    actual = uniform_at(rows, torch.tensor(tokens).expand(len(rows), -1))
    assert actual.dtype == torch.float64
    assert actual.tolist() == [[python_uniform(row, token) for token in tokens] for row in rows]


@given(addresses)
def test_numpy_can_check_a_number(address: Address) -> None:
    key = np.array([address.key.seed, address.key.branch], dtype=np.uint64)
    counter = np.array([0, address.position, address.stream, address.origin], dtype=np.uint64)
    words = np.random.Generator(np.random.Philox(key=key, counter=counter)).random(11)
    assert uniforms(address, 11).tolist() == (words + 2.0**-54).tolist()


@given(st.lists(addresses, min_size=1, max_size=3), st.sampled_from([1, 64, 65, 203]), st.data())
def test_whole_rows_and_scattered_tokens_agree_bit_for_bit(
    rows: list[Address], vocab_size: int, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=9))
    index = torch.tensor(tokens).expand(len(rows), -1)
    whole = exponential(rows, vocab_size)
    assert whole.shape == (len(rows), vocab_size)
    assert whole.dtype == torch.float32
    assert torch.equal(whole.gather(1, index), exponential_at(rows, index))


def test_large_batches_are_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size = 2**15
    rows = [Address(Key(5), Stream.TARGET, position) for position in range(9)]
    alone = torch.cat([exponential([row], vocab_size) for row in rows])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert torch.equal(exponential(rows, vocab_size), alone)


def test_nothing_asked_nothing_given() -> None:
    assert exponential([], 5).shape == (0, 5)
    assert exponential([], 100).shape == (0, 100)
    assert exponential_at([], torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3)


# ---------------------------------------------------------------------------------------------
# Addresses


BASE = Address(Key(seed=7, branch=1), Stream.TARGET, position=3, origin=2)
NEIGHBOURS = [
    BASE,
    Address(Key(8, 1), Stream.TARGET, 3, 2),
    Address(Key(7 + 2**63, 1), Stream.TARGET, 3, 2),
    Address(Key(7 + 2**32, 1), Stream.TARGET, 3, 2),
    Address(Key(7, 0), Stream.TARGET, 3, 2),
    Address(Key(1, 7), Stream.TARGET, 3, 2),
    Address(Key(7, 1), Stream.DRAFT, 3, 2),
    Address(Key(7, 1), Stream.ACCEPT, 3, 2),
    Address(Key(7, 1), Stream.RECOVER, 3, 2),
    Address(Key(7, 1), Stream.TARGET, 4, 2),
    Address(Key(7, 1), Stream.TARGET, 2, 3),
    Address(Key(7, 1), Stream.TARGET, 3, 0),
]


def test_neighbouring_addresses_share_nothing() -> None:
    seen: set[float] = set()
    for address in NEIGHBOURS:
        seen |= set(uniforms(address, 1000).tolist())
    assert len(seen) == 1000 * len(NEIGHBOURS)


def test_neighbouring_addresses_are_uncorrelated() -> None:
    num_tokens = 4000
    rows = torch.stack([uniforms(address, num_tokens) for address in NEIGHBOURS])
    z = torch.corrcoef(rows) * num_tokens**0.5
    pairs = list(itertools.combinations(range(len(NEIGHBOURS)), 2))
    worst = max(abs(z[i, j].item()) for i, j in pairs)
    assert 2 * scipy.stats.norm.sf(worst) * len(pairs) > FALSE_ALARM


def test_a_number_does_not_depend_on_the_rows_around_it() -> None:
    tokens = torch.tensor([[0, 5, 203]])
    together = uniform_at(NEIGHBOURS, tokens.expand(len(NEIGHBOURS), -1))
    for row, address in enumerate(NEIGHBOURS):
        assert torch.equal(together[row : row + 1], uniform_at([address], tokens))


def test_steps_meet_fresh_numbers() -> None:
    """Position 12, drafted in the step that began at 10 and again in the one that began at 11."""
    key, seqs = Key(7), torch.tensor([0])
    first, second = StepNoise([key], [10]), StepNoise([key], [11])
    assert first.drafts(seqs, torch.tensor([2])) == [Address(key, Stream.DRAFT, 12, 10)]
    assert second.drafts(seqs, torch.tensor([1])) == [Address(key, Stream.DRAFT, 12, 11)]


def test_few_possible_tokens_recover_as_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    step = StepNoise([Key(7, b) for b in range(100)], list(range(100)))
    weights = torch.zeros(100, 500)
    for row in range(100):
        weights[row, [(37 * row + 101 * i) % 500 for i in range(1 + row % 5)]] = 0.3
    assert (weights[::5] > 0).sum() == 20, "some rows leave no choice"
    sparse = step.recovers(torch.arange(100), 2, weights)
    assert (weights.gather(1, sparse.unsqueeze(1)) > 0).all()
    monkeypatch.setattr(noise, "SPARSE_SHARE", 500)
    assert torch.equal(step.recovers(torch.arange(100), 2, weights), sparse)


def test_impossible_tokens_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_exponential_rows", lambda *_: pytest.fail("whole rows"))
    weights = torch.zeros(3, 500).index_fill(1, torch.tensor([4, 99]), 0.5)
    assert StepNoise([Key(1)] * 3, [5, 6, 7]).recovers(torch.arange(3), 0, weights).max() in (4, 99)


def test_fresh_seeds_differ_and_fit() -> None:
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed <= ONES for seed in seeds)
    assert max(seeds) >= 2**63  # fails once in 2**100 runs


# ---------------------------------------------------------------------------------------------
# The law


def along_tokens(num_numbers: int) -> Tensor:
    return uniforms(BASE, num_numbers)


def along_positions(num_numbers: int) -> Tensor:
    rows = [Address(Key(11), Stream.ACCEPT, position) for position in range(num_numbers)]
    return uniform_at(rows, torch.full((num_numbers, 1), 6))[:, 0]


def along_seeds(num_numbers: int) -> Tensor:
    rows = [Address(Key(seed), Stream.TARGET, 9) for seed in range(num_numbers)]
    return uniform_at(rows, torch.zeros(num_numbers, 1, dtype=torch.int64))[:, 0]


@pytest.mark.parametrize("along", [along_tokens, along_positions, along_seeds])
def test_uniforms_are_uniform(along: Callable[[int], Tensor]) -> None:
    u = along(20_000)
    assert ((u > 0) & (u < 1)).all()
    assert scipy.stats.kstest(u.numpy(), "uniform").pvalue > FALSE_ALARM
    neighbours = scipy.stats.pearsonr(u[:-1].numpy(), u[1:].numpy())
    assert neighbours.pvalue > FALSE_ALARM


def test_exponentials_are_exponential() -> None:
    noise = exponential([BASE], 50_000)[0].double()
    assert scipy.stats.kstest(noise.numpy(), "expon").pvalue > FALSE_ALARM
    standard_errors = (noise.mean().item() - 1) * 50_000**0.5
    assert abs(standard_errors) < scipy.stats.norm.isf(FALSE_ALARM / 2)


def test_small_exponentials_keep_full_precision() -> None:
    """They decide races. -log(1 - u) would leave 1e-7 / u of them."""
    address, num_tokens = BASE, 100_000
    u, noise = uniforms(address, num_tokens), exponential([address], num_tokens)[0]
    smallest = u.argsort()[:100]
    assert u[smallest].max() < 2e-3
    torch.testing.assert_close(
        noise[smallest].double(), -torch.log1p(-u[smallest]), atol=0, rtol=2e-7
    )


@pytest.mark.parametrize("word", [0, 1, ONES >> 1, ONES - 1, ONES])
def test_no_word_leads_to_0_1_or_infinity(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(*_: Any) -> tuple[Tensor, ...]:
        return (signed(word).view(1, 1),) * 4

    monkeypatch.setattr("slipstream.maths.noise.philox", constant)
    token = torch.zeros(1, 1, dtype=torch.int64)
    assert 0 < uniform_at([BASE], token).item() < 1
    assert 0 < exponential_at([BASE], token).item() < math.inf


# ---------------------------------------------------------------------------------------------
# First places


@pytest.mark.parametrize(
    ("row", "smallest", "largest"),
    [([2.0, 1.0, 1.0, 2.0], 1, 0), ([math.inf] * 3, 0, 0), ([0.0, -math.inf, -math.inf], 1, 0)],
)
def test_the_first_among_equals(row: list[float], smallest: int, largest: int) -> None:
    rows = torch.tensor(row).expand(2, -1)
    assert first_argmin(rows).tolist() == [smallest] * 2
    assert first_argmax(rows).tolist() == [largest] * 2
