"""SimplifyAttention: what whole attention need not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.graph.edit import is_used
from ortgraph.manager.base import Changes
from ortgraph.manager.rewrite import Match, RewritePass, Sweep
from ortgraph.ops.attention import HEADS_FIRST, layouts
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute, given
from ortgraph.ops.spec import COMPOSITE
from ortgraph.passes.canonical.values import constant_array
from ortgraph.passes.fusion.attention_parts import Heads, is_causal, repeated, summed_groups
from ortgraph.passes.fusion.operands import rank

_MAX_MASK = 1 << 24  # elements of a constant mask that is looked into
_QUERY = {"Attention": 0, "AttentionGrad": 1}  # position of Q; K, V follow
_MASK = {"Attention": 3, "AttentionGrad": 6}


@dataclasses.dataclass(frozen=True)
class SimplifyAttention(RewritePass):
    """Attention with a constant causal mask = is_causal; with key heads that are repeated in place = fewer key heads.

    Blocks behind the diagonal are then skipped, copies of keys and values are not made, and the sums over the heads of a
    group are part of the gradient. Forward and backward half are rewritten each on its own: both mean the same before
    and after.

    Refuses when:
        the mask is computed, or differs from the triangle;
        a gradient of repeated heads is read by more than the sum over its group.
    """

    name: ClassVar[str] = "simplify-attention"

    def run(self, graph: TrainingGraph, accept: Callable[[int], bool] = lambda index: True) -> Changes:
        sweep = Sweep(self, graph, accept)
        for node in tuple(graph.graph):
            if node.graph is None or node.domain != COMPOSITE or node.op_type not in _QUERY:
                continue
            if rank(node.inputs[_QUERY[node.op_type]]) == 4 and set(layouts(node)) == {HEADS_FIRST}:
                sweep.take(_match(node))
        return sweep.changes

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        facts = match.facts
        node = facts["node"]
        assert isinstance(node, ir.Node)
        inputs, options = list(node.inputs), {k: a.value for k, a in node.attributes.items()}
        at = _QUERY[node.op_type]
        inputs[at + 1], inputs[at + 2] = match.values["k"], match.values["v"]
        if facts["causal"]:
            options["is_causal"] = 1
            inputs[_MASK[node.op_type]] = None
        while inputs[-1] is None:
            inputs.pop()
        made = build.multi(node.op_type, *inputs, outputs=len(node.outputs), domain=COMPOSITE, **options)
        results = []
        for new, old, value in zip(made, node.outputs, match.outputs, strict=True):
            if value is not old:
                assert value.shape is not None
                new = build.op("Reshape", new, build.ints([int(d) for d in value.shape]))  # type: ignore[arg-type]
            new.shape = value.shape
            results.append(new)
        return results


def _match(node: ir.Node) -> Match | None:
    at = _QUERY[node.op_type]
    q, k, v = node.inputs[at : at + 3]
    mask = given(node, _MASK[node.op_type])
    assert q is not None and k is not None and v is not None
    array = constant_array(mask, _MAX_MASK) if not attribute(node, "is_causal", 0) else None
    causal = array is not None and is_causal(array, q.shape[2], k.shape[2])  # type: ignore[index]
    outputs, after = list(node.outputs), []
    small = [repeated(Heads(x)) for x in (k, v)]
    grouped = None not in small and small[0][1] == small[1][1]  # type: ignore[index]
    if grouped and node.op_type == "AttentionGrad":
        for i, found in enumerate(small, 1):
            assert found is not None
            if i >= len(outputs) or not is_used(outputs[i]):
                continue
            shape = tuple(found[0].shape)  # type: ignore[arg-type]
            chain = summed_groups(outputs[i], False, shape, found[1])
            if chain is None or not chain[-1].outputs[0].shape.is_static():  # type: ignore[union-attr]
                grouped = False
                break
            outputs[i] = chain[-1].outputs[0]
            after += list(chain)
    if not grouped:
        outputs, after = list(node.outputs), []
    if not (causal or grouped):
        return None
    read: list[ir.Value] = [k, v]
    if grouped:
        read = [found[0] for found in small if found is not None]
    values: dict[str, ir.Value | None] = {"k": read[0], "v": read[1]}
    facts: dict[str, object] = {"node": node, "causal": causal}
    count = "grouped" if grouped else "causal"
    return Match((node, *after), tuple(outputs), values, facts, count, at=node)
