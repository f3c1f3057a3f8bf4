"""The Python interface on a tiny model, in float64: every token and number against the oracle."""

import json
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from slipstream import LLM, SamplingParams, reference
from slipstream.core.errors import ConfigError, ModelError, RequestError
from slipstream.core.outputs import CompletionOutput, Delta

PROMPTS = ["hello", "the cat sat there", "x", "What is this?"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=12)
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
def llm(tiny_gguf: Path) -> Iterator[LLM]:
    """A fresh engine, which must be clean when the test is over."""
    llm = LLM(str(tiny_gguf), dtype="float64", device="cpu", quiet=True, kv_cache_memory=2**20)
    yield llm
    assert_clean(llm)


def assert_clean(llm: LLM) -> None:
    llm.engine.check_integrity()
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


def oracle(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    assert params.max_tokens is not None
    return reference.generate(
        llm.loaded.model,
        prompt,
        params,
        stop_ids=llm.tokenizer.eos_ids,
        num_tokens=params.max_tokens,
    )


# Generate and chat ----------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_outputs_come_in_order_and_are_the_oracles(llm: LLM, params: SamplingParams) -> None:
    outputs = llm.generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = llm.tokenizer.encode(prompt)
        assert output.prompt_token_ids == ids
        answer = output.outputs[0]
        assert answer.token_ids == oracle(llm, ids, params)
        assert output.text == answer.text == llm.tokenizer.decode(answer.token_ids)
        ended = answer.token_ids[-1] in llm.tokenizer.eos_ids
        assert answer.finish_reason == ("stop" if ended else "length")


def test_a_prompt_is_a_text_or_ids_alone_or_in_a_list(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    texts = {
        output.text
        for prompts in ("hello", ["hello"], ids, [ids], [tuple(ids)])
        for output in llm.generate(prompts, GREEDY)
    }
    assert len(texts) == 1
    assert llm.generate([], GREEDY) == []


def test_each_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    outputs = llm.generate(["hello", "x", "hello"], each)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids[:1]


def test_the_number_of_parameters_must_fit(llm: LLM) -> None:
    with pytest.raises(RequestError, match="3 prompts but 2 sampling parameters"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])


def test_text_of_a_prompt_makes_no_control_tokens(llm: LLM) -> None:
    output = llm.generate("<|im_end|>", GREEDY)[0]
    assert not llm.tokenizer.special_ids & set(output.prompt_token_ids)


def test_chat_goes_through_the_template(llm: LLM) -> None:
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = llm.tokenizer.encode(text, parse_special=True)
    output = llm.chat(USER, GREEDY)[0]
    assert output.prompt_token_ids == ids
    assert output.outputs[0].token_ids == oracle(llm, ids, GREEDY)


def test_several_conversations_at_once(llm: LLM) -> None:
    other = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}]
    together = llm.chat([USER, other], GREEDY)
    apart = [llm.chat(conversation, GREEDY)[0] for conversation in (USER, other)]
    assert [output.text for output in together] == [output.text for output in apart]


def test_several_answers(llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=3, n=3, max_tokens=8, ignore_eos=True)
    answers = llm.generate("hello", params)[0].outputs
    assert [answer.index for answer in answers] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    for answer in answers:
        expected = reference.generate(
            llm.loaded.model,
            llm.tokenizer.encode("hello"),
            params,
            branch=answer.index,
            num_tokens=8,
        )
        assert answer.token_ids == expected


def test_logprobs_are_those_of_the_oracle(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=10, logprobs=4, ignore_eos=True)
    output = llm.generate("hello", params)[0]
    answer = output.outputs[0]
    assert answer.logprobs is not None and len(answer.logprobs) == 10
    tokens = output.prompt_token_ids + answer.token_ids
    logits = reference.logits(llm.loaded.model, tokens)
    expected = torch.log_softmax(logits, dim=-1)[len(output.prompt_token_ids) - 1 :]
    for entry, row, token in zip(answer.logprobs, expected, answer.token_ids, strict=False):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-5)
        best = row.topk(4)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_no_logprobs_unless_asked(llm: LLM) -> None:
    assert llm.generate("hello", GREEDY)[0].outputs[0].logprobs is None


# Streams --------------------------------------------------------------------------------------


def joined(deltas: list[Delta]) -> tuple[str, list[int], str | None]:
    text = "".join(delta.text for delta in deltas)
    ids = [token for delta in deltas for token in delta.token_ids]
    return text, ids, deltas[-1].finish_reason


def parts(answer: CompletionOutput) -> tuple[str, list[int], str | None]:
    return answer.text, answer.token_ids, answer.finish_reason


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stream_joined_is_the_answer(llm: LLM, prompt: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, stop=("4H", "s"))
    assert joined(list(llm.stream(prompt, params))) == parts(
        llm.generate(prompt, params)[0].outputs[0]
    )


def test_a_stream_of_a_conversation(llm: LLM) -> None:
    expected = parts(llm.chat(USER, GREEDY)[0].outputs[0])
    assert joined(list(llm.stream(USER, GREEDY))) == expected


def test_text_comes_while_it_is_made(llm: LLM) -> None:
    deltas = list(llm.stream("hello", GREEDY))
    assert [len(delta.token_ids) for delta in deltas] == [1] * 12
    assert [delta.finish_reason for delta in deltas] == [None] * 11 + ["length"]


@pytest.mark.parametrize("num_taken", [0, 1, 5])
def test_a_closed_stream_gives_its_blocks_back(llm: LLM, num_taken: int) -> None:
    stream = llm.stream("the cat sat there", SamplingParams(temperature=0, ignore_eos=True))
    for _ in range(num_taken):
        next(stream)
    stream.close()
    assert_clean(llm)


