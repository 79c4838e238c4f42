"""FuseLayerNorm: layer normalization and its gradient from any decomposition."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.graph.edit import take_type
from ortgraph.manager.base import Changes, Refusal
from ortgraph.manager.rewrite import Match, RewritePass, Sweep
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute
from ortgraph.ops.spec import COMPOSITE
from ortgraph.passes.fusion.operands import FLOAT32, axes_of, rank, scalar
from ortgraph.passes.fusion.row_region import COLUMN, FULL, NEAR, ROW, TOLERANCE, RowRegion, difference, is_reduction

_ROOTS = frozenset({"Add", "Div", "Mul", "Sub", "Sum"})
_LARGEST_EPSILON = 0.1


@dataclasses.dataclass(frozen=True)
class FuseLayerNorm(RewritePass):
    """(x - mean(x)) / sqrt(var(x) + e) s + b = LayerNormalization(x, s, b), and its derivative = LayerNormGrad.

    Recognised by value (row_region.py): Pow or Mul, Sqrt and Div or Reciprocal, axes as attribute or input, all count.
    The mean and the inverse deviation become outputs of LayerNormalization, for the backward half. The gradient is
    found from dY and a LayerNormalization with three outputs; sums over rows of dY and dY x_hat join it as the
    gradients of scale and bias. A residual's gradient that is summed in the same node becomes an Add.

    Refuses when:
        the axes are not the last ones, or scale or bias is not shaped like them;
        the numbers differ by more than 1e-6, or no constant of the region is its epsilon;
        the element type is not float32 (LayerNormalization keeps its statistics in float32).
    """

    name: ClassVar[str] = "fuse-layer-norm"

    def run(self, graph: TrainingGraph, accept: Callable[[int], bool] = lambda index: True) -> Changes:
        if not any(is_reduction(n) for n in graph.graph):
            return Changes()
        sweep = Sweep(self, graph, accept)
        # Whole layers before their core: x_hat, which the backward half may compute again, is one without parameters.
        looks: list[Callable[[ir.Node], Match | Refusal | None]] = [_gradient]
        looks[:0] = (functools.partial(_forward, rows=n) for n in (2, 1, 0))
        for look in looks:
            # A layer from its end; gradients from the loss on, so that a residual's gradient is one operator already.
            for node in tuple(graph.graph)[:: 1 if look is _gradient else -1]:
                if node.graph is not None and node.domain in ("", "ai.onnx") and node.op_type in _ROOTS:
                    sweep.take(look(node), at=node)
        if sweep.changes.counts:
            graph.graph.sort()  # statistics and parameter gradients may be read before the place of the last match
        return sweep.changes

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        v, axis = match.values, match.facts["axis"]
        assert isinstance(axis, int)
        if match.count == "gradient":
            inputs = [v[k] for k in ("dy", "x", "mean", "inv_std", "scale")]
            roles = match.facts["roles"]
            assert isinstance(roles, tuple)
            made = build.multi("LayerNormGrad", *inputs, outputs=1 + max(roles), domain=COMPOSITE, axis=axis)
            if v["addend"] is not None:
                made = (build.op("Add", made[0], v["addend"]), *made[1:])
        else:
            x, scale = v["x"], v["scale"]
            assert x is not None and x.shape is not None
            if scale is None:
                width = [d for d in x.shape[axis:] if isinstance(d, int)]
                scale = build.const(np.ones(width), FLOAT32, name="scale")
            roles = match.facts["roles"]
            assert isinstance(roles, tuple)
            made = build.multi(
                "LayerNormalization", x, scale, v["bias"], outputs=3, axis=axis, epsilon=match.facts["epsilon"]
            )  # fmt: skip
        results = [made[i] for i in roles]
        for new, old in zip(results, match.outputs, strict=True):
            take_type(new, old)
        return results


def _layer_norm(x: np.ndarray, epsilon: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x_hat, mean, inverse standard deviation."""
    mean = x.mean(1, keepdims=True)
    inv_std = 1.0 / np.sqrt(((x - mean) ** 2).mean(1, keepdims=True) + epsilon)
    return (x - mean) * inv_std, mean, inv_std


def _forward(node: ir.Node, rows: int) -> Match | Refusal | None:
    region = RowRegion(node.outputs[0])
    reductions = [n for n in region.nodes if n.op_type == "ReduceMean" or n.op_type.startswith("ReduceSum")]
    if len(reductions) < 2 or not any(n.op_type in ("Sqrt", "Pow") for n in region.nodes):
        return None
    near: tuple[float, str] = (NEAR, "")
    for cut in region.cuts():
        x, *parameters = cut
        if len(parameters) != rows or any(region.kind(r) != ROW for r in parameters):
            continue
        inner = region.inside(cut)
        numbers = {scalar(v) for n in inner for v in n.inputs if v is not None}
        for epsilon in sorted(e for e in numbers if e is not None and 0.0 < e <= _LARGEST_EPSILON):
            found = _compare(region, x, parameters, epsilon)
            if isinstance(found, float):
                near = min(near, (found, f"differs from LayerNormalization of %{x.name} by {found:.1e}"))
                continue
            return _checked_forward(region, cut, found, epsilon)
    return Refusal(node.name or "", near[1]) if near[1] else None


