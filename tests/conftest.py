"""Shared by all tests. Tiny models are in `tiny.py`; real ones come from the cache."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import gguf
import hypothesis
import numpy as np
import pytest
import torch

from slipstream import native
from slipstream.loading.pull import cached

if _sanitized := os.environ.get("SLIPSTREAM_SANITIZED"):
    # Another build of the extension; `.ci/sanitize` says which.
    _spec = spec_from_file_location("slipstream._native", _sanitized)
    assert _spec is not None and _spec.loader is not None, _sanitized
    sys.modules[_spec.name] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_spec.name])

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


@pytest.fixture(params=native.load().isas() if native.is_available() else ["torch"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test on every instruction set of this machine; skips without native kernels."""
    if not native.is_available():
        pytest.skip("no native kernels here")
    module = native.load()
    before = module.isa()
    module.use_isa(request.param)
    yield request.param
    module.use_isa(before)


@pytest.fixture(scope="session")
def write_gguf() -> Callable[[Path, Mapping[str, Any], Mapping[str, Any]], Path]:
    """Write a GGUF file from plain values.

    Integers become uint32 and floats float32. A tensor is an array, or a pair of its ggml type
    and the bytes of its blocks.
    """

    def write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
        writer = gguf.GGUFWriter(path, metadata["general.architecture"])
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        for key, value in metadata.items():
            if key != "general.architecture":
                add[type(value)](key, value)
        for name, tensor in tensors.items():
            kind, data = tensor if isinstance(tensor, tuple) else (None, np.asarray(tensor))
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
