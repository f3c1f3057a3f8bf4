"""Bugs put in on purpose. A proof is worth what it would have caught.

Each bug replaces one named piece of the code with a plausible mistake, most of them made by some
public engine at some time, and names the check that must then fail.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from slipstream.check import engine, rules
from slipstream.check.report import Check, Planted
from slipstream.core.controls import Row
from slipstream.core.sequence import Sequence
from slipstream.drafters import synthetic
from slipstream.engine import commit, step
from slipstream.engine import engine as engine_module
from slipstream.engine import verifier as verifier_module
from slipstream.kv.blocks import BlockManager
from slipstream.kv.cache import KVCache
from slipstream.maths import acceptance, distributions, noise, trees
from slipstream.maths.noise import Key, StepNoise


@dataclass(frozen=True, slots=True)
class Bug:
    """One mistake.

    Attributes:
        name: what is wrong.
        where: object whose attribute is replaced.
        attribute: which.
        wrong: what replaces it.
        caught_by: the check that must fail.
    """

    name: str
    where: Any
    attribute: str
    wrong: Any
    caught_by: Callable[[], Check]

    @contextmanager
    def planted(self) -> Iterator[None]:
        with patch.object(self.where, self.attribute, self.wrong):
            yield


def trial(bug: Bug) -> Planted:
    """Plant a bug and see whether its check fails. A crash counts as caught, and is named."""
    with bug.planted():
        try:
            check = bug.caught_by()
        except Exception as error:
            return Planted(bug.name, True, _name(bug.caught_by), f"{type(error).__name__}: {error}")
    return Planted(bug.name, not check.passed, check.name, check.detail)


def _name(check: Callable[[], Check]) -> str:
    inner = check.func if isinstance(check, partial) else check
    return inner.__name__.replace("_", " ")


Places = Seq[tuple[int, int]]

# The mistakes --------------------------------------------------------------------------------


def _absolute_residual(p: Tensor, q: Tensor) -> Tensor:
    left = (p - q).abs()
    return left / left.sum(-1, keepdim=True).clamp(min=1e-300)


def _swapped_residual(p: Tensor, q: Tensor) -> Tensor:
    left = (q - p).clamp(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass, p)


def _first_run(wins: Tensor) -> Tensor:
    return wins[:, 1:].int().cumprod(1).sum(1)


def _accepts_swapped(self: StepNoise, seqs: Tensor, nodes: Tensor, p: Tensor, q: Tensor) -> Tensor:
    return _accepts(self, seqs, nodes, q, p)


def _accepts_leniently(
    self: StepNoise, seqs: Tensor, nodes: Tensor, p: Tensor, q: Tensor
) -> Tensor:
    return _accepts(self, seqs, nodes, 1.3 * p, q)


def _accepts_with_one_number(
    self: StepNoise, seqs: Tensor, nodes: Tensor, p: Tensor, q: Tensor
) -> Tensor:
    return _accepts(self, seqs, torch.zeros_like(nodes), p, q)


def _recovers_from_draft_noise(
    self: StepNoise, seqs: Tensor, depths: Tensor | int, weights: Tensor
) -> Tensor:
    addresses = self.drafts(seqs, torch.as_tensor(depths).expand_as(seqs))
    return (noise.exponential(addresses, weights.shape[-1]) / weights).argmin(-1)


def _rounded(logits: Tensor, controls: Any) -> Tensor:
    return _edited(logits, controls).bfloat16().float()


def _at_without_path(self: Any, places: Places) -> Any:
    logits, rows = _at(self, places)
    blind = [replace(row, drafted=[row.tokens[0]] * len(row.drafted)) for row in rows]
    return logits, blind


def _at_previous_row(self: Any, places: Places) -> Any:
    logits, _ = _at(self, [(b, max(node - 1, -1)) for b, node in places])
    return logits, _at(self, places)[1]


def _sample_by_row(logits: Tensor, rows: Seq[Row], keys: Seq[Key]) -> Tensor:
    return _sample(logits, rows, [Key(key.seed, row) for row, key in enumerate(keys)])


def _position_of_step(self: Row) -> int:
    return len(self.tokens)


def _keep_rejected(self: Any, seq: Sequence, num_tokens: int) -> None:
    held = len(self.parts.scheduler.blocks.table(seq.seq_id)) * 4
    spare = 1 if seq.num_output and seq.num_computed + num_tokens + 1 <= held else 0
    _advance(self, seq, num_tokens + (spare if seq.num_computed else 0))


def _no_moves(*_: Any) -> list[tuple[int, int]]:
    return []


def _index_depths(parents: Any) -> list[int]:
    return list(range(len(parents)))


def _everything_before(parents: Any) -> Tensor:
    return torch.ones(len(parents), len(parents), dtype=torch.bool).tril()


def _own_block_digest(self: Any, table: Any, tokens: Any, index: int) -> bytes:
    size = self.block_size
    return bytes(tokens[index * size : (index + 1) * size])


def _never_ending(seq: Sequence, *_: Any) -> tuple[str | None, None]:
    return ("length", None) if seq.room <= 0 else (None, None)


def _copies_nothing(self: Any, copies: Any) -> None:
    pass


def _uncapped(before: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
    return before * (p_x / q_x)


_accepts = StepNoise.accepts
_edited = distributions.edited
_at = verifier_module._Places.at
_sample = verifier_module._sample
_advance = engine_module.Engine._advance

_exact = partial(rules.exact_laws, ("plain",))
_chains = partial(engine.drafts_change_nothing, trees=False)
_trees = partial(engine.drafts_change_nothing, trees=True)
_ratio_step = partial(rules.composed_step, "ratio")

BUGS: tuple[Bug, ...] = (
    # The rules.
    Bug("recovered token from p", acceptance, "residual", lambda p, q: p, _exact),
    Bug("residual |p - q|", acceptance, "residual", _absolute_residual, _exact),
    Bug("residual of q over p", acceptance, "residual", _swapped_residual, _exact),
    Bug("q not renormalised among siblings", acceptance, "_without", lambda q, _: q, _exact),
    Bug(
        "block residual without P",
        acceptance,
        "_left",
        lambda joint, p, q: (p - q).clamp(min=0),
        _exact,
    ),
    Bug("block takes the first run of successes", acceptance, "_longest", _first_run, _exact),
    Bug("block ratio not capped at 1", acceptance, "_joint", _uncapped, _exact),
    # Their noise.
    Bug("p and q swapped in the test", StepNoise, "accepts", _accepts_swapped, _ratio_step),
    Bug("lenient acceptance, 1.3 p", StepNoise, "accepts", _accepts_leniently, _ratio_step),
    Bug(
        "one uniform for all positions", StepNoise, "accepts", _accepts_with_one_number, _ratio_step
    ),
    Bug(
        "recovered token from the draft's noise",
        StepNoise,
        "recovers",
        _recovers_from_draft_noise,
        _ratio_step,
    ),
    Bug(
        "draft not drawn from the q it reports",
        synthetic,
        "race",
        lambda weights, addresses: distributions.race(weights / 2, addresses),
        partial(engine.engine_law, "ratio"),
    ),
    # The distribution.
    Bug(
        "logits rounded to bfloat16",
        distributions,
        "edited",
        _rounded,
        rules.distributions_against_oracle,
    ),
    Bug(
        "min-p forgotten",
        distributions,
        "_truncate_min_p",
        lambda weights, _: weights,
        rules.distributions_against_oracle,
    ),
    # The engine.
    Bug(
        "penalties ignore the draft's prefix",
        verifier_module._Places,
        "at",
        _at_without_path,
        _chains,
    ),
    Bug("logits of the wrong row", verifier_module._Places, "at", _at_previous_row, _chains),
    Bug(
        "noise depends on the row in the batch",
        verifier_module,
        "_sample",
        _sample_by_row,
        _chains,
    ),
    Bug(
        "one noise for all positions of a step",
        Row,
        "position",
        property(_position_of_step),
        _chains,
    ),
    Bug("K/V kept of a rejected token", engine_module.Engine, "_advance", _keep_rejected, _chains),
    Bug("end of sequence inside a step ignored", commit, "_ending", _never_ending, _chains),
    Bug("accepted path not moved together", step, "_moves", _no_moves, _trees),
    Bug("tree positions by index", trees, "depths", _index_depths, _trees),
    Bug("siblings see each other", trees, "ancestor_mask", _everything_before, _trees),
    Bug(
        "shared block written without a copy",
        KVCache,
        "copy_blocks",
        _copies_nothing,
        engine.sharing_changes_nothing,
    ),
    Bug(
        "prefix found by its last block alone",
        BlockManager,
        "_digest",
        _own_block_digest,
        engine.sharing_changes_nothing,
    ),
)
