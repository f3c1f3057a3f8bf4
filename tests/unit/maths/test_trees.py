"""Draft trees: known shapes, known values, and the messages of bad input."""

import itertools
import math

import pytest
import torch

from slipstream.maths.trees import (
    ancestor_bits,
    ancestor_mask,
    chain,
    check_parents,
    children,
    depths,
    expand,
    expected_accepted,
    medusa_tree,
    optimal_tree,
    path_products,
    paths,
    positions,
    rerank,
)

#        0
#      /   \
#     1     2
#    / \    |
#   3   4   5
TREE = [-1, 0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("parents", "node"),
    [([0], 0), ([-1, 1], 1), ([-1, 2, 0], 1), ([-1, 0, -2], 2), ([-1, 0, 9], 2), ([1, -1], 0)],
)
def test_check_parents_names_the_offending_node(parents: list[int], node: int) -> None:
    with pytest.raises(ValueError, match=rf"parents\[{node}\] is {parents[node]};"):
        check_parents(parents)


@pytest.mark.parametrize("parents", [[], [-1], [-1, -1], TREE, chain(5)])
def test_check_parents_accepts_trees(parents: list[int]) -> None:
    check_parents(parents)


def test_depth_counts_the_ancestors_in_the_list() -> None:
    assert depths(TREE) == [0, 1, 1, 2, 2, 2]
    assert depths([-1, -1, 0, 2]) == [0, 0, 1, 2]


def test_drafted_nodes_take_the_positions_after_the_committed_tokens() -> None:
    drafted = positions([-1, -1, 0, 2], num_committed=10)
    assert drafted.tolist() == [10, 10, 11, 12]
    assert drafted.dtype == torch.int64


def test_a_node_sees_itself_and_its_ancestors() -> None:
    mask = ancestor_mask(TREE)
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]


def test_a_chain_is_causal_across_word_boundaries() -> None:
    for n in (1, 63, 64, 65, 130):
        assert torch.equal(ancestor_mask(chain(n)), torch.ones(n, n, dtype=torch.bool).tril())


def test_bits_fill_words_from_the_lowest() -> None:
    assert ancestor_bits(TREE).tolist() == [[1], [3], [5], [11], [19], [37]]
    bits = ancestor_bits(chain(66))
    assert bits.dtype == torch.int64
    assert bits[62:].tolist() == [[2**63 - 1, 0], [-1, 0], [-1, 1], [-1, 3]]


def test_the_empty_tree_is_a_tree() -> None:
    assert chain(0) == depths([]) == paths([]) == []
    assert children([]) == [[]]
    assert ancestor_mask([]).shape == (0, 0)
    assert ancestor_bits([]).shape == (0, 0)
    assert positions([], 3).shape == (0,)
    assert rerank([], [], 4) == ([], [])


def test_children_and_paths_walk_the_same_tree() -> None:
    assert children(TREE) == [[1, 2], [3, 4], [5], [], [], [], [0]]
    assert paths(TREE) == [[0, 1, 3], [0, 1, 4], [0, 2, 5]]
    assert paths([-1, -1, 0]) == [[1], [0, 2]]
    assert paths(chain(3)) == [[0, 1, 2]]


def test_path_products_multiply_from_the_root() -> None:
    assert path_products([-1, -1, 0, 2], [0.5, 0.25, 0.5, 0.5]) == [0.5, 0.25, 0.25, 0.125]


def test_expected_accepted_of_a_chain_is_the_geometric_sum() -> None:
    assert expected_accepted(chain(5), [0] * 5, [[0.8]]) == pytest.approx(3.68928 - 1)


def test_medusa_tree_sorts_paths_into_levels() -> None:
    parents, ranks = medusa_tree([(0, 0), (1,), [0], (0, 1), (0, 0, 2), (1, 0)])
    assert parents == [-1, -1, 0, 0, 1, 2]
    assert ranks == [0, 1, 0, 1, 0, 2]


