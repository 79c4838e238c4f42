"""From a graph of any stage to one whose memory can be planned: lowered, every dimension a number."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from ortgraph.errors import InputError
from ortgraph.graph import TrainingGraph

_LOWERED = ("lowered", "planned")


def free_dimensions(graph: TrainingGraph) -> list[str]:
    """Names in the symbolic dimensions of the graph's inputs (``batch`` of ``32*batch``), sorted."""
    dims = [d for v in graph.graph.inputs for d in (v.shape or ()) if isinstance(d, ir.SymbolicDim)]
    return sorted({name for d in dims for name in (("None",) if d.value is None else d.free_symbols())})


def ready_graph(
    graph: TrainingGraph,
    sizes: Mapping[str, int] | None = None,
    pipeline: str | None = None,
    optimizer: Any = None,
    target: str = "onnxruntime-training",
    verify: str = "off",
) -> TrainingGraph:
    """A graph that ``plan_program`` takes. The graph given is not changed.

    Args:
        graph: At any stage. One that is lowered already keeps its nodes; symbolic sizes are bound.
        sizes: Size by name of symbolic dimensions.
        pipeline: Preset for a graph that is not lowered yet; ``O2`` when None.
        optimizer: Attached before lowering; None leaves the graph as it is.
        target: See ``ortgraph.optimize``.
        verify: See ``ortgraph.optimize``.

    Raises:
        InputError: A dimension has no size, or an option needs a graph that is not lowered yet.
    """
    sizes = dict(sizes or {})
    missing = [d for d in free_dimensions(graph) if d not in sizes]
    if missing:
        raise InputError(
            f"a memory plan needs numbers, and {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} symbolic",
            f"give {', '.join(f'{d}=...' for d in missing)} (--shapes, shapes=)",
        )
    if graph.stage not in _LOWERED:
        optimize = importlib.import_module("ortgraph.manager.optimize").optimize
        options = {"optimizer": optimizer, "target": target, "shapes": sizes or None, "verify": verify}
        return optimize(graph, pipeline or "O2", **options).graph
    if pipeline is not None or optimizer is not None:
        what = "a preset" if optimizer is None else "an optimizer"
        raise InputError(f"{what} goes with a graph that is not lowered yet; this one is {graph.stage}", "leave it out")
    from ortgraph.runtime.prepare import prepare

    return prepare(graph, sizes, target)
