"""`slipstream generate`: answer one prompt."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from slipstream.cli import options
from slipstream.cli.answers import (
    as_json,
    drafts_legend,
    stats_lines,
    stream_answer,
    timings_line,
)
from slipstream.core.errors import RequestError

if TYPE_CHECKING:
    from slipstream.llm import LLM


def add_parser(commands: options.Commands) -> None:
    parser = commands.add_parser("generate", help="answer one prompt")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="default: read stdin")
    parser.add_argument("--file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="use the chat template, or fail")
    form.add_argument("--raw", action="store_true", help="continue the prompt as plain text")
    parser.add_argument(
        "--parse-special", action="store_true", help="let a raw prompt contain control tokens"
    )
    parser.add_argument("--n", type=int, default=1, metavar="N", help="number of answers")
    parser.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: log-probabilities, top N"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--show-drafts", action="store_true", help="colour tokens by where they came from"
    )
    parser.add_argument("--stats", action="store_true", help="print acceptance and time shares")
    options.add_model(parser)
    options.add_sampling(parser)
    options.add_speculation(parser)
    options.add_engine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.logprobs is not None and not args.json:
        raise RequestError("--logprobs shows only with --json; add it")
    prompt = _read_prompt(args)
    params = options.sampling_params(args)
    llm = options.make_llm(args)
    ids = _prompt_ids(llm, prompt, args)
    if args.json or params.n > 1:
        output = llm.generate([ids], params)[0]
        if args.json:
            print(json.dumps(as_json(llm, output, params)))
        else:
            for answer in output.outputs:
                print(f"[{answer.index}] {answer.text}")
        answers = output.outputs
    else:
        if args.show_drafts:
            print(drafts_legend(), file=sys.stderr)
        answers = [stream_answer(llm, ids, params, show_drafts=args.show_drafts)]
    if not args.quiet and not args.json:
        print(timings_line(answers), file=sys.stderr)
    if args.stats:
        print("\n".join(stats_lines(llm)), file=sys.stderr)
    return 0


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
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"cannot read the prompt from stdin: {error}") from error


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
