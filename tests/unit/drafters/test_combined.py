"""Lookup first, model where lookup is unsure, and the union of both as a tree."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.draft import NO_DRAFT, Draft, Verdict
from slipstream.drafters.combined import CombinedDrafter, merged
from slipstream.maths.trees import check_parents


class Scripted:
    """Drafts what it is told, and remembers what it was asked for."""

    taps = ()

    def __init__(self, draft, gain=0.0):
        self.draft, self.gain = draft, gain
        self.asked, self.forgotten = [], []

    def propose(self, seqs, budgets):
        self.asked.append(list(budgets))
        return [self.draft if budget else NO_DRAFT for budget in budgets]

    def propose_scored(self, seq, budget):
        return self.draft, self.gain

    def observe(self, seqs, target, verdicts):
        pass

    def forget(self, seq_id):
        self.forgotten.append(seq_id)


SEQ = SimpleNamespace(seq_id=3)
FREE, COSTLY = Draft([1, 2], [-1, 0]), Draft([1, 5], [-1, 0])


@pytest.mark.parametrize(("gain", "asked", "drafted"), [(2.0, 0, FREE), (0.1, 4, COSTLY)])
def test_the_model_drafts_where_lookup_expects_little(gain, asked, drafted):
    model = Scripted(COSTLY)
    combined = CombinedDrafter(Scripted(FREE, gain), model)
    assert combined.propose([SEQ], [4]) == [drafted]
    assert model.asked == [[asked]]


def test_nothing_allowed_is_nothing_asked():
    model = Scripted(COSTLY)
    combined = CombinedDrafter(Scripted(FREE, 5.0), model)
    assert combined.propose([SEQ], [0]) == [NO_DRAFT]
    assert model.asked == [[0]]


def test_a_model_that_is_always_wrong_loses_its_turn():
    model = Scripted(COSTLY)
    combined = CombinedDrafter(Scripted(FREE, 0.5), model)
    for _ in range(100):
        combined.propose([SEQ], [4])
        combined.observe([SEQ], None, [Verdict([], 0)])
    assert model.asked[0] == [4]
    assert model.asked[-1] == [0]


@pytest.mark.parametrize(("num_right", "asked"), [(0, 1), (1, 2), (4, 5), (8, 8)])
def test_chains_of_the_model_are_as_long_as_they_are_of_use(num_right, asked):
    def draft_for_all(seqs, budgets):
        model.asked.append(list(budgets))
        return [Draft([1] * budget, list(range(-1, budget - 1))) for budget in budgets]

    model = Scripted(NO_DRAFT)
    model.propose = draft_for_all
    combined = CombinedDrafter(Scripted(NO_DRAFT, -1.0), model)
    for _ in range(100):
        combined.propose([SEQ], [8])
        path = list(range(min(num_right, *model.asked[-1])))
        combined.observe([SEQ], None, [Verdict(path, 0)])
    assert model.asked[-1] == [asked]


def test_trees_of_the_model_are_its_own_affair():
    model = Scripted(COSTLY)
    combined = CombinedDrafter(Scripted(FREE), model, in_chains=False)
    combined.propose([SEQ], [16])
    assert model.asked == [[16]]


def test_both_forget():
    lookup, model = Scripted(FREE), Scripted(COSTLY)
    CombinedDrafter(lookup, model).forget(3)
    assert lookup.forgotten == model.forgotten == [3]


def test_the_union_shares_what_both_have():
    assert merged(COSTLY, FREE, budget=8) == Draft([1, 5, 2], [-1, 0, 0])
    assert merged(COSTLY, FREE, budget=2) == COSTLY


@st.composite
def drafts(draw):
    tokens, parents, taken = [], [], set()
    for node in range(draw(st.integers(0, 6))):
        edge = (draw(st.integers(-1, node - 1)), draw(st.integers(0, 3)))
        if edge[0] < len(tokens) and edge not in taken:
            taken.add(edge)
            parents.append(edge[0])
            tokens.append(edge[1])
    return Draft(tokens, parents)


def paths(draft):
    found = set()
    for node in range(len(draft)):
        path, at = [], node
        while at >= 0:
            path.append(draft.token_ids[at])
            at = draft.parents[at]
        found.add(tuple(reversed(path)))
    return found


@given(drafts(), drafts(), st.integers(0, 12))
def test_unions_are_trees_of_paths_of_either(first, second, spare):
    budget = len(first) + spare
    union = merged(first, second, budget)
    check_parents(union.parents)
    assert len(union) <= budget
    assert len(set(zip(union.parents, union.token_ids, strict=True))) == len(union)
    assert paths(first) <= paths(union) <= paths(first) | paths(second)
    if spare >= len(second):
        assert paths(union) == paths(first) | paths(second)
