"""The command line, run in this process on a tiny model: what it prints, where, and exit codes."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.cli import main
from slipstream.engine.engine import Engine
from slipstream.loading.aliases import ALIASES

PROMPT = "hello"
# float64 leaves no room for near-ties; the small pool keeps the memory of the test small.
FIXED = ("--device", "cpu", "--dtype", "float64", "--kv-cache-memory", "1M")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Run a command with the given stdin."""

    def run(*argv: str, stdin: str | bytes = "") -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()
        try:
            code = main(argv)
        except SystemExit as error:  # argparse
            assert isinstance(error.code, int)
            code = error.code
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def generate(run: Callable[..., Result], tiny_gguf: Path) -> Callable[..., Result]:
    """`slipstream generate` on the tiny model, 10 tokens unless said otherwise."""

    def generate(*argv: str, stdin: str | bytes = "") -> Result:
        model = ("--model", str(tiny_gguf)) if "--model" not in argv else ()
        return run("generate", *model, *FIXED, "--max-tokens", "10", *argv, stdin=stdin)

    return generate


@pytest.fixture
def llm(tiny_gguf: Path) -> LLM:
    return LLM(str(tiny_gguf), device="cpu", dtype="float64", quiet=True, kv_cache_memory=2**20)


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 10} | changes))


def assert_refused(result: Result, *fragments: str) -> None:
    """Exit code 2, nothing on stdout, one line that names what is wrong."""
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("slipstream: error: ") and result.err.count("\n") == 1, result.err
    for fragment in fragments:
        assert fragment in result.err


# Generate -------------------------------------------------------------------------------------


def test_the_answer_alone_is_on_stdout(generate: Callable[..., Result], llm: LLM) -> None:
    result = generate("--raw", PROMPT)
    assert result.code == 0
    assert result.out == llm.generate(PROMPT, greedy())[0].text + "\n"
    assert result.err.count("\n") == 1
    for fragment in ("5 prompt tokens", "10 tokens in", "finished: length"):
        assert fragment in result.err


def test_quiet_says_nothing_else(generate: Callable[..., Result]) -> None:
    assert generate("--raw", "--quiet", PROMPT).err == ""


def test_a_prompt_comes_from_argument_file_or_stdin(
    generate: Callable[..., Result], tmp_path: Path
) -> None:
    prompt = "two lines\nof text"
    (tmp_path / "prompt.txt").write_text(prompt)
    texts = {
        generate(prompt).out,
        generate("--file", str(tmp_path / "prompt.txt")).out,
        generate(stdin=prompt).out,
    }
    assert len(texts) == 1


def test_the_chat_template_is_used_where_there_is_one(
    generate: Callable[..., Result], llm: LLM
) -> None:
    chat = llm.chat([{"role": "user", "content": PROMPT}], greedy())[0].text + "\n"
    raw = llm.generate(PROMPT, greedy())[0].text + "\n"
    assert chat != raw
    assert generate(PROMPT).out == generate("--chat", PROMPT).out == chat
    assert generate("--raw", PROMPT).out == raw


