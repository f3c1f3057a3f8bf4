"""Bodies made from the OpenAPI document, right and wrong: an answer or an error, never a crash."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving import assert_idle, serving
from slipstream import LLM

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
# Values that are often right, so that bodies reach the engine, and a few that are never.
NUMBERS = st.sampled_from([0, 1, 2, 3, 7, -1, 10**6, 2**64, 10**30])
FLOATS = st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, 1e308, float("nan"), float("inf")])
TEXTS = st.sampled_from(["x", "hello", "", "é", "\ud800", "\x00", "<|im_end|>", "a" * 300, "tiny"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": TEXTS},
    optional={"tool_calls": ANYTHING, "name": TEXTS},
)
# What a free-form object should look like, by the name of its field.
LIKELY = {
    "model": st.sampled_from(["tiny", "tiny", "tiny", "else"]),
    "messages": st.lists(MESSAGE, min_size=1, max_size=3),
    "prompt": TEXTS | st.lists(NUMBERS, max_size=4) | st.lists(TEXTS, max_size=3),
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(["messages", "tools", "self", "bos_token", "x", ""]), ANYTHING, max_size=2
    ),
    "logit_bias": st.dictionaries(st.sampled_from(["1", "99", "100", "x"]), FLOATS, max_size=2),
    "guided_regex": st.sampled_from(["[ab]+", "(", "a{1,999999}", ".*"]),
    "guided_json": st.sampled_from([{"type": "object"}, {"type": 3}, "{", {"$ref": "#"}]),
    "schema": st.sampled_from([{"type": "integer"}, {"enum": []}, {"allOf": [{}]}, {"not": {}}]),
}


def values(schema: dict[str, Any], document: dict[str, Any], name: str = "") -> st.SearchStrategy:
    """Values that fit a schema of the document."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if name in LIKELY:
        return LIKELY[name]
    if "anyOf" in schema:
        return st.one_of([values(each, document) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    if schema.get("type") == "object" and "properties" in schema:
        fields = {key: values(each, document, key) for key, each in schema["properties"].items()}
        required = {key: fields.pop(key) for key in schema.get("required", ())}
        if not fields:
            return st.fixed_dictionaries(required)
        # A few further fields at a time: of many, one would be wrong in nearly every body.
        return st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True).flatmap(
            lambda keys: st.fixed_dictionaries(required | {key: fields[key] for key in keys})
        )
    if schema.get("type") == "array":
        return st.lists(values(schema["items"], document), max_size=3)
    return {
        "integer": NUMBERS,
        "number": FLOATS,
        "boolean": st.booleans(),
        "string": TEXTS,
        "null": st.none(),
    }.get(schema.get("type", ""), ANYTHING)


@pytest.fixture(scope="module")
def server(tiny_gguf: Path) -> Iterator[tuple[httpx.Client, dict[str, Any], LLM]]:
    llm = LLM(
        str(tiny_gguf),
        device="cpu",
        quiet=True,
        kv_cache_memory=2**19,
        max_num_seqs=8,
        max_model_len=48,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "controller": "fixed"},
    )
    with serving(llm, max_waiting=4) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client, client.get("/openapi.json").json(), llm


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_body_breaks_the_server(
    server: tuple[httpx.Client, dict[str, Any], LLM], path: str, data: st.DataObject
) -> None:
    client, document, llm = server
    content = document["paths"][path]["post"]["requestBody"]["content"]
    body = data.draw(values(content["application/json"]["schema"], document))
    if data.draw(st.integers(0, 9)) == 0:
        key = data.draw(st.sampled_from([*body, "unknown"]))
        body[key] = data.draw(ANYTHING)
    answer = client.post(
        path, content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]
    elif body.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text
    give_up = time.monotonic() + 20
    while llm.engine.has_work and time.monotonic() < give_up:
        time.sleep(0.005)
    assert_idle(llm)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": ' + b"[" * 5000, b"1" * 5000],
)
@pytest.mark.parametrize("kind", ["application/json", "text/plain", ""])
def test_what_is_no_json_object(
    server: tuple[httpx.Client, dict[str, Any], LLM], content: bytes, kind: str
) -> None:
    answer = server[0].post("/v1/completions", content=content, headers={"Content-Type": kind})
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["type"] == "invalid_request_error"
