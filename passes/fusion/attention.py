"""FuseAttention: whole attention, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Changes, Refusal
from ortgraph.manager.rewrite import Match, RewritePass, Sweep
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute, decimal
from ortgraph.ops.spec import COMPOSITE
from ortgraph.passes.canonical.values import constant_array
from ortgraph.passes.fusion.attention_parts import (
    Heads,
    Product,
    Scores,
    close,
    is_causal,
    lead_of,
    passes,
    product,
    readers_below,
    repeated,
    safe_softmax,
    scores_above,
    summed_groups,
    unscaled,
)
from ortgraph.passes.fusion.operands import FLOATS, producer_of, rank, with_lead

_MAX_MASK = 1 << 24  # elements of a constant mask that is looked into
_AS_IT_LIES = ((0, 1, 2, 3), (0, 1, 3, 2))  # rows and columns exchanged at most


@dataclasses.dataclass(frozen=True)
class _Result:
    """A value that a gradient replaces: ``swapped`` when it is the gradient's transpose, times ``factor``.

    ``after`` are the nodes from the product to the value, where heads that share keys are summed.
    """

    product: Product
    swapped: bool
    factor: float
    after: tuple[ir.Node, ...] = ()

    @property
    def value(self) -> ir.Value:
        return self.after[-1].outputs[0] if self.after else self.product.result


@dataclasses.dataclass(frozen=True)
class _Found:
    """One attention: operands as heads, what replaces what."""

    scores: Scores
    operands: tuple[Heads, Heads, Heads]
    scales: tuple[float, float, float]  # of Q, K and V before the products, taken out of them
    forward: Product
    dropout: ir.Node | None
    dy: Heads | None
    gradients: dict[str, _Result]
    nodes: tuple[ir.Node, ...]
    shared: bool = False

    @property
    def scale(self) -> float:
        return self.scores.factor * self.scales[0] * self.scales[1]


@dataclasses.dataclass(frozen=True)
class FuseAttention(RewritePass):
    """Dropout(softmax(s Q K^T + Mask)) V = Attention(Q, K, V, Mask), its backward half = AttentionGrad.

    Views, transposes and scales may stand anywhere between the products; what is scaled before the product stays so.
    The mask is a sum, a choice between scores and a number below -1e30, or several of these; a constant that hides
    the keys behind each query becomes ``is_causal``. Key heads that are repeated in place are read where they are. Rows
    whose mask is minus infinity throughout give 0, as in PyTorch's fused attention, where a softmax would give NaN.

    Refuses when:
        probabilities, scores or their gradients are graph outputs or have another reader (a learned bias on scores);
        the backward half has other operands than the forward half, or reads a part of the rows;
        the softmax is not over the last axis, or the scores are scaled after the mask;
        the element type is neither float32 nor float64.
    """

    name: ClassVar[str] = "fuse-attention"

    def run(self, graph: TrainingGraph, accept: Callable[[int], bool] = lambda index: True) -> Changes:
        sweep = Sweep(self, graph, accept)
        nodes = tuple(graph.graph)
        order = {node: i for i, node in enumerate(nodes)}
        for node in nodes:
            if node.graph is None or node.op_type != "Softmax" or node.domain not in ("", "ai.onnx"):
                continue
            found = _find(node)
            if not isinstance(found, _Found):
                sweep.take(Refusal(node.name or "", found) if found is not None else None)
                continue
            match = self._match(_with_groups(found), order)
            reason = self._inner_reason(match)
            sweep.take(Refusal(node.name or "", reason) if reason else match)
        return sweep.changes

    def _match(self, found: _Found, order: dict[ir.Node, int]) -> Match:
        outputs = [found.forward.result, *(r.value for r in found.gradients.values())]
        nodes = tuple(sorted(dict.fromkeys(found.nodes), key=order.__getitem__))
        first = min((r.product.node for r in found.gradients.values()), key=order.__getitem__, default=None)
        facts: dict[str, object] = {"found": found, "first": first}
        return Match(nodes, tuple(outputs), {}, facts, "attentions", at=found.forward.node)

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        found, first = match.facts["found"], match.facts["first"]
        assert isinstance(found, _Found)
        q, k, v = found.operands
        operands = [q.build(build), *(_small(build, h, found.shared) for h in (k, v))]
        causal, mask = _mask(build, found.scores)
        options: dict[str, Any] = {"scale": found.scale, "is_causal": int(causal)}
        extra = [mask]
        if found.dropout is not None:
            extra += list(found.dropout.inputs[1:3])
            options |= {k: attribute(found.dropout, k) for k in ("ratio", "node")}
        extra = extra if any(x is not None for x in extra) else []
        outputs = 2 if found.dy is not None else 1
        made = build.multi("Attention", *operands, *extra, outputs=outputs, domain=COMPOSITE, **options)
        results = [_shaped(build, made[0], found.forward.result, False, 1.0)]
        if found.dy is None:
            return results
        assert isinstance(first, ir.Node)
        late = Builder(build.graph, build.by, before=first, origins=match.nodes[::-1], names=build.names)
        inputs = (found.dy.build(late), *operands, *made, *extra)
        gradients = dict(
            zip("qkv", late.multi("AttentionGrad", *inputs, outputs=3, domain=COMPOSITE, **options), strict=True)
        )
        for name, result in found.gradients.items():
            swapped = result.swapped and not (found.shared and name != "q")
            results.append(_shaped(late, gradients[name], result.value, swapped, result.factor))
        return results


def _find(softmax: ir.Node) -> _Found | str | None:
    p = softmax.outputs[0]
    n = rank(p)
    if n not in (3, 4):
        return None
    lead = lead_of(_above(softmax))
    scores = scores_above(softmax.inputs[0], lead)
    if not isinstance(scores, Scores):
        return scores
    if attribute(softmax, "axis", -1) not in (-1, n - 1):
        return "the softmax is not over the last axis"
    if p.dtype not in FLOATS:
        return f"element type {p.dtype}"
    if any(not _known(mask) for mask in scores.masks):
        return "a mask of three dimensions has an unknown size"
    p, safe = safe_softmax(p, softmax.inputs[0])
    carried, between, others = readers_below(p)
    nodes = [*scores.nodes, softmax, *safe, *between]
    dropout = next((x for x in others if x.op_type == "Dropout" and x.domain == COMPOSITE), None)
    mask: ir.Value | None = None
    kept, late = dict(carried), list(others)
    if dropout is not None:
        if any(x.op_type in ("MatMul", "FusedMatMul") for x in others):
            return "products read the probabilities before dropout"
        kept, between, dropped = readers_below(dropout.outputs[0])
        nodes += [dropout, *between]
        late = [*dropped, *(x for x in others if x is not dropout)]
        mask = dropout.outputs[1] if len(dropout.outputs) > 1 else None
    forward, values, slope = None, None, None
    for reader in late:
        if _is_slope(reader) and reader.inputs[1] in carried and slope is None:
            slope = reader
            continue
        made = product(reader, lead)
        plain = _side(made, kept)
        if made is None or plain is None or made.factor != 1.0 or any(f != 1.0 for f in kept.values()):
            return f"the probabilities are also read by {reader.op_type} {reader.name!r}"
        if plain == ("left", False) and forward is None:
            forward = made
        elif plain in (("left", True), ("right", False)) and values is None:
            values = (made, plain == ("right", False))
        else:
            return f"the probabilities are also read by {reader.op_type} {reader.name!r}"
    if forward is None:
        return None
    (q, by_q), (k, by_k) = unscaled(scores.product.left), unscaled(scores.product.right.swapped())
    found = _Found(scores, (q, k, forward.right), (by_q, by_k, 1.0), forward, dropout, None, {}, (*nodes, forward.node))
    if slope is None and values is None:
        return found
    return _backward(found, slope, values, mask, lead)


def _backward(
    found: _Found, slope: ir.Node | None, values: tuple[Product, bool] | None, mask: ir.Value | None, lead: tuple | None
) -> _Found | str:
    nodes, gradients, dy = list(found.nodes), {}, None
    if values is not None:
        mixed, swapped = values
        dy = mixed.left.swapped() if swapped else mixed.right
        gradients["v"] = _Result(mixed, swapped, 1.0)
        nodes.append(mixed.node)
    if slope is None:
        return dataclasses.replace(found, dy=dy, gradients=gradients, nodes=tuple(nodes))
    above, incoming = _incoming(slope.inputs[0], found, mask, lead)
    if incoming is None:
        return f"%{slope.inputs[0].name} is not the gradient of the probabilities"  # type: ignore[union-attr]
    v = found.forward.right
    if incoming.right != v.swapped():
        return f"the gradient of the probabilities is not taken with %{v.source.name}"
    if dy is not None and dy != incoming.left:
        return f"values and probabilities have gradients of %{dy.source.name} and %{incoming.left.source.name}"
    nodes += [*above, incoming.node, slope]
    scaled, between, others = readers_below(slope.outputs[0])
    nodes += between
    q, k = found.scores.product.left, found.scores.product.right.swapped()
    for reader in others:
        made = product(reader, lead)
        side = _side(made, scaled)
        if made is None or side is None:
            return f"the gradient of the scores is also read by {reader.op_type} {reader.name!r}"
        operand, own = (made.right, made.left) if side[0] == "left" else (made.left, made.right)
        factor = made.factor * scaled[own.source] / found.scores.factor
        # left: dS K and dS^T Q; right: Q^T dS and K^T dS^T, whose results are transposed
        turned = side[0] == "right"
        operand = operand.swapped() if turned else operand
        name, want = ("k", q) if side[1] != turned else ("q", k)
        if operand != want or name in gradients:
            return f"{reader.op_type} {reader.name!r} is no gradient of queries or keys"
        factor /= found.scales["qk".index(name)]
        result = _scaled_after(_Result(made, turned, factor))
        gradients[name] = dataclasses.replace(result, factor=1.0 if close(result.factor, 1.0) else result.factor)
        nodes += [made.node, *result.after]
    return dataclasses.replace(found, dy=incoming.left, gradients=gradients, nodes=tuple(nodes))


def _scaled_after(result: _Result) -> _Result:
    """The result with a product with a constant that follows it."""
    value, factor, nodes = result.product.result, result.factor, []
    while len(uses := list(value.uses())) == 1 and not value.is_graph_output():
        node = uses[0].node
        by = passes(node)
        if by is None:
            break
        nodes.append(node)
        value, factor = node.outputs[0], factor * by
        if node.op_type != "Reshape":
            return dataclasses.replace(result, after=tuple(nodes), factor=factor)
    return result


def _above(softmax: ir.Node) -> list[ir.Value | None]:
    """Values from the softmax up to the product: the first of four dimensions says batch and heads."""
    found: list[ir.Value | None] = [softmax.outputs[0]]
    node: ir.Node | None = softmax
    while node is not None and node.inputs and len(found) < 16:
        value = node.inputs[1] if node.op_type == "Where" and len(node.inputs) > 1 else node.inputs[0]
        found.append(value)
        node = value.producer() if value is not None else None
        if node is not None and node.op_type in ("MatMul", "FusedMatMul"):
            for operand in node.inputs[:2]:
                view = producer_of(operand, "Reshape")
                found.append(view.inputs[0] if view is not None else operand)
            break
    return found


def _known(mask: ir.Value | tuple[ir.Value, float, float]) -> bool:
    """Whether a mask's first dimension is known where it may be batch and heads together."""
    value = mask[0] if isinstance(mask, tuple) else mask
    return rank(value) != 3 or isinstance(value.shape[0], int)  # type: ignore[index]


