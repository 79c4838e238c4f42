"""Batches: every form that is taken, and one clear error for each that is not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.errors import BatchError
from ortgraph.runtime.batch import to_numpy
from ortgraph.runtime.session import TrainingSession


def test_forms_of_a_batch(classifier_graph, classifier_batch) -> None:
    session = TrainingSession(classifier_graph(), threads=1)
    batch = classifier_batch()
    want = session.loss(batch)
    assert session.loss((batch["ids"], batch["labels"])) == want
    assert session.loss([batch["ids"], batch["labels"]]) == want
    assert session.loss({"labels": batch["labels"], "ids": batch["ids"].tolist()}) == want
    assert session.loss({k: v.astype(np.int32) for k, v in batch.items()}) == want, "int32 widens to int64"
    strided = {k: np.repeat(v, 2, axis=1)[:, ::2] for k, v in batch.items()}
    assert not strided["ids"].flags.c_contiguous and session.loss(strided) == want
    assert session.loss({k: np.asfortranarray(v) for k, v in batch.items()}) == want


def test_torch_tensors(classifier_graph, classifier_batch) -> None:
    torch = pytest.importorskip("torch", reason="batches of torch tensors")
    session = TrainingSession(classifier_graph(), threads=1)
    batch = {k: torch.tensor(v) for k, v in classifier_batch().items()}
    assert session.loss(batch) == session.loss(classifier_batch())
    assert session.loss(tuple(batch.values())) == session.loss(classifier_batch())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: {"ids": b["ids"]}, "no 'labels'"),
        (lambda b: {**b, "mask": b["ids"]}, "unknown 'mask'"),
        (lambda b: {"ids": b["ids"], "label": b["labels"]}, "no 'labels'; unknown 'label'"),
        (lambda b: (b["ids"],), "1 items, the graph has 2 inputs"),
        (lambda b: b["ids"], "1 items"),
        (lambda b: {**b, "ids": b["ids"].astype(np.float32)}, "'ids' has dtype float32, the graph wants int64"),
        (lambda b: {**b, "ids": b["ids"].astype(np.uint64)}, "'ids' has dtype uint64"),
        (lambda b: {**b, "ids": b["ids"] > 2}, "'ids' has dtype bool"),
        (lambda b: {**b, "ids": b["ids"][0]}, r"'ids' has shape \[3\], the graph wants \[4, 3\]"),
        (lambda b: {**b, "ids": b["ids"][:, :2]}, r"'ids' has shape \[4, 2\], the graph wants \[4, 3\]"),
        (lambda b: {**b, "ids": "text"}, "'ids' has dtype <U4"),
        (lambda b: {**b, "ids": object()}, "'ids' is object, not a tensor"),
        (lambda b: {**b, "ids": None}, "'ids' is NoneType, not a tensor"),
    ],
)
def test_batches_that_do_not_fit(classifier_graph, classifier_batch, change, words) -> None:
    session = TrainingSession(classifier_graph(), threads=1)
    with pytest.raises(BatchError, match=words) as caught:
        session.gradients(change(classifier_batch()))
    assert caught.value.hint


def test_named_dimension_with_two_sizes(classifier_graph, classifier_batch) -> None:
    session = TrainingSession(classifier_graph(batch="batch"), threads=1)
    batch = {"ids": classifier_batch(batch=3)["ids"], "labels": classifier_batch(batch=2)["labels"]}
    with pytest.raises(BatchError, match="dimension 'batch' is 2 in input 'labels'"):
        session.loss(batch)


def test_dimension_that_is_an_expression(bench) -> None:
    from ortgraph.graph import Signature, TrainingGraph

    t = bench()
    a = ir.val("a", dtype=ir.DataType.FLOAT, shape=["n", 2])
    b = ir.val("b", dtype=ir.DataType.FLOAT, shape=["2*n", 2])
    t.graph.inputs.extend([a, b])
    t.output(t.op("ReduceSum", t.op("Concat", a, b, axis=0), keepdims=0, name="loss"))
    session = TrainingSession(
        TrainingGraph(ir.Model(t.graph, ir_version=10), Signature(loss="loss", inputs=("a", "b")))
    )
    ones = np.ones((6, 2), np.float32)
    assert session.loss((ones[:3], ones)) == 18.0
    with pytest.raises(BatchError, match=r"'b' has shape \[6, 2\], the graph wants \[2\*n, 2\] with {'n': 2}"):
        session.loss((ones[:2], ones))


@pytest.mark.parametrize("dim", [None, "2*n", "batch-size"])
def test_dimension_that_no_input_names(bench, dim) -> None:
    from ortgraph.graph import Signature, TrainingGraph

    t = bench()
    a = ir.val("a", dtype=ir.DataType.FLOAT, shape=[dim, 2])
    t.graph.inputs.append(a)
    t.output(t.op("ReduceSum", a, keepdims=0, name="loss"))
    session = TrainingSession(TrainingGraph(ir.Model(t.graph, ir_version=10), Signature(loss="loss", inputs=("a",))))
    with pytest.raises(BatchError, match="input 'a': dimension .* cannot be told"):
        session.loss({"a": np.ones((6, 2), np.float32)})


def test_bfloat16_tensors():
    torch = pytest.importorskip("torch")
    values = torch.tensor([[1.0, -2.5], [1e30, 0.0]]).bfloat16()
    made = to_numpy("x", values)
    assert made.dtype == ml_dtypes.bfloat16 and made.astype(np.float32).tolist() == values.float().tolist()


def test_float_inputs(linear_graph) -> None:
    session = TrainingSession(linear_graph, threads=1)
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    assert session.loss({"x": x.astype(np.float16)}) == pytest.approx(session.loss({"x": x}), rel=1e-2)
    for wrong in (np.float64, np.int64, np.complex64):
        with pytest.raises(BatchError, match="the graph wants float32"):
            session.loss({"x": x.astype(wrong)})
