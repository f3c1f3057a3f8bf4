"""A constraint on an answer: which tokens may come next, after any tokens.

The interface is a function of the tokens given. A draft is a tree, so the same grammar is asked
about several continuations of one answer; who implements it may keep a state inside, and moves it
to wherever it is asked about.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

from torch import Tensor

from slipstream.core.draft import Draft


class Grammar(Protocol):
    """What an answer may look like, in the model's tokens."""

    def allowed(self, output: Seq[int]) -> Tensor:
        """Whether each token may follow `output`, [V] bool on the CPU; none after a dead end."""

    def accepts(self, output: Seq[int], token: int) -> bool:
        """Whether one token may follow `output`."""

    def fork(self) -> "Grammar":
        """The same constraint for another answer."""


def permitted(draft: Draft, output: Seq[int], grammar: Grammar) -> Draft:
    """A draft without the nodes that could not be committed behind `output`.

    A draft with `probs` is returned as it is: its q already knows the grammar, and what is drawn
    from q may not be dropped by what it carries.
    """
    if draft.probs is not None:
        return draft
    paths: dict[int, list[int]] = {-1: list(output)}
    for node, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        if parent in paths and grammar.accepts(paths[parent], token):
            paths[node] = [*paths[parent], token]
    return draft.only([node for node in paths if node >= 0])
