"""Whatever ends an answer in the middle of an accepted path cuts everything at one index."""

from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.check.tiny import LetterTokenizer
from slipstream.core.draft import NO_DRAFT, Draft, Verdict
from slipstream.core.outputs import Delta
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.engine.commit import commit
from slipstream.engine.detokenize import Detokenizer
from slipstream.maths.noise import Key

A, B, C, D, E, F = range(6)
EOS = 9
VOCAB_SIZE = 12

CHAIN = Draft([A, B, C, D, E], [-1, 0, 1, 2, 3])
WHOLE = Verdict([0, 1, 2, 3, 4], F)


class Answer:
    """A sequence, and what turns its tokens into text."""

    def __init__(self, *, max_tokens: int = 100, **setting: Any):
        params = SamplingParams(**setting)
        self.seq = Sequence(
            seq_id=0,
            request_id="request",
            index=2,
            tokens=[7, 8],
            num_prompt=2,
            params=params,
            max_tokens=max_tokens,
            stop_ids=frozenset({EOS, *params.stop_token_ids}),
            key=Key(0),
        )
        self.detokenizer = Detokenizer(
            LetterTokenizer(VOCAB_SIZE, frozenset({EOS})),
            params.stop,
            skip_special=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
        )

    def commit(self, draft: Draft, verdict: Verdict, logits: Tensor | None = None) -> Delta:
        if logits is None:
            logits = torch.zeros(1 + len(draft), VOCAB_SIZE)
        return commit(self.seq, draft, verdict, logits, self.detokenizer)


@pytest.mark.parametrize(
    ("setting", "num_kept", "text", "finish_reason", "stop_reason"),
    [
        ({}, 6, "abcdef", None, None),
        # Token ids. A stop token is committed but is not text; the model's own end is skipped.
        ({"stop_token_ids": (C,)}, 3, "ab", "stop", C),
        ({"stop_token_ids": (A, C)}, 1, "", "stop", A),
        ({"stop_token_ids": (F,)}, 6, "abcde", "stop", F),
        # Strings.
        ({"stop": "c"}, 3, "ab", "stop", "c"),
        ({"stop": "bcd"}, 4, "a", "stop", "bcd"),
        ({"stop": ("x", "de", "d")}, 4, "abc", "stop", "d"),
        ({"stop": "ef"}, 6, "abcd", "stop", "ef"),
        ({"stop": "bcd", "include_stop_str_in_output": True}, 4, "abcd", "stop", "bcd"),
        # Length; what was held back for a stop string that never came is text after all.
        ({"max_tokens": 1}, 1, "a", "length", None),
        ({"max_tokens": 4}, 4, "abcd", "length", None),
        ({"max_tokens": 6}, 6, "abcdef", "length", None),
        ({"max_tokens": 3, "stop": "bcx"}, 3, "abc", "length", None),
        ({"max_tokens": 100, "stop": "efx"}, 6, "abcd", None, None),
        ({"stop": "bx", "stop_token_ids": (C,)}, 3, "ab", "stop", C),
        # Two at once: a stop says more than the length.
        ({"max_tokens": 3, "stop": "c"}, 3, "ab", "stop", "c"),
        ({"max_tokens": 3, "stop_token_ids": (C,)}, 3, "ab", "stop", C),
        # Strings are text before min_tokens. Ids never get here: they were impossible.
        ({"stop": ("b", "d"), "min_tokens": 3}, 4, "abc", "stop", "d"),
        ({"stop": "b", "min_tokens": 2}, 2, "a", "stop", "b"),
    ],
    ids=str,
)
def test_everything_is_cut_at_one_index(
    setting: dict[str, Any],
    num_kept: int,
    text: str,
    finish_reason: str | None,
    stop_reason: int | str | None,
) -> None:
    answer = Answer(logprobs=1, **setting)
    delta = answer.commit(CHAIN, WHOLE)
    seq = answer.seq
    assert seq.output == delta.token_ids == [A, B, C, D, E, F][:num_kept]
    assert seq.text == delta.text == text
    assert [entry.token_id for entry in seq.logprobs] == seq.output
    assert delta.logprobs == seq.logprobs
    assert delta.origins == [*["accepted"] * 5, "bonus"][:num_kept]
    assert (seq.finish_reason, seq.stop_reason) == (finish_reason, stop_reason)
    assert (delta.finish_reason, delta.stop_reason) == (finish_reason, stop_reason)
    assert (delta.request_id, delta.index) == ("request", 2)
    assert seq.draft_counts.num_tokens == num_kept
    assert seq.draft_counts.num_accepted_draft_tokens == min(num_kept, 5)


