"""Random numbers with addresses: looked up, never drawn.

`noise(key, stream, position, token)` is a pure function, so no batch, drafter, preemption or
thread can move a request's numbers. This is the only file that touches a random generator.

The function is Philox 4x64-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011), the generator numpy ships, so that anyone can check a number by hand:

    key      (seed, branch)                          branch: which of the n answers
    counter  (1 + token // 4, position, stream, origin)
    output   four 64-bit words; the token takes word token % 4

Whole vocabularies go through the native kernels or numpy's generator, scattered tokens and other
devices through `philox`, the same function on tensors. Words become uniforms (k + 1/2) / 2**53,
strictly between 0 and 1, and -log1p(-u) turns those into exponentials whose small values, which
decide races, keep full relative precision.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from slipstream import native

_MASK32 = 0xFFFFFFFF
_MASK53 = (1 << 53) - 1
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24  # in float32

# Races look noise up for possible tokens alone where these are less than 1 in so many; above that,
# whole rows are faster.
SPARSE_SHARE = 32


class Stream(IntEnum):
    """What a number is for. Numbers of different streams are independent."""

    TARGET = 0  # the race that emits tokens; coupled drafters look at it too
    DRAFT = 1  # independent drafting, under the `ratio` and `block` rules
    ACCEPT = 2  # accept-or-reject uniforms
    RECOVER = 3  # the race over the residual, and the bonus token of those rules


@dataclass(frozen=True, slots=True)
class Key:
    """Whose numbers: 64 bits of seed, and the index of the answer within its request."""

    seed: int
    branch: int = 0


def fresh_seed() -> int:
    """64 bits from the operating system, for requests that bring no seed."""
    return secrets.randbits(64)


@dataclass(frozen=True, slots=True)
class Address:
    """Where to look: one row of noise.

    Attributes:
        key: whose.
        stream: what for.
        position: absolute index of the token the noise decides about.
        origin: committed length when the step began. Only streams whose numbers must be fresh
            when a position is drafted again use it (every stream but TARGET).
    """

    key: Key
    stream: Stream
    position: int
    origin: int = 0


class StepNoise:
    """Fresh numbers for B sequences in one step, under the `ratio` and `block` rules.

    Block verification looks ahead, so a position drafted again must meet new numbers: every
    address carries the committed length at which the step began. `acceptance.FreshNoise`.

    Args:
        keys, origins: of the sequences; their committed lengths.
    """

    def __init__(self, keys: Sequence[Key], origins: Sequence[int]):
        self.keys = keys
        self.origins = origins
        self._key_words = _key_words(keys)  # [B, 2]
        self._origins = torch.tensor(origins, dtype=torch.int64)

    def drafts(self, seqs: Tensor, depths: Tensor) -> list[Address]:
        """Where a drafter finds the numbers that draw tokens `depths` ahead."""
        return [
            Address(self.keys[b], Stream.DRAFT, self.origins[b] + depth, self.origins[b])
            for b, depth in zip(seqs.tolist(), depths.tolist(), strict=True)
        ]

    def accepts(self, seqs: Tensor, nodes: Tensor, p: Tensor, q: Tensor) -> Tensor:
        """u q < p: never for p = 0, always for p >= q, with no division."""
        places = self._places(Stream.ACCEPT, seqs, 0)
        return _uniform(places, nodes.unsqueeze(-1)).squeeze(-1) * q < p

    def recovers(self, seqs: Tensor, depths: Tensor | int, weights: Tensor) -> Tensor:
        """The race over unnormalised weights [A, V]."""
        places = self._places(Stream.RECOVER, seqs, depths)
        num_possible = (weights > 0).sum(-1)
        if len(weights) == 0 or bool((num_possible * SPARSE_SHARE >= weights.shape[-1]).any()):
            return _winners(weights, _exponential_rows(places, weights.shape[-1]))
        # In order of token id, so that equal times are resolved as in whole rows.
        tokens = weights.topk(int(num_possible.max()), dim=-1).indices.sort(dim=-1).values
        noise = _to_exponential(_uniform(places, tokens))
        winners = _winners(weights.gather(-1, tokens), noise)
        return tokens.gather(-1, winners.unsqueeze(-1)).squeeze(-1)

    def _places(self, stream: Stream, seqs: Tensor, depths: Tensor | int) -> Tensor:
        """`address_words` of rows: [A, 5]."""
        keys, origins = self._key_words.to(seqs.device)[seqs], self._origins.to(seqs.device)[seqs]
        streams = torch.full_like(origins, stream)
        return torch.stack((*keys.unbind(1), origins + depths, streams, origins), dim=1)


def address_words(addresses: Sequence[Address]) -> Tensor:
    """What Philox is evaluated on: (seed, branch, position, stream, origin), [R, 5] int64."""
    words = [
        (_signed(a.key.seed), a.key.branch, a.position, int(a.stream), a.origin) for a in addresses
    ]
    return torch.tensor(words, dtype=torch.int64).reshape(-1, 5)


def exponential(
    addresses: Sequence[Address], vocab_size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Exponential(1) noise of every token at each address: [R, V] float32."""
    return _exponential_rows(address_words(addresses).to(device), vocab_size)


