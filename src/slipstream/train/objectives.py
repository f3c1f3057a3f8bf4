"""What heads are trained for: the published losses, and the acceptance they are after.

    eagle          1.0 SmoothL1(feature, the target's) + 0.1 CE(target's law, head's law), arXiv
                   2401.15077; here on unrolled steps as well (HASS, arXiv 2408.15766)
    eagle3, mtp    CE with the target's law over the draft vocabulary, step j weighted decay^j
    medusa         CE of each head, head k weighted decay^k, arXiv 2401.10774

The target's law is recomputed from its hidden states; hard labels take the text's tokens instead.
Tokens outside the draft vocabulary teach nothing: their places are left out, as in EAGLE-3.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.loading.heads import Head
from slipstream.models.heads import EagleHead, MedusaHead
from slipstream.train.rows import Rows
from slipstream.train.unroll import ahead, is_known, unrolled

_CHUNK = 128  # rows of logits at once: few enough to stay in the cache


@dataclass(frozen=True, slots=True)
class Objective:
    """How much each part of a loss counts.

    Attributes:
        unroll: steps that a head with K/V takes on its own output, the first included.
        decay: of the weights of further steps, or of Medusa's further heads.
        feature_weight: of the regression to the target's features (eagle).
        is_hard: teach the text's tokens rather than the target's law.
    """

    unroll: int = 3
    decay: float = 0.8
    feature_weight: float = 0.0
    is_hard: bool = False


def loss(head: Head, rows: Rows, objective: Objective) -> Tensor:
    """Cross-entropy, the mean over the places that teach, summed over steps."""
    assert head.target_ids is not None and head.lm_head is not None, "heads in training have both"
    weight = head.lm_head.weight.bfloat16()
    ids = rows.tokens.new_full((head.borrowed.vocab_size,), -1)
    ids[head.target_ids] = torch.arange(len(head.target_ids), device=ids.device)
    labels = ids[rows.tokens]  # draft ids, [B, L]; -1 where there is none
    law = None if objective.is_hard else _law(rows.states["hidden"].flatten(0, 1), weight)
    total = weight.new_zeros((), dtype=torch.float32)
    for step, features, final in drafted(head, rows, objective.unroll):
        counts = objective.decay**step
        is_taught = is_known(rows, 2 + step) & (ahead(labels, 2 + step) >= 0)
        places = is_taught.flatten().nonzero().squeeze(-1)
        taught = final.flatten(0, 1)[places]
        if len(places) == 0:  # nothing, yet backward must find its way
            total = total + taught.sum()
            continue
        if law is None:
            logits = F.linear(taught, weight).float()
            entropy = F.cross_entropy(logits, labels.flatten()[places + 2 + step])
        else:
            entropy = cross_entropy(taught, weight, law, places + 1 + step)
        total = total + counts * entropy
        if objective.feature_weight and isinstance(head, EagleHead):
            wanted = rows.states["hidden"].flatten(0, 1)[places + 1 + step].float()
            found = features.flatten(0, 1)[places].float()
            total = total + counts * objective.feature_weight * F.smooth_l1_loss(found, wanted)
    return total


def drafted(head: Head, rows: Rows, num_steps: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Step, features, and what the output head reads of them, [B, L, hidden].

    At place i they are about token i + 2 + step.
    """
    if isinstance(head, MedusaHead):
        for step, each in enumerate(head.heads):
            out = each(rows.states["hidden"])
            yield step, out, out
    else:
        for step, features in enumerate(unrolled(head, rows, num_steps)):
            yield step, features, head.final(features)


@torch.no_grad()
def _law(hidden: Tensor, weight: Tensor) -> Tensor:
    """The target's law over the draft vocabulary after each token, [N, V_d] bfloat16."""
    chunks = [
        F.linear(part, weight).float().softmax(-1).bfloat16() for part in hidden.split(_CHUNK)
    ]
    return torch.cat(chunks)


class _CrossEntropy(torch.autograd.Function):
    """Sum of CE(law, softmax(x W^T)); the gradient is found beside the value, chunk by chunk.

    Logits of a batch would be the largest thing in training by far, and passes over them would
    take longer than the products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [R, hidden]
        weight: Tensor,  # [V_d, hidden] bfloat16
        law: Tensor,  # [N, V_d]
        rows: Tensor,  # [R], of the law
    ) -> Tensor:
        total = x.new_zeros((), dtype=torch.float32)
        gradients = []
        for part, where in zip(x.bfloat16().split(_CHUNK), rows.split(_CHUNK), strict=True):
            logits = F.linear(part, weight).float()
            wanted = law[where].float()
            logits -= logits.logsumexp(-1, keepdim=True)
            total -= (logits * wanted).sum()
            gradients.append(logits.exp_().sub_(wanted).bfloat16() @ weight)
        ctx.save_for_backward(torch.cat(gradients).to(x.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None, None


def cross_entropy(x: Tensor, weight: Tensor, law: Tensor, rows: Tensor) -> Tensor:
    """Mean cross-entropy of softmax(x W^T) [R, V_d] under rows of a law; only x is taught."""
    return _CrossEntropy.apply(x, weight, law, rows) / len(x)


@torch.no_grad()
def acceptance(head: Head, batches: Iterator[Rows], num_steps: int) -> list[float]:
    """Chance that the first 1, 2, .. tokens of a greedy chain are accepted at temperature 0.

    Args:
        batches: of texts that the target wrote at temperature 0, whose tokens are its choices.
    """
    assert head.target_ids is not None and head.lm_head is not None, "heads in training have both"
    right = [0] * num_steps
    num_places = [0] * num_steps
    for rows in batches:
        so_far = torch.ones_like(rows.is_answer)
        for step, _, final in drafted(head, rows, num_steps):
            places = is_known(rows, 2 + step)
            ids = head.target_ids[head.lm_head(final[places]).argmax(-1)]
            is_right = torch.zeros_like(places)
            is_right[places] = ids == ahead(rows.tokens, 2 + step)[places]
            so_far &= is_right
            right[step] += int(so_far.sum())
            num_places[step] += int(places.sum())
    return [count / max(places, 1) for count, places in zip(right, num_places, strict=True)]
