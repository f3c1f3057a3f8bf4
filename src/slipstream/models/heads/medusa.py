"""Medusa: one head per token ahead, all of them reading the same hidden state.

Source: Cai et al., arXiv 2401.10774.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.heads.base import Borrowed, widened
from slipstream.models.layers import projection


class ResBlock(nn.Module):
    """x + silu(linear(x))."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.linear = projection(hidden_size, hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Module):
    """Head k maps the final hidden state of token i to logits of token i + 2 + k.

    Args:
        num_heads: tokens it can draft ahead.
        num_blocks: residual blocks of a head.
        is_tied: heads end in the target's output head; else each in one of its own.
    """

    def __init__(
        self,
        hidden_size: int,
        borrowed: Borrowed,
        *,
        num_heads: int,
        num_blocks: int,
        is_tied: bool,
    ):
        super().__init__()
        self.hidden_size = hidden_size
        self.borrowed = borrowed
        self.num_blocks = num_blocks
        self.is_tied = is_tied
        self.heads = nn.ModuleList()
        for _ in range(num_heads):
            blocks: list[nn.Module] = [ResBlock(hidden_size) for _ in range(num_blocks)]
            if not is_tied:
                blocks.append(projection(hidden_size, borrowed.vocab_size))
            self.heads.append(nn.Sequential(*blocks))

    def logits(self, features: Tensor, depth: int) -> Tensor:
        """Logits of head `depth`: [R, hidden] -> [R, V], float32 or wider."""
        out = self.heads[depth](features)
        return self.borrowed.logits(out) if self.is_tied else widened(out)
