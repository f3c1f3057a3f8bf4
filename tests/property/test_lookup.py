"""Lookup drafters against definitions that rescan everything, on texts full of repetitions."""

from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sequences import sequence
from slipstream.drafters.lookup import continuation_chance
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.suffix import SuffixDrafter, SuffixIndex
from slipstream.maths.trees import check_parents

ALPHABET = 3
tokens = st.integers(0, ALPHABET - 1)
texts = st.lists(tokens, min_size=1, max_size=50)
budgets = st.integers(0, 9)


def growing(text: list[int], cuts: list[int]) -> Iterator[list[int]]:
    """One list that grows to `text`, as seen after each of the chunks that `cuts` make."""
    grown: list[int] = []
    for stop in sorted({cut % len(text) + 1 for cut in cuts} | {len(text)}):
        grown += text[len(grown) : stop]
        yield grown


def common_length(text: list[int], end: int, context: list[int]) -> int:
    """How many tokens before `end` equal those at the end of the context."""
    lengths = range(min(end, len(context)) + 1)
    return max(n for n in lengths if text[end - n : end] == context[len(context) - n :])


# ---------------------------------------------------------------------------------------------
# N-grams


def ngram_by_scanning(text: list[int], min_n: int, max_n: int, prefer: str, budget: int):
    for n in range(max_n, min_n - 1, -1):
        ends = [end for end in range(n, len(text)) if text[end - n : end] == text[len(text) - n :]]
        if ends:
            counts = Counter(text[end] for end in ends)
            start = max(ends, key=lambda end: (counts[text[end]] * (prefer == "frequent"), end))
            copied = text[start:]
            while len(copied) < budget:
                copied.append(copied[start - len(text)])
            return copied[:budget]
    return []


@pytest.mark.parametrize("prefer", ["recent", "frequent"])
@given(
    texts, st.lists(st.integers(0, 49), max_size=6), st.integers(1, 3), st.integers(0, 3), budgets
)
def test_the_ngram_index_equals_a_rescan(prefer, text, cuts, min_n, more, budget) -> None:
    drafter = NgramDrafter(min_n, min_n + more, prefer=prefer)
    for grown in growing(text, cuts):
        seq = sequence(grown)
        [draft] = drafter.propose([seq], [budget])
        assert draft.token_ids == ngram_by_scanning(grown, min_n, min_n + more, prefer, budget)
        assert draft.is_chain


# ---------------------------------------------------------------------------------------------
# Suffixes


@given(texts, st.lists(st.integers(0, 49), max_size=6), st.integers(2, 8))
def test_the_suffix_index_equals_a_rescan(text, cuts, longest) -> None:
    index = None
    for grown in growing(text, cuts):
        if index is None:
            index = SuffixIndex()
            index.add(grown)
        index.catch_up()
        want = [(common_length(grown, end, grown), end) for end in range(len(grown) - 1, 1, -1)]
        want = [(min(length, longest), end) for length, end in want if length >= 2]
        assert [(match.length, match.end) for match in index.matches(grown, longest)] == want


@given(st.lists(st.one_of(st.none(), texts), max_size=8), texts, st.integers(2, 8))
def test_texts_come_and_go(changes, context, longest) -> None:
    index, live = SuffixIndex(), []
    for text in changes:
        if text is not None:
            index.add(text)
            index.catch_up()
            live.append(text)
        elif live:
            index.drop_oldest()
            live.pop(0)
        want = [
            (min(common_length(text, end, context), longest), text, end)
            for text in reversed(live)
            for end in range(len(text) - 1, 1, -1)
        ]
        want = [match for match in want if match[0] >= 2]
        found = index.matches(context, longest)
        # Comparing is bounded, and what is left out is what is oldest.
        assert found == want[: len(found)]
        assert len(found) == len(want) or sum(match.length for match in found) >= 512
        assert len(index) == len(live)


