"""What heads share, and what they borrow from their target."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from slipstream import kernels
from slipstream.models.layers import CausalLM, Linear, projection
from slipstream.models.recorded import RecordedRows


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Parts of the target, for heads that have none of their own.

    Attributes:
        embed: [T] int64 -> [T, hidden].
        logits: [R, hidden] -> [R, V].
        vocab_size: V.
    """

    embed: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    vocab_size: int

    @classmethod
    def of(cls, target: CausalLM) -> "Borrowed":
        """What a target lends; its head runs natively where the target does."""
        config = target.config
        logits: Callable[[Tensor], Tensor] = target.logits
        if target.is_packed:
            logits = RecordedRows(target.logits, config.hidden_size, config.vocab_size)
        return cls(target.model.embed_tokens, logits, config.vocab_size)


def fused(layer: Linear, *inputs: Tensor) -> Tensor:
    """A layer of equally wide inputs side by side, [T, I] each: its columns are shared out.

    Nothing is concatenated, so that it can be written down like everything models are made of.
    """
    weight: Any = layer.weight
    # Packed, its columns are weights of their own already.
    columns = weight if isinstance(weight, tuple) else weight.chunk(len(inputs), dim=1)
    out = kernels.linear(inputs[0], columns[0], layer.bias)
    for x, weight in zip(inputs[1:], columns[1:], strict=True):
        out = out + kernels.linear(x, weight)
    return out


def draft_head(hidden_size: int, target_ids: Tensor | None) -> Linear | None:
    """Room for the rows of the target's output head that a draft vocabulary keeps; None for all."""
    return None if target_ids is None else projection(hidden_size, len(target_ids))


def widened(logits: Tensor) -> Tensor:
    """Logits in float32, or wider where they are."""
    return logits if logits.dtype.itemsize == 8 else logits.float()


def packed_weights(head: nn.Module) -> list[kernels.PackedWeight]:
    """The matrices of a head that are packed."""
    held = [getattr(module, "weight", None) for module in head.modules()]
    flat = [part for each in held for part in (each if isinstance(each, tuple) else (each,))]
    return [weight for weight in flat if isinstance(weight, kernels.PackedWeight)]


def tensor_bytes(head: nn.Module) -> int:
    """Bytes of a head's own tensors; what it borrows is not counted."""
    tensors = sum(tensor.nbytes for tensor in (*head.parameters(), *head.buffers()))
    return tensors + sum(weight.nbytes for weight in packed_weights(head))