def _compare(
    region: RowRegion, x: ir.Value, rows: Sequence[ir.Value], epsilon: float
) -> tuple[ir.Value | None, ir.Value | None] | float:
    """(scale, bias) of the assignment that fits, or the smallest difference."""
    samples = {r: region.sample(ROW, 5 + i) for i, r in enumerate(rows)}
    data = region.sample(FULL, 3)
    x_hat = _layer_norm(data, epsilon)[0]
    got = region.evaluate(region.root, {x: data, **samples})
    best = np.inf
    for scale, bias in dict.fromkeys(itertools.permutations([*rows, *[None] * (2 - len(rows))], 2)):
        want = x_hat * (1.0 if scale is None else samples[scale]) + (0.0 if bias is None else samples[bias])
        off = difference(got, want)
        if off <= TOLERANCE:
            return scale, bias
        best = min(best, off)
    return float(best)


def _checked_forward(
    region: RowRegion, cut: tuple[ir.Value, ...], found: tuple[ir.Value | None, ir.Value | None], epsilon: float
) -> Match | Refusal:
    x, nodes = cut[0], region.inside(cut)
    root = nodes[-1]
    n, axes = rank(x), region.axes
    assert n is not None and axes is not None and x.shape is not None
    if region.root.dtype != FLOAT32:
        return Refusal(
            root.name or "", f"element type {region.root.dtype}: LayerNormalization keeps float32 statistics"
        )
    if axes != tuple(range(n - len(axes), n)):
        return Refusal(root.name or "", f"normalizes axes {list(axes)}, not the last ones")
    if found[0] is None and not all(isinstance(d, int) for d in x.shape[axes[0] :]):
        return Refusal(root.name or "", "there is no scale and the width is not known")
    data = region.sample(FULL, 3)
    _, mean, inv_std = _layer_norm(data, epsilon)
    outputs, roles = [region.root], [0]
    for node in nodes:
        value = node.outputs[0]
        if region.kind(value) != COLUMN or value.dtype != FLOAT32:
            continue
        got = region.evaluate(value, {x: data})
        for role, want in ((1, mean), (2, inv_std)):
            if got.shape == want.shape and difference(got, want) <= TOLERANCE:
                outputs.append(value)
                roles.append(role)
    facts = {"axis": axes[0] - n, "epsilon": epsilon, "roles": tuple(roles)}
    return Match(nodes, tuple(outputs), {"x": x, "scale": found[0], "bias": found[1]}, facts, "forward")


def _gradient(node: ir.Node) -> Match | Refusal | None:
    if node.outputs[0].dtype != FLOAT32:
        return None
    region = RowRegion(node.outputs[0])
    if len([n for n in region.nodes if is_reduction(n)]) < 2:
        return None
    # A residual's gradient may be summed in the same node: it is then tried as an addend.
    addends = [None, *dict.fromkeys(v for v in node.inputs if v is not None and node.op_type in ("Add", "Sum"))]
    near: tuple[float, str] = (NEAR, "")
    for norm in _norms_near(region):
        for addend in addends:
            found = _gradient_of(region, norm, addend)
            if isinstance(found, Match):
                return found
            near = min(near, found)
    return Refusal(node.name or "", near[1]) if near[1] else None


def _gradient_of(region: RowRegion, norm: ir.Node, addend: ir.Value | None) -> Match | tuple[float, str]:
    """The gradient of ``norm``, plus ``addend``; else the smallest difference, in words."""
    x, scale = norm.inputs[:2]
    assert x is not None and scale is not None
    known = [x, scale, norm.outputs[1], norm.outputs[2]]
    closed = [*known, *([addend] if addend is not None else [])]
    pinned = RowRegion(region.root, closed, region.axes, region)
    near, best = (NEAR, ""), None
    if pinned.axes is None or pinned.axes != _axes(norm) or (addend is not None and pinned.kind(addend) != FULL):
        return near
    for cut in pinned.cuts():
        dy = cut[0]
        rest = [v for v in cut[1:] if v is not addend]
        if not set(rest) <= set(known) or (addend in cut) != (addend is not None):
            continue
        samples, (x_hat, inv_std) = _gradient_samples(pinned, norm, dy)
        plus = 0.0
        if addend is not None:
            plus = samples[addend] = np.random.default_rng(19).standard_normal(x_hat.shape)
        got = pinned.evaluate(pinned.root, samples)
        for scaled in (scale, None):
            g = samples[dy] * (1.0 if scaled is None else samples[scaled])
            want = inv_std * (g - g.mean(1, keepdims=True) - x_hat * (g * x_hat).mean(1, keepdims=True)) + plus
            off = difference(got, want)
            if off <= TOLERANCE:
                best = _checked_gradient(pinned, norm, cut, scaled, addend)  # the deepest: dY behind the scale
            near = min(near, (off, f"differs from LayerNormGrad of %{dy.name} by {off:.1e}"))
    return best if best is not None else near


