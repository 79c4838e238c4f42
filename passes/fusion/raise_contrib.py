"""RaiseContrib: training operators of ONNX Runtime become composites of the same meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.graph.edit import take_type
from ortgraph.manager.base import Refusal
from ortgraph.manager.rewrite import Match, RewritePass, op_key
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute, given
from ortgraph.ops.spec import COMPOSITE, CONTRIB, spec_of
from ortgraph.passes.fusion.operands import constant, producer_of, rank, scalar

IGNORE = -100
_LOSS_FORWARD = ("SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossInternal", "CrossEntropy")


@dataclasses.dataclass(frozen=True)
class RaiseContrib(RewritePass):
    """com.microsoft.GeluGrad(dY, X) = ortgraph.GeluGrad(dY, X), and so on for every operator with a composite.

    Also the standard SoftmaxCrossEntropyLoss = CrossEntropy, Scale by a constant = Mul, DivGrad = Div and Mul,
    ReduceSumTraining = ReduceSum, ConcatTraining = Concat, SplitTraining = Split, and pool gradients.

    Refuses when:
        a shape, axis, ratio or ignored index that the composite holds as an attribute is no constant;
        the operator gathers along another axis or from a table that is no matrix;
        QuickGelu has a slope other than 1; a BatchNorm is trained by ONNX Runtime's rule (biased variance).
    """

    name: ClassVar[str] = "raise-contrib"
    shared_inner: ClassVar[str] = "keep"

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        rule = RULES.get(op_key(node))
        if rule is None:
            return None
        reason = rule.why_not(node)
        if reason is not None:
            return Refusal(node.name or "", reason)
        used = tuple(o for o in node.outputs if o.uses() or o.is_graph_output())
        return Match((node,), used, count=node.op_type)

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        node = match.nodes[0]
        made = RULES[op_key(node)].build(build, node)
        results = []
        for output, new in zip(node.outputs, made, strict=False):
            if output in match.outputs:
                assert new is not None
                if new.producer() in build.made:
                    take_type(new, output)
                results.append(new)
        return results


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one operator is raised: why not for this node, and what it becomes."""

    build: Callable[[Builder, ir.Node], Sequence[ir.Value | None]]
    why_not: Callable[[ir.Node], str | None] = lambda node: None


def _composite(op_type: str, *order: int, **attributes: str) -> Rule:
    """Same inputs (in ``order`` when given), fixed attributes."""

    def build(b: Builder, node: ir.Node) -> list[ir.Value]:
        inputs = [given(node, i) for i in order] if order else list(node.inputs)
        return [b.op(op_type, *inputs, domain=COMPOSITE, **attributes)]

    return Rule(build)


def _over_axis(op_type: str, default: int) -> Rule:
    """Softmax gradients. Before opset 13 the axis splits the shape in two: the same only for the last dimension."""

    def why_not(node: ir.Node) -> str | None:
        axis, n = attribute(node, "axis", default), rank(node.inputs[0])
        if default == 1 and (n is None or axis % n != n - 1):
            return f"normalizes everything from axis {axis} on"
        return None

    def build(b: Builder, node: ir.Node) -> list[ir.Value]:
        return [b.op(op_type, *node.inputs, domain=COMPOSITE, axis=attribute(node, "axis", default))]

    return Rule(build, why_not)


def _with_bias(op_type: str, approximate: str, bias: int) -> Rule:
    """The bias that is added to X inside becomes an Add; without one X is taken as it is."""

    def build(b: Builder, node: ir.Node) -> list[ir.Value]:
        x, row = node.inputs[bias - 1], given(node, bias)
        inputs = [*node.inputs[: bias - 1], x if row is None else b.op("Add", x, row)]
        return [b.op(op_type, *inputs, domain=COMPOSITE, approximate=approximate)]

    return Rule(build)


def _quick(op_type: str) -> Rule:
    def why_not(node: ir.Node) -> str | None:
        alpha = attribute(node, "alpha", 1.702)
        return None if alpha == 1.0 else f"slope {alpha:.4g}: only slope 1 is SiLU"

    return Rule(lambda b, node: [b.op(op_type, *node.inputs, domain=COMPOSITE)], why_not)


def _layer_norm_grad(b: Builder, node: ir.Node) -> Sequence[ir.Value]:
    dy, x, scale, mean, inv_std = node.inputs
    axis = attribute(node, "axis", -1)
    wanted = 1 + max(i for i, o in enumerate(node.outputs) if i == 0 or o.uses() or o.is_graph_output())
    return b.multi("LayerNormGrad", dy, x, mean, inv_std, scale, outputs=wanted, domain=COMPOSITE, axis=axis)


