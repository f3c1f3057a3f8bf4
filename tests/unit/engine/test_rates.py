"""Acceptance by node: chains and trees, one sequence and all, and what fades."""

import numpy as np
import pytest

from slipstream.core.draft import NO_DRAFT, Draft, Verdict
from slipstream.engine.rates import FIRST_GUESS, DraftRates


def chain(length: int) -> Draft:
    return Draft([0] * length, list(range(-1, length - 1)))


def accept(length: int) -> Verdict:
    return Verdict(list(range(length)), 0)


def test_a_guess_before_anything_is_known():
    rates = DraftRates(3)
    assert rates.offered([0]).tolist() == [[1.0, 1.0, 1.0]]
    assert rates.accepted([0])[0] == pytest.approx([FIRST_GUESS**i for i in (1, 2, 3)])


def test_chances_are_of_the_path():
    """Two of three tokens always come true: the third never does, the fourth is never asked."""
    rates = DraftRates(4)
    for _ in range(200):
        rates.observe(0, 4, chain(4), accept(2))
    accepted = rates.accepted([0])[0]
    assert accepted == pytest.approx([1, 1, 0, 0], abs=0.05)
    assert (np.diff(accepted) <= 0).all()


def test_deeper_than_ever_drafted_is_taken_to_go_on_alike():
    rates = DraftRates(4)
    for i in range(400):
        rates.observe(0, 1, chain(1), accept(i % 2))
    assert rates.accepted([0])[0] == pytest.approx([0.5, 0.25, 0.125, 0.0625], rel=0.15)


def test_sequences_differ_and_newcomers_take_after_all():
    rates = DraftRates(2)
    for _ in range(100):
        rates.observe(0, 2, chain(2), accept(2))
        rates.observe(1, 2, chain(2), accept(0))
    good, bad, new = rates.accepted([0, 1, 2])[:, 0]
    assert good > 0.9 and bad < 0.1 and 0.4 < new < 0.6


def test_a_sequence_that_is_not_tried_is_forgiven():
    rates = DraftRates(2)
    for _ in range(100):
        rates.observe(0, 2, chain(2), accept(2))
        rates.observe(1, 2, chain(2), accept(0))
    for _ in range(200):
        rates.observe(0, 2, chain(2), accept(2))
        rates.observe(1, 0, NO_DRAFT, accept(0))
    assert rates.accepted([1])[0, 0] > 0.6


def test_what_all_sequences_do_now_replaces_what_they_did():
    rates = DraftRates(1)
    for _ in range(500):
        rates.observe(0, 1, chain(1), accept(1))
    for _ in range(500):
        rates.observe(0, 1, chain(1), accept(0))
    assert rates.accepted([9])[0, 0] < 0.1


def test_offers_are_counted_apart_from_acceptance():
    """Something is found once in four steps, then two tokens of the four allowed, both good."""
    rates = DraftRates(4)
    for i in range(400):
        found = i % 4 == 0
        rates.observe(0, 4, chain(2) if found else NO_DRAFT, accept(2 if found else 0))
    assert rates.offered([0])[0] == pytest.approx([0.25, 0.25, 0, 0], abs=0.06)
    assert rates.accepted([0])[0, :2] == pytest.approx([1, 1], abs=0.1)


def test_a_budget_used_up_says_nothing_of_a_larger_one():
    rates = DraftRates(4)
    for _ in range(100):
        rates.observe(0, 2, chain(2), accept(1))
    assert rates.offered([0]).tolist() == [[1.0] * 4]


def test_trees_follow_their_parents():
    """Siblings 0 and 1, 2 a child of 1: 0 is right 3 times in 10, 1 six times, 2 then always.

    What stands behind 1 cannot be accepted more often than 1 is.
    """
    rates = DraftRates(3)
    draft = Draft([5, 6, 7], [-1, -1, 1])
    for i in range(600):
        path = [0] if i % 10 < 3 else [1, 2] if i % 10 < 9 else []
        rates.observe(0, 3, draft, Verdict(path, 0))
    assert rates.accepted([0])[0] == pytest.approx([0.3, 0.6, 0.6], abs=0.1)


def test_further_siblings_are_guessed_from_what_the_first_left():
    rates = DraftRates(3)
    rates.parents = [-1, -1, -1]
    guesses = rates.accepted([0])[0]
    assert guesses.sum() < 1 and (np.diff(guesses) < 0).all()


def test_forgets():
    rates = DraftRates(1)
    for _ in range(100):
        rates.observe(0, 1, chain(1), accept(0))
        rates.observe(1, 1, chain(1), accept(1))
    before = rates.accepted([0])[0, 0]
    rates.forget(0)
    assert rates.accepted([0])[0, 0] > before + 0.2
    rates.forget(17)  # never seen: aborted before its first step
