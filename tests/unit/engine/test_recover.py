"""A step that raises costs only whoever made it raise."""

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from slipstream.build import build_engine
from slipstream.check.tiny import loaded, tiny_model
from slipstream.core.config import EngineConfig
from slipstream.core.draft import Draft, Verdict
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.engine.engine import Engine
from slipstream.engine.verifier import MatchVerifier

PARAMS = SamplingParams(temperature=1, seed=4, max_tokens=12, ignore_eos=True)


class Bomb(MatchVerifier):
    """Raises whenever it judges a certain request's tokens after so many."""

    def __init__(self, target: str, after: int = 3):
        self.target = target
        self.after = after

    def __call__(
        self, logits: Tensor, first_rows: Seq[int], seqs: Seq[Sequence], drafts: Seq[Draft]
    ) -> list[Verdict]:
        if any(seq.request_id == self.target and seq.num_output >= self.after for seq in seqs):
            raise ZeroDivisionError("planted")
        return super().__call__(logits, first_rows, seqs, drafts)


def answers(engine: Engine, num_requests: int, params: SamplingParams) -> dict[str, Any]:
    for i in range(num_requests):
        engine.add([1 + i, 2, 3, 4, 5], params, request_id=str(i))
    ended: dict[str, Any] = {}
    texts: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        try:
            deltas = engine.step()
        except ZeroDivisionError:
            deltas = engine.recover()
        engine.check_integrity()
        for delta in deltas:
            texts.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
            if delta.finish_reason:
                ended[f"{delta.request_id}.{delta.index}"] = delta.finish_reason
    for i in range(num_requests):
        for output in engine.output(str(i)).outputs:
            assert output.token_ids == texts[str(i), output.index]
            ended[f"{i}.{output.index}"] = (output.finish_reason, output.token_ids)
    assert engine.stats().num_used_blocks == 0
    return ended


def engine(target: str = "nobody", after: int = 3, **config: Any) -> Engine:
    settings = {"kv_cache_memory": 2**20, "block_size": 4} | config
    return build_engine(
        loaded(tiny_model()), EngineConfig(**settings), verifier=Bomb(target, after)
    )


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "config",
    [{}, {"prefix_caching": False}, {"max_num_batched_tokens": 2}, {"max_num_seqs": 2}],
    ids=["default", "no prefix cache", "prompts in chunks", "two seats"],
)
def test_the_others_go_on_as_if_nothing_had_been(
    config: dict[str, Any], n: int, after: int
) -> None:
    params = replace(PARAMS, n=n)
    want = answers(engine(**config), 4, params)
    got = answers(engine("2", after, **config), 4, params)
    for name, (reason, tokens) in want.items():
        if name.startswith("2."):
            assert got[name] == ("error", tokens[:after])
        else:
            assert got[name] == (reason, tokens)


def test_an_answer_whose_text_fails_is_alone_with_it(caplog: pytest.LogCaptureFixture) -> None:
    want = answers(engine(), 3, PARAMS)
    broken = engine()
    for i in range(3):
        broken.add([1 + i, 2, 3, 4, 5], PARAMS, request_id=str(i))
    del broken._detokenizers[1]._tokenizer
    with caplog.at_level(logging.ERROR):
        while broken.has_work:
            broken.step()
            broken.check_integrity()
    outputs = {str(i): broken.output(str(i)).outputs[0] for i in range(3)}
    assert [outputs[i].finish_reason for i in "012"] == ["length", "error", "length"]
    assert [outputs[i].token_ids for i in "02"] == [want[f"{i}.0"][1] for i in "02"]
    assert "an answer of 1 failed" in caplog.text
