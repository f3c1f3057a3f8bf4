"""Flags that commands share, and the objects they become."""

import argparse
import json
import re
import sys
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import ConfigError
from slipstream.loading.aliases import DEFAULT_ALIAS

if TYPE_CHECKING:
    from slipstream.core.params import SamplingParams
    from slipstream.core.speculative import SpeculativeConfig
    from slipstream.llm import LLM

Commands = Any  # argparse has no public name for what add_subparsers returns


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=DEFAULT_ALIAS,
        metavar="M",
        help="alias, GGUF file, model directory, or hf:org/repo[/file.gguf] (default: %(default)s)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars, no timings")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N")
    group.add_argument("--min-tokens", type=int, default=0, metavar="N")
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="K")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X")
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X")
    group.add_argument(
        "--logit-bias", type=_bias, action="append", default=[], metavar="ID=X", help="repeatable"
    )
    group.add_argument("--seed", type=int, metavar="S", help="same seed, same tokens")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer; repeatable"
    )
    group.add_argument(
        "--stop-token-ids",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="end the answer; repeatable",
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end")


def add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--device", default="auto", metavar="D", help="auto, cpu or cuda")
    group.add_argument(
        "--dtype",
        default="auto",
        metavar="D",
        help="auto, packed (weights as stored, native kernels), float32, bfloat16 or float16",
    )
    group.add_argument(
        "--quantize", metavar="Q", help="int8 or int4, for float weights; changes the target"
    )
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    group.add_argument("--max-num-seqs", type=int, default=64, metavar="N")
    group.add_argument("--max-num-batched-tokens", type=int, default=512, metavar="N")
    group.add_argument("--max-model-len", type=int, metavar="N", help="default: the model's own")
    group.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens per block")
    group.add_argument(
        "--kv-cache-memory",
        type=_memory,
        metavar="SIZE",
        help="for K/V, such as 512M or 2G (default: a quarter of free memory)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        metavar="D",
        help="auto, float32, float16 or bfloat16 (default: float16 beside packed weights)",
    )
    group.add_argument("--no-prefix-caching", action="store_true")


def add_speculation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        help='vLLM\'s dictionary, such as \'{"method": "ngram", "num_speculative_tokens": 5}\'',
    )
    group.add_argument(
        "--spec-method",
        metavar="M",
        help="auto, off, draft_model, ngram, suffix, combined, medusa, eagle, eagle3 or mtp",
    )
    group.add_argument("--spec-model", metavar="M", help="the draft model, or a head's directory")
    group.add_argument(
        "--spec-tokens", type=int, metavar="K", help="most drafted tokens a step; 0 is off"
    )


def make_llm(args: argparse.Namespace) -> "LLM":
    """Load what the flags say, and tell people what computes and how equal its answers are."""
    from slipstream.llm import LLM

    quiet = args.quiet or not sys.stderr.isatty()
    llm = LLM(
        args.model,
        device=args.device,
        dtype=args.dtype,
        quantize=args.quantize,
        threads=args.threads,
        quiet=quiet,
        speculative_config=speculative_config(args),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        kv_cache_memory=args.kv_cache_memory,
        kv_cache_dtype=args.kv_cache_dtype,
        prefix_caching=not args.no_prefix_caching,
    )
    if not quiet:
        print(f"{args.model}: {llm.loaded.description}", file=sys.stderr)
    return llm


def sampling_params(args: argparse.Namespace) -> "SamplingParams":
    from slipstream.core.params import SamplingParams

    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=dict(args.logit_bias),
        seed=args.seed,
        n=getattr(args, "n", 1),
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        stop=tuple(args.stop),
        stop_token_ids=tuple(args.stop_token_ids),
        ignore_eos=args.ignore_eos,
        logprobs=getattr(args, "logprobs", None),
    )


def speculative_config(args: argparse.Namespace) -> "SpeculativeConfig":
    """How to speculate, as the flags say."""
    from slipstream.core.speculative import SpeculativeConfig

    return SpeculativeConfig.from_dict(given_speculation(args))


def given_speculation(args: argparse.Namespace) -> dict[str, Any]:
    """The JSON of --speculative-config, with the short flags laid over it."""
    given: dict[str, Any] = {}
    if args.speculative_config is not None:
        try:
            given = json.loads(args.speculative_config)
        except ValueError as error:
            raise ConfigError(f"--speculative-config is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise ConfigError("--speculative-config must be a JSON object")
    short = {
        "method": args.spec_method,
        "model": args.spec_model,
        "num_speculative_tokens": args.spec_tokens,
    }
    given |= {key: value for key, value in short.items() if value is not None}
    if given.get("head") is not None:
        given.setdefault("method", "combined")
    elif given.get("model") is not None:
        given.setdefault("method", "draft_model")
    return given


def _memory(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 512M or 2G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=NUMBER") from None
