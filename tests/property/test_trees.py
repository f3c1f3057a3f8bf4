"""Laws every draft tree obeys, against definitions too slow to ship."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.maths.trees import (
    ancestor_bits,
    ancestor_mask,
    check_parents,
    children,
    depths,
    expected_accepted,
    medusa_tree,
    optimal_tree,
    path_products,
    paths,
    positions,
    rerank,
)

chances = st.floats(0.0, 1.0)
untimed = settings(deadline=None)  # the machine's load is not the code's fault


def trees(max_nodes: int) -> st.SearchStrategy[list[int]]:
    return st.integers(0, max_nodes).flatmap(
        lambda n: st.tuples(*(st.integers(-1, node - 1) for node in range(n))).map(list)
    )


def walk_up(parents: list[int], node: int) -> set[int]:
    """The node and its ancestors, by following the links."""
    seen = set()
    while node >= 0:
        seen.add(node)
        node = parents[node]
    return seen


@untimed
@given(trees(150))
def test_mask_bits_and_depths_agree_with_the_links(parents: list[int]) -> None:
    check_parents(parents)
    mask, bits, depth = ancestor_mask(parents), ancestor_bits(parents), depths(parents)
    assert mask.shape == (len(parents), len(parents))
    assert bits.shape == (len(parents), -(-len(parents) // 64))
    for node in range(len(parents)):
        family = walk_up(parents, node)
        assert set(mask[node].nonzero().flatten().tolist()) == family
        words = [word % 2**64 for word in bits[node].tolist()]
        assert sum(word << 64 * w for w, word in enumerate(words)) == sum(1 << j for j in family)
        assert depth[node] == len(family) - 1


@untimed
@given(trees(40), st.integers(0, 1000))
def test_paths_cover_the_tree_in_consecutive_positions(
    parents: list[int], num_committed: int
) -> None:
    table, position = children(parents), positions(parents, num_committed)
    leaves = [path[-1] for path in paths(parents)]
    assert leaves == [node for node in range(len(parents)) if not table[node]]
    assert set().union(*paths(parents)) == set(range(len(parents)))
    for path in paths(parents):
        for parent, node in zip([-1, *path], path, strict=False):
            assert parents[node] == parent
            assert node in table[parent]
        steps = range(num_committed, num_committed + len(path))
        assert position[path].tolist() == list(steps)
    assert sum(map(len, table)) == len(parents)


@untimed
@given(trees(9), st.data())
def test_rerank_finds_the_best_closed_set(parents: list[int], data: st.DataObject) -> None:
    n = len(parents)
    acceptance = data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=n, max_size=n))
    budget = data.draw(st.integers(0, n))
    values = path_products(parents, acceptance)
    small, kept = rerank(parents, values, budget)

    check_parents(small)
    assert kept == sorted(set(kept))
    assert [(-1 if p < 0 else kept[p]) for p in small] == [parents[old] for old in kept]
    best = max(
        sum(values[node] for node in chosen)
        for chosen in itertools.combinations(range(n), budget)
        if all(parents[node] in (-1, *chosen) for node in chosen)
    )
    assert sum(values[node] for node in kept) == best  # sums of powers of two are exact


@untimed
@given(trees(20), st.data())
def test_rerank_is_closed_for_any_scores(parents: list[int], data: st.DataObject) -> None:
    n = len(parents)
    scores = data.draw(st.lists(st.floats(allow_nan=False), min_size=n, max_size=n))
    small, kept = rerank(parents, scores, data.draw(st.integers(0, n + 2)))
    check_parents(small)
    assert [(-1 if p < 0 else kept[p]) for p in small] == [parents[old] for old in kept]


@untimed
@given(st.lists(st.lists(chances, min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_no_tree_beats_the_optimal_one(levels: list[list[float]], data: st.DataObject) -> None:
    num_nodes = data.draw(st.integers(1, 12))
    parents, ranks = optimal_tree(levels, num_nodes, len(levels))
    check_parents(parents)
    assert max(depths(parents)) < len(levels)

    # Any other tree of as many nodes: pick nodes of the full tree, parents first.
    every_path = [
        path
        for depth in range(1, len(levels) + 1)
        for path in itertools.product(*(range(len(row)) for row in levels[:depth]))
    ]
    chosen: set[tuple[int, ...]] = {()}
    while len(chosen) <= len(parents):
        open_paths = [p for p in every_path if p not in chosen and p[:-1] in chosen]
        chosen.add(data.draw(st.sampled_from(open_paths)))
    other_parents, other_ranks = medusa_tree(chosen - {()})
    assert (
        expected_accepted(parents, ranks, levels)
        >= expected_accepted(other_parents, other_ranks, levels) - 1e-12
    )


@untimed
@given(trees(30), st.data())
def test_expected_accepted_is_the_mean_accepted_depth(
    parents: list[int], data: st.DataObject
) -> None:
    """The sum of path products is E[accepted], by walking the law of the accepted path."""
    rank = {node: r for kids in children(parents) for r, node in enumerate(kids)}
    ranks = [rank[node] for node in range(len(parents))]
    weights = data.draw(st.lists(chances, min_size=31, max_size=31))
    row = [w / max(1.0, sum(weights)) for w in weights]
    table = children(parents)

    def mean_below(node: int) -> float:
        return sum(row[ranks[kid]] * (1 + mean_below(kid)) for kid in table[node])

    assert expected_accepted(parents, ranks, [row]) == pytest.approx(mean_below(-1), abs=1e-12)
