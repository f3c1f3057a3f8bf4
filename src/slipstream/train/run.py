"""A training run from beginning to end, in one directory.

    OUT/run.json          the settings, to which a run taken up again is held
    OUT/corpus/texts/     the target's answers
    OUT/corpus/states/    what its layers made of them
    OUT/corpus/made.json  what both are functions of
    OUT/checkpoint.pt     while training
    OUT/*.safetensors, config.json, card.json     the head, at the end

Runs can share a corpus, which is then in a directory of its own.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from slipstream import native
from slipstream.core.errors import ConfigError
from slipstream.loading.head_files import write_head
from slipstream.loading.heads import Head
from slipstream.models import CausalLM
from slipstream.models.heads import Eagle3Head, MedusaHead, tensor_bytes
from slipstream.train.files import written_whole
from slipstream.train.loop import Progress, Schedule, train
from slipstream.train.objectives import Objective
from slipstream.train.rows import Corpus
from slipstream.train.start import eagle3_taps, new_head, root_mean_square, taught_head
from slipstream.train.states import write_states
from slipstream.train.texts import NUM_TEXTS, Answer, Ask, Texts, write_texts

_ANSWERING = 0.35  # of --minutes
_TIMED_STEPS = 4
# Settings that --minutes decides where they are 0.
_DECIDED = ("num_texts", "num_steps")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is a function of.

    Attributes:
        method: "eagle", "eagle3", "medusa" or "mtp".
        target, data: the model and the prompts, by their names.
        num_texts: answers to learn from.
        max_tokens: of an answer.
        draft_vocab_size: tokens that can be drafted, the most frequent in the answers.
        num_heads: Medusa's.
        start: the head it goes on from, whose vocabulary and size it keeps; "" is none.
    """

    method: str
    target: str
    data: str
    num_texts: int
    max_tokens: int
    draft_vocab_size: int
    num_heads: int
    start: str = ""
    objective: Objective = field(default_factory=Objective)
    schedule: Schedule = field(default_factory=lambda: Schedule(0))


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who is told how far things are: texts answered, texts read, steps taken."""

    answered: Callable[[int, int], None] = lambda done, total: None
    read: Callable[[int, int], None] = lambda done, total: None
    stepped: Callable[[Progress, int], None] = lambda state, total: None


def run(
    settings: Settings,
    target: CausalLM,
    ask: Ask,
    answer: Answer,
    out: Path,
    *,
    corpus: Path | None = None,
    start: Path | None = None,
    minutes: float | None = None,
    facts: Mapping[str, Any] | None = None,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Train a head, or go on where a run with these settings was stopped.

    Args:
        corpus: where texts and states are, for runs that share them; OUT/corpus if not given.
        start: where the head `settings.start` is, if it is to go on from one.
        minutes: how long it may take; decides `num_texts` and the number of steps where these
            are 0.
        facts: for the card: command, commit, versions.

    Returns:
        The card.

    Raises:
        ConfigError: `out` holds a run with other settings, or `corpus` other texts.
    """
    watcher = watcher or Watcher()
    began = time.monotonic()
    taught = None
    if start is not None:
        taught = taught_head(settings.method, start, target)
        settings = _like(settings, taught)
    settings = _held_to(settings, out)
    schedule = settings.schedule
    corpus = corpus or out / "corpus"
    _same_texts(settings, corpus)
    texts = _answered(settings, ask, answer, corpus / "texts", minutes, watcher)
    num_texts = sum(len(Texts.read(path).num_prompt) for path in texts)
    settings = _keep(replace(settings, num_texts=num_texts), out)
    states = write_states(
        texts,
        corpus / "states",
        target,
        _taps(settings.method, taught, target),
        lambda done: watcher.read(done, settings.num_texts),
    )

    native.return_threads()
    built = Corpus(texts, states, target.device)
    num_tokens, size = built.num_tokens(built.training), schedule.num_rows * schedule.length
    if num_tokens < size:
        raise ConfigError(
            f"the texts have {num_tokens} tokens, fewer than the {size} of a batch; give more "
            "--texts, or smaller --batch-rows or --row-tokens"
        )
    counts = built.counts(target.config.vocab_size)
    if start is not None and taught is not None:
        ids = taught.target_ids
        begin = partial(taught_head, settings.method, start, target)
    else:
        ids = draft_vocabulary(counts, settings.draft_vocab_size)
        sample = next(
            built.rows(built.training, num_rows=schedule.num_rows, length=schedule.length)
        )
        begin = partial(
            new_head,
            settings.method,
            target,
            ids,
            num_heads=settings.num_heads,
            typical_size=root_mean_square([sample.states["hidden"]]),
        )
    if schedule.num_steps == 0:
        left = (minutes or 0) * 60 - (time.monotonic() - began)
        num_steps = _affordable(settings, begin(), built, out, left)
        schedule = replace(schedule, num_steps=num_steps)
        settings = _keep(replace(settings, schedule=schedule), out)
    head = begin()
    measured = train(
        head,
        built,
        settings.objective,
        schedule,
        out,
        lambda state: watcher.stepped(state, schedule.num_steps),
    )
    write_head(head.bfloat16(), out, target.config)
    card = dict(facts or {}) | {
        **asdict(settings),
        "num_tokens": num_tokens,
        "draft_vocab_coverage": float(counts[ids].sum() / counts.sum()),
        "head_bytes": tensor_bytes(head),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "held_out": {
            "num_tokens": built.num_tokens(built.held_out),
            "acceptance_by_position": measured,
            "acceptance_length": 1 + sum(measured),
        },
    }
    if start is not None and (before := start / "card.json").exists():
        card["started_from"] = json.loads(before.read_text(encoding="utf-8"))
    _write_json(card, out / "card.json")
    return card


