"""The server on a tiny model, over loopback, with the official client: what users see of it."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from serving import assert_idle, serving
from slipstream import LLM, SamplingParams

USER = [{"role": "user", "content": "write a poem"}]
ALWAYS = {"method": "ngram", "num_speculative_tokens": 4, "controller": "fixed"}
TOOLS_TEMPLATE = (
    "{% if tools %}tools: {% for tool in tools %}{{ tool.function.name }}{% endfor %} in "
    "<tool_call></tool_call>{% endif %}{% for m in messages %}{{ m.content }} {% endfor %}"
)


def make_llm(path: Path, **options: Any) -> LLM:
    given = {"speculative_config": ALWAYS, "kv_cache_memory": 2**20} | options
    return LLM(str(path), dtype="float64", device="cpu", quiet=True, **given)


@pytest.fixture(scope="module")
def llm(tiny_gguf: Path) -> LLM:
    return make_llm(tiny_gguf)


@pytest.fixture(scope="module")
def plain(tiny_gguf: Path) -> LLM:
    """The same model behind no server, decoding plainly: what answers are compared with."""
    return make_llm(tiny_gguf, speculative_config={"method": "off"})


@pytest.fixture(scope="module")
def url(llm: LLM) -> Iterator[str]:
    with serving(llm) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(autouse=True)
def _nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "url" not in request.fixturenames:
        return
    llm = request.getfixturevalue("llm")
    give_up = time.monotonic() + 10
    while llm.engine.has_work and time.monotonic() < give_up:
        time.sleep(0.01)  # a client that left is noticed a moment later
    assert_idle(llm)


def offline(llm: LLM, **options: Any) -> str:
    return llm.chat(USER, SamplingParams(**options))[0].text


# Chat and completions -------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chat_says_what_the_engine_says(
    client: openai.OpenAI, plain: LLM, temperature: float
) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=USER, temperature=temperature, seed=5, max_completion_tokens=40
    )
    want = plain.chat(USER, SamplingParams(temperature=temperature, seed=5, max_tokens=40))[0]
    choice = answer.choices[0]
    assert choice.message.content == want.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == want.outputs[0].finish_reason
    assert answer.usage.prompt_tokens == len(want.prompt_token_ids)
    assert answer.usage.completion_tokens == len(want.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "tiny", "messages": USER, "temperature": 0.9, "seed": 1, "n": 3,
        "max_completion_tokens": 30, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**options)
    texts, finishes, tokens = [""] * 3, [None] * 3, [[], [], []]
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
            if choice.logprobs:
                tokens[choice.index] += choice.logprobs.content
        last = chunk
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    for streamed, choice in zip(tokens, whole.choices, strict=True):
        assert [t.token for t in streamed] == [t.token for t in choice.logprobs.content]
        assert [t.logprob for t in streamed] == pytest.approx(
            [t.logprob for t in choice.logprobs.content]
        )
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_speculation_is_reported_in_vllms_and_llama_cpps_words(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 60,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = client.chat.completions.create(**options)
    block = whole.metrics["speculative_decoding"]
    assert block["num_draft_tokens"] > 0
    assert whole.timings["draft_n"] == block["num_draft_tokens"]
    assert whole.timings["draft_n_accepted"] == block["num_accepted_draft_tokens"]
    assert block["mean_acceptance_length"] == pytest.approx(
        1 + block["num_accepted_draft_tokens"] / block["num_spec_steps"]
    )
    *_, last = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    assert last.metrics["speculative_decoding"] == block
    options["extra_body"]["speculative"] = {"enabled": False}
    off = client.chat.completions.create(**options)
    assert off.choices[0].message.content == whole.choices[0].message.content
    assert off.timings["draft_n"] == 0


def test_drafts_can_be_limited_for_one_request(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=USER, temperature=0, max_tokens=60,
        extra_body={"ignore_eos": True, "speculative": {"num_tokens": 1}},
    )  # fmt: skip
    block = answer.metrics["speculative_decoding"]
    assert block["num_spec_tokens"] == 1
    assert block["num_draft_tokens"] == block["num_spec_steps"] > 0


def test_origins_are_streamed_with_the_text(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=USER, temperature=0, max_tokens=50, stream=True,
        extra_body={"return_origins": True, "ignore_eos": True},
    )  # fmt: skip
    text, tokens = "", []
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        tokens += getattr(chunk.choices[0], "tokens", None) or []
    assert "".join(token["text"] for token in tokens) == text
    assert len(tokens) == 50
    assert "accepted" in {token["origin"] for token in tokens}


def test_completions_of_texts_and_of_ids(client: openai.OpenAI, plain: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    texts = ["hello", "the cat"]
    ids = [plain.tokenizer.encode(text) for text in texts]
    want = [output.text for output in plain.generate(texts, params)]
    for prompt in (texts, ids):
        answer = client.completions.create(model="tiny", prompt=prompt, temperature=0)
        assert [choice.text for choice in answer.choices] == want
    alone = client.completions.create(model="tiny", prompt=ids[0], temperature=0)
    assert alone.choices[0].text == want[0]


def test_prompts_and_answers_are_numbered_together(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "seed": 2, "n": 2, "max_tokens": 6, "echo": True}
    both = client.completions.create(prompt=["aa", "bb"], **options)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text[:2] for choice in both.choices] == ["aa", "aa", "bb", "bb"]
    streamed = [""] * 4
    for chunk in client.completions.create(prompt=["aa", "bb"], stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in both.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_end_in_one_step(client: openai.OpenAI, stream: bool) -> None:
    answer: Any = client.completions.create(
        model="tiny", prompt=["aa", "bb"], n=3, max_tokens=1, stream=stream
    )
    chunks = list(answer) if stream else [answer]
    finishes = [choice.index for chunk in chunks for choice in chunk.choices]
    assert sorted(finishes) == list(range(6))


def test_log_probabilities_of_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="hello", temperature=0, max_tokens=5, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.text_offset) == 5
    assert "".join(logprobs.tokens) == answer.choices[0].text
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == value == max(top.values())


def test_stopping(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="x", temperature=0, max_tokens=30)
    stop = whole.choices[0].text[7:9]
    cut = client.completions.create(
        model="tiny", prompt="x", temperature=0, max_tokens=30, stop=[stop]
    )
    assert cut.choices[0].text == whole.choices[0].text.partition(stop)[0]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].stop_reason == stop


def test_sampling_extensions_reach_the_engine(client: openai.OpenAI, plain: LLM) -> None:
    given: dict[str, Any] = {
        "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.3, "min_tokens": 5,
        "stop_token_ids": [40], "ignore_eos": True,
    }  # fmt: skip
    answer = client.chat.completions.create(
        model="tiny", messages=USER, seed=3, max_tokens=20, presence_penalty=0.5,
        frequency_penalty=0.4, logit_bias={"33": 4}, top_p=0.9,
        extra_body=given | {"cache_salt": "mine"},
    )  # fmt: skip
    params = SamplingParams(
        seed=3, max_tokens=20, presence_penalty=0.5, frequency_penalty=0.4, logit_bias={33: 4.0},
        top_p=0.9, **given,
    )  # fmt: skip
    assert answer.choices[0].message.content == plain.chat(USER, params)[0].text


def test_a_salt_keeps_prefixes_apart(client: openai.OpenAI) -> None:
    def cached(salt: str) -> int:
        answer = client.chat.completions.create(
            model="tiny", messages=USER, max_tokens=1, extra_body={"cache_salt": salt}
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0


def test_predicted_outputs(client: openai.OpenAI, plain: LLM) -> None:
    want = offline(plain, temperature=0, max_tokens=60, ignore_eos=True)
    # Right, then something else for a while, then right again.
    expected = want[:20] + "#" * 5 + want[25:]
    answer = client.chat.completions.create(
        model="tiny", messages=USER, temperature=0, max_tokens=60,
        prediction={"type": "content", "content": expected}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.choices[0].message.content == want
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 25
    assert 0 < details.rejected_prediction_tokens < 15


# Structured output and tools ------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(4))
def test_json_schema(client: openai.OpenAI, seed: int) -> None:
    texts = []
    for enabled in (True, False):
        answer = client.chat.completions.create(
            model="tiny", messages=USER, temperature=1.2, seed=seed, max_tokens=100,
            response_format={
                "type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA},
            },
            extra_body={"speculative": {"enabled": enabled}},
        )  # fmt: skip
        texts.append(answer.choices[0].message.content)
        assert answer.choices[0].finish_reason == "stop"
    assert texts[0] == texts[1]
    pet = json.loads(texts[0])
    assert set(pet) == {"name", "kind", "age"}
    assert pet["kind"] in ("cat", "dog")
    assert 0 <= pet["age"] <= 99


def test_choice_and_regex(client: openai.OpenAI) -> None:
    options = ["yes", "no", "perhaps"]
    for extra, fits in (
        ({"structured_outputs": {"choice": options}}, options.__contains__),
        ({"guided_choice": options}, options.__contains__),
        ({"structured_outputs": {"regex": "[ab]{3}-[0-9]+x"}}, lambda t: t[3] == "-"),
    ):
        answer = client.chat.completions.create(
            model="tiny", messages=USER, temperature=1, seed=1, max_tokens=60, extra_body=extra
        )
        assert fits(answer.choices[0].message.content)


def test_min_tokens_yields_to_a_grammar(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=20,
        extra_body={"guided_choice": ["yes"], "min_tokens": 10},
    )  # fmt: skip
    assert answer.choices[0].message.content == "yes"
    assert answer.choices[0].finish_reason == "stop"


@pytest.fixture
def tool_client(
    tmp_path: Path,
    write_gguf: Callable[..., Path],
    tiny_metadata: dict[str, Any],
    tiny_tensors: dict[str, np.ndarray],
) -> Iterator[openai.OpenAI]:
    metadata = tiny_metadata | {"tokenizer.chat_template": TOOLS_TEMPLATE}
    path = write_gguf(tmp_path / "tools.gguf", metadata, tiny_tensors)
    with serving(make_llm(path, kv_cache_memory=2**22)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_tool_calls(tool_client: openai.OpenAI) -> None:
    tools: Any = [
        {"type": "function", "function": {"name": "pet", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "nop"}},
    ]
    options: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": tools,
        "temperature": 1, "seed": 2, "max_tokens": 120,
        "tool_choice": {"type": "function", "function": {"name": "pet"}},
    }  # fmt: skip
    choice = tool_client.chat.completions.create(**options).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "pet"
    assert set(json.loads(call.function.arguments)) == {"name", "kind", "age"}
    streamed, finish = [], None
    for chunk in tool_client.chat.completions.create(**options, stream=True):
        streamed += chunk.choices[0].delta.tool_calls or []
        finish = chunk.choices[0].finish_reason or finish
    assert finish == "tool_calls"
    assert streamed[0].function.name == "pet"
    assert streamed[0].function.arguments == call.function.arguments
    free = tool_client.chat.completions.create(
        **options | {"tool_choice": "auto", "temperature": 0}
    )
    assert free.choices[0].message.content


def test_tools_need_a_template_that_has_them(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(openai.BadRequestError, match="chat template has no tools"):
        client.chat.completions.create(model="tiny", messages=USER, tools=tools)


# Other endpoints ------------------------------------------------------------------------------


def test_models_tokens_health_version(client: openai.OpenAI, url: str, llm: LLM) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("gpt-4")
    given = httpx.post(f"{url}/tokenize", json={"prompt": "the cat"}).json()
    assert given["tokens"] == llm.tokenizer.encode("the cat")
    assert given["count"] == len(given["tokens"])
    text = httpx.post(f"{url}/detokenize", json={"tokens": given["tokens"]}).json()
    assert text == {"prompt": "the cat"}
    chat = httpx.post(f"{url}/tokenize", json={"messages": USER}).json()
    assert chat["tokens"] == llm.chat_ids(USER)
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/version").json()["version"]


def test_metrics(client: openai.OpenAI, url: str) -> None:
    client.chat.completions.create(
        model="tiny", messages=USER, temperature=0, max_tokens=60, extra_body={"ignore_eos": True}
    )
    text = httpx.get(f"{url}/metrics").text
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }
    labels = 'model_name="tiny",engine="0"'
    swapped = 'engine="0",model_name="tiny"'

    def value(name: str, more: str = "") -> float:
        wanted = {f"{name}{{{labels}{more}}}", f"{name}{{{swapped}{more}}}"}
        return next(values[key] for key in wanted if key in values)

    assert value("vllm:num_requests_running") == 0
    assert value("vllm:kv_cache_usage_perc") == 0
    assert value("vllm:generation_tokens_total") >= 60
    assert value("vllm:spec_decode_num_draft_tokens_total") > 0
    drafts = value("vllm:spec_decode_num_drafts_total")
    accepted = value("vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < accepted < 5 * drafts
    assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", ',position="0"') <= drafts
    assert value("vllm:time_to_first_token_seconds_count") >= 1
    assert value("vllm:e2e_request_latency_seconds_count") >= 1
    assert value("vllm:inter_token_latency_seconds_count") >= 50
    for name in (
        "slipstream:kv_blocks",
        "slipstream:step_seconds_total",
        "slipstream:passes_total",
    ):
        assert any(key.startswith(name) for key in values)


def test_the_page_has_data(client: openai.OpenAI, url: str) -> None:
    client.completions.create(model="tiny", prompt="ab ab ab ab", temperature=0, max_tokens=40)
    data = httpx.get(f"{url}/live").json()
    assert data["steps"]
    assert data["tokens_per_pass"] >= 1
    assert data["blocks"]["used"] == 0
    page = httpx.get(url)
    assert page.status_code == 200
    assert "http://" not in page.text.replace("http://www.w3.org", "")
    assert "https://" not in page.text


# Errors and limits ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"temperature": -1}, 400, "temperature must be"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "role"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"n": 10**6}, 400, "answers in a request"),
        ({"surprise": 1}, 400, "surprise"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"1000": 1}}, 400, "last one is"),
        ({"model": "other"}, 404, "not served here"),
        ({"top_logprobs": 2}, 400, "logprobs"),
        ({"guided_regex": "(a"}, 400, "grammar"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, 400, "not several"),
        ({"chat_template_kwargs": {"messages": []}}, 400, "cannot set 'messages'"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, 400, "context"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "surrogate"),
    ],
)
def test_mistakes_are_told_in_openais_shape(
    url: str, change: dict[str, Any], status: int, says: str
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2} | change
    answer = httpx.post(
        f"{url}/v1/chat/completions",
        content=json.dumps(body),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == status
    error = answer.json()["error"]
    assert says in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_wrong_paths_methods_and_bodies(url: str) -> None:
    assert httpx.get(f"{url}/nothing").json()["error"]["message"]
    assert httpx.get(f"{url}/v1/completions").status_code == 405
    broken = httpx.post(
        f"{url}/v1/completions", content="{", headers={"Content-Type": "application/json"}
    )
    assert broken.status_code == 400
    assert broken.json()["error"]["type"] == "invalid_request_error"


def test_keys_and_body_limits(tiny_gguf: Path) -> None:
    with serving(make_llm(tiny_gguf), api_keys=("s3cret",), max_body_bytes=500) as url:
        body = {"prompt": "x", "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        right = {"Authorization": "Bearer s3cret"}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=right).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200
        long = httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 600}, headers=right)
        assert long.status_code == 413
        unannounced = httpx.post(
            f"{url}/v1/completions", content=(b" " * 100 for _ in range(6)), headers=right
        )
        assert unannounced.status_code == 413
        assert (
            "access-control-allow-origin"
            not in httpx.get(f"{url}/health", headers={"Origin": "http://elsewhere"}).headers
        )


def test_a_full_queue_says_when_to_come_back(tiny_gguf: Path) -> None:
    llm = make_llm(tiny_gguf, max_num_seqs=1)
    with serving(llm, max_waiting=1) as url:
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with (
            httpx.stream("POST", f"{url}/v1/completions", json=body) as first,
            httpx.stream("POST", f"{url}/v1/completions", json=body) as second,
        ):
            assert (first.status_code, second.status_code) == (200, 200)
            third = httpx.post(f"{url}/v1/completions", json=body)
            assert third.status_code == 429
            assert int(third.headers["Retry-After"]) >= 1
            assert third.json()["error"]["code"] == "queue_full"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_takes_its_work_with_it(url: str, llm: LLM, stream: bool) -> None:
    async def leave() -> None:
        body = {"prompt": "x", "max_tokens": 240, "ignore_eos": True, "stream": stream}
        async with httpx.AsyncClient() as client:
            task = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
            while not llm.engine.has_work:
                await asyncio.sleep(0.001)
            task.cancel()

    before = llm.engine.stats().num_output_tokens
    asyncio.run(leave())
    give_up = time.monotonic() + 10
    while llm.engine.has_work and time.monotonic() < give_up:
        time.sleep(0.001)
    assert llm.engine.stats().num_output_tokens - before < 240


def test_shutdown_finishes_what_it_can(tiny_gguf: Path) -> None:
    llm = make_llm(tiny_gguf)
    answers = []

    def ask(url: str) -> None:
        body = {"prompt": "x", "max_tokens": 50, "ignore_eos": True}
        answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=30))

    with serving(llm, grace_sec=30.0) as url:
        asking = threading.Thread(target=ask, args=(url,))
        asking.start()
        while not llm.engine.has_work:
            time.sleep(0.001)
    asking.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 50


def test_shutdown_cuts_off_the_rest_and_says_why(tiny_gguf: Path) -> None:
    llm = make_llm(tiny_gguf)
    body = {"prompt": "x", "max_tokens": 240, "ignore_eos": True, "stream": True}
    with ExitStack() as running:
        url = running.enter_context(serving(llm, grace_sec=0.0))
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
            events = answer.iter_lines()
            next(events)
            running.close()
            *_, last, _, done, _ = events
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert done == "data: [DONE]"
