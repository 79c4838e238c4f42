"""Verifier rules that need facts about operators: types. Registered beside those of ``ortgraph.graph.verify``."""

from __future__ import annotations

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.graph.verify import Found, rule
from ortgraph.ops import infer_node


@rule("recorded-types-are-right", "types", "Recorded dtypes and shapes equal inferred ones.")
def recorded_types(graph: TrainingGraph) -> Found:
    imports = graph.graph.opset_imports
    for node in graph.graph:
        recorded = [(o.dtype, o.shape, o.type) for o in node.outputs]
        infer_node(node, imports)
        inferred = [(o.dtype, o.shape) for o in node.outputs]
        for output, (_, shape, full_type) in zip(node.outputs, recorded, strict=True):
            if full_type is not None:
                output.type = full_type
            output.shape = shape
        for output, (dtype, shape, _), (want_dtype, want_shape) in zip(node.outputs, recorded, inferred, strict=True):
            if not (output.uses() or output.is_graph_output()):
                continue
            if dtype is None:
                yield f"%{output.name} has no recorded dtype", node
            elif want_dtype is not None and dtype != want_dtype:
                yield f"%{output.name} is recorded as {dtype}, inferred {want_dtype}", node
            elif shape is not None and want_shape is not None and not _agree(shape, want_shape):
                yield f"%{output.name} is recorded as {list(shape)}, inferred {list(want_shape)}", node


def _agree(a: ir.Shape, b: ir.Shape) -> bool:
    """Same rank, and equal wherever both dimensions are numbers."""
    if len(a) != len(b):
        return False
    return all(x == y for x, y in zip(a, b, strict=True) if isinstance(x, int) and isinstance(y, int))


@rule("plan-is-valid", "runtime", "In a planned graph, no two live values overlap in the arena.")
def plan_is_valid(graph: TrainingGraph) -> Found:
    from ortgraph.analysis.bind_shapes import is_dynamic
    from ortgraph.plan.memory.placement import METADATA_KEY, place_values
    from ortgraph.runtime.program import needed_nodes, stored_offsets
    from ortgraph.runtime.selection import program_pairs

    if METADATA_KEY not in graph.model.metadata_props or graph.stage != "planned" or is_dynamic(graph):
        return
    signature = graph.signature
    stepped = any(p.update is not None for p in signature.parameters)
    kind = "step" if stepped else "gradients"
    values = {v.name: v for v in (*graph.graph.inputs, *graph.graph.outputs)}
    pairs = [(values[i], values[o]) for i, o in (program_pairs(signature, kind) if stepped else ())]
    results = [o for _, o in pairs] if stepped else [values[n] for n in signature.gradients.values()]
    wanted = list(dict.fromkeys([values[signature.loss], *results]))
    order = needed_nodes(graph.graph, wanted)
    known = stored_offsets(graph, kind)
    placement = place_values(graph.graph, order, wanted, pairs, known, loss=values[signature.loss])
    if placement.problem.buffers and placement.solution.solver != "stored plan":
        yield "the stored offsets overlap, or belong to another graph: run plan-memory again", None
