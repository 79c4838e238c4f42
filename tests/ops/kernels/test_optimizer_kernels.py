"""AdamW, its multi-tensor and embedding forms, and the embedding gradient."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(12)


def f32(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("decay", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.95), (0.0, 0.9)])
def test_adamw_follows_pytorch(kernel, decay, betas):
    """Twelve steps from zero moments: as near to float64 as PyTorch's fused form, which rounds in another order."""
    shape, rate, epsilon = (37, 53), 3e-3, 1e-8
    w, m, v = f32(*shape), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    parameter = torch.nn.Parameter(torch.tensor(w))
    double = torch.nn.Parameter(torch.tensor(w, dtype=torch.float64))
    optimizers = [
        torch.optim.AdamW([p], lr=rate, betas=betas, eps=epsilon, weight_decay=decay, fused=p.dtype == torch.float32)
        for p in (parameter, double)
    ]
    attributes = {"beta1": betas[0], "beta2": betas[1], "epsilon": epsilon, "weight_decay": decay}
    for step in range(1, 13):
        g = f32(*shape)
        for p, optimizer in zip((parameter, double), optimizers, strict=True):
            p.grad = torch.tensor(g).to(p.dtype)
            optimizer.step()
        inputs = [np.float32(rate), np.int64(step), w, g, m, v]
        w, m, v = kernel("AdamW", inputs, 3, **attributes).run()
    state = optimizers[1].state[double]
    ours = np.abs(w - double.detach().numpy()).max()
    theirs = np.abs(parameter.detach().numpy() - double.detach().numpy()).max()
    assert ours <= 1.5 * theirs + 1e-9
    np.testing.assert_allclose(m, state["exp_avg"].numpy(), rtol=1e-5, atol=2e-7)
    np.testing.assert_allclose(v, state["exp_avg_sq"].numpy(), rtol=2e-6)


def test_gradient_scale_multiplies_the_gradient(kernel):
    w, g, m, v = f32(70), f32(70), f32(70), f32(70) ** 2
    head = [np.float32(1e-2), np.int64(5)]
    scaled = kernel("AdamW", [*head, w, g, m, v, np.float32(0.25)], 3).run()
    plain = kernel("AdamW", [*head, w, g * np.float32(0.25), m, v], 3).run()
    assert all(np.array_equal(a, b) for a, b in zip(scaled, plain, strict=True))
    assert not np.array_equal(scaled[0], kernel("AdamW", [*head, w, g, m, v], 3).run()[0])


def test_attributes_stand_for_their_decimals(kernel):
    """1 - 0.999 in float32 is off by 1.3e-5; the second moment must not be."""
    g = f32(64)
    zero = np.zeros(64, np.float32)
    _, _, v = kernel("AdamW", [np.float32(1e-3), np.int64(1), f32(64), g, zero, zero], 3, beta2=0.999).run()
    np.testing.assert_allclose(v, 0.001 * g.astype(np.float64) ** 2, rtol=3e-7)


def test_multi_tensor_form_equals_single_tensors(kernel):
    head, scale = [np.float32(1e-2), np.int64(9)], np.float32(0.5)
    tensors = [[f32(*s), f32(*s), f32(*s), f32(*s) ** 2] for s in ((100003,), (), (3, 5), (0, 4), (256, 256))]
    got = kernel("MultiAdamW", [*head, scale, None, *sum(tensors, [])], 15).run()
    for t, tensor in enumerate(tensors):
        for a, b in zip(kernel("AdamW", [*head, *tensor, scale], 3).run(), got[3 * t : 3 * t + 3], strict=True):
            assert np.array_equal(a, b) and a.shape == tensor[0].shape


@pytest.mark.parametrize(
    "rows,width,shape", [(50, 8, (4, 9)), (1900, 67, (300,)), (3, 1, (500,)), (10, 5, (0,)), (40, 256, ())]
)
def test_embedding_gradient(kernel, rows, width, shape):
    indices, dy = RNG.integers(0, rows, shape), f32(*shape, width)
    if indices.size:
        indices = np.where(RNG.random(shape) < 0.3, 2, indices)  # repeated rows
    for padding in (-1, 2):
        expected = np.zeros((rows, width))
        flat = indices.reshape(-1)
        kept = flat != padding
        np.add.at(expected, flat[kept], dy.astype(np.float64).reshape(-1, width)[kept])
        (got,) = kernel("EmbeddingGrad", [dy, indices], 1, rows=rows, padding_idx=padding).run()
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        assert (got[np.setdiff1d(np.arange(rows), flat[kept])] == 0).all()


def test_negative_indices_count_from_the_end(kernel):
    dy = f32(3, 4)
    (got,) = kernel("EmbeddingGrad", [dy, np.array([-1, 0, 4])], 1, rows=5).run()
    np.testing.assert_allclose(got[4], dy[0] + dy[2], rtol=1e-6)


@pytest.mark.parametrize("scale", [None, 0.5, np.inf])
@pytest.mark.parametrize("rows,width", [(1900, 67), (30, 256), (7, 1)])
def test_embedding_update_equals_dense_update_bit_for_bit(kernel, rows, width, scale):
    dy, indices = f32(4, 25, width), RNG.integers(0, rows, (4, 25))
    w, m, v = f32(rows, width), f32(rows, width), f32(rows, width) ** 2
    head, tail = [np.float32(1e-2), np.int64(9)], [] if scale is None else [np.float32(scale)]
    (dense,) = kernel("EmbeddingGrad", [dy, indices], 1, rows=rows, padding_idx=3).run()
    expected = kernel("AdamW", [*head, w, dense, m, v, *tail], 3).run()
    got = kernel("EmbeddingAdamW", [*head, w, dy, indices, m, v, *tail], 3, padding_idx=3).run()
    for a, b in zip(expected, got, strict=True):
        assert np.array_equal(a, b, equal_nan=True)


