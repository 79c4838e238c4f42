"""Bodies: a fused region as a local function of the model, which is its specification.

The function ``ortgraph.generated.Fused_<hash>`` holds the region's own operators. Its name is a hash of what it computes,
with dimensions as names, so layers that are alike share one, and so do batch sizes. What differs between them, numbers of
drawing nodes and targets of reshapes, are attributes. Bodies are kept by name for the whole process: a name never means
anything else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.errors import InputError
from ortgraph.ops.generated.elementwise import VIEWS
from ortgraph.ops.generated.reader import constant_ints
from ortgraph.ops.shapes import attribute, normalized_axis
from ortgraph.ops.spec import COMPOSITE, GENERATED

INPUT_TYPES = "ortgraph.inputs"  # metadata: ONNX files keep no types for the inputs of a function
# Said by parameters, or not at all: a number of its own would give each layer a kernel of its own.
_IMPLIED = frozenset({"axes", "noop_with_empty_axes", "allowzero", "num_outputs", "draw"})
_COLUMN_MOVES = frozenset({"Slice", "Concat", "Pad", "Split"})
_BODIES: dict[str, ir.Function] = {}


def body_of(op_type: str) -> ir.Function | None:
    """The body of a generated operator, None when no model with it has been seen."""
    return _BODIES.get(op_type)


def adopt(model: ir.Model) -> None:
    """Remember the bodies of a model's generated operators.

    Raises:
        InputError: A function is called by another name than its hash.
    """
    for (domain, name, _), function in model.functions.items():
        if domain != GENERATED or name in _BODIES:
            continue
        _restore_types(function)
        if operator_name(function) != name:
            raise InputError(
                f"function {domain}.{name} of the model is not what its name says", "optimize the captured graph again"
            )
        _BODIES[name] = function.clone() if hasattr(function, "clone") else function


def _restore_types(function: ir.Function) -> None:
    """Types of the inputs, which ONNX files keep in the metadata only."""
    try:
        recorded = json.loads(function.metadata_props.get(INPUT_TYPES, "[]"))
        for value, (dtype, dims) in zip(function.inputs, recorded, strict=True):
            value.dtype, value.shape = ir.DataType(dtype), ir.Shape(dims)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"function {function.domain}.{function.name} has no readable input types ({error})",
            "optimize the captured graph again",
        ) from error


class BodyMaker:
    """Builds the body of one region.

    Args:
        nodes: The region's nodes in graph order, views left out.
        origin: The value that a value is a view of (itself when it is none).
    """

    def __init__(self, nodes: Sequence[ir.Node], origin: Callable[[ir.Value], ir.Value]) -> None:
        self._nodes, self._origin = nodes, origin
        self._made = {o for node in nodes for o in node.outputs}
        self._values: dict[ir.Value, ir.Value] = {}
        self._reshaped: dict[ir.Value, ir.Value] = {}
        self._count = 0
        self._tokens: dict[tuple[bool, Any], str] = {}
        self._static_last = any(n.op_type in _COLUMN_MOVES for n in nodes)
        self.body: list[ir.Node] = []
        self.inputs: list[ir.Value] = []  # of the graph
        self._inputs: list[ir.Value] = []  # of the function
        self.attributes: dict[str, Any] = {}

    def build(self, outputs: Sequence[ir.Value]) -> ir.Function:
        """The function with these outputs (values of the graph that the nodes make)."""
        for node in self._nodes:
            self._copy(node)
        results = [self._values[v] for v in outputs]
        graph = ir.Graph(
            self._inputs, results, nodes=self.body, opset_imports={"": self._opset(), COMPOSITE: 1}, name="body"
        )
        function = ir.Function(
            GENERATED, "Fused", graph=graph, attributes=[_formal(n, v) for n, v in self.attributes.items()]
        )
        function.metadata_props[INPUT_TYPES] = json.dumps(
            [[int(v.dtype), [d if isinstance(d, int) else str(d.value) for d in v.shape]] for v in self._inputs]  # type: ignore[arg-type, union-attr]
        )
        function.name = operator_name(function)
        return function

    def _opset(self) -> int:
        graph = self._nodes[0].graph
        assert graph is not None
        return graph.opset_imports.get("", 18)

    def _copy(self, node: ir.Node) -> None:
        if node.op_type == "DropoutGrad" and node.domain == COMPOSITE and self._redraw(node):
            return
        inputs: list[ir.Value | None] = [None if v is None else self._operand(v) for v in self._data(node)]
        attributes = list(node.attributes.values())
        inputs += [self._constant(c) for c in self._parameters(node)]
        if node.op_type == "Expand":
            shape = [1 if d < 0 else d for d in attribute_shape(node.outputs[0])]  # 1 leaves a dimension as it is
            inputs = [inputs[0], self._shape(shape)]
        if node.domain == COMPOSITE and "node" in node.attributes:
            attributes = [a for a in attributes if a.name != "node"]
            attributes.append(self._reference("node", "node", node.attributes["node"].as_int()))
        attributes = [_last_axis(a) for a in attributes if a.name not in _IMPLIED]
        outputs = [self._value(o) if o.name else ir.Value(name="") for o in node.outputs]
        self._add(node.domain, node.op_type, inputs, attributes, outputs)
        self._values.update(zip(node.outputs, outputs, strict=True))

    def _redraw(self, node: ir.Node) -> bool:
        """DropoutGrad(dY, mask) = Dropout(dY, Key, Step) with the node that drew the mask: no mask need be kept."""
        forward = drawn_by(node, self._origin)
        if forward is None:
            return False
        ratio = [a for a in forward.attributes.values() if a.name == "ratio"]
        number = self._reference("node", "node", forward.attributes["node"].as_int())
        inputs = [self._operand(v) for v in (node.inputs[0], *forward.inputs[1:3]) if v is not None]
        output = self._value(node.outputs[0])
        self._add(COMPOSITE, "Dropout", inputs, [*ratio, number], [output])
        self._values[node.outputs[0]] = output
        return True

    def _data(self, node: ir.Node) -> Sequence[ir.Value | None]:
        """Operands but for shapes, axes and other constants that say what the operator does."""
        if node.op_type.startswith("Reduce") or node.op_type in ("Expand", "Slice", "Pad", "Split"):
            return node.inputs[:1]
        return node.inputs

    def _parameters(self, node: ir.Node) -> list[np.ndarray]:
        """Constants of the operator, in a form that does not depend on the rank."""
        rank = len(node.inputs[0].shape) if node.inputs and node.inputs[0] is not None and node.inputs[0].shape else 0
        if node.op_type.startswith("Reduce"):
            axes = constant_ints(node.inputs[1]) if len(node.inputs) > 1 else attribute(node, "axes")
            axes = [normalized_axis(a, rank) for a in axes or range(rank)]
            return [np.array([-1] if axes == [rank - 1] else sorted(axes), np.int64)]
        if node.op_type == "Slice":
            return [np.array(constant_ints(node.inputs[i]), np.int64) for i in (1, 2)] + [np.array([-1], np.int64)]
        if node.op_type == "Pad":
            rest = [v for v in node.inputs[2:3] if v is not None]
            fills = [np.asarray(ir.convenience.get_const_tensor(v).numpy()) for v in rest]  # type: ignore[union-attr]
            return [np.array(constant_ints(node.inputs[1]), np.int64), *fills]
        if node.op_type == "Split":
            return [np.array([o.shape[-1] for o in node.outputs], np.int64)]  # type: ignore[index]
        return []

    def _operand(self, value: ir.Value) -> ir.Value:
        if value in self._values:
            return self._values[value]
        source = self._origin(value)
        if source in self._made:
            return self._view(source, value)
        tensor = ir.convenience.get_const_tensor(value) if not value.is_graph_input() else None
        if tensor is not None and tensor.size == 1:
            self._values[value] = self._constant(tensor.numpy())
            return self._values[value]
        made = self._value(value)
        self.inputs.append(value)
        self._inputs.append(made)
        self._values[value] = made
        return made

    def _view(self, source: ir.Value, value: ir.Value) -> ir.Value:
        made = self._value(value)
        self._add("", "Reshape", [self._values[source], self._shape(attribute_shape(value))], [], [made])
        self._values[value] = made
        return made

    def _shape(self, dims: list[int]) -> ir.Value:
        output = ir.Value(name=self._fresh(), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([len(dims)]))
        self._add("", "Constant", [], [self._reference("shape", "value_ints", dims)], [output])
        return output

    def _constant(self, array: np.ndarray) -> ir.Value:
        tensor = ir.tensor(array)
        output = ir.Value(name=self._fresh(), type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))
        self._add("", "Constant", [], [ir.AttrTensor("value", tensor)], [output])
        return output

    def _reference(self, base: str, name: str, value: Any) -> ir.Attr:
        formal = f"{base}{sum(k.startswith(base) for k in self.attributes)}"
        self.attributes[formal] = value
        return ir.RefAttr(name, formal, ir.AttributeType.INT if isinstance(value, int) else ir.AttributeType.INTS)

    def _add(self, domain: str, op_type: str, inputs: list, attributes: list, outputs: list[ir.Value]) -> None:
        stored = [_as_stored(a) for a in attributes]
        self.body.append(
            ir.Node("" if domain == "ai.onnx" else domain, op_type, inputs, stored, outputs=outputs,
                    name=f"n{len(self.body)}")
        )  # fmt: skip

    def _fresh(self) -> str:
        self._count += 1
        return f"v{self._count - 1}"

    def _value(self, value: ir.Value) -> ir.Value:
        assert value.shape is not None and value.dtype is not None
        last = len(value.shape) - 1
        dims = [self._token(d, i == last) for i, d in enumerate(value.shape)]
        return ir.Value(name=self._fresh(), type=ir.TensorType(value.dtype), shape=ir.Shape(dims))

    def _token(self, dim: int | ir.SymbolicDim, last: bool) -> int | str:
        """A name for each dimension, the same for equal ones; 1 stays 1, and so do columns that change places."""
        if isinstance(dim, int) and (dim == 1 or (last and self._static_last)):
            return dim
        key = (last, dim if isinstance(dim, int) else str(dim.value))
        return self._tokens.setdefault(key, f"{'w' if last else 'd'}{sum(k[0] == last for k in self._tokens)}")


def drawn_by(node: ir.Node, origin: Callable[[ir.Value], ir.Value]) -> ir.Node | None:
    """The Dropout that drew the mask of a DropoutGrad, at the same ratio and over as many elements."""
    mask = node.inputs[1]
    source = origin(mask) if mask is not None else None
    forward = source.producer() if source is not None else None
    if (
        forward is None
        or forward.domain != COMPOSITE
        or forward.op_type != "Dropout"
        or source is not forward.outputs[1]
    ):
        return None
    same = attribute(forward, "ratio", 0.5) == attribute(node, "ratio", 0.5)
    return forward if same else None


def attribute_shape(value: ir.Value) -> list[int]:
    """Target of a reshape to the value's shape; one symbolic dimension becomes -1."""
    assert value.shape is not None
    return [d if isinstance(d, int) else -1 for d in value.shape]