def _norms_near(region: RowRegion) -> list[ir.Node]:
    """LayerNormalization nodes with statistics whose input or statistics the region reads, in order."""
    values = [v for n in region.nodes for v in region.operands(n)]
    found: dict[ir.Node, None] = {}
    for value in values:
        for node in (value.producer(), *(u.node for u in value.uses())):
            if (
                node is not None
                and node.op_type == "LayerNormalization"
                and len(node.outputs) == 3
                and node not in found
            ):
                found[node] = None
    return [n for n in found if n.domain in ("", "ai.onnx") and len(n.inputs) > 1 and not _has_gradient(n)]


def _has_gradient(norm: ir.Node) -> bool:
    return any(u.node.op_type == "LayerNormGrad" for u in norm.outputs[2].uses())


def _axes(norm: ir.Node) -> tuple[int, ...] | None:
    n = rank(norm.inputs[0])
    return None if n is None else tuple(range(attribute(norm, "axis", -1) % n, n))


def _gradient_samples(region: RowRegion, norm: ir.Node, dy: ir.Value):
    x, scale = norm.inputs[:2]
    assert x is not None and scale is not None
    data = region.sample(FULL, 3)
    x_hat, mean, inv_std = _layer_norm(data, attribute(norm, "epsilon", 1e-5))
    rng = np.random.default_rng(17)
    samples = {
        x: data, scale: region.sample(ROW, 5), norm.outputs[1]: mean, norm.outputs[2]: inv_std,
        dy: rng.standard_normal(data.shape),
    }  # fmt: skip
    return samples, (x_hat, inv_std)


def _checked_gradient(
    region: RowRegion, norm: ir.Node, cut: tuple[ir.Value, ...], scale: ir.Value | None, addend: ir.Value | None
) -> Match:  # fmt: skip
    dy, x = cut[0], norm.inputs[0]
    values = {
        "dy": dy, "x": x, "mean": norm.outputs[1], "inv_std": norm.outputs[2],
        "scale": scale, "addend": addend,
    }  # fmt: skip
    nodes, outputs, roles = list(region.inside(cut)), [region.root], [0]
    axes = region.axes
    assert axes is not None and x is not None
    if len(axes) < (rank(x) or 0):
        for role, parts in enumerate((_scale_sums(region, norm, dy), _row_sums(dy, axes)), start=1):
            for part in parts[:1]:
                nodes += part
                outputs.append(part[-1].outputs[0])
                roles.append(role)
    facts = {"axis": axes[0] - (rank(x) or 0), "roles": tuple(roles)}
    return Match(tuple(nodes), tuple(outputs), values, facts, "gradient")


def _row_sums(value: ir.Value, axes: tuple[int, ...]) -> list[list[ir.Node]]:
    """Sums of ``value`` over every axis but the normalized ones, shaped like these axes."""
    found = []
    for use in value.uses():
        node = use.node
        if node.op_type != "ReduceSum" or use.idx != 0 or axes_of(node) != tuple(range(axes[0])):
            continue
        if not attribute(node, "keepdims", 1):
            found.append([node])
            continue
        views = [u.node for u in node.outputs[0].uses()]
        flat = len(views) == 1 and views[0].op_type == "Reshape" and rank(views[0].outputs[0]) == len(axes)
        if flat and not node.outputs[0].is_graph_output():
            found.append([node, views[0]])
    return found


def _scale_sums(region: RowRegion, norm: ir.Node, dy: ir.Value) -> list[list[ir.Node]]:
    """Nodes of sum(dY x_hat), when the graph has it."""
    assert region.axes is not None
    for use in dy.uses():
        product = use.node
        totals = [] if product.op_type != "Mul" else _row_sums(product.outputs[0], region.axes)
        if not totals:
            continue
        samples, (x_hat, _) = _gradient_samples(region, norm, dy)
        known = list(samples)
        local = RowRegion(product.outputs[0], known, region.axes)
        unknown = {v for n in local.nodes for v in local.operands(n) if v not in local.order} - set(known)
        if not local.nodes or unknown:
            continue
        if difference(local.evaluate(local.root, samples), samples[dy] * x_hat) <= TOLERANCE:
            return [[*local.nodes, *totals[0]]]
    return []
