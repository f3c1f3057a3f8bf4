"""`slipstream bench`: methods head to head on the same prompts."""

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from slipstream.cli import options
from slipstream.core.errors import ConfigError
from slipstream.core.speculative import HEAD_METHODS
from slipstream.loading.shipped import shipped_head

if TYPE_CHECKING:
    from slipstream.bench.measure import Row
    from slipstream.engine.engine import Engine
    from slipstream.llm import LLM

METHODS = ("ngram", "suffix", "draft_model", "combined", *HEAD_METHODS)


def add_parser(commands: options.Commands) -> None:
    parser = commands.add_parser("bench", help="measure methods head to head")
    parser.add_argument(
        "--methods",
        default="all",
        metavar="LIST",
        help=f"of {', '.join(METHODS)}, or all; plain decoding is always measured beside them",
    )
    parser.add_argument(
        "--workload", default="mixed", metavar="W", help="mixed, humaneval, or a JSONL file"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--batch-sizes", default="1", metavar="LIST", help="such as 1,4,16")
    parser.add_argument("--temperatures", default="0", metavar="LIST", help="such as 0,1")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument(
        "--peers", metavar="P", help="measure passes beside another engine instead: llama.cpp"
    )
    parser.add_argument("--json", action="store_true", help="print JSON on the last line")
    parser.add_argument("--plot", metavar="FILE.png", help="draw speedups (needs matplotlib)")
    options.add_model(parser)
    options.add_speculation(parser)
    options.add_engine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from slipstream.bench.circumstances import circumstances
    from slipstream.bench.measure import head_to_head
    from slipstream.bench.report import draw, table
    from slipstream.bench.workloads import load_workload

    if args.peers is not None:
        return _peers(args)
    methods = _methods(args)
    batch_sizes = [int(n) for n in _numbers(args.batch_sizes, "--batch-sizes")]
    temperatures = _numbers(args.temperatures, "--temperatures")
    workload = load_workload(args.workload, args.limit)
    engines, llm = _engines(args, methods)
    prompts = [
        llm.chat_ids([{"role": "user", "content": text}])
        if llm.loaded.chat_template
        else llm.tokenizer.encode(text)
        for _, text in workload.prompts
    ]
    rows: list[Row] = []
    for batch_size in batch_sizes:
        for temperature in temperatures:
            setting = f"batch {batch_size}, temperature {temperature:g}: "
            rows += head_to_head(
                engines,
                prompts,
                batch_size=batch_size,
                temperature=temperature,
                max_tokens=args.max_tokens,
                rounds=args.rounds,
                progress=partial(_say, args, setting),
            )
    _say(args)
    print(table(rows))
    if args.plot:
        draw(rows, args.plot)
    if args.json:
        facts = {
            "model": llm.loaded.name,
            "dtype": llm.loaded.model.kind,
            "device": str(llm.loaded.model.device),
            "workload": workload.name,
            "num_prompts": len(prompts),
            "rows": [row.as_dict() for row in rows],
        }
        print(json.dumps(circumstances(sys.argv[1:]) | facts))
    return 0


def _peers(args: argparse.Namespace) -> int:
    """Passes of this engine and another, in turns."""
    from slipstream.bench.circumstances import circumstances
    from slipstream.bench.peers import PEERS, compare, table

    if args.peers not in PEERS:
        raise ConfigError(f"no peer {args.peers!r}; known are {', '.join(PEERS)}")
    plain = argparse.Namespace(**{**vars(args), "spec_method": "off", "spec_model": None})
    loaded = options.make_llm(plain).loaded
    rows = compare(loaded, rounds=args.rounds, progress=partial(_say, args))
    _say(args)
    print(table(rows))
    if args.json:
        facts = {"model": loaded.name, "dtype": loaded.model.kind, "peer": args.peers}
        measured = {"rows": [row.as_dict() for row in rows]}
        print(json.dumps(circumstances(sys.argv[1:]) | facts | measured))
    return 0


def _methods(args: argparse.Namespace) -> list[str]:
    if args.methods == "all":
        base = options.speculative_config(args)
        has_model = base.model is not None and base.head is None
        fits = {"draft_model": has_model, "combined": has_model or base.head is not None}
        return [
            method
            for method in METHODS
            if fits.get(method, True)
            and (method not in HEAD_METHODS or shipped_head(args.model, method) is not None)
        ]
    methods = [method.strip() for method in args.methods.split(",")]
    for method in methods:
        if method not in METHODS:
            raise ConfigError(f"no method {method!r}; known are {', '.join(METHODS)} and all")
    return methods


def _engines(args: argparse.Namespace, methods: list[str]) -> tuple[dict[str, "Engine"], "LLM"]:
    """One engine per method around one loaded model, plain decoding first."""
    from slipstream.bench.measure import PLAIN

    base = options.speculative_config(args)
    plain = argparse.Namespace(**{**vars(args), "spec_method": "off", "spec_model": None})
    llm = options.make_llm(plain)
    engines = {PLAIN: llm.engine}
    for method in methods:
        # --spec-model is the draft model where a head comes with slipstream, else that head.
        has_own = method in HEAD_METHODS and shipped_head(args.model, method) is not None
        model = None if has_own else base.model
        engines[method] = llm.another_engine(replace(base, method=method, model=model))
    return engines, llm


def _numbers(text: str, flag: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} must be numbers with commas between, not {text!r}") from None


def _say(args: argparse.Namespace, *text: str) -> None:
    if not args.quiet and sys.stderr.isatty():
        print(f"\r\x1b[K{''.join(text)}", end="", file=sys.stderr, flush=True)
