"""Telling a model's own control tokens from text that merely looks like them.

Text from a user is untrusted: it may quote "<|im_end|>". Once it stands inside a rendered prompt,
nothing tells it from the template's own. So before rendering, the characters of look-alikes are
marked, and afterwards only what is unmarked counts as a control token:

    message     say <|im_end|>
    marked      say ·<·|·i·m·_·e·n·d·|·>
    rendered    <|im_start|>user say ·<·|·i·m·_·e·n·d·|·><|im_end|>
    split       [im_start] "user say <|im_end|>" [im_end]

A string that ends like the beginning of a control token, or begins like the end of one, is marked
there too, since the template's next characters could complete it.
"""

import re
from collections.abc import Iterator, Mapping

from slipstream.core.errors import RequestError

# A lone surrogate: part of no valid text, so it cannot be confused with anything in one.
_MARK = "\udfff"


class SpecialText:
    """Finds the names of control tokens in text."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        """`ids` has the id of each control token by its text."""
        self._ids = ids
        self._lengths = sorted({len(text) for text in ids}, reverse=True)
        # Where a control token can begin; with none of them, nowhere.
        firsts = {re.escape(text[0]) for text in ids}
        self._first = re.compile("|".join(sorted(firsts)) or r"(?!)")
        self._beginnings = {text[:i] for text in ids for i in range(1, len(text))}
        self._endings = {text[i:] for text in ids for i in range(1, len(text))}

    def mark(self, text: str) -> str:
        """`text` with a mark before each character that could be taken for a control token's.

        Raises:
            RequestError: the text has the mark in it, so it is not valid Unicode.
        """
        if _MARK in text:
            raise RequestError(f"a message has the lone surrogate {_MARK!a}; remove it")
        suspects = set[int]()
        position = 0
        while found := self._find(text, position):
            suspects.update(range(*found))
            position = found[1]
        for length in range(1, min(len(text), max(self._lengths, default=0)) + 1):
            if text[:length] in self._endings:
                suspects.update(range(length))
            if text[-length:] in self._beginnings:
                suspects.update(range(len(text) - length, len(text)))
        if not suspects:
            return text
        return "".join(_MARK + char if i in suspects else char for i, char in enumerate(text))

    def split(self, text: str) -> Iterator[str | int]:
        """The ids of control tokens and the ordinary text between them, marks removed.

        A control token has no mark in it nor before it: one that begins with a marked character
        began in a message.
        """
        ordinary_from = position = 0
        while found := self._find(text, position):
            start, stop = found
            if text[start - 1 : start] == _MARK:
                position = start + 1
                continue
            if ordinary := text[ordinary_from:start].replace(_MARK, ""):
                yield ordinary
            yield self._ids[text[start:stop]]
            ordinary_from = position = stop
        if ordinary := text[ordinary_from:].replace(_MARK, ""):
            yield ordinary

    def _find(self, text: str, position: int) -> tuple[int, int] | None:
        """The span of the first control token from `position` on, the longest if several begin."""
        for match in self._first.finditer(text, position):
            start = match.start()
            for length in self._lengths:
                if text[start : start + length] in self._ids:
                    # A short rest of the text is a slice shorter than `length`.
                    return start, min(start + length, len(text))
        return None
