"""Evaluates a training graph as its types say: every value of a low type is really rounded to it.

ONNX Runtime's processor kernels compute float16 in float32 and may leave a cast between two of them out, so that an
overflow that a real float16 machine has does not show. Here each operator is computed in float64, composites by their
reference expansion, and its results are rounded to the recorded type: an overflow is infinite where it happens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortgraph.errors import InputError, UnsupportedError
from ortgraph.graph import TrainingGraph
from ortgraph.graph.edit import MODULE_KEY
from ortgraph.graph.text import node_text
from ortgraph.ops.expand import can_expand, expand_node
from ortgraph.ops.precision import LOW, round_to
from ortgraph.ops.shapes import operator
from ortgraph.runtime.batch import Batch, named

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, *LOW)
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Overflow:
    """An operator that makes infinities or NaN from finite inputs.

    Attributes:
        node: Its name.
        value: Which result.
        module: Path of the module that it belongs to, empty when unknown.
        text: The node in words.
    """

    node: str
    value: str
    module: str
    text: str


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """All values of one run.

    Attributes:
        values: Arrays by value name; floats are float64 that hold numbers of the recorded type.
        overflows: In node order.
    """

    values: Mapping[str, np.ndarray]
    overflows: tuple[Overflow, ...]


def evaluate_reference(
    graph: TrainingGraph,
    batch: Batch,
    *,
    loss_gradient: float = 1.0,
    rounded: bool = True,
    outputs: Iterable[str] | None = None,
) -> Evaluation:
    """Evaluate a graph on a batch.

    Args:
        graph: Before lowering, or lowered to standard operators (``lower{prefer=expansion}``). Not changed.
        batch: As for ``TrainingSession``.
        loss_gradient: The seed of the backward half.
        rounded: False leaves every float in float64: what the graph would compute without any rounding.
        outputs: Graph outputs wanted; None: all but new states, which need states.

    Raises:
        InputError: A parameter, buffer or state that is read has no value.
        UnsupportedError: An operator has neither a standard form nor an expansion.
    """
    signature = graph.signature
    given: Arrays = {**graph.values, **named(batch, signature.inputs)}
    if signature.loss_gradient is not None:
        given[signature.loss_gradient] = np.asarray(loss_gradient, np.float32)
    given |= {name: np.asarray(value, np.float32) for name, value in signature.scalars.items()}
    shapes = {v.name: v for v in graph.graph.inputs}
    starts = {s.input: s.initial for s in signature.states} | dict.fromkeys(signature.tangents.values(), 0.0)
    for name, start in starts.items():
        value = shapes[name]
        if name not in given and value.shape is not None and value.shape.is_static() and value.dtype is not None:
            given[name] = np.full(tuple(int(d) for d in value.shape), start, value.dtype.numpy())  # type: ignore[arg-type]
    wanted = set(outputs) if outputs is not None else {v.name or "" for v in graph.graph.outputs}
    return _Walk(graph, rounded).run(given, wanted)


class _Walk:
    """One evaluation of a graph's nodes in order."""

    def __init__(self, graph: TrainingGraph, rounded: bool) -> None:
        self.graph, self.rounded = graph, rounded
        self.version = graph.graph.opset_imports.get("", 18)

    def run(self, given: Mapping[str, np.ndarray], wanted: set[str]) -> Evaluation:
        g = self.graph.graph
        nodes = _needed(g, wanted)
        known: dict[ir.Value, np.ndarray] = {}
        for value in (*g.inputs, *g.initializers.values()):
            if any(use.node in nodes for use in value.uses()) or value.name in wanted:
                known[value] = _wide(self._start(value, given))
        overflows: list[Overflow] = []
        for node in g:
            if node not in nodes:
                continue
            inputs = [None if v is None else known[v] for v in node.inputs]
            made = self._node(node, inputs)
            for value, array in zip(node.outputs, made, strict=False):
                if array is None:
                    continue
                known[value] = self._as_recorded(value, array)
                if _appears(inputs, known[value]):
                    module = node.metadata_props.get(MODULE_KEY, "")
                    overflows.append(Overflow(node.name or "", value.name or "", module, node_text(node)))
        return Evaluation({v.name or "": a for v, a in known.items()}, tuple(overflows))

    def _start(self, value: ir.Value, given: Mapping[str, np.ndarray]) -> np.ndarray:
        if value.const_value is not None and not value.is_graph_input():
            return value.const_value.numpy()
        if value.name not in given:
            raise InputError(f"%{value.name} has no value", "set graph.values, or give it in the batch")
        return np.asarray(given[value.name or ""])

    def _as_recorded(self, value: ir.Value, array: np.ndarray) -> np.ndarray:
        """Rounded to the recorded type, as float64."""
        if not self.rounded or value.dtype not in _FLOATS or value.dtype == ir.DataType.DOUBLE:
            return array
        return _rounded(array, value.dtype)

    def _node(self, node: ir.Node, inputs: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
        function = self.graph.model.functions.get((node.domain, node.op_type, node.overload))
        if function is not None:
            return self._body(function.inputs, list(function), function.outputs, inputs)
        if node.domain in ("", "ai.onnx"):
            return self._standard(node, inputs)
        if not can_expand(node):
            raise UnsupportedError(
                f"{operator(node)} {node.name!r} is not evaluated",
                "evaluate the graph before lowering, or after lower{prefer=expansion}",
            )
        return self._expanded(node, inputs)

    def _expanded(self, node: ir.Node, inputs: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
        """By the reference expansion, in float64; casts inside it round."""
        values = [
            None if v is None else ir.Value(name=f"i{i}", shape=ir.Shape(a.shape), type=ir.TensorType(v.dtype))  # type: ignore[union-attr,arg-type]
            for i, (v, a) in enumerate(zip(node.inputs, inputs, strict=True))
        ]
        attributes = [a for a in node.attributes.values()]
        alone = ir.Node(node.domain, node.op_type, values, attributes, num_outputs=len(node.outputs), name="alone")
        for i, (new, old) in enumerate(zip(alone.outputs, node.outputs, strict=True)):
            new.name, new.type = f"o{i}" if old.name else "", None if old.dtype is None else ir.TensorType(old.dtype)
            new.shape = None if old.shape is None or not old.shape.is_static() else old.shape.copy()
        read = [o for o, old in zip(alone.outputs, node.outputs, strict=True) if old.uses() or old.is_graph_output()]
        imports = {"": self.version, node.domain: 1}
        body = ir.Graph([v for v in values if v is not None], read, nodes=[alone], opset_imports=imports)
        while (composite := next((n for n in body if n.domain not in ("", "ai.onnx")), None)) is not None:
            expand_node(composite)
        known = {v: a for v, a in zip(values, inputs, strict=True) if v is not None and a is not None}
        known |= {v: _wide(v.const_value.numpy()) for v in body.initializers.values() if v.const_value is not None}
        self._evaluate(list(body), known)
        made = iter(known[v] for v in body.outputs)
        return [next(made) if o.uses() or o.is_graph_output() else None for o in node.outputs]

    def _body(
        self,
        parameters: Sequence[ir.Value],
        nodes: Sequence[ir.Node],
        results: Sequence[ir.Value],
        inputs: Sequence[np.ndarray | None],
    ) -> list[np.ndarray | None]:
        known = {v: a for v, a in zip(parameters, inputs, strict=False) if a is not None}
        self._evaluate(nodes, known)
        return [known.get(v) for v in results]

    def _evaluate(self, nodes: Iterable[ir.Node], known: dict[ir.Value, np.ndarray]) -> None:
        for node in nodes:
            inputs = [None if v is None else known.get(v) for v in node.inputs]
            for value, array in zip(node.outputs, self._node(node, inputs), strict=False):
                if array is not None:
                    known[value] = array

    def _standard(self, node: ir.Node, inputs: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
        if node.op_type == "Cast":
            assert inputs[0] is not None
            return [self._cast(inputs[0], ir.DataType(node.attributes["to"].as_int()))]
        if node.op_type in ("If", "Loop", "Scan"):
            raise UnsupportedError(
                f"{node.op_type} {node.name!r} is not evaluated", "evaluate a graph without branches"
            )
        if node.op_type == "GatherElements":
            return [_gather_elements(inputs[0], inputs[1], node.attributes.get_int("axis", 0))]  # type: ignore[arg-type]
        attributes = tuple(ir.serde.serialize_attribute(a).SerializeToString() for a in node.attributes.values())
        present = tuple(x is not None for x in inputs)
        runner = _runner(node.op_type, attributes, present, len(node.outputs), self.version)
        with np.errstate(all="ignore"):
            found = runner.run(None, {f"i{i}": x for i, x in enumerate(inputs) if x is not None})
        return [None if x is None else _wide(np.asarray(x)) for x in found]

    def _cast(self, array: np.ndarray, to: ir.DataType) -> np.ndarray:
        if to in LOW and self.rounded:
            return _rounded(array, to)
        if to in _FLOATS:
            return array.astype(np.float64)
        return array.astype(to.numpy())


def _rounded(array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    if dtype == ir.DataType.FLOAT:
        with np.errstate(over="ignore"):
            return array.astype(np.float32).astype(np.float64)
    return round_to(array, dtype).astype(np.float64)


def _gather_elements(data: np.ndarray, indices: np.ndarray, axis: int) -> np.ndarray:
    """onnx.reference fails where there are fewer indices than elements along another axis or along this one."""
    kept = tuple(slice(None) if i == axis % data.ndim else slice(n) for i, n in enumerate(indices.shape))
    size = data.shape[axis]
    return np.take_along_axis(data[kept], np.where(indices < 0, indices + size, indices), axis)


def _wide(array: np.ndarray) -> np.ndarray:
    """Floats of every type as float64; integers and booleans as they are."""
    integral = array.dtype.kind in "iub" or array.dtype == bool
    return array if integral else array.astype(np.float64)


def _appears(inputs: Sequence[np.ndarray | None], made: np.ndarray) -> bool:
    """Whether the result has elements that are not finite while all inputs are finite."""
    if made.dtype.kind != "f" or np.isfinite(made).all():
        return False
    return all(x is None or x.dtype.kind != "f" or np.isfinite(x).all() for x in inputs)


def _needed(graph: ir.Graph, wanted: set[str]) -> set[ir.Node]:
    """Nodes that the wanted outputs are computed by."""
    stack = [p for v in graph.outputs if v.name in wanted and (p := v.producer()) is not None]
    found: set[ir.Node] = set()
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        stack.extend(p for v in node.inputs if v is not None and (p := v.producer()) is not None)
    return found


@functools.lru_cache(maxsize=512)
def _runner(op_type: str, attributes: tuple[bytes, ...], present: tuple[bool, ...], outputs: int, version: int) -> Any:
    from onnx.reference import ReferenceEvaluator

    names = [f"i{i}" if there else "" for i, there in enumerate(present)]
    made = [f"o{i}" for i in range(outputs)]
    proto = onnx.helper.make_node(op_type, names, made)
    proto.attribute.extend(onnx.AttributeProto.FromString(a) for a in attributes)
    unknown = onnx.TensorProto.UNDEFINED
    graph = onnx.helper.make_graph(
        [proto],
        "one_node",
        [onnx.helper.make_tensor_value_info(n, unknown, None) for n in names if n],
        [onnx.helper.make_tensor_value_info(n, unknown, None) for n in made],
    )
    return ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", version)]))
