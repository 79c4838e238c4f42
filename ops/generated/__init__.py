"""Generated kernels: fused regions of a graph, each a local function of the model that is compiled to one C++ kernel.

A node of domain ``ortgraph.generated`` needs the library of the model's functions in its session::

    options.register_custom_ops_library(str(generated.library_path(model)))

and is given to ONNX Runtime in the form that ``serialize_node`` makes, which carries all sizes. Without a compiler
``expand_node`` (or lowering) puts the body in its place.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from ortgraph.errors import PlanError, RuntimeSetupError
from ortgraph.graph.edit import static_shape
from ortgraph.ops import kernels
from ortgraph.ops.generated.bodies import adopt, bind, body_of
from ortgraph.ops.generated.compiled import build, why_absent
from ortgraph.ops.generated.expressions import ROW, Region
from ortgraph.ops.generated.layout import completed, input_count, layout, sizes
from ortgraph.ops.generated.operators import read_region
from ortgraph.ops.generated.schedule import inplace_pairs, schedule
from ortgraph.ops.generated.source import Writer
from ortgraph.ops.kernels.library import find_compiler
from ortgraph.ops.shapes import Types, element_count
from ortgraph.ops.spec import GENERATED as DOMAIN
from ortgraph.ops.spec import OpSpec

if TYPE_CHECKING:
    from ortgraph.ops.builder import Builder

_INLINE_ROW = 4096  # generated.h: rows up to here keep their intermediate values on the stack


def available() -> bool:
    """Whether kernels can be generated, or those that are kept used: there is a compiler. Never raises."""
    return reason() == ""


def reason(op_type: str | None = None) -> str:
    """Why kernels cannot be used here; with an operator, why its kernel cannot. Empty: they can.

    A cache that cannot be written gives the kernels that it holds.
    """
    try:
        find_compiler()
        if op_type is None or kernels.reason():
            return kernels.reason()  # what cannot be loaded from the same cache
        return why_absent(op_type)
    except RuntimeSetupError as error:
        return str(error)


def reason_of(function: ir.Function) -> str | None:
    """Why no kernel can be made for a body; None when one can, or is kept."""
    try:
        text = Writer(function.name, read_region(function)).text()
    except ValueError as error:
        return str(error)
    return why_absent(function.name, text) or None


def library_path(model: ir.Model) -> pathlib.Path:
    """The library with the kernels of all generated operators of a model; compiled when the cache has none.

    Raises:
        RuntimeSetupError: There is no compiler, or compiling failed.
    """
    adopt(model)
    return build(tuple(sorted(name for domain, name, _ in model.functions if domain == DOMAIN)))


@functools.lru_cache(maxsize=1024)
def region_of(op_type: str) -> Region | None:
    """What a generated operator computes, None when its body is not known."""
    body = body_of(op_type)
    return None if body is None else read_region(body)


def spec_of_body(op_type: str) -> OpSpec | None:
    """Facts about a generated operator, None when its body is not known."""
    return None if body_of(op_type) is None else _spec(op_type)


@functools.lru_cache(maxsize=1024)
def _spec(op_type: str) -> OpSpec:
    region = region_of(op_type)
    body = body_of(op_type)
    assert region is not None and body is not None
    work = sum(e.width != ROW for e in region.exprs)
    return OpSpec(
        DOMAIN, op_type, inplace=inplace_pairs(schedule(region)), precision="accumulate", infer=_infer, expand=_expand,
        flops=lambda node: work * max((element_count(v) for v in (*node.inputs, *node.outputs) if v is not None), default=0),
        doc="fused: " + ", ".join(dict.fromkeys(n.op_type for n in body if n.op_type not in ("Constant", "Reshape"))),
    )  # fmt: skip


def _infer(node: ir.Node) -> Types:
    body = body_of(node.op_type)
    assert body is not None
    dims = bind(body, node)
    found: list[Any] = []
    for formal in body.outputs[: len(node.outputs)]:
        assert formal.dtype is not None and formal.shape is not None
        shape = [d if isinstance(d, int) else dims.get(str(d.value)) for d in formal.shape]
        found.append((formal.dtype, None if None in shape else tuple(shape)))
    return found


def _expand(builder: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """The body, with the node's attributes put in."""
    body = body_of(node.op_type)
    assert body is not None
    values: dict[ir.Value, ir.Value | None] = dict(zip(body.inputs, node.inputs, strict=True))
    for inner in body:
        given = {k: _actual(a, node) for k, a in inner.attributes.items()}
        if inner.op_type == "Constant" and inner.domain == "":
            tensor = given.get("value")
            made = builder.ints(given["value_ints"]) if tensor is None else builder.const(tensor.numpy())
            values[inner.outputs[0]] = made
            continue
        inputs = [None if v is None else values[v] for v in inner.inputs]
        results = builder.multi(inner.op_type, *inputs, outputs=len(inner.outputs), domain=inner.domain, **given)
        for formal, value in zip(inner.outputs, results, strict=True):
            if not formal.name:
                value.name = ""
        values.update(zip(inner.outputs, results, strict=True))
    return [values[v] for v in body.outputs]


