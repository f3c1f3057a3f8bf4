"""SuffixDecoding on texts small enough to read, and who may learn from whose output."""

import pickle
import weakref
from typing import Any

import pytest
import torch

from sequences import sequence
from slipstream.core.errors import ConfigError
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOutput
from slipstream.drafters.suffix import SuffixDrafter, SuffixIndex

# Behind (1, 2, 3): 4 twice, then 5 or 6; 7 once.
FORKED = [1, 2, 3, 4, 5, 10, 1, 2, 3, 4, 6, 11, 1, 2, 3, 7, 12, 1, 2, 3]


def drafted(tokens: list[int], budget: int = 8, **options: Any) -> tuple[list[int], list[int]]:
    [draft] = SuffixDrafter(**options).propose([sequence(tokens)], [budget])
    assert draft.probs is None
    return draft.token_ids, draft.parents


def test_continuations_become_a_tree_best_first() -> None:
    assert drafted(FORKED, budget=4, max_spec_factor=2) == ([4, 7, 6, 5], [-1, -1, 0, 0])


def test_chains_follow_the_most_frequent() -> None:
    assert drafted(FORKED, trees=False) == ([4, 6, 11], [-1, 0, 1])


def test_as_long_as_the_match_is() -> None:
    text = list(range(10, 30))
    for length in (2, 3, 5):
        tokens = [*text, 1, *text[:length]]
        assert drafted(tokens)[0] == text[length : 2 * length]
        assert drafted(tokens, budget=20, max_spec_factor=2)[0] == text[length : 3 * length]
        assert drafted(tokens, budget=1)[0] == text[length : length + 1]
    tokens = [*text, 1, *text[:7]]
    assert drafted(tokens, max_depth=4)[0] == text[7:11]


def test_unlikely_tokens_are_not_drafted() -> None:
    assert drafted(FORKED, min_token_prob=0.3) == ([4], [-1])
    assert drafted(FORKED, min_token_prob=0.9) == ([], [])


def test_a_shorter_match_that_knows_better_wins() -> None:
    undecided = [9, 1, 2, 5, 0, 9, 1, 2, 6]
    agreeing = [i for other in range(20, 26) for i in (other, 1, 2, 7)]
    assert drafted([*undecided, *agreeing, 9, 1, 2], budget=1)[0] == [7]
    assert drafted([*undecided, 9, 1, 2], budget=1)[0] == [6]


def test_a_single_token_is_no_match() -> None:
    assert drafted([1, 2, 3, 1]) == ([], [])
    assert drafted([1]) == ([], [])
    assert drafted([1, 2]) == ([], [])


def test_ends_before_what_would_end_the_sequence() -> None:
    seq = sequence(FORKED, stop_ids=[4, 12])
    [draft] = SuffixDrafter().propose([seq], [8])
    assert draft.token_ids == [7]  # neither 4, nor what follows it, nor 12


def test_comparing_is_bounded() -> None:
    index = SuffixIndex()
    text = [1] * 3000
    index.add(text)
    index.catch_up()
    assert sum(match.length for match in index.matches(text, 24)) <= 512 + 24


def test_dropped_texts_take_no_memory() -> None:
    index = SuffixIndex()
    empty = len(pickle.dumps(index))
    for start in range(0, 1000, 20):
        index.add(list(range(start, start + 30)))
        index.catch_up()
        if start > 0:
            index.drop_oldest()
    assert len(pickle.dumps(index)) < empty + 1000


def test_forgets_and_starts_again() -> None:
    drafter = SuffixDrafter()
    seq = sequence(FORKED)
    [first] = drafter.propose([seq], [8])
    drafter.forget(seq.seq_id)
    drafter.forget(seq.seq_id)
    assert drafter.propose([seq], [8]) == [first]


def test_more_evidence_is_trusted_more() -> None:
    drafter = SuffixDrafter()
    once, twice, longer = (
        drafter.propose_scored(sequence(tokens, seq_id=seq_id), 2)
        for seq_id, tokens in enumerate(
            (
                [1, 2, 3, 4, 9, 1, 2],
                [1, 2, 3, 4, 9, 1, 2, 3, 4, 8, 1, 2],
                [5, 6, 1, 2, 3, 4, 9, 5, 6, 1, 2],
            )
        )
    )
    assert once[0] == twice[0] == longer[0]
    assert 0 < once[1] < twice[1] < longer[1] < 2


# ---------------------------------------------------------------------------------------------
# Past outputs

SECRET = [11, 12, 13, 14, 15, 16]


