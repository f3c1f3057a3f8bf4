"""SuffixDecoding: draft as much as the longest repeated suffix deserves, by counted continuations.

The last tokens of a sequence are looked up in its own text and, if asked for, in past outputs.
Every match length proposes the tree of its most likely continuations, no larger than the match is
long; the tree with the most expected accepted tokens wins.

    text     . . a b c x y . . . b c x z . . . a b c x y . . . a b c
                       ^             ^               ^          match length 3: x y (twice)
                                                                match length 2: x y (twice), x z

Where the paper counts in a suffix tree, this walks hash chains as LZ77 compressors do: one entry
per token and nothing to rebalance, whether text is appended or dropped. Counts are made on the
way, from the matches that a fixed amount of comparing reaches, the latest first.

Source: SuffixDecoding (arXiv 2411.04975). Probabilities rank and prune; they are never q.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from slipstream.core.draft import NO_DRAFT, Draft, Verdict
from slipstream.core.errors import ConfigError
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOutput
from slipstream.drafters.lookup import continuation_chance, match_length

# Tokens compared per lookup. Enough for every match in ordinary text, and a bound where a
# single pair of tokens, such as two line ends, makes up most of it.
_MOST_COMPARED = 512

Place = tuple[list[int], int]  # a text, and the index of the next token there


class Match(NamedTuple):
    """A place in a text: `length` tokens before `text[end]` equal the end of the context."""

    length: int
    text: list[int]
    end: int


class SuffixIndex:
    """Every pair of tokens in some texts, each linked to where it occurred before.

        latest[b c] -> (text 7, end 9) -> (text 7, end 2) -> (text 4, end 31) -> None

    A pair is entered once the token behind it, at `end`, is known: a context never finds itself.
    Texts leave in the order they came, so a link that leads to one that has left ends the chain.
    """

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._earlier: dict[int, list[tuple[int, int] | None]] = {}  # text -> by end
        self._latest: dict[tuple[int, int], tuple[int, int]] = {}
        self._newest = -1

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, text: list[int]) -> None:
        """Take in a text for `catch_up` to enter. It may grow until the next one is added."""
        self._newest += 1
        self._texts[self._newest] = text
        self._earlier[self._newest] = [None, None]  # no pair ends before 2

    def catch_up(self) -> None:
        """Enter what the newest text has grown by since the last call, in O(1) per token."""
        text, earlier = self._texts[self._newest], self._earlier[self._newest]
        for end in range(len(earlier), len(text)):
            pair = (text[end - 2], text[end - 1])
            earlier.append(self._latest.get(pair))
            self._latest[pair] = (self._newest, end)

    def drop_oldest(self) -> None:
        """Remove the text that came first, in O(1) per token."""
        number = next(iter(self._texts))
        text = self._texts.pop(number)
        del self._earlier[number]
        for pair in pairwise(text):
            if self._latest.get(pair, (-1, 0))[0] == number:
                del self._latest[pair]

    def matches(self, context: Seq[int], longest: int) -> list[Match]:
        """Places that the last two tokens or more of `context` lead to, latest first.

        Args:
            context: tokens; may be the newest text itself.
            longest: lengths are counted up to this.
        """
        found: list[Match] = []
        num_compared = 0
        place = self._latest.get((context[-2], context[-1])) if len(context) > 1 else None
        while place is not None and place[0] in self._texts and num_compared < _MOST_COMPARED:
            number, end = place
            text = self._texts[number]
            length = match_length(text, end, context, longest)
            found.append(Match(length, text, end))
            num_compared += length
            place = self._earlier[number][end]
        return found


class _Candidate(NamedTuple):
    """A node that may be drafted. The smallest is the likeliest; parent and rank settle ties."""

    minus_chance: float
    parent: int
    rank: int
    token: int
    length: int
    places: list[Place]

    @property
    def chance(self) -> float:
        return -self.minus_chance


@dataclass(frozen=True, slots=True)
class _Live:
    """A sequence being generated, with the index of its own text."""

    seq: Sequence
    index: SuffixIndex


class SuffixDrafter:
    """Drafts trees or chains from repeated suffixes.

    What one sequence says reaches another's drafts only through the pool of its salt, and only
    if `max_cached_requests` allows a pool.

    Args:
        max_depth: longest context matched, in tokens.
        max_spec_factor: drafted tokens per matched token.
        min_token_prob: least estimated chance that a drafted token is accepted.
        max_cached_requests: finished outputs kept for later sequences of the same salt, the
            oldest of all making room; 0 keeps none.
        trees: draft alternatives; otherwise only the likeliest continuation.

    Raises:
        ConfigError: a value that cannot be.
    """

    taps: Seq[int] = ()

    def __init__(
        self,
        max_depth: int = 24,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        max_cached_requests: int = 0,
        *,
        trees: bool = True,
    ):
        for name, value, holds, rule in (
            ("max_tree_depth", max_depth, max_depth >= 2, "2 or more"),
            ("max_spec_factor", max_spec_factor, max_spec_factor > 0, "positive"),
            ("min_token_prob", min_token_prob, 0 <= min_token_prob <= 1, "in 0 .. 1"),
            ("max_cached_requests", max_cached_requests, max_cached_requests >= 0, "0 or more"),
        ):
            if not holds:
                raise ConfigError(f"suffix_decoding_{name} must be {rule}, not {value}")
        self.max_depth = max_depth
        self.max_spec_factor = max_spec_factor
        self.min_token_prob = min_token_prob
        self.max_cached_requests = max_cached_requests
        self.trees = trees
        self._live: dict[int, _Live] = {}
        self._pools: dict[bytes, SuffixIndex] = {}
        self._pooled_salts: deque[bytes] = deque()  # of every pooled output, oldest first

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [
            self.propose_scored(seq, budget)[0] for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def propose_scored(self, seq: Sequence, budget: int) -> tuple[Draft, float]:
        """A draft for one sequence, and how many of its tokens are expected to be accepted."""
        if budget == 0:
            return NO_DRAFT, 0.0
        own = self._index_of(seq)
        own.catch_up()
        best = self._best(own, seq, budget)
        pool = self._pools.get(seq.salt)
        if pool is not None:
            # Of equals, a sequence's own text is the better witness; max keeps the first.
            best = max(best, self._best(pool, seq, budget), key=lambda scored: scored[1])
        return best

    def observe(
        self, seqs: Seq[Sequence], target: TargetOutput, verdicts: Seq[Verdict | None]
    ) -> None:
        if self.max_cached_requests > 0:
            for seq in seqs:
                self._index_of(seq)  # an output is worth keeping even if nothing was drafted

    def forget(self, seq_id: int) -> None:
        live = self._live.pop(seq_id, None)
        if live is None or self.max_cached_requests == 0:
            return
        # A preempted sequence has no finish reason and will be back. Aborted and failed ones have
        # not said what the model would; they never enter the pool.
        if live.seq.finish_reason in ("stop", "length"):
            self._keep(live.seq)

    def _index_of(self, seq: Sequence) -> SuffixIndex:
        live = self._live.get(seq.seq_id)
        if live is None:
            live = self._live[seq.seq_id] = _Live(seq, SuffixIndex())
            live.index.add(seq.tokens)
        return live.index

    def _keep(self, seq: Sequence) -> None:
        """Put an output into the pool of its salt, at the expense of the oldest of all pools."""
        if len(self._pooled_salts) == self.max_cached_requests:
            oldest = self._pooled_salts.popleft()
            self._pools[oldest].drop_oldest()
            if len(self._pools[oldest]) == 0:
                del self._pools[oldest]
        pool = self._pools.setdefault(seq.salt, SuffixIndex())
        pool.add(seq.output)
        pool.catch_up()
        self._pooled_salts.append(seq.salt)

    def _best(self, index: SuffixIndex, seq: Sequence, budget: int) -> tuple[Draft, float]:
        """The most promising draft over all match lengths; of equals, the longest match's."""
        best, most_expected = NO_DRAFT, 0.0
        reached: list[Match] = []
        found = sorted(index.matches(seq.tokens, self.max_depth), key=_length, reverse=True)
        for length, equally_long in groupby(found, key=_length):
            reached += equally_long
            size = int(min(budget, self.max_spec_factor * length))
            if size <= most_expected:
                break  # no draft is expected to have more accepted tokens than it has tokens
            draft, expected = self._grow(reached, length, size, seq.stop_ids)
            if expected > most_expected:
                best, most_expected = draft, expected
        return best, most_expected

    def _grow(
        self, matches: list[Match], length: int, size: int, stop_ids: frozenset[int]
    ) -> tuple[Draft, float]:
        """The `size` likeliest continuations of matches, best first, and the sum of their chances.

        Args:
            matches: all those of at least `length` tokens.
        """
        token_ids: list[int] = []
        parents: list[int] = []
        expected = 0.0
        places = [(match.text, match.end) for match in matches]
        frontier = list(self._continuations(-1, 1.0, length, places, stop_ids))
        heapq.heapify(frontier)
        while frontier and len(token_ids) < size:
            best = heapq.heappop(frontier)
            node = len(token_ids)
            token_ids.append(best.token)
            parents.append(best.parent)
            expected += best.chance
            for candidate in self._continuations(
                node, best.chance, best.length, best.places, stop_ids
            ):
                heapq.heappush(frontier, candidate)
        return Draft(token_ids, parents), expected

    def _continuations(
        self,
        parent: int,
        chance: float,
        length: int,
        places: Iterable[Place],
        stop_ids: frozenset[int],
    ) -> Iterator[_Candidate]:
        """What may continue a node that is accepted with `chance` and ends a match of `length`."""
        followers = _followers(places)
        total = sum(len(behind) for _, behind in followers)
        for rank, (token, behind) in enumerate(followers if self.trees else followers[:1]):
            here = chance * continuation_chance(length, len(behind), total)
            # Drafting the end gains nothing: the pass yields one token more than it accepts anyway.
            if here >= self.min_token_prob and token not in stop_ids:
                yield _Candidate(-here, parent, rank, token, length + 1, behind)


def _followers(places: Iterable[Place]) -> list[tuple[int, list[Place]]]:
    """The tokens at some places, most frequent first, each with the places behind it."""
    behind: dict[int, list[Place]] = {}
    for text, index in places:
        if index < len(text):
            behind.setdefault(text[index], []).append((text, index + 1))
    return sorted(behind.items(), key=lambda item: len(item[1]), reverse=True)


def _length(match: Match) -> int:
    return match.length