def test_system_message(generate: Callable[..., Result], llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    expected = llm.chat(messages, greedy())[0].text + "\n"
    assert generate("--system", "Be brief.", PROMPT).out == expected


def test_control_tokens_in_a_raw_prompt_only_on_request(generate: Callable[..., Result]) -> None:
    def num_prompt_tokens(*argv: str) -> int:
        result = generate("--raw", "--json", "<|im_end|>", *argv)
        return json.loads(result.out)["usage"]["prompt_tokens"]

    assert num_prompt_tokens() > 1
    assert num_prompt_tokens("--parse-special") == 1


def test_stop_string_ends_the_answer(generate: Callable[..., Result]) -> None:
    whole = generate("--raw", PROMPT).out
    stopped = json.loads(generate("--raw", "--json", "--stop", whole[3:5], PROMPT).out)
    assert stopped["text"] == whole[:3]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", whole[3:5])


def test_stop_token_ends_the_answer(generate: Callable[..., Result]) -> None:
    ids = json.loads(generate("--raw", "--json", PROMPT).out)["token_ids"]
    answer = generate("--raw", "--json", "--stop-token-ids", str(ids[3]), PROMPT)
    stopped = json.loads(answer.out)
    assert stopped["token_ids"] == ids[:4]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", ids[3])


def test_logit_bias_forbids_a_token(generate: Callable[..., Result]) -> None:
    first, second = json.loads(generate("--raw", "--json", PROMPT).out)["token_ids"][:2]
    flags = ("--logit-bias", f"{first}=-100", "--logit-bias", f"{second}=-100")
    changed = json.loads(generate("--raw", "--json", *flags, PROMPT).out)
    assert not {first, second} & set(changed["token_ids"])


def test_same_seed_same_tokens(generate: Callable[..., Result]) -> None:
    flags = ("--raw", "--temperature", "1", "--ignore-eos", PROMPT)
    first, again, other = (generate(*flags, "--seed", seed).out for seed in ("5", "5", "6"))
    assert first == again != other


def test_without_a_seed_answers_differ(generate: Callable[..., Result]) -> None:
    flags = ("--raw", "--temperature", "1", "--ignore-eos", "--max-tokens", "40", PROMPT)
    assert generate(*flags).out != generate(*flags).out


def test_several_answers_are_numbered(generate: Callable[..., Result], llm: LLM) -> None:
    params = greedy(temperature=1.0, seed=5, n=2, stop=("\n",))
    answers = llm.generate(PROMPT, params)[0].outputs
    flags = ("--raw", "--temperature", "1", "--seed", "5", "--n", "2", "--stop", "\n")
    result = generate(*flags, PROMPT)
    assert result.out == f"[0] {answers[0].text}\n[1] {answers[1].text}\n"
    assert answers[0].text != answers[1].text


# JSON -----------------------------------------------------------------------------------------


def test_json_is_one_object_on_the_last_line(
    generate: Callable[..., Result], llm: LLM, tiny_gguf: Path
) -> None:
    result = generate("--raw", "--json", PROMPT)
    assert result.code == 0 and result.err == ""
    answer = json.loads(result.out.splitlines()[-1])
    expected = llm.generate(PROMPT, greedy())[0].outputs[0]
    assert answer["text"] == expected.text
    assert answer["token_ids"] == expected.token_ids
    assert answer["finish_reason"] == "length" and answer["stop_reason"] is None
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "completion_tokens": 10,
        "total_tokens": 15,
    }
    timings = answer["timings"]
    assert 0 < timings["time_to_first_token_sec"] <= timings["total_sec"]
    assert timings["decode_tokens_per_sec"] > 0
    assert (answer["model"], answer["dtype"]) == (str(tiny_gguf), "float64")
    assert "logprobs" not in answer and "choices" not in answer


def test_json_of_several_answers(generate: Callable[..., Result]) -> None:
    flags = ("--raw", "--json", "--temperature", "1", "--seed", "5", "--n", "2", "--ignore-eos")
    answer = json.loads(generate(*flags, PROMPT).out)
    assert len(answer["choices"]) == 2
    assert answer["choices"][0]["text"] == answer["text"]
    assert answer["usage"]["completion_tokens"] == 20


def test_json_logprobs(generate: Callable[..., Result]) -> None:
    answer = json.loads(generate("--raw", "--json", "--logprobs", "3", PROMPT).out)
    assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
    for entry in answer["logprobs"]:
        assert len(entry["top"]) == 3
        # Greedy: the emitted token is the most likely one.
        assert entry["top"][0] == [entry["token_id"], entry["logprob"]]


# Mistakes: one line, exit code 2 ----------------------------------------------------------------


def test_unknown_model(generate: Callable[..., Result]) -> None:
    assert_refused(generate("--model", "smolm2-135m", PROMPT), "'smolm2-135m'", "smollm2-135m")
    assert_refused(generate("--model", "./absent.gguf", PROMPT), "'./absent.gguf'")


