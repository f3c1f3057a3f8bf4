"""What one forward pass of the target model yields."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Results of one packed pass over B sequences.

    Attributes:
        logits: one row wherever a token can be sampled, [R, V] float32. A sequence with a draft
            of N nodes owns 1 + N rows in a run: first what follows its committed tokens, then
            what follows each node.
        first_rows: per sequence, its first row; None if the pass stopped short of its end.
        hidden: final hidden states of every packed token, [T, hidden].
        taps: layer -> residual stream entering it, [T, hidden].
        first_tokens: per sequence, where its tokens begin in those.
    """

    logits: Tensor
    first_rows: list[int | None]
    hidden: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)
    first_tokens: list[int] = field(default_factory=list)
