"""Packed weights stand for gguf's numbers, and every kernel multiplies by the same definition.

Each row has its own bits: the same whatever rows are beside it and however many threads work.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from packing import dense, packed_part, random_blocks, random_weight, run
from slipstream import native
from slipstream.kernels import Recording, packed
from slipstream.kernels.packed import (
    Format,
    PackedPart,
    PackedWeight,
    StoredPart,
    StoredRows,
    pack_all,
    rounded,
    unpack,
)

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no native kernels here")

# Up to the rows of one block of registers, over it, and over what unpacks a tile first.
ROW_COUNTS = (1, 2, 3, 7, 12, 13, 16, 17, 24, 25, 40)


@pytest.fixture(autouse=True)
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads; one afterwards."""
    yield native.load().use_threads
    native.load().use_threads(1)


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(format: Format, num_rows: int, num_columns: int) -> PackedWeight:
    return random_weight([format], [num_rows], num_columns)


def product(weight: PackedWeight, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """x W^T + b, natively."""
    recording = Recording()
    out = recording.linear(recording.rows(weight.shape[1]), weight, bias)
    program = recording.program([out])
    return lambda x: run(program, x, [weight.shape[0]])[0]


def assert_product(
    out: Tensor, x: Tensor, weight: PackedWeight, bias: Tensor | None = None
) -> None:
    """Equal to the definition but for the order of additions, which magnitudes bound."""
    exact = packed.linear(x, weight, bias)
    parts = []
    for part in weight.parts:
        given = x if part.format.is_float else rounded(x)
        values = unpack(part, torch.arange(part.num_rows), weight.shape[1])
        parts.append(given.double().abs() @ values.double().abs().T)
    # The definition's minimum comes off every value before the product, the kernels' afterwards.
    bound = 4e-6 * torch.cat(parts, dim=-1) + 1e-6 * (0 if bias is None else bias.abs()) + 1e-38
    assert out.isfinite().all()
    assert ((out - exact).abs() <= bound).all(), ((out - exact).abs() / bound).max()


@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("num_rows", [1, 16, 37])
@pytest.mark.parametrize("format", Format)
def test_values_are_those_of_gguf(format: Format, num_rows: int, num_blocks: int) -> None:
    num_columns = num_blocks * format.columns
    blocks = random_blocks(format, num_rows, num_columns)
    order = np.random.default_rng(0).permutation(num_rows)
    part = packed_part(format, blocks, num_columns, order)
    expected = dense(format, blocks)
    assert expected.std() > 0.3, "blocks of next to nothing"
    values = unpack(part, torch.arange(num_rows), num_columns)
    assert torch.equal(values, expected[order])
    some = torch.from_numpy(order[: num_rows // 2 + 1].copy())
    assert torch.equal(PackedWeight([part], num_columns)[some], expected[order][some])


def test_rows_are_read_a_few_at_a_time() -> None:
    """Also where the order moves them, as that of rotary pairs does within a head."""
    num_heads, head_dim, num_columns = 20, 40, 64
    blocks = random_blocks(Format.Q8_0, num_heads * head_dim, num_columns)
    order = np.arange(len(blocks)).reshape(num_heads, head_dim)[:, ::-1].ravel()
    lengths = []

    class Rows:
        def __getitem__(self, rows: slice, /) -> np.ndarray:
            lengths.append(rows.stop - rows.start)
            return blocks[rows]

    shape = (len(blocks), num_columns)
    (part,), (fill,) = pack_all([StoredPart(Format.Q8_0, shape, lambda: StoredRows(Rows(), order))])
    fill()
    values = unpack(part, torch.arange(len(blocks)), num_columns)
    assert torch.equal(values, dense(Format.Q8_0, blocks)[order.copy()])
    assert max(lengths) < len(blocks) / 2


@pytest.mark.parametrize("format", [f for f in Format if not f.is_float])
def test_every_code_and_scale_survives(format: Format) -> None:
    """Blocks of random bytes: largest codes and scales of either sign, subnormal ones too."""
    num_bytes = random_blocks(format, 1, 256).shape[1]
    blocks = np.random.default_rng(1).integers(0, 256, (50, num_bytes)).astype(np.uint8)
    with np.errstate(all="ignore"):
        expected = dense(format, blocks)
    values = unpack(packed_part(format, blocks, 256), torch.arange(50), 256)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


def test_what_does_not_fit_is_refused() -> None:
    module, part = native.load(), packed_part(Format.Q8_0, random_blocks(Format.Q8_0, 20, 64), 64)
    blocks = random_blocks(Format.Q8_0, 20, 64)
    out = torch.empty(1, 64)
    for row in (-1, 32):
        with pytest.raises(ValueError, match="not there"):
            module.unpack(part.format, part.data, torch.tensor([row]), out)
        with pytest.raises(ValueError, match="not there"):
            module.pack(part.format, blocks, np.array([row] * 20), 64, part.data)
    with pytest.raises(ValueError, match="length"):
        module.pack(part.format, blocks[:, :-1].copy(), np.arange(20), 64, part.data)
    with pytest.raises(ValueError, match="size"):
        module.pack(part.format, blocks, np.arange(20), 64, part.data[:-1])
    with pytest.raises(ValueError, match="whole blocks"):
        module.pack(Format.F32, np.zeros((20, 48 * 4), np.uint8), np.arange(20), 48, part.data)
    with pytest.raises(ValueError, match="whole blocks"):
        product(PackedWeight([part], 48))


@pytest.mark.parametrize("format", Format)
def test_linear(isa: str, format: Format) -> None:
    for num_rows, num_blocks in ((1, 1), (16, 2), (75, 3)):
        matrix = weight(format, num_rows, num_blocks * format.columns)
        bias = floats(num_rows, seed=1)
        multiply, multiply_biased = product(matrix), product(matrix, bias)
        for count in ROW_COUNTS:
            x = floats(count, matrix.shape[1], seed=count)
            assert_product(multiply(x), x, matrix)
            assert_product(multiply_biased(x), x, matrix, bias)


def test_linear_of_no_rows(isa: str) -> None:
    assert product(weight(Format.Q4_0, 20, 64))(torch.empty(0, 64)).shape == (0, 20)


def test_stacked_parts_of_different_formats(isa: str) -> None:
    formats = [Format.Q4_K, Format.Q6_K, Format.F16, Format.Q8_0]
    matrix = random_weight(formats, [40, 8, 16, 33], 256)
    x = floats(5, 256)
    assert_product(product(matrix)(x), x, matrix)


@pytest.mark.parametrize("format", Format)
def test_extreme_activations(isa: str, format: Format) -> None:
    x = floats(9, 2 * format.columns)
    x[0] = 0
    x[1] *= 1e-40  # subnormal
    x[2] *= 1e-37  # normal, with a scale that is not
    x[3] *= 1e30
    x[4, ::2] = 0
    x[4] *= 1e-39
    x[5, :7] *= 1e25  # groups of very different sizes, and within one
    x[6] = 127
    x[7] = torch.arange(x.shape[1]) % 256 - 127.5  # ties
    matrix = weight(format, 20, x.shape[1])
    out = product(matrix)(x)
    assert_product(out, x, matrix)
    assert (out[0] == 0).all()


@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("format", Format)
def test_what_is_not_finite_stays_in_its_row(isa: str, format: Format, count: int) -> None:
    x = floats(count, format.columns)
    multiply = product(weight(format, 20, format.columns))
    healthy, sick = multiply(x), count // 2
    for column in (0, 17, format.columns - 1):
        for value in (torch.nan, torch.inf, -torch.inf):
            poisoned = x.clone()
            poisoned[sick, column] = value
            out = multiply(poisoned)
            if value != value or not format.is_float:
                assert out[sick].isnan().all()
            else:
                assert not out[sick].isfinite().any()
            others = torch.arange(count) != sick
            assert torch.equal(out[others], healthy[others])


def shifted(x: Tensor, by: int) -> Tensor:
    """The same numbers at an address that many items further."""
    room = torch.empty(x.numel() + by, dtype=x.dtype)
    return room[by:].view(x.shape).copy_(x)


@pytest.mark.parametrize("format", Format)
def test_addresses_need_not_be_aligned(isa: str, format: Format) -> None:
    matrix = weight(format, 20, format.columns)
    (part,) = matrix.parts
    odd = PackedPart(format, shifted(part.data, 1), part.num_rows)
    moved = PackedWeight([odd], format.columns)
    bias, x = floats(20), floats(30, format.columns)
    for count in (1, 30):
        expected = product(matrix, bias)(x[:count])
        assert torch.equal(product(moved, shifted(bias, 1))(shifted(x[:count], 3)), expected)
    assert torch.equal(moved[torch.arange(20)], matrix[torch.arange(20)])


@pytest.mark.parametrize("format", Format)
def test_a_row_has_its_own_bits(isa: str, format: Format, threads: Callable[[int], None]) -> None:
    x = floats(max(ROW_COUNTS), 2 * format.columns)
    multiply = product(weight(format, 75, x.shape[1]), floats(75, seed=1))
    threads(1)
    alone = torch.cat([multiply(row) for row in x.split(1)])
    for num_threads in (1, 2, 3):
        threads(num_threads)
        for count in ROW_COUNTS:
            assert torch.equal(multiply(x[-count:]), alone[-count:]), (count, num_threads)


def test_threads_may_change_while_others_run() -> None:
    """A run keeps the team it began with."""
    from concurrent.futures import ThreadPoolExecutor

    multiply = product(weight(Format.Q4_0, 75, 64))
    x = floats(40, 64)
    expected = multiply(x)

    def work(index: int) -> bool:
        native.load().use_threads(1 + index % 3)
        return torch.equal(multiply(x), expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(60)))


def test_unknown_instruction_sets_are_refused() -> None:
    module: Any = native.load()
    before = module.isa()
    with pytest.raises(ValueError, match="no instruction set abacus"):
        module.use_isa("abacus")
    assert module.isa() == before
