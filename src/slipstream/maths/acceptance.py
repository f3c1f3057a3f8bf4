"""Which drafted tokens become final: the rules that make speculation lossless.

Drafts are trees, padded to one batch; a chain is the tree whose node i has parent i - 1. Sequence b
owns the target's distributions p(. | node) after the root (node -1, the committed tokens) and
after each of its nodes. A rule walks a path of accepted nodes and emits one further token: the
recovered token where the path leaves the draft, the bonus token where it ends at a leaf.

    match   sample the target at each node as plain decoding would; go down while a child carries
            the sample. The output *is* the plain output, whatever was drafted and however.
    ratio   accept a child with probability min(1, p / q), else go on with the residual (p - q)+.
            Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318; for siblings
            recursively: SpecInfer, arXiv 2305.09781 (with replacement), Sequoia, arXiv 2402.12374
            (without).
    block   accept the longest prefix a joint test allows; chains only, never shorter than `ratio`
            in expectation. Sun et al., arXiv 2403.10444.

Where the randomness comes from is part of each rule's type. `match` samples with the noise of
positions, which drafters may share. `ratio` and `block` need `FreshNoise`, independent of what
drew the draft and of every earlier step, and drafts that say so (`DraftBatch.q`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# p after A places: (sequences [A], nodes [A]) -> probabilities [A, V], float32 or wider.
Target = Callable[[Tensor, Tensor], Tensor]
# A sample of p at each place: (sequences [A], nodes [A]) -> tokens [A].
Draw = Callable[[Tensor, Tensor], Tensor]


class FreshNoise(Protocol):
    """Decisions independent of the draft, for B sequences in one step."""

    def accepts(self, seqs: Tensor, nodes: Tensor, p: Tensor, q: Tensor) -> Tensor:
        """Whether to accept each node, with probability min(1, p / q): [A] bool.

        p = 0 is never accepted, p >= q always.
        """

    def recovers(self, seqs: Tensor, depths: Tensor | int, weights: Tensor) -> Tensor:
        """A token of each row of unnormalised weights [A, V], `depths` ahead: [A] int64."""


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Drafts of B sequences, at most K nodes each.

    Attributes:
        tokens: [B, K] int64; -1 past the end of a draft.
        parents: [B, K] int64; -1 for children of the root, less than the node's own index. Under
            `match`, children of one node carry different tokens.
        q: [B, K, V], the distribution each token was drawn from with noise of its own, exactly as
            it was drawn. `ratio` and `block` need it, unless
        certain: drafts are deterministic given the past, so that q is 1 at each drafted token.
    """

    tokens: Tensor
    parents: Tensor
    q: Tensor | None = None
    certain: bool = False

    def __post_init__(self) -> None:
        if self.tokens.shape != self.parents.shape or self.tokens.dim() != 2:
            raise ValueError(
                f"tokens {list(self.tokens.shape)} and parents {list(self.parents.shape)} "
                "must have one shape [B, K]"
            )
        if self.q is not None and self.q.shape[:2] != self.tokens.shape:
            raise ValueError(
                f"q {list(self.q.shape)} must begin with the shape of tokens "
                f"{list(self.tokens.shape)}"
            )
        if bool((self.tokens[:, 1:] >= 0).gt(self.tokens[:, :-1] >= 0).any()):
            raise ValueError("tokens must be -1 only past the end of a draft")
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        if bool(((self.parents >= index) | (self.parents < -1))[self.tokens >= 0].any()):
            raise ValueError("parents must be -1 or an earlier node; a draft has a cycle")

    @property
    def lengths(self) -> Tensor:
        """Nodes of each draft: [B]."""
        return (self.tokens >= 0).sum(1)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What became of B drafts.

    Attributes:
        accepted: [B, K] bool; the accepted nodes form a path, in order of index.
        next_tokens: [B] int64, the one further token of each sequence.
    """

    accepted: Tensor
    next_tokens: Tensor


# Rules ---------------------------------------------------------------------------------------


def match(drafts: DraftBatch, draw: Draw) -> Verdicts:
    """Walk down each draft while the target's own sample is among the children.

    Args:
        drafts: of B sequences; q is not needed and not looked at.
        draw: the plain sampler; asked once for every node the walk visits and for no other.
    """
    verdicts, seqs, nodes = _at_the_root(drafts)
    while len(seqs) > 0:
        sampled = draw(seqs, nodes)
        verdicts.next_tokens[seqs] = sampled
        child = drafts.tokens[seqs] == sampled.unsqueeze(1)
        child &= drafts.parents[seqs] == nodes.unsqueeze(1)
        which, nodes = child.nonzero(as_tuple=True)  # siblings differ, so at most one each
        seqs = seqs[which]
        verdicts.accepted[seqs, nodes] = True
    return verdicts


def ratio(
    drafts: DraftBatch, target: Target, noise: FreshNoise, *, replacement: bool = False
) -> Verdicts:
    """Accept with min(1, p / q), else recover from the residual; siblings one after another.

    Args:
        drafts: of B sequences. Siblings were drawn in the order of their index from the same q;
            certain children (no q) are accepted with probability p.
        target: p at the nodes the walk visits.
        noise: fresh.
        replacement: siblings were drawn independently, equal ones kept as separate trials;
            otherwise each was drawn from q without the earlier ones.
    """
    _require(drafts, noise)
    verdicts, seqs, nodes = _at_the_root(drafts)
    depth = 0
    while len(seqs) > 0:
        p = checked(target(seqs, nodes), "p").clone()
        tried = torch.zeros_like(p, dtype=torch.bool)
        chosen = torch.full_like(nodes, -1)
        for rank in range(1, drafts.tokens.shape[1] + 1):
            which, node = _nth_child(drafts, seqs, nodes, rank, chosen < 0)
            if len(which) == 0:
                break
            token = drafts.tokens[seqs[which], node]
            q = _law(drafts, seqs[which], node, like=p[which])
            if rank > 1 and not replacement:
                q = _without(q, tried[which])
            accepted = noise.accepts(seqs[which], node, _at(p[which], token), _drawn(q, token))
            chosen[which[accepted]] = node[accepted]
            rejected = which[~accepted]
            p[rejected] = residual(p[rejected], q[~accepted])
            tried[rejected, token[~accepted]] = True
        ends = chosen < 0
        verdicts.next_tokens[seqs[ends]] = noise.recovers(seqs[ends], depth, p[ends])
        seqs, nodes = seqs[~ends], chosen[~ends]
        verdicts.accepted[seqs, nodes] = True
        depth += 1
    return verdicts


def block(drafts: DraftBatch, target: Target, noise: FreshNoise) -> Verdicts:
    """Accept the longest prefix whose joint test succeeds. Chains only.

    With P_0 = 1 and P_i = min(1, P_{i-1} p(x_i) / q(x_i)), prefix i passes with probability

        h_i = S_i / (S_i + 1 - P_i),   S_i = sum_v (P_i p(v | i) - q(v | i))+

    where q is 0 past the end of the chain, so that h_n = P_n there. The *largest* i that passes
    wins, whatever failed before it, and the further token comes from (P_i p - q)+.
    """
    _require(drafts, noise)
    num_seqs, width = drafts.tokens.shape
    steps = torch.arange(width + 1, device=drafts.tokens.device)
    exists = steps <= drafts.lengths.unsqueeze(1)  # [B, K + 1]
    if bool((drafts.parents != steps[:-1] - 1)[exists[:, 1:]].any()):
        raise ValueError("block verification needs chains; use ratio or match for trees")

    joint = torch.ones_like(exists, dtype=torch.float64)  # P
    passing = torch.zeros_like(joint)  # h
    for i in range(width + 1):  # one prefix at a time, so that what is looked at stays near
        seqs = exists[:, i].nonzero().flatten()
        p, q = _pair(drafts, target, seqs, torch.full_like(seqs, i))
        missing = 1 - joint[seqs, i]
        mass = _left(joint[seqs, i], p, q).sum(-1, dtype=torch.float64)
        passing[seqs, i] = _share(mass, missing)
        if i < width:
            goes_on = exists[seqs, i + 1].nonzero().flatten()
            b, token = seqs[goes_on], drafts.tokens[seqs[goes_on], i]
            joint[b, i + 1] = _joint(joint[b, i], _at(p[goes_on], token), _drawn(q[goes_on], token))

    seqs, nodes = exists[:, 1:].nonzero(as_tuple=True)
    wins = torch.zeros_like(exists)
    wins[seqs, nodes + 1] = noise.accepts(
        seqs, nodes, passing[seqs, nodes + 1], torch.ones_like(passing[seqs, nodes + 1])
    )
    longest = _longest(wins)
    every = torch.arange(num_seqs, device=steps.device)
    p, q = _pair(drafts, target, every, longest)
    left = _left(joint[every, longest], p, q)
    next_tokens = noise.recovers(every, longest, _or_else(left, p))
    return Verdicts(steps[:-1] < longest.unsqueeze(1), next_tokens)


# Their parts ---------------------------------------------------------------------------------


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+ of each row, normalised; p where nothing is left, since then p and q are equal."""
    left = (p - q).clamp(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass, p)