@pytest.mark.parametrize(
    ("setting", "text", "stop_reason"),
    [
        ({}, "ab", None),
        ({"skip_special_tokens": False}, "abj", None),
        ({"stop_token_ids": (EOS,)}, "ab", EOS),
        ({"stop_token_ids": (EOS,), "skip_special_tokens": False}, "ab", EOS),
    ],
    ids=str,
)
def test_the_models_own_end(setting: dict[str, Any], text: str, stop_reason: int | None) -> None:
    answer = Answer(**setting)
    delta = answer.commit(Draft([A, B, EOS, D], [-1, 0, 1, 2]), Verdict([0, 1, 2, 3], E))
    assert delta.token_ids == [A, B, EOS]
    assert (delta.text, delta.finish_reason, delta.stop_reason) == (text, "stop", stop_reason)


@pytest.mark.parametrize(
    ("draft", "verdict", "origins"),
    [
        (NO_DRAFT, Verdict([], A), ["plain"]),
        (CHAIN, Verdict([], F), ["recovered"]),
        (CHAIN, Verdict([0, 1], F), ["accepted", "accepted", "recovered"]),
        (Draft([A, B, C], [-1, -1, 0]), Verdict([1], F), ["accepted", "bonus"]),
        (Draft([A, B, C], [-1, -1, 0]), Verdict([0], F), ["accepted", "recovered"]),
    ],
)
def test_where_tokens_came_from(draft: Draft, verdict: Verdict, origins: Seq[str]) -> None:
    answer = Answer()
    delta = answer.commit(draft, verdict)
    assert delta.origins == origins
    assert delta.token_ids == [
        *(draft.token_ids[node] for node in verdict.path),
        verdict.next_token,
    ]
    assert delta.logprobs == []


@pytest.mark.parametrize("max_tokens", [100, 2])
def test_log_probabilities_are_the_models_own_along_the_path(max_tokens: int) -> None:
    draft = Draft([A, B, C, D, E], [-1, -1, 0, 1, 3])
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    answer = Answer(
        max_tokens=max_tokens, logprobs=3, temperature=0.3, top_k=1, logit_bias={F: -9.0}
    )
    delta = answer.commit(draft, Verdict([1, 3], F), logits)
    expected = logits[[0, 2, 4]].log_softmax(-1)  # root, node 1, node 3
    assert delta.token_ids == [B, D, F][:max_tokens]
    assert len(delta.logprobs) == len(delta.token_ids)
    for entry, token, row in zip(delta.logprobs, [B, D, F], expected, strict=False):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item())
        best = row.argsort(descending=True)[:3].tolist()
        assert [other for other, _ in entry.top] == best
        assert [value for _, value in entry.top] == pytest.approx(row[best].tolist())


@pytest.mark.parametrize(("logprobs", "num_top"), [(0, 0), (5, 5), (100, VOCAB_SIZE)])
def test_as_many_alternatives_as_asked_for(logprobs: int, num_top: int) -> None:
    [entry] = Answer(logprobs=logprobs).commit(NO_DRAFT, Verdict([], A)).logprobs
    assert len(entry.top) == num_top


def test_steps_join_up() -> None:
    """A stop string, and a character of two bytes, across steps."""
    answer = Answer(stop="dx", logprobs=0)
    deltas = [
        answer.commit(CHAIN, Verdict([0, 1, 2], D)),
        answer.commit(NO_DRAFT, Verdict([], 10)),
        answer.commit(NO_DRAFT, Verdict([], 11)),
        answer.commit(Draft([D], [-1]), Verdict([0], E)),
    ]
    assert [delta.text for delta in deltas] == ["abc", "", "dé", "de"]
    assert answer.seq.text == "abcdéde"
    assert answer.seq.output == [A, B, C, D, 10, 11, D, E]
    assert len(answer.seq.logprobs) == 8
