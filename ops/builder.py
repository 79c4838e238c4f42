"""Builder: makes typed, named, stamped nodes at one place of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.errors import UnsupportedError
from ortgraph.graph.edit import Names, add_constant, stamp
from ortgraph.ops.infer import infer_node


class Builder:
    """Creates nodes before (or at the end of) a graph, with dtype and shape inferred and provenance stamped.

    Args:
        graph: Where the nodes go.
        by: Name of the pass that makes them.
        before: Insert before this node; None appends at the end.
        origins: Nodes whose module, source line and phase the new nodes inherit.
        names: Shared name authority; one per pass run saves reading the graph again.
    """

    def __init__(
        self,
        graph: ir.Graph,
        by: str,
        before: ir.Node | None = None,
        origins: Sequence[ir.Node] = (),
        names: Names | None = None,
    ) -> None:
        self.graph, self.by, self.before, self.origins = graph, by, before, tuple(origins)
        self.names = names or Names(graph)
        self.made: list[ir.Node] = []
        self._constants: dict[tuple, ir.Value] = {}

    def op(
        self, op_type: str, *inputs: ir.Value | None, domain: str = "", name: str = "", **attributes: Any
    ) -> ir.Value:
        """A node with one output."""
        return self.multi(op_type, *inputs, outputs=1, domain=domain, name=name, **attributes)[0]

    def multi(
        self, op_type: str, *inputs: ir.Value | None, outputs: int, domain: str = "", name: str = "", **attributes: Any
    ) -> tuple[ir.Value, ...]:
        """A node with ``outputs`` outputs. Attributes that are None are left out."""
        attributes = {k: v for k, v in attributes.items() if v is not None}
        base = name or op_type.lower()
        node = ir.node(
            op_type, list(inputs), attributes, domain=domain, num_outputs=outputs, name=self.names.fresh_node(base)
        )
        for output in node.outputs:
            output.name = self.names.fresh(base)
        stamp(node, self.by, self.origins)
        if self.before is not None:
            self.graph.insert_before(self.before, node)
        else:
            self.graph.append(node)
        if domain:
            self.graph.opset_imports.setdefault(domain, 1)
        infer_node(node, self.graph.opset_imports)
        self.made.append(node)
        return tuple(node.outputs)

    def const(self, value: Any, dtype: ir.DataType | np.dtype | type | None = None, name: str = "const") -> ir.Value:
        """A constant (graph initializer). Equal constants made by one Builder are shared."""
        if isinstance(dtype, ir.DataType):
            dtype = dtype.numpy()
        array = np.asarray(value, dtype=dtype)
        key = (array.dtype.str, array.shape, array.tobytes()) if array.size <= 64 else (id(array),)
        if key not in self._constants:
            self._constants[key] = add_constant(self.graph, ir.tensor(array), self.names.fresh(name))
        return self._constants[key]

    @property
    def constants(self) -> tuple[ir.Value, ...]:
        """The constants made so far."""
        return tuple(self._constants.values())

    def scalar(self, value: float, like: ir.Value) -> ir.Value:
        """A scalar constant of the dtype of ``like``; raises UnsupportedError when that is not recorded."""
        if like.dtype is None:
            raise UnsupportedError(f"the element type of %{like.name} is not known", "run shape inference on the graph")
        return self.const(value, like.dtype)

    def ints(self, values: Sequence[int]) -> ir.Value:
        """A 1-D int64 constant (axes, shapes)."""
        return self.const(list(values), np.int64)
