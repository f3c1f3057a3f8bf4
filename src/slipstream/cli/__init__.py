"""The command line. Flags are spelled as vLLM and llama.cpp users know them.

Answers go to stdout, everything else to stderr; with `--json` the last line of stdout is one
object. Exit codes: 0 done, 2 a mistake that one line explains, 130 interrupted; `prove` has its
own. One command, one file, each with `add_parser` and `run`.
"""

import argparse
import os
import sys
from collections.abc import Sequence as Seq

from slipstream import __version__
from slipstream.cli import bench, chat, generate, models, prove, pull, roofline, serve, train
from slipstream.core.errors import SlipstreamError

COMMANDS = (generate, chat, serve, prove, bench, roofline, train, pull, models)


def main(argv: Seq[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()  # here, where a reader that went away is no surprise
        return code
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream",
        description="Lossless speculative decoding: the same tokens, several times faster.",
    )
    parser.add_argument("--version", action="version", version=f"slipstream {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
