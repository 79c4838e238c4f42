"""AbsorbKernelCasts: convolution and batch norm kernels read and write the types that are there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Refusal
from ortgraph.manager.rewrite import Match
from ortgraph.ops.builder import Builder
from ortgraph.ops.kernels import base_name, variant_name
from ortgraph.ops.shapes import attribute
from ortgraph.ops.spec import KERNELS
from ortgraph.passes.lowering.kernel_rewrite import KernelRewrite, other_reader, readers

_FLOAT, _BF16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16
_ROUNDED = {"Conv": (0, 1), "ConvGrad": (0, 1, 2)}  # inputs that precision="bf16" rounds
_EITHER = {"BatchNorm": (0,), "BatchNormGrad": (0, 1)}  # inputs that are read in either type, as is output 0 written
_MAX_READERS = 3  # with k readers: 4 k bytes per element, against 6 + 2 k with a cast


@dataclasses.dataclass(frozen=True)
class AbsorbKernelCasts(KernelRewrite):
    """A cast beside a convolution or batch norm kernel goes into it, with the same bits.

    kernels.Conv(X, Cast(W)) = kernels.Conv(X, W, precision="bf16") and ConvGrad likewise, where W is a parameter or an
    input of the batch: these are there in float32 in any case, so a copy costs a pass and its memory.
    kernels.BatchNorm(Cast(X)) = kernels.BatchNorm(X) for X in bfloat16, and Cast(kernels.BatchNorm(X)) =
    kernels.BatchNorm_b(X); BatchNormGrad likewise.

    Refuses when:
        a rounded parameter has a reader of another kind, or is a graph output;
        a convolution's other operands are not bfloat16 and not rounded to it: they would be rounded as well;
        more than three nodes read the rounded parameter;
        a batch norm's float32 result is also read as it is.

    Attributes:
        kernels: Whether compiled kernels take part.
    """

    name: ClassVar[str] = "absorb-kernel-casts"
    roots: ClassVar[frozenset[str]] = frozenset({"Cast"})
    shared_inner: ClassVar[str] = "keep"  # a cast stays for the readers that need it

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        source, made = node.inputs[0], node.outputs[0]
        if source is None or {source.dtype, made.dtype} != {_FLOAT, _BF16}:
            return None
        if made.dtype == _FLOAT:
            return _widened(node, source, made)
        return _written(node, source, made) or _rounded(node, source, made)

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        if "result" in match.values:
            return _rebuilt(build, match.nodes[0], {}, low=True)
        source, cast = match.values["source"], match.values["cast"]
        assert source is not None and cast is not None
        return [v for node in match.nodes[1:] for v in _rebuilt(build, node, {cast: source})]


def _widened(node: ir.Node, source: ir.Value, wide: ir.Value) -> Match | None:
    """Batch norms that read low numbers in float32."""
    norms = [n for n in readers(wide) if _reads(n, wide, _EITHER)]
    return _match(node, norms, source, wide) if norms else None


def _written(node: ir.Node, result: ir.Value, low: ir.Value) -> Match | Refusal | None:
    """A batch norm whose result is rounded."""
    norm = result.producer()
    if norm is None or norm.domain != KERNELS or norm.op_type not in _EITHER or result is not norm.outputs[0]:
        return None
    if (other := other_reader(result, node)) is not None:
        return Refusal(node.name or "", other)
    outputs = (low, *(v for v in norm.outputs[1:] if v.name))
    return Match((norm, node), outputs, {"result": result}, count="casts", at=norm)


def _rounded(node: ir.Node, source: ir.Value, low: ir.Value) -> Match | Refusal | None:
    """Convolutions that read a parameter, or an input of the batch, rounded."""
    convolutions = [n for n in readers(low) if _reads(n, low, _ROUNDED)]
    if not convolutions or not source.is_graph_input():
        return None
    if (other := other_reader(low, *convolutions)) is not None:
        return Refusal(node.name or "", other)
    if len(convolutions) > _MAX_READERS:
        return Refusal(node.name or "", f"{len(convolutions)} convolutions read %{low.name}")
    wrong = next((n for n in convolutions if not _rounds(n)), None)
    if wrong is not None:
        return Refusal(node.name or "", f"{wrong.name!r} has an operand in float32")
    return _match(node, convolutions, source, low)


def _match(node: ir.Node, kernels: list[ir.Node], source: ir.Value, cast: ir.Value) -> Match:
    outputs = tuple(v for n in kernels for v in n.outputs if v.name)  # an absent one has no name
    return Match((node, *kernels), outputs, {"source": source, "cast": cast}, count="casts", at=kernels[-1])


def _reads(node: ir.Node, value: ir.Value, ports: dict[str, tuple[int, ...]]) -> bool:
    """Whether the node is one of these kernels and reads the value at these inputs only."""
    allowed = ports.get(base_name(node.op_type), ()) if node.domain == KERNELS else ()
    return bool(allowed) and all(i in allowed for i, v in enumerate(node.inputs) if v is value)


def _rounds(node: ir.Node) -> bool:
    operands = [v for i in _ROUNDED[base_name(node.op_type)] if (v := node.inputs[i]) is not None]
    return attribute(node, "precision", "fp32") == "bf16" or all(v.dtype == _BF16 for v in operands)


def _rebuilt(build: Builder, node: ir.Node, instead: dict[ir.Value, ir.Value], low: bool = False) -> list[ir.Value]:
    """The node with other inputs, or with its first output in bfloat16. Returns the outputs that are there."""
    build.before, build.origins = node, (node,)
    inputs = [v if v is None else instead.get(v, v) for v in node.inputs]
    kept = {name: a.value for name, a in node.attributes.items()}
    name = base_name(node.op_type)
    if name in _ROUNDED:
        kept["precision"] = "bf16"
    types = [_BF16 if low and i == 0 else v.dtype if v.name else None for i, v in enumerate(node.outputs)]
    results = build.multi(
        variant_name(name, types), *inputs, outputs=len(node.outputs), domain=KERNELS, name=node.name or "", **kept
    )
    for new, old in zip(results, node.outputs, strict=True):
        if not old.name:
            new.name = ""
    return [new for new in results if new.name]