def test_two_streams_at_once_keep_their_text(llm: LLM) -> None:
    streams = {prompt: llm.stream(prompt, GREEDY) for prompt in ("hello", "What is this?")}
    deltas: dict[str, list[Delta]] = {prompt: [] for prompt in streams}
    for both in zip_longest(*streams.values()):
        for prompt, delta in zip(streams, both, strict=True):
            deltas[prompt] += [delta] if delta else []
    for prompt in streams:
        assert joined(deltas[prompt]) == parts(llm.generate(prompt, GREEDY)[0].outputs[0])


def test_generate_during_a_stream_takes_nothing_from_it(llm: LLM) -> None:
    expected = parts(llm.generate("hello", GREEDY)[0].outputs[0])
    stream = llm.stream("hello", GREEDY)
    deltas = [next(stream)]
    llm.generate("x", GREEDY)
    deltas += stream
    assert joined(deltas) == expected


# What goes wrong ------------------------------------------------------------------------------


def test_one_bad_prompt_leaves_nothing_of_the_others(llm: LLM) -> None:
    for bad in ("", "x" * 1000, [0, 100], [-1]):
        with pytest.raises(RequestError):
            llm.generate(["hello", bad], GREEDY)
        assert_clean(llm)


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()], ids=repr)
def test_a_failure_in_the_middle_leaves_a_clean_engine(
    llm: LLM, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [output.text for output in llm.generate(PROMPTS, GREEDY)]
    runner = llm.engine.parts.runner
    whole, passes = runner.forward, iter(range(4))

    def failing(batch: Any) -> Any:
        if next(passes, None) is None:
            raise error
        return whole(batch)

    for run in (lambda: llm.generate(PROMPTS, GREEDY), lambda: list(llm.stream(USER, GREEDY))):
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            passes = iter(range(4))
            patch.setattr(runner, "forward", failing)
            run()
        assert_clean(llm)
    assert [output.text for output in llm.generate(PROMPTS, GREEDY)] == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sequences": 3}, "unknown engine option max_sequences"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1"),
        ({"max_model_len": 1}, "max_model_len must be at least 2"),
        ({"max_model_len": 257}, "exceeds the model's context of 256"),
        ({"kv_cache_memory": 1000}, "one KV block needs"),
        ({"kv_cache_memory": -1}, "kv_cache_memory"),
        ({"kv_cache_share": 2.0}, "kv_cache_share must be"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"device": "tpu"}, "device must be"),
        ({"dtype": "int8"}, "dtype must be"),
    ],
    ids=str,
)
def test_refused_options_are_named(options: dict[str, Any], message: str, tiny_gguf: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_gguf), quiet=True, **({"device": "cpu", "kv_cache_memory": 2**20} | options))


def test_a_tokenizer_larger_than_the_model(
    tmp_path: Path,
    write_gguf: Callable[..., Path],
    tiny_metadata: dict[str, Any],
    tiny_tensors: dict[str, np.ndarray],
) -> None:
    smaller = {name: tiny_tensors[name][:90] for name in ("token_embd.weight", "output.weight")}
    path = write_gguf(tmp_path / "a.gguf", tiny_metadata, tiny_tensors | smaller)
    with pytest.raises(ModelError, match="knows 100 tokens, the model only 90"):
        LLM(str(path), quiet=True, kv_cache_memory=2**20)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_precisions_run(dtype: str, tiny_gguf: Path) -> None:
    llm = LLM(str(tiny_gguf), dtype=dtype, device="cpu", quiet=True, kv_cache_memory=2**20)
    assert llm.loaded.model.dtype == getattr(torch, dtype)
    assert llm.generate("hello", GREEDY)[0].outputs[0].metrics.num_output_tokens == 12


# A Hugging Face directory ---------------------------------------------------------------------


def test_a_directory_is_the_same_model(
    llm: LLM,
    tmp_path: Path,
    tiny_metadata: dict[str, Any],
    tiny_tensors: dict[str, np.ndarray],
) -> None:
    write_directory(tmp_path, tiny_metadata, tiny_tensors)
    other = LLM(str(tmp_path), dtype="float64", device="cpu", quiet=True, kv_cache_memory=2**20)
    assert other.tokenizer.eos_ids == llm.tokenizer.eos_ids
    for prompt in PROMPTS:
        expected = llm.generate(prompt, GREEDY)[0]
        output = other.generate(prompt, GREEDY)[0]
        assert output.prompt_token_ids == expected.prompt_token_ids
        assert parts(output.outputs[0]) == parts(expected.outputs[0])
    assert other.chat(USER, GREEDY)[0].text == llm.chat(USER, GREEDY)[0].text


def write_directory(path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
    }
    renamed = {}
    for name, array in tensors.items():
        *layer, part, kind = name.removeprefix("blk.").split(".")
        renamed[".".join([*(["model.layers", *layer] if layer else []), names[part], kind])] = array
    save_file(renamed, path / "model.safetensors")

    shape = {key.removeprefix("qwen3."): value for key, value in metadata.items()}
    config = {
        "model_type": "qwen3",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": shape["embedding_length"],
        "intermediate_size": shape["feed_forward_length"],
        "num_hidden_layers": shape["block_count"],
        "num_attention_heads": shape["attention.head_count"],
        "num_key_value_heads": shape["attention.head_count_kv"],
        "head_dim": shape["attention.key_length"],
        "rms_norm_eps": shape["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": shape["context_length"],
        "rope_theta": shape["rope.freq_base"],
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(config))

    tokens, merges = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges"))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bpe = models.BPE(vocab=vocabulary, merges=[tuple(merge.split()) for merge in merges])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[-2:]])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
