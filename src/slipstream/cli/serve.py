"""`slipstream serve`: an OpenAI-compatible server, with a page that shows speculation happen."""

import argparse
import os
import sys
from pathlib import Path

from slipstream.cli import options
from slipstream.core.errors import ConfigError

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def add_parser(commands: options.Commands) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI's API",
        description="An OpenAI-compatible server; open its address in a browser to see "
        "speculation happen.",
    )
    parser.add_argument("name", nargs="?", metavar="MODEL", help="as --model")
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", metavar="H", help="default: %(default)s")
    group.add_argument("--port", type=int, default=8000, metavar="P", help="default: %(default)s")
    group.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="what clients call the model; repeatable (default: its own name)",
    )
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="let in only who sends it; repeatable; also from SLIPSTREAM_API_KEY",
    )
    group.add_argument(
        "--allowed-origins",
        action="append",
        default=[],
        metavar="URL",
        help="a web page elsewhere that may use the server; repeatable (default: none)",
    )
    group.add_argument(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="answers that may wait for a seat; more get 429 (default: %(default)s)",
    )
    group.add_argument(
        "--max-body-bytes", type=int, default=10 * 2**20, metavar="N", help="default: 10 MiB"
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds that running answers get to finish when told to stop (default: %(default)s)",
    )
    group.add_argument(
        "--enable-log-requests", action="store_true", help="put prompts into the log"
    )
    options.add_model(parser)
    options.add_speculation(parser)
    options.add_engine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from slipstream.server import logs
    from slipstream.server.run import Server, bind
    from slipstream.server.service import ServerSettings, Service

    if not 0 <= args.port < 2**16:
        raise ConfigError(f"port must be in 0 .. 65535, not {args.port}")
    for flag in ("max_waiting", "max_body_bytes", "shutdown_timeout"):
        if getattr(args, flag) < 0:
            raise ConfigError(f"{flag} must be 0 or more, not {getattr(args, flag)}")
    args.model = args.name or args.model
    keys = [*args.api_key, *filter(None, [os.environ.get("SLIPSTREAM_API_KEY")])]
    settings = ServerSettings(
        model_names=tuple(args.served_model_name) or (_own_name(args.model),),
        api_keys=tuple(keys),
        allowed_origins=tuple(args.allowed_origins),
        max_waiting=args.max_waiting,
        max_body_bytes=args.max_body_bytes,
        grace_sec=args.shutdown_timeout,
        log_prompts=args.enable_log_requests,
    )
    if not keys and args.host not in _LOOPBACK:
        print(
            f"slipstream: warning: whoever reaches {args.host} may use this server; "
            "--api-key locks it",
            file=sys.stderr,
        )
    address = bind(args.host, args.port)
    llm = options.make_llm(args)
    if not args.quiet:
        logs.configure()
    Server(Service(llm.loaded, llm.engine, settings), address).run()
    return 0


def _own_name(model: str) -> str:
    """An alias as it is, and of a path its last part."""
    return Path(model).name if os.sep in model and Path(model).exists() else model