def exponential_at(addresses: Sequence[Address], tokens: Tensor) -> Tensor:
    """Exponential(1) noise of the given `tokens` [R, K] at each address: [R, K] float32."""
    return _to_exponential(uniform_at(addresses, tokens))


def uniform_at(addresses: Sequence[Address], tokens: Tensor) -> Tensor:
    """Uniform(0, 1) noise of the given `tokens` [R, K] at each address: [R, K] float64."""
    return _uniform(address_words(addresses).to(tokens.device), tokens)


def first_argmin(rows: Tensor) -> Tensor:
    """Index of the smallest number of each row, the first among equals: [R, V] -> [R] int64."""
    if rows.device.type == "cpu":  # where numpy is ten times as fast as torch
        return torch.from_numpy(rows.numpy().argmin(-1))
    return rows.argmin(-1)


def first_argmax(rows: Tensor) -> Tensor:
    """Index of the largest number of each row, the first among equals: [R, V] -> [R] int64."""
    if rows.device.type == "cpu":
        return torch.from_numpy(rows.numpy().argmax(-1))
    return rows.argmax(-1)


def philox(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x64-10 on int64 tensors that hold the bits of unsigned words; shapes broadcast."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2E7470EE14C6C93)
        high1, low1 = _multiply(c2, 0xCA5A826395121157)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = k0 + _signed(0x9E3779B97F4A7C15)
        k1 = k1 + _signed(0xBB67AE8584CAA73B)
    return c0, c1, c2, c3


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 64 bits of the unsigned product, by 32-bit halves."""
    x_low, x_high = x & _MASK32, (x >> 32) & _MASK32
    f_low, f_high = factor & _MASK32, factor >> 32
    low, cross0, cross1 = x_low * f_low, x_high * f_low, x_low * f_high
    carry = ((low >> 32) & _MASK32) + (cross0 & _MASK32) + (cross1 & _MASK32)
    high = x_high * f_high + ((cross0 >> 32) & _MASK32) + ((cross1 >> 32) & _MASK32)
    return high + (carry >> 32), x * _signed(factor)


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word."""
    return word - (1 << 64) if word >= 1 << 63 else word


def _winners(weights: Tensor, noise: Tensor) -> Tensor:
    """First to finish under unnormalised weights [A, K]: [A] int64."""
    # Relative to the largest, so that no possible token's time overflows before it counts.
    return first_argmin(noise / (weights / weights.amax(-1, keepdim=True)))


def _key_words(keys: Sequence[Key]) -> Tensor:
    """(seed, branch) of each key: [R, 2]."""
    words = [(_signed(key.seed), key.branch) for key in keys]
    return torch.tensor(words, dtype=torch.int64).reshape(-1, 2)


def _philox_words(places: Tensor, blocks: Tensor) -> Tensor:
    """The four words of each block [R, K] of four tokens at `address_words` [R, 5]: [R, K, 4]."""
    seed, branch, position, stream, origin = places.unsqueeze(-1).unbind(1)
    return torch.stack(philox((seed, branch), (blocks + 1, position, stream, origin)), dim=-1)


def _uniform(places: Tensor, tokens: Tensor) -> Tensor:
    words = _philox_words(places, tokens // 4)
    return _to_uniform(words.gather(-1, (tokens % 4).unsqueeze(-1)).squeeze(-1))


def _exponential_rows(places: Tensor, vocab_size: int) -> Tensor:
    """Noise of whole rows at `address_words` [R, 5]: [R, V] float32."""
    is_cpu = places.device.type == "cpu"
    if is_cpu and native.is_available():
        uniform = torch.empty(len(places), vocab_size)
        native.load().uniforms(places, uniform)
        return _to_exponential(uniform)
    # Below some size, setting up numpy's generator costs more than the row.
    if not is_cpu or vocab_size <= 64:
        blocks = torch.arange(-(-vocab_size // 4), device=places.device).expand(len(places), -1)
        words = _philox_words(places, blocks).flatten(1)[:, :vocab_size]
        return _to_exponential(_to_uniform(words))
    uniform = torch.empty(len(places), vocab_size, dtype=torch.float64)
    for row, place in zip(uniform, places.numpy().view(np.uint64), strict=True):
        # numpy advances the counter before the first block, hence the 1 + token // 4 above.
        bits = np.random.Philox(key=place[:2], counter=np.pad(place[2:], (1, 0)))
        np.random.Generator(bits).random(out=row.numpy())
    return _to_exponential(uniform.add_(2.0**-54))


def _to_uniform(words: Tensor) -> Tensor:
    """(k + 1/2) / 2**53 of the upper 53 bits, where rounding must not reach 1."""
    top = ((words >> 11) & _MASK53).double()
    return top.add_(0.5).mul_(2.0**-53).clamp_(max=1 - 2.0**-53)


def _to_exponential(uniform: Tensor) -> Tensor:
    # Rounding to float32 may reach 1, whose exponential would be infinite.
    return uniform.float().clamp_(max=_LARGEST_BELOW_ONE).neg_().log1p_().neg_()
