"""The target's answers on disk: a shard at a time, each written whole or not at all.

A text is what a head will meet: a prompt in the target's chat template and the target's answer,
at temperature 0 every other time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.core.params import SamplingParams
from slipstream.train.files import written_whole

# The prompts of some texts, by their indices.
Ask = Callable[[Sequence[int]], list[list[int]]]
# Answers to prompts [B] of token ids.
Answer = Callable[[Sequence[list[int]], Sequence[SamplingParams]], list[list[int]]]

NUM_TEXTS = 256  # of a shard
_TEMPERATURES = (0.0, 0.6, 0.0, 0.9)
_HOLD_OUT = 32  # one text in so many is only looked at


@dataclass(frozen=True, slots=True)
class Texts:
    """A shard of n texts.

    Attributes:
        tokens: of all of them, one after another, [N] int64.
        starts: where each begins, and the end: [n + 1].
        num_prompt: tokens that are not the target's answer, [n].
    """

    tokens: Tensor
    starts: Tensor
    num_prompt: Tensor

    @classmethod
    def of(cls, texts: Sequence[tuple[list[int], list[int]]]) -> "Texts":
        """Of prompts and answers."""
        lengths = torch.tensor([0] + [len(prompt) + len(answer) for prompt, answer in texts])
        return cls(
            torch.tensor([token for prompt, answer in texts for token in prompt + answer]),
            lengths.cumsum(0),
            torch.tensor([len(prompt) for prompt, _ in texts]),
        )

    @classmethod
    def read(cls, path: Path) -> "Texts":
        return cls(**load_file(path))

    def write(self, path: Path) -> None:
        write_whole(
            {"tokens": self.tokens, "starts": self.starts, "num_prompt": self.num_prompt}, path
        )


def write_whole(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a shard."""
    with written_whole(path) as part:
        save_file(tensors, part)


def is_held_out(index: int) -> bool:
    """Whether a text is for measuring; such texts are greedy, as `measured` needs them."""
    return index % _HOLD_OUT == 0


def params_of(index: int, seed: int, max_tokens: int) -> SamplingParams:
    """How text `index` is answered."""
    return SamplingParams(
        temperature=_TEMPERATURES[index % len(_TEMPERATURES)],
        seed=seed + index,
        max_tokens=max_tokens,
    )


def write_texts(
    folder: Path,
    num_texts: int,
    ask: Ask,
    answer: Answer,
    *,
    seed: int,
    max_tokens: int,
    progress: Callable[[int], None] = lambda num_texts: None,
) -> list[Path]:
    """Have the target answer; shards that are there already are left as they are.

    Args:
        progress: called with how many texts there are.

    Returns:
        The shards, in order.
    """
    shards = []
    for first in range(0, num_texts, NUM_TEXTS):
        indices = range(first, min(first + NUM_TEXTS, num_texts))
        shards.append(folder / f"{first:07d}-{indices.stop:07d}.safetensors")
        if not shards[-1].exists():
            prompts = ask(indices)
            answers = answer(prompts, [params_of(i, seed, max_tokens) for i in indices])
            Texts.of(list(zip(prompts, answers, strict=True))).write(shards[-1])
        progress(indices.stop)
    return shards
