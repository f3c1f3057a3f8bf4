"""`slipstream pull`: download a model."""

import argparse

from slipstream.cli import options


def add_parser(commands: options.Commands) -> None:
    parser = commands.add_parser("pull", help="download a model")
    parser.add_argument("model", metavar="NAME", help="alias or hf:org/repo[/file.gguf]")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from slipstream.loading.pull import pull

    print(pull(args.model, quiet=args.quiet))
    return 0