def checked(p: Tensor, name: str) -> Tensor:
    """Rows that are distributions, as they are.

    Raises:
        ValueError: NaN, a negative number, a sum that is not 1, or less than float32.
    """
    if p.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} is {p.dtype}; rules need float32 or wider")
    sums = p.sum(-1)
    if not bool(((sums - 1).abs() < 1e-3).all()) or bool((p.amin(-1) < 0).any()):
        raise ValueError(
            f"{name} has a row that is not a distribution (NaN, negative, or sum != 1)"
        )
    return p


def ratio_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """How often `ratio` accepts one drafted token: sum min(p, q) = 1 - TV. [..., V] -> [...]"""
    return torch.minimum(p, q).sum(-1)


def coupled_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """How often draft and target agree when they run the same race. [..., V] -> [...]

    sum_x 1 / sum_y max(p_y / p_x, q_y / q_x), between (1 - TV) / (1 + TV) and 1 - TV.
    Source: Daliri, Musco and Suresh, arXiv 2408.07978.
    """
    both = torch.minimum(p, q) > 0
    p_x, q_x = p.masked_fill(~both, 1).unsqueeze(-1), q.masked_fill(~both, 1).unsqueeze(-1)
    worst = torch.maximum(p.unsqueeze(-2) / p_x, q.unsqueeze(-2) / q_x).sum(-1)
    return (both / worst).sum(-1)


