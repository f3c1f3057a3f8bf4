"""Sequences for tests of what looks at their tokens only."""

from collections.abc import Iterable

from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.maths.noise import Key


def sequence(
    tokens: Iterable[int],
    *,
    seq_id: int = 0,
    num_prompt: int = 0,
    stop_ids: Iterable[int] = (),
    salt: bytes = b"",
    params: SamplingParams | None = None,
) -> Sequence:
    """A sequence with these committed tokens and plenty of room."""
    return Sequence(
        seq_id=seq_id,
        request_id=f"request-{seq_id}",
        index=0,
        tokens=list(tokens),
        num_prompt=num_prompt,
        params=params or SamplingParams(),
        max_tokens=1000,
        stop_ids=frozenset(stop_ids),
        key=Key(params.seed or 0) if params else Key(0),
        salt=salt,
    )