def test_truncated_model(generate: Callable[..., Result], tiny_gguf: Path, tmp_path: Path) -> None:
    data = tiny_gguf.read_bytes()
    for length in (4, 100, len(data) // 2, len(data) - 1):
        path = tmp_path / "cut.gguf"
        path.write_bytes(data[:length])
        assert_refused(generate("--model", str(path), PROMPT), str(path), "not a whole GGUF file")


def test_unsupported_architecture(
    generate: Callable[..., Result],
    write_gguf: Callable[..., Path],
    tiny_metadata: dict[str, Any],
    tiny_tensors: dict[str, np.ndarray],
    tmp_path: Path,
) -> None:
    metadata = tiny_metadata | {"general.architecture": "mamba"}
    path = write_gguf(tmp_path / "mamba.gguf", metadata, tiny_tensors)
    assert_refused(generate("--model", str(path), PROMPT), "'mamba' is not supported")


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (("--max-tokens", "0"), ("max_tokens", "0")),
        (("--temperature", "-1"), ("temperature", "-1")),
        (("--temperature", "nan"), ("temperature", "nan")),
        (("--n", "0"), ("n must be", "0")),
        (("--top-p", "0"), ("top_p", "0")),
        (("--seed", "-1"), ("seed", "-1")),
        (("--min-tokens", "20"), ("min_tokens", "20")),
        (("--stop", ""), ("stop",)),
        (("--stop-token-ids", "100"), ("stop_token_ids", "100")),
        (("--logit-bias", "100=1"), ("logit_bias", "100")),
        (("--kv-cache-memory", "1K"), ("--kv-cache-memory",)),
        (("--kv-cache-memory", "0"), ("--kv-cache-memory",)),
        # More than any machine can address.
        (("--kv-cache-memory", "9000000T"), ("--kv-cache-memory",)),
        (("--max-model-len", "257"), ("257", "256")),
        (("--max-num-seqs", "0"), ("max_num_seqs", "0")),
        (("--block-size", "0"), ("block_size", "0")),
        (("--threads", "0"), ("threads", "0")),
        (("--dtype", "int4"), ("dtype", "'int4'")),
        (("--device", "tpu"), ("device", "'tpu'")),
        (("--raw", "--system", "Be brief."), ("--system",)),
        (("--file", "absent.txt"), ("not both",)),
    ],
    ids=lambda value: " ".join(value),
)
def test_refused_flags(
    flags: tuple[str, ...], fragments: tuple[str, ...], generate: Callable[..., Result]
) -> None:
    assert_refused(generate(PROMPT, *flags), *fragments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none(generate: Callable[..., Result]) -> None:
    assert_refused(generate("--device", "cuda", PROMPT), "cuda", "--device cpu")


@pytest.mark.parametrize("flags", [(), ("--raw",)])
def test_a_prompt_longer_than_the_context(
    flags: tuple[str, ...], generate: Callable[..., Result]
) -> None:
    assert_refused(generate(*flags, "x" * 300), "prompt has 3", "context of 256")


@pytest.mark.parametrize("flags", [(), ("--raw",), ("--chat",)])
def test_an_empty_prompt(flags: tuple[str, ...], generate: Callable[..., Result]) -> None:
    for argument in (("",), ()):
        assert_refused(generate(*flags, *argument), "the prompt is empty")


def test_a_prompt_file_that_cannot_be_read(generate: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"na\xefve")
    for name in ("absent.txt", "latin1.txt", "."):
        assert_refused(generate("--file", str(tmp_path / name)), str(tmp_path / name))


def test_stdin_that_is_not_text(generate: Callable[..., Result]) -> None:
    assert_refused(generate(stdin=b"na\xefve"))


def test_chat_without_a_template(
    generate: Callable[..., Result],
    run: Callable[..., Result],
    write_gguf: Callable[..., Path],
    tiny_metadata: dict[str, Any],
    tiny_tensors: dict[str, np.ndarray],
    tmp_path: Path,
) -> None:
    metadata = {k: v for k, v in tiny_metadata.items() if k != "tokenizer.chat_template"}
    path = str(write_gguf(tmp_path / "base.gguf", metadata, tiny_tensors))
    assert_refused(generate("--model", path, "--chat", PROMPT), "no chat template")
    assert_refused(run("chat", "--model", path, *FIXED, stdin="hi\n"), "no chat template")
    assert generate("--model", path, PROMPT).out == generate("--raw", PROMPT).out


@pytest.mark.parametrize(
    "argv",
    [
        ("--kv-cache-memory", "much"),
        ("--logit-bias", "a=1"),
        ("--max-tokens", "many"),
        ("--raw", "--chat"),
        ("--no-such-flag",),
    ],
    ids=" ".join,
)
def test_flags_the_parser_refuses(argv: tuple[str, ...], generate: Callable[..., Result]) -> None:
    result = generate(*argv, PROMPT)
    assert result.code == 2 and result.out == ""
    assert "error: " in result.err and argv[0] in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(("text", "tokens"), [("1K", 2), ("0.5KiB", 1), ("2kb", 4), ("1024", 2)])
def test_sizes(
    text: str, tokens: int, run: Callable[..., Result], tiny_gguf: Path, llm: LLM
) -> None:
    """With blocks of one token, 512 bytes each, a size is a number of tokens."""
    model = llm.loaded.model.config
    assert 2 * 8 * model.num_layers * model.num_kv_heads * model.head_dim == 512
    flags = ("--model", str(tiny_gguf), *FIXED, "--raw", "--block-size", "1")
    flags = (*flags, "--kv-cache-memory", text, "--max-tokens", "1")
    assert run("generate", *flags, "x" * tokens).code == 0
    assert_refused(run("generate", *flags, "x" * (tokens + 1)), f"the pool has {tokens}")


# Interruptions --------------------------------------------------------------------------------


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make the engine's step number `num_steps` + 1 the moment of a Ctrl-C, once."""

    def interrupt(num_steps: int) -> None:
        whole, steps = Engine.step, iter(range(num_steps))

        def step(engine: Engine) -> Any:
            if next(steps, None) is None:
                monkeypatch.setattr(Engine, "step", whole)
                raise KeyboardInterrupt
            return whole(engine)

        monkeypatch.setattr(Engine, "step", step)

    return interrupt


def test_ctrl_c_keeps_what_there_is(
    generate: Callable[..., Result], interrupt: Callable[[int], None]
) -> None:
    whole = generate("--raw", PROMPT).out
    interrupt(4)
    result = generate("--raw", PROMPT)
    assert result.code == 0
    assert result.out == whole[:4] + "\n"
    assert "finished: abort" in result.err and "Traceback" not in result.err


@pytest.mark.parametrize("flag", [("--json",), ("--n", "2")])
def test_ctrl_c_where_nothing_is_printed_yet(
    flag: tuple[str, ...], generate: Callable[..., Result], interrupt: Callable[[int], None]
) -> None:
    interrupt(4)
    result = generate("--raw", *flag, PROMPT)
    assert (result.code, result.out) == (130, "")
    assert "interrupted" in result.err and "Traceback" not in result.err


@pytest.mark.parametrize("command", ["generate", "models"])
def test_a_reader_that_goes_away(command: str, tiny_gguf: Path, tmp_path: Path) -> None:
    """A stream meets the closed pipe at once; a short output only when its buffer is emptied."""
    flags = ["--model", str(tiny_gguf), *FIXED, "--quiet", PROMPT]
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli", command, *(flags if command != "models" else [])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"SLIPSTREAM_CACHE": str(tmp_path), "PYTHONUNBUFFERED": ""},
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


# Chat -----------------------------------------------------------------------------------------


@pytest.fixture
def chat(run: Callable[..., Result], tiny_gguf: Path) -> Callable[..., Result]:
    """`slipstream chat` fed with lines."""

    def chat(*lines: str, flags: tuple[str, ...] = ()) -> Result:
        argv = ("chat", "--model", str(tiny_gguf), *FIXED, "--max-tokens", "10", "--quiet")
        return run(*argv, *flags, stdin="".join(f"{line}\n" for line in lines))

    return chat


def conversation(llm: LLM, *questions: str, system: str | None = None) -> str:
    """The answers to a conversation, as `chat` prints them."""
    messages = [{"role": "system", "content": system}] if system else []
    printed = ""
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, greedy())[0].text
        messages.append({"role": "assistant", "content": answer})
        printed += answer + "\n"
    return printed


