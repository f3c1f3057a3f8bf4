"""From the target's logits to verdicts, by the rules of `maths.acceptance`.

This file only arranges: it pads drafts into a batch, evaluates sampling controls with the tokens
that lead to each node, and looks up the noise that belongs there.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from slipstream.core.controls import Row, controls
from slipstream.core.draft import Draft, Verdict
from slipstream.core.errors import ConfigError
from slipstream.core.sequence import Sequence
from slipstream.maths import acceptance, distributions
from slipstream.maths.acceptance import DraftBatch, FreshNoise, Target, Verdicts
from slipstream.maths.noise import Address, Key, StepNoise, Stream, first_argmax
from slipstream.models.batch import rows_at


class Verifier(Protocol):
    """A lossless rule, applied to B sequences."""

    def __call__(
        self,
        logits: Tensor,  # [R, V]
        first_rows: Seq[int],
        seqs: Seq[Sequence],
        drafts: Seq[Draft],
    ) -> list[Verdict]:
        """One verdict per sequence.

        Args:
            logits: rows of all sequences; those of these can be sampled (`distributions.usable`).
            first_rows: where each sequence's 1 + N rows begin.
        """


class MatchVerifier:
    """The speculative stream is the plain stream: `acceptance.match`, walked in plain Python.

    The walk looks at a handful of tokens; as tensor operations it would take longer than a pass of
    a small model. A test holds the two against each other.
    """

    def __call__(
        self, logits: Tensor, first_rows: Seq[int], seqs: Seq[Sequence], drafts: Seq[Draft]
    ) -> list[Verdict]:
        places = _Places(logits, first_rows, seqs, drafts)
        accepted: list[list[int]] = [[] for _ in drafts]
        next_tokens = [-1] * len(drafts)
        walking = [(b, -1) for b in range(len(drafts))]
        while walking:
            sampled = _sample(*places.at(walking), [seqs[b].key for b, _ in walking])
            followed = []
            for (b, node), token in zip(walking, sampled.tolist(), strict=True):
                next_tokens[b] = token
                if (child := drafts[b].child(node, token)) is not None:
                    accepted[b].append(child)
                    followed.append((b, child))
            walking = followed
        return [Verdict(*pair) for pair in zip(accepted, next_tokens, strict=True)]


class RatioVerifier:
    """min(1, p / q) and the residual: `acceptance.ratio`. Equal in law to plain decoding."""

    rule: Callable[[DraftBatch, Target, FreshNoise], Verdicts] = staticmethod(acceptance.ratio)

    def __call__(
        self, logits: Tensor, first_rows: Seq[int], seqs: Seq[Sequence], drafts: Seq[Draft]
    ) -> list[Verdict]:
        places = _Places(logits, first_rows, seqs, drafts)

        def target(which: Tensor, nodes: Tensor) -> Tensor:
            some = list(zip(which.tolist(), nodes.tolist(), strict=True))
            rows_logits, rows = places.at(some)
            return distributions.probabilities(rows_logits, controls(rows, logits.device))

        noise = StepNoise([seq.key for seq in seqs], [len(seq.tokens) for seq in seqs])
        batch = _pad(drafts, logits.device)
        return _unpad(self.rule(batch, target, noise))


class BlockVerifier(RatioVerifier):
    """The joint test over a chain: `acceptance.block`. Equal in law to plain decoding."""

    rule = staticmethod(acceptance.block)


VERIFIERS: dict[str, type[Verifier]] = {
    "match": MatchVerifier,
    "ratio": RatioVerifier,
    "block": BlockVerifier,
}


def make_verifier(name: str) -> Verifier:
    """The rule of that name."""
    if name not in VERIFIERS:
        known = ", ".join(VERIFIERS)
        raise ConfigError(f"rejection_sample_method must be one of {known}, not {name!r}")
    return VERIFIERS[name]()


class _Places:
    """Nodes of drafts as rows of logits, with the tokens that lead to them."""

    def __init__(
        self, logits: Tensor, first_rows: Seq[int], seqs: Seq[Sequence], drafts: Seq[Draft]
    ):
        self.logits = logits
        self.first_rows = first_rows
        self.seqs = seqs
        self.drafts = drafts

    def at(self, places: Seq[tuple[int, int]]) -> tuple[Tensor, list[Row]]:
        """Logits [A, V] after (sequence, node) places, and what is sampled there."""
        index = [self.first_rows[b] + 1 + node for b, node in places]
        rows = [Row.after(self.seqs[b], _path_tokens(self.drafts[b], node)) for b, node in places]
        return rows_at(self.logits, index), rows


def _sample(logits: Tensor, rows: Seq[Row], keys: Seq[Key]) -> Tensor:
    """The plain stream's token at each position: [A] int64."""
    if all(row.is_argmax for row in rows):
        return first_argmax(logits.float())
    noise = [Address(key, Stream.TARGET, row.position) for key, row in zip(keys, rows, strict=True)]
    return distributions.sample(logits, controls(rows, logits.device), noise)


def _pad(drafts: Seq[Draft], device: torch.device) -> DraftBatch:
    longest = max((len(draft) for draft in drafts), default=0)

    def padded(values: list[int]) -> list[int]:
        return values + [-1] * (longest - len(values))

    tokens = [padded(draft.token_ids) for draft in drafts]
    parents = [padded(draft.parents) for draft in drafts]
    both = torch.tensor([tokens, parents], dtype=torch.int64, device=device)
    q = None
    given = [draft.probs for draft in drafts if draft.probs is not None]
    if given:
        q = torch.zeros(len(drafts), longest, given[0].shape[-1], device=device)
        for b, draft in enumerate(drafts):
            if draft.probs is not None:
                q[b, : len(draft)] = draft.probs
            elif draft.token_ids:  # a certain draft beside sampled ones
                q[b, range(len(draft)), draft.token_ids] = 1.0
    return DraftBatch(both[0], both[1], q, certain=q is None)


def _unpad(verdicts: Verdicts) -> list[Verdict]:
    return [
        Verdict(accepted.nonzero().flatten().tolist(), token)
        for accepted, token in zip(
            verdicts.accepted.cpu(), verdicts.next_tokens.tolist(), strict=True
        )
    ]


def _path_tokens(draft: Draft, node: int) -> list[int]:
    """The drafted tokens from the root to a node, itself included."""
    path = []
    while node >= 0:
        path.append(draft.token_ids[node])
        node = draft.parents[node]
    return path[::-1]
