"""Files that are there with all they should hold, or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A place to write to, which takes the name of `path` when all went well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    yield part
    part.replace(path)