def test_turns_remember_each_other_until_new(chat: Callable[..., Result], llm: LLM) -> None:
    result = chat("hi", "more", "/new", "more", "/exit", "never read")
    assert (result.code, result.err) == (0, "")
    assert result.out == conversation(llm, "hi", "more") + conversation(llm, "more")
    assert conversation(llm, "hi", "more") != conversation(llm, "hi") + conversation(llm, "more")


def test_the_end_of_the_input_ends_the_chat(chat: Callable[..., Result], llm: LLM) -> None:
    result = chat("", "  hi  ", "")
    assert (result.code, result.err) == (0, "")
    assert result.out == conversation(llm, "hi")


def test_system_message_survives_new(chat: Callable[..., Result], llm: LLM) -> None:
    result = chat("hi", "/new", "hi", flags=("--system", "Be brief."))
    assert result.out == 2 * conversation(llm, "hi", system="Be brief.")


def test_a_turn_too_long_costs_only_itself(chat: Callable[..., Result], llm: LLM) -> None:
    result = chat("hi", "x" * 300, "more")
    assert result.code == 0
    assert result.out == conversation(llm, "hi", "more")
    assert result.err.count("\n") == 1 and "context of 256" in result.err


def test_ctrl_c_stops_an_answer_and_not_the_chat(
    chat: Callable[..., Result], llm: LLM, interrupt: Callable[[int], None]
) -> None:
    first = conversation(llm, "hi")[:4]
    interrupt(4)
    result = chat("hi", "/new", "more")
    assert (result.code, result.err) == (0, "")
    assert result.out == first + "\n" + conversation(llm, "more")


