"""`slipstream models`: what is known by a short name, and what is cached."""

import argparse
import json
from dataclasses import asdict

from slipstream.cli import options


def add_parser(commands: options.Commands) -> None:
    parser = commands.add_parser("models", help="list the models known by a short name")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from slipstream.loading.pull import list_models

    rows = list_models()
    if args.json:
        print(json.dumps([asdict(row) for row in rows], default=str))
        return 0
    width = max(len(row.name) for row in rows)
    for row in rows:
        where = f"cached: {row.path}" if row.path else "not cached"
        size = f"{row.num_bytes / 1e6:,.0f} MB"
        print(f"{row.name:<{width}}  {size:>8}  {row.licence:<18}  {where}")
        print(f"{'':<{width}}  {'':>8}  {row.description}")
    return 0
