"""The specification: generation with no cache, no batch and no speed.

Every token comes from a full forward pass over everything before it. The engine, with all its
paging, batching and speculation, must emit the same tokens; tests and `check` compare the two.
This file shares the meaning of a distribution with the engine, and none of its machinery.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from slipstream.core.controls import Row, controls
from slipstream.core.grammar import Grammar
from slipstream.core.params import SamplingParams
from slipstream.kernels import dense_attention
from slipstream.maths.distributions import sample
from slipstream.maths.noise import Address, Key, Stream
from slipstream.models.layers import CausalLM


@torch.inference_mode()
def logits(model: CausalLM, tokens: Sequence[int]) -> Tensor:
    """Logits after every prefix of `tokens`: [T, V]."""
    ids = torch.tensor(tokens, device=model.device)
    hidden, _ = model(ids, torch.arange(len(tokens), device=model.device), _attend)
    return model.logits(hidden)


def generate(
    model: CausalLM,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    stop_ids: frozenset[int] = frozenset(),
    branch: int = 0,
    num_tokens: int,
    grammar: Grammar | None = None,
) -> list[int]:
    """The output tokens of one answer, the one that ended it included."""
    assert params.seed is not None or params.temperature == 0, "a sampled oracle needs a seed"
    return list(_tokens(model, list(prompt), params, stop_ids, branch, num_tokens, grammar))


def _tokens(
    model: CausalLM,
    tokens: list[int],
    params: SamplingParams,
    stop_ids: frozenset[int],
    branch: int,
    num_tokens: int,
    grammar: Grammar | None,
) -> Iterator[int]:
    num_prompt = len(tokens)
    key = Key(params.seed or 0, branch)
    for _ in range(num_tokens):
        row = Row(params, tokens, num_prompt, stop_ids, grammar)
        last = logits(model, tokens)[-1:]
        address = Address(key, Stream.TARGET, len(tokens))
        token = int(sample(last, controls([row], last.device), [address]))
        tokens.append(token)
        yield token
        if token in stop_ids:
            return


def _attend(
    layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None
) -> Tensor:
    return dense_attention(q, k, v, scale=scale, window=window)