# Models and pull ------------------------------------------------------------------------------


@pytest.fixture
def cached_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """An alias whose file is in a cache that has nothing else."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    alias = ALIASES["gemma3-270m"]
    path = tmp_path / "models" / alias.sha256[:12] / f"{alias.name}.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    return alias.name, path


def test_models_lists_aliases(run: Callable[..., Result], cached_alias: tuple[str, Path]) -> None:
    result = run("models")
    assert (result.code, result.err) == (0, "")
    name, path = cached_alias
    for alias in ALIASES.values():
        line = next(line for line in result.out.splitlines() if line.startswith(alias.name + " "))
        assert alias.licence in line
        assert line.endswith(f"cached: {path}" if alias.name == name else "not cached")
        assert alias.description in result.out


def test_models_as_json(run: Callable[..., Result], cached_alias: tuple[str, Path]) -> None:
    rows = json.loads(run("models", "--json").out)
    assert [row["name"] for row in rows] == list(ALIASES)
    paths = {row["name"]: row["path"] for row in rows}
    assert paths == dict.fromkeys(ALIASES) | {cached_alias[0]: str(cached_alias[1])}
    for row in rows:
        assert row["num_bytes"] == ALIASES[row["name"]].num_bytes
        assert {"licence", "description"} <= row.keys()


def test_pull_of_what_is_here_prints_its_path(
    run: Callable[..., Result], cached_alias: tuple[str, Path], tiny_gguf: Path
) -> None:
    assert run("pull", cached_alias[0]) == Result(0, f"{cached_alias[1]}\n", "")
    assert run("pull", str(tiny_gguf)) == Result(0, f"{tiny_gguf}\n", "")


def test_pull_of_what_cannot_be(run: Callable[..., Result]) -> None:
    assert_refused(run("pull", "nonsense"), "'nonsense'")


# The parser -----------------------------------------------------------------------------------


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\n"
        "from slipstream.cli import main\n"
        "try:\n"
        "    main(['generate', '--help'])\n"
        "except SystemExit as error:\n"
        "    assert error.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--max-tokens" in done.stdout


@pytest.mark.parametrize("argv", [(), ("nonsense",), ("generate", "a", "b")])
def test_commands_the_parser_refuses(argv: tuple[str, ...], run: Callable[..., Result]) -> None:
    result = run(*argv)
    assert result.code == 2 and result.out == "" and "usage: " in result.err


def test_version(run: Callable[..., Result]) -> None:
    from slipstream import __version__

    assert run("--version") == Result(0, f"slipstream {__version__}\n", "")
