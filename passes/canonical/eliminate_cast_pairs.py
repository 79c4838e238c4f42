"""EliminateCastPairs: a cast of an exactly widened value is a cast of the value itself."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.graph.edit import stamp
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.passes.canonical.values import BEFORE_PLAN, Edit, behind

# Whether negative values exist, and bits of the magnitude.
_INTEGERS = {
    ir.DataType.BOOL: (False, 1), ir.DataType.UINT8: (False, 8), ir.DataType.UINT16: (False, 16),
    ir.DataType.UINT32: (False, 32), ir.DataType.UINT64: (False, 64), ir.DataType.INT8: (True, 7),
    ir.DataType.INT16: (True, 15), ir.DataType.INT32: (True, 31), ir.DataType.INT64: (True, 63),
}  # fmt: skip
# Significand bits and exponent bits.
_FLOATS = {
    ir.DataType.BFLOAT16: (8, 8), ir.DataType.FLOAT16: (11, 5), ir.DataType.FLOAT: (24, 8),
    ir.DataType.DOUBLE: (53, 11),
}  # fmt: skip


def widens(source: ir.DataType, target: ir.DataType) -> bool:
    """Whether every value of ``source`` is a value of ``target``: the cast loses nothing."""
    if source == target:
        return source in _INTEGERS or source in _FLOATS
    if source in _INTEGERS and target in _INTEGERS:
        (signed, bits), (target_signed, target_bits) = _INTEGERS[source], _INTEGERS[target]
        return target != ir.DataType.BOOL and target_bits >= bits and (target_signed or not signed)
    if source in _INTEGERS and target in _FLOATS:
        bits, (significand, exponent) = _INTEGERS[source][1], _FLOATS[target]
        return bits <= significand and bits < 2 ** (exponent - 1)
    if source in _FLOATS and target in _FLOATS:
        return all(a <= b for a, b in zip(_FLOATS[source], _FLOATS[target], strict=True))
    return False


@dataclasses.dataclass(frozen=True)
class EliminateCastPairs(GraphPass):
    """Cast_b(Cast_a(x)) = Cast_b(x), or x when b is the dtype of x.

    The second cast reads x; the first goes when nothing else reads it. Counted as ``removed`` (the second cast gives x
    itself) and ``shortened``.

    Refuses when:
        - the first cast loses something (float32 to float16, int64 to float32): rounding is part of the result;
        - a dtype is unknown, a string, or narrower than 8 bits (8-bit floats included: casts there may saturate);
        - the result is a graph output and x is a graph input, a constant or another graph output.
    """

    name: ClassVar[str] = "eliminate-cast-pairs"
    stages: ClassVar[tuple[str, ...]] = BEFORE_PLAN

    def run(self, graph: TrainingGraph) -> Changes:
        edit = Edit(graph.graph)
        changes = Changes()
        bypassed: list[ir.Node] = []
        for node in graph.graph:
            inner = behind(node, "Cast")
            if inner is None or not edit.is_read(node.outputs[0]):
                continue
            source = inner.inputs[0]
            assert source is not None
            refusal = _refusal(node, inner, source)
            if refusal is not None:
                changes.refusals.append(Refusal(node.name or "", refusal))
                continue
            to = node.attributes["to"].as_int()
            if source.dtype == to and edit.redirect(node.outputs[0], source):
                changes.counts["removed"] += 1
                bypassed += [inner, node]
                continue
            node.replace_input_with(0, source)
            stamp(node, self.name)
            changes.counts["shortened"] += 1
            bypassed.append(inner)
        edit.prune(bypassed)
        return changes


def _refusal(node: ir.Node, inner: ir.Node, source: ir.Value) -> str | None:
    middle, to = (ir.DataType(n.attributes["to"].as_int()) for n in (inner, node))
    if source.dtype is None:
        return f"the dtype of %{source.name} is not known"
    if to not in _INTEGERS and to not in _FLOATS:
        return f"casts to {to.name} may saturate"
    if not widens(source.dtype, middle):
        return f"{source.dtype.name} to {middle.name} is not exact"
    return None
