"""Structured output: JSON, JSON schemas, regular expressions and choices, as grammars of tokens.

`llguidance` computes which tokens may come next. Its matcher has a state that moves token by token
and rolls back; here it is moved to wherever it is asked about, so that to callers it has none.
"""

import json
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from torch import Tensor

from slipstream.core.errors import RequestError
from slipstream.loading.tokenizer import Tokenizer
from slipstream.server.schema import Generation, ResponseFormat, StructuredOutputs

# Free white space invites small models to write it without end.
JSON_STYLE: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_LONGEST_REASON = 300
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class Grammars:
    """Compiles grammars for one vocabulary.

    Args:
        tokenizer: of the model.
        vocab_size: V, rows of its logits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.vocab_size = vocab_size
        self._end_ids = sorted(tokenizer.eos_ids)
        self._vocabulary = None
        if self._end_ids:  # without an end, no constrained answer would ever end
            wrapped = TokenizerWrapper(_Vocabulary(tokenizer))
            self._vocabulary = LLTokenizer(wrapped, vocab_size, self._end_ids)

    def json_schema(self, schema: dict[str, Any] | str) -> "TokenGrammar":
        if isinstance(schema, dict):
            schema = json.dumps(schema)
        return self._compiled(LLMatcher.grammar_from_json_schema, schema, None, JSON_STYLE)

    def regex(self, pattern: str) -> "TokenGrammar":
        return self._compiled(LLMatcher.grammar_from_regex, pattern)

    def choice(self, options: Seq[str]) -> "TokenGrammar":
        if not options or not all(options):
            raise RequestError("choice must be a list of texts, none of them empty")
        return self.lark("start: " + " | ".join(map(json.dumps, options)))

    def lark(self, grammar: str) -> "TokenGrammar":
        return self._compiled(LLMatcher.grammar_from_lark, grammar)

    def of(self, body: Generation) -> "TokenGrammar | None":
        """What a request asks for, if anything.

        Raises:
            RequestError: a grammar that does not compile, or more than one.
        """
        wanted = list(self._asked(body))
        if wanted and body.ignore_eos:
            raise RequestError("a grammar says where an answer ends; drop ignore_eos")
        if len(wanted) > 1:
            raise RequestError("a request has one of response_format, regex, choice, not several")
        return wanted[0]() if wanted else None

    def _asked(self, body: Generation) -> Iterator[Callable[[], "TokenGrammar"]]:
        """How to compile each thing that is asked for."""
        asked = body.structured_outputs or StructuredOutputs.model_validate({})
        schemas = [_schema(body.response_format), body.guided_json, asked.json_]
        if asked.json_object:
            schemas.append(ANY_OBJECT)
        for schema in schemas:
            if schema is not None:
                yield partial(self.json_schema, schema)
        for pattern in (body.guided_regex, asked.regex):
            if pattern is not None:
                yield partial(self.regex, pattern)
        for options in (body.guided_choice, asked.choice):
            if options is not None:
                yield partial(self.choice, options)

    def _compiled(self, make: Callable[..., str], *source: Any) -> "TokenGrammar":
        if self._vocabulary is None:
            raise RequestError("the model has no end-of-sequence token for constrained output")
        try:
            text = make(*source)
        except ValueError as error:
            raise RequestError(f"the grammar cannot be used: {error}") from None
        matcher = LLMatcher(self._vocabulary, text, log_level=0)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:_LONGEST_REASON]
            raise RequestError(f"the grammar cannot be used: {reason}")
        grammar = TokenGrammar(matcher, self.vocab_size, self._end_ids)
        try:
            grammar.allowed([])
        except GrammarFailure:
            raise RequestError("the grammar cannot be used: nothing obeys it") from None
        return grammar


class GrammarFailure(Exception):
    """A grammar that led to nothing, or took too much to follow; its request fails alone."""


class TokenGrammar:
    """`core.grammar.Grammar` by a matcher, which stands where it was asked about last.

    Args:
        matcher: at its beginning, or after the tokens of `fork`.
        vocab_size: V.
        end_ids: tokens that end an answer. Behind one comes only another: nobody commits it, but
            a draft may run past the end.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_ids: Seq[int]):
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._consumed: list[int] = []
        self._bits = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    def allowed(self, output: Seq[int]) -> Tensor:
        if not self._move_to(output):
            mask = torch.zeros(self._vocab_size, dtype=torch.bool)
            stuck_at = output[len(self._consumed)]
            mask[self._end_ids] = stuck_at in self._end_ids and self._matcher.is_accepting()
            return mask
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            raise GrammarFailure(self._matcher.get_error())
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocab_size]
        return torch.from_numpy(bits.astype(np.bool_))

    def accepts(self, output: Seq[int], token: int) -> bool:
        return self._move_to(output) and self._matcher.validate_tokens([token]) == 1

    def fork(self) -> "TokenGrammar":
        copy = TokenGrammar(self._matcher.deep_copy(), self._vocab_size, self._end_ids)
        copy._consumed = self._consumed.copy()
        return copy

    def _move_to(self, output: Seq[int]) -> bool:
        """Roll back to where the last question and this one part; go on as far as possible."""
        shared = _common_length(self._consumed, output)
        if shared < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - shared)
        ahead = list(output[shared:])
        num_taken = self._matcher.try_consume_tokens(ahead) if ahead else 0
        self._consumed = list(output[: shared + num_taken])
        return num_taken == len(ahead)


class _Vocabulary:
    """A tokenizer as llguidance wants one."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [
            tokenizer.token_bytes(token, skip_special=False)
            for token in range(tokenizer.vocab_size)
        ]
        self.special_token_ids = sorted(tokenizer.special_ids)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_bos=False)


def _common_length(first: Seq[int], second: Seq[int]) -> int:
    most = min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    return next(i for i in range(most) if first[i] != second[i])


def _schema(given: ResponseFormat | None) -> dict[str, Any] | None:
    """The JSON schema that a response format means, if it means one."""
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return ANY_OBJECT
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise RequestError("response_format json_schema needs json_schema.schema")
    return given.json_schema.schema_
