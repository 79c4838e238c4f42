"""Identities between an initializer and its reader: exporters that store equal tensors once make them."""

import numpy as np
import onnx
import pytest

import ortgraph

BATCH = {"x": np.random.default_rng(2).standard_normal((2, 2, 6, 6)).astype(np.float32)}
IDENTITIES = "m = Identity(mean) v0 = Identity(variance) v = Identity(v0) s = Identity(scale)"


def capture(identities, **options):
    s, m, v = ("s", "m", "v") if identities else ("scale", "mean", "variance")
    text = (
        '<ir_version: 8, opset_import: ["" : 18]> g (float[2,2,6,6] x) => (float[2,4,6,6] y, float loss) '
        f"{{ {IDENTITIES if identities else ''} a = Conv(x, w) y = BatchNormalization(a, {s}, bias, {m}, {v}) "
        "b = Sin(y) q = Mul(b, y) loss = ReduceMean<keepdims=0>(q) }"
    )
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in (("w", (4, 2, 1, 1)), ("scale", 4), ("bias", 4), ("mean", 4), ("variance", 4)):
        values = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return ortgraph.from_onnx(model, loss="loss", **options)


@pytest.mark.parametrize("train_batch_norm", [True, False])
def test_statistics_are_buffers_and_train_as_without_identities(train_batch_norm):
    results = []
    for identities in (True, False):
        graph = capture(identities, train_batch_norm=train_batch_norm)
        assert [p.name for p in graph.signature.trainable] == ["w", "scale", "bias"]
        assert [b.name for b in graph.signature.buffers] == ["mean", "variance"]
        optimized = ortgraph.optimize(graph, "O2", optimizer=ortgraph.optim.AdamW(lr=1e-2)).graph
        session = ortgraph.TrainingSession(optimized)
        losses = [session.step(BATCH) for _ in range(2)]
        results.append((losses, session.evaluate(BATCH)["y"], session.state_dict()))
    (losses, y, state), (losses2, y2, state2) = results
    assert losses == pytest.approx(losses2, rel=1e-6)
    np.testing.assert_allclose(y, y2, rtol=1e-5, atol=1e-6)
    assert list(state) == list(state2) == ["w", "scale", "bias", "mean", "variance"]
    for name in state2:
        np.testing.assert_allclose(state[name], state2[name], rtol=1e-5, atol=1e-6)
