"""Running a model once on symbols, to run it many times in one native call.

A model's forward pass calls the operations of `kernels` on tensors. Given a `Symbol` instead, an
operation is written down: the list of them is the model, whatever its architecture. `Recording`
then joins what can be computed in one go, gives every value a buffer, and hands the list to the
native program, which runs it on any number of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from slipstream import native
from slipstream.kernels.packed import GROUP, PackedPart, PackedWeight

_GATES = {"gated_silu": 1, "gated_gelu": 2}


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A buffer [T, width] that one operation writes; [R, width] from `pick` on."""

    recording: "Recording"
    width: int
    is_picked: bool


@dataclass(frozen=True, slots=True, eq=False)
class Symbol:
    """What stands for a tensor of T rows while recording: some columns of a value.

    It answers to the few tensor methods that models use. `heads` is set where the columns are
    seen as [heads, head_dim].
    """

    value: Value
    offset: int
    width: int
    heads: int | None = None

    dtype = torch.float32

    @property
    def shape(self) -> tuple[None, int]:
        return (None, self.width)

    @property
    def is_whole(self) -> bool:
        return self.offset == 0 and self.width == self.value.width

    def split(self, sizes: Sequence[int], dim: int = -1) -> list["Symbol"]:
        assert dim == -1, "only columns can be split"
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            Symbol(self.value, self.offset + start, size)
            for start, size in zip(starts, sizes, strict=True)
        ]

    def view(self, rows: None, heads: int, head_dim: int) -> "Symbol":
        assert rows is None and heads == -1, "rows stay rows"
        return replace(self, heads=self.width // head_dim)

    def flatten(self, start_dim: int) -> "Symbol":
        assert start_dim == 1, "rows stay rows"
        return replace(self, heads=None)

    def float(self) -> "Symbol":
        return self

    def __add__(self, other: "Symbol") -> "Symbol":
        return self.value.recording.emit("add", (self, other), self.width)


@dataclass(slots=True, eq=False)
class Operation:
    """One line of a recording: `out` = `kind` of `inputs`, with settings."""

    kind: str
    inputs: tuple[Symbol, ...]
    out: Symbol
    settings: dict[str, Any] = field(default_factory=dict)


class Recording:
    """Operations in order; ids, positions and the pages of attention are every run's own."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.outputs: list[Symbol] = []
        self.frequencies: list[Tensor] = []

    def emit(
        self,
        kind: str,
        inputs: tuple[Symbol, ...],
        width: int,
        heads: int | None = None,
        **settings: Any,
    ) -> Symbol:
        """Write an operation down; the symbol of its result."""
        kinds = {symbol.value.is_picked for symbol in inputs}
        assert len(kinds) <= 1, "picked rows do not meet all rows"
        is_picked = kind == "pick" or True in kinds
        assert kind != "attend" or not is_picked, "attention is over all rows"
        out = Symbol(Value(self, width, is_picked), 0, width, heads)
        self.operations.append(Operation(kind, inputs, out, settings))
        return out

    # The operations of `kernels`, under their names.

    def embed(self, weight: PackedWeight) -> Symbol:
        return self.emit("embed", (), weight.shape[1], weight=weight)

    def rows(self, width: int) -> Symbol:
        """Rows that the caller of a run brings."""
        return self.emit("load", (), width)

    def linear(self, x: Symbol, weight: PackedWeight, bias: Tensor | None = None) -> Symbol:
        assert x.is_whole, "codes are made of whole values"
        return self.emit("linear", (x,), weight.shape[0], weight=weight, bias=bias)

    def rms_norm(self, x: Symbol, weight: Tensor, eps: float) -> Symbol:
        return self.emit("rms_norm", (x,), x.width, x.heads, weight=weight, eps=eps)

    def rotary_angles(self, inv_freq: Tensor) -> int:
        self.frequencies.append(inv_freq)
        return len(self.frequencies) - 1

    def rotate(self, x: Symbol, angles: int) -> Symbol:
        return self.emit("rotate", (x,), x.width, x.heads, angles=angles)

    def scale(self, x: Symbol, factor: float) -> Symbol:
        return self.emit("scale", (x,), x.width, factor=factor)

    def gated(self, gate_up: Symbol, kind: str) -> Symbol:
        return self.emit("gated", (gate_up,), gate_up.width // 2, gate=kind)

    def attend(
        self, layer: int, q: Symbol, k: Symbol, v: Symbol, *, scale: float, window: int | None
    ) -> Symbol:
        return self.emit(
            "attend", (q, k, v), q.width, q.heads, layer=layer, scale=scale, window=window or 0
        )

    def pick(self, x: Symbol) -> Symbol:
        """The rows that a run asks for; what is made of them has only these."""
        assert not x.value.is_picked, "rows are picked once"
        return self.emit("pick", (x,), x.width)

    # From the list to a program.

    def program(self, outputs: Sequence[Symbol]) -> Any:
        """The native program; the rows of `outputs` are what a run returns."""
        self.outputs = [self._alone(symbol, outputs[:i]) for i, symbol in enumerate(outputs)]
        self._join("gated", self._into_gate)
        self._join("add", self._onto_residual)
        return _Lowering(self).program

    def _alone(self, symbol: Symbol, others: Sequence[Symbol]) -> Symbol:
        """What fills memory of the caller's by itself: a whole value, not yet given out."""
        is_shared = any(symbol.value is other.value for other in others)
        return self.scale(symbol, 1.0) if is_shared or not symbol.is_whole else symbol

    def _join(self, kind: str, joined: Any) -> None:
        """Let operations of a kind absorb the linear layer before them where only they use it."""
        makers = {op.out.value: op for op in self.operations}
        uses: dict[Value, int] = {}
        for symbol in [*self.outputs, *(s for op in self.operations for s in op.inputs)]:
            uses[symbol.value] = uses.get(symbol.value, 0) + 1
        for op in [op for op in self.operations if op.kind == kind]:
            for index, symbol in enumerate(op.inputs):
                maker = makers[symbol.value]
                is_free = maker.kind == "linear" and uses[symbol.value] == 1 and symbol.is_whole
                if is_free and joined(op, index, maker):
                    self.operations.remove(maker)
                    break

    def _into_gate(self, op: Operation, index: int, maker: Operation) -> bool:
        parts = maker.settings["weight"].parts
        half = op.out.width
        # Gate and up are worked through in step, a group of outputs at a time.
        splits = len(parts) == 2 and parts[0].num_rows == parts[1].num_rows == half
        if not splits or half % GROUP or maker.settings["bias"] is not None:
            return False
        settings = {**maker.settings, "gate": _GATES[op.settings["gate"]]}
        op.kind, op.inputs, op.settings = "linear", maker.inputs, settings
        return True

    def _onto_residual(self, op: Operation, index: int, maker: Operation) -> bool:
        if "gate" in maker.settings or "residual" in maker.settings:
            return False
        residual = op.inputs[1 - index]
        op.kind, op.inputs = "linear", (*maker.inputs, residual)
        op.settings = {**maker.settings, "residual": residual}
        return True


class _Lowering:
    """Gives values their buffers and writes a recording into a native program.

    A buffer is free again after the last operation that reads its value. Linear layers of integer
    formats read codes; whoever can makes them along with the floats, else an operation of its own.
    """

    def __init__(self, recording: Recording):
        self.recording = recording
        self.program = native.load().Program()
        self._free: dict[tuple[int, bool], list[int]] = {}  # width, is_picked -> buffers
        self._free_codes: dict[int, list[int]] = {}
        self._buffers: dict[Value, int] = {}
        self._codes: dict[Value, int] = {}
        self._last_use = self._last_uses()
        self._coded = self._all_coded()
        self._angles = [self.program.angles(f.tolist()) for f in recording.frequencies]
        for index, op in enumerate(recording.operations):
            self._lower(op)
            self._release(index)
        for symbol in recording.outputs:
            self.program.output(self._buffers[symbol.value])

    def _last_uses(self) -> dict[Value, int]:
        last = {s.value: len(self.recording.operations) for s in self.recording.outputs}
        for index, op in reversed(list(enumerate(self.recording.operations))):
            for symbol in (op.out, *op.inputs):
                last.setdefault(symbol.value, index)
        return last

    def _all_coded(self) -> dict[Value, bool]:
        """Values some linear layer reads as codes; whether nobody reads their floats."""
        coded: dict[Value, bool] = {}
        for op in self.recording.operations:
            if op.kind == "linear" and not all(p.format.is_float for p in _parts(op)):
                coded.setdefault(op.inputs[0].value, True)
        readers = [(op, symbol) for op in self.recording.operations for symbol in op.inputs]
        for op, symbol in readers:
            reads_codes = (
                op.kind == "linear"
                and symbol is op.inputs[0]
                and not any(p.format.is_float for p in _parts(op))
            )
            if symbol.value in coded and not reads_codes:
                coded[symbol.value] = False
        for symbol in self.recording.outputs:
            if symbol.value in coded:
                coded[symbol.value] = False
        return coded

    def _release(self, index: int) -> None:
        for value in [v for v, last in self._last_use.items() if last == index]:
            if value in self._buffers:
                self._free_like(value).append(self._buffers.pop(value))
            if value in self._codes:
                self._free_codes.setdefault(value.width, []).append(self._codes.pop(value))

    def _view(self, symbol: Symbol | None) -> tuple[int, int]:
        if symbol is None:
            return (-1, 0)
        return (self._buffers[symbol.value], symbol.offset)

    def _free_like(self, value: Value) -> list[int]:
        return self._free.setdefault((value.width, value.is_picked), [])

    def _new(self, value: Value) -> None:
        free = self._free_like(value)
        if not free:
            free.append(self.program.buffer(value.width, value.is_picked))
        self._buffers[value] = free.pop()

    def _new_codes(self, value: Value) -> int:
        free = self._free_codes.setdefault(value.width, [])
        codes = free.pop() if free else self.program.codes(value.width)
        self._codes[value] = codes
        return codes

    def _lower(self, op: Operation) -> None:
        value = op.out.value
        self._new(value)
        makes_codes = value in self._coded and (
            op.kind == "rms_norm"
            or (op.kind == "attend" and op.out.width // (op.out.heads or 1) % GROUP == 0)
            or (op.kind == "linear" and "gate" in op.settings and self._coded[value])
        )
        codes = self._new_codes(value) if makes_codes else -1
        getattr(self, f"_{op.kind}")(op, codes)
        if value in self._coded and not makes_codes:
            self.program.quantize(self._view(op.out), self._new_codes(value))

    def _embed(self, op: Operation, codes: int) -> None:
        (part,) = _parts(op)
        self.program.embed(_as_tuple(part), op.out.width, self._view(op.out))

    def _load(self, op: Operation, codes: int) -> None:
        self.program.load(op.out.width, self._view(op.out))

    def _scale(self, op: Operation, codes: int) -> None:
        (x,) = op.inputs
        factor = op.settings["factor"]
        self.program.scale(self._view(x), factor, x.width, self._view(op.out))

    def _rms_norm(self, op: Operation, codes: int) -> None:
        (x,) = op.inputs
        heads = x.heads or 1
        weight, eps = op.settings["weight"], op.settings["eps"]
        width = x.width // heads
        self.program.rms_norm(
            self._view(x), weight.detach(), eps, width, heads, self._view(op.out), codes
        )

    def _rotate(self, op: Operation, codes: int) -> None:
        (x,) = op.inputs
        heads = x.heads or 1
        angles = self._angles[op.settings["angles"]]
        self.program.rotate(self._view(x), angles, heads, x.width // heads, self._view(op.out))

    def _attend(self, op: Operation, codes: int) -> None:
        q, k, v = map(self._view, op.inputs)
        layer, scale, window = (op.settings[name] for name in ("layer", "scale", "window"))
        heads = op.out.heads
        self.program.attend(layer, q, k, v, heads, scale, window, self._view(op.out), codes)

    def _pick(self, op: Operation, codes: int) -> None:
        (x,) = op.inputs
        self.program.pick(self._view(x), x.width, self._view(op.out))

    def _gated(self, op: Operation, codes: int) -> None:
        (x,) = op.inputs
        is_gelu = op.settings["gate"] == "gated_gelu"
        self.program.gated(self._view(x), op.out.width, is_gelu, self._view(op.out))

    def _add(self, op: Operation, codes: int) -> None:
        a, b = map(self._view, op.inputs)
        self.program.add(a, b, op.out.width, self._view(op.out))

    def _linear(self, op: Operation, codes: int) -> None:
        x = op.inputs[0]
        bias = op.settings["bias"]
        self.program.linear(
            [_as_tuple(part) for part in _parts(op)],
            columns=x.width,
            **{"in": self._view(x)},
            codes=self._codes.get(x.value, -1),
            out=self._view(op.out),
            bias=None if bias is None else bias.detach(),
            residual=self._view(op.settings.get("residual")),
            gate=op.settings.get("gate", 0),
            out_codes=codes,
        )


def _parts(op: Operation) -> tuple[PackedPart, ...]:
    return op.settings["weight"].parts


def _as_tuple(part: PackedPart) -> tuple[int, Tensor, int]:
    return (int(part.format), part.data, part.num_rows)
