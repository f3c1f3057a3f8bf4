"""Training rows: texts one after another, cut every so many tokens, so that nothing is padded.

    text    a a a a a b b | b b b c c c c        two rows of 7
    place   0 1 2 3 4 0 1 | 2 3 4 0 1 2 3        a text that is cut goes on, without what was before

The order is a permutation of the texts for each epoch, a function of the seed: step n is the same
rows whether or not the run was ever killed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from slipstream.maths.noise import Address, Key, Stream, uniform_at
from slipstream.train.texts import Texts, is_held_out


@dataclass(frozen=True, slots=True)
class Rows:
    """B rows of L tokens.

    Attributes:
        tokens: [B, L] int64.
        text: which text a token belongs to, [B, L] int64.
        place: its position in that, [B, L] int64.
        is_answer: whether the target wrote it, [B, L].
        states: hidden states by name (`states`), each [B, L, any] bfloat16.
    """

    tokens: Tensor
    text: Tensor
    place: Tensor
    is_answer: Tensor
    states: dict[str, Tensor]


class Corpus:
    """Texts and states of all shards.

    Args:
        texts: the files.
        states: for each kind, the files in the same order.
        device: where rows are put.
    """

    def __init__(
        self,
        texts: Sequence[Path],
        states: Mapping[str, Sequence[Path]],
        device: torch.device | str = "cpu",
    ):
        self.device = torch.device(device)
        self._texts = [Texts.read(path) for path in texts]
        self._states = {
            name: [safe_open(path, framework="pt") for path in paths]
            for name, paths in states.items()
        }
        # Where each text lies: shard, first token, first of the answer, end.
        self._where: list[tuple[int, int, int, int]] = []
        for shard, each in enumerate(self._texts):
            firsts, answers = each.starts[:-1], each.starts[:-1] + each.num_prompt
            places = torch.stack([firsts, answers, each.starts[1:]], dim=1)
            self._where += [(shard, *place) for place in places.tolist()]
        everything = range(len(self._where))
        self.held_out = [index for index in everything if is_held_out(index)]
        self.training = [index for index in everything if not is_held_out(index)]

    def num_tokens(self, indices: Sequence[int]) -> int:
        return sum(self._where[index][3] - self._where[index][1] for index in indices)

    def counts(self, vocab_size: int) -> Tensor:
        """How often the target wrote each token in texts for training, [V]."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for index in self.training:
            shard, _, first, stop = self._where[index]
            counts += self._texts[shard].tokens[first:stop].bincount(minlength=vocab_size)
        return counts

    def rows(
        self, indices: Sequence[int], *, num_rows: int, length: int, skip: int = 0
    ) -> Iterator[Rows]:
        """Texts in this order, as batches of whole rows; what is left at the end is dropped.

        Args:
            skip: batches left out at the beginning, without reading their states.
        """
        size = num_rows * length
        pieces: list[tuple[int, int, int]] = []  # text, first place, end
        filled = 0
        for index in indices:
            _, first, _, stop = self._where[index]
            place, end = 0, stop - first
            while place < end:
                taken = min(end - place, size - filled)
                pieces.append((index, place, place + taken))
                place, filled = place + taken, filled + taken
                if filled == size:
                    if skip > 0:
                        skip -= 1
                    else:
                        yield self._gathered(pieces, num_rows, length)
                    pieces, filled = [], 0

    def _gathered(self, pieces: list[tuple[int, int, int]], num_rows: int, length: int) -> Rows:
        tokens, text, place, is_answer = [], [], [], []
        states: dict[str, list[Tensor]] = {name: [] for name in self._states}
        for index, begin, end in pieces:
            shard, first, answer, _ = self._where[index]
            inside = slice(first + begin, first + end)
            tokens.append(self._texts[shard].tokens[inside])
            text.append(torch.full((end - begin,), index))
            place.append(torch.arange(begin, end))
            is_answer.append(place[-1] >= answer - first)
            for name, parts in states.items():
                parts.append(self._states[name][shard].get_slice(name)[inside])
        shape = (num_rows, length)
        return Rows(
            tokens=torch.cat(tokens).view(shape).to(self.device),
            text=torch.cat(text).view(shape).to(self.device),
            place=torch.cat(place).view(shape).to(self.device),
            is_answer=torch.cat(is_answer).view(shape).to(self.device),
            states={
                name: torch.cat(parts).view(*shape, -1).to(self.device)
                for name, parts in states.items()
            },
        )


def shuffled(indices: Sequence[int], seed: int, epoch: int) -> list[int]:
    """A permutation, the same for the same seed and epoch."""
    address = Address(Key(seed), Stream.DRAFT, position=epoch)
    keys = uniform_at([address], torch.arange(len(indices)).unsqueeze(0))[0]
    return [indices[i] for i in keys.argsort().tolist()]
