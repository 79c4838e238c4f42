"""Groups of a profile, and the matrix work of a graph, against figures by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from bench.matrix_work import MatrixProduct, matrix_work, total_flops
from bench.profile_groups import by_group, graph_times, node_group, torch_flops, torch_group
from bench.rates import covering, rate_over
from ortgraph.graph import Signature, TrainingGraph
from ortgraph.ops.builder import Builder
from ortgraph.runtime.profile import NodeTime


def value(name: str, *shape: int, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.val(name, dtype=dtype, shape=list(shape))


def graph_of(inputs: list[ir.Value], make) -> TrainingGraph:
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 18, "ortgraph": 1}, name="tiny")
    made = make(Builder(graph, "test"), *inputs)
    graph.outputs.extend(made)
    return TrainingGraph(ir.Model(graph, ir_version=10), Signature(loss=made[0].name or ""), {})


def test_products_are_counted_with_their_shapes() -> None:
    inputs = [value("x", 2, 3, 4), value("w", 4, 5), value("y", 2, 4, 6), value("c", 5, 4)]

    def make(b: Builder, x, w, y, c):
        tall = b.op("MatMul", x, w)  # one product of 6 rows
        batched = b.op("MatMul", x, y)  # two products
        turned = b.op("Gemm", w, c, transA=1, transB=1)  # [5, 4] of 4
        return [tall, batched, b.op("Relu", turned)]

    work = matrix_work(graph_of(inputs, make))
    assert work == Counter({MatrixProduct(1, 6, 4, 5): 1, MatrixProduct(2, 3, 4, 6): 1, MatrixProduct(1, 5, 4, 5): 1})
    assert total_flops(work) == 2 * (6 * 4 * 5 + 2 * 3 * 4 * 6 + 5 * 4 * 5)


def test_a_convolution_counts_as_the_product_of_its_windows() -> None:
    inputs = [value("x", 2, 3, 8, 8), value("w", 4, 3, 3, 3), value("dy", 2, 4, 8, 8)]

    def make(b: Builder, x, w, dy):
        y = b.op("Conv", x, w, pads=[1, 1, 1, 1])
        dx, dw = b.multi("ConvGrad", dy, x, w, outputs=2, domain="ortgraph", pads=[1, 1, 1, 1])
        return [y, dx, dw]

    work = matrix_work(graph_of(inputs, make))
    assert total_flops(work) == 3 * 2 * (2 * 4 * 8 * 8) * 27
    assert MatrixProduct(1, 128, 27, 4) in work and MatrixProduct(1, 4, 128, 27) in work


def test_attention_counts_what_is_kept_not_what_is_computed_again() -> None:
    inputs = [value(n, 2, 3, 16, 8) for n in ("dy", "q", "k", "v", "y")] + [value("l", 2, 3, 16)]

    def make(b: Builder, dy, q, k, v, y, lse):
        forward = b.multi("Attention", q, k, v, outputs=2, domain="ortgraph", scale=1.0)
        return [*forward, *b.multi("AttentionGrad", dy, q, k, v, y, lse, outputs=3, domain="ortgraph", scale=1.0)]

    assert total_flops(matrix_work(graph_of(inputs, make))) == 6 * 2 * (6 * 16 * 16 * 8)


def test_groups_of_nodes() -> None:
    inputs = [value("x", 2, 3, 4), value("w", 4, 4), value("t", 9, 4), value("i", 2, dtype=ir.DataType.INT64)]

    def make(b: Builder, x, w, t, i):
        scores = b.op("MatMul", x, b.op("Transpose", x, perm=[0, 2, 1]))
        return [
            b.op("MatMul", x, w), scores, b.op("Softmax", scores, axis=-1), b.op("Gather", t, i, axis=0),
            b.op("LogSoftmax", x, axis=-1), b.op("Tanh", x), b.op("Cast", x, to=int(ir.DataType.DOUBLE)),
            b.op("ReduceSum", x, b.ints([0]), keepdims=0),
        ]  # fmt: skip

    graph = graph_of(inputs, make)
    found = {v.producer().op_type: node_group(v.producer()) for v in graph.graph.outputs[1:]}
    assert node_group(graph.graph.outputs[0].producer()) == "products"
    assert found == {
        "MatMul": "attention", "Softmax": "attention", "Gather": "embedding", "LogSoftmax": "loss",
        "Tanh": "element-wise", "Cast": "casts", "ReduceSum": "reductions",
    }  # fmt: skip
    order = list(graph.graph)
    rows = graph_times([NodeTime(n.name or "", n.op_type, 1e3) for n in order], order)
    table = by_group(rows, step_ms=10.0)
    assert table["products"]["ms"] == 1.0
    assert table["products"]["gflops_per_s"] == pytest.approx(2 * 6 * 4 * 4 / 1e-3 / 1e9)
    assert table["overhead"]["ms"] == pytest.approx(10.0 - len(order))


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("aten::addmm", "products"), ("aten::bmm", "attention"), ("aten::_softmax_backward_data", "attention"),
        ("aten::_log_softmax", "loss"), ("aten::_fused_adamw_", "optimizer"), ("aten::native_layer_norm", "norms"),
        ("aten::embedding_dense_backward", "embedding"), ("aten::copy_", "casts"), ("aten::fill_", "movement"),
        ("aten::gelu_backward", "element-wise"), ("aten::convolution_backward", "convolution"),
        ("graph_0_cpp_fused_add_native_layer_norm_3", "norms"), ("cpp_fused_mul_silu_2", "element-wise"),
        ("aten::max_pool2d_with_indices", "pooling"), ("aten::sum", "reductions"), ("## Call CompiledFxGraph x", "overhead"),
        ("mkl::_mkl_linear", "products"), ("something new", "other"),
    ],
)  # fmt: skip
def test_groups_of_pytorch_events(name: str, group: str) -> None:
    assert torch_group(name) == group


def test_operations_of_pytorch_events() -> None:
    assert torch_flops("aten::mm", [[3, 4], [4, 5]]) == 2 * 3 * 4 * 5
    assert torch_flops("aten::addmm", [[5], [3, 4], [4, 5]]) == 2 * 3 * 4 * 5
    assert torch_flops("aten::bmm", [[2, 3, 4], [2, 4, 5]]) == 2 * 2 * 3 * 4 * 5
    assert torch_flops("mkldnn::_linear_pointwise", [[2, 3, 4], [5, 4], [5]]) == 2 * 6 * 4 * 5
    assert torch_flops("aten::linear", [[3, 4], [5, 4]]) == 0  # its addmm counts
    assert torch_flops("aten::add", [[3, 4], [3, 4]]) == 0


def test_the_peak_is_the_rate_over_all_shapes_as_often_as_they_occur() -> None:
    large, small, least = MatrixProduct(1, 100, 100, 100), MatrixProduct(1, 10, 10, 10), MatrixProduct(1, 1, 1, 1)
    work = Counter({large: 2, small: 3, least: 1})
    assert covering(work, 0.98) == [large]
    assert covering(work, 1.0) == [large, small, least]
    rate = rate_over(work, {large: 1e-3, small: 1e-5})
    assert rate == pytest.approx((2 * 2e6 + 3 * 2e3) / (2e-3 + 3e-5))
    assert rate_over(work, {}) == 0.0


def test_figures_of_the_optimizer_benchmark() -> None:
    from bench.optimizer import BYTES, COPIED, OURS, count, figures, parameter_shapes

    assert 1.0e8 < count(parameter_shapes()) < 1.2e8
    rounds = {
        OURS[0]: [0.1, 0.2, 0.1], OURS[1]: [0.3, 0.3, 0.3], "PyTorch fused AdamW": [0.2, 0.3, 0.25],
        "copy, NumPy": [1.0, 1.0, 1.0], "copy, PyTorch": [2.0, 0.5, 2.0],
    }  # fmt: skip
    found = figures(rounds, 10**8)
    assert found["form"] == OURS[0]
    assert found["against_pytorch"]["median"] == pytest.approx(2.0)
    ours, copied = BYTES * 1e8, 8 * COPIED
    shares = [ours / 0.1 / copied, ours / 0.2 / (copied / 0.5), ours / 0.1 / copied]
    assert found["share_of_copy"]["median"] == pytest.approx(float(np.median(shares)))
