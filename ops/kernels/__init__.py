"""Compiled kernels for ONNX Runtime: operators of domain ``ortgraph.kernels`` in one custom-operator library.

A graph that uses the domain needs the library in its session::

    options.register_custom_ops_library(str(kernels.library_path()))

Every kernel gives the same bits at any number of threads: sums within a piece of work do not depend on the cut, and sums
over pieces are added in order.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import onnx_ir as ir

from ortgraph.errors import RuntimeSetupError
from ortgraph.ops.kernels import library
from ortgraph.ops.kernels.table import BY_OPERATOR, KERNELS, KernelEntry, base_name, variant_name
from ortgraph.ops.kernels.windows import WINDOWED, window_differs
from ortgraph.ops.shapes import ints_of
from ortgraph.ops.spec import KERNELS as DOMAIN

if TYPE_CHECKING:
    from ortgraph.ops.builder import Builder

_LAST_AXIS = frozenset({"Softmax", "SoftmaxGrad", "LogSoftmaxGrad"})
_MATRIX = {"CrossEntropy": 0, "CrossEntropyGrad": 1, "CrossEntropyAndGrad": 1}  # the input that must be [N, C]


def library_path() -> pathlib.Path:
    """The compiled library; built at the first call on a machine (about ten seconds), then found in the cache.

    Raises:
        RuntimeSetupError: There is no compiler, or compiling failed.
    """
    path, error = _built()
    if path is None:
        raise RuntimeSetupError(f"compiled kernels are not available: {error}", "lower the graph without kernels")
    return path


def available() -> bool:
    """Whether kernels can be used here. Builds the library when that has not been done yet; never raises."""
    return _built()[0] is not None


@overload
def reason() -> str: ...
@overload
def reason(node: ir.Node) -> str | None: ...
def reason(node: ir.Node | None = None) -> str | None:
    """Why kernels cannot be used here (empty: they can); with a node, why none stands for it (None: one does)."""
    if node is None:
        return _built()[1]
    entry = BY_OPERATOR.get((node.domain, node.op_type))
    if entry is None:
        return f"no kernel for {node.domain or 'ai.onnx'}.{node.op_type}"
    return _types_differ(entry, node) or _form_differs(entry, node)


def build(builder: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """The kernel node that stands for a node for which ``reason(node)`` is None."""
    entry = BY_OPERATOR[(node.domain, node.op_type)]
    attributes = {k: a.value for k, a in node.attributes.items() if k in entry.attributes}
    if entry.name == "BiasGrad":
        attributes.setdefault("keepdims", 1)  # ReduceSum's default
    inputs = node.inputs[: len(entry.input_names(len(node.inputs)))]  # axes of ReduceSum are not an input of the kernel
    name = variant_name(entry.name, _output_types(entry, node))
    return builder.multi(name, *inputs, outputs=len(node.outputs), domain=DOMAIN, **attributes)


def _output_types(entry: KernelEntry, node: ir.Node) -> list[ir.DataType | None]:
    """Types of the outputs; an absent one (a loaded graph does not know its type) has that of its group's inputs."""
    inputs = {
        n: v.dtype for n, v in zip(entry.input_names(len(node.inputs)), node.inputs, strict=False) if v is not None
    }
    found = []
    for name, value in zip(entry.outputs, node.outputs, strict=False):
        group = next((g for g in entry.low if name in g), ())
        found.append(value.dtype if value.name else next((inputs[n] for n in group if n in inputs), value.dtype))
    return found


def _types_differ(entry: KernelEntry, node: ir.Node) -> str | None:
    types: dict[str, ir.DataType] = {}
    inputs = [*zip(entry.input_names(len(node.inputs)), node.inputs, strict=False)]
    values = [*inputs, *zip(entry.outputs, node.outputs, strict=False)]
    for name, value in values:
        group = next((g for g in entry.low if name in g), None)
        if value is None or value.dtype is None or group is None:
            continue
        if value.dtype not in entry.types:
            return (
                f"the kernel takes {name.rstrip('?')} as {' or '.join(t.name for t in entry.types)}, not {value.dtype}"
            )
        if types.setdefault(group[0], value.dtype) != value.dtype:
            return f"the kernel wants one type for {', '.join(n.rstrip('?') for n in group)}"
    for name, value in inputs:
        if value is None or any(name in group for group in entry.low):
            continue
        wanted = ir.DataType.FLOAT
        if name in entry.integers:
            wanted = ir.DataType.INT64
        elif name in entry.booleans:
            wanted = ir.DataType.BOOL
        if value.dtype != wanted:
            return f"the kernel takes {name.rstrip('?')} as {wanted.name}, not {value.dtype}"
    return None


def _form_differs(entry: KernelEntry, node: ir.Node) -> str | None:
    first = node.inputs[0]
    rank = None if first is None or first.shape is None else len(first.shape)
    if entry.name in _LAST_AXIS:
        found = node.attributes.get("axis")
        axis = -1 if found is None else found.as_int()
        if axis != -1 and (rank is None or axis != rank - 1):
            return "the kernel works over the last axis only"
    if entry.name in WINDOWED and (differs := window_differs(node)) is not None:
        return differs
    if entry.name == "BiasGrad":
        axes = ints_of(node.inputs[1]) if len(node.inputs) > 1 else None
        leading = rank is not None and axes is not None and sorted(a % rank for a in axes) == list(range(rank - 1))
        if rank is None or rank < 2 or not leading:
            return "the kernel sums over all dimensions but the last"
    if entry.name == "Product" and any(v is None or v.shape is None or len(v.shape) < 2 for v in node.inputs[:2]):
        return "the kernel takes matrices and batches of them only"
    if entry.name in ("Attention", "AttentionGrad"):
        precision = node.attributes.get("precision")
        if precision is not None and precision.as_string() == "fp16":
            return "the kernel rounds to bf16, not to fp16"
        if any(v is None or v.shape is None or len(v.shape) != 4 for v in node.inputs[:3]):
            return "the kernel takes heads of four dimensions only"
    if entry.name in _MATRIX:
        scores = node.inputs[_MATRIX[entry.name]]
        if scores is None or scores.shape is None or len(scores.shape) != 2:
            return "the kernel takes scores [N, C] only"
    return None


@functools.cache
def _built() -> tuple[pathlib.Path | None, str]:
    try:
        path = library.build()
        ctypes.CDLL(str(path))
    except RuntimeSetupError as error:
        return None, str(error)
    except OSError as error:  # a cache on a disk from which nothing may be run
        return None, f"the compiled kernels do not load ({error}); set ORTGRAPH_CACHE_DIR to a folder of another disk"
    return path, ""


__all__ = [
    "DOMAIN",
    "KERNELS",
    "KernelEntry",
    "available",
    "base_name",
    "build",
    "library_path",
    "reason",
    "variant_name",
]
