"""Losses that from_onnx can append to a forward model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from ortgraph.errors import CaptureError, InputError
from ortgraph.graph import Names
from ortgraph.ops.builder import Builder

# A loss of the user's own: builds a scalar from the model's outputs; add_input(name, dtype, shape) adds a target.
AddInput = Callable[[str, ir.DataType, Sequence["int | str | ir.SymbolicDim"]], ir.Value]
LossFunction = Callable[[Builder, Mapping[str, ir.Value], AddInput], ir.Value]
IGNORE_INDEX = -100  # PyTorch's default: such a target gives neither loss nor gradient


def append_loss(graph: ir.Graph, loss: str | LossFunction | None, output: str | None, names: Names) -> ir.Value:
    """Make the scalar loss a value of the graph and return it. It is not yet a graph output unless it was one.

    Args:
        graph: Forward graph with inferred types.
        loss: ``cross_entropy`` (adds int64 ``labels``; classes on axis 1), ``mse``, ``l1``, ``bce_with_logits``
            (each adds ``targets``, shaped like the output), the name of a scalar output, a LossFunction, or None
            when the model has exactly one scalar float output.
        output: Model output that a named loss reads; None: the only float output, or the one named ``logits``.
        names: Name authority of the graph.

    Raises:
        CaptureError: There is no such loss or output, or its type does not fit.
    """
    if loss is None:
        return _only_scalar(graph)
    if hasattr(loss, "named_parameters"):
        raise InputError(
            f"loss is a PyTorch {type(loss).__name__}, which an ONNX model cannot call",
            f"one of {', '.join(_NAMED)}, an output's name, or a function",
        )
    if callable(loss):
        return _own(graph, loss, names)
    by_name = {v.name: v for v in graph.outputs}
    if loss in by_name:
        return _checked(by_name[loss], f"output {loss!r}")
    if loss not in _NAMED:
        raise InputError(
            f"loss={loss!r} is neither a model output ({', '.join(map(str, by_name))}) nor a known loss",
            f"one of {', '.join(_NAMED)}, an output's name, or a function",
        )
    name = names.fresh("loss")
    build = Builder(graph, f"loss-{loss}", names=names)
    value = _NAMED[loss](build, _target_output(graph, output))
    value.name = name
    return value


def _only_scalar(graph: ir.Graph) -> ir.Value:
    scalars = [v for v in graph.outputs if _is_scalar(v)]
    if len(scalars) == 1:
        return scalars[0]
    named = ", ".join(str(v.name) for v in graph.outputs)
    raise CaptureError(
        f"the model has {len(scalars)} scalar float outputs (outputs: {named}), so its loss is not known",
        'name it with loss="<output>", or append one: loss="cross_entropy", "mse", "l1", "bce_with_logits"',
    )


def _is_scalar(value: ir.Value) -> bool:
    if value.dtype is None or not value.dtype.is_floating_point() or value.shape is None:
        return False
    return all(d == 1 for d in value.shape)


def _checked(value: ir.Value, place: str) -> ir.Value:
    if _is_scalar(value):
        return value
    shape = None if value.shape is None else [str(d) for d in value.shape]
    raise CaptureError(
        f"the loss must be a float scalar, {place} is {value.dtype} {shape}",
        "reduce it in the model, or append a loss by name",
    )


def _own(graph: ir.Graph, loss: LossFunction, names: Names) -> ir.Value:
    def add_input(name: str, dtype: ir.DataType, shape: Sequence[int | str | ir.SymbolicDim]) -> ir.Value:
        return _new_input(graph, names, name, dtype, shape)

    value = loss(Builder(graph, "loss", names=names), {str(v.name): v for v in graph.outputs}, add_input)
    return _checked(value, "the result of the loss function")


def _new_input(
    graph: ir.Graph, names: Names, name: str, dtype: ir.DataType, shape: Sequence[int | str | ir.SymbolicDim] | None
) -> ir.Value:
    made = ir.Value(name=names.fresh(name), type=ir.TensorType(dtype), shape=None if shape is None else ir.Shape(shape))
    graph.inputs.append(made)
    return made


def _target_output(graph: ir.Graph, output: str | None) -> ir.Value:
    floats = {str(v.name): v for v in graph.outputs if v.dtype is not None and v.dtype.is_floating_point()}
    if output is not None and output not in floats:
        raise InputError(
            f"output={output!r} is not a float output of the model", f"one of {', '.join(floats) or 'none'}"
        )
    if output is not None:
        return floats[output]
    if len(floats) == 1:
        return next(iter(floats.values()))
    if "logits" in floats:
        return floats["logits"]
    raise CaptureError(
        f"the model has {len(floats)} float outputs ({', '.join(floats)}), so what the loss reads is not known",
        'say output="<name>"',
    )


def _cross_entropy(build: Builder, logits: ir.Value) -> ir.Value:
    if logits.shape is None or len(logits.shape) < 2:
        raise CaptureError(
            f"cross_entropy needs class scores [N, C, ...], {logits.name!r} is {logits.shape}", "choose another output"
        )
    shape = [d for axis, d in enumerate(logits.shape) if axis != 1]
    labels = _new_input(build.graph, build.names, "labels", ir.DataType.INT64, shape)
    return build.multi(
        "SoftmaxCrossEntropyLoss", logits, labels, outputs=2, reduction="mean", ignore_index=IGNORE_INDEX
    )[0]


def _targets(build: Builder, value: ir.Value) -> ir.Value:
    assert value.dtype is not None
    return _new_input(
        build.graph, build.names, "targets", value.dtype, None if value.shape is None else list(value.shape)
    )


def _mse(build: Builder, value: ir.Value) -> ir.Value:
    difference = build.op("Sub", value, _targets(build, value))
    return build.op("ReduceMean", build.op("Mul", difference, difference), keepdims=0)


def _l1(build: Builder, value: ir.Value) -> ir.Value:
    difference = build.op("Sub", value, _targets(build, value))
    return build.op("ReduceMean", build.op("Abs", difference), keepdims=0)


def _bce_with_logits(build: Builder, value: ir.Value) -> ir.Value:
    per_element = build.op("Sub", build.op("Softplus", value), build.op("Mul", value, _targets(build, value)))
    return build.op("ReduceMean", per_element, keepdims=0)


_NAMED: dict[str, Callable[[Builder, ir.Value], ir.Value]] = {
    "cross_entropy": _cross_entropy,
    "mse": _mse,
    "l1": _l1,
    "bce_with_logits": _bce_with_logits,
}
