"""The `match` rule: whatever was drafted, what comes out is the plain stream."""

import hashlib
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.maths import trees
from slipstream.maths.acceptance import DraftBatch, Draw, match
from slipstream.maths.distributions import Controls, sample
from slipstream.maths.noise import Address, Key, Stream

NUM_TOKENS = 3

Draft = tuple[list[int], list[int]]  # tokens and parents


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Trees whose siblings carry different tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    taken: set[tuple[int, int]] = set()
    for node in range(draw(st.integers(0, 10))):
        parent = draw(st.integers(-1, node - 1))
        token = draw(st.integers(0, NUM_TOKENS - 1))
        if (parent, token) in taken:
            break
        taken.add((parent, token))
        tokens.append(token)
        parents.append(parent)
    return tokens, parents


def padded(batch: Sequence[Draft]) -> DraftBatch:
    longest = max(len(tokens) for tokens, _ in batch)
    both = [[side + [-1] * (longest - len(side)) for side in draft] for draft in batch]
    tensor = torch.tensor(both, dtype=torch.int64).view(len(batch), 2, longest)
    return DraftBatch(tensor[:, 0], tensor[:, 1])


def path_to(draft: Draft, node: int) -> list[int]:
    tokens, parents = draft
    return [] if node < 0 else [*path_to(draft, parents[node]), tokens[node]]


def plain_token(seq: int, output: Sequence[int]) -> int:
    """A target whose sample at a position depends on all before it, and on nothing else."""
    return hashlib.sha256(bytes([seq, *output])).digest()[0] % NUM_TOKENS


def plain_stream(seq: int, length: int) -> list[int]:
    output: list[int] = []
    for _ in range(length):
        output.append(plain_token(seq, output))
    return output


class Target:
    """Samples the target, and remembers where it was asked."""

    def __init__(self, batch: Sequence[Draft]):
        self.batch = batch
        self.asked: list[tuple[int, int]] = []

    def draw(self, seqs: Tensor, nodes: Tensor) -> Tensor:
        places = list(zip(seqs.tolist(), nodes.tolist(), strict=True))
        self.asked += places
        tokens = [plain_token(seq, path_to(self.batch[seq], node)) for seq, node in places]
        return torch.tensor(tokens)


def outcomes(batch: Sequence[Draft], draw: Draw) -> list[tuple[list[int], int]]:
    verdicts = match(padded(batch), draw)
    paths = [row.nonzero().flatten().tolist() for row in verdicts.accepted]
    return list(zip(paths, verdicts.next_tokens.tolist(), strict=True))


@given(st.lists(drafts(), min_size=1, max_size=5))
def test_any_draft_yields_the_plain_stream(batch: list[Draft]) -> None:
    target = Target(batch)
    visited = []
    for seq, (path, next_token) in enumerate(outcomes(batch, target.draw)):
        tokens, parents = batch[seq]
        assert [parents[node] for node in path] == [-1, *path][: len(path)]
        emitted = [tokens[node] for node in path] + [next_token]
        assert emitted == plain_stream(seq, len(emitted))
        # It goes as deep as the draft allows.
        end = path[-1] if path else -1
        children = [node for node, parent in enumerate(parents) if parent == end]
        assert next_token not in [tokens[node] for node in children]
        visited += [(seq, node) for node in (-1, *path)]
    assert sorted(target.asked) == sorted(visited)  # once each, and nowhere else


@given(st.integers(0, 8), st.integers(0, 255))
def test_a_right_guess_is_accepted_whole(length: int, seq: int) -> None:
    stream = plain_stream(seq, length + 1)
    draft = stream[:length], trees.chain(length)

    def draw(_: Tensor, nodes: Tensor) -> Tensor:
        return torch.tensor([plain_token(seq, path_to(draft, node)) for node in nodes.tolist()])

    assert outcomes([draft], draw) == [(list(range(length)), stream[length])]


A, B, C, D = range(4)


@pytest.mark.parametrize(
    ("draft", "target", "path", "next_token"),
    [
        (([], []), {-1: B}, [], B),
        (([A, B, C], [-1, 0, 1]), {-1: A, 0: B, 1: C, 2: D}, [0, 1, 2], D),
        (([A, B, C], [-1, 0, 1]), {-1: A, 0: C}, [0], C),
        (([A, B, C], [-1, 0, 1]), {-1: D}, [], D),
        # Two branches: the second sibling, then its child.
        (([A, B, C, D], [-1, -1, 0, 1]), {-1: B, 1: D, 3: A}, [1, 3], A),
        # The right token under the wrong parent does not count.
        (([A, B, C], [-1, -1, 0]), {-1: B, 1: C}, [1], C),
        # A token that repeats along the path.
        (([A, A, A], [-1, 0, 1]), {-1: A, 0: A, 1: B}, [0, 1], B),
    ],
)
def test_by_hand(draft: Draft, target: dict[int, int], path: list[int], next_token: int) -> None:
    def draw(_: Tensor, nodes: Tensor) -> Tensor:
        return torch.tensor([target[node] for node in nodes.tolist()])  # nowhere else

    assert outcomes([draft], draw) == [(path, next_token)]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_with_the_real_sampler(temperature: float) -> None:
    """One place at a time or a whole tree at once: the same noise gives the same tokens."""
    tokens, parents = [2, 0, 1, 2, 2, 0], [-1, -1, 0, 0, 1, 4]
    num_committed, vocab_size = 5, 4
    logits = torch.randn(len(tokens) + 1, vocab_size, generator=torch.Generator().manual_seed(0))
    depths = [0, *(depth + 1 for depth in trees.depths(parents))]

    def sampled(node: int, seed: int) -> int:
        """What plain decoding would say after this node."""
        address = Address(Key(seed), Stream.TARGET, num_committed + depths[node + 1])
        one = torch.ones(1)
        controls = Controls(temperature * one, (0 * one).long(), one, 0 * one, {})
        return int(sample(logits[[node + 1]], controls, [address]))

    reached = set()
    for seed in range(40):

        def draw(_: Tensor, nodes: Tensor, seed: int = seed) -> Tensor:
            return torch.tensor([sampled(node, seed) for node in nodes.tolist()])

        [(path, next_token)] = outcomes([(tokens, parents)], draw)
        emitted = [tokens[node] for node in path] + [next_token]
        assert emitted == [sampled(node, seed) for node in (-1, *path)]
        reached.add(len(path))
    assert temperature == 0 or len(reached) > 2