def _like(settings: Settings, head: Head) -> Settings:
    """What a head that is there already decides."""
    assert head.target_ids is not None
    num_heads = len(head.heads) if isinstance(head, MedusaHead) else settings.num_heads
    return replace(settings, draft_vocab_size=len(head.target_ids), num_heads=num_heads)


def _taps(method: str, taught: Head | None, target: CausalLM) -> Sequence[int]:
    """The layers whose input the head reads besides the final states."""
    if isinstance(taught, Eagle3Head):
        return taught.taps
    return eagle3_taps(target.config.num_layers) if method == "eagle3" else ()


def draft_vocabulary(counts: Tensor, size: int) -> Tensor:
    """The most frequent tokens, ascending; 0 is all of them. Ties go to the lower id."""
    if size == 0 or size >= len(counts):
        size = len(counts)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def _answered(
    settings: Settings,
    ask: Ask,
    answer: Answer,
    folder: Path,
    minutes: float | None,
    watcher: Watcher,
) -> list[Path]:
    """The shards of texts: `num_texts`, or as many as are answered in time."""
    began = time.monotonic()
    num_texts = settings.num_texts or NUM_TEXTS
    while True:
        shards = write_texts(
            folder,
            num_texts,
            ask,
            answer,
            seed=settings.schedule.seed,
            max_tokens=settings.max_tokens,
            progress=lambda done: watcher.answered(done, settings.num_texts),
        )
        used = (time.monotonic() - began) / 60
        if settings.num_texts or used >= _ANSWERING * (minutes or 0):
            return shards
        num_texts += NUM_TEXTS


def _affordable(settings: Settings, head: Head, corpus: Corpus, out: Path, seconds: float) -> int:
    """How many steps take so long; a few are taken to see."""
    schedule = replace(settings.schedule, num_steps=_TIMED_STEPS, every=2 * _TIMED_STEPS)
    with TemporaryDirectory(dir=out) as scratch:
        began = time.monotonic()
        train(head, corpus, settings.objective, schedule, Path(scratch))
        step_sec = (time.monotonic() - began) / _TIMED_STEPS
    return max(_TIMED_STEPS, int(seconds / step_sec))


def _held_to(settings: Settings, out: Path) -> Settings:
    """The settings of the run in `out`, if there is one, which must be these or decide more."""
    path = out / "run.json"
    if not path.exists():
        return _keep(settings, out)
    kept = json.loads(path.read_text(encoding="utf-8"))
    for name, given in _flat(asdict(settings)).items():
        before = _flat(kept).get(name, "")  # `start` is younger than some runs
        if given != before and not (given == 0 and name in _DECIDED):
            raise ConfigError(
                f"{out} holds a run with {name} {before!r}, not {given!r}; take the same settings "
                "to go on with it, or another --out"
            )
    objective, schedule = Objective(**kept.pop("objective")), Schedule(**kept.pop("schedule"))
    return Settings(**kept, objective=objective, schedule=schedule)


def _same_texts(settings: Settings, corpus: Path) -> None:
    """Refuse a corpus of another target, of other prompts, or answered otherwise."""
    made = {
        "target": settings.target,
        "data": settings.data,
        "max_tokens": settings.max_tokens,
        "seed": settings.schedule.seed,
    }
    path = corpus / "made.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else made
    for name, given in made.items():
        if given != before[name]:
            raise ConfigError(
                f"{corpus} holds texts with {name} {before[name]!r}, not {given!r}; take another "
                "--corpus"
            )
    _write_json(made, path)


def _keep(settings: Settings, out: Path) -> Settings:
    _write_json(asdict(settings), out / "run.json")
    return settings


def _write_json(content: Mapping[str, Any], path: Path) -> None:
    with written_whole(path) as part:
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    parts = [value if isinstance(value, dict) else {key: value} for key, value in settings.items()]
    return {key: value for part in parts for key, value in part.items()}
