"""Check the rules on a toy model in a few seconds: `python examples/verify_lossless.py`.

Drafts 10,000 chains of 4 tokens, verifies them by every rule, and compares the first emitted token
with the target's distribution and the mean length with theory. Then rolls a paged cache back and
places a tree. Exits 1 if anything is off.

A sample of 10,000 shows no error below its noise floor, which is printed, and another right sample
would exceed the tolerance about once in 25 times; the numbers here are fixed by their keys. The
strong check, with stated power and planted bugs that it must catch, is `slipstream prove`.
"""

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.kv.blocks import BlockManager
from slipstream.kv.cache import KVCache
from slipstream.maths import acceptance, stats, trees
from slipstream.maths.acceptance import DraftBatch, Verdicts
from slipstream.maths.distributions import race
from slipstream.maths.noise import Address, Key, StepNoise, Stream

NUM_CHAINS, GAMMA = 10_000, 4
TV_TOLERANCE = 0.015
STANDARD_ERRORS = 5  # tolerated deviation of a mean; a right one exceeds it once in 2 million times

# The same distributions at every position.
P = torch.tensor([0.32, 0.24, 0.16, 0.10, 0.08, 0.05, 0.03, 0.02])
Q = torch.tensor([0.15, 0.30, 0.20, 0.15, 0.05, 0.05, 0.05, 0.05])

KEYS = [Key(seed) for seed in range(NUM_CHAINS)]
FRESH = StepNoise(KEYS, [0] * NUM_CHAINS)


def main() -> int:
    """Run every check; 0 if all hold."""
    floor = stats.expected_tv(P, NUM_CHAINS)
    print(f"{NUM_CHAINS:,} chains of {GAMMA} tokens; TV(p, q) = {stats.total_variation(P, Q):.3f}")
    print(f"A perfect sampler shows a TV of {floor:.4f} at this size; tolerated: {TV_TOLERANCE}.\n")
    print("rule    TV of the first token    tokens per step    theory (1 - a^5) / (1 - a)")

    independent, coupled = drafted(fresh_addresses), drafted(shared_addresses)
    a = float(acceptance.ratio_acceptance(P, Q))
    a_coupled = float(acceptance.coupled_acceptance(P, Q))
    results = [
        check_rule("match", coupled, acceptance.match(coupled, sampled), a_coupled),
        check_rule("ratio", independent, acceptance.ratio(independent, target, FRESH), a),
        check_rule("block", independent, acceptance.block(independent, target, FRESH), a),
    ]
    print("        (block emits at least what theory says of ratio)\n")
    results += [
        check("paged cache rolled back from 10 to 6 tokens", rolls_back_exactly()),
        check("tree of 6 nodes", trees.depths([-1, 0, 0, 1, 1, 2]) == [0, 1, 1, 2, 2, 2]),
    ]
    print("\nAll checks passed." if all(results) else "\nFAILED.")
    print("For evidence with stated power, on your own model: slipstream prove")
    return 0 if all(results) else 1


def check(name: str, is_right: bool) -> bool:
    print(f"{name}: {'ok' if is_right else 'WRONG'}")
    return is_right


# Chains --------------------------------------------------------------------------------------


def fresh_addresses(position: int) -> list[Address]:
    """Noise of the draft's own, for `ratio` and `block`."""
    return FRESH.drafts(torch.arange(NUM_CHAINS), torch.full((NUM_CHAINS,), position))


def shared_addresses(position: int) -> list[Address]:
    """The target's noise, for `match`: draft and target run the same race."""
    return [Address(key, Stream.TARGET, position) for key in KEYS]


def drafted(addresses: Callable[[int], list[Address]]) -> DraftBatch:
    log_q = Q.log().expand(NUM_CHAINS, -1)
    tokens = torch.stack([race(log_q, addresses(position)) for position in range(GAMMA)], dim=1)
    parents = torch.arange(-1, GAMMA - 1).expand(NUM_CHAINS, -1)
    return DraftBatch(tokens, parents, Q.expand(NUM_CHAINS, GAMMA, -1))


def target(seqs: Tensor, nodes: Tensor) -> Tensor:
    return P.expand(len(seqs), -1)


def sampled(seqs: Tensor, nodes: Tensor) -> Tensor:
    """What plain decoding samples after each node; node i of a chain is at position i."""
    places = zip(seqs.tolist(), nodes.tolist(), strict=True)
    addresses = [Address(KEYS[b], Stream.TARGET, node + 1) for b, node in places]
    return race(P.log().expand(len(seqs), -1), addresses)


def check_rule(name: str, drafts: DraftBatch, verdicts: Verdicts, acceptance_rate: float) -> bool:
    first = torch.where(verdicts.accepted[:, 0], drafts.tokens[:, 0], verdicts.next_tokens)
    tv = stats.total_variation(first.bincount(minlength=len(P)) / NUM_CHAINS, P)

    num_tokens = verdicts.accepted.sum(1).double() + 1
    mean = float(num_tokens.mean())
    tolerance = STANDARD_ERRORS * float(num_tokens.std()) / math.sqrt(NUM_CHAINS)
    theory = (1 - acceptance_rate ** (GAMMA + 1)) / (1 - acceptance_rate)
    agrees = mean > theory - tolerance if name == "block" else abs(mean - theory) < tolerance

    is_right = tv < TV_TOLERANCE and agrees
    sign = ">=" if name == "block" else "  "
    print(
        f"{name:<8}{tv:<25.4f}{mean:<16.4f}{sign} {theory:.4f} +- {tolerance:.4f}"
        f"    {'ok' if is_right else 'WRONG'}"
    )
    return is_right


# Cache ---------------------------------------------------------------------------------------


def rolls_back_exactly() -> bool:
    """Whether 4 rejected tokens leave no trace, and 4 others can take their place."""
    shape = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "num_blocks": 4, "block_size": 4}
    cache = KVCache(**shape, dtype=torch.float32, device="cpu")
    blocks = BlockManager(shape["num_blocks"], shape["block_size"])
    blocks.allocate(0, list(range(10)))

    def slots(begin: int, end: int) -> Tensor:
        table = blocks.table(0)
        return torch.tensor([table[i // 4] * 4 + i % 4 for i in range(begin, end)])

    def write(begin: int, keys: Tensor) -> None:
        end = begin + keys.shape[1]
        blocks.reserve(0, begin, end)
        for layer in range(shape["num_layers"]):
            cache.write(layer, slots(begin, end), keys[layer], -keys[layer])

    def holds(keys: Tensor) -> bool:
        stored = cache.pool.flatten(2, 3)[:, :, slots(0, keys.shape[1])]
        return torch.equal(stored, torch.stack([keys, -keys], dim=1))

    first = torch.arange(2 * 10 * 2 * 8.0).view(2, 10, 2, 8)  # [L, T, H, D]
    other = first[:, 6:] + 0.5
    write(0, first)
    blocks.trim(0, 6)
    kept = holds(first[:, :6]) and blocks.num_free == 2
    write(6, other)
    blocks.check_integrity()
    return kept and holds(torch.cat([first[:, :6], other], dim=1)) and blocks.num_free == 1


if __name__ == "__main__":
    sys.exit(main())
