"""Draft heads that come with this package, trained for models of `aliases`."""

from pathlib import Path

# Methods whose heads draft well beside lookup, the fastest first.
_BEST = ("eagle3", "mtp", "medusa")
_FOLDER = Path(__file__).parents[1] / "heads"


def shipped_head(target: str, method: str) -> Path | None:
    """The directory of the head of that method, if there is one for a model of that alias."""
    path = _FOLDER / target / method
    return path if path.is_dir() else None


def best_head(target: str) -> str | None:
    """The method of the head that is fastest for a model of that alias, if it has one."""
    return next((method for method in _BEST if shipped_head(target, method) is not None), None)
