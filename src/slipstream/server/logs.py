"""Logs for machines: one JSON object a line, on stderr. Prompts are in none unless asked for."""

import json
import logging
import sys
import time
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.core.outputs import Delta, RequestOutput
from slipstream.engine.engine import Engine

_log = logging.getLogger("slipstream.requests")

_FIELDS = "fields"


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, and what a record brought as `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        entry |= getattr(record, _FIELDS, {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure() -> None:
    """Send the program's logs through it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in ("slipstream", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


class RequestLog:
    """A line for every request of the engine that ends.

    Args:
        with_prompts: put prompts in, as token ids.
    """

    def __init__(self, *, with_prompts: bool = False):
        self.with_prompts = with_prompts

    def saw_step(self, engine: Engine, deltas: Seq[Delta], seconds: float) -> None:
        pass

    def saw_end(self, output: RequestOutput) -> None:
        answers = output.outputs
        fields: dict[str, Any] = {
            "request_id": output.request_id,
            "prompt_tokens": len(output.prompt_token_ids),
            "output_tokens": [len(answer.token_ids) for answer in answers],
            "finish_reasons": [answer.finish_reason for answer in answers],
            "drafted": sum(answer.draft_counts.num_draft_tokens for answer in answers),
            "accepted": sum(answer.draft_counts.num_accepted_draft_tokens for answer in answers),
            "first_token_ms": round(1e3 * answers[0].metrics.time_to_first_token_sec, 1),
            "total_ms": round(1e3 * max(answer.metrics.total_sec for answer in answers), 1),
        }
        if self.with_prompts:
            fields["prompt_token_ids"] = output.prompt_token_ids
        _log.info("request", extra={_FIELDS: fields})
