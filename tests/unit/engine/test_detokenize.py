"""Incremental text equals the text decoded at once, cut at the first stop string."""

import copy
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.engine.detokenize import Detokenizer


class Vocabulary:
    """Tokens that are given bytes; -1 is a control token named <end>."""

    def __init__(self, tokens: Sequence[bytes], *, strips_leading_space: bool = False) -> None:
        self.tokens = tokens
        self.strips_leading_space = strips_leading_space

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        if token_id == -1:
            return b"" if skip_special else b"<end>"
        return self.tokens[token_id]


def run(
    tokens: Sequence[bytes],
    stop: Sequence[str] = (),
    *,
    include_stop: bool = False,
    first_to_stop: int = 0,
) -> tuple[str, str | None, int]:
    """The text, what stopped it, and how many tokens it took."""
    detokenizer = Detokenizer(Vocabulary(tokens), stop, include_stop=include_stop)
    text = ""
    for i in range(len(tokens)):
        text += detokenizer.push(i, may_stop=i >= first_to_stop)
        if detokenizer.stopped_by is not None:
            return text + detokenizer.finish(), detokenizer.stopped_by, i + 1
    return text + detokenizer.finish(), detokenizer.stopped_by, len(tokens)


def naive(tokens: Sequence[bytes], stop: Sequence[str]) -> tuple[str, str | None, int]:
    """The same from the specification: decode everything, look at every prefix of the text."""
    text = b"".join(tokens).decode("utf-8", "replace")
    for end in range(1, len(text) + 1):
        for stop_text in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(stop_text):
                return text[: end - len(stop_text)], stop_text, first_with(tokens, text[:end])
    return text, None, len(tokens)


def first_with(tokens: Sequence[bytes], beginning: str) -> int:
    """How many tokens it takes until the text certainly begins so."""
    for num_tokens in range(1, len(tokens)):
        data = b"".join(tokens[:num_tokens])
        # Certain is what no continuation can change; these complete any character there is.
        if all(
            (data + rest).decode("utf-8", "replace").startswith(beginning)
            for rest in (b"a", b"\x80\x80\x80", b"\x90\x80\x80", b"\xa0\x80\x80")
        ):
            return num_tokens
    return len(tokens)


# Few characters of one to four bytes, so that stop strings and broken characters are frequent.
characters = st.sampled_from(["a", "b", "é", "€", "🤖", "\ufffd"])
pieces = st.one_of(
    st.lists(characters, max_size=4).map(lambda chars: "".join(chars).encode()),
    st.binary(max_size=3),
)
stops = st.lists(st.lists(characters, min_size=1, max_size=5).map("".join), max_size=4)


@st.composite
def token_lists(draw: st.DrawFn) -> list[bytes]:
    """Some bytes, nearly text, cut anywhere, within characters too."""
    data = b"".join(draw(st.lists(pieces, max_size=10)))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@given(tokens=token_lists(), stop=stops)
@example(tokens=[b"\xf0\x9f", b"\xa4", b"\x96"], stop=[])
@example(tokens=[b"\xe2\x82"], stop=["\ufffd"])
@example(tokens=[b"aab", b"aaab"], stop=["aaab"])
def test_text_and_stopping_token_are_those_of_the_whole_text(
    tokens: list[bytes], stop: list[str]
) -> None:
    assert run(tokens, stop) == naive(tokens, stop)


@given(tokens=token_lists(), stop=stops)
def test_included_stop_string_ends_the_text(tokens: list[bytes], stop: list[str]) -> None:
    text, stopped_by, _ = run(tokens, stop)
    assert run(tokens, stop, include_stop=True)[0] == text + (stopped_by or "")


@given(tokens=token_lists(), stop=stops)
def test_emitted_text_is_never_taken_back_and_withheld_only_with_reason(
    tokens: list[bytes], stop: list[str]
) -> None:
    detokenizer = Detokenizer(Vocabulary(tokens), stop)
    whole, emitted = naive(tokens, stop)[0], ""
    for i in range(len(tokens)):
        emitted += detokenizer.push(i)
        assert whole.startswith(emitted)
        if detokenizer.stopped_by is not None:
            break
        decoded = b"".join(tokens[: i + 1]).decode("utf-8", "replace")
        held = decoded.removeprefix(emitted).removesuffix("\ufffd")
        assert not held or any(
            text.startswith(held[:n]) for text in stop for n in (len(held), len(held) - 1)
        )


