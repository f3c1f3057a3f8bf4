"""What a drafter proposes and what a verifier decides, for one sequence and one step.

A draft is always a tree. A chain is the tree whose node i has parent i - 1:

    parents  -1   0   1            -1  -1   0   0   1
             a -> b -> c            a   b
    chain                          /|   |             tree: a and b are alternatives for the
                                  c d   e             next token, c and d continue a
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed continuations of one sequence.

    Attributes:
        token_ids: one token per node, N nodes.
        parents: the node each node continues; -1 continues the committed tokens. A parent comes
            before its children.
        probs: q, the distribution each token was sampled from, [N, V] float32; None when the
            draft counts as certain (deterministic, or judged by a rule that needs no q).
        is_predicted: the tokens are from the text a client expects; they are counted apart.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: Tensor | None = None
    is_predicted: bool = False

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def child(self, node: int, token: int) -> int | None:
        """The node that continues `node` (-1: the committed tokens) with `token`, if any does."""
        for index, parent in enumerate(self.parents):
            if parent == node and self.token_ids[index] == token:
                return index
        return None

    def clipped(self, max_depth: int) -> "Draft":
        """The nodes at most `max_depth` tokens ahead; deeper ones could never be committed."""
        if len(self) <= max_depth:
            return self
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return self.only([node for node, depth in enumerate(depths) if depth <= max_depth])

    def only(self, kept: list[int]) -> "Draft":
        """Some of the nodes, ascending; none without its parent."""
        if len(kept) == len(self):
            return self
        renumbered = {-1: -1} | {node: index for index, node in enumerate(kept)}
        return Draft(
            [self.token_ids[node] for node in kept],
            [renumbered[self.parents[node]] for node in kept],
            None if self.probs is None else self.probs[kept],
            self.is_predicted,
        )


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for one sequence: an accepted path and one further token.

    Attributes:
        path: accepted nodes from the root down, indices into the draft.
        next_token: the recovered token where the path left the draft, or the bonus token when
            the path ended at a leaf.
    """

    path: list[int]
    next_token: int
