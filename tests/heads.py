"""Draft heads of tiny targets, their weights random, and what they should draft."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.core.target import TargetOutput
from slipstream.drafters.eagle import EagleDrafter
from slipstream.drafters.medusa import MedusaDrafter
from slipstream.drafters.vocabulary import DraftVocabulary
from slipstream.kernels import dense_attention
from slipstream.loading.heads import one_layer
from slipstream.models import CausalLM
from slipstream.models.heads import (
    Borrowed,
    Eagle3Head,
    EagleHead,
    FeatureHead,
    MedusaHead,
    MTPHead,
)
from slipstream.models.llama import LlamaLayer

TARGET_IDS = torch.tensor([0, 1, 2, 4, 5, 7, 8, 9, 11, 12, 15, 16, 20, 21, 22, 23, 25, 28, 30])


def eagle(target: CausalLM, seed: int = 1, *, bias: bool = True) -> EagleHead:
    config = one_layer(target.config)
    head = EagleHead(config, Borrowed.of(target), bias=bias, has_embedding=True)
    return filled(head.to(target.dtype), seed)


def eagle3(target: CausalLM, seed: int = 2, *, norm_before_residual: bool = False) -> Eagle3Head:
    head = Eagle3Head(
        one_layer(target.config),
        Borrowed.of(target),
        taps=(0, 1, target.config.num_layers - 1),
        target_size=target.config.hidden_size,
        target_ids=TARGET_IDS,
        norm_before_residual=norm_before_residual,
        has_embedding=False,
    )
    return filled(head.to(target.dtype), seed)


def mtp(target: CausalLM, seed: int = 3) -> MTPHead:
    config = one_layer(target.config)
    layer = LlamaLayer(config, 0)
    head = MTPHead(config, layer, Borrowed.of(target), has_embedding=True, has_head=False)
    return filled(head.to(target.dtype), seed)


def medusa(target: CausalLM, seed: int = 4, *, is_tied: bool = False) -> MedusaHead:
    head = MedusaHead(
        target.config.hidden_size, Borrowed.of(target), num_heads=3, num_blocks=2, is_tied=is_tied
    )
    return filled(head.to(target.dtype), seed)


FEATURE_HEADS: dict[str, Callable[[CausalLM], FeatureHead]] = {
    "eagle": eagle,
    "eagle3": eagle3,
    "mtp": mtp,
}


def drafter_for(
    head: Any,
    vocab_size: int = 32,
    *,
    num_blocks: int = 200,
    kv_dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> EagleDrafter | MedusaDrafter:
    """The drafter of a head, its pages of 4 tokens."""
    if isinstance(head, MedusaHead):
        return MedusaDrafter(head, vocab_size, **settings)
    return EagleDrafter(
        head,
        vocab_size,
        num_blocks=num_blocks,
        block_size=4,
        kv_dtype=kv_dtype,
        device=torch.device("cpu"),
        **settings,
    )


def filled(head: Any, seed: int) -> Any:
    """The head with random weights, large enough for every input to matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        centre = 1.0 if "norm" in name else 0.0
        scale = 0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
        parameter.data.copy_(centre + scale * noise)
    return head.eval()


def dense(layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None):
    """`Attend` for one whole sequence at once."""
    return dense_attention(q, k, v, scale=scale, window=window)


def target_pass(target: CausalLM, tokens: list[int], taps=()) -> TargetOutput:
    """One pass of the target over a whole sequence."""
    ids = torch.tensor(tokens)
    hidden, tapped = target(ids, torch.arange(len(tokens)), dense, taps)
    return TargetOutput(target.logits(hidden), [0], hidden, tapped, [0])


def logits_of(head: FeatureHead, features: Tensor) -> Tensor:
    """Logits over all the target's tokens, [R, V]."""
    vocabulary = DraftVocabulary(head.borrowed.vocab_size, head.target_ids)
    return vocabulary.widened(head.logits(features))


def head_logits(
    head: FeatureHead,
    target: CausalLM,
    tokens: list[int],
    path: list[int],
    skipped: range = range(0),
) -> Tensor:
    """Logits [1, V] of what follows a path behind committed tokens, all computed anew.

    Args:
        skipped: positions of pairs that the head has to do without.
    """
    features = head.fuse(head.read(target_pass(target, tokens[:-1], head.taps)))
    kept = [i for i in range(len(features)) if i not in skipped]
    features, ids = features[kept], [tokens[i + 1] for i in kept]
    while True:
        after = head(torch.tensor(ids), features, torch.arange(len(ids)), dense)[-1:]
        if not path:
            return logits_of(head, after)
        ids, path = [*ids, path[0]], path[1:]
        features = torch.cat([features, after])
