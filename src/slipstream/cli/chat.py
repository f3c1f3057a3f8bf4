"""`slipstream chat`: talk to a model, turn by turn."""

import argparse
import sys
from typing import TYPE_CHECKING

from slipstream.cli import options
from slipstream.cli.answers import stream_answer, timings_line
from slipstream.core.errors import RequestError

if TYPE_CHECKING:
    from slipstream.core.params import SamplingParams
    from slipstream.llm import LLM


def add_parser(commands: options.Commands) -> None:
    parser = commands.add_parser("chat", help="talk to a model, turn by turn")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--show-drafts", action="store_true", help="colour tokens by where they came from"
    )
    options.add_model(parser)
    options.add_sampling(parser)
    options.add_speculation(parser)
    options.add_engine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    params = options.sampling_params(args)
    llm = options.make_llm(args)
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
            _turn(llm, messages, line, params, args)


def _turn(
    llm: "LLM",
    messages: list[dict[str, str]],
    line: str,
    params: "SamplingParams",
    args: argparse.Namespace,
) -> None:
    """One question and its answer; a mistake costs the turn and not the chat."""
    messages.append({"role": "user", "content": line})
    try:
        ids = llm.chat_ids(messages)
        answer = stream_answer(llm, ids, params, show_drafts=args.show_drafts)
    except RequestError as error:
        print(f"slipstream: error: {error}", file=sys.stderr)
        messages.pop()
        return
    messages.append({"role": "assistant", "content": answer.text})
    if not args.quiet:
        print(timings_line([answer]), file=sys.stderr)
