"""Draft heads that come with this package, trained for models of `aliases`."""

from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "heads"


def shipped_head(target: str, method: str) -> Path | None:
    """The directory of the head of that method, if there is one for a model of that alias."""
    path = _FOLDER / target / method
    return path if path.is_dir() else None