def _last_axis(found: ir.Attr) -> ir.Attr:
    """The axis of an operator over the last axis, in a form that does not depend on the rank."""
    return ir.AttrInt64("axis", -1) if found.name == "axis" else found


def _as_stored(found: ir.Attr) -> ir.Attr:
    """The attribute as a file gives it back: ONNX holds numbers in float32, and a name has to survive that."""
    if found.type != ir.AttributeType.FLOAT or found.ref_attr_name:
        return found
    return ir.AttrFloat32(found.name, float(np.float32(found.as_float())))


def _formal(name: str, value: Any) -> ir.Attr:
    return ir.Attr(name, ir.AttributeType.INT if isinstance(value, int) else ir.AttributeType.INTS, None)


def operator_name(function: ir.Function) -> str:
    """``Fused_`` and a hash of the body."""
    return f"Fused_{hashlib.sha256(body_text(function).encode()).hexdigest()[:16]}"


def body_text(function: ir.Function) -> str:
    """What a body says, one line per node."""
    lines = [", ".join(map(_value_text, function.inputs))]
    for node in function:
        attributes = ", ".join(f"{k}={_attribute_text(a)}" for k, a in sorted(node.attributes.items()))
        operands = ", ".join("_" if v is None else v.name or "" for v in node.inputs)
        results = ", ".join(_value_text(v) if v.name else "_" for v in node.outputs)
        kind = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        lines.append(f"{results} = {kind}({operands}) {{{attributes}}}")
    lines.append(", ".join(v.name or "" for v in function.outputs))
    return "\n".join(lines)


