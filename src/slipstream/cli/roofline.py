"""`slipstream roofline`: what this machine can do, and what a model's steps make of it."""

import argparse
import json
from typing import TYPE_CHECKING

from slipstream.cli import options

if TYPE_CHECKING:
    from slipstream.bench.roofline import Roofline


def add_parser(commands: options.Commands) -> None:
    parser = commands.add_parser(
        "roofline",
        help="measure the machine and a model's steps on it",
        description="Where a model's passes sit below the machine's ceilings. --device also takes "
        "the name of a datasheet, such as h100, instead of measuring.",
    )
    parser.add_argument(
        "--acceptance",
        type=float,
        default=0.8,
        metavar="A",
        help="chance that a drafted token is right, for the speedups (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON on the last line")
    parser.add_argument("--plot", metavar="FILE.png", help="draw it (needs matplotlib)")
    options.add_model(parser)
    options.add_speculation(parser)
    options.add_engine(parser)
    parser.set_defaults(run=run, spec_method="off")


def run(args: argparse.Namespace) -> int:
    from slipstream.bench.roofline import datasheet_roofline, draw, measured_roofline
    from slipstream.maths.roofline import HARDWARE

    # --device takes the name of a datasheet too; the model's shape is then read on the CPU.
    datasheet = args.device if args.device in HARDWARE else None
    args.device = "cpu" if datasheet else args.device
    llm = options.make_llm(args)
    if datasheet:
        roofline = datasheet_roofline(datasheet, llm.loaded.model)
    else:
        roofline = measured_roofline(llm.engine.parts.runner)
    print(_table(roofline, args.acceptance))
    if args.plot:
        draw(roofline, args.plot)
    if args.json:
        print(json.dumps({"model": llm.loaded.name} | roofline.as_dict(args.acceptance)))
    return 0


def _table(roofline: "Roofline", alpha: float) -> str:
    device = roofline.device
    lines = [
        f"{device.bytes_per_sec / 1e9:.1f} GB/s, {device.flops_per_sec / 1e12:.2f} TOP/s in "
        f"{device.arithmetic}; the ridge is at {roofline.ridge_rows:.0f} rows ({device.source})",
        f"speedup: of free drafts, each right with chance {alpha:g}, measured / predicted",
        f"{'rows':>5} {'measured ms':>12} {'predicted ms':>13} {'speedup':>16}",
    ]
    for step in roofline.steps:
        measured = "-" if step.measured_ms is None else f"{step.measured_ms:.1f}"
        gains = [
            roofline.speedup(alpha, step.rows - 1, measured=measured) for measured in (True, False)
        ]
        shown = " / ".join("-" if gain is None else f"{gain:.2f}x" for gain in gains)
        lines.append(f"{step.rows:>5} {measured:>12} {step.predicted_ms:>13.1f} {shown:>16}")
    return "\n".join(lines)