def _gather_why_not(node: ir.Node) -> str | None:
    shape = constant(node.inputs[0])
    if shape is None:
        return "the shape of the table is not a constant (fold-shapes first)"
    if attribute(node, "axis", 0) != 0 or shape.size != 2:
        return f"gathers along axis {attribute(node, 'axis', 0)} of {shape.size} dimensions, not rows of a matrix"
    return None


def _gather_grad(b: Builder, node: ir.Node) -> list[ir.Value]:
    shape = constant(node.inputs[0])
    assert shape is not None
    rows = int(shape[0])
    return [b.op("EmbeddingGrad", node.inputs[2], node.inputs[1], domain=COMPOSITE, rows=rows, padding_idx=-1)]


def _ignore_index(node: ir.Node, position: int) -> int | None:
    """The ignored class (an input or an attribute); None when it is an input that is no constant."""
    value = given(node, position) if "Internal" in node.op_type else None
    if value is None:
        return int(attribute(node, "ignore_index", IGNORE))
    number = scalar(value)
    return None if number is None else int(number)


def _loss_why_not(node: ir.Node) -> str | None:
    logits = node.inputs[0 if "Grad" not in node.op_type else 1]
    if _ignore_index(node, 3 if "Grad" not in node.op_type else 4) is None:
        return "the ignored index is not a constant"
    if rank(logits) is None:
        return "the rank of the logits is not known"
    if given(node, 5) is not None:
        return "a bias is added to the gradient"
    return None


def _loss(b: Builder, node: ir.Node) -> Sequence[ir.Value]:
    options = {"reduction": attribute(node, "reduction", "mean"), "ignore_index": _ignore_index(node, 3)}
    inputs = [node.inputs[0], node.inputs[1], given(node, 2)]
    return b.multi("CrossEntropy", *inputs, outputs=3, domain=COMPOSITE, **options)[: max(2, len(node.outputs))]


def _loss_grad(b: Builder, node: ir.Node) -> list[ir.Value]:
    d_loss, log_prob, target, weight = (*node.inputs, None)[:4]
    assert log_prob is not None and target is not None
    ignore, reduction = _ignore_index(node, 4), attribute(node, "reduction", "mean")
    total = _total_weight(b, log_prob, target, weight, int(ignore or 0))
    inputs = [d_loss, log_prob, target, weight, total]
    return [b.op("CrossEntropyGrad", *inputs, domain=COMPOSITE, reduction=reduction, ignore_index=ignore)]


def _total_weight(
    b: Builder, log_prob: ir.Value, target: ir.Value, weight: ir.Value | None, ignore: int
) -> ir.Value:  # fmt: skip
    """The forward loss's third output, when it is a composite; else the sum of the weights of counted targets."""
    forward = producer_of(log_prob, *_LOSS_FORWARD, domain=COMPOSITE)
    if forward is not None and forward.inputs[1] is target and given(forward, 2) is weight and len(forward.outputs) > 2:
        return forward.outputs[2]
    kept = b.op("Not", b.op("Equal", target, b.scalar(ignore, target)))
    if weight is None:
        return b.op("ReduceSum", b.op("Cast", kept, to=log_prob.dtype), keepdims=0)
    row = b.op("Gather", weight, b.op("Where", kept, target, b.scalar(0, target)), axis=0)
    return b.op("ReduceSum", b.op("Where", kept, row, b.scalar(0.0, weight)), keepdims=0)


def _conv_grad(b: Builder, node: ir.Node) -> Sequence[ir.Value]:
    options = {k: attribute(node, k) for k in ("strides", "pads", "dilations", "group")}
    return b.multi("ConvGrad", *node.inputs, outputs=len(node.outputs), domain=COMPOSITE, **options)


def _conv_why_not(node: ir.Node) -> str | None:
    padding = attribute(node, "auto_pad", "NOTSET")
    return None if padding == "NOTSET" else f"auto_pad={padding}: pads are not recorded"


def _pool_why_not(node: ir.Node) -> str | None:
    pool = producer_of(node.inputs[1], "MaxPool")
    return None if pool is not None and node.inputs[1] is pool.outputs[1] else "its MaxPool is not in this graph"


def _max_pool_grad(b: Builder, node: ir.Node) -> list[ir.Value]:
    pool = producer_of(node.inputs[1], "MaxPool")
    assert pool is not None
    return [b.op("MaxPoolGrad", *node.inputs, pool.inputs[0], domain=COMPOSITE)]


def _batch_norm_grad(b: Builder, node: ir.Node) -> Sequence[ir.Value]:
    return b.multi("BatchNormGrad", *node.inputs[:5], outputs=3, domain=COMPOSITE)


