"""Shared by all tests. Tiny models are in `tiny.py`; real ones come from the cache."""

from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch

from slipstream.loading.pull import cached

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
torch.set_num_threads(1)


@pytest.fixture
def model_path() -> Callable[[str], Path]:
    """The cached file of an alias; skips the test where it is not there."""

    def find(alias: str) -> Path:
        path = cached(alias)
        if path is None:
            pytest.skip(f"{alias} is not cached; run `slipstream pull {alias}`")
        return path

    return find


@pytest.fixture
def device() -> torch.device:
    """For tests marked `gpu`; skips where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")
