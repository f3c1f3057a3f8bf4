"""Answers as people and scripts read them."""

import os
import sys
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.core.outputs import CompletionOutput, Delta, RequestOutput
    from slipstream.core.params import SamplingParams
    from slipstream.llm import LLM

# Green for what a draft got right, yellow for what the target put in its place, blue for what
# it added to a draft that was right to its end.
_COLOURS = {"accepted": "32", "recovered": "33", "bonus": "34", "plain": "0"}
_LEGEND = "accepted", "recovered", "bonus", "plain"


def stream_answer(
    llm: "LLM", ids: list[int], params: "SamplingParams", *, show_drafts: bool = False
) -> "CompletionOutput":
    """Print an answer as it comes; Ctrl-C ends the answer and keeps what there is of it."""
    request_id = llm.engine.add(ids, params)
    try:
        while not llm.engine.is_finished(request_id):
            for delta in llm.engine.step():
                text = _coloured(llm, delta) if show_drafts else delta.text
                print(text, end="", flush=True)
    except KeyboardInterrupt:
        for delta in llm.engine.abort(request_id):
            print(delta.text, end="")
    except BaseException:
        llm.engine.abort(request_id)
        raise
    print(flush=True)
    return llm.engine.output(request_id).outputs[0]


def drafts_legend() -> str:
    """What the colours of `stream_answer` mean."""
    return "  ".join(_paint(name, name) for name in _LEGEND)


def timings_line(answers: "Seq[CompletionOutput]") -> str:
    metrics = [answer.metrics for answer in answers]
    num_tokens = sum(m.num_output_tokens for m in metrics)
    parts = [
        f"{metrics[0].num_prompt_tokens} prompt tokens",
        f"first token {metrics[0].time_to_first_token_sec:.2f} s",
        f"{num_tokens} tokens in {max(m.total_sec for m in metrics):.2f} s",
    ]
    if len(metrics) == 1 and (rate := metrics[0].decode_tokens_per_sec) is not None:
        parts.append(f"{rate:.1f} tokens/s")
    drafts = answers[0].draft_counts
    if drafts.num_spec_steps and (length := drafts.mean_acceptance_length) is not None:
        parts.append(f"{length:.2f} tokens per pass")
    parts.append(f"finished: {', '.join(sorted({a.finish_reason for a in answers}))}")
    return f"[{' · '.join(parts)}]"


def stats_lines(llm: "LLM") -> list[str]:
    """What `--stats` prints: acceptance, draft sizes and reasons, and where the time went."""
    stats = llm.engine.stats()
    drafts = stats.drafts.as_dict()
    rest = max(stats.total_sec - stats.draft_sec - stats.verify_sec, 0.0)
    shares = [100 * sec / max(stats.total_sec, 1e-9) for sec in (stats.draft_sec, stats.verify_sec)]
    lines = [
        f"steps {stats.num_steps}, output tokens {stats.num_output_tokens}, "
        f"preemptions {stats.num_preemptions}",
        f"time: draft {shares[0]:.1f} %, verify {shares[1]:.1f} %, "
        f"rest {100 * rest / max(stats.total_sec, 1e-9):.1f} % of {stats.total_sec:.2f} s",
    ]
    if drafts["num_spec_steps"]:
        positions = " ".join(f"{rate:.2f}" for rate in drafts["acceptance_by_position"])
        lines += [
            f"acceptance: {drafts['mean_acceptance_length']:.2f} tokens per pass, "
            f"{drafts['num_accepted_draft_tokens']} of {drafts['num_draft_tokens']} drafted",
            f"right up to position: {positions}",
        ]
    sizes = " ".join(f"{n}:{count}" for n, count in enumerate(drafts["draft_size_histogram"]))
    lines.append(f"passes by drafted tokens: {sizes}")
    if llm.draft_bytes:
        lines.append(f"weights for drafting: {llm.draft_bytes / 1e6:.1f} MB")
    reasons = llm.engine.parts.controller.reasons
    lines += [f"{count} x {reason}" for reason, count in reasons.counts.most_common() if count]
    return lines


def as_json(llm: "LLM", output: "RequestOutput", params: "SamplingParams") -> dict[str, Any]:
    first, metrics = output.outputs[0], output.outputs[0].metrics
    num_output = sum(len(answer.token_ids) for answer in output.outputs)
    result: dict[str, Any] = {
        "text": first.text,
        "token_ids": first.token_ids,
        "finish_reason": first.finish_reason,
        "stop_reason": first.stop_reason,
        "usage": {
            "prompt_tokens": metrics.num_prompt_tokens,
            "cached_tokens": metrics.num_cached_tokens,
            "completion_tokens": num_output,
            "total_tokens": metrics.num_prompt_tokens + num_output,
        },
        "timings": {
            "time_to_first_token_sec": metrics.time_to_first_token_sec,
            "total_sec": metrics.total_sec,
            "decode_tokens_per_sec": metrics.decode_tokens_per_sec,
        },
        "metrics": {"speculative_decoding": first.draft_counts.as_dict()},
        "model": llm.loaded.name,
        "dtype": llm.loaded.model.kind,
    }
    if params.logprobs is not None:
        result["logprobs"] = [asdict(entry) for entry in first.logprobs or []]
    if params.n > 1:
        result["choices"] = [
            {"text": a.text, "token_ids": a.token_ids, "finish_reason": a.finish_reason}
            for a in output.outputs
        ]
    return result


def _coloured(llm: "LLM", delta: "Delta") -> str:
    """The tokens of a delta, each in the colour of its origin.

    Tokens are shown one by one, so half a character shows as a replacement mark until its other
    half has come; the text itself is never cut so.
    """
    pieces = (llm.tokenizer.decode([token]) for token in delta.token_ids)
    return "".join(
        _paint(piece, origin) for piece, origin in zip(pieces, delta.origins, strict=True)
    )


def _paint(text: str, origin: str) -> str:
    if os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        marks = {"accepted": "", "recovered": "‹", "bonus": "+", "plain": ""}
        return f"{marks[origin]}{text}"
    return f"\x1b[{_COLOURS[origin]}m{text}\x1b[0m"