def expected_by_scanning(text: list[int], drafter: SuffixDrafter, budget: int) -> float:
    """The most expected accepted tokens over match lengths, from the chances of all strings."""
    most = 0.0
    ends = {end: common_length(text, end, text) for end in range(2, len(text))}
    for length in range(2, drafter.max_depth + 1):
        starts = [end for end, common in ends.items() if common >= length]
        if not any(min(ends[end], drafter.max_depth) == length for end in starts):
            continue
        size = min(budget, int(length * drafter.max_spec_factor))
        chances: dict[tuple[int, ...], float] = {(): 1.0}
        counts = Counter(
            tuple(text[start : start + n])
            for start in starts
            for n in range(1, min(size, len(text) - start) + 1)
        )
        for n in range(1, size + 1):
            for string in product(range(ALPHABET), repeat=n):
                if string in counts and string[:-1] in chances:
                    total = sum(counts[(*string[:-1], last)] for last in range(ALPHABET))
                    chance = continuation_chance(length + n - 1, counts[string], total)
                    chance *= chances[string[:-1]]
                    if chance >= drafter.min_token_prob:
                        chances[string] = chance
        del chances[()]
        most = max(most, sum(sorted(chances.values(), reverse=True)[:size]))
    return most


@given(texts, st.integers(0, 5), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.0, 0.1, 0.4]))
def test_suffix_trees_are_the_likeliest_there_are(text, budget, factor, least) -> None:
    drafter = SuffixDrafter(max_depth=5, max_spec_factor=factor, min_token_prob=least)
    seq = sequence(text[: len(text) // 2])
    drafter.propose([seq], [budget])
    seq.tokens += text[len(text) // 2 :]
    draft, expected = drafter.propose_scored(seq, budget)
    assert expected == pytest.approx(expected_by_scanning(text, drafter, budget), abs=1e-12)
    assert (expected == 0) == (len(draft) == 0)


@given(texts, budgets, st.booleans(), st.frozensets(tokens, max_size=2))
def test_suffix_drafts_are_sound(text, budget, trees, stop_ids) -> None:
    drafter = SuffixDrafter(max_spec_factor=3.0, min_token_prob=0.0, trees=trees)
    draft, expected = drafter.propose_scored(sequence(text, stop_ids=stop_ids), budget)
    assert expected <= len(draft) <= budget
    assert trees or draft.is_chain
    check_parents(draft.parents)
    edges = list(zip(draft.parents, draft.token_ids, strict=True))
    assert len(set(edges)) == len(edges), "siblings carry the same token"
    assert not stop_ids & set(draft.token_ids)
    # Every path was said before, behind the pair of tokens it now follows.
    paths: list[list[int]] = []
    for parent, token in edges:
        paths.append([*(paths[parent] if parent >= 0 else text[-2:]), token])
        windows = [text[i : i + len(paths[-1])] for i in range(len(text))]
        assert paths[-1] in windows


@given(texts, budgets)
def test_alternatives_never_lower_what_is_expected(text, budget) -> None:
    seq = sequence(text)
    tree, chain = (
        SuffixDrafter(trees=trees).propose_scored(seq, budget) for trees in (True, False)
    )
    assert tree[1] >= chain[1] - 1e-12


@given(texts, texts, st.sampled_from([(0, b""), (5, b"other")]), budgets)
def test_no_text_reaches_a_stranger(own, others, sharing, budget) -> None:
    """Drafts are those of a drafter that never saw the other's text, alive or finished."""
    num_cached, salt = sharing
    alone = SuffixDrafter(max_cached_requests=num_cached)
    crowded = SuffixDrafter(max_cached_requests=num_cached)
    other = sequence(others, seq_id=1, salt=salt)
    crowded.propose([other], [budget])
    want = alone.propose([sequence(own)], [budget])
    assert crowded.propose([sequence(own)], [budget]) == want
    crowded.forget(0)
    other.finish_reason = "stop"
    crowded.forget(1)
    assert crowded.propose([sequence(own)], [budget]) == want


# ---------------------------------------------------------------------------------------------
# Trust


@given(st.integers(1, 24), st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_chances_are_chances(length, counts) -> None:
    """They leave room for what was never seen, and grow with length and number of matches."""
    total = sum(counts)
    chances = [continuation_chance(length, count, total) for count in counts]
    assert 0 < sum(chances) < 1
    assert continuation_chance(length + 1, counts[0], total) > chances[0]
    assert continuation_chance(length, 2 * counts[0], 2 * total) > chances[0]