def _at_the_root(drafts: DraftBatch) -> tuple[Verdicts, Tensor, Tensor]:
    num_seqs = drafts.tokens.shape[0]
    seqs = torch.arange(num_seqs, device=drafts.tokens.device)
    empty = torch.zeros_like(drafts.tokens, dtype=torch.bool)
    return Verdicts(empty, torch.full_like(seqs, -1)), seqs, torch.full_like(seqs, -1)


def _require(drafts: DraftBatch, noise: FreshNoise) -> None:
    if drafts.q is None and not drafts.certain and bool((drafts.tokens >= 0).any()):
        raise ValueError("q is missing; ratio and block need it, or drafts that are `certain`")
    if not (hasattr(noise, "accepts") and hasattr(noise, "recovers")):
        raise TypeError("ratio and block need FreshNoise; noise shared with the drafter is biased")


def _nth_child(
    drafts: DraftBatch, seqs: Tensor, nodes: Tensor, rank: int, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """Which of A places have a child of that rank (from 1) and want it, and that child."""
    is_child = (drafts.parents[seqs] == nodes.unsqueeze(1)) & (drafts.tokens[seqs] >= 0)
    is_nth = is_child & (is_child.cumsum(1) == rank) & wanted.unsqueeze(1)
    which, child = is_nth.nonzero(as_tuple=True)
    return which, child


def _law(drafts: DraftBatch, seqs: Tensor, nodes: Tensor, *, like: Tensor) -> Tensor:
    """What each node was drawn from, as rows like those of p: its q, or certainty."""
    tokens = drafts.tokens[seqs, nodes].unsqueeze(-1)
    if bool((tokens >= like.shape[-1]).any()):
        raise ValueError(f"tokens has id {int(tokens.max())}, p has {like.shape[-1]} tokens")
    if drafts.q is None:
        return torch.zeros_like(like).scatter_(-1, tokens, 1.0)
    if drafts.q.shape[-1] != like.shape[-1]:
        raise ValueError(f"q has {drafts.q.shape[-1]} tokens, p has {like.shape[-1]}")
    return checked(drafts.q[seqs, nodes].to(like.dtype), "q")


def _without(q: Tensor, tried: Tensor) -> Tensor:
    """q after drawing the `tried` tokens [A, V] from it without replacement."""
    q = q.masked_fill(tried, 0.0)
    return q / q.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)


def _drawn(q: Tensor, tokens: Tensor) -> Tensor:
    """q of the tokens that were drawn from it, which cannot be 0."""
    q_x = _at(q, tokens)
    if bool((q_x <= 0).any()):
        raise ValueError("q is 0 at a drafted token, so q is not what it was drawn from")
    return q_x


def _joint(before: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
    """P_i of `block`, capped at 1 at every position."""
    return (before * (p_x / q_x)).clamp(max=1)


def _pair(
    drafts: DraftBatch, target: Target, seqs: Tensor, prefixes: Tensor
) -> tuple[Tensor, Tensor]:
    """p after prefixes of chains, and the q of the nodes that follow; 0 where none does."""
    p = checked(target(seqs, prefixes - 1), "p")
    q = torch.zeros_like(p)
    which = (prefixes < drafts.lengths[seqs]).nonzero().flatten()
    if len(which) > 0:
        q[which] = _law(drafts, seqs[which], prefixes[which], like=p[which])
    return p, q


def _left(joint: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """(P_i p - q)+ of `block`, not normalised: [A, V]."""
    return (joint.unsqueeze(-1).to(p.dtype) * p - q).clamp(min=0)


def _longest(wins: Tensor) -> Tensor:
    """The largest prefix that passed its test, [B, K + 1] -> [B]; 0 if none did."""
    steps = torch.arange(wins.shape[1], device=wins.device)
    return torch.where(wins, steps, 0).amax(1)


def _share(mass: Tensor, missing: Tensor) -> Tensor:
    """mass / (mass + missing); 1 where both are 0, since p and q then agree."""
    total = mass + missing
    return torch.where(total > 0, mass / total, 1.0)


def _or_else(weights: Tensor, fallback: Tensor) -> Tensor:
    """Rows of `weights`, or of `fallback` where a row is nothing."""
    return torch.where((weights > 0).any(-1, keepdim=True), weights, fallback)


def _at(rows: Tensor, tokens: Tensor) -> Tensor:
    return rows.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
