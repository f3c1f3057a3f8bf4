"""Making a step's tokens final, cut everywhere at one index.

Tokens are walked in order through the stop rules. The first that ends the answer is the last one
committed: ids, text, log-probabilities, usage and K/V length all end with it.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from slipstream.core.draft import Draft, Verdict
from slipstream.core.outputs import Delta, Origin, TokenLogprobs
from slipstream.core.sequence import Sequence
from slipstream.engine.detokenize import Detokenizer


def commit(
    seq: Sequence,
    draft: Draft,
    verdict: Verdict,
    logits: Tensor,  # [1 + N, V]: after the committed tokens, then after each node
    detokenizer: Detokenizer,
) -> Delta:
    """Append the accepted path and the further token, as far as the stop rules let them.

    Modifies `seq`: tokens, text, logprobs, and the finish and stop reasons if it ended.
    """
    emitted = [*(draft.token_ids[node] for node in verdict.path), verdict.next_token]
    rows = [0, *(1 + node for node in verdict.path)]
    text, kept = "", 0
    for token in emitted:
        seq.tokens.append(token)
        kept += 1
        is_stop = token in seq.stop_ids
        if not (is_stop and token in seq.params.stop_token_ids):
            may_stop = seq.num_output >= seq.params.min_tokens
            text += detokenizer.push(token, may_stop=may_stop)
        seq.finish_reason, seq.stop_reason = _ending(seq, token, is_stop, detokenizer)
        if seq.finish_reason is not None:
            text += detokenizer.finish()
            break
    seq.text += text
    seq.draft_counts.add(draft, verdict, kept)
    logprobs = []
    if seq.params.logprobs is not None:
        logprobs = _logprobs(logits[rows[:kept]], emitted[:kept], seq.params.logprobs)
        seq.logprobs += logprobs
    return Delta(
        request_id=seq.request_id,
        index=seq.index,
        text=text,
        token_ids=emitted[:kept],
        origins=_origins(draft, verdict)[:kept],
        logprobs=logprobs,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
    )


def _origins(draft: Draft, verdict: Verdict) -> list[Origin]:
    accepted: list[Origin] = ["accepted"] * len(verdict.path)
    if not draft.token_ids:
        return [*accepted, "plain"]
    last = verdict.path[-1] if verdict.path else -1
    return [*accepted, "recovered" if last in draft.parents else "bonus"]


def _ending(
    seq: Sequence, token: int, is_stop: bool, detokenizer: Detokenizer
) -> tuple[str | None, int | str | None]:
    """Finish reason and stop reason after `token`, or None and None to go on."""
    if is_stop:
        return "stop", token if token in seq.params.stop_token_ids else None
    if detokenizer.stopped_by is not None:
        return "stop", detokenizer.stopped_by
    if seq.room == 0:
        return "length", None
    return None, None


def _logprobs(logits: Tensor, tokens: Seq[int], num_top: int) -> list[TokenLogprobs]:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    top = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return [
        TokenLogprobs(token, value, tuple(zip(ids, values, strict=True)))
        for token, value, ids, values in zip(
            tokens,
            chosen.squeeze(1).tolist(),
            top.indices.tolist(),
            top.values.tolist(),
            strict=True,
        )
    ]