def _dropout_why_not(node: ir.Node) -> str | None:
    if scalar(given(node, 2)) is None and given(node, 2) is not None:
        return "the ratio is not a constant"
    training = constant(given(node, 3))
    return None if training is not None and bool(np.all(training)) else "training mode is not a constant true"


def _dropout_grad(b: Builder, node: ir.Node) -> list[ir.Value]:
    ratio = scalar(given(node, 2))
    drawing = producer_of(node.inputs[1], "Dropout", domain=COMPOSITE)
    draw = {} if drawing is None else {"draw": attribute(drawing, "node")}
    return [b.op("DropoutGrad", *node.inputs[:2], domain=COMPOSITE, ratio=0.5 if ratio is None else ratio, **draw)]


def _scale_why_not(node: ir.Node) -> str | None:
    return None if scalar(node.inputs[1]) is not None else "the scale is not a constant"


def _scale(b: Builder, node: ir.Node) -> list[ir.Value]:
    x, number = node.inputs[0], scalar(node.inputs[1])
    assert x is not None and number is not None
    return [b.op("Div" if attribute(node, "scale_down", 0) else "Mul", x, b.scalar(number, x))]


def _div_why_not(node: ir.Node) -> str | None:
    known = all(v is not None and v.shape is not None and v.shape.is_static() for v in node.inputs)
    return None if known else "the shapes of its operands are not known"


def _div_grad(b: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    expand = spec_of(node).expand
    assert expand is not None
    return expand(b, node)


def _plain(op_type: str, *keep: str) -> Rule:
    """A standard operator with the same inputs and the named attributes."""

    def build(b: Builder, node: ir.Node) -> Sequence[ir.Value]:
        options = {k: attribute(node, k) for k in keep}
        outputs = 1 if op_type == "Concat" else len(node.outputs)
        return b.multi(op_type, *node.inputs, outputs=outputs, **options)

    return Rule(build)


def _concat_why_not(node: ir.Node) -> str | None:
    used = any(o.uses() or o.is_graph_output() for o in node.outputs[1:])
    return "the lengths of its inputs are read" if used else None


def _split_why_not(node: ir.Node) -> str | None:
    return None if given(node, 1) is not None else "the lengths are not given"


RULES: dict[str, Rule] = {
    "SoftmaxCrossEntropyLoss": Rule(_loss, _loss_why_not),
    "MaxPoolGrad": Rule(_max_pool_grad, _pool_why_not),
    **{f"{CONTRIB}.{op}": rule for op, rule in {
        "Gelu": _composite("Gelu", approximate="none"),
        "FastGelu": _with_bias("Gelu", "tanh", 1),
        "BiasGelu": _with_bias("Gelu", "none", 1),
        "QuickGelu": _quick("Silu"),
        "GeluGrad": _composite("GeluGrad", approximate="none"),
        "FastGeluGrad": _with_bias("GeluGrad", "tanh", 2),
        "BiasGeluGrad_dX": _with_bias("GeluGrad", "none", 2),
        "BiasFastGeluGrad_dX": _with_bias("GeluGrad", "tanh", 2),
        "QuickGeluGrad": _quick("SiluGrad"),
        "ReluGrad": _composite("ReluGrad"),
        "TanhGrad": _composite("TanhGrad"),
        "SigmoidGrad": _composite("SigmoidGrad"),
        "SoftmaxGrad": _over_axis("SoftmaxGrad", 1),
        "SoftmaxGrad_13": _over_axis("SoftmaxGrad", -1),
        "LogSoftmaxGrad": _over_axis("LogSoftmaxGrad", 1),
        "LogSoftmaxGrad_13": _over_axis("LogSoftmaxGrad", -1),
        "LayerNormalizationGrad": Rule(_layer_norm_grad),
        "GatherGrad": Rule(_gather_grad, _gather_why_not),
        "SoftmaxCrossEntropyLossInternal": Rule(_loss, _loss_why_not),
        "SoftmaxCrossEntropyLossGrad": Rule(_loss_grad, _loss_why_not),
        "SoftmaxCrossEntropyLossInternalGrad": Rule(_loss_grad, _loss_why_not),
        "ConvGrad": Rule(_conv_grad, _conv_why_not),
        "BatchNormalizationGrad": Rule(_batch_norm_grad),
        "DropoutGrad": Rule(_dropout_grad, _dropout_why_not),
        "Scale": Rule(_scale, _scale_why_not),
        "DivGrad": Rule(_div_grad, _div_why_not),
        "ReduceSumTraining": _plain("ReduceSum", "keepdims", "noop_with_empty_axes"),
        "ConcatTraining": dataclasses.replace(_plain("Concat", "axis"), why_not=_concat_why_not),
        "SplitTraining": dataclasses.replace(_plain("Split", "axis"), why_not=_split_why_not),
    }.items()},
}  # fmt: skip