@given(tokens=token_lists(), stop=stops, cut=st.integers(0, 8))
def test_a_fork_goes_on_by_itself(tokens: list[bytes], stop: list[str], cut: int) -> None:
    vocabulary = Vocabulary([*tokens, "b€".encode()])
    detokenizer = Detokenizer(vocabulary, stop)
    text = ""
    for i in range(min(cut, len(tokens))):
        text += detokenizer.push(i)
        if detokenizer.stopped_by is not None:
            return
    fork = copy.deepcopy(detokenizer)
    fork.push(len(tokens))
    fork.finish()
    for i in range(cut, len(tokens)):
        text += detokenizer.push(i)
        if detokenizer.stopped_by is not None:
            break
    assert text + detokenizer.finish() == naive(tokens, stop)[0]


@given(text=st.text("ab", max_size=20), stop=st.text("ab", min_size=1, max_size=4))
def test_stop_strings_may_be_switched_off_for_the_first_tokens(text: str, stop: str) -> None:
    tokens = [char.encode() for char in text]
    for first_to_stop in range(len(tokens) + 1):
        end = next(
            (n for n in range(first_to_stop + 1, len(text) + 1) if text[:n].endswith(stop)), None
        )
        expected = text if end is None else text[: end - len(stop)]
        assert run(tokens, [stop], first_to_stop=first_to_stop)[0] == expected


def test_a_stop_string_passed_over_is_text_at_once() -> None:
    detokenizer = Detokenizer(Vocabulary([b"ab"]), ["ab"])
    assert detokenizer.push(0, may_stop=False) == "ab"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abcd", ["abcd", "bc"], ("a", "bc", 3)),  # complete first, though it begins later
        ("xab", ["b", "ab"], ("x", "ab", 3)),  # complete together: the longest
        ("aaab", ["aab"], ("a", "aab", 4)),  # a match inside what looked like another
        ("abab", ["abc"], ("abab", None, 4)),  # never complete: nothing is lost
    ],
)
def test_which_stop_string_wins(
    text: str, stop: list[str], expected: tuple[str, str | None, int]
) -> None:
    assert run([char.encode() for char in text], stop) == expected
    whole, stopped_by, _ = run([text.encode()], stop)
    assert (whole, stopped_by) == expected[:2]


def test_text_that_may_become_a_stop_string_is_held_and_released() -> None:
    detokenizer = Detokenizer(Vocabulary([b"x<", b"st", b"a", b"<stop", b">"]), ["<stop>"])
    assert [detokenizer.push(i) for i in range(4)] == ["x", "", "<sta", ""]
    assert detokenizer.stopped_by is None
    assert detokenizer.push(4) == ""
    assert detokenizer.stopped_by == "<stop>"
    assert detokenizer.finish() == ""


def test_half_a_character_waits_for_its_rest_or_the_end() -> None:
    detokenizer = Detokenizer(Vocabulary([b"\xe2", b"\x82", b"\xac", b"\xf0\x9f"]))
    assert [detokenizer.push(i) for i in range(4)] == ["", "", "€", ""]
    assert detokenizer.finish() == "\ufffd"


def test_control_tokens_are_text_only_when_asked_for() -> None:
    for skip_special, expected in ((True, "ab"), (False, "a<end>b")):
        detokenizer = Detokenizer(Vocabulary([b"a", b"b"]), skip_special=skip_special)
        assert "".join(detokenizer.push(i) for i in (0, -1, 1)) == expected


def test_one_leading_space_is_dropped_where_the_encoder_put_one() -> None:
    tokens = [b"", b"  a", b" b"]
    detokenizer = Detokenizer(Vocabulary(tokens, strips_leading_space=True))
    assert [detokenizer.push(i) for i in range(3)] == ["", " a", " b"]
    assert Detokenizer(Vocabulary(tokens)).push(1) == "  a"


def test_nothing_may_follow_a_stop_string() -> None:
    detokenizer = Detokenizer(Vocabulary([b"a"]), ["a"])
    detokenizer.push(0)
    with pytest.raises(AssertionError, match="after the end"):
        detokenizer.push(0)
