"""Random numbers with addresses: looked up, never drawn.

`noise(key, stream, position, token)` is a pure function, so no batch, drafter, preemption or
thread can move a request's numbers. This is the only file that touches a random generator.

The function is Philox 4x64-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011), the generator numpy ships, so that anyone can check a number by hand:

    key      (seed, branch)                          branch: which of the n answers
    counter  (1 + token // 4, position, stream, origin)
    output   four 64-bit words; the token takes word token % 4

Whole vocabularies go through numpy's generator, scattered tokens and other devices through
`philox`, the same function on tensors. Words become uniforms (k + 1/2) / 2**53, strictly between
0 and 1, and -log1p(-u) turns those into exponentials whose small values, which decide races, keep
full relative precision.
"""

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK53 = (1 << 53) - 1
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24  # in float32


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


@dataclass(frozen=True, slots=True)
class StepNoise:
    """Fresh numbers for B sequences in one step, under the `ratio` and `block` rules.

    Block verification looks ahead, so a position drafted again must meet new numbers: every
    address carries the committed length at which the step began. `acceptance.FreshNoise`.
    """

    keys: Sequence[Key]
    origins: Sequence[int]

    def drafts(self, seqs: Tensor, depths: Tensor) -> list[Address]:
        """Where a drafter finds the numbers that draw tokens `depths` ahead."""
        return self._addresses(Stream.DRAFT, seqs, depths)

    def accepts(self, seqs: Tensor, nodes: Tensor, p: Tensor, q: Tensor) -> Tensor:
        """u q < p: never for p = 0, always for p >= q, with no division."""
        addresses = self._addresses(Stream.ACCEPT, seqs, torch.zeros_like(nodes))
        uniform = uniform_at(addresses, nodes.unsqueeze(-1)).squeeze(-1)
        return uniform * q < p

    def recovers(self, seqs: Tensor, depths: Tensor | int, weights: Tensor) -> Tensor:
        """The race over unnormalised weights [A, V]."""
        depths = torch.as_tensor(depths, device=seqs.device).expand_as(seqs)
        addresses = self._addresses(Stream.RECOVER, seqs, depths)
        return (exponential(addresses, weights.shape[-1], weights.device) / weights).argmin(-1)

    def _addresses(self, stream: Stream, seqs: Tensor, depths: Tensor) -> list[Address]:
        return [
            Address(self.keys[b], stream, self.origins[b] + depth, self.origins[b])
            for b, depth in zip(seqs.tolist(), depths.tolist(), strict=True)
        ]


def exponential(
    addresses: Sequence[Address], vocab_size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Exponential(1) noise of every token at each address: [R, V] float32."""
    # Below some size, setting up numpy's generator costs more than the row.
    if torch.device(device).type != "cpu" or vocab_size <= 64:
        tokens = torch.arange(vocab_size, device=device).expand(len(addresses), -1)
        return exponential_at(addresses, tokens)
    noise = torch.empty(len(addresses), vocab_size)

    def fill(row: int) -> None:
        uniform = torch.from_numpy(_numpy_generator(addresses[row]).random(vocab_size))
        noise[row] = _to_exponential(uniform.add_(2.0**-54))

    # numpy releases the interpreter lock while it fills a row.
    if len(addresses) * vocab_size < 2**18:
        for row in range(len(addresses)):
            fill(row)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, range(len(addresses))))
    return noise


def exponential_at(addresses: Sequence[Address], tokens: Tensor) -> Tensor:
    """Exponential(1) noise of the given `tokens` [R, K] at each address: [R, K] float32."""
    return _to_exponential(uniform_at(addresses, tokens))


def uniform_at(addresses: Sequence[Address], tokens: Tensor) -> Tensor:
    """Uniform(0, 1) noise of the given `tokens` [R, K] at each address: [R, K] float64."""
    words = philox(_key_words(addresses, tokens.device), _counter_words(addresses, tokens))
    word = torch.stack(words, dim=-1).gather(-1, (tokens % 4).unsqueeze(-1)).squeeze(-1)
    return ((word >> 11) & _MASK53).double().add_(0.5).mul_(2.0**-53)


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


def _numpy_generator(address: Address) -> np.random.Generator:
    # numpy advances the counter before the first block, hence the 1 + token // 4 above.
    key = np.array([address.key.seed, address.key.branch], dtype=np.uint64)
    counter = np.array([0, address.position, address.stream, address.origin], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def _key_words(addresses: Sequence[Address], device: torch.device) -> tuple[Tensor, Tensor]:
    words = [(_signed(a.key.seed), a.key.branch) for a in addresses]
    seed, branch = torch.tensor(words, dtype=torch.int64, device=device).reshape(-1, 2, 1).unbind(1)
    return seed, branch


def _counter_words(
    addresses: Sequence[Address], tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    words = [(a.position, int(a.stream), a.origin) for a in addresses]
    rest = torch.tensor(words, dtype=torch.int64, device=tokens.device).reshape(-1, 3, 1)
    position, stream, origin = rest.unbind(1)
    return tokens // 4 + 1, position, stream, origin


def _to_exponential(uniform: Tensor) -> Tensor:
    # Rounding to float32 may reach 1, whose exponential would be infinite.
    return -torch.log1p(-uniform.float().clamp_(max=_LARGEST_BELOW_ONE))
