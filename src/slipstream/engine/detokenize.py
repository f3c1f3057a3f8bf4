"""Token ids to text, one at a time, for one sequence; and the strings at which it stops.

Text leaves here only when it is final. Held back are bytes that are not yet a whole UTF-8
character, and text that could still become a stop string:

    bytes of the tokens   ....................E2 80
    text                  emitted | held: a beginning of some stop string

It works on the bytes of single tokens and never decodes a text twice, so a token costs the same at
any length. All state is small and immutable: a fork is a shallow copy.

It does not know tokens that end generation; that is the engine's rule on ids.
"""

import codecs
import copy
from collections.abc import Sequence
from typing import Any, Protocol


class TokenBytes(Protocol):
    """What is needed of a tokenizer."""

    strips_leading_space: bool

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes: ...


class Detokenizer:
    """The text of a growing sequence.

    The texts returned by `push` and at last by `finish` are, joined, the decoded text of all
    tokens, up to the first stop string. First is the one that is complete first; of several
    complete at the same character, the longest.

    Attributes:
        stopped_by: the stop string that was found. The token pushed last completed it, so ids,
            text and K/V are cut right after that token; nothing may be pushed any more.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        stop: Sequence[str] = (),
        *,
        skip_special: bool = True,
        include_stop: bool = False,
    ) -> None:
        """Start an empty text.

        Args:
            tokenizer: gives the bytes of each token.
            stop: strings that end the text; none of them empty.
            skip_special: leave the names of control tokens out of the text.
            include_stop: let the text end with the stop string instead of before it.
        """
        assert all(stop), "an empty stop string would stop everything"
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._include_stop = include_stop
        self._stops = tuple(_Stop(text) for text in stop)
        self._strips_space = tokenizer.strips_leading_space  # until the first byte has come
        self._bytes = b""  # the beginning of a UTF-8 character, at most 3 bytes
        self._held = ""  # text that some stop string begins with
        self._matched = (0,) * len(self._stops)  # how much of each stop string the text ends with

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Add a token and return the text that has become final, often none. May set `stopped_by`.

        With `may_stop` false a stop string that this token completes is text like any other.
        """
        assert self.stopped_by is None, "a token after the end of the text"
        data = self._tokenizer.token_bytes(token_id, skip_special=self._skip_special)
        if self._strips_space and data:
            data = data.removeprefix(b" ")
            self._strips_space = False
        return self._add(data, may_stop=may_stop)

    def finish(self) -> str:
        """The text that was still held back, now that no token follows. May set `stopped_by`."""
        if self.stopped_by is not None:
            return ""
        text = self._add(b"", final=True) + self._held
        self._held = ""
        return text

    def __deepcopy__(self, memo: dict[int, Any]) -> "Detokenizer":
        return copy.copy(self)

    def _add(self, data: bytes, *, may_stop: bool = True, final: bool = False) -> str:
        data = self._bytes + data
        text, num_decoded = codecs.utf_8_decode(data, "replace", final)
        self._bytes = data[num_decoded:]
        if not self._stops:
            return text
        for length, char in enumerate(text, start=1):
            self._matched = tuple(
                stop.advance(matched, char)
                for stop, matched in zip(self._stops, self._matched, strict=True)
            )
            if may_stop and (stop := self._complete()):
                self.stopped_by = stop
                text = self._held + text[:length]
                self._held = ""
                return text if self._include_stop else text.removesuffix(stop)
        text = self._held + text
        num_held = max(map(_Stop.undecided, self._stops, self._matched))
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _complete(self) -> str | None:
        """The longest stop string the text ends with, if any."""
        pairs = zip(self._stops, self._matched, strict=True)
        complete = [stop.text for stop, matched in pairs if matched == len(stop.text)]
        return max(complete, key=len, default=None)


class _Stop:
    """A stop string and its automaton (Knuth, Morris and Pratt 1977).

    The state is how many characters of the stop string the text ends with.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        # borders[n]: length of the longest proper beginning of text[:n] that also ends it.
        self._borders = [0, 0]
        for char in text[1:]:
            self._borders.append(self.advance(self._borders[-1], char))

    def advance(self, matched: int, char: str) -> int:
        """The state after one more character."""
        matched = self.undecided(matched)
        while matched and self.text[matched] != char:
            matched = self._borders[matched]
        return matched + (self.text[matched] == char)

    def undecided(self, matched: int) -> int:
        """How many of the last characters may still become part of a match."""
        return self._borders[matched] if matched == len(self.text) else matched
