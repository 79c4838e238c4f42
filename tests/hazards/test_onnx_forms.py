"""Forms of ONNX operators whose gradients lost a term, against PyTorch in float64."""

# ruff: noqa: E501 - a model is one line of text

from __future__ import annotations

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="compares with PyTorch")
from torch.nn import functional as F  # noqa: E402

import ortgraph  # noqa: E402
from ortgraph.errors import UnsupportedError  # noqa: E402

LABELS = torch.tensor([0, 3, 1, 2])
TARGET = "l = Constant<value=int64[4] {0,3,1,2}>() "
FORMS = {
    "pads of permuted axes": (
        "p = Constant<value_ints=[1,2,2,1]>() a = Constant<value_ints=[1,0]>() y = Pad(t, p, , a)",
        lambda t: F.pad(t, (1, 2, 2, 1)),
    ),
    "pads of one axis": (
        "p = Constant<value_ints=[1,2]>() a = Constant<value_ints=[-1]>() y = Pad(t, p, , a)", lambda t: F.pad(t, (1, 2)),
    ),
    "reflected pads": (
        'p = Constant<value_ints=[2,1,1,3]>() y = Pad<mode="reflect">(t, p)',
        lambda t: F.pad(t[None], (1, 3, 2, 1), mode="reflect")[0],
    ),
    "pads that repeat the edge, or cut": (
        'p = Constant<value_ints=[2,-1]>() a = Constant<value_ints=[-1]>() y = Pad<mode="edge">(t, p, , a)',
        lambda t: F.pad(t, (2, -1), mode="replicate"),
    ),
    "added at repeated places": (
        'i = Constant<value=int64[2,3] {0,0,1,-1,2,2}>() u = Slice(t, rows, three, zero) v = Slice(u, zero, three, rows) '
        'y = ScatterElements<axis=0, reduction="add">(t, i, v)',
        lambda t: t.scatter_add(0, torch.tensor([[0, 0, 1], [3, 2, 2]]), t[1:3, :3]),
    ),
    "parts of a sequence": (
        "k = Constant<value_int=3>() q = SplitToSequence<axis=1>(t, k) i = Constant<value_int=-1>() "
        "j = Constant<value_int=0>() a = SequenceAt(q, i) b = SequenceAt(q, j) y = Mul(a, b)",
        lambda t: t[:, 3:] * t[:, :3],
    ),
    "rows of a sequence": (
        "q = SplitToSequence<axis=0, keepdims=0>(t) i = Constant<value_int=2>() y = SequenceAt(q, i)",
        lambda t: t[2],
    ),
    "a part that is not read": (
        "q, r, u = Split<axis=1>(t, sizes) y = Mul(q, u)", lambda t: t[:, :1] * t[:, 3:],
    ),
    "a part that is only counted": (
        "q, r, u = Split<axis=-1>(t, sizes) f = Floor(r) k = ReduceSum<keepdims=0>(f) h = Mul(q, u) y = Mul(h, k)",
        lambda t: t[:, :1] * t[:, 3:] * t[:, 1:3].floor().sum().detach(),
    ),
    "bounds that cross": (
        "low = Constant<value=float {0.5}>() high = Constant<value=float {0.25}>() c = Clip(t, low, high) y = Mul(c, t)",
        lambda t: t.clamp(0.5, 0.25) * t,
    ),
    "power zero of zero": (
        "e = Constant<value=float[4] {0.0,1.0,2.0,3.0}>() g = Relu(t) c = Pow(g, e) y = Mul(c, t)",
        lambda t: F.relu(t) ** torch.tensor([0.0, 1.0, 2.0, 3.0]).double() * t,
    ),
    "log-probabilities that are read": (
        f"{TARGET} c, p = SoftmaxCrossEntropyLoss(t, l) y = Mul(p, c)",
        lambda t: F.cross_entropy(t, LABELS) * F.log_softmax(t, 1),
    ),
    "resized by rows and by negative axes": (
        'sc = Constant<value_floats=[2.0,3.0]>() y = Resize<axes=[-1,-2], mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(t, , sc)',
        lambda t: t.repeat_interleave(3, 0).repeat_interleave(2, 1),
    ),
}  # fmt: skip


def forward_model(body):
    text = (
        '<ir_version: 8, opset_import: ["" : 18]> g () => (float loss) <float[4,4] w> '
        "{ sizes = Constant<value_ints=[1,2,1]>() zero = Constant<value_ints=[0]>() rows = Constant<value_ints=[1]>() "
        f"three = Constant<value_ints=[3]>() t = Tanh(w) {body} s = Sin(y) m = Mul(s, y) loss = ReduceSum<keepdims=0>(m) }}"
    )
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(3).permutation(np.linspace(-1.4, 1.6, 16)).reshape(4, 4).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return model, weight


@pytest.mark.parametrize("name", FORMS)
def test_gradient(name):
    body, function = FORMS[name]
    model, weight = forward_model(body)
    wide = torch.tensor(weight, dtype=torch.float64, requires_grad=True)
    y = function(wide.tanh())
    loss = (y.sin() * y).sum()
    loss.backward()
    graph = ortgraph.from_onnx(model, loss="loss")
    for level in ("O0", "O2"):
        session = ortgraph.TrainingSession(ortgraph.optimize(graph, level).graph)
        assert session.loss({}) == pytest.approx(loss.item(), rel=1e-5)
        np.testing.assert_allclose(session.gradients({})["w"], wide.grad.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("output", ["mean", "deviation"])
def test_statistics_that_the_loss_reads_are_refused(output):
    body = (
        "one = Constant<value=float[4] {1.0,1.0,1.0,1.0}>() n, mean, deviation = LayerNormalization(t, one) "
        f"y = Mul(n, {output})"
    )
    with pytest.raises(UnsupportedError, match="statistics"):
        ortgraph.from_onnx(forward_model(body)[0], loss="loss")
