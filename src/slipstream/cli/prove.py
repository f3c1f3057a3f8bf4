"""`slipstream prove`: is speculation lossless, in this build, on this model, by this method?

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
    from slipstream.build import LoadedModel
    from slipstream.check.report import Report
    from slipstream.core.speculative import SpeculativeConfig
    from slipstream.llm import LLM

_DESCRIPTION = """Check that speculation changes nothing: on a model with --model, or of the rules,
the engine and this very check with --self-test. Drafts are synthetic, right and wrong ones mixed,
which tries the rules hardest. With --spec-method, --spec-model or --speculative-config they are the
method's own, with its settings, --spec-tokens of them in every step (default: 4, or as many as the
tree holds)."""


def add_parser(commands: options.Commands) -> None:
    parser = commands.add_parser(
        "prove", help="check that speculation changes nothing", description=_DESCRIPTION
    )
    parser.add_argument(
        "--self-test",
        action="store_true",
        help="rules, engine and planted bugs, without a model of yours",
    )
    parser.add_argument(
        "--rule", metavar="R", help="match, ratio or block (default: match, or as configured)"
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
    parser.add_argument("--json", action="store_true", help="print JSON on the last line")
    parser.add_argument("--html", metavar="FILE", help="write a report to look at")
    options.add_model(parser)
    options.add_sampling(parser)
    options.add_speculation(parser)
    options.add_engine(parser)
    parser.set_defaults(run=run, max_tokens=None)


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
    speculative = _speculative(args)
    prompts = read_prompts(args.prompts) if args.prompts is not None else PROMPTS
    # The proof wires engines of its own.
    llm = options.make_llm(argparse.Namespace(**{**vars(args), "spec_method": "off"}))
    return prove_model(
        llm.loaded,
        params,
        speculative=speculative,
        draft=_draft(llm, speculative),
        synthetic=not _names_a_method(args),
        prompts=[_ids(llm, prompt, args) for prompt in prompts],
        samples=args.samples,
        detect=args.detect,
        config=llm.config,
        quiet=_is_quiet(args),
    )


def _speculative(args: argparse.Namespace) -> "SpeculativeConfig":
    """How to speculate, with the rule that --rule or the configuration names."""
    from slipstream.core.speculative import SpeculativeConfig

    given = options.given_speculation(args)
    configured = given.get("rejection_sample_method")
    if args.rule is not None and configured not in (None, args.rule):
        raise ConfigError(
            f"--rule {args.rule} and rejection_sample_method {configured} disagree; drop one"
        )
    if args.rule is not None:
        given["rejection_sample_method"] = args.rule
    return SpeculativeConfig.from_dict(given)


def _names_a_method(args: argparse.Namespace) -> bool:
    named = (args.spec_method, args.spec_model, args.speculative_config)
    return any(flag is not None for flag in named)


def _draft(llm: "LLM", speculative: "SpeculativeConfig") -> "LoadedModel | None":
    """The draft model, loaded like the target and where that is."""
    from slipstream.build import load

    if speculative.draft_model is None:
        return None
    device = llm.loaded.model.device.type
    return load(speculative.draft_model, device=device, dtype=llm.dtype, quiet=llm.quiet)


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