def _is_slope(node: ir.Node) -> bool:
    return node.op_type == "SoftmaxGrad" and node.domain == COMPOSITE and attribute(node, "axis", -1) in (
        -1, (rank(node.outputs[0]) or 0) - 1,
    )  # fmt: skip


def _side(made: Product | None, carried: dict[ir.Value, float]) -> tuple[str, bool] | None:
    """Which operand carries the value, and whether transposed; None unless exactly one does, as it lies."""
    if made is None:
        return None
    sides = [(name, h) for name, h in (("left", made.left), ("right", made.right)) if h.source in carried]
    if len(sides) != 1 or sides[0][1].perm not in _AS_IT_LIES:
        return None
    return sides[0][0], sides[0][1].perm == (0, 1, 3, 2)


def _incoming(
    value: ir.Value | None, found: _Found, mask: ir.Value | None, lead: tuple | None
) -> tuple[list[ir.Node], Product | None]:
    """The product dY V^T from which a SoftmaxGrad takes its gradient, and the nodes between."""
    nodes: list[ir.Node] = []
    wanted = found.dropout is not None
    while value is not None and (node := value.producer()) is not None:
        made = product(node, lead)
        if made is not None:
            return nodes, made if made.factor == 1.0 and not wanted else None
        dropped = node.op_type == "DropoutGrad" and node.domain == COMPOSITE and wanted
        if dropped:
            assert found.dropout is not None
            same = node.inputs[1] is mask and close(decimal(node, "ratio", 0.5), decimal(found.dropout, "ratio", 0.5))
            if not same:
                return nodes, None
            wanted = False
        elif passes(node) != 1.0:
            return nodes, None
        nodes.append(node)
        value = node.inputs[0]
    return nodes, None


