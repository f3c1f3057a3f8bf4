"""`slipstream prove`: is speculation lossless, in this build and on this model?

Exit codes: 0 proved, 1 refuted, 3 too few samples to tell, 2 a mistake that one line explains.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from slipstream.cli import options
from slipstream.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from slipstream.check.report import Report
    from slipstream.llm import LLM


def add_parser(commands: options.Commands) -> None:
    parser = commands.add_parser("prove", help="check that speculation changes nothing")
    parser.add_argument(
        "--self-test",
        action="store_true",
        help="rules, engine and planted bugs, without a model of yours",
    )
    parser.add_argument(
        "--rule", default="match", metavar="R", help="match, ratio or block (default: match)"
    )
    parser.add_argument(
        "--prompts", metavar="FILE", help='one a line, or JSON lines with "prompt" or "turns"'
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--raw", action="store_true", help="prompts are plain text, not messages")
    parser.add_argument(
        "--samples", type=int, metavar="N", help="seeded requests (default: what --detect needs)"
    )
    parser.add_argument(
        "--detect",
        type=float,
        default=0.05,
        metavar="TV",
        help="bias, in total variation, that must have been seen (default: %(default)s)",
    )
    parser.add_argument(
        "--spec-tokens", type=int, default=4, metavar="K", help="drafted a step (default: 4)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON on the last line")
    parser.add_argument("--html", metavar="FILE", help="write a report to look at")
    options.add_model(parser)
    options.add_sampling(parser)
    options.add_engine(parser)
    # Drafts come from the proof itself, whatever an engine would choose.
    parser.set_defaults(
        run=run,
        max_tokens=None,
        speculative_config=None,
        spec_method="off",
        spec_model=None,
    )


def run(args: argparse.Namespace) -> int:
    from slipstream.check import html, text

    if args.html is not None:
        _check_writable(args.html)
    report = _self_test(args) if args.self_test else _model(args)
    print(text.render(report))
    if args.html is not None:
        Path(args.html).write_text(html.render(report), encoding="utf-8")
    if args.json:
        print(json.dumps(report.as_json(), allow_nan=False))
    return report.exit_code


def _self_test(args: argparse.Namespace) -> "Report":
    from slipstream.check.selftest import run_self_test

    with tqdm(desc="Self-test", unit="step", disable=_is_quiet(args)) as bar:

        def progress(what: str, done: int, total: int) -> None:
            bar.total = total
            bar.set_postfix_str(what, refresh=False)
            bar.update(done - bar.n)

        return run_self_test(progress=progress)


def _model(args: argparse.Namespace) -> "Report":
    from slipstream.check.model import prove_model
    from slipstream.check.prompts import PROMPTS, read_prompts

    params = options.sampling_params(args)
    prompts = read_prompts(args.prompts) if args.prompts is not None else PROMPTS
    llm = options.make_llm(args)
    return prove_model(
        llm.loaded,
        params,
        rule=args.rule,
        prompts=[_ids(llm, prompt, args) for prompt in prompts],
        samples=args.samples,
        draft_tokens=args.spec_tokens,
        detect=args.detect,
        config=llm.config,
        quiet=_is_quiet(args),
    )


def _ids(llm: "LLM", prompt: str, args: argparse.Namespace) -> list[int]:
    """A chat message where the model has a template, unless --raw."""
    if args.raw or llm.loaded.chat_template is None:
        if args.system:
            raise RequestError("--system needs a chat template; a raw prompt has no system message")
        return llm.tokenizer.encode(prompt)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    return llm.chat_ids([*opening, {"role": "user", "content": prompt}])


def _is_quiet(args: argparse.Namespace) -> bool:
    return args.quiet or not sys.stderr.isatty()


def _check_writable(path: str) -> None:
    """Say now, not after minutes of work, that the report has nowhere to go."""
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write the report to {path}: {error}") from error
