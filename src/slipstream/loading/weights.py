"""Fill a model from a checkpoint: every parameter exactly once, every tensor used.

Checkpoints of any kind present their tensors under the names of Hugging Face's `safetensors`
files, in the layout those have.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from slipstream import native
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ModelError
from slipstream.kernels.packed import Format, PackedWeight, StoredPart, StoredRows, pack_all
from slipstream.models import build
from slipstream.models.deepseek_v3 import Router
from slipstream.models.layers import CausalLM, Embedding, Linear


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor still in its file.

    Attributes:
        shape: after dequantisation.
        kind: how it is stored, for people ("Q4_K", "bfloat16").
        read: dequantise to a float tensor of that shape; may be called from any thread.
        rows: of a matrix, its rows as they are stored; None where they cannot be had.
    """

    shape: tuple[int, ...]
    kind: str
    read: Callable[[], Tensor]
    rows: Callable[[], StoredRows] | None = None


@dataclass(frozen=True, slots=True)
class FileRows:
    """Rows of a file, [rows, bytes of a row] uint8, read when a slice of them is asked for.

    Read rather than mapped: a page of a mapped file stays part of the process until the mapping
    ends, so the process would grow to the packed model and its file together.

    Attributes:
        offset: where in the file the first row begins, in bytes.
    """

    path: Path
    offset: int
    num_rows: int
    row_bytes: int

    @classmethod
    def of(cls, path: Path, offset: int, shape: tuple[int, ...], num_bytes: int) -> Self:
        """The rows of a tensor: all its dimensions but the last count as rows."""
        num_rows = math.prod(shape[:-1])
        return cls(path, offset, num_rows, num_bytes // max(num_rows, 1))

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        first, last, _ = rows.indices(self.num_rows)
        start, num_bytes = self.offset + first * self.row_bytes, (last - first) * self.row_bytes
        return np.fromfile(self.path, np.uint8, num_bytes, offset=start).reshape(-1, self.row_bytes)


def load_model(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    *,
    dtype: torch.dtype | None,
    device: torch.device | str = "cpu",
    quiet: bool = True,
) -> CausalLM:
    """Build a model and fill it.

    Args:
        dtype: of all parameters. None packs matrices as they are stored, for the native kernels;
            the few other parameters are float32 then.

    Raises:
        ModelError: a tensor is missing, surplus, of the wrong shape, or contains NaN.
    """
    # Without memory at first: a damaged file may describe a model that no machine holds.
    with torch.device("meta"):
        model = build(config)
    _check_slots(dict(parameter_slots(model)), tensors, tied=config.tied)
    jobs: list[Callable[[], None]] = []
    if dtype is None:
        jobs += _pack(model, tensors)
    cast(model, dtype or torch.float32)
    # Not `to_empty`: on meta tensors torch imports sympy for it, half a second and 30 MB.
    room = {
        name: torch.full(slot.shape, torch.nan, dtype=slot.dtype, device=device)
        for name, slot in model.state_dict().items()
    }
    model.load_state_dict(room, assign=True)
    jobs += [partial(_fill, slot, name, tensors) for name, slot in parameter_slots(model)]

    with ThreadPoolExecutor(native.num_threads()) as pool:
        done = pool.map(lambda job: job(), jobs)
        for _ in tqdm(done, total=len(jobs), desc="Loading", unit="tensor", disable=quiet):
            pass
    return model.eval()


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Take a module's parameters to a dtype; those of routers to float32 at least."""
    module.to(dtype)
    for each in module.modules():
        if isinstance(each, Router):
            each.to(torch.promote_types(dtype, torch.float32))
    return module


def fill(module: nn.Module, tensors: Mapping[str, StoredTensor]) -> None:
    """Fill a module that is not a whole model: every parameter once, every tensor used.

    Raises:
        ModelError: as `load_model`.
    """
    slots = dict(parameter_slots(module))
    _check_slots(slots, tensors, tied=False)
    for name, slot in slots.items():
        _fill(slot, name, tensors)


def can_pack(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether the native kernels know all of a model: layers, formats, and numbers of columns."""
    if config.latent is not None or config.experts is not None:
        return False
    with torch.device("meta"):
        model = build(config)
    for _, names in _matrices(model):
        for name in names:
            tensor = tensors.get(name)
            if tensor is None or tensor.rows is None or tensor.kind not in Format.__members__:
                return False
            if tensor.shape[-1] % Format[tensor.kind].columns:
                return False
    return True


def _matrices(model: CausalLM) -> Iterator[tuple[nn.Module, list[str]]]:
    """Modules whose weight can be packed, and the names of the tensors stacked in it."""
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            parent = path.rpartition(".")[0]
            names = [f"{parent}.{part}" if part else path for part in module.parts]
            yield module, [f"{name}.weight" for name in names]
        elif isinstance(module, Embedding):
            yield module, [f"{path}.weight"]


def _pack(model: CausalLM, tensors: Mapping[str, StoredTensor]) -> list[Callable[[], None]]:
    """Put packed weights in the place of parameters; the jobs that fill them."""
    matrices = list(_matrices(model))
    stored = [_stored_part(tensors[name]) for _, names in matrices for name in names]
    parts, jobs = pack_all(stored)
    waiting = iter(parts)
    for module, names in matrices:
        del module.weight
        num_columns = tensors[names[0]].shape[1]
        packed = PackedWeight(list(islice(waiting, len(names))), num_columns)
        setattr(module, "weight", packed)  # noqa: B010, what mypy takes for a tensor
    return jobs


def _stored_part(tensor: StoredTensor) -> StoredPart:
    assert tensor.rows is not None, "can_pack says which tensors have rows"
    num_rows, num_columns = tensor.shape
    return StoredPart(Format[tensor.kind], (num_rows, num_columns), tensor.rows)


def _fill(slot: Tensor, name: str, tensors: Mapping[str, StoredTensor]) -> None:
    slot.copy_(tensors[name].read())
    if bool(torch.isnan(slot).any()):
        raise ModelError(f"tensor {name} contains NaN; the checkpoint is damaged")


def parameter_slots(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint name and destination of everything a model or a head needs.

    A stacked `Linear` takes several checkpoint tensors, each into its own rows. Packed
    weights have no slots.
    """
    stacked: set[str] = set()
    for path, module in model.named_modules():
        if not isinstance(module, Linear):
            continue
        stacked.update(f"{path}.{kind}" for kind in ("weight", "bias"))
        parent = path.rpartition(".")[0]
        row = 0
        for part, num_rows in module.parts.items():
            name = f"{parent}.{part}" if part else path
            if not isinstance(module.weight, PackedWeight):
                yield f"{name}.weight", module.weight.data[row : row + num_rows]
            if module.bias is not None:
                yield f"{name}.bias", module.bias.data[row : row + num_rows]
            row += num_rows
    for name, parameter in model.named_parameters():
        if name not in stacked:
            yield name, parameter.data


def _check_slots(
    slots: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], *, tied: bool
) -> None:
    """Every slot has its tensor, of its shape, and every tensor its slot."""
    missing = sorted(slots.keys() - stored.keys())
    if missing:
        raise ModelError(f"the checkpoint lacks {len(missing)} tensors, the first: {missing[0]}")
    surplus = sorted(stored.keys() - slots.keys())
    if tied and surplus == ["lm_head.weight"]:
        surplus = []  # some checkpoints store the tied head a second time
    if surplus:
        raise ModelError(
            f"the checkpoint has {len(surplus)} tensors no layer uses, the first: {surplus[0]}"
        )
    for name, slot in slots.items():
        if tuple(slot.shape) != stored[name].shape:
            raise ModelError(
                f"tensor {name} has shape {list(stored[name].shape)}, expected {list(slot.shape)}"
            )
