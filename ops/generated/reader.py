"""Reads the nodes of a region's body into expressions: the values met so far, and a handler for each operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from ortgraph.ops.generated.expressions import CHOICE, NUMBER, ROW, Access, Expr, Maker, Width

Dims = tuple[int | str, ...]


class Reader:
    """Turns the nodes of a region's body, in order, into expressions."""

    def __init__(self, inputs: Sequence[ir.Value]) -> None:
        self.make = Maker()
        self._index = {value: i for i, value in enumerate(inputs)}
        self._values: dict[ir.Value, int] = {}
        self.trim = 0  # trailing dimensions of size 1 that every value has
        self.draws: list[str] = []

    def space(self, value: ir.Value) -> tuple[Dims, Width]:
        """(leading dimensions, width) of a value."""
        dims = dims_of(value)
        dims = dims[: len(dims) - self.trim] if len(dims) >= self.trim else ()
        if not dims:
            return (), 1
        return dims[:-1], dims[-1]

    def read(self, value: ir.Value, lead: Dims, last: Width) -> int:
        """The value, broadcast to rows of (leading dimensions, width)."""
        found = self._values.get(value)
        if found is not None:
            return found
        constant = ir.convenience.get_const_tensor(value)
        if constant is not None:
            number = constant.numpy().reshape(-1)[0]
            return self.make.choice(bool(number)) if constant.dtype == ir.DataType.BOOL else self.make.const(number)
        dims = dims_of(value)
        dims = dims[: len(dims) - self.trim] if len(dims) >= self.trim else ()
        dims = (1,) * (len(lead) + 1 - len(dims)) + dims
        leading = tuple((size, own != 1) for size, own in zip(lead, dims[:-1], strict=True))
        varies = dims[-1] != 1
        access = Access(self._index[value], leading, last if varies else ROW, varies)
        kind = CHOICE if value.dtype == ir.DataType.BOOL else NUMBER
        return self.make.add(Expr("load", (), last if varies else ROW, kind, access))

    def index_of(self, value: ir.Value) -> int:
        """Position of an input."""
        return self._index[value]

    def put(self, value: ir.Value, expr: int) -> None:
        self._values[value] = expr

    def alias(self, node: ir.Node) -> None:
        source = node.inputs[0]
        assert source is not None
        self.put(node.outputs[0], self.read(source, *self.space(source)))

    def operands(self, node: ir.Node) -> list[int]:
        """All operands of an element-wise node, broadcast to its output."""
        space = self.space(node.outputs[0])
        return [self.read(v, *space) for v in node.inputs if v is not None]


def dims_of(value: ir.Value) -> Dims:
    """The recorded dimensions: numbers, and names of symbolic ones."""
    assert value.shape is not None
    return tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)


def row_of(reader: Reader, node: ir.Node, position: int) -> tuple[int, Width]:
    """An operand as a row of its own shape, and its width."""
    value = node.inputs[position]
    assert value is not None
    lead, width = reader.space(value)
    return reader.read(value, lead, width), width


def constant_ints(value: ir.Value | None) -> list[int] | None:
    """Elements of a constant of a body."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None or tensor.size > 64 else [int(i) for i in tensor.numpy().reshape(-1)]


Handler = Callable[[Reader, ir.Node], None]
HANDLERS: dict[tuple[str, str], Handler] = {}


def handles(*names: str, domain: str = "") -> Callable[[Handler], Handler]:
    """Registers how operators are read."""

    def wrap(handler: Handler) -> Handler:
        HANDLERS.update({(domain, name): handler for name in names})
        return handler

    return wrap
