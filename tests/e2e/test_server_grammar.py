"""Structured output through the engine, with every kind of draft, against the oracle."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams, reference
from slipstream.build import build_engine
from slipstream.drafters.synthetic import SyntheticDrafter
from slipstream.engine.controller import FixedController
from slipstream.server.structured import Grammars, TokenGrammar

SCHEMA = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 4},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "text": {"type": "string", "maxLength": 8},
    },
    "required": ["tags", "size", "text"],
    "additionalProperties": False,
}
PROMPT = [10, 20, 30, 40]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=120),
    SamplingParams(temperature=1.1, seed=3, max_tokens=120),
    SamplingParams(temperature=0.8, seed=4, max_tokens=120, frequency_penalty=1.0, min_tokens=60),
    SamplingParams(temperature=1.3, seed=5, max_tokens=120, top_k=5, n=2),
]


def make_llm(path: Path, **speculative: Any) -> LLM:
    return LLM(
        str(path),
        dtype="float64",
        device="cpu",
        quiet=True,
        kv_cache_memory=2**21,
        speculative_config={"num_speculative_tokens": 5, "controller": "fixed"} | speculative,
    )


def grammar_of(llm: LLM) -> TokenGrammar:
    vocab_size = llm.loaded.model.config.vocab_size
    return Grammars(llm.tokenizer, vocab_size).json_schema(SCHEMA)


def oracle(llm: LLM, params: SamplingParams, branch: int) -> list[int]:
    return reference.generate(
        llm.loaded.model,
        PROMPT,
        params,
        stop_ids=llm.tokenizer.eos_ids,
        branch=branch,
        num_tokens=120,
        grammar=grammar_of(llm),
    )


def answers(llm: LLM) -> list[list[list[int]]]:
    """All requests together, one joining every third step."""
    waiting = list(enumerate(PARAMS))
    num_steps = 0
    while waiting or llm.engine.has_work:
        if waiting and num_steps % 3 == 0:
            i, params = waiting.pop(0)
            llm.engine.add(PROMPT, params, request_id=str(i), grammar=grammar_of(llm))
        llm.engine.step()
        llm.engine.check_integrity()
        num_steps += 1
    outputs = [llm.engine.output(str(i)).outputs for i in range(len(PARAMS))]
    return [[answer.token_ids for answer in answers] for answers in outputs]


@pytest.fixture(scope="module")
def expected(tiny_gguf: Path) -> list[list[list[int]]]:
    llm = make_llm(tiny_gguf, method="off")
    want = [[oracle(llm, params, b) for b in range(params.n)] for params in PARAMS]
    for tokens in (tokens for branches in want for tokens in branches):
        assert tokens[-1] in llm.tokenizer.eos_ids
        value = json.loads(llm.tokenizer.decode(tokens))
        assert set(value) == set(SCHEMA["required"])
    return want


@pytest.mark.parametrize(
    "speculative",
    [
        {"method": "off"},
        {"method": "ngram", "prompt_lookup_min": 1},
        {"method": "suffix", "tree": {"depth": 4, "topk": 2, "max_tokens": 6}},
        {"method": "draft_model"},
        {"method": "combined", "tree": {"depth": 3, "topk": 2, "max_tokens": 6}},
    ],
    ids=lambda given: f"{given['method']}{'-tree' * ('tree' in given)}",
)
def test_constrained_answers_are_the_oracles(
    tiny_gguf: Path, expected: list[list[list[int]]], speculative: dict[str, Any]
) -> None:
    if speculative["method"] in ("draft_model", "combined"):
        speculative = speculative | {"model": str(tiny_gguf)}
    llm = make_llm(tiny_gguf, **speculative)
    assert answers(llm) == expected
    drafts = llm.engine.stats().drafts
    assert (drafts.num_accepted_draft_tokens > 0) == (speculative["method"] != "off")


@pytest.mark.parametrize("trees", [False, True])
def test_drafts_that_ignore_the_grammar_are_cut(
    tiny_gguf: Path, expected: list[list[list[int]]], trees: bool
) -> None:
    """Half of what this drafter says is arbitrary; the grammar must forbid most of that."""
    llm = make_llm(tiny_gguf, method="off")
    known = {str(i): dict(enumerate(branches)) for i, branches in enumerate(expected)}
    vocab_size = llm.loaded.model.config.vocab_size
    drafter = SyntheticDrafter(known, vocab_size, hit_rate=0.5, trees=trees)
    llm.engine = build_engine(
        llm.loaded, llm.config, drafter=drafter, controller=FixedController(5)
    )
    assert answers(llm) == expected
    judged = llm.engine.stats().drafts.num_draft_tokens
    assert 0 < judged < 0.9 * drafter.num_drafted


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_rules_that_weigh_q_obey_the_grammar(tiny_gguf: Path, rule: str) -> None:
    llm = make_llm(
        tiny_gguf, method="draft_model", model=str(tiny_gguf), rejection_sample_method=rule
    )
    for branches in answers(llm):
        for tokens in branches:
            assert set(json.loads(llm.tokenizer.decode(tokens))) == set(SCHEMA["required"])
    assert llm.engine.stats().drafts.acceptance_rate == pytest.approx(1.0, abs=0.05)
