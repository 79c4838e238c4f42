"""UseTransposeKernel: transposes of heads go to the compiled kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Refusal
from ortgraph.manager.rewrite import Match
from ortgraph.ops.builder import Builder
from ortgraph.ops.spec import KERNELS
from ortgraph.passes.fusion.operands import permutation
from ortgraph.passes.lowering.kernel_rewrite import KernelRewrite


@dataclasses.dataclass(frozen=True)
class UseTransposeKernel(KernelRewrite):
    """Transpose(X) = kernels.Transpose(X) where two neighbouring inner dimensions change places and rows stay whole.

    Measured, least of 600 runs, microseconds, ONNX Runtime against the kernel, one thread: [8, 128, 4, 64] by 0213
    36.8 and 29.5, [8, 4, 128, 64] 33.8 and 32.2, [8, 197, 3, 64] 39.4 and 34.7; large ones gain
    nothing ([16, 128, 12, 64]: 298 and 303, on two threads 174 and 167). Other permutations gain nothing
    (102: 24.0 and 25.5) or lose ([8, 128, 256] by 021: 62 and 78; [8, 192, 14, 14] by 0231: 28 and 78). Runs after the
    passes that move transposes into products: they know the standard operator only.

    Refuses when:
        another permutation; the last dimension moves, or the first;
        one of the two dimensions is 1, so that nothing moves;
        the element type is not float32.

    Attributes:
        kernels: Whether compiled kernels take part.
    """

    name: ClassVar[str] = "use-transpose-kernel"
    roots: ClassVar[frozenset[str]] = frozenset({"Transpose"})

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        perm = permutation(node)
        at = None if perm is None else _swapped(perm)
        if perm is None or at is None:
            return Refusal(node.name or "", f"permutation {perm} is not faster in the kernel")
        return Match((node,), (node.outputs[0],), facts={"perm": perm, "at": at}, count="transposes")

    def check(self, match: Match, graph: TrainingGraph) -> str | None:
        value, at = match.nodes[0].inputs[0], match.facts["at"]
        assert value is not None and isinstance(at, int)
        if value.dtype != ir.DataType.FLOAT:
            return f"element type {value.dtype}"
        if value.shape is not None and 1 in (value.shape[at], value.shape[at + 1]):
            return "a dimension of 1 changes places: nothing moves"
        return None

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        made = build.op("Transpose", match.nodes[0].inputs[0], domain=KERNELS, perm=list(match.facts["perm"]))  # type: ignore[call-overload]
        made.shape = match.outputs[0].shape
        return [made]


def _swapped(perm: tuple[int, ...]) -> int | None:
    """The inner dimension that changes places with its right neighbour while all others stay, else None."""
    moved = [i for i, p in enumerate(perm) if p != i]
    if len(moved) != 2 or moved[1] != moved[0] + 1 or moved[0] == 0 or moved[1] == len(perm) - 1:
        return None
    return moved[0]
