"""Prompt lookup: copy what followed the last few tokens when they occurred before.

Costs next to nothing and is right wherever an answer repeats its prompt or itself: edits,
extraction, code, loops. An index grows with the sequence, so that no step ever rescans it.

Source: prompt lookup decoding (Saxena, 2023), as in vLLM's `ngram` method.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from itertools import accumulate, cycle, islice, takewhile
from operator import mul

from slipstream.core.draft import NO_DRAFT, Draft, Verdict
from slipstream.core.errors import ConfigError
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOutput
from slipstream.drafters.lookup import continuation_chance, match_length
from slipstream.maths.trees import chain

PREFERENCES = ("recent", "frequent")

# Matches are followed backwards this far, past max_n, to judge them. Further says nothing more.
_LONGEST_JUDGED = 24


class NgramIndex:
    """Where a growing list of tokens went on after each of its n-grams.

        tokens    a b c x . . . . a b c
                        |         ^^^^^ the end, looked up
                        continuation of (a b c), (b c)

    An n-gram is indexed once the token behind it is known, so the end never finds itself.

    Args:
        min_n, max_n: lengths of n-grams, both included.
        prefer: "recent" remembers the last continuation; "frequent" the one whose first token
            came most often, and of those the last.
    """

    def __init__(self, min_n: int, max_n: int, prefer: str):
        self.min_n = min_n
        self.max_n = max_n
        self._continuations: dict[tuple[int, ...], int] = {}
        self._is_frequent = prefer == "frequent"
        self._counts: Counter[tuple[int, ...]] = Counter()  # n-grams with the token behind them
        self._num_indexed = 0

    def catch_up(self, tokens: Seq[int]) -> None:
        """Index what was appended since the last call, in O(max_n^2) per token."""
        for end in range(self._num_indexed, len(tokens)):
            for n in range(self.min_n, min(self.max_n, end) + 1):
                ngram = tuple(tokens[end - n : end])
                if not self._is_frequent or self._leads(ngram, tokens, end):
                    self._continuations[ngram] = end
        self._num_indexed = len(tokens)

    def find(self, tokens: Seq[int]) -> int | None:
        """Where the longest indexed n-gram at the end of `tokens` went on; None if none is."""
        for n in range(min(self.max_n, len(tokens)), self.min_n - 1, -1):
            start = self._continuations.get(tuple(tokens[-n:]))
            if start is not None:
                return start
        return None

    def _leads(self, ngram: tuple[int, ...], tokens: Seq[int], end: int) -> bool:
        """Count the token at `end`; whether none came more often behind the n-gram."""
        followed = (*ngram, tokens[end])
        self._counts[followed] += 1
        known = self._continuations.get(ngram, end)
        return self._counts[followed] >= self._counts[(*ngram, tokens[known])]


class NgramDrafter:
    """Drafts chains by prompt lookup within each sequence.

    Args:
        min_n, max_n: shortest and longest n-gram looked up; the longest that is found counts.
        prefer: which of its continuations is copied, "recent" or "frequent".

    Raises:
        ConfigError: lengths that cannot be, or an unknown preference.
    """

    taps: Seq[int] = ()

    def __init__(self, min_n: int = 2, max_n: int = 5, *, prefer: str = "recent"):
        if not 1 <= min_n <= max_n:
            raise ConfigError(
                f"n-grams from {min_n} to {max_n} tokens cannot be looked up; "
                "prompt_lookup_min must be 1 or more and prompt_lookup_max no less"
            )
        if prefer not in PREFERENCES:
            raise ConfigError(f"prefer must be one of {', '.join(PREFERENCES)}, not {prefer!r}")
        self.min_n = min_n
        self.max_n = max_n
        self.prefer = prefer
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [
            self.propose_scored(seq, budget)[0] for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def propose_scored(self, seq: Sequence, budget: int) -> tuple[Draft, float]:
        """A draft for one sequence, and how many of its tokens are expected to be accepted."""
        if budget == 0:
            return NO_DRAFT, 0.0
        index = self._indexes.get(seq.seq_id)
        if index is None:
            index = self._indexes[seq.seq_id] = NgramIndex(self.min_n, self.max_n, self.prefer)
        index.catch_up(seq.tokens)
        start = index.find(seq.tokens)
        if start is None:
            return NO_DRAFT, 0.0
        # A copy that reaches the end of what is known goes on with itself: periodic text.
        copied = islice(cycle(seq.tokens[start : start + budget]), budget)
        # Drafting the end gains nothing: the pass yields one token more than it accepts anyway.
        token_ids = list(takewhile(lambda token: token not in seq.stop_ids, copied))
        length = match_length(seq.tokens, start, seq.tokens, _LONGEST_JUDGED)
        chances = (continuation_chance(length + i, 1, 1) for i in range(len(token_ids)))
        return Draft(token_ids, chain(len(token_ids))), sum(accumulate(chances, mul))

    def observe(
        self, seqs: Seq[Sequence], target: TargetOutput, verdicts: Seq[Verdict | None]
    ) -> None:
        pass  # committed tokens are read where they are, at the next proposal

    def forget(self, seq_id: int) -> None:
        self._indexes.pop(seq_id, None)
