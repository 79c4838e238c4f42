"""FoldConstants: compute now what depends on constants only."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ortgraph.graph import Names, TrainingGraph, static_shape
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.ops.infer import infer_node
from ortgraph.ops.spec import spec_of
from ortgraph.passes.canonical.evaluate import Refused, evaluate
from ortgraph.passes.canonical.values import BEFORE_PLAN, Edit, bodies, constant_tensor, is_standard

_INPUT_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class FoldConstants(GraphPass):
    """f(constants) becomes a constant; Constant nodes become initializers.

    Counted as ``folded`` and ``lifted``. A folded graph output is written as Identity of a constant.

    Attributes:
        max_bytes: No constant larger than this is made, unless it is no larger than the inputs it replaces.

    Refuses when:
        - an input is a parameter, buffer, state or any other graph input;
        - the operator draws from hidden state, is unknown or no ONNX standard operator, or carries a subgraph;
        - the result would be too large, or its size cannot be told beforehand;
        - the result is not certain: integer overflow, division by zero, a float out of an integer's range;
        - the result has another type or shape than recorded.
    """

    name: ClassVar[str] = "fold-constants"
    stages: ClassVar[tuple[str, ...]] = BEFORE_PLAN
    max_bytes: int = 1 << 20

    def run(self, graph: TrainingGraph) -> Changes:
        g = graph.graph
        folder = _Folder(g, self.max_bytes)
        changes = Changes()
        for node in tuple(g):
            if is_standard(node, "Constant"):
                changes.counts["lifted"] += folder.lift(node)
                continue
            if not folder.is_candidate(node):
                continue
            try:
                results = folder.results(node)
            except Refused as refused:
                changes.refusals.append(Refusal(node.name or "", str(refused)))
                continue
            changes.counts["folded"] += folder.replace(node, results)
        folder.finish()
        return changes


class _Folder:
    """One run over one graph."""

    def __init__(self, graph: ir.Graph, max_bytes: int) -> None:
        self.graph = graph
        self.edit = Edit(graph)
        self.max_bytes = max_bytes
        self.version = graph.opset_imports.get("", 18)
        self.read: dict[ir.Value, None] = {}
        self.gone: list[ir.Node] = []

    def lift(self, node: ir.Node) -> bool:
        """Turn a Constant node into an initializer of the same name."""
        output = node.outputs[0]
        tensor = constant_tensor(output)
        if tensor is None or output.is_graph_output() or output.name in self.edit.pinned or not output.uses():
            return False
        self._swap(output, tensor)
        self.gone.append(node)
        return True

    def is_candidate(self, node: ir.Node) -> bool:
        """Whether the node depends on genuine constants only and may be evaluated at any time."""
        if node.domain not in ("", "ai.onnx") or not any(v is not None for v in node.inputs):
            return False
        if any(v is not None and constant_tensor(v) is None for v in node.inputs):
            return False
        spec = spec_of(node)
        if not spec.deterministic or spec.effects or next(bodies(node), None) is not None:
            return False
        exposed = [o for o in node.outputs if o.is_graph_output() or o.name in self.edit.pinned]
        if not exposed:
            return any(o.uses() for o in node.outputs)
        return len(node.outputs) == 1 and not is_standard(node, "Identity") and exposed[0].name not in self.edit.pinned

    def results(self, node: ir.Node) -> list[np.ndarray]:
        tensors = [constant_tensor(v) for v in node.inputs]
        given = sum(t.nbytes for t in tensors if t is not None)
        if given > _INPUT_BYTES:
            raise Refused(f"inputs of {given} bytes")
        if any(t is not None and t.dtype == ir.DataType.STRING for t in tensors):
            raise Refused("strings are not evaluated")
        expected = _expected_bytes(node, self.graph.opset_imports)
        if expected is None:
            raise Refused("the size of the result is not known beforehand")
        if expected > max(self.max_bytes, given):
            raise Refused(f"the result would have {expected} bytes, the limit is {self.max_bytes}")
        results = evaluate(node, [None if t is None else t.numpy() for t in tensors], self.version)
        for output, array in zip(node.outputs, results, strict=True):
            _check(output, array)
        return results

    def replace(self, node: ir.Node, results: list[np.ndarray]) -> bool:
        self.read.update(dict.fromkeys(v for v in node.inputs if v is not None))
        if node.outputs[0].is_graph_output():
            self._to_identity(node, results[0])
        else:
            for output, array in zip(node.outputs, results, strict=True):
                if output.uses():
                    self._swap(output, array)
            self.gone.append(node)
        return True

    def _swap(self, output: ir.Value, array: np.ndarray | ir.TensorProtocol) -> None:
        """Let a constant of the same name take the place of a node's output."""
        name = output.name
        assert name is not None
        output.name = ""
        constant = self.edit.constant(array, name)
        for use in output.uses():
            use.node.replace_input_with(use.idx, constant)

    def _to_identity(self, node: ir.Node, array: np.ndarray) -> None:
        names = Names(self.graph)  # rare: one per graph output that is constant
        constant = self.edit.constant(array, names.fresh(f"{node.outputs[0].name}.value"))
        self.edit.become_identity(node, constant, FoldConstants.name)

    def finish(self) -> None:
        """Drop the folded nodes, and the constants that only they read."""
        self.edit.remove(self.gone)
        for value in self.read:
            if value.is_initializer() and not value.is_graph_input() and not self.edit.is_read(value):
                del self.graph.initializers[value.name or ""]


def _expected_bytes(node: ir.Node, opsets: dict[str, int]) -> int | None:
    """Bytes of all outputs from recorded or inferred types; the record is left as it was."""
    record = [(o.type, o.shape) for o in node.outputs]
    if any(o.dtype is None or static_shape(o) is None for o in node.outputs if o.name):
        infer_node(node, opsets)
    sizes = [_bytes(output) for output in node.outputs if output.name]
    for output, (kind, recorded) in zip(node.outputs, record, strict=True):
        output.type, output.shape = kind, recorded
    return None if None in sizes else math.ceil(sum(size for size in sizes if size is not None))


def _bytes(output: ir.Value) -> float | None:
    shape = static_shape(output)
    return None if shape is None or output.dtype is None else math.prod(shape) * output.dtype.itemsize


def _check(output: ir.Value, array: np.ndarray) -> None:
    shape = static_shape(output)
    if output.dtype is not None and output.dtype.numpy() != array.dtype:
        raise Refused(f"%{output.name} is recorded as {output.dtype.name}, the result is {array.dtype}")
    if shape is not None and shape != array.shape:
        raise Refused(f"%{output.name} is recorded with shape {shape}, the result has {array.shape}")
