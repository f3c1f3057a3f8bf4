"""Medusa: one head per token ahead, all of them reading the same hidden state.

Source: Cai et al., arXiv 2401.10774.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.models.heads.base import Borrowed, draft_head, widened
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
        target_ids: the tokens tied heads may draft, [V_d] int64, ascending; None is every token.
    """

    target_ids: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        borrowed: Borrowed,
        *,
        num_heads: int,
        num_blocks: int,
        is_tied: bool,
        target_ids: Tensor | None = None,
    ):
        assert is_tied or target_ids is None, "heads of their own have their own vocabulary"
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
        self.lm_head = draft_head(hidden_size, target_ids)
        self.register_buffer("target_ids", target_ids)

    def logits(self, features: Tensor, num_heads: int) -> Tensor:
        """Logits of the first heads: [R, hidden] -> [num_heads, R, V_d], float32 or wider."""
        out = torch.cat([head(features) for head in self.heads[:num_heads]])
        # Tied, all of them read the same matrix, and together they read it once.
        logits = (self.lm_head or self.borrowed.logits)(out) if self.is_tied else out
        return widened(logits).unflatten(0, (num_heads, -1))
