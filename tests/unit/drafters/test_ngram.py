"""Prompt lookup on texts small enough to read."""

from typing import Any

import pytest

from sequences import sequence
from slipstream.core.errors import ConfigError
from slipstream.drafters.lookup import continuation_chance
from slipstream.drafters.ngram import NgramDrafter


def drafted(tokens: list[int], budget: int = 4, **options: Any) -> list[int]:
    [draft] = NgramDrafter(**options).propose([sequence(tokens)], [budget])
    assert draft.is_chain and draft.probs is None
    return draft.token_ids


def test_copies_what_followed() -> None:
    assert drafted([1, 2, 3, 4, 5, 6, 7, 8, 1, 2]) == [3, 4, 5, 6]
    assert drafted([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], budget=1) == [3]


def test_the_longest_match_counts_however_old() -> None:
    tokens = [7, 1, 2, 5, 0, 8, 1, 2, 6, 0, 7, 1, 2]
    assert drafted(tokens, budget=1) == [5]
    assert drafted(tokens, budget=1, max_n=2) == [6]


def test_matches_shorter_than_min_n_do_not_count() -> None:
    tokens = [1, 2, 3, 4, 5, 2, 3]
    assert drafted(tokens, min_n=2) == [4, 5, 2, 3]
    assert drafted(tokens, min_n=3) == []


def test_recent_or_frequent() -> None:
    tokens = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 9, 9, 1, 2]
    assert drafted(tokens, budget=2, prefer="recent") == [9, 9]
    # 5 came twice; its last occurrence goes on with 7.
    assert drafted(tokens, budget=2, prefer="frequent") == [5, 7]


def test_of_equally_frequent_ones_the_last() -> None:
    assert drafted([1, 2, 5, 1, 2, 9, 1, 2], budget=1, prefer="frequent") == [9]
    assert drafted([1, 2, 9, 1, 2, 5, 1, 2], budget=1, prefer="frequent") == [5]


def test_the_end_does_not_find_itself() -> None:
    assert drafted([1, 2, 3, 4]) == []
    assert drafted([1, 2]) == []
    assert drafted([1]) == []


def test_periodic_text_goes_on() -> None:
    assert drafted([3, 1, 2, 3, 1, 2, 3], budget=7) == [1, 2, 3, 1, 2, 3, 1]
    assert drafted([4, 4, 4], budget=3) == [4, 4, 4]


def test_ends_before_what_would_end_the_sequence() -> None:
    seq = sequence([1, 2, 3, 4, 9, 6, 1, 2], stop_ids=[9])
    assert NgramDrafter().propose([seq], [6])[0].token_ids == [3, 4]
    seq = sequence([1, 2, 9, 1, 2], stop_ids=[9])
    assert len(NgramDrafter().propose([seq], [6])[0]) == 0


def test_each_sequence_knows_its_own_text_only() -> None:
    drafter = NgramDrafter()
    known = sequence([1, 2, 3, 1, 2], seq_id=0)
    other = sequence([5, 6, 1, 2], seq_id=1)
    drafts = drafter.propose([known, other], [1, 1])
    assert [draft.token_ids for draft in drafts] == [[3], []]


def test_forgets_and_starts_again() -> None:
    drafter = NgramDrafter()
    seq = sequence([1, 2, 3, 1, 2])
    [first] = drafter.propose([seq], [3])
    drafter.forget(seq.seq_id)
    drafter.forget(seq.seq_id)  # nothing is known any more, and that is fine
    assert drafter.propose([seq], [3]) == [first]
    # Another sequence under a forgotten id finds nothing of the old one.
    drafter.forget(seq.seq_id)
    [draft] = drafter.propose([sequence([7, 1, 2], seq_id=seq.seq_id)], [3])
    assert len(draft) == 0


class CountedTokens(list[int]):
    """A list that counts how many of its tokens are read."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Any:
        raise AssertionError("read from the beginning")


@pytest.mark.parametrize("prefer", ["recent", "frequent"])
def test_a_step_reads_as_little_of_a_long_text_as_of_a_short_one(prefer: str) -> None:
    for length in (100, 5000):
        seq = sequence([])
        seq.tokens = CountedTokens(i * i % 97 for i in range(length))
        drafter = NgramDrafter(prefer=prefer)
        drafter.propose([seq], [4])
        before = seq.tokens.num_read
        seq.tokens.append(length * length % 97)
        assert len(drafter.propose([seq], [4])[0]) == 4
        num_read = seq.tokens.num_read - before
        assert num_read < 100


def test_longer_matches_are_trusted_more() -> None:
    drafter = NgramDrafter(max_n=3)
    expected = []
    for length in (2, 3, 6):  # past max_n as well
        text = list(range(10, 10 + length))
        seq = sequence([*text, 1, 2, 3, 4, 0, *text], seq_id=length)
        draft, accepted = drafter.propose_scored(seq, 4)
        assert draft.token_ids == [1, 2, 3, 4]
        expected.append(accepted)
    assert 0 < expected[0] < expected[1] < expected[2] < 4


def test_every_copied_token_makes_the_match_longer() -> None:
    [first, second, third] = [continuation_chance(length, 1, 1) for length in (2, 3, 4)]
    _, expected = NgramDrafter().propose_scored(sequence([1, 2, 3, 4, 5, 6, 1, 2]), 3)
    assert expected == pytest.approx(first * (1 + second * (1 + third)))


def test_no_budget_no_draft() -> None:
    draft, expected = NgramDrafter().propose_scored(sequence([1, 1, 1]), 0)
    assert len(draft) == 0 and expected == 0


@pytest.mark.parametrize("lengths", [(0, 3), (4, 3)])
def test_impossible_lengths(lengths: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="prompt_lookup_min must be 1 or more"):
        NgramDrafter(*lengths)


def test_unknown_preference() -> None:
    with pytest.raises(ConfigError, match="prefer must be one of recent, frequent, not 'first'"):
        NgramDrafter(prefer="first")
