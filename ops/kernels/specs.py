"""Operator table: compiled kernels (domain ``ortgraph.kernels``)."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ortgraph.ops.kernels.table import KERNELS as TABLE
from ortgraph.ops.kernels.table import KernelEntry, output_types
from ortgraph.ops.kernels.windows import Window, pooled
from ortgraph.ops.shapes import Types, attribute, elements_flops, given, like, normalized_axis, retyped, shape_of, typed
from ortgraph.ops.spec import COMPOSITE, InferRule, OpSpec, lookup, register
from ortgraph.ops.spec import KERNELS as DOMAIN


def _as_composite(name: str) -> InferRule:
    """The composite's own rule, looked up when it is used: families load in any order."""

    def rule(node: ir.Node) -> Types | None:
        infer = lookup(COMPOSITE, name).infer
        return [] if infer is None else infer(node)

    return rule


def _statistics(node: ir.Node, x: ir.Value | None):
    shape = shape_of(x)
    if shape is None:
        return retyped(x, None)
    first = normalized_axis(attribute(node, "axis", -1), len(shape))
    return retyped(x, (*shape[:first], *[1] * (len(shape) - first)))


def _layer_norm(node: ir.Node) -> Types:
    x = given(node, 0)
    return [typed(x), *[_statistics(node, x)] * 2][: len(node.outputs)]


def _add_layer_norm(node: ir.Node) -> Types:
    a = given(node, 0)
    return [typed(a), typed(a), *[_statistics(node, a)] * 2][: len(node.outputs)]


def _bias_gelu_grad(node: ir.Node) -> Types:
    x = given(node, 1)
    shape = shape_of(x)
    return [typed(given(node, 0)), retyped(x, None if shape is None else shape[-1:])][: len(node.outputs)]


def _bias_grad(node: ir.Node) -> Types:
    dy = given(node, 0)
    shape = shape_of(dy)
    if shape is None:
        return [retyped(dy, None)]
    lead = [1] * (len(shape) - 1) if attribute(node, "keepdims", 0) else []
    return [retyped(dy, (*lead, shape[-1]))]


def _log_sum_exp(node: ir.Node) -> Types:
    shape = shape_of(given(node, 0))
    return [(ir.DataType.FLOAT, None if shape is None else (*shape[:-1], 1))]


def _multi(states: int) -> InferRule:
    def rule(node: ir.Node) -> Types:
        has = states if states != 1 or attribute(node, "momentum", 0) else 0
        tensors = (len(node.inputs) - 4) // (2 + has)
        return [typed(given(node, 4 + (2 + has) * t + i)) for t in range(tensors) for i in (0, *range(2, 2 + has))][
            : len(node.outputs)
        ]

    return rule


def _transpose(node: ir.Node) -> Types:
    x = given(node, 0)
    shape = shape_of(x)
    if shape is None:
        return [retyped(x, None)]
    perm = attribute(node, "perm") or range(len(shape) - 1, -1, -1)
    return [retyped(x, tuple(shape[i] for i in perm))]


def _conv(node: ir.Node) -> Types:
    """Y of Conv from the shapes of X and W."""
    x, w = given(node, 0), given(node, 1)
    size, window = shape_of(x), shape_of(w)
    if size is None or window is None or not all(isinstance(d, int) for d in (*size[2:], *window)):
        return [retyped(x, None)]
    sizes = Window.of(node, size, window)
    return [retyped(x, (size[0], window[0], *sizes.out))]


def _max_pool(node: ir.Node) -> Types:
    x = given(node, 0)
    shape = shape_of(x)
    if shape is None or not all(isinstance(d, int) for d in shape[2:]):
        return [retyped(x, None), (ir.DataType.INT64, None)][: len(node.outputs)]
    made = (*shape[:2], *pooled(node, [int(d) for d in shape[2:]]))
    return [retyped(x, made), (ir.DataType.INT64, made)][: len(node.outputs)]


_INFER: dict[str, InferRule] = {
    "Conv": _conv,
    "MaxPool": _max_pool,
    "MultiAdamW": _multi(2),
    "MultiLAMB": _multi(2),
    "MultiSGD": _multi(1),
    "EmbeddingAdamW": like(2, 5, 6),
    "EmbeddingGradAdd": like(2),
    "BiasGelu": like(0),
    "BiasGeluGrad": _bias_gelu_grad,
    "LayerNorm": _layer_norm,
    "AddLayerNorm": _add_layer_norm,
    "LayerNormGradAdd": _as_composite("LayerNormGrad"),
    "AddLayerNormGrad": _as_composite("LayerNormGrad"),
    "Transpose": _transpose,
    "Softmax": like(0),
    **{name: like(0) for name in ("Sigmoid", "Log", "Sqrt", "Erf", "Elu")},
    "ScaledMaskedSoftmax": like(0),
    "ScaledSoftmaxGrad": like(0),
    "LogSumExp": _log_sum_exp,
    "CrossEntropyStatisticsGrad": like(1),
    "BiasGrad": _bias_grad,
}
_ELEMENTWISE = frozenset({
    "Gelu", "GeluGrad", "Silu", "SiluGrad", "ReluGrad", "TanhGrad", "SigmoidGrad", "DropoutGrad", "Sigmoid", "Log", "Sqrt",
    "Erf", "Elu",
})  # fmt: skip
_OPTIMIZERS = frozenset({"AdamW", "LAMB", "SGD", "MultiAdamW", "MultiLAMB", "MultiSGD", "EmbeddingAdamW"})


def _retyped(rule: InferRule, entry: KernelEntry, op_type: str) -> InferRule:
    """The rule with the output types that the variant's name says."""

    def retyped_rule(node: ir.Node) -> Types | None:
        found, types = rule(node), output_types(op_type)
        if found is None:
            return None
        return [
            made if made is None or name not in types else (types[name], made[1])
            for name, made in zip(entry.outputs, found, strict=False)
        ]

    return retyped_rule if entry.named_groups else rule


def _flops(entry: KernelEntry) -> Callable[[ir.Node], int]:
    if entry.name != "Product":
        return elements_flops(8)

    def rule(node: ir.Node) -> int:
        count = lookup(COMPOSITE, entry.name).flops
        return 0 if count is None else count(node)

    return rule


def _spec(entry: KernelEntry, op_type: str) -> OpSpec:
    return OpSpec(
        DOMAIN, op_type, elementwise=entry.name in _ELEMENTWISE, recompute=entry.name not in _OPTIMIZERS,
        inplace=entry.inplace, infer=_retyped(_INFER.get(entry.name) or _as_composite(entry.name), entry, op_type),
        flops=_flops(entry), doc=entry.doc,
        optional_outputs=tuple(i for i, name in enumerate(entry.outputs) if name.endswith("?")),
    )  # fmt: skip


register(*[_spec(entry, op_type) for entry in TABLE.values() for op_type in entry.variants()])