def _value_text(value: ir.Value) -> str:
    assert value.shape is not None and value.dtype is not None
    return f"{value.name} {value.dtype.short_name()}[{','.join(map(str, value.shape))}]"


def _attribute_text(found: ir.Attr) -> str:
    if found.ref_attr_name:
        return f"@{found.ref_attr_name}"
    if found.type == ir.AttributeType.TENSOR:
        array = found.as_tensor().numpy()
        return f"{array.dtype}{list(array.shape)}{array.tolist()}"
    return repr(list(found.value)) if isinstance(found.value, (tuple, list)) else repr(found.value)


def dimension_names(function: ir.Function) -> Collection[str]:
    """Names of all symbolic dimensions of a body."""
    values = (*function.inputs, *(o for n in function for o in n.outputs))
    return {str(d.value) for v in values if v.shape is not None for d in v.shape if not isinstance(d, int)}


def bind(function: ir.Function, node: ir.Node, attributes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Dimensions of a node by the names that its body has for them."""
    found: dict[str, Any] = {}
    pairs = [*zip(function.inputs, node.inputs, strict=True), *zip(function.outputs, node.outputs, strict=True)]
    for formal, actual in pairs:
        if actual is None or actual.shape is None or formal.shape is None:
            continue
        for name, dim in zip(formal.shape, actual.shape, strict=True):
            if not isinstance(name, int) and (isinstance(dim, int) or dim.value is not None):
                found.setdefault(str(name.value), dim)
    for reshape in function:
        if reshape.op_type not in ("Reshape", "Expand"):
            continue
        maker = reshape.inputs[1].producer() if reshape.inputs[1] is not None else None
        target = None if maker is None else maker.attributes["value_ints"].ref_attr_name
        for token, dim in zip(reshape.outputs[0].shape or (), attribute(node, target or "", ()), strict=False):
            if not isinstance(token, int) and dim > 1:
                found.setdefault(str(token.value), dim)
    return found


def is_view(node: ir.Node | None) -> bool:
    """Whether a node shows the same elements in the same order in another shape."""
    return node is not None and node.domain in ("", "ai.onnx") and node.op_type in VIEWS