def expansion(op, inputs, outputs, **attributes):
    """The reference expansion in float64."""
    import onnx_ir as ir
    from onnx.reference import ReferenceEvaluator

    from ortgraph.graph import TrainingGraph
    from ortgraph.ops import Builder
    from ortgraph.ops.expand import expand_composites

    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18, "ortgraph": 1}, name="case")
    feeds, values = {}, []
    for i, x in enumerate(inputs):
        if x is None:
            values.append(None)
            continue
        wide = np.asarray(x, np.float64) if np.asarray(x).dtype == np.float32 else np.asarray(x)
        feeds[f"x{i}"] = wide
        values.append(ir.val(f"x{i}", dtype=ir.DataType.from_numpy(wide.dtype), shape=list(wide.shape)))
        graph.inputs.append(values[-1])
    made = Builder(graph, "test").multi(op, *values, outputs=outputs, domain="ortgraph", **attributes)
    graph.outputs.extend(made)
    case = TrainingGraph(ir.Model(graph, ir_version=10))
    expand_composites(case)
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(ir.serde.serialize_model(case.model)).run(None, feeds)


UPDATES = [
    ("AdamW", 2, {"weight_decay": 0.1}), ("LAMB", 2, {}), ("LAMB", 2, {"max_trust": 0.5, "bias_correction": 0}),
    ("LAMB", 2, {"adapt": 0}), ("SGD", 0, {"weight_decay": 0.1}), ("SGD", 1, {"momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", 1, {"momentum": 0.9, "dampening": 0.2}), ("SGD", 1, {"momentum": 0.9, "nesterov": 1}),
]  # fmt: skip


def operands(op, states, shape, scale=0.5, skip=None, step=3):
    w, g, first, second = f32(*shape), f32(*shape), f32(*shape), f32(*shape) ** 2
    head = [np.float32(1e-2), np.int64(step), w, g]
    empty = [None] if op == "SGD" and not states else []
    guard = [np.float32(scale), None if skip is None else np.array(skip)]
    return [*head, *[first, second][:states], *empty, *guard[: 1 if skip is None else 2]]


@pytest.mark.parametrize("op,states,attributes", UPDATES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (17,), (0, 3), (5, 33), (129, 255), (70001,)])
@pytest.mark.parametrize("step", [1, 9])
def test_updates_against_their_expansions(kernel, op, states, attributes, shape, step):
    inputs = operands(op, states, shape, step=step)
    expected = expansion(op, inputs, 1 + states, **attributes)
    for threads in (1, 2):
        for got, want in zip(kernel(op, inputs, 1 + states, threads, **attributes).run(), expected, strict=True):
            assert got.shape == want.shape
            size = np.linalg.norm(want.ravel()) + 1e-30
            assert np.linalg.norm((got - want).ravel()) <= 5e-7 * size + 1e-8


@pytest.mark.parametrize("op,states,attributes", UPDATES, ids=str)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_gradient_that_is_not_finite(kernel, op, states, attributes, bad):
    """It spoils what the expansion spoils; with Skip nothing changes, in place or not."""
    inputs = operands(op, states, (5, 33))
    inputs[3][2, 7] = bad
    got = kernel(op, inputs, 1 + states, **attributes).run()
    for a, b in zip(got, expansion(op, inputs, 1 + states, **attributes), strict=True):
        assert np.array_equal(np.isfinite(a), np.isfinite(b))
    skipping = [*inputs, np.array(True)]
    runner = kernel(op, skipping, 1 + states, **attributes)
    old = [inputs[2], *inputs[4 : 4 + states]]
    results = [runner.run(), runner.run_inplace([(2, 0), *((4 + i, 1 + i) for i in range(states))], old)]
    for made in results:
        assert all(np.array_equal(a, b) for a, b in zip(made, old, strict=True))
    going = kernel(op, [*inputs, np.array(False)], 1 + states, **attributes).run()
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(going, got, strict=True))


@pytest.mark.parametrize("op,states,attributes", UPDATES, ids=str)
@pytest.mark.parametrize("skip", [None, False, True])
def test_many_tensors_equal_one_by_one(kernel, op, states, attributes, skip):
    shapes = ((40003,), (), (0, 4), (3, 5), (256, 256))
    each = [operands(op, states, shape, skip=skip) for shape in shapes]
    for one in each:
        one[0], one[1] = each[0][0], each[0][1]
    tensors = [x for one in each for x in one[2 : 4 + states]]
    flag = None if skip is None else np.array(skip)
    many = kernel(
        f"Multi{op}", [*each[0][:2], np.float32(0.5), flag, *tensors], len(shapes) * (1 + states), **attributes
    )
    got = many.run()
    for t, one in enumerate(each):
        for a, b in zip(kernel(op, one, 1 + states, **attributes).run(), got[t * (1 + states) :], strict=False):
            assert np.array_equal(a, b) and a.shape == b.shape


def test_trust_ratio_of_zero_norms(kernel):
    zero = np.zeros(33, np.float32)
    for w, g in ((zero, f32(33)), (f32(33), zero)):
        inputs = [np.float32(0.1), np.int64(1), w, g, zero, zero]
        got = kernel("LAMB", inputs, 3, weight_decay=0.0).run()
        for a, b in zip(got, expansion("LAMB", inputs, 3, weight_decay=0.0), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
            assert np.isfinite(a).all()
