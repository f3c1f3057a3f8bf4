"""The native race against its specification in torch, and that nothing but its row decides it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from slipstream import native
from slipstream.maths.distributions import Controls, Edits, finishers, sample, scores
from slipstream.maths.noise import (
    Address,
    Key,
    Stream,
    address_words,
    exponential,
    uniform_at,
)

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs the native kernels")

INF = math.inf
NEAR = 1e-5  # relative: times closer than this may change places


@pytest.fixture
def kernel() -> Iterator[ModuleType]:
    """The extension, to be set up in any way."""
    module = native.load()
    isa, num_threads = module.isa(), module.num_threads()
    yield module
    module.use_isa(isa)
    module.use_threads(num_threads)


def controls(temperature: Sequence[float] | Tensor, **settings: Sequence[float]) -> Controls:
    num_rows = len(temperature)
    return Controls(
        temperature=torch.as_tensor(temperature),
        top_k=torch.tensor(settings.get("top_k", [0] * num_rows), dtype=torch.int64),
        top_p=torch.tensor(settings.get("top_p", [1.0] * num_rows)),
        min_p=torch.tensor(settings.get("min_p", [0.0] * num_rows)),
        edits={},
    )


def at(num_rows: int, seed: int = 7) -> list[Address]:
    return [Address(Key(seed, row % 3), Stream.TARGET, 5 * row) for row in range(num_rows)]


def random_rows(num_rows: int, vocab_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Logits of several shapes, some impossible or in rising order; temperatures 0.01 to 5."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    logits *= torch.rand(num_rows, 1, generator=generator) * 8
    logits[::3] += 20 * torch.rand(len(logits[::3]), vocab_size, generator=generator) ** 9
    logits[1::4] = logits[1::4].sort(dim=-1).values
    banned = torch.rand(len(logits[::5]), vocab_size, generator=generator) < 0.6
    banned[:, 1] = False
    logits[::5].masked_fill_(banned, -INF)
    return logits, 0.01 * 500 ** torch.rand(num_rows, generator=generator)


def log_times(logits: Tensor, temperature: Tensor, where: Sequence[Address]) -> Tensor:
    """When each token finishes, as the kernel defines it: [R, V] float64."""
    distances = (logits.amax(-1, keepdim=True) - logits) / temperature.unsqueeze(-1)
    return distances.double() + exponential(where, logits.shape[-1]).double().log()


def run(kernel: ModuleType, logits: Tensor, temperature: Tensor, count: int = 1) -> Tensor:
    tokens = torch.empty(len(logits), count, dtype=torch.int64)
    assert kernel.race(logits, temperature, address_words(at(len(logits))), tokens)
    return tokens


# ---------------------------------------------------------------------------------------------
# Equal to torch


@pytest.mark.parametrize(
    ("vocab_size", "num_rows"), [(5, 600), (64, 400), (1000, 200), (152_064, 6)]
)
@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_race_is_that_of_torch(
    vocab_size: int, num_rows: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, temperature = random_rows(num_rows, vocab_size, seed=count)
    where = at(num_rows)
    weights = scores(logits, controls(temperature))
    ours = finishers(weights, where, count)
    monkeypatch.setattr(native, "is_available", lambda: False)
    theirs = finishers(weights, where, count)

    times = log_times(logits, temperature, where)
    is_possible = weights.gather(-1, ours) > -INF
    lost_by = (times.gather(-1, ours) - times.gather(-1, theirs)).abs()
    assert (lost_by[is_possible] < NEAR).all()
    # Or the tolerance would excuse a kernel that never looks.
    assert (ours != theirs)[is_possible].float().mean() < 0.002
    assert torch.equal(is_possible, weights.gather(-1, theirs) > -INF)


@pytest.mark.parametrize("vocab_size", [5, 63, 65, 1000])
def test_sampling_is_that_of_torch(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, temperature = random_rows(200, vocab_size, seed=11)
    temperature[::7] = 0.0
    setting = controls(temperature, top_k=[0, 0, 3, 10**6] * 50, top_p=[1.0] * 100 + [0.9] * 100)
    ours = sample(logits, setting, at(200))
    monkeypatch.setattr(native, "is_available", lambda: False)
    theirs = sample(logits, setting, at(200))
    times = log_times(logits, torch.where(temperature == 0, 1.0, temperature), at(200))
    lost_by = times.gather(-1, torch.stack((ours, theirs), dim=1)).diff(dim=-1).abs()
    assert (lost_by < NEAR).all()
    assert (ours != theirs).sum() <= 1
    assert torch.equal(ours[::7], theirs[::7])


@pytest.mark.parametrize("vocab_size", [1, 3, 64, 65, 1000, 40_001])
def test_noise_is_that_of_numpy(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [Key(0), Key(2**64 - 1, 3), Key(2**63)]
    where = [Address(key, Stream.DRAFT, 2**40 + 1, 9) for key in keys]
    ours = exponential(where, vocab_size)
    monkeypatch.setattr(native, "is_available", lambda: False)
    assert torch.equal(ours, exponential(where, vocab_size))


def test_no_noise_is_infinite(kernel: ModuleType) -> None:
    where, token = [Address(Key(1), Stream.TARGET, 32)], 1_074_895
    assert uniform_at(where, torch.tensor([[token]])).float() == 1.0, "here rounding reaches 1"
    uniforms = torch.empty(1, token + 1)
    kernel.uniforms(address_words(where), uniforms)
    assert uniforms[0, token] == 1 - 2.0**-24


# ---------------------------------------------------------------------------------------------
# Nothing but the row decides


def test_what_is_sampled_is_the_first_to_finish() -> None:
    """Bit for bit, so that a coupled draft of equal logits is always accepted."""
    logits, temperature = random_rows(400, 1001, seed=3)
    temperature[200:] = torch.linspace(0.3, 3.1, 200)
    setting = controls(temperature, min_p=[0.0, 0.05] * 200)
    tokens = sample(logits, setting, at(400))
    for count in (1, 4):
        assert torch.equal(finishers(scores(logits, setting), at(400), count)[:, 0], tokens)


@pytest.mark.parametrize("num_threads", [2, 3, 5])
@pytest.mark.parametrize("vocab_size", [5, 16, 4099])
def test_threads_share_rows_and_parts_of_rows(
    kernel: ModuleType, num_threads: int, vocab_size: int
) -> None:
    logits, temperature = random_rows(7, vocab_size, seed=num_threads)
    temperature[1] = 0.0
    kernel.use_threads(1)
    alone = run(kernel, logits, temperature)
    several = run(kernel, logits[2:], temperature[2:], 4)
    kernel.use_threads(num_threads)
    for num_rows in (1, 2, 4, 7):
        assert torch.equal(run(kernel, logits[:num_rows], temperature[:num_rows]), alone[:num_rows])
    assert torch.equal(run(kernel, logits[2:3], temperature[2:3], 4), several[:1])


def test_instruction_sets_agree(kernel: ModuleType) -> None:
    logits, temperature = random_rows(60, 1000, seed=1)
    tokens = {}
    for isa in kernel.isas():
        kernel.use_isa(isa)
        tokens[isa] = run(kernel, logits, temperature, 5)
    assert all(torch.equal(tokens["scalar"], other) for other in tokens.values())


def test_rows_do_not_see_their_neighbours() -> None:
    logits, temperature = random_rows(40, 77, seed=2)
    temperature[::4] = 0.0
    edits = {3: Edits(add_ids=torch.tensor([5]), add_values=torch.tensor([9.0]))}
    setting = controls(temperature, top_k=[0, 2] * 20, top_p=[1.0] * 30 + [0.5] * 10)
    before = logits.clone()
    together = sample(logits, replace(setting, edits=edits), at(40))
    assert torch.equal(logits, before)  # the argument is kept
    for row in range(40):
        own = {0: edits[row]} if row in edits else {}
        alone = replace(setting.at(torch.tensor([row])), edits=own)
        assert sample(logits[row : row + 1], alone, at(40)[row : row + 1]) == together[row]


# ---------------------------------------------------------------------------------------------
# Edges


@pytest.mark.parametrize("first", [0, 15, 16, 63, 64, 69])
def test_temperature_zero_takes_the_first_of_the_largest(first: int) -> None:
    logits = torch.zeros(1, 70)
    logits[0, first:] = 2.0
    assert sample(logits, controls([0.0]), at(1)) == first


@pytest.mark.parametrize("place", [0, 17, 63, 64, 69])
@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_one_bad_number_spoils_a_row(
    kernel: ModuleType, place: int, bad: float, num_threads: int
) -> None:
    kernel.use_threads(num_threads)
    logits = torch.zeros(2, 70)
    logits[0, 3] = -INF
    logits[1, place] = bad
    tokens = torch.empty(2, 2, dtype=torch.int64)
    assert not kernel.race(logits, torch.ones(2), address_words(at(2)), tokens)
    assert tokens[1].tolist() == [0, 1]
    assert kernel.race(logits[:1], torch.ones(1), address_words(at(1)), tokens[:1])


def test_a_row_without_any_possible_token_has_finishers_all_the_same() -> None:
    """Drafters look at such rows, and drop what they find."""
    assert finishers(torch.full((1, 70), -INF), at(1), 3).tolist() == [[0, 1, 2]]


def test_the_impossible_come_last_in_order() -> None:
    weights = torch.full((50, 100), -INF)
    weights[:, [70, 20]] = torch.tensor([0.0, -500.0])
    assert (finishers(weights, at(50), 5) == torch.tensor([70, 20, 0, 1, 2])).all()


def test_distances_no_exponential_can_express_are_still_in_order() -> None:
    logits = -torch.arange(200.0).expand(20, -1)
    setting = controls([1e-3] * 20)
    assert (finishers(scores(logits, setting), at(20), 6) == torch.arange(6)).all()


def test_the_least_temperatures() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.999, 3.0, -INF] * 20] * 50)
    tokens = sample(logits, controls([1e-30, 1e-42] * 25), at(50))
    assert (logits.gather(1, tokens.unsqueeze(1)) == 3.0).all()
    assert tokens.unique().numel() > 10, "equal logits share the chances"


def test_no_rows() -> None:
    assert sample(torch.empty(0, 70), controls(torch.empty(0)), []).tolist() == []


@pytest.mark.parametrize(
    ("temperature", "num_addresses", "count"),
    [([1.0], 2, 1), ([1.0, 1.0], 2, 6), ([1.0, 1.0], 1, 1)],
)
def test_what_does_not_fit_is_refused(
    kernel: ModuleType, temperature: list[float], num_addresses: int, count: int
) -> None:
    tokens = torch.empty(2, count, dtype=torch.int64)
    words = address_words(at(num_addresses))
    with pytest.raises(ValueError, match=r"as many|more finishers"):
        kernel.race(torch.zeros(2, 5), torch.tensor(temperature), words, tokens)
