"""What an attachment adds to a graph: nodes, inputs, outputs and states, with one authority for names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ortgraph.errors import PassError
from ortgraph.graph import Names, State, TrainingGraph
from ortgraph.graph.edit import PHASE_KEY
from ortgraph.ops.builder import Builder


class Frame:
    """One attachment at work.

    Args:
        graph: Gets new nodes at its end, and before its first node where they feed the backward half.
        by: Name of the pass.
    """

    def __init__(self, graph: TrainingGraph, by: str) -> None:
        self.graph = graph
        names, first = Names(graph.graph), next(iter(graph.graph), None)
        self.build = Builder(graph.graph, by, names=names)
        self.early = Builder(graph.graph, by, before=first, names=names)
        self.inputs: dict[str, ir.Value] = {v.name or "": v for v in graph.graph.inputs}
        self.outputs: dict[str, ir.Value] = {v.name or "": v for v in graph.graph.outputs}
        self.states: list[State] = []

    def op(self, op_type: str, *inputs: ir.Value | None, name: str, **attributes: Any) -> ir.Value:
        """A node at the end of the graph."""
        return self.build.op(op_type, *inputs, name=name, **attributes)

    def number(self, value: float) -> ir.Value:
        """A float32 scalar constant."""
        return self.build.const(value, ir.DataType.FLOAT)

    def add_input(self, name: str, dtype: ir.DataType, shape: Sequence[Any] = (), exact: bool = False) -> ir.Value:
        """A graph input; with ``exact`` a name that is taken is an error."""
        value = ir.Value(name=self.build.names.fresh(name), type=ir.TensorType(dtype), shape=ir.Shape(shape))
        if exact and value.name != name:
            raise PassError(f"the graph has a value called {name!r} already", "rename that input of the model")
        self.graph.graph.inputs.append(value)
        return value

    def add_output(self, value: ir.Value, name: str) -> ir.Value:
        """Make a new value a graph output."""
        value.name = self.build.names.fresh(name)
        self.graph.graph.outputs.append(value)
        return value

    def keep(self, name: str, old: ir.Value, new: ir.Value | None, kind: str, initial: float = 0.0,
             parameter: str | None = None, output: str = "") -> None:  # fmt: skip
        """Record a state: input ``old``, next value ``new`` (None: it stays), which becomes a graph output."""
        made = None if new is None else self.add_output(new, output or f"{name}/next").name
        self.states.append(State(name, old.name or "", made, kind, parameter, initial))

    def mark(self) -> None:
        """Note on every new node that it belongs to the optimizer."""
        for node in (*self.build.made, *self.early.made):
            node.metadata_props[PHASE_KEY] = "optimizer"
