"""What ONNX Runtime does wrong without an error, refused before a program runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from ortgraph.analysis.liveness import values_read
from ortgraph.errors import BatchError, UnsupportedError
from ortgraph.ops.kernels import base_name
from ortgraph.ops.spec import COMPOSITE, KERNELS

# Right over no elements in every release tested. Others leave their result as it was, stop, or end the process.
_RIGHT_OVER_NOTHING = frozenset(
    {"Concat", "Pad", "Shape", "Size", "ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ScatterElements"}
    | {"ScatterND", "ConstantOfShape", "If", "Loop", "Scan"}
    | {"SquaredNorm", "MultiAdamW", "MultiLAMB", "MultiSGD"}
)
_BINDABLE = frozenset(
    {
        ir.DataType.FLOAT,
        ir.DataType.DOUBLE,
        ir.DataType.FLOAT16,
        ir.DataType.BFLOAT16,
        ir.DataType.BOOL,
        ir.DataType.INT8,
    }
    | {ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8, ir.DataType.UINT16}
    | {ir.DataType.UINT32, ir.DataType.UINT64}
)


def refuse_limits(program: str, order: Sequence[ir.Node]) -> None:
    """Raise for nodes of a program whose result the runtime leaves undefined, or whose type it cannot bind.

    Raises:
        BatchError: A node other than a plain sum makes something out of no elements (an empty batch).
        UnsupportedError: A value has a type without a NumPy form in the runtime, such as float8.
    """
    for node in order:
        for value in node.outputs:
            if value.name and value.dtype is not None and value.dtype not in _BINDABLE:
                raise UnsupportedError(
                    f"program {program}: {node.op_type} {node.name!r} makes %{value.name} of type {value.dtype}, which "
                    "ONNX Runtime does not train with on this processor",
                    "use float32 in the model",
                )
        if node.op_type in _RIGHT_OVER_NOTHING or not any(_full(o) for o in node.outputs if o.name):
            continue
        empty = next((v for v in values_read(node) if _empty(v)), None)
        if empty is not None:
            raise BatchError(
                f"program {program}: {node.op_type} {node.name!r} reads %{empty.name}, which has no elements (shape "
                f"{list(empty.shape or ())}): ONNX Runtime leaves its result undefined",
                "leave empty batches out of training",
            )


def refuse_single_values(nodes: Iterable[ir.Node]) -> None:
    """Raise for batch statistics of one value per channel: the unbiased variance that is kept would be 0 / 0.

    Raises:
        BatchError: Names the node. PyTorch refuses such a batch, too.
    """
    for node in nodes:
        if node.domain not in (COMPOSITE, KERNELS) or base_name(node.op_type) != "BatchNorm":
            continue
        shape = None if node.inputs[0] is None else node.inputs[0].shape
        counted = () if shape is None else [d for i, d in enumerate(shape) if i != 1]
        if shape is not None and all(d == 1 for d in counted):
            raise BatchError(
                f"BatchNorm {node.name!r} reads %{node.inputs[0].name} of shape {list(shape)}: one value per channel has "  # type: ignore[union-attr]
                "no variance, and the running one would turn to NaN",
                "leave the last batch out when it has one row (DataLoader(drop_last=True))",
            )


def _empty(value: ir.Value) -> bool:
    """Whether a value has no elements and is no list of sizes or axes."""
    shape = value.shape
    if shape is None or not any(d == 0 for d in shape):
        return False
    return not (value.dtype == ir.DataType.INT64 and len(shape) == 1)


def _full(value: ir.Value) -> bool:
    return value.shape is not None and not any(d == 0 for d in value.shape)
