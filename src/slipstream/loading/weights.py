"""Fill a model from a checkpoint: every parameter exactly once, every tensor used.

Checkpoints of any kind present their tensors under the names of Hugging Face's `safetensors`
files, in the layout those have.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from slipstream.core.config import ModelConfig
from slipstream.core.errors import ModelError
from slipstream.models import build
from slipstream.models.layers import CausalLM, Linear


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor still in its file.

    Attributes:
        shape: after dequantisation.
        kind: how it is stored, for people ("Q4_K", "bfloat16").
        read: dequantise to a float tensor of that shape; may be called from any thread.
    """

    shape: tuple[int, ...]
    kind: str
    read: Callable[[], Tensor]


def load_model(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quiet: bool = True,
) -> CausalLM:
    """Build a model and fill it.

    Raises:
        ModelError: a tensor is missing, surplus, of the wrong shape, or contains NaN.
    """
    # Without memory at first: a damaged file may describe a model that no machine holds.
    with torch.device("meta"):
        model = build(config)
    _check_slots(dict(parameter_slots(model)), tensors, tied=config.tied)
    model.to(dtype).to_empty(device=device)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    slots = dict(parameter_slots(model))

    def fill(name: str) -> None:
        slot = slots[name]
        slot.copy_(tensors[name].read())
        if bool(torch.isnan(slot).any()):
            raise ModelError(f"tensor {name} contains NaN; the checkpoint is damaged")

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        done = pool.map(fill, slots)
        for _ in tqdm(done, total=len(slots), desc="Loading", unit="tensor", disable=quiet):
            pass
    return model.eval()


def parameter_slots(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint name and destination of everything the model needs.

    A stacked `Linear` takes several checkpoint tensors, each into its own rows.
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
