"""Float checkpoints with fewer bits, on request."""

import gguf
import numpy as np
import pytest
import torch

from slipstream.core.errors import ConfigError
from slipstream.kernels.packed import StoredRows
from slipstream.loading.quantize import quantized
from slipstream.loading.weights import StoredTensor


def stored(tensor: torch.Tensor, kind: str = "F32") -> StoredTensor:
    rows = StoredRows(tensor.numpy().view(np.uint8))
    return StoredTensor(tuple(tensor.shape), kind, lambda: tensor, lambda: rows)


@pytest.fixture
def matrix() -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("name", "kind", "levels"), [("int8", "Q8_0", 127), ("int4", "Q4_1", 15)])
def test_values_are_off_by_half_a_level_at_most(matrix, name: str, kind: str, levels: int) -> None:
    tensor = quantized({"w": stored(matrix)}, name)["w"]
    assert tensor.kind == kind
    groups = matrix.unflatten(1, (-1, 32))
    size = groups.abs().amax(-1) if kind == "Q8_0" else groups.amax(-1) - groups.amin(-1)
    # Half a level, and what float16 scales round.
    limit = (size / levels * 0.52 + size * 2**-10).unsqueeze(-1)
    assert bool(((tensor.read().unflatten(1, (-1, 32)) - groups).abs() <= limit).all())


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
def test_what_is_packed_is_what_is_read(matrix, source: str, name: str) -> None:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[source]
    floats = matrix.to(dtype)
    order = np.array([0, 2, 1, 3])
    rows = StoredRows(floats.view(torch.uint8).numpy(), order)
    fine = StoredTensor((4, 64), source, lambda: floats[order], lambda: rows)
    coarse = quantized({"w": fine}, name)["w"]
    assert coarse.rows is not None
    blocks = coarse.rows().blocks
    some = np.concatenate([blocks[0:1], blocks[1:4]])
    values = gguf.quants.dequantize(some, gguf.GGMLQuantizationType[coarse.kind])
    assert torch.equal(torch.from_numpy(values[coarse.rows().order]), coarse.read())


def test_vectors_and_quantised_matrices_stay(matrix) -> None:
    norm, coarse = stored(matrix[0]), stored(matrix, "Q4_K")
    result = quantized({"norm": norm, "coarse": coarse, "w": stored(matrix, "BF16")}, "int4")
    assert result["norm"] is norm and result["coarse"] is coarse
    assert result["w"].kind == "Q4_1"


def test_nothing_to_quantise_is_an_error(matrix) -> None:
    with pytest.raises(ConfigError, match="quantised already"):
        quantized({"w": stored(matrix, "Q4_K")}, "int8")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="int8, int4, not 'int3'"):
        quantized({}, "int3")