@pytest.mark.parametrize(
    ("rank_paths", "message"),
    [
        ([(0,), (1, 0)], r"\(1, 0\) needs its parent \(1,\)"),
        ([(0,), (0,)], r"\(0,\) is empty or occurs twice"),
        ([()], r"\(\) is empty"),
    ],
)
def test_medusa_tree_refuses_paths_without_a_place(
    rank_paths: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        medusa_tree(rank_paths)


def test_optimal_tree_of_medusa_heads_by_hand() -> None:
    # Values: (0) .6, (0,0) .24, (1) .2, (0,0,0)... head 2 repeats head 1: .096, (1,0) .08.
    parents, ranks = optimal_tree([[0.6, 0.2], [0.4, 0.1]], num_nodes=5, max_depth=3)
    assert parents == [-1, 0, -1, 1, 2]
    assert ranks == [0, 0, 1, 0, 0]


def test_optimal_tree_with_sure_guesses_is_a_chain_as_deep_as_allowed() -> None:
    assert optimal_tree([[1.0, 0.0]], 4, max_depth=8) == (chain(4), [0] * 4)
    parents, _ = optimal_tree([[1.0, 0.0]], 100, max_depth=3)
    assert max(depths(parents)) == 2
    assert len(parents) == 2 + 4 + 8  # every node there is


def test_optimal_tree_does_not_need_sorted_ranks() -> None:
    assert optimal_tree([[0.1, 0.7]], 2, max_depth=2) == ([-1, 0], [1, 1])


def sequoia_optimum(acceptance: list[float], num_nodes: int, max_depth: int) -> float:
    """Expected accepted tokens of the best tree, by the dynamic programme of Sequoia.

    best[m] is the value of the best tree of at most m nodes, its root (worth 1) included, within
    the depth reached so far. `split` grows such a tree one child of the root at a time: the next
    child takes m - y of the nodes for a tree of its own, one level less deep.
    """
    best = [1.0] * (num_nodes + 2)
    for _ in range(max_depth):
        split = [1.0] * (num_nodes + 2)
        for chance in acceptance:
            split = [
                max([split[m], *(split[y] + chance * best[m - y] for y in range(1, m))])
                for m in range(num_nodes + 2)
            ]
        best = split
    return best[num_nodes + 1] - 1


@pytest.mark.parametrize(
    ("acceptance", "max_depth"),
    [
        ([0.6, 0.2, 0.1], 4),
        ([0.5, 0.5], 3),
        ([0.9, 0.05, 0.02, 0.01], 12),
        ([0.3, 0.25, 0.2, 0.15], 5),
        ([0.8, 0.0], 6),
    ],
)
def test_optimal_tree_equals_the_dynamic_programme_at_every_size(
    acceptance: list[float], max_depth: int
) -> None:
    parents, ranks = optimal_tree([acceptance], 12, max_depth)
    check_parents(parents)
    assert max(depths(parents)) < max_depth
    for m in range(1, 13):
        greedy = expected_accepted(parents[:m], ranks[:m], [acceptance])
        assert greedy == pytest.approx(sequoia_optimum(acceptance, m, max_depth), abs=1e-12)


def test_expand_scores_every_child_and_chooses_the_best() -> None:
    scores, frontier = expand(
        torch.tensor([-1.0, -2.0]), torch.tensor([[-0.5, -3.0], [-0.25, -2.0]]), width=3
    )
    assert scores.tolist() == [-1.5, -4.0, -2.25, -4.0]
    assert frontier.tolist() == [0, 2, 1]  # 1 and 3 tie


def test_expand_treats_batch_rows_alone() -> None:
    scores = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    log_q = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))
    batched = expand(scores, log_q, 6)
    for row in range(3):
        alone = expand(scores[row], log_q[row], 6)
        assert all(torch.equal(a[row], b) for a, b in zip(batched, alone, strict=True))


def test_rerank_keeps_the_best_and_renumbers() -> None:
    scores = [-0.1, -1.0, -0.3, -1.5, -1.2, -0.4]
    assert rerank(TREE, scores, 4) == ([-1, 0, 0, 2], [0, 1, 2, 5])
    assert rerank(TREE, scores, 0) == ([], [])
    assert rerank(TREE, scores, 99) == (TREE, [0, 1, 2, 3, 4, 5])


def test_rerank_ties_go_to_the_earlier_node() -> None:
    assert rerank(TREE, [-1.0] * 6, 3) == ([-1, 0, 0], [0, 1, 2])
    assert rerank([-1, -1], [-math.inf, -math.inf], 1) == ([-1], [0])


def test_rerank_stays_closed_when_a_child_scores_above_its_parent() -> None:
    assert rerank([-1, -1, 0], [-2.0, -1.0, -0.5], 1) == ([-1], [1])
    for budget, scores in itertools.product(range(5), itertools.permutations(range(4))):
        parents, kept = rerank([-1, 0, -1, 1], scores, budget)
        check_parents(parents)
        assert len(kept) == budget
