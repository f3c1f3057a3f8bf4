"""`slipstream train`: a draft head, taught by the target's own answers."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli import options
from slipstream.core.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.core.params import SamplingParams
    from slipstream.train.loop import Progress
    from slipstream.train.run import Watcher

METHODS = ("eagle3", "eagle", "medusa", "mtp")
_LEAST = {
    "minutes": 0,
    "texts": 0,
    "steps": 0,
    "draft_vocab_size": 0,
    "feature_weight": 0,
    "max_tokens": 1,
    "heads": 1,
    "unroll": 1,
    "batch_rows": 1,
    "row_tokens": 8,
}


def add_parser(commands: options.Commands) -> None:
    parser = commands.add_parser(
        "train",
        help="train a draft head",
        description="Train a head on the target's answers. Stopped, the same command goes on.",
    )
    parser.add_argument("method", choices=METHODS, metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="for the head")
    parser.add_argument(
        "--data",
        action="append",
        metavar="D",
        help="builtin (prompts of ours, and the target's own), a JSONL file of prompts, or a "
        "folder of documents; repeatable",
    )
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="decides --texts and --steps where not given"
    )
    parser.add_argument("--texts", type=int, default=0, metavar="N", help="answers to learn from")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="updates")
    parser.add_argument(
        "--corpus", type=Path, metavar="DIR", help="for texts and states, shared by several runs"
    )
    parser.add_argument(
        "--start",
        metavar="HEAD",
        help="a head to train further, its draft vocabulary kept: a directory, a repository, or "
        "`shipped`",
    )
    parser.add_argument(
        "--speculators",
        type=Path,
        metavar="DIR",
        help="write an eagle3 head a second time, in the layout that vLLM loads",
    )
    group = parser.add_argument_group("training")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="of an answer")
    group.add_argument(
        "--draft-vocab-size",
        type=int,
        default=8192,
        metavar="N",
        help="tokens it can draft, the most frequent; 0 is all (default: %(default)s)",
    )
    group.add_argument("--heads", type=int, default=4, metavar="N", help="medusa's")
    group.add_argument(
        "--unroll", type=int, default=3, metavar="N", help="steps on its own output, in training"
    )
    group.add_argument(
        "--labels", choices=("soft", "hard"), default="soft", help="the target's law, or its tokens"
    )
    group.add_argument(
        "--feature-weight", type=float, metavar="X", help="of eagle's regression (default: 1)"
    )
    group.add_argument("--rate", type=float, default=1e-3, metavar="X", help="learning rate")
    group.add_argument("--batch-rows", type=int, default=8, metavar="N")
    group.add_argument("--row-tokens", type=int, default=256, metavar="N")
    group.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--json", action="store_true", help="print the card on the last line")
    options.add_model(parser)
    options.add_engine(parser)
    parser.set_defaults(run=run, max_num_seqs=64)


def run(args: argparse.Namespace) -> int:
    from slipstream.bench.circumstances import circumstances
    from slipstream.loading.head_files import write_speculators
    from slipstream.loading.heads import load_head
    from slipstream.models.heads import Eagle3Head
    from slipstream.train.loop import Schedule
    from slipstream.train.objectives import Objective
    from slipstream.train.prompts import asker
    from slipstream.train.run import Settings, run

    _check(args)
    args.speculative_config, args.spec_method, args.spec_model = None, "off", None
    args.spec_tokens = None
    data = args.data or ["builtin"]
    llm = options.make_llm(args)
    feature_weight = 1.0 if args.feature_weight is None else args.feature_weight
    settings = Settings(
        method=args.method,
        target=llm.loaded.name,
        data=", ".join(data),
        num_texts=args.texts,
        max_tokens=args.max_tokens,
        draft_vocab_size=args.draft_vocab_size,
        num_heads=args.heads,
        start=args.start or "",
        objective=Objective(
            unroll=args.unroll,
            feature_weight=feature_weight if args.method == "eagle" else 0.0,
            is_hard=args.labels == "hard",
        ),
        schedule=Schedule(
            args.steps,
            num_rows=args.batch_rows,
            length=args.row_tokens,
            rate=args.rate,
            seed=args.seed,
        ),
    )

    def answer(prompts: Sequence[list[int]], params: "Sequence[SamplingParams]") -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    def chat(message: str) -> list[int]:
        if llm.loaded.chat_template is None:
            return llm.tokenizer.encode(message)
        return llm.chat_ids([{"role": "user", "content": message}])

    with _watched(args.quiet or not sys.stderr.isatty()) as watcher:
        card = run(
            settings,
            llm.loaded.model,
            asker(data, chat, llm.tokenizer.encode, answer, args.seed),
            answer,
            args.out,
            corpus=args.corpus,
            start=_start(args.start, args.method, llm.loaded.name),
            minutes=args.minutes,
            facts=circumstances(sys.argv[1:]),
            watcher=watcher,
        )
    if args.speculators is not None:
        head = load_head(args.method, args.out, llm.loaded.model)
        assert isinstance(head, Eagle3Head), "others are refused before training"
        write_speculators(head, args.speculators, llm.loaded.model.config, llm.loaded.name)
    measured = card["held_out"]
    by_position = " ".join(f"{a:.2f}" for a in measured["acceptance_by_position"])
    print(f"{args.out}: {card['head_bytes'] / 1e6:.1f} MB")
    print(
        f"held-out answers: {measured['acceptance_length']:.2f} tokens a pass "
        f"(accepted by position: {by_position})"
    )
    print(f"use it with --spec-method {args.method} --spec-model {args.out}")
    if args.json:
        print(json.dumps(card))
    return 0


def _start(name: str | None, method: str, target: str) -> Path | None:
    from slipstream.loading.heads import resolve_head
    from slipstream.loading.shipped import shipped_head

    if name is None:
        return None
    if name != "shipped":
        return resolve_head(name)
    shipped = shipped_head(target, method)
    if shipped is None:
        raise ConfigError(f"no {method} head for {target} comes with slipstream to --start from")
    return shipped


def _check(args: argparse.Namespace) -> None:
    if not args.minutes and not (args.texts and args.steps):
        raise ConfigError("how long? give --minutes, or --texts and --steps")
    for name, least in _LEAST.items():
        if (value := getattr(args, name)) is not None and value < least:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} must be at least {least}, not {value}")
    if args.speculators is not None and args.method != "eagle3":
        raise ConfigError(f"--speculators is for eagle3 heads, not {args.method}")
    if args.rate <= 0:
        raise ConfigError(f"--rate must be above 0, not {args.rate}")


@contextmanager
def _watched(is_quiet: bool) -> Iterator["Watcher"]:
    """A bar for each stage, the last with loss and acceptance."""
    from tqdm import tqdm

    from slipstream.train.run import Watcher

    bars: dict[str, Any] = {}

    def bar(name: str, done: int, total: int, unit: str) -> Any:
        if name not in bars:
            for other in bars.values():
                other.close()
            bars[name] = tqdm(
                desc=name, total=total or None, unit=unit, initial=done, disable=is_quiet
            )
        bars[name].update(done - bars[name].n)
        return bars[name]

    def stepped(state: "Progress", total: int) -> None:
        shown = bar("Training", state.step, total, "step")
        told = {"loss": f"{state.loss:.2f}"}
        if state.acceptance:
            told["tokens a pass"] = f"{1 + sum(state.acceptance):.2f}"
        shown.set_postfix(told, refresh=False)

    try:
        yield Watcher(
            answered=lambda done, total: bar("Answering", done, total, "text"),
            read=lambda done, total: bar("Reading", done, total, "text"),
            stepped=stepped,
        )
    finally:
        for each in bars.values():
            each.close()
