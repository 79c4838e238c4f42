"""Random operators of forward models: functions of key, step and node, their gradients those of what was drawn."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import ortgraph

ROWS = 4000
DRAWS = {
    "Bernoulli": "u = Sigmoid(h) p = Mul(u, zero) q = Add(p, share) r = Bernoulli(q)",
    "RandomNormalLike": "r = RandomNormalLike<mean=1.0, scale=2.0>(h)",
    "RandomUniformLike": "r = RandomUniformLike<low=-1.0, high=3.0>(h)",
    "RandomNormal": f"r = RandomNormal<shape=[{ROWS}, 3], mean=1.0, scale=2.0>()",
    "RandomUniform": f"r = RandomUniform<shape=[{ROWS}, 3], low=-1.0, high=3.0>()",
    "Multinomial": "l = Log(rates) e = Expand(l, many) s = Multinomial<sample_size=3>(e) r = Cast<to=1>(s)",
}
SYMBOLIC = ("Bernoulli", "RandomNormalLike", "RandomUniformLike")
MOMENTS = {"Bernoulli": (0.3, 0.21**0.5), "Multinomial": (1.3, 0.9)}  # of classes 0, 1, 2 at 0.3, 0.1, 0.6
BATCH = {"x": np.random.default_rng(1).standard_normal((ROWS, 4)).astype(np.float32)}


def model_of(kind: str) -> onnx.ModelProto:
    rows = "n" if kind in SYMBOLIC else ROWS
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> '
        f"g (float[{rows},4] x) => (float loss, float[{rows},3] r) "
        f"<float zero = {{0}}, float share = {{0.3}}, int64[2] many = {{{ROWS},3}}, float[3] rates = {{0.3, 0.1, 0.6}}> "
        f"{{ h = MatMul(x, w) {DRAWS[kind]} y = Mul(h, r) loss = ReduceSum<keepdims=0>(y) }}"
    )
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return model


@pytest.mark.parametrize("kind", DRAWS)
def test_draws_have_their_distribution_and_their_gradient(kind, tmp_path):
    graph = ortgraph.from_onnx(model_of(kind), "loss", ["w"])
    assert not {n.op_type for n in graph.graph if not n.domain} & set(DRAWS)
    step = ortgraph.optimize(graph, "O2", optimizer=ortgraph.optim.SGD(lr=0.0)).graph
    plain, first, second = (ortgraph.TrainingSession(g) for g in (graph, step, step))
    got = plain.results(BATCH)
    drawn = got["r"].astype(np.float64)
    mean, deviation = MOMENTS.get(kind, (1.0, 2.0 if "Normal" in kind else 4 / 12**0.5))
    assert (
        abs(drawn.mean() - mean) < 5 * deviation / drawn.size**0.5 and abs(drawn.std() - deviation) < 0.05 * deviation
    )
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 0.08
    np.testing.assert_allclose(got["w.grad"], BATCH["x"].T.astype(np.float64) @ drawn, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(first.results(BATCH)["r"], got["r"], rtol=1e-5, atol=1e-5)
    first.step(BATCH)
    later = first.results(BATCH)["r"]
    assert abs(np.corrcoef(later.ravel(), drawn.ravel())[0, 1]) < 0.05
    second.load_checkpoint(first.save_checkpoint(tmp_path / "one"))
    assert np.array_equal(second.results(BATCH)["r"], later)
    assert ortgraph.TrainingSession(ortgraph.load(graph.save(tmp_path / "g.onnx"))).loss(BATCH) == plain.loss(BATCH)


def test_draws_of_two_nodes_and_of_other_sizes():
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x, float[4,3] w) => (float loss, float[n,3] a, float16[n,3] b) '
        "{ h = MatMul(x, w) a = RandomNormalLike(h) b = RandomNormalLike<dtype=10>(h) c = Mul(h, a) "
        "loss = ReduceSum<keepdims=0>(c) }"
    )
    model = onnx.parser.parse_model(text)
    del model.graph.input[1]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w"))
    session = ortgraph.TrainingSession(ortgraph.from_onnx(model, "loss"))
    for rows in (1, 700):
        got = session.results({"x": BATCH["x"][:rows]})
        assert got["a"].shape == got["b"].shape == (rows, 3) and got["b"].dtype == np.float16
    assert abs(np.corrcoef(got["a"].ravel(), got["b"].ravel())[0, 1]) < 0.1
