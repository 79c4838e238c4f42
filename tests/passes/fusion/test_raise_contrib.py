"""RaiseContrib: every raised operator gives ONNX Runtime's own numbers; what cannot be raised says why."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.passes.fusion.raise_contrib import RULES, RaiseContrib

MS = "com.microsoft"
X = (2, 3, 4)


def single(bench, op_type, shapes, outputs=1, domain=MS, constants=None, dtypes=None, types=None, **attributes):
    """One operator; ``constants`` maps an input position to its value, None leaves it out."""
    constants = constants or {}
    names = {f"i{i}": s for i, s in enumerate(shapes) if i not in constants}

    def body(b, *values):
        given = iter(values)
        inputs = []
        for i in range(len(shapes)):
            if i not in constants:
                inputs.append(next(given))
                continue
            inputs.append(None if constants[i] is None else b.const(constants[i]))
        made = b.multi(op_type, *inputs, outputs=outputs, domain=domain, **attributes)
        for value, like in zip(made, types or [], strict=False):
            value.dtype, value.shape = inputs[like].dtype, inputs[like].shape
        return made

    return bench.make(body, names, dtypes)


def i64(*values):
    return np.array(values, np.int64)


ONES = {
    "Gelu": ({"shapes": [X]}, "Gelu"),
    "FastGelu": ({"shapes": [X]}, "Gelu"),
    "FastGelu with bias": ({"shapes": [X, (4,)]}, "Gelu"),
    "BiasGelu": ({"shapes": [X, (4,)]}, "Gelu"),
    "QuickGelu": ({"shapes": [X], "alpha": 1.0}, "Silu"),
    "GeluGrad": ({"shapes": [X, X]}, "GeluGrad"),
    "FastGeluGrad": ({"shapes": [X, X]}, "GeluGrad"),
    "BiasGeluGrad_dX": ({"shapes": [X, X, (4,)]}, "GeluGrad"),
    "BiasFastGeluGrad_dX": ({"shapes": [X, X, (4,)]}, "GeluGrad"),
    "QuickGeluGrad": ({"shapes": [X, X], "alpha": 1.0}, "SiluGrad"),
    "ReluGrad": ({"shapes": [X, X]}, "ReluGrad"),
    "TanhGrad": ({"shapes": [X, X]}, "TanhGrad"),
    "SigmoidGrad": ({"shapes": [X, X]}, "SigmoidGrad"),
    "SoftmaxGrad": ({"shapes": [X, X], "axis": 2}, "SoftmaxGrad"),
    "SoftmaxGrad_13": ({"shapes": [X, X], "axis": 1}, "SoftmaxGrad"),
    "LogSoftmaxGrad": ({"shapes": [X, X], "axis": -1}, "LogSoftmaxGrad"),
    "LogSoftmaxGrad_13": ({"shapes": [X, X]}, "LogSoftmaxGrad"),
    "LayerNormalizationGrad": (
        {"shapes": [X, X, (4,), (2, 3, 1), (2, 3, 1)], "outputs": 3, "axis": -1}, "LayerNormGrad"),
    "GatherGrad": ({"shapes": [(2,), (2, 3), X], "constants": {0: i64(5, 4)}, "dtypes": {"i1": ir.DataType.INT64}},
                   "EmbeddingGrad"),
    "ConvGrad": ({"shapes": [(2, 4, 4, 4), (2, 3, 6, 6), (4, 3, 3, 3)], "outputs": 3, "kernel_shape": [3, 3]},
                 "ConvGrad"),
    "ConvGrad strided": ({"shapes": [(2, 4, 3, 3), (2, 3, 6, 6), (4, 3, 3, 3)], "outputs": 2, "kernel_shape": [3, 3],
                          "strides": [2, 2], "pads": [1, 1, 1, 1]}, "ConvGrad"),
    "BatchNormalizationGrad": ({"shapes": [X, X, (3,), (3,), (3,)], "outputs": 3, "epsilon": 1e-5}, "BatchNormGrad"),
    "DropoutGrad": ({"shapes": [X, X, (), ()], "dtypes": {"i1": ir.DataType.BOOL},
                     "constants": {2: np.float32(0.25), 3: np.array(True)}}, "DropoutGrad"),
    "Scale": ({"shapes": [X, ()], "constants": {1: np.float32(3)}, "scale_down": 1}, ""),
    "DivGrad": ({"shapes": [X, X, X], "outputs": 2}, ""),
    "DivGrad broadcast": ({"shapes": [X, X, (3, 1)], "outputs": 2}, ""),
    "ReduceSumTraining": ({"shapes": [X, (1,)], "constants": {1: i64(1)}, "keepdims": 0}, ""),
    "ConcatTraining": ({"shapes": [X, X], "axis": 1}, ""),
    "SplitTraining": ({"shapes": [X, (2,)], "constants": {1: i64(1, 2)}, "outputs": 2, "axis": 1}, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", ONES)
def test_same_numbers(bench, case):
    options, composite = ONES[case]
    op_type = case.split(" ")[0]
    graph = single(bench, op_type, **options)
    assert bench.apply(graph, RaiseContrib(), tolerance=1e-4 if "Gelu" in case else 1e-5) == {op_type: 1}
    assert not any(o.startswith(MS) for o in bench.ops(graph))
    assert not composite or f"ortgraph.{composite}" in bench.ops(graph)


def loss_pair(bench, reduction, weight, internal, dims=()):
    """Forward loss and its gradient from log-probabilities, targets 0..2 with class 1 ignored."""

    def body(b, logits, target, w, d_loss):
        if internal:
            ignore = b.const(1, np.int64)
            loss, log_prob = b.multi(
                "SoftmaxCrossEntropyLossInternal", logits, target, w if weight else None, ignore, outputs=2, domain=MS,
                reduction=reduction,
            )  # fmt: skip
            log_prob.dtype, log_prob.shape = logits.dtype, logits.shape
            grad = b.op(
                "SoftmaxCrossEntropyLossInternalGrad", d_loss, log_prob, target, w if weight else None, ignore,
                domain=MS, reduction=reduction,
            )  # fmt: skip
        else:
            options = {"reduction": reduction, "ignore_index": 1}
            inputs = [target, *([w] if weight else [])]
            loss, log_prob = b.multi("SoftmaxCrossEntropyLoss", logits, *inputs, outputs=2, **options)
            grad = b.op("SoftmaxCrossEntropyLossGrad", d_loss, log_prob, *inputs, domain=MS, **options)
        return loss, grad

    d_loss = (6, *dims) if reduction == "none" else ()
    shapes = {"logits": (6, 3, *dims), "target": (6, *dims), "w": (3,), "d_loss": d_loss}
    return bench.make(body, shapes, {"target": ir.DataType.INT64})


@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dims", [(), (2,)])
def test_cross_entropy(bench, reduction, weight, internal, dims):
    graph = loss_pair(bench, reduction, weight, internal, dims)
    suffix = "Internal" if internal else ""
    counts = bench.apply(graph, RaiseContrib())
    grad = f"SoftmaxCrossEntropyLoss{suffix}Grad"
    assert counts == {f"SoftmaxCrossEntropyLoss{suffix}": 1, grad: 1}
    # The gradient takes the total weight from the forward half: nothing else is computed.
    assert bench.ops(graph) == ["ortgraph.CrossEntropy", "ortgraph.CrossEntropyGrad"]


def test_gradient_without_its_forward(bench):
    graph = single(
        bench, "SoftmaxCrossEntropyLossGrad", [(), (6, 3), (6,)], dtypes={"i2": ir.DataType.INT64}, ignore_index=2
    )  # fmt: skip
    assert bench.apply(graph, RaiseContrib()) == {"SoftmaxCrossEntropyLossGrad": 1}


def test_max_pool(bench):
    def body(b, x, dy):
        y, indices = b.multi("MaxPool", x, outputs=2, kernel_shape=[2, 2], strides=[2, 2])
        grad = b.op("MaxPoolGrad", dy, indices, kernel_shape=[2, 2], strides=[2, 2])
        grad.dtype, grad.shape = x.dtype, x.shape
        return y, grad

    graph = bench.make(body, {"x": (2, 3, 4, 4), "dy": (2, 3, 2, 2)})
    assert bench.apply(graph, RaiseContrib()) == {"MaxPoolGrad": 1}


@pytest.mark.parametrize(
    ("op_type", "options", "word"),
    [
        ("QuickGelu", {"shapes": [X]}, "slope 1.702"),
        ("SoftmaxGrad", {"shapes": [X, X], "axis": 1}, "from axis 1 on"),
        ("GatherGrad", {"shapes": [(2,), (2, 3), X], "dtypes": {"i0": ir.DataType.INT64, "i1": ir.DataType.INT64}},
         "not a constant"),
        ("GatherGrad", {"shapes": [(3,), (2,), (5, 2, 4)], "constants": {0: i64(5, 3, 4)}, "axis": 1,
                        "dtypes": {"i1": ir.DataType.INT64}}, "axis 1 of 3"),
        ("DropoutGrad", {"shapes": [X, X, ()], "dtypes": {"i1": ir.DataType.BOOL}}, "ratio is not a constant"),
        ("DropoutGrad", {"shapes": [X, X, ()], "dtypes": {"i1": ir.DataType.BOOL}, "constants": {2: np.float32(0.5)}},
         "training mode"),
        ("Scale", {"shapes": [X, ()]}, "scale is not a constant"),
        ("DivGrad", {"shapes": [("n", 3), ("n", 3), (3,)], "outputs": 2}, "not known"),
        ("ConvGrad", {"shapes": [(2, 4, 6, 6), (2, 3, 6, 6), (4, 3, 3, 3)], "auto_pad": "SAME_UPPER"}, "auto_pad"),
        ("ConcatTraining", {"shapes": [X, X], "outputs": 2, "axis": 1}, "lengths"),
    ],
)  # fmt: skip
def test_refusals(bench, op_type, options, word):
    reasons = bench.refusals(single(bench, op_type, **options), RaiseContrib())
    assert len(reasons) == 1 and word in reasons[0]


def test_every_rule_is_tried():
    tried = {f"{MS}.{case.split(' ')[0]}" for case in ONES}
    tried |= {"SoftmaxCrossEntropyLoss", "MaxPoolGrad", f"{MS}.SoftmaxCrossEntropyLossGrad"}
    tried |= {f"{MS}.SoftmaxCrossEntropyLossInternal{s}" for s in ("", "Grad")}
    assert tried == set(RULES)


def test_plain_gelu_operator_is_left(bench):
    graph = bench.make(lambda b, x: b.op("Relu", b.op("FusedMatMul", x, x, domain=MS)), {"x": (3, 3)})
    assert bench.refusals(graph, RaiseContrib()) == []
