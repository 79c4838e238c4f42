"""OpSpec: all that the compiler knows about one operator. Unknown operators get safe defaults.

Each operator family has one table module in this package that calls ``register``. Mechanism and passes ask
``spec_of(node)`` and never spell operator names for facts of this kind.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

if TYPE_CHECKING:
    from ortgraph.ops.builder import Builder

Shape = tuple[Any, ...]  # ints and ir.SymbolicDim
Typed = tuple[ir.DataType, Shape | None]  # the shape is None when unknown
# Types of all outputs from the node (its inputs carry dtype and shape). None for an absent output, and in place of all
# outputs where the rule leaves this case to ONNX's own inference.
InferRule = Callable[[ir.Node], "Sequence[Typed | None] | None"]
# The reference expansion: builds the outputs from standard operators. It is the operator's specification.
Expansion = Callable[["Builder", ir.Node], Sequence["ir.Value | None"]]

COMPOSITE = "ortgraph"  # specifications
KERNELS = "ortgraph.kernels"  # our compiled kernels; never the same node as a specification
GENERATED = "ortgraph.generated"  # fused regions: each operator is a local function of the model, compiled
CONTRIB = "com.microsoft"
FAMILIES = (
    "elementwise",
    "movement",
    "matmul",
    "product",
    "reduction",
    "activation",
    "normalization",
    "loss",
    "embedding",
    "convolution",
    "attention",
    "random",
    "ctc",
    "optimizer",
    "contrib",
    "kernels.specs",
)


@dataclasses.dataclass(frozen=True)
class OpSpec:
    """Facts about one operator.

    Attributes:
        domain: Operator domain ("" is the ONNX standard).
        op_type: Operator name.
        deterministic: Same inputs give same outputs: may be merged, folded, recomputed. False for unknown operators
            and for everything that draws from hidden state.
        elementwise: Output element i depends on element i of the (broadcast) inputs only.
        recompute: May be evaluated again in the backward half.
        inplace: (input index, output index) pairs: the CPU kernel may write that output over that input when
            shapes and dtypes are equal. Tested by brute force; default none.
        alias: (input index, output index) pairs: the output is the same bytes as the input (Reshape and the like).
        commutative: The first two inputs may be swapped.
        precision: ``low`` (reads and writes low precision, accumulates in float32), ``any`` (follows its inputs),
            ``accumulate`` (low in and out, float32 inside), ``float32`` (wants float32 inputs). See ops/precision.py.
        low_inputs: Inputs of a ``low`` operator that are taken in low precision; the others stay float32.
        low_outputs: Its outputs that are in low precision then.
        expands_low: The reference expansion takes low inputs as they are; others are expanded between casts.
        infer: Output types and shapes, for operators outside the ONNX standard.
        expand: Reference expansion in standard operators.
        flops: Floating point operations of one run, from a node with static shapes.
        shape_attribute: Attribute that holds the shape of the first output. It is absent while dimensions are symbolic,
            and written when they are bound.
        effects: Works through more than its outputs (writes over an input, talks to the outside): never dead code.
        optional_outputs: Indices of outputs that may be absent. For ONNX standard operators the schema knows them.
        doc: One line: the equation.
    """

    domain: str
    op_type: str
    deterministic: bool = True
    elementwise: bool = False
    recompute: bool = True
    inplace: tuple[tuple[int, int], ...] = ()
    alias: tuple[tuple[int, int], ...] = ()
    commutative: bool = False
    precision: str = "float32"
    low_inputs: tuple[int, ...] = ()
    low_outputs: tuple[int, ...] = ()
    expands_low: bool = False
    infer: InferRule | None = None
    expand: Expansion | None = None
    flops: Callable[[ir.Node], int] | None = None
    shape_attribute: str = ""
    effects: bool = False
    optional_outputs: tuple[int, ...] = ()
    known: bool = True
    doc: str = ""


_TABLE: dict[tuple[str, str], OpSpec] = {}
_loaded = False


def register(*specs: OpSpec) -> None:
    """Add operators to the table. A second entry for one operator is an error."""
    for spec in specs:
        key = (_domain(spec.domain), spec.op_type)
        if key in _TABLE:
            raise ValueError(f"{spec.domain}.{spec.op_type} is registered twice")
        _TABLE[key] = spec


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _load() -> None:
    global _loaded
    if not _loaded:
        _loaded = True
        for family in FAMILIES:
            importlib.import_module(f"ortgraph.ops.{family}")


def lookup(domain: str, op_type: str) -> OpSpec:
    """The entry of an operator; safe defaults when it is unknown."""
    _load()
    spec = _TABLE.get((_domain(domain), op_type))
    if spec is None and domain == GENERATED:  # made from the function that is its body
        spec = importlib.import_module("ortgraph.ops.generated").spec_of_body(op_type)
    if spec is not None:
        return spec
    return OpSpec(domain, op_type, deterministic=False, recompute=False, known=False)


def spec_of(node: ir.Node) -> OpSpec:
    """The entry of a node's operator; safe defaults when it is unknown."""
    return lookup(node.domain, node.op_type)


def all_specs() -> Iterator[OpSpec]:
    """Every registered operator, sorted by domain and name."""
    _load()
    for key in sorted(_TABLE):
        yield _TABLE[key]
