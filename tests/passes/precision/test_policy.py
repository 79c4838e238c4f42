"""Which operators run low, follow or stay, and what a constant of the wrong size does."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.errors import InputError
from ortgraph.graph.edit import MODULE_KEY
from ortgraph.ops.builder import Builder
from ortgraph.ops.spec import COMPOSITE, CONTRIB
from ortgraph.passes.precision.policy import FOLLOW, KEEP, MOVE, RUN, Policy, matching


class Maker:
    """Nodes on float32 inputs of given shapes."""

    def __init__(self):
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="g")
        self.build = Builder(self.graph, "test")

    def value(self, *shape, dtype=ir.DataType.FLOAT):
        value = ir.val(f"x{len(self.graph.inputs)}", dtype=dtype, shape=list(shape))
        self.graph.inputs.append(value)
        return value

    def node(self, op_type, *inputs, outputs=1, domain="", **attributes):
        made = self.build.multi(op_type, *inputs, outputs=outputs, domain=domain, **attributes)
        return made[0].producer()


@pytest.fixture
def make():
    return Maker()


def kind(node, precision="bf16", **options):
    return Policy.of(precision, **options).treatment(node).kind


def test_products_convolution_and_attention_run_low(make):
    x, w = make.value(4, 8), make.value(8, 6)
    assert kind(make.node("MatMul", x, w)) == RUN
    assert kind(make.node("Gemm", x, w, make.value(6))) == RUN
    assert kind(make.node("FusedMatMul", x, w, domain=CONTRIB, alpha=2.0)) == RUN
    image, kernel = make.value(2, 3, 8, 8), make.value(4, 3, 3, 3)
    convolved = make.node("Conv", image, kernel)
    assert kind(convolved) == RUN
    assert kind(make.node("ConvGrad", convolved.outputs[0], image, kernel, outputs=3, domain=COMPOSITE)) == RUN
    q = make.value(2, 2, 4, 8)
    assert kind(make.node("Attention", q, q, q, outputs=2, domain=COMPOSITE, scale=1.0)) == RUN


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Exp", "Log", "Sqrt", "ReduceLogSumExp"])
def test_what_overflows_or_cancels_stays(make, op):
    assert kind(make.node(op, make.value(4, 8))) == KEEP


def test_losses_and_updates_stay(make):
    logits, target = make.value(4, 8), make.value(4, dtype=ir.DataType.INT64)
    loss = make.node("CrossEntropy", logits, target, outputs=3, domain=COMPOSITE, reduction="mean", ignore_index=-100)
    assert kind(loss) == KEEP
    step, w = make.value(dtype=ir.DataType.INT64), make.value(4)
    assert kind(make.node("AdamW", make.value(), step, w, w, w, w, outputs=3, domain=COMPOSITE)) == KEEP


@pytest.mark.parametrize("op", ["Relu", "Tanh", "Sigmoid", "Erf", "Neg"])
def test_element_wise_operators_follow(make, op):
    assert kind(make.node(op, make.value(4, 8))) == FOLLOW


def test_norms_and_reductions_follow_and_movement_moves(make):
    x, scale = make.value(4, 8), make.value(8)
    assert kind(make.node("LayerNormalization", x, scale, outputs=3, axis=-1)) == FOLLOW
    assert kind(make.node("ReduceSum", x, make.build.ints([0]))) == FOLLOW
    assert kind(make.node("Gelu", x, domain=COMPOSITE)) == FOLLOW
    assert kind(make.node("Transpose", x, perm=[1, 0])) == MOVE
    assert kind(make.node("Reshape", x, make.build.ints([8, 4]))) == MOVE
    assert kind(make.node("Expand", x, make.build.ints([2, 4, 8]))) == FOLLOW  # no processor kernel moves bfloat16 so


def test_an_unknown_operator_stays(make):
    assert kind(make.node("Mystery", make.value(4, 8), domain="some.vendor")) == KEEP


def test_products_without_a_low_form_stay(make):
    x, v = make.value(4, 8), make.value(8)
    reasons = {
        "no matrix": make.node("MatMul", x, v),
        "not float32": make.node("MatMul", make.value(4, 8, dtype=ir.DataType.DOUBLE), make.value(8, 2)),
        "beta is not 1": make.node("Gemm", x, make.value(8, 2), make.value(2), beta=0.5),
        "batch dimensions": make.node("FusedMatMul", x, make.value(8, 2), domain=CONTRIB, transBatchA=1),
    }
    for reason, node in reasons.items():
        treatment = Policy.of("bf16").treatment(node)
        assert treatment.kind == KEEP and reason in treatment.reason


@pytest.mark.parametrize(("precision", "mask", "safe"), [
    ("fp16", -3.4e38, False), ("fp16", -1e9, False), ("fp16", -6e4, True), ("fp16", -np.inf, True),
    ("bf16", float(np.finfo(np.float32).min), False), ("bf16", -3e38, True), ("bf16", -1e9, True),
    ("bf16", -np.inf, True),
])  # fmt: skip
def test_masks_beyond_the_range_keep_the_operator(make, precision, mask, safe):
    node = make.node("Add", make.value(4, 8), make.build.const(np.array([0.0, mask] * 4), np.float32))
    treatment = Policy.of(precision).treatment(node)
    assert (treatment.kind == FOLLOW) == safe
    assert safe or "beyond" in treatment.reason


@pytest.mark.parametrize(("precision", "epsilon", "safe"), [
    ("fp16", 1e-12, False), ("fp16", 1e-8, False), ("fp16", 1e-5, True), ("fp16", 0.0, True), ("bf16", 1e-12, True),
])  # fmt: skip
def test_epsilons_that_would_be_zero_keep_the_operator(make, precision, epsilon, safe):
    node = make.node("Add", make.value(4, 1), make.build.const(epsilon, np.float32))
    treatment = Policy.of(precision).treatment(node)
    assert (treatment.kind == FOLLOW) == safe
    assert safe or "is 0 in fp16" in treatment.reason


def test_overrides_name_operators_modules_and_their_tails(make):
    node = make.node("MatMul", make.value(4, 8), make.value(8, 2))
    node.metadata_props[MODULE_KEY] = "model.encoder.layer.3.attention"
    for pattern in ("MatMul", "layer.3.*", "layer.3.attention", "model.*", "*.3.*", "encoder.layer.?.attention"):
        assert matching(node, (pattern,)) == pattern, pattern
        assert kind(node, keep=("Gelu", pattern)) == KEEP
    for pattern in ("layer.1.*", "layer.3", "attention.*.x", "Mat", "layer.33.*"):
        assert matching(node, (pattern,)) is None, pattern
    other = make.node("MatMul", make.value(4, 8), make.value(8, 2))
    other.metadata_props[MODULE_KEY] = "layer.3"
    assert matching(other, ("layer.3.*",)) == "layer.3.*"
    softmax = make.node("Softmax", make.value(4, 8))
    assert kind(softmax, low=("Softmax",)) == FOLLOW and kind(softmax, low=("Softmax",), keep=("Softmax",)) == KEEP


def test_an_unknown_precision_is_refused():
    with pytest.raises(InputError, match="unknown precision 'fp32'"):
        Policy.of("fp32")
