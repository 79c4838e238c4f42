"""Operator table: optimizer updates."""

from __future__ import annotations

import onnx_ir as ir

from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import Types, decimal, element_count, given, operands, typed
from ortgraph.ops.spec import COMPOSITE, OpSpec, register


def _adamw_types(node: ir.Node) -> Types:
    return [typed(given(node, 2)), typed(given(node, 4)), typed(given(node, 5))][: len(node.outputs)]


def _expand_adamw(b: Builder, node: ir.Node) -> list[ir.Value]:
    rate, step, w, g, m, v = operands(node, 6)
    beta1, beta2 = decimal(node, "beta1", 0.9), decimal(node, "beta2", 0.999)
    epsilon, decay = decimal(node, "epsilon", 1e-8), decimal(node, "weight_decay", 0.01)
    scale = given(node, 6)
    # Scalars in double, as PyTorch computes them: 1 - beta^t loses all digits in float32 at small t and beta near 1.
    double = ir.DataType.DOUBLE
    one = b.const(1.0, double)
    t, rate64 = b.op("Cast", step, to=double), b.op("Cast", rate, to=double)
    correction1 = b.op("Sub", one, b.op("Pow", b.const(beta1, double), t))
    correction2 = b.op("Sub", one, b.op("Pow", b.const(beta2, double), t))
    size = b.op("Cast", b.op("Div", rate64, correction1), to=w.dtype)
    root2 = b.op("Cast", b.op("Sqrt", correction2), to=w.dtype)
    if decay:
        kept = b.op("Sub", one, b.op("Mul", rate64, b.const(decay, double)))
        w = b.op("Mul", w, b.op("Cast", kept, to=w.dtype))
    if scale is not None:
        g = b.op("Mul", g, scale if scale.dtype == g.dtype else b.op("Cast", scale, to=g.dtype))
    if g.dtype != m.dtype:
        g = b.op("Cast", g, to=m.dtype)
    new_m = b.op("Add", m, b.op("Mul", b.op("Sub", g, m), b.scalar(1.0 - beta1, m)))
    square = b.op("Mul", b.op("Mul", g, g), b.scalar(1.0 - beta2, v))
    new_v = b.op("Add", b.op("Mul", v, b.scalar(beta2, v)), square)
    denominator = b.op("Add", b.op("Div", b.op("Sqrt", new_v), root2), b.scalar(epsilon, v))
    new_w = b.op("Sub", w, b.op("Mul", b.op("Div", new_m, denominator), size))
    return [new_w, new_m, new_v]


register(
    OpSpec(
        COMPOSITE,
        "AdamW",
        recompute=False,
        infer=_adamw_types,
        expand=_expand_adamw,
        flops=lambda node: 14 * element_count(given(node, 2)),
        doc="W' = (1 - lr decay) W - lr / (1 - beta1^t) M' / (sqrt(V') / sqrt(1 - beta2^t) + epsilon)",
    )
)
