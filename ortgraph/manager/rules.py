"""Verifier rules that need facts about operators: forms and types. Registered beside those of ``ortgraph.graph.verify``."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ortgraph.errors import OrtgraphError
from ortgraph.graph import TrainingGraph
from ortgraph.graph.verify import Found, rule
from ortgraph.ops import generated, infer_node
from ortgraph.ops.composite_forms import FORMS
from ortgraph.ops.kernels.table import KERNELS as TABLE
from ortgraph.ops.kernels.table import base_name
from ortgraph.ops.shapes import operator
from ortgraph.ops.spec import COMPOSITE, GENERATED, KERNELS


@rule(
    "composites-have-their-form",
    "structure",
    "Composites and kernels have the inputs, attributes and element types of their definition.",
)
def composite_forms(graph: TrainingGraph) -> Found:
    for node in graph.graph:
        for problem in _form_problems(node):
            yield f"{operator(node)} {node.name!r}: {problem}", node


def _form_problems(node: ir.Node) -> Iterator[str]:
    if node.domain == GENERATED:
        body = generated.body_of(node.op_type)
        if body is None:
            yield "its body is not among the functions of the model"
            return
        yield from (f"its attribute {a} is missing" for a in body.attributes if a not in node.attributes)
    elif node.domain == COMPOSITE:
        if node.op_type not in FORMS:
            yield f"there is no such composite; known are {', '.join(sorted(FORMS))}"
            return
        yield from FORMS[node.op_type].problems(node)
    elif node.domain == KERNELS:
        entry = TABLE.get(base_name(node.op_type))
        if entry is None:
            yield "there is no such kernel"
        elif entry.implements == (COMPOSITE, entry.name):
            yield from FORMS[entry.name].problems(node)


@rule("recorded-types-are-right", "types", "Recorded dtypes and shapes equal inferred ones.")
def recorded_types(graph: TrainingGraph) -> Found:
    imports = graph.graph.opset_imports
    for node in graph.graph:
        recorded = [(o.dtype, o.shape, o.type) for o in node.outputs]
        try:
            infer_node(node, imports)
        except OrtgraphError as error:
            yield str(error).splitlines()[0], node
            continue
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
    from ortgraph.runtime.selection import program_pairs, training_program

    if METADATA_KEY not in graph.model.metadata_props or graph.stage != "planned" or is_dynamic(graph):
        return
    signature = graph.signature
    stepped = any(p.update is not None for p in signature.parameters)
    kind = training_program(signature)
    values = {v.name: v for v in (*graph.graph.inputs, *graph.graph.outputs)}
    pairs = [(values[i], values[o]) for i, o in (program_pairs(signature, kind) if stepped else ())]
    results = [o for _, o in pairs] if stepped else [values[n] for n in signature.gradients.values()]
    wanted = list(dict.fromkeys([values[signature.loss], *results]))
    order = needed_nodes(graph.graph, wanted)
    known = stored_offsets(graph, kind)
    placement = place_values(graph.graph, order, wanted, pairs, known, loss=values[signature.loss])
    if placement.problem.buffers and placement.solution.solver != "stored plan":
        yield "the stored offsets overlap, or belong to another graph: run plan-memory again", None
