"""The command line. Flags are spelled as vLLM and llama.cpp users know them.

Answers go to stdout, everything else to stderr; with `--json` the last line of stdout is one
object. Exit codes: 0 done, 2 a mistake that one line explains, 130 interrupted.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from slipstream import __version__
from slipstream.core.errors import RequestError, SlipstreamError
from slipstream.loading.aliases import DEFAULT_ALIAS

if TYPE_CHECKING:
    from slipstream.core.outputs import CompletionOutput, RequestOutput
    from slipstream.core.params import SamplingParams
    from slipstream.llm import LLM


def main(argv: Seq[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except SlipstreamError as error:
        print(f"slipstream: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nslipstream: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away, as in `slipstream ... | head`; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


# Commands ------------------------------------------------------------------------------------


def _generate(args: argparse.Namespace) -> int:
    prompt = _read_prompt(args)
    params = _sampling_params(args)
    llm = _llm(args)
    ids = _prompt_ids(llm, prompt, args)
    if args.json or params.n > 1:
        output = llm.generate([ids], params)[0]
        if args.json:
            print(json.dumps(_as_json(llm, output, params)))
        else:
            for answer in output.outputs:
                print(f"[{answer.index}] {answer.text}")
        answers = output.outputs
    else:
        answers = [_stream_answer(llm, ids, params)]
    if not args.quiet and not args.json:
        print(_timings_line(answers), file=sys.stderr)
    return 0


def _chat(args: argparse.Namespace) -> int:
    params = _sampling_params(args)
    llm = _llm(args)
    llm.chat_ids([{"role": "user", "content": "?"}])  # a model without a template: say so now
    if sys.stdin.isatty():
        import readline  # noqa: F401  line editing and history for input()

        print("Ctrl-C stops an answer, Ctrl-D or /exit ends the chat, /new starts over.")
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if line == "/exit":
            return 0
        if line == "/new":
            messages = list(opening)
        elif line:
            _chat_turn(llm, messages, line, params, quiet=args.quiet)


def _chat_turn(
    llm: "LLM", messages: list[dict[str, str]], line: str, params: "SamplingParams", *, quiet: bool
) -> None:
    """One question and its answer; a mistake costs the turn and not the chat."""
    messages.append({"role": "user", "content": line})
    try:
        answer = _stream_answer(llm, llm.chat_ids(messages), params)
    except RequestError as error:
        print(f"slipstream: error: {error}", file=sys.stderr)
        messages.pop()
        return
    messages.append({"role": "assistant", "content": answer.text})
    if not quiet:
        print(_timings_line([answer]), file=sys.stderr)


def _pull(args: argparse.Namespace) -> int:
    from slipstream.loading.pull import pull

    print(pull(args.model, quiet=args.quiet))
    return 0


def _models(args: argparse.Namespace) -> int:
    from slipstream.loading.pull import list_models

    rows = list_models()
    if args.json:
        print(json.dumps([asdict(row) for row in rows], default=str))
        return 0
    width = max(len(row.name) for row in rows)
    for row in rows:
        where = f"cached: {row.path}" if row.path else "not cached"
        size = f"{row.num_bytes / 1e6:,.0f} MB"
        print(f"{row.name:<{width}}  {size:>8}  {row.licence:<12}  {where}")
        print(f"{'':<{width}}  {row.description}")
    return 0


# From arguments to objects -------------------------------------------------------------------


def _llm(args: argparse.Namespace) -> "LLM":
    from slipstream.llm import LLM

    return LLM(
        args.model,
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        quiet=args.quiet or not sys.stderr.isatty(),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        kv_cache_memory=args.kv_cache_memory,
        prefix_caching=not args.no_prefix_caching,
    )


def _sampling_params(args: argparse.Namespace) -> "SamplingParams":
    from slipstream.core.params import SamplingParams

    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=dict(args.logit_bias),
        seed=args.seed,
        n=getattr(args, "n", 1),
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        stop=tuple(args.stop),
        stop_token_ids=tuple(args.stop_token_ids),
        ignore_eos=args.ignore_eos,
        logprobs=getattr(args, "logprobs", None),
    )


def _read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.file is not None:
        raise RequestError("give the prompt as an argument or with --file, not both")
    if args.prompt is not None:
        return args.prompt
    if args.file is not None:
        try:
            with open(args.file, encoding="utf-8") as file:
                return file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"cannot read the prompt from {args.file}: {error}") from error
    if sys.stdin.isatty():
        raise RequestError("no prompt; give one as an argument, with --file, or on stdin")
    return sys.stdin.read()


def _prompt_ids(llm: "LLM", prompt: str, args: argparse.Namespace) -> list[int]:
    """The prompt as a chat message where the model has a template, unless --raw."""
    if not prompt:
        raise RequestError("the prompt is empty")
    if args.raw or (llm.loaded.chat_template is None and not args.chat):
        if args.system:
            raise RequestError("--system needs a chat template; a raw prompt has no system message")
        return llm.tokenizer.encode(prompt, parse_special=args.parse_special)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    return llm.chat_ids([*opening, {"role": "user", "content": prompt}])


# From objects to text ------------------------------------------------------------------------


def _stream_answer(llm: "LLM", ids: list[int], params: "SamplingParams") -> "CompletionOutput":
    """Print an answer as it comes; Ctrl-C ends the answer and keeps what there is of it."""
    request_id = llm.engine.add(ids, params)
    try:
        while not llm.engine.is_finished(request_id):
            for delta in llm.engine.step():
                print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        for delta in llm.engine.abort(request_id):
            print(delta.text, end="")
    except BaseException:
        llm.engine.abort(request_id)
        raise
    print(flush=True)
    return llm.engine.output(request_id).outputs[0]


def _timings_line(answers: "Seq[CompletionOutput]") -> str:
    metrics = [answer.metrics for answer in answers]
    num_tokens = sum(m.num_output_tokens for m in metrics)
    parts = [
        f"{metrics[0].num_prompt_tokens} prompt tokens",
        f"first token {metrics[0].time_to_first_token_sec:.2f} s",
        f"{num_tokens} tokens in {max(m.total_sec for m in metrics):.2f} s",
    ]
    if len(metrics) == 1 and (rate := metrics[0].decode_tokens_per_sec) is not None:
        parts.append(f"{rate:.1f} tokens/s")
    parts.append(f"finished: {', '.join(sorted({a.finish_reason for a in answers}))}")
    return f"[{' · '.join(parts)}]"


def _as_json(llm: "LLM", output: "RequestOutput", params: "SamplingParams") -> dict[str, Any]:
    first, metrics = output.outputs[0], output.outputs[0].metrics
    num_output = sum(len(answer.token_ids) for answer in output.outputs)
    result: dict[str, Any] = {
        "text": first.text,
        "token_ids": first.token_ids,
        "finish_reason": first.finish_reason,
        "stop_reason": first.stop_reason,
        "usage": {
            "prompt_tokens": metrics.num_prompt_tokens,
            "cached_tokens": metrics.num_cached_tokens,
            "completion_tokens": num_output,
            "total_tokens": metrics.num_prompt_tokens + num_output,
        },
        "timings": {
            "time_to_first_token_sec": metrics.time_to_first_token_sec,
            "total_sec": metrics.total_sec,
            "decode_tokens_per_sec": metrics.decode_tokens_per_sec,
        },
        "model": llm.loaded.name,
        "dtype": str(llm.loaded.model.dtype).removeprefix("torch."),
    }
    if params.logprobs is not None:
        result["logprobs"] = [asdict(entry) for entry in first.logprobs or []]
    if params.n > 1:
        result["choices"] = [
            {"text": a.text, "token_ids": a.token_ids, "finish_reason": a.finish_reason}
            for a in output.outputs
        ]
    return result


# The parser ----------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream",
        description="Lossless speculative decoding: the same tokens, several times faster.",
    )
    parser.add_argument("--version", action="version", version=f"slipstream {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="answer one prompt")
    generate.add_argument("prompt", nargs="?", metavar="PROMPT", help="default: read stdin")
    generate.add_argument("--file", metavar="FILE", help="read the prompt from a file")
    form = generate.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="use the chat template, or fail")
    form.add_argument("--raw", action="store_true", help="continue the prompt as plain text")
    generate.add_argument(
        "--parse-special", action="store_true", help="let a raw prompt contain control tokens"
    )
    generate.add_argument("--n", type=int, default=1, metavar="N", help="number of answers")
    generate.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: log-probabilities, top N"
    )
    generate.add_argument("--json", action="store_true", help="print one JSON object instead")
    _add_common(generate)
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to a model, turn by turn")
    _add_common(chat)
    chat.set_defaults(run=_chat)

    pull = commands.add_parser("pull", help="download a model")
    pull.add_argument("model", metavar="NAME", help="alias or hf:org/repo[/file.gguf]")
    pull.add_argument("--quiet", action="store_true", help="no progress bar")
    pull.set_defaults(run=_pull)

    models = commands.add_parser("models", help="list the models known by a short name")
    models.add_argument("--json", action="store_true", help="print JSON instead")
    models.set_defaults(run=_models)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=DEFAULT_ALIAS,
        metavar="M",
        help="alias, GGUF file, model directory, or hf:org/repo[/file.gguf] (default: %(default)s)",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--quiet", action="store_true", help="no progress bars, no timings")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=256, metavar="N")
    sampling.add_argument("--min-tokens", type=int, default=0, metavar="N")
    sampling.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)"
    )
    sampling.add_argument("--top-k", type=int, default=0, metavar="K")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    sampling.add_argument("--presence-penalty", type=float, default=0.0, metavar="X")
    sampling.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X")
    sampling.add_argument(
        "--logit-bias", type=_bias, action="append", default=[], metavar="ID=X", help="repeatable"
    )
    sampling.add_argument("--seed", type=int, metavar="S", help="same seed, same tokens")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer; repeatable"
    )
    sampling.add_argument(
        "--stop-token-ids", type=int, nargs="+", default=[], metavar="ID", help="end the answer"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on past the model's end")

    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", default="auto", metavar="D", help="auto, cpu or cuda")
    engine.add_argument(
        "--dtype", default="auto", metavar="D", help="auto, float32, bfloat16 or float16"
    )
    engine.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    engine.add_argument("--max-num-seqs", type=int, default=64, metavar="N")
    engine.add_argument("--max-num-batched-tokens", type=int, default=512, metavar="N")
    engine.add_argument("--max-model-len", type=int, metavar="N", help="default: the model's own")
    engine.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens per block")
    engine.add_argument(
        "--kv-cache-memory",
        type=_memory,
        metavar="SIZE",
        help="for K/V, such as 512M or 2G (default: a quarter of free memory)",
    )
    engine.add_argument("--no-prefix-caching", action="store_true")


def _memory(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 512M or 2G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=NUMBER") from None


if __name__ == "__main__":
    sys.exit(main())
