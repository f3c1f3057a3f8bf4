"""Drafts made from answers that are already known: for proofs and tests, where no second model is.

The drafter is as good as it is told to be: with chance `hit_rate` a node carries the token that
really comes next, else another one. Two kinds of drafts come out of it.

    guesses   chains or random trees, certain as a draft of n-grams is; `match` judges them, and so
              do the other rules at temperature 0
    samples   chains drawn from an explicit q with noise of their own, as `ratio` and `block` need
              them; `law` says what q is in any context, so that a test may look at it too

It is of no use for speed: it must be told the answer first.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.core.draft import NO_DRAFT, Draft, Verdict
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOutput
from slipstream.maths.distributions import race
from slipstream.maths.noise import Address, Key, StepNoise, Stream, uniform_at

# After a token that no answer goes on from, samples are among this many of the most common ones.
_NUM_COMMON = 8


class Node(NamedTuple):
    """A place in a draft: what it continues, and what it will carry."""

    parent: int
    is_hit: bool  # the true next token, where there is one
    guess: int  # else this


class SyntheticDrafter:
    """Knows the plain answers, and drafts them more or less well.

    Args:
        answers: request id -> its plain output, by index of the answer.
        vocab_size: of the target.
        hit_rate: how often a node carries the true next token.
        trees: guess random trees; chains otherwise.
        sampled: draw chains from q instead of guessing.
        seed: of the shapes and guesses; sampled tokens use the noise of their request.

    Attributes:
        num_drafted, num_accepted: nodes so far.
    """

    taps: Seq[int] = ()

    def __init__(
        self,
        answers: Mapping[str, Mapping[int, Seq[int]]],
        vocab_size: int,
        hit_rate: float,
        *,
        trees: bool = False,
        sampled: bool = False,
        seed: int = 0,
    ):
        assert not (trees and sampled), "samples are chains"
        self.answers = answers
        self.vocab_size = vocab_size
        self.hit_rate = hit_rate
        self.trees = trees
        self.sampled = sampled
        self.seed = seed
        self.num_drafted = 0
        self.num_accepted = 0
        known = [answer for branches in answers.values() for answer in branches.values()]
        counts = Counter(chain(*known)) or Counter(range(min(_NUM_COMMON, vocab_size)))
        self._common = dict(counts.most_common(_NUM_COMMON))
        self._followers: dict[int, Counter[int]] = defaultdict(Counter)
        for answer in known:
            for token, following in pairwise(answer):
                self._followers[token][following] += 1

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        shapes = self._shapes(seqs, budgets)
        if self.sampled:
            drafts = self._sample(seqs, [len(shape) for shape in shapes])
        else:
            drafts = [self._guess(seq, shape) for seq, shape in zip(seqs, shapes, strict=True)]
        self.num_drafted += sum(map(len, drafts))
        return drafts

    def observe(
        self, seqs: Seq[Sequence], target: TargetOutput, verdicts: Seq[Verdict | None]
    ) -> None:
        assert len(seqs) == len(verdicts) == len(target.first_rows)
        self.num_accepted += sum(len(verdict.path) for verdict in verdicts if verdict is not None)

    def forget(self, seq_id: int) -> None:
        pass  # every draft is made from the committed tokens alone

    def law(self, request_id: str, index: int, output: Seq[int]) -> Tensor:
        """q of the token after `output`, whoever asks and whenever: [V] float32.

        The true token with `hit_rate`, else what followed the last token in any answer; where the
        output has left its answer, only the latter.
        """
        followers = self._followers.get(output[-1]) if output else None
        others = followers or self._common
        q = torch.zeros(self.vocab_size)
        q[list(others)] = torch.tensor(list(others.values())).float() / sum(others.values())
        truth = self._truth(request_id, index, output)
        if truth is not None:
            q *= 1 - self.hit_rate
            q[truth] += self.hit_rate
        return q

    def _truth(self, request_id: str, index: int, output: Seq[int]) -> int | None:
        """What plain decoding emits after `output`; None where it never emits that."""
        answer = self.answers.get(request_id, {}).get(index, ())
        num_output = len(output)
        if num_output >= len(answer) or list(answer[:num_output]) != list(output):
            return None
        return answer[num_output]

    def _shapes(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[list[Node]]:
        """Nodes of each draft before they carry tokens. Sizes up to the budget all come up."""
        if not seqs:
            return []
        # Keys of their own, as requests need not bring a seed. Nobody drafts for position 0, so
        # whatever the keys, shapes know nothing of the noise that draws tokens.
        addresses = [
            Address(Key(self.seed, seq.seq_id), Stream.DRAFT, 0, len(seq.tokens)) for seq in seqs
        ]
        wanted = torch.arange(1 + 3 * max(budgets)).expand(len(seqs), -1)
        shapes: list[list[Node]] = []
        for budget, (size, *rest) in zip(
            budgets, uniform_at(addresses, wanted).tolist(), strict=True
        ):
            nodes: list[Node] = []
            for n in range(int(size * (budget + 1))):
                place, luck, other = rest[3 * n : 3 * n + 3]
                parent = int(place * (n + 1)) - 1 if self.trees else n - 1
                nodes.append(Node(parent, luck < self.hit_rate, int(other * self.vocab_size)))
            shapes.append(nodes)
        return shapes

    def _guess(self, seq: Sequence, shape: list[Node]) -> Draft:
        paths: list[list[int]] = []  # per node, the output up to it and with it
        parents: list[int] = []
        taken: set[tuple[int, int]] = set()
        for node in shape:
            before = paths[node.parent] if node.parent >= 0 else seq.output
            truth = self._truth(seq.request_id, seq.index, before)
            token = truth if truth is not None and node.is_hit else node.guess
            if (node.parent, token) in taken:
                break  # siblings differ
            taken.add((node.parent, token))
            paths.append([*before, token])
            parents.append(node.parent)
        return Draft([path[-1] for path in paths], parents)

    def _sample(self, seqs: Seq[Sequence], lengths: list[int]) -> list[Draft]:
        noise = StepNoise([seq.key for seq in seqs], [len(seq.tokens) for seq in seqs])
        outputs = [seq.output for seq in seqs]
        laws: list[list[Tensor]] = [[] for _ in seqs]
        for depth in range(max(lengths, default=0)):
            drafting = [b for b, length in enumerate(lengths) if depth < length]
            q = torch.stack(
                [self.law(seqs[b].request_id, seqs[b].index, outputs[b]) for b in drafting]
            )
            which = torch.tensor(drafting)
            tokens = race(q.log(), noise.drafts(which, torch.full_like(which, depth)))
            for b, row, token in zip(drafting, q, tokens.tolist(), strict=True):
                outputs[b].append(token)
                laws[b].append(row)
        return [
            Draft(outputs[b][seq.num_output :], list(range(-1, length - 1)), torch.stack(laws[b]))
            if length
            else NO_DRAFT
            for b, (seq, length) in enumerate(zip(seqs, lengths, strict=True))
        ]