def finish(drafter: SuffixDrafter, seq: Sequence, reason: str = "stop") -> None:
    """What the engine does with a sequence that ends."""
    seq.finish_reason = reason
    drafter.forget(seq.seq_id)


def say(drafter: SuffixDrafter, output: list[int], seq_id: int, salt: bytes = b"") -> Sequence:
    """A sequence that a step has seen and that now has this output behind the prompt [8, 9]."""
    seq = sequence([8, 9], seq_id=seq_id, num_prompt=2, salt=salt)
    observe(drafter, seq)
    seq.tokens += output
    return seq


def observe(drafter: SuffixDrafter, seq: Sequence) -> None:
    nothing = torch.empty(0, 1)
    drafter.observe([seq], TargetOutput(nothing, [None], nothing), [None])


def knows(
    drafter: SuffixDrafter, context: list[int], salt: bytes = b"", *, budget: int = 8
) -> list[int]:
    [draft] = drafter.propose([sequence(context, seq_id=99, salt=salt)], [budget])
    drafter.forget(99)
    return draft.token_ids


def test_outputs_are_private_unless_pooled() -> None:
    drafter = SuffixDrafter()
    finish(drafter, say(drafter, SECRET, 0))
    assert knows(drafter, SECRET[:3]) == []


def test_pooled_outputs_help_later_sequences_of_the_same_salt_only() -> None:
    drafter = SuffixDrafter(max_cached_requests=2)
    finish(drafter, say(drafter, SECRET, 0, salt=b"alice"))
    assert knows(drafter, SECRET[:3], salt=b"alice") == SECRET[3:]
    assert knows(drafter, SECRET[:3], salt=b"bob") == []
    assert knows(drafter, SECRET[:3]) == []


def test_prompts_stay_out_of_the_pool() -> None:
    drafter = SuffixDrafter(max_cached_requests=2)
    seq = sequence(SECRET, num_prompt=len(SECRET))
    observe(drafter, seq)
    seq.tokens += [1, 2]
    finish(drafter, seq)
    assert knows(drafter, SECRET[:3]) == []
    assert knows(drafter, SECRET[-2:]) == []


def test_only_what_finished_enters_the_pool() -> None:
    drafter = SuffixDrafter(max_cached_requests=3)
    seq = say(drafter, SECRET, 0)
    assert knows(drafter, SECRET[:3]) == []  # it is still running
    drafter.forget(seq.seq_id)  # preempted
    assert knows(drafter, SECRET[:3]) == []
    for seq_id, reason in enumerate(("abort", "error"), start=1):
        finish(drafter, say(drafter, SECRET, seq_id), reason)
        assert knows(drafter, SECRET[:3]) == []
    observe(drafter, seq)  # it is back
    finish(drafter, seq, "length")
    assert knows(drafter, SECRET[:3]) == SECRET[3:]


def test_the_oldest_output_of_all_salts_makes_room() -> None:
    drafter = SuffixDrafter(max_cached_requests=2)
    outputs = {b"a": [1, 2, 3], b"b": [4, 5, 6], b"c": [7, 8, 9]}
    for seq_id, (salt, output) in enumerate(outputs.items()):
        finish(drafter, say(drafter, output, seq_id, salt))
    known = [knows(drafter, output[:2], salt) for salt, output in outputs.items()]
    assert known == [[], [6], [9]]


def test_the_own_text_goes_before_the_pool_where_both_know_as_much() -> None:
    drafter = SuffixDrafter(max_cached_requests=1)
    finish(drafter, say(drafter, [1, 2, 3], 0))
    assert knows(drafter, [1, 2, 4, 0, 1, 2], budget=1) == [4]
    assert knows(drafter, [5, 6, 4, 0, 1, 2], budget=1) == [3]


def test_nothing_is_kept_of_what_is_forgotten() -> None:
    class Tokens(list[int]):
        """A list that can be watched."""

    drafter = SuffixDrafter()
    seq = sequence([])
    seq.tokens = Tokens(FORKED)
    tokens = weakref.ref(seq.tokens)
    drafter.propose([seq], [8])
    finish(drafter, seq)
    del seq
    assert tokens() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_depth": 1}, "max_tree_depth must be 2 or more, not 1"),
        ({"max_spec_factor": 0.0}, "max_spec_factor must be positive, not 0.0"),
        ({"min_token_prob": 1.5}, "min_token_prob must be in 0 .. 1, not 1.5"),
        ({"max_cached_requests": -1}, "max_cached_requests must be 0 or more, not -1"),
    ],
)
def test_impossible_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SuffixDrafter(**options)
