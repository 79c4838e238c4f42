"""An ONNX Runtime session over nodes in our order, and the ONNX model that it gets."""

from __future__ import annotations

import pathlib
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

from ortgraph.analysis.liveness import values_read
from ortgraph.errors import RuntimeSetupError
from ortgraph.graph import static_shape
from ortgraph.ops import generated, kernels
from ortgraph.ops.spec import GENERATED, KERNELS
from ortgraph.runtime.device import HOST, Device
from ortgraph.runtime.options import session_options

if TYPE_CHECKING:
    import onnxruntime

MAX_IR_VERSION = 10  # the newest that ONNX Runtime 1.19.2 reads


def make_session(
    what: str,
    model: ir.Model,
    order: Sequence[ir.Node],
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
    threads: int | None = None,
    device: Device = HOST,
    profile_prefix: str | None = None,
    alternate: bool = False,
) -> tuple[onnxruntime.InferenceSession | None, list[str]]:
    """The runtime's session, and the operators that it replaces by others (functions without kernel, casts).

    Args:
        what: Name of the program, for messages.
        model: Holds the nodes, constants and functions.
        order: Nodes in order of execution; without any there is no session.
        inputs: Values that are fed.
        outputs: Values that are bound or returned.
        threads: Threads of one operator.
        device: Where it computes.
        profile_prefix, alternate: See ``session_options``.

    Raises:
        RuntimeSetupError: ONNX Runtime refuses the graph.
    """
    import onnxruntime as ort

    if not order:
        return None, []
    proto = program_model(model, order, inputs, outputs)
    options = session_options(threads, profile_prefix, alternate)
    if any(node.domain == KERNELS for node in order):
        options.register_custom_ops_library(str(kernels.library_path()))
    if any(node.domain == GENERATED for node in order):
        options.register_custom_ops_library(str(generated.library_path(model)))
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(pathlib.Path(folder, "seen.onnx"))
        try:
            session = ort.InferenceSession(proto.SerializeToString(), options, providers=device.session_providers())
        except Exception as error:  # noqa: BLE001 - the runtime's exception types are private; the cause is chained
            raise RuntimeSetupError(
                f"ONNX Runtime {ort.__version__} refuses program {what}: {error}",
                "lower the graph for this runtime (target=...), or report the node",
            ) from error
        device.check_session(session)
        return session, replaced_operators(proto, onnx.load(options.optimized_model_filepath))


def replaced_operators(given: onnx.ModelProto, seen: onnx.ModelProto) -> list[str]:
    """Operators of nodes that the runtime replaced, and of those that it added, sorted; empty when it runs ours."""

    def nodes(model: onnx.ModelProto) -> Counter[tuple[str, tuple[str, ...]]]:
        return Counter((n.op_type, tuple(filter(None, n.output))) for n in model.graph.node)

    ours, theirs = nodes(given), nodes(seen)
    return sorted({op_type for op_type, _ in (*(ours - theirs), *(theirs - ours))})


def inputs_read(graph: ir.Graph, order: Sequence[ir.Node]) -> list[ir.Value]:
    """The graph inputs that nodes read, in order of the graph."""
    read = {v for node in order for v in values_read(node)}
    return [v for v in graph.inputs if v in read and not v.is_initializer()]


def program_model(
    model: ir.Model, order: Sequence[ir.Node], inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]
) -> onnx.ModelProto:
    """The ONNX model that the runtime gets: nodes in order, every placed value an output with its type."""
    proto = onnx.ModelProto(ir_version=min(model.ir_version, MAX_IR_VERSION), producer_name="ortgraph")
    for domain, version in sorted(model.graph.opset_imports.items()):
        proto.opset_import.append(onnx.helper.make_opsetid(domain, version))
    graph = proto.graph
    graph.name = model.graph.name or "program"
    for node in order:
        graph.node.append(generated.serialize_node(node))
        del graph.node[-1].metadata_props[:]
    graph.input.extend(_value_info(v) for v in inputs)
    graph.output.extend(_value_info(v) for v in outputs)
    read = {v for node in order for v in values_read(node)}
    for value in model.graph.initializers.values():
        if value in read and value.const_value is not None:
            tensor = ir.serde.serialize_tensor(value.const_value)
            tensor.name = value.name or ""
            graph.initializer.append(tensor)
    proto.functions.extend(generated.other_functions(model))
    return proto


def _value_info(value: ir.Value) -> onnx.ValueInfoProto:
    shape = static_shape(value)
    dims = None if shape is None and value.shape is None else [d if isinstance(d, int) else None for d in value.shape]  # type: ignore[union-attr]
    return onnx.helper.make_tensor_value_info(value.name or "", int(value.dtype or 0), dims)
