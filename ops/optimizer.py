"""Operator table: optimizer updates and the norm that clipping and overflow tests share.

In every update ``GradScale`` (float32 scalar) is multiplied into the gradient first, and ``Skip`` (bool scalar) makes
every output its old value, bit for bit, whatever the gradient holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import Types, attribute, decimal, element_count, given, operands, typed
from ortgraph.ops.spec import COMPOSITE, OpSpec, register

_DOUBLE = ir.DataType.DOUBLE


def _like(*indices: int):
    """Outputs have the types of these inputs; an output is missing where its input is."""

    def rule(node: ir.Node) -> Types:
        return [typed(given(node, i)) for i in indices][: len(node.outputs)]

    return rule


def _to(b: Builder, value: ir.Value, like: ir.Value) -> ir.Value:
    return value if value.dtype == like.dtype else b.op("Cast", value, to=like.dtype)


def _gradient(b: Builder, g: ir.Value, scale: ir.Value | None, like: ir.Value) -> ir.Value:
    """The scaled gradient in the type of ``like``."""
    if scale is not None:
        g = b.op("Mul", g, _to(b, scale, g))
    return _to(b, g, like)


def _skipping(
    b: Builder, skip: ir.Value | None, old: Sequence[ir.Value], new: Sequence[ir.Value]
) -> list[ir.Value | None]:
    if skip is None:
        return list(new)
    return [b.op("Where", skip, before, after) for before, after in zip(old, new, strict=True)]


def _moments(b: Builder, node: ir.Node, g: ir.Value, m: ir.Value, v: ir.Value) -> tuple[ir.Value, ir.Value]:
    beta1, beta2 = decimal(node, "beta1", 0.9), decimal(node, "beta2", 0.999)
    new_m = b.op("Add", m, b.op("Mul", b.op("Sub", g, m), b.scalar(1.0 - beta1, m)))
    square = b.op("Mul", b.op("Mul", g, g), b.scalar(1.0 - beta2, v))
    return new_m, b.op("Add", b.op("Mul", v, b.scalar(beta2, v)), square)


def _corrections(b: Builder, node: ir.Node, step: ir.Value) -> tuple[ir.Value, ir.Value]:
    """1 - beta1^t and 1 - beta2^t in double, as PyTorch computes them: float32 loses all digits at small t."""
    one, t = b.const(1.0, _DOUBLE), b.op("Cast", step, to=_DOUBLE)
    betas = decimal(node, "beta1", 0.9), decimal(node, "beta2", 0.999)
    first, second = (b.op("Sub", one, b.op("Pow", b.const(beta, _DOUBLE), t)) for beta in betas)
    return first, second


def _expand_adamw(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    rate, step, w, g, m, v = operands(node, 6)
    old = (w, m, v)
    epsilon, decay = decimal(node, "epsilon", 1e-8), decimal(node, "weight_decay", 0.01)
    rate64 = b.op("Cast", rate, to=_DOUBLE)
    correction1, correction2 = _corrections(b, node, step)
    size = b.op("Cast", b.op("Div", rate64, correction1), to=w.dtype)
    root2 = b.op("Cast", b.op("Sqrt", correction2), to=w.dtype)
    if decay:
        kept = b.op("Sub", b.const(1.0, _DOUBLE), b.op("Mul", rate64, b.const(decay, _DOUBLE)))
        w = b.op("Mul", w, b.op("Cast", kept, to=w.dtype))
    new_m, new_v = _moments(b, node, _gradient(b, g, given(node, 6), m), m, v)
    denominator = b.op("Add", b.op("Div", b.op("Sqrt", new_v), root2), b.scalar(epsilon, v))
    new_w = b.op("Sub", w, b.op("Mul", b.op("Div", new_m, denominator), size))
    return _skipping(b, given(node, 7), old, (new_w, new_m, new_v))


def _expand_lamb(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    rate, step, w, g, m, v = operands(node, 6)
    epsilon, decay = decimal(node, "epsilon", 1e-6), decimal(node, "weight_decay", 0.01)
    new_m, new_v = _moments(b, node, _gradient(b, g, given(node, 6), m), m, v)
    mean, root = new_m, b.op("Sqrt", new_v)
    if attribute(node, "bias_correction", 1):
        correction1, correction2 = _corrections(b, node, step)
        mean = b.op("Div", mean, b.op("Cast", correction1, to=w.dtype))
        root = b.op("Div", root, b.op("Cast", b.op("Sqrt", correction2), to=w.dtype))
    direction = b.op("Div", mean, b.op("Add", root, b.scalar(epsilon, v)))
    if decay:
        direction = b.op("Add", direction, b.op("Mul", w, b.scalar(decay, w)))
    size = _to(b, rate, w)
    if attribute(node, "adapt", 1):
        size = b.op("Mul", size, _trust(b, node, w, direction))
    new_w = b.op("Sub", w, b.op("Mul", direction, size))
    return _skipping(b, given(node, 7), (w, m, v), (new_w, new_m, new_v))


def _trust(b: Builder, node: ir.Node, w: ir.Value, direction: ir.Value) -> ir.Value:
    """|W| / |direction|, 1 where either is zero, then within the limits."""
    norms = [b.op("Sqrt", b.op("ReduceSumSquare", x, keepdims=0)) for x in (w, direction)]
    zero, one = b.scalar(0.0, w), b.scalar(1.0, w)
    empty = b.op("Or", *(b.op("Equal", n, zero) for n in norms))
    ratio = b.op("Where", empty, one, b.op("Div", *norms))
    least, most = decimal(node, "min_trust", 0.0), decimal(node, "max_trust", 0.0)
    if least > 0.0:
        ratio = b.op("Max", ratio, b.scalar(least, w))
    return b.op("Min", ratio, b.scalar(most, w)) if most > 0.0 else ratio


def _expand_sgd(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    rate, step, w, g = operands(node, 4)
    momentum, decay = decimal(node, "momentum", 0.0), decimal(node, "weight_decay", 0.0)
    g, skip = _gradient(b, g, given(node, 5), w), given(node, 6)
    if decay:
        g = b.op("Add", g, b.op("Mul", w, b.scalar(decay, w)))
    if not momentum:
        new_w = b.op("Sub", w, b.op("Mul", g, _to(b, rate, w)))
        return _skipping(b, skip, (w,), (new_w,))
    buffer = operands(node, 5)[4]
    kept = b.op("Mul", buffer, b.scalar(momentum, w))
    later = b.op("Add", kept, b.op("Mul", g, b.scalar(1.0 - decimal(node, "dampening", 0.0), w)))
    new_buffer = b.op("Where", b.op("Equal", step, b.const(1, step.dtype)), g, later)
    move = new_buffer
    if attribute(node, "nesterov", 0):
        move = b.op("Add", g, b.op("Mul", new_buffer, b.scalar(momentum, w)))
    new_w = b.op("Sub", w, b.op("Mul", move, _to(b, rate, w)))
    return _skipping(b, skip, (w, buffer), (new_w, new_buffer))


def _expand_squared_norm(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    values = [v if v.dtype == ir.DataType.FLOAT else b.op("Cast", v, to=ir.DataType.FLOAT) for v in node.inputs if v]
    squares = [b.op("ReduceSumSquare", v, keepdims=0) for v in values]
    return [squares[0] if len(squares) == 1 else b.op("Sum", *squares)]


def _update(name: str, flops: int, doc: str, **fields) -> OpSpec:
    return OpSpec(
        COMPOSITE, name, recompute=False, flops=lambda node: flops * element_count(given(node, 2)), doc=doc, **fields
    )


register(
    _update(
        "AdamW", 14, infer=_like(2, 4, 5), expand=_expand_adamw,
        doc="W' = (1 - lr decay) W - lr / (1 - beta1^t) M' / (sqrt(V') / sqrt(1 - beta2^t) + epsilon)",
    ),
    _update(
        "LAMB", 30, infer=_like(2, 4, 5), expand=_expand_lamb,
        doc="W' = W - lr trust(|W| / |U|) U, U = M'/(1 - beta1^t) / (sqrt(V' / (1 - beta2^t)) + epsilon) + decay W",
    ),
    _update(
        "SGD", 6, infer=_like(2, 4), expand=_expand_sgd, optional_outputs=(1,),
        doc="G' = G + decay W; B' = momentum B + (1 - dampening) G', G' at step 1; W' = W - lr B' (lr G' without momentum)",
    ),
    OpSpec(
        COMPOSITE, "SquaredNorm", infer=lambda node: [(ir.DataType.FLOAT, ())], expand=_expand_squared_norm,
        flops=lambda node: 2 * sum(element_count(v) for v in node.inputs if v is not None),
        doc="sum of the squares of all elements of all inputs: infinite or NaN when an element is",
    ),
)  # fmt: skip
