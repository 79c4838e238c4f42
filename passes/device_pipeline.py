"""What a preset leaves out for a target that computes on a device: whatever asks for compiled kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ortgraph.ops.targets import target_of
from ortgraph.passes.lowering.kernel_rewrite import KernelRewrite
from ortgraph.passes.precision.legalize_precision import LegalizePrecision

_LOWER = "lower"
_MAKES_CONTRIB = ("fuse-matmul-transpose", "fuse-matmul-scale")  # behind lowering, which would not see it again


def for_target(passes: Sequence[ir.passes.PassBase], target: str) -> tuple[ir.passes.PassBase, ...]:
    """The passes of a preset for a target; unchanged where the processor computes.

    Raises:
        InputError: There is no such target.
    """
    found = target_of(target)
    if found.on_cpu:
        return tuple(passes)
    contrib = "FusedMatMul" in found.provider.contrib
    made: list[ir.passes.PassBase] = []
    lowered = False
    for p in passes:
        name = getattr(p, "name", "")
        lowered = lowered or name == _LOWER
        if isinstance(p, KernelRewrite) or (lowered and name in _MAKES_CONTRIB and not contrib):
            continue
        made.append(_on_device(p, found.text))
    return tuple(made)


def _on_device(p: ir.passes.PassBase, target: str) -> ir.passes.PassBase:
    options: dict[str, Any] = {}
    if isinstance(p, LegalizePrecision):
        options["target"] = target
    if dataclasses.is_dataclass(p) and any(f.name == "kernels" for f in dataclasses.fields(p)):
        options["kernels"] = False
    return dataclasses.replace(p, **options) if options else p  # type: ignore[type-var]
