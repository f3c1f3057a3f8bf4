r"""Draft trees: their geometry, and which shape to draft.

A tree is a list `parents` over N drafted nodes. Node i continues node `parents[i]`, and -1 is the
root: the last committed token, which is not in the list. A parent comes before its children, so
every question is answered in one pass over the list.

             root
            /    \
           0      1        parents  -1 -1  0  0  1
          / \     |
         2   3    4        a chain  -1  0  1  2  3

The functions here trust their tree; `check_parents` is for the door. Tokens, caches and devices
are not known here: tensors made from a list are on the CPU.

Sources: Medusa (arXiv 2401.10774) for static trees, EAGLE-2 (arXiv 2406.16858) for `expand` and
`rerank`, Sequoia (arXiv 2402.12374) for the value of a shape.
"""

import heapq
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

WORD_BITS = 64

# ---------------------------------------------------------------------------------------------
# Geometry


def check_parents(parents: Sequence[int]) -> None:
    """Refuse a list that is not a tree in topological order.

    Raises:
        ValueError: some node's parent is itself, a later node, or no node at all. Where every
            parent comes first there can be no cycle.
    """
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(
                f"parents[{node}] is {parent}; it must be -1 (the root) or an earlier node"
            )


def depths(parents: Sequence[int]) -> list[int]:
    """Count each node's ancestors within the list, [N]; a child of the root has depth 0.

    A tree that lists its own root as node 0, [-1, 0, 0, 1, 1, 2], has depths [0, 1, 1, 2, 2, 2].
    """
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    return depth


def positions(parents: Sequence[int], num_committed: int) -> Tensor:
    """Return the sequence position of each node, [N] int64: `num_committed` + depth.

    The root is the committed token at `num_committed` - 1. Siblings share a position, so the K/V
    of whichever path is accepted was already rotated for the place it ends up in.
    """
    return torch.tensor(depths(parents), dtype=torch.int64) + num_committed


