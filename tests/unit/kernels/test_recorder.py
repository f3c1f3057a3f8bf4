"""A recorded program does what its operations do one by one, fused or not.

A program that returns every value fuses nothing and reuses no buffer, since all of them are used
at the end. It is compared with torch operation by operation, and other programs with it, in bits.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from packing import random_weight, run, run_into
from slipstream import kernels, native
from slipstream.kernels import PackedWeight, Recording, Symbol
from slipstream.kernels.packed import GROUP, Format

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no native kernels here")

WIDTHS = (32, 64, 96)
HEAD_DIM = 16
INTEGERS = (Format.Q4_0, Format.Q4_1, Format.Q5_0, Format.Q5_1, Format.Q8_0)
FLOATS = (Format.F32, Format.F16, Format.BF16)


@dataclass(frozen=True)
class Step:
    """One operation: `apply` to earlier values, by index; tensors and symbols alike."""

    apply: Callable[..., Any]
    inputs: Sequence[int]


class Graph:
    """Operations that make values one after another; value 0 is the input of so many columns."""

    def __init__(self, width: int):
        self.widths = [width]
        self.steps: list[Step] = []

    def add(self, width: int, apply: Callable[..., Any], *inputs: int) -> int:
        self.widths.append(width)
        self.steps.append(Step(apply, inputs))
        return len(self.steps)

    def linear(self, weight: PackedWeight, x: int, bias: Tensor | None = None) -> int:
        return self.add(weight.shape[0], lambda v: kernels.linear(v, weight, bias), x)

    def run(self, x: Tensor, outputs: Sequence[int]) -> list[Tensor]:
        """Natively: these values."""
        recording = Recording()
        values: list[Any] = [recording.rows(self.widths[0])]
        for step in self.steps:
            values.append(step.apply(*(values[i] for i in step.inputs)))
        program = recording.program([values[i] for i in outputs])
        return run(program, x, [self.widths[i] for i in outputs])

    def all_values(self, x: Tensor) -> list[Tensor]:
        """Natively: every value, each compared with what torch makes of the ones before."""
        values = self.run(x, range(len(self.widths)))
        assert torch.equal(values[0], x)
        for index, step in enumerate(self.steps, start=1):
            expected = step.apply(*(values[i] for i in step.inputs))
            size = 1 + expected.abs().max()
            torch.testing.assert_close(values[index], expected, atol=1e-5 * size, rtol=1e-5)
        return values


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_graph(seed: int) -> Graph:
    """About twenty operations on random earlier values, recent ones more often."""
    source = random.Random(seed)
    graph = Graph(source.choice(WIDTHS))
    feeds_linear = [True]  # whole values of whole groups do

    def pick(accept: Callable[..., bool]) -> int | None:
        fitting = [i for i in range(len(graph.widths)) if accept(i)]
        return source.choice(fitting[-4:]) if fitting else None

    def weight(rows: Sequence[int], columns: int) -> PackedWeight:
        formats = [source.choice(INTEGERS + FLOATS) for _ in rows]
        return random_weight(formats, rows, columns, seed=source.randrange(2**31))

    def extend(is_whole: bool, width: int, apply: Callable[..., Any], *inputs: int) -> None:
        graph.add(width, apply, *inputs)
        feeds_linear.append(is_whole and width % GROUP == 0)

    def add_linear(x: int, rows: Sequence[int], *, bias: bool) -> int:
        matrix = weight(rows, graph.widths[x])
        vector = floats(sum(rows), seed=source.randrange(2**31)) if bias else None
        graph.linear(matrix, x, vector)
        feeds_linear.append(True)
        return len(feeds_linear) - 1

    while len(graph.steps) < 20:
        kind = source.choice(("linear", "gate", "residual", "norm", "scale", "split", "heads"))
        x = pick(lambda i: feeds_linear[i])
        assert x is not None
        width = graph.widths[x]
        if kind == "linear":
            add_linear(x, [source.choice(WIDTHS)], bias=source.random() < 0.5)
        elif kind == "gate":
            half = source.choice((*WIDTHS, 48))
            rows = [half, half] if source.random() < 0.8 else [2 * half]
            gate_up = add_linear(x, rows, bias=source.random() < 0.2)
            gate = source.choice((kernels.gated_silu, kernels.gated_gelu))
            extend(True, half, gate, gate_up)
        elif kind == "residual":
            other = source.choice(WIDTHS)
            branch = add_linear(x, [other], bias=source.random() < 0.5)
            stream = pick(lambda i, width=other: graph.widths[i] == width)
            assert stream is not None
            pair = (branch, stream) if source.random() < 0.5 else (stream, branch)
            extend(True, other, lambda a, b: a + b, *pair)
        elif kind == "norm":
            factors = 1 + 0.1 * floats(width, seed=len(graph.steps))
            extend(True, width, lambda v, f=factors: kernels.rms_norm(v, f, 1e-5), x)
        elif kind == "scale":
            factor = source.uniform(-2, 2)
            extend(True, width, lambda v, f=factor: kernels.scale(v, f), x)
        elif kind == "split":
            sizes = [width // 2, width - width // 2]
            index = source.randrange(2)
            extend(False, sizes[index], lambda v, s=sizes, i=index: v.split(s, -1)[i], x)
        else:
            y = pick(lambda i: graph.widths[i] % HEAD_DIM == 0)
            assert y is not None
            factors = 1 + 0.1 * floats(HEAD_DIM, seed=len(graph.steps))

            def head_norm(v: Tensor | Symbol, f: Tensor = factors) -> Any:
                heads = v.view(v.shape[0], -1, HEAD_DIM)
                return kernels.rms_norm(heads, f, 1e-5).flatten(1)

            extend(True, graph.widths[y], head_norm, y)
    return graph


@pytest.mark.parametrize("seed", range(30))
def test_random_graphs(isa: str, seed: int) -> None:
    """Whatever is returned has the bits it has where nothing is fused and no buffer reused."""
    graph = random_graph(seed)
    source = random.Random(seed)
    x = floats(source.choice((1, 2, 5, 30)), graph.widths[0], seed=seed)
    values = graph.all_values(x)
    last = len(values) - 1
    for outputs in ([last], [*source.sample(range(last), 2), last], [last, 0, last]):
        for index, out in zip(outputs, graph.run(x, outputs), strict=True):
            assert torch.equal(out, values[index]), (index, outputs)


@pytest.mark.parametrize("gate", [kernels.gated_silu, kernels.gated_gelu])
@pytest.mark.parametrize("half", [32, 48, 96])
def test_a_gate_joins_the_layer_before_it(isa: str, half: int, gate: Callable[[Any], Any]) -> None:
    for formats in ([Format.Q4_0] * 2, [Format.Q8_0, Format.Q5_1], [Format.F16] * 2):
        graph = Graph(64)
        gate_up = graph.linear(random_weight(formats, [half, half], 64), 0)
        gated = graph.add(half, gate, gate_up)
        outputs = [gated]
        if half % 32 == 0:  # whose input is made of codes as it is gated
            outputs = [graph.linear(random_weight([Format.Q5_0], [40], half), gated)]
        for count in (1, 3, 30):
            x = 3 * floats(count, 64, seed=count)
            values = graph.all_values(x)
            (out,) = graph.run(x, outputs)
            assert torch.equal(out, values[outputs[0]])


@pytest.mark.parametrize("format", [Format.Q4_0, Format.F32])
def test_a_residual_joins_the_layer_before_it(isa: str, format: Format) -> None:
    graph = Graph(64)
    first = graph.linear(random_weight([format], [75], 64), 0, floats(75))
    second = graph.linear(random_weight([format], [75], 64, seed=1), 0)
    both = graph.add(75, lambda a, b: a + b, first, second)
    thrice = graph.add(75, lambda a, b: a + b, both, first)
    doubled = graph.add(75, lambda a: a + a, thrice)
    for count in (1, 30):
        x = floats(count, 64, seed=count)
        values = graph.all_values(x)
        for outputs in ([doubled], [both], [thrice]):
            (out,) = graph.run(x, outputs)
            assert torch.equal(out, values[outputs[0]])


def operations(graph: Graph, outputs: Sequence[int]) -> list[str]:
    """What is left of a graph after fusing."""
    recording = Recording()
    values: list[Any] = [recording.rows(graph.widths[0])]
    for step in graph.steps:
        values.append(step.apply(*(values[i] for i in step.inputs)))
    recording.program([values[i] for i in outputs])
    return [op.kind for op in recording.operations]


def test_what_fuses() -> None:
    graph = Graph(64)
    gate_up = graph.linear(random_weight([Format.Q4_0] * 2, [64, 64], 64), 0)
    gated = graph.add(64, kernels.gated_silu, gate_up)
    down = graph.linear(random_weight([Format.Q4_0], [64], 64), gated)
    out = graph.add(64, lambda a, b: a + b, 0, down)
    assert operations(graph, [out]) == ["load", "linear", "linear"]
    # What others need as well stays.
    assert operations(graph, [out, down]) == ["load", "linear", "linear", "add"]
    assert operations(graph, [out, gate_up]) == ["load", "linear", "gated", "linear"]


def test_a_run_of_fewer_rows_after_one_of_more() -> None:
    graph = random_graph(0)
    recording = Recording()
    values: list[Any] = [recording.rows(graph.widths[0])]
    for step in graph.steps:
        values.append(step.apply(*(values[i] for i in step.inputs)))
    program = recording.program([values[-1]])
    x = floats(40, graph.widths[0])
    (whole,) = run(program, x, [graph.widths[-1]])
    for count in (3, 40, 1, 17):
        (part,) = run(program, x[:count], [graph.widths[-1]])
        assert torch.equal(part, whole[:count])


@pytest.mark.parametrize("seed", range(8))
def test_picked_rows_are_what_all_rows_would_be(isa: str, seed: int) -> None:
    """Bit for bit, in any order and more than once; buffers of both kinds are used in turn."""
    before, after = random_graph(seed), random_graph(seed + 100)
    join = random_weight([Format.Q8_0], [after.widths[0]], 64, seed=seed)

    def record(*, picks: bool) -> tuple[Any, list[int]]:
        recording = Recording()
        values: list[Any] = [recording.rows(before.widths[0])]
        for step in before.steps:
            values.append(step.apply(*(values[i] for i in step.inputs)))
        whole = next(v for v in reversed(values) if v.is_whole and v.width % GROUP == 0)
        x = kernels.linear(whole, random_weight([Format.Q4_0], [64], whole.width, seed=seed))
        x = kernels.linear(kernels.pick(x, recording) if picks else x, join)
        later: list[Any] = [x]
        for step in after.steps:
            later.append(step.apply(*(later[i] for i in step.inputs)))
        outputs = [later[-1], later[0], whole]
        return recording.program(outputs), [out.width for out in outputs]

    x = floats(7, before.widths[0])
    program, widths = record(picks=False)
    expected = run(program, x, widths)
    program, widths = record(picks=True)
    for rows in ([6, 0, 6], [3], [], list(range(7))):
        found = [torch.empty(len(rows) if i < 2 else 7, width) for i, width in enumerate(widths)]
        run_into(program, x, found, rows)
        assert torch.equal(found[0], expected[0][rows])
        assert torch.equal(found[1], expected[1][rows])
        assert torch.equal(found[2], expected[2])


def test_picked_rows_do_not_meet_all_rows() -> None:
    recording = Recording()
    x: Any = recording.rows(32)
    with pytest.raises(AssertionError, match="do not meet"):
        x + kernels.pick(x, recording)
    with pytest.raises(AssertionError, match="picked once"):
        kernels.pick(kernels.pick(x, recording), recording)


def test_a_run_is_told_what_is_wrong() -> None:
    recording = Recording()
    x: Any = recording.rows(32)
    program = recording.program([kernels.pick(x, recording)])
    rows = floats(3, 32)
    for picked, shape in (([3], (1, 32)), ([-1], (1, 32)), ([0], (2, 32)), ([0], (1, 31))):
        with pytest.raises(ValueError, match=r"row|width"):
            run_into(program, rows, [torch.empty(shape)], picked)
    with pytest.raises(ValueError, match="as many outputs"):
        run_into(program, rows, [], [0])


@pytest.mark.parametrize("width", [16, 20, 31, 32, 576])
def test_element_wise_operations(isa: str, width: int) -> None:
    """Of any width, on numbers large and small."""
    x = 4 * floats(9, 2 * width)
    x[1] *= 1e-20
    x[2] *= 1e15
    x[3] = 0
    x[4] = torch.linspace(-100, 100, 2 * width)
    factors = floats(2 * width, seed=1)
    graph = Graph(2 * width)
    graph.add(2 * width, lambda v: kernels.rms_norm(v, factors, 1e-5), 0)
    graph.add(2 * width, lambda v: kernels.scale(v, 0.1), 0)
    graph.add(2 * width, lambda a, b: a + b, 1, 2)
    values = graph.run(x, range(4))
    torch.testing.assert_close(values[1], kernels.rms_norm(x, factors, 1e-5), atol=1e-6, rtol=1e-5)
    assert torch.equal(values[2], kernels.scale(x, 0.1))
    assert torch.equal(values[3], values[1] + values[2])
    for gate in (kernels.gated_silu, kernels.gated_gelu):
        graph = Graph(2 * width)
        gated = graph.add(width, gate, 0)
        (out,) = graph.run(x, [gated])
        torch.testing.assert_close(out, gate(x), atol=2e-5, rtol=2e-5)
    poisoned = x.clone()
    poisoned[5, -1] = torch.nan
    (out,) = graph.run(poisoned, [gated])
    assert out[5, -1].isnan()
    assert out.isnan().sum() == 1


@pytest.mark.parametrize("head_dim", [16, 20, 32, 80, 256])
def test_rotation(isa: str, head_dim: int) -> None:
    """At any position: angles are as exact as torch's."""
    frequencies = 1 / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)
    recording = Recording()
    x = recording.rows(5 * head_dim)
    (heads,) = [x.split([2 * head_dim, 3 * head_dim])[1].view(None, -1, head_dim)]
    out = kernels.rotate(heads, kernels.rotary_angles(recording, frequencies))
    program = recording.program([out.flatten(1)])
    numbers = floats(70, 5 * head_dim)
    (turned,) = run(program, numbers, [3 * head_dim])  # whose positions are 0, 1, ..
    angles = kernels.rotary_angles(torch.arange(70), frequencies)
    given = numbers[:, 2 * head_dim :].unflatten(1, (3, head_dim))
    expected = kernels.rotate(given, angles).flatten(1)
    torch.testing.assert_close(turned, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("format", Format)
def test_embedding(isa: str, format: Format) -> None:
    table = random_weight([format], [37], 256)
    recording = Recording()
    program = recording.program([kernels.embed(recording, table)])
    ids = torch.tensor([36, 0, 5, 5, 17])
    out = torch.empty(5, 256)
    program.run(rows=5, hidden=None, outputs=[out], ids=ids.tolist())
    assert torch.equal(out, table[ids])


def test_codes_are_not_made_of_some_columns() -> None:
    recording = Recording()
    (first, _) = recording.rows(96).split([64, 32])
    with pytest.raises(AssertionError, match="whole values"):
        kernels.linear(first, random_weight([Format.Q4_0], [16], 64))
