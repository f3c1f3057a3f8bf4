"""Grammars over a vocabulary of characters: against all texts they allow, asked in any order."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.errors import RequestError
from slipstream.server.schema import ChatBody
from slipstream.server.structured import Grammars

PIECES = [chr(code) for code in range(0x20, 0x7F)] + ["yes", "no", "es", "</s>"]
EOS = len(PIECES) - 1


class CharTokenizer:
    """Printable characters, a few words, and an end."""

    vocab_size = len(PIECES)
    eos_ids = frozenset({EOS})
    special_ids = frozenset({EOS})
    bos_id = None

    def token_bytes(self, token: int, *, skip_special: bool = True) -> bytes:
        return PIECES[token].encode()

    def encode(self, text: str, **_: Any) -> list[int]:
        return [PIECES.index(char) for char in text]


NUM_ROWS = len(PIECES) + 3  # a model may have more rows than its tokenizer has tokens
GRAMMARS = Grammars(CharTokenizer(), NUM_ROWS)  # type: ignore[arg-type]
OPTIONS = ["yes", "yo", "no", "none"]


def possible(options: list[str], tokens: list[int]) -> set[int]:
    """By hand: the tokens after which one of the options can still come out."""
    text = "".join(PIECES[token] for token in tokens)
    going_on = {
        token
        for token, piece in enumerate(PIECES)
        if token != EOS and any(option.startswith(text + piece) for option in options)
    }
    return going_on | ({EOS} if text in options else set())


def allowed(grammar: Any, tokens: list[int]) -> set[int]:
    mask = grammar.allowed(tokens)
    assert mask.shape == (NUM_ROWS,)
    return set(mask.nonzero().flatten().tolist())


@given(st.lists(st.lists(st.sampled_from([PIECES.index(p) for p in ("y", "e", "s", "n", "o",
       "yes", "no", "es")]), max_size=4), min_size=1, max_size=8))  # fmt: skip
def test_a_choice_in_any_order_of_questions(questions: list[list[int]]) -> None:
    grammar = GRAMMARS.choice(OPTIONS)
    for tokens in questions:
        want = possible(OPTIONS, tokens)
        assert allowed(grammar, tokens) == want
        for token in range(len(PIECES) - 1):
            assert grammar.accepts(tokens, token) == (token in want)


def test_behind_the_end_is_only_the_end() -> None:
    grammar = GRAMMARS.choice(OPTIONS)
    yes = CharTokenizer().encode("yes")
    assert allowed(grammar, [*yes, EOS]) == {EOS}
    assert allowed(grammar, [*yes, EOS, EOS, 3]) == {EOS}
    assert allowed(grammar, [*yes[:2], EOS]) == set()


def test_a_fork_goes_its_own_way() -> None:
    grammar = GRAMMARS.choice(OPTIONS)
    y, n = PIECES.index("y"), PIECES.index("n")
    grammar.allowed([y])
    fork = grammar.fork()
    assert allowed(fork, [n]) == possible(OPTIONS, [n])
    assert allowed(grammar, [y]) == possible(OPTIONS, [y])
    assert allowed(fork, []) == possible(OPTIONS, [])


def test_options_are_taken_literally() -> None:
    options = ['say "hi"', "a\\b", "a|b", "/x/"]
    grammar = GRAMMARS.choice(options)
    for option in options:
        tokens = CharTokenizer().encode(option)
        for length in range(len(tokens) + 1):
            assert allowed(grammar, tokens[:length]) == possible(options, tokens[:length])


def test_a_schema_has_one_way_to_be_written() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    grammar = GRAMMARS.json_schema(schema)
    text = json.dumps({"a": 12, "b": "x"})
    tokens = CharTokenizer().encode(text)
    for length, token in enumerate(tokens):
        assert token in allowed(grammar, tokens[:length])
    assert allowed(grammar, tokens) == {EOS}
    assert PIECES.index(" ") not in allowed(grammar, tokens[:1])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"guided_regex": "(a"}, "cannot be used"),
        ({"guided_json": "{"}, "cannot be used"),
        ({"guided_json": {"type": "king"}}, "cannot be used"),
        ({"guided_choice": []}, "none of them empty"),
        ({"guided_choice": ["a", ""]}, "none of them empty"),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "not several"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "drop ignore_eos"),
        ({"response_format": {"type": "json_schema"}}, "needs json_schema.schema"),
    ],
)
def test_what_does_not_compile_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        GRAMMARS.of(ChatBody(messages=[], **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
        {"structured_outputs": {"json": {"type": "object"}}},
        {"structured_outputs": {"json_object": True}},
        {"guided_json": '{"type": "object"}'},
    ],
)
def test_every_way_to_ask_for_an_object(fields: dict[str, Any]) -> None:
    grammar = GRAMMARS.of(ChatBody.model_validate({"messages": []} | fields))
    assert grammar is not None
    assert allowed(grammar, []) == {PIECES.index("{")}


def test_nothing_asked_for_is_no_grammar() -> None:
    body = ChatBody.model_validate({"messages": [], "response_format": {"type": "text"}})
    assert GRAMMARS.of(body) is None
