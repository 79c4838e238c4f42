"""The policy: which operators run in low precision, which follow their inputs, which stay in float32."""

from __future__ import annotations

import dataclasses
import fnmatch
import math

import numpy as np
import onnx_ir as ir

from ortgraph.errors import InputError
from ortgraph.graph.edit import MODULE_KEY
from ortgraph.ops.precision import LOW, NAMES, PRECISIONS, range_of
from ortgraph.ops.shapes import attribute, given, operator, shape_of
from ortgraph.ops.spec import spec_of
from ortgraph.ops.targets import MOVES_LOW
from ortgraph.passes.canonical.values import constant_array

RUN, FOLLOW, MOVE, KEEP = "run", "follow", "move", "keep"
_RANKS = {"MatMul": (2, None), "Gemm": (2, 2), "FusedMatMul": (2, None), "TransposeMatMul": (2, None)}


@dataclasses.dataclass(frozen=True)
class Treatment:
    """What happens to one operator.

    Attributes:
        kind: ``run`` (reads and writes the low type), ``move`` (data movement, in the type of what is moved),
            ``follow`` (float32 inside, its large inputs and output may be stored low), ``keep`` (float32 inputs).
        reason: Why, in words.
        forced: An override asks for low outputs whatever the inputs are.
    """

    kind: str
    reason: str
    forced: bool = False


@dataclasses.dataclass(frozen=True)
class Policy:
    """Precision by operator.

    Attributes:
        dtype: The low type.
        keep: Patterns of operators or modules that stay in float32.
        low: Patterns of operators or modules whose results are stored in the low type, though the table says float32.
    """

    dtype: ir.DataType
    keep: tuple[str, ...] = ()
    low: tuple[str, ...] = ()

    @staticmethod
    def of(precision: str, keep: tuple[str, ...] = (), low: tuple[str, ...] = ()) -> Policy:
        """The policy of a precision by name.

        Raises:
            InputError: The precision is unknown, or no low one.
        """
        dtype = PRECISIONS.get(precision)
        if dtype not in LOW:
            raise InputError(
                f"cast-precision: unknown precision {precision!r}", f"one of {', '.join(NAMES[t] for t in LOW)}"
            )
        return Policy(dtype, keep, low)

    def treatment(self, node: ir.Node) -> Treatment:
        """How the node is treated, from its operator, the overrides and its constants."""
        spec = spec_of(node)
        if (pattern := matching(node, self.keep)) is not None:
            return Treatment(KEEP, f"keep={pattern}")
        beyond = self._beyond(node)
        if spec.precision == "low":
            reason = beyond or _no_product(node)
            return Treatment(KEEP, reason) if reason else Treatment(RUN, "accumulates in float32")
        if not spec.known:
            return Treatment(KEEP, "an operator that is not in the table")
        if beyond is not None:
            return Treatment(KEEP, beyond)
        if (pattern := matching(node, self.low)) is not None:
            return Treatment(FOLLOW, f"low={pattern}", forced=True)
        if spec.precision == "any":
            moves = node.domain in ("", "ai.onnx") and node.op_type in MOVES_LOW
            return Treatment(MOVE if moves else FOLLOW, "follows its inputs")
        if spec.precision == "accumulate":
            return Treatment(FOLLOW, "float32 inside")
        return Treatment(KEEP, "float32 by policy")

    def _beyond(self, node: ir.Node) -> str | None:
        """A constant input whose meaning the low type would change: finite beyond its range, or rounded to zero."""
        limits = range_of(self.dtype)
        for value in node.inputs:
            if value is None or value.dtype != ir.DataType.FLOAT:
                continue
            array = constant_array(value)
            if array is None or not array.size:
                continue
            size = np.abs(array[np.isfinite(array)], dtype=np.float64)
            if size.size and size.max() > limits.largest:
                return f"constant {_extreme(array):.3g} is beyond {NAMES[self.dtype]} (largest {limits.largest:.3g})"
            nonzero = size[size > 0]
            if nonzero.size and nonzero.max() <= limits.smallest:
                return f"constant {nonzero.max():.3g} is 0 in {NAMES[self.dtype]} (smallest {2 * limits.smallest:.3g})"
        return None


def _extreme(array: np.ndarray) -> float:
    finite = array[np.isfinite(array)]
    return float(finite.reshape(-1)[np.argmax(np.abs(finite))])


def _no_product(node: ir.Node) -> str | None:
    """Why an operator of class ``low`` has no form on low inputs; None when it has one."""
    operands = [given(node, i) for i in spec_of(node).low_inputs]
    if any(v is None or v.dtype != ir.DataType.FLOAT for v in operands):
        return "its operands are not float32"
    if attribute(node, "transBatchA", 0) or attribute(node, "transBatchB", 0):
        return "its batch dimensions are transposed"
    if node.op_type in _RANKS:
        low, high = _RANKS[node.op_type]
        shapes = [shape_of(v) for v in operands]
        if any(s is None or not low <= len(s) <= (high or math.inf) for s in shapes):
            return "an operand is no matrix"
        if node.op_type == "Gemm" and attribute(node, "beta", 1.0) != 1.0 and given(node, 2) is not None:
            return "beta is not 1"
    return None


def matching(node: ir.Node, patterns: tuple[str, ...]) -> str | None:
    """The first pattern that names the node: its operator (``Softmax``, ``com.microsoft.Gelu``), its module path, a
    tail of that path (``layer.3.*``), or the node itself."""
    module = node.metadata_props.get(MODULE_KEY, "")
    for pattern in patterns:
        if any(fnmatch.fnmatchcase(text, pattern) for text in (node.op_type, operator(node), node.name or "")):
            return pattern
        inside = (pattern, f"*.{pattern}") if module else ()
        whole = pattern.removesuffix(".*")
        if any(fnmatch.fnmatchcase(module, p) for p in (*inside, *((whole, f"*.{whole}") if module else ()))):
            return pattern
    return None