def ancestor_bits(parents: Sequence[int]) -> Tensor:
    """Return who attends to whom, one bit per pair, [N, ceil(N / 64)] int64.

    Bit j % 64 of word j // 64 in row i is set where node j is an ancestor of node i or i itself.
    Bit 63 is the sign of its word.
    """
    rows: list[int] = []
    for node, parent in enumerate(parents):
        rows.append((0 if parent < 0 else rows[parent]) | 1 << node)
    num_words = -(-len(rows) // WORD_BITS)
    packed = b"".join(row.to_bytes(8 * num_words, "little") for row in rows)
    return torch.from_numpy(np.frombuffer(packed, "<i8").astype(np.int64)).view(
        len(rows), num_words
    )


def ancestor_mask(parents: Sequence[int]) -> Tensor:
    """Return `ancestor_bits` unpacked, [N, N] bool: row i is true at i and its ancestors."""
    bits = ancestor_bits(parents).unsqueeze(-1) >> torch.arange(WORD_BITS)  # [N, words, 64]
    return (bits & 1).bool().flatten(1)[:, : len(parents)]


def children(parents: Sequence[int]) -> list[list[int]]:
    """List each node's children in order; the last entry, index -1, holds the root's."""
    nodes: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        nodes[parent].append(node)
    return nodes


def paths(parents: Sequence[int]) -> list[list[int]]:
    """List the nodes from the root down to each leaf, leaves in order."""
    to_node: list[list[int]] = []
    for node, parent in enumerate(parents):
        to_node.append([*(() if parent < 0 else to_node[parent]), node])
    inner = set(parents)
    return [path for path in to_node if path[-1] not in inner]


# ---------------------------------------------------------------------------------------------
# Value


def path_products(parents: Sequence[int], acceptance: Sequence[float]) -> list[float]:
    """Multiply along each path: the chance that a node is on the accepted path, [N].

    Args:
        parents: the tree.
        acceptance: the chance that a node is accepted once its parent is, [N].
    """
    products: list[float] = []
    for parent, chance in zip(parents, acceptance, strict=True):
        products.append(chance if parent < 0 else products[parent] * chance)
    return products


def expected_accepted(
    parents: Sequence[int], ranks: Sequence[int], rank_acceptance: Sequence[Sequence[float]]
) -> float:
    """Return the mean number of accepted nodes of a tree whose nodes are ranked guesses.

    The step emits one token more. `ranks` is [N]; `rank_acceptance` is as in `optimal_tree`.
    """
    acceptance = [
        _level(rank_acceptance, depth)[rank]
        for depth, rank in zip(depths(parents), ranks, strict=True)
    ]
    return sum(path_products(parents, acceptance))


def _level(rank_acceptance: Sequence[Sequence[float]], depth: int) -> Sequence[float]:
    return rank_acceptance[min(depth, len(rank_acceptance) - 1)]


# ---------------------------------------------------------------------------------------------
# Shapes drawn in advance


def chain(num_nodes: int) -> list[int]:
    """Return the tree in which every node continues the one before it."""
    return list(range(-1, num_nodes - 1))


def medusa_tree(rank_paths: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Build the tree of a list of rank paths, level by level.

    The path (0, 2) is the node that guesses the third best token of head 1 after the best token
    of head 0.

    Returns:
        parents: the tree, [N].
        ranks: the rank each node guesses, the last element of its path, [N].

    Raises:
        ValueError: a path is empty, occurs twice, or has no parent in the list.
    """
    parents: list[int] = []
    ranks: list[int] = []
    nodes: dict[tuple[int, ...], int] = {(): -1}
    for path in sorted(map(tuple, rank_paths), key=lambda path: (len(path), path)):
        if path in nodes:
            raise ValueError(f"rank path {path} is empty or occurs twice")
        if path[:-1] not in nodes:
            raise ValueError(f"rank path {path} needs its parent {path[:-1]} in the list")
        nodes[path] = len(parents)
        parents.append(nodes[path[:-1]])
        ranks.append(path[-1])
    return parents, ranks


def optimal_tree(
    rank_acceptance: Sequence[Sequence[float]], num_nodes: int, max_depth: int
) -> tuple[list[int], list[int]]:
    """Build the tree with the most expected accepted tokens.

    Nodes come in order of value, so the first m of them are the optimal tree of m nodes: one
    table serves every budget. Greedy is exact because values add up and never grow along a path:
    the best m of all possible nodes are already closed under parents.

    Args:
        rank_acceptance: `[k][r]` is the chance, in 0..1, that rank r is accepted at depth k once
            its parent is. Levels past the last row repeat it: one row per head gives Medusa's
            static tree, a single row Sequoia's.
        num_nodes: nodes wanted; fewer come back where depth and ranks allow no more.
        max_depth: levels below the root, at least 1.

    Returns:
        parents: the tree, [N].
        ranks: the rank each node guesses, [N].
    """
    parents: list[int] = []
    ranks: list[int] = []
    # Smallest first: minus the value, then the shallower, the earlier parent, the better rank.
    heap = [(-chance, 0, -1, rank) for rank, chance in enumerate(_level(rank_acceptance, 0))]
    heapq.heapify(heap)
    while heap and len(parents) < num_nodes:
        value, depth, parent, rank = heapq.heappop(heap)
        node = len(parents)
        parents.append(parent)
        ranks.append(rank)
        if depth + 1 < max_depth:
            for child_rank, chance in enumerate(_level(rank_acceptance, depth + 1)):
                heapq.heappush(heap, (value * chance, depth + 1, node, child_rank))
    return parents, ranks


# ---------------------------------------------------------------------------------------------
# Shapes grown while drafting


def expand(
    scores: Tensor,  # [..., F]
    child_log_q: Tensor,  # [..., F, C]
    width: int,
) -> tuple[Tensor, Tensor]:
    """Score one new level of the tree and choose the nodes that will be expanded next.

    Args:
        scores: path scores (sums of log q) of the F nodes being expanded.
        child_log_q: log q of the C children picked for each of them.
        width: size of the next frontier; at most F * C.

    Returns:
        scores: path scores of all candidates, [..., F * C]; candidate f * C + c is child c of
            node f. All of them are kept for `rerank`.
        frontier: the `width` best candidates, best first, ties to the earlier, [..., width] int64.
    """
    candidates = (scores.unsqueeze(-1) + child_log_q).flatten(-2)
    order = candidates.argsort(dim=-1, descending=True, stable=True)
    return candidates, order[..., :width]


def rerank(
    parents: Sequence[int], scores: Sequence[float], budget: int
) -> tuple[list[int], list[int]]:
    """Cut a tree down to its `budget` best nodes.

    Equal scores prefer the earlier node, and a node never outranks its parent (scores that have
    been calibrated or rounded may say otherwise), so what is kept is closed under parents.

    Args:
        parents: the tree, [N].
        scores: path scores, [N], such as sums of log q.
        budget: nodes to keep.

    Returns:
        parents: the smaller tree, renumbered, in the old order.
        kept: the old index of each of its nodes, ascending.
    """
    bounded: list[float] = []
    for parent, score in zip(parents, scores, strict=True):
        bounded.append(score if parent < 0 else min(score, bounded[parent]))
    best_first = sorted(range(len(parents)), key=bounded.__getitem__, reverse=True)
    kept = sorted(best_first[:budget])
    renumbered = {-1: -1} | {old: new for new, old in enumerate(kept)}
    return [renumbered[parents[old]] for old in kept], kept