def _with_groups(found: _Found) -> _Found:
    """The same with keys and values read before their heads are repeated, where both are and their gradients sum."""
    _, k, v = found.operands
    small = {n: repeated(h) for n, h in (("k", k), ("v", v))}
    if any(s is None for s in small.values()) or small["k"][1] != small["v"][1]:  # type: ignore[index]
        return found
    if any(h.perm not in _AS_IT_LIES for h in (k, v)):
        return found
    gradients = dict(found.gradients)
    for name in set(gradients) & set(small):
        source, share = small[name]  # type: ignore[misc]
        result = gradients[name]
        after = summed_groups(result.value, result.swapped, tuple(source.shape), share)  # type: ignore[arg-type]
        if after is None:
            return found
        gradients[name] = dataclasses.replace(result, after=(*result.after, *after))
    inner = [node for r in gradients.values() for node in r.after]
    return dataclasses.replace(found, gradients=gradients, nodes=(*found.nodes, *inner), shared=True)


def _small(b: Builder, operand: Heads, shared: bool) -> ir.Value:
    found = repeated(operand) if shared else None
    return operand.build(b) if found is None else Heads(found[0], operand.perm).build(b)


def _mask(b: Builder, scores: Scores) -> tuple[bool, ir.Value | None]:
    """(whether causal, the mask). The triangle is taken out when nothing else could show a hidden key."""
    rows, keys = scores.product.left.shape[2], scores.product.right.shape[3]
    lead = scores.product.left.shape[:2]
    causal, masks = False, []
    for mask in scores.masks:
        array = constant_array(mask, _MAX_MASK) if isinstance(mask, ir.Value) else None
        alone = len(scores.masks) == 1
        if array is not None and is_causal(array, rows, keys) and (alone or _hides(array)) and not causal:
            causal = True
            continue
        masks.append(_mask_value(b, mask, lead, scores.product.left.source.dtype))
    if not masks:
        return causal, None
    total = masks[0]
    for mask in masks[1:]:
        total = b.op("Add", total, mask)
    return causal, total


def _hides(array) -> bool:
    """Whether hidden keys are minus infinity: no other mask can bring them back."""
    return bool((array[array != 0] == float("-inf")).all())


def _mask_value(b: Builder, mask: ir.Value | tuple, lead: tuple, dtype: ir.DataType | None) -> ir.Value:
    assert dtype is not None
    value = mask
    if isinstance(mask, tuple):
        condition, holds, other = mask
        value = b.op("Where", condition, b.const(holds, dtype.numpy()), b.const(other, dtype.numpy()))
    assert isinstance(value, ir.Value) and value.shape is not None
    if len(value.shape) == 3 and lead[0] != 1 and value.shape[0] == lead[0] * lead[1]:
        value = with_lead(b, value, lead)
    return value


def _shaped(b: Builder, value: ir.Value, old: ir.Value, swapped: bool, factor: float) -> ir.Value:
    """The value as the product that it replaces gave it."""
    if factor != 1.0:
        value = b.op("Mul", value, b.scalar(factor, value))
    if swapped:
        value = b.op("Transpose", value, perm=[0, 1, 3, 2])
    if rank(old) != 4:
        value = with_lead(b, value, tuple(old.shape)[:-2])  # type: ignore[arg-type]
    value.shape = old.shape
    return value
