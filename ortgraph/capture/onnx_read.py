"""Reading ONNX forward models, and skeletons: models whose large weights are inputs, small enough for any tool."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Collection, Mapping, Sequence

import onnx
import onnx_ir as ir
from onnx import shape_inference

from ortgraph.errors import InputError
from ortgraph.graph import Names
from ortgraph.ops.infer import infer_node

MISPLACED = frozenset({"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"})
_MIN_IR = 4  # the first in which an initializer need not be an input
_SMALL = 1024  # elements of an initializer that a skeleton keeps: shapes, axes, scales


def read_model(source: str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model) -> ir.Model:
    """A model of the caller's own to change: read from a file, serialized bytes, a proto or an ir.Model.

    Raises:
        InputError: The file is missing or not ONNX, the argument is of another type, or the model is invalid.
    """
    place = "the model"
    try:
        if isinstance(source, ir.Model):
            model = source.clone()
        elif isinstance(source, onnx.ModelProto):
            model = ir.from_proto(onnx.load_model_from_string(source.SerializeToString()))  # a copy
        elif isinstance(source, bytes):
            model = ir.from_proto(onnx.load_model_from_string(source))
        elif isinstance(source, (str, os.PathLike)):
            path = pathlib.Path(source)
            place = str(path)
            if not path.is_file():
                raise InputError(f"{path}: no such file", "check the path")
            model = ir.load(path)
        else:
            raise InputError(
                f"from_onnx takes a path, bytes, onnx.ModelProto or onnx_ir.Model, not {type(source).__name__}",
                "save the model as .onnx and give the path",
            )
        if not model.graph.outputs:
            raise ValueError("the graph has no outputs")
        ir.external_data.load_to_model(model)  # the checker, and the graph once saved, know no other folder
    except InputError:
        raise
    except OSError as error:
        raise InputError(
            f"{place}: its weights cannot be read ({error})", "keep the files of external data beside the .onnx file"
        ) from error
    except Exception as error:  # noqa: BLE001 - protobuf and onnx_ir raise many types, each means "not ONNX"
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise InputError(
            f"{place}: not a readable ONNX model ({cause})", "give a file written by an ONNX exporter"
        ) from error
    _drop_overridable_initializers(model.graph)
    model.ir_version = max(model.ir_version or 0, _MIN_IR)
    _move_misplaced(model.graph)
    _complete_outputs(model)
    check(model, place)
    return model


def _complete_outputs(model: ir.Model) -> None:
    """Outputs whose shape an exporter left out, which the checker refuses, get the inferred one."""
    bare = [v for v in model.graph.outputs if v.shape is None and v.producer() is not None]
    if not bare:
        return
    try:
        inferred = shape_inference.infer_shapes(skeleton(model)[0])
    except shape_inference.InferenceError:
        return  # the checker says what is wrong
    types = {v.name: v for v in inferred.graph.output}
    for value in bare:
        copy_type(value, types[value.name or ""])


def check(model: ir.Model, place: str) -> None:
    """Let the ONNX checker see the structure (weights left out).

    Raises:
        InputError: The checker refuses the model.
    """
    proto, _ = skeleton(model)
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{place}: the ONNX checker refuses the model: {reason}", "export it again") from error


def _drop_overridable_initializers(graph: ir.Graph) -> None:
    """Old files (IR 3) list every initializer among the inputs as well."""
    kept = [v for v in graph.inputs if v.name not in graph.initializers]
    if len(kept) != len(graph.inputs):
        graph.inputs[:] = kept


def _move_misplaced(graph: ir.Graph) -> None:
    """ONNX Runtime keeps some of its own operators in the ONNX domain, where the ONNX checker does not know them."""
    for node in graph.all_nodes():
        if node.op_type in MISPLACED and node.domain in ("", "ai.onnx"):
            node.domain = "com.microsoft"
            graph.opset_imports.setdefault("com.microsoft", 1)


def skeleton(model: ir.Model) -> tuple[onnx.ModelProto, dict[str, ir.TensorProtocol]]:
    """A proto whose large initializers are graph inputs, and their tensors by name."""
    twin = model.clone()
    lifted = lift_weights(twin.graph)
    return ir.serde.serialize_model(twin), lifted


def lift_weights(graph: ir.Graph, also: Collection[str] = ()) -> dict[str, ir.TensorProtocol]:
    """Turn large initializers, and those named in ``also``, into inputs. Returns their tensors by name."""
    lifted: dict[str, ir.TensorProtocol] = {}
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or (tensor.size <= _SMALL and name not in also):
            continue
        lifted[name] = tensor
        del graph.initializers[name]
        value.const_value = None
        value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
        graph.inputs.append(value)
    return lifted


def restore(proto: onnx.ModelProto, lifted: Mapping[str, ir.TensorProtocol]) -> ir.Model:
    """The model of a skeleton, with its weights put back as initializers."""
    model = ir.from_proto(proto)
    graph = model.graph
    inputs = {v.name: v for v in graph.inputs}
    graph.inputs[:] = [v for v in graph.inputs if v.name not in lifted]
    for name, tensor in lifted.items():
        value = inputs[name]
        value.const_value = tensor
        graph.register_initializer(value)
    return model


def name_dimensions(graph: ir.Graph, shapes: Mapping[str, Sequence[int | str]]) -> None:
    """Give the inputs the dimensions of ``shapes``, and every nameless dimension a name of its own.

    Raises:
        InputError: ``shapes`` names no input, or has another rank than the input.
    """
    inputs = {str(v.name): v for v in graph.inputs}
    for name, dims in shapes.items():
        if name not in inputs:
            raise InputError(f"shapes: the model has no input {name!r}", f"its inputs are {', '.join(inputs)}")
        value = inputs[name]
        if value.shape is not None and len(value.shape) != len(dims):
            raise InputError(
                f"shapes: input {name!r} has rank {len(value.shape)}, {tuple(dims)} has {len(dims)}",
                "give every dimension",
            )
        value.shape = ir.Shape(dims)
    for name, value in inputs.items():
        if value.shape is not None:
            value.shape = ir.Shape(
                [d if isinstance(d, int) or d.value else f"{name}_{i}" for i, d in enumerate(value.shape)]
            )


def name_nodes(graph: ir.Graph) -> None:
    """Give every nameless or doubly named node a name of its own."""
    names = Names(graph)
    seen: set[str] = set()
    for node in graph.all_nodes():
        if not node.name or node.name in seen:
            node.name = names.fresh_node(node.name or node.op_type.lower())
        seen.add(node.name)


def read_weights_directly(graph: ir.Graph) -> None:
    """Let what reads an Identity of an initializer read the initializer, whose role then shows: exporters that store
    equal tensors once give each further name by an Identity. Graph outputs keep theirs."""
    for node in graph:
        if node.op_type != "Identity" or node.domain not in ("", "ai.onnx"):
            continue
        weight = node.inputs[0]
        if weight is not None and weight.is_initializer() and weight.graph is graph:
            for use in tuple(node.outputs[0].uses()):
                use.node.replace_input_with(use.idx, weight)


def infer_forward(model: ir.Model) -> None:
    """Record the type and shape of every value of a forward graph, with constant and shape data propagated."""
    proto, _ = skeleton(model)
    del proto.graph.value_info[:]
    try:
        inferred = shape_inference.infer_shapes(proto, data_prop=True)
    except shape_inference.InferenceError as error:
        raise InputError(f"shapes of the model contradict each other: {error}", "export it again") from error
    types = {v.name: v for v in (*inferred.graph.value_info, *inferred.graph.output)}
    for node in model.graph:
        for value in node.outputs:
            info = types.get(value.name or "")
            if info is not None:
                copy_type(value, info)


def infer_missing(graph: ir.Graph) -> None:
    """Infer node by node what is not yet recorded; a known dimension is never forgotten."""
    for node in graph:
        before = [(v.type, v.shape) for v in node.outputs]
        if all(t is not None and s is not None and all(_is_known(d) for d in s) for t, s in before):
            continue
        infer_node(node, graph.opset_imports)
        for value, (dtype, shape) in zip(node.outputs, before, strict=True):
            value.type = value.type or dtype
            if shape is not None:
                _merge_shape(value, shape)


def _merge_shape(value: ir.Value, shape: ir.Shape) -> None:
    if value.shape is None or len(value.shape) != len(shape):
        value.shape = ir.Shape([d if _is_known(d) else None for d in shape])
    else:
        value.shape = ir.Shape([_better(new, old) for new, old in zip(shape, value.shape, strict=True)])


def copy_type(value: ir.Value, info: onnx.ValueInfoProto) -> None:
    """Record on ``value`` what ``info`` knows; a known dimension is never forgotten."""
    made = ir.serde.deserialize_value_info_proto(info, None)
    if made.type is not None:
        value.type = made.type
    if made.shape is not None:
        _merge_shape(value, made.shape)


def _is_known(dim: int | ir.SymbolicDim) -> bool:
    """Whether it is a number or a name of the model's; the names that inference invents say nothing."""
    return isinstance(dim, int) or (dim.value is not None and not dim.value.startswith("unk__"))


def _better(new: int | ir.SymbolicDim, old: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    if isinstance(new, int) or isinstance(old, int):
        return new if isinstance(new, int) else old
    return new if _is_known(new) else old