def _actual(found: ir.Attr, node: ir.Node) -> Any:
    name = found.ref_attr_name
    return node.attributes[name].value if name else found.value


def other_functions(model: ir.Model) -> list[onnx.FunctionProto]:
    """The functions of a model that a runtime inlines; those of generated operators are kernels there."""
    return [ir.serde.serialize_function(f) for f in model.functions.values() if f.domain != DOMAIN]


def serialize_node(node: ir.Node) -> onnx.NodeProto:
    """A node as the runtime gets it: a generated one carries all sizes as attributes.

    Raises:
        PlanError: A shape of a generated node is not static.
    """
    proto = ir.serde.serialize_node(node)
    if node.domain != DOMAIN:
        return proto
    region, body = region_of(node.op_type), body_of(node.op_type)
    assert region is not None and body is not None
    shapes = [static_shape(o) for o in node.outputs]
    dims = completed(region, bind(body, node))
    if any(s is None for s in shapes) or any(not isinstance(d, int) for d in dims.values()):
        raise PlanError(
            f"node {node.name!r} ({node.op_type}) has no static shape", "bind the symbolic dimensions first"
        )
    plan = layout(region)
    for name, values in sizes(region, plan, dims).items():
        made = (values[0], None) if name == "rows" else (values, onnx.AttributeProto.INTS)
        proto.attribute.append(onnx.helper.make_attribute(name, made[0], attr_type=made[1]))
    for i in range(len(region.inputs)):
        proto.attribute.append(onnx.helper.make_attribute(f"count{i}", input_count(region, plan, i, dims)))
    own = {a.name for a in proto.attribute}
    for i, shape in enumerate(shapes):
        if f"shape{i}" in own:  # the target of a reshape inside, which the kernel does not need
            del proto.attribute[next(k for k, a in enumerate(proto.attribute) if a.name == f"shape{i}")]
        proto.attribute.append(onnx.helper.make_attribute(f"shape{i}", shape, attr_type=onnx.AttributeProto.INTS))
    return proto


def scratch_bytes(node: ir.Node, threads: int) -> int:
    """Bytes that a run of a generated node allocates: rows too long for the stack, partial sums of columns."""
    from ortgraph.ops.kernels.table import row_parts

    region, body = region_of(node.op_type), body_of(node.op_type)
    if region is None or body is None:
        return 0
    dims = completed(region, bind(body, node))
    if any(not isinstance(d, int) for d in dims.values()):
        return 0
    made = sizes(region, layout(region), dims)
    rows, widths = made["rows"][0], made["widths"]
    total = 0
    columns = sum(r.column for r in region.results)
    if columns:
        total += 4 * columns * widths[0] * row_parts(rows, widths[0])
    kept = schedule(region).scratch_rows
    if kept and not layout(region).tiled and max(widths) > _INLINE_ROW:
        total += 4 * kept * (max(widths) + 16) * min(threads, row_parts(rows, widths[0]))
    return total


def class_of(node: ir.Node) -> str:
    """How a generated kernel spends its time, for prices that nobody measured: see ``ortgraph.ops.work``."""
    region = region_of(node.op_type)
    if region is None:
        return "other"
    if region.has_rows or any(r.column for r in region.results):
        return "norm"
    dear = ("exp", "log", "tanh", "erf", "sigmoid", "pow", "sin", "cos", "softplus", "gelu", "silu")
    return "transcendental" if any(e.op.startswith(dear) for e in region.exprs) else "elementwise"


def draws_of(node: ir.Node) -> tuple[int, ...]:
    """Numbers of the drawing nodes that a generated node holds."""
    region = region_of(node.op_type)
    return () if region is None else tuple(node.attributes[name].as_int() for name in region.draws)


__all__ = [
    "DOMAIN", "adopt", "available", "body_of", "build", "class_of", "draws_of", "library_path", "other_functions",
    "reason", "reason_of", "region_of", "scratch_bytes", "serialize_node", "spec_of_body",
]  # fmt: skip
