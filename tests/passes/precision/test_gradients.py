"""Gradients in low precision against float64, beside the error of PyTorch's autocast; training, checkpoints, exports."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import ortgraph
from ortgraph.manager.numerics import compare, relative_errors

torch = pytest.importorskip("torch")
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def sessions(graph, precision, **options):
    result = ortgraph.optimize(graph, "O2", precision=precision, optimizer=ortgraph.optim.AdamW(lr=1e-3))
    return result.graph, [ortgraph.TrainingSession(result.graph, threads=n, **options) for n in (1, 2)]


@pytest.mark.parametrize("name", ["mlp", "cnn", "bert", "vit"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_errors_are_at_most_twice_those_of_autocast(samples, name, precision):
    """Per parameter, against float64; a parameter that autocast happens to hit well is held against the median."""
    sample, graph = samples(name)
    exact, theirs = sample.gradients(dtype=torch.float64), sample.gradients(autocast=AUTOCAST[precision])
    _, (one, two) = sessions(graph, precision)
    got, again = one.gradients(sample.arrays), two.gradients(sample.arrays)
    assert all(got[k].dtype == np.float32 and (got[k] == again[k]).all() for k in got)
    allowed, errors = relative_errors(theirs, exact), relative_errors(got, exact)
    usual = float(np.median(list(allowed.values())))
    for parameter, error in errors.items():
        assert error <= 2 * max(allowed[parameter], usual), (
            f"{parameter}: {error:.1e}, autocast {allowed[parameter]:.1e}"
        )
    assert np.median(list(errors.values())) <= 1.5 * usual
    assert np.median(list(errors.values())) > 1e-5  # it really is low precision


def test_a_step_trains_and_a_checkpoint_goes_on_bit_for_bit(samples, tmp_path):
    sample, graph = samples("bert")
    _, (first, second) = sessions(graph, "bf16", poison=True)
    losses = [first.step(sample.arrays) for _ in range(3)]
    first.save_checkpoint(tmp_path / "checkpoint")
    losses += [first.step(sample.arrays) for _ in range(3)]
    second.load_checkpoint(tmp_path / "checkpoint")
    assert [second.step(sample.arrays) for _ in range(3)] == losses[3:]
    for name, value in first.state_dict().items():
        assert value.dtype in (np.float32, np.int64) and (value == second.state_dict()[name]).all()
    assert losses[-1] < losses[0]


def test_memory_is_as_planned(samples):
    sample, graph = samples("cnn")
    _, (session, _) = sessions(graph, "bf16")
    session.check_memory(sample.arrays)
    session.check_memory(sample.arrays, "step")


def test_low_precision_takes_less_arena(samples):
    sample, graph = samples("bert")
    used = {}
    for precision in ("fp32", "bf16"):
        _, (session, _) = sessions(graph, precision)
        session.step(sample.arrays)
        used[precision] = session.arena_bytes
    assert used["bf16"] < 1.1 * used["fp32"]  # weights are in the arena too, and this model is mostly weights


def test_evaluation_and_export_are_float32(samples, tmp_path):
    sample, graph = samples("bert")
    cast, (session, _) = sessions(graph, "bf16")
    plain = ortgraph.TrainingSession(graph).evaluate(sample.arrays)
    for name, value in session.evaluate(sample.arrays).items():
        np.testing.assert_allclose(value, plain[name], rtol=2e-5, atol=1e-6)
    for stage in (cast, ortgraph.optimize(graph, "mark-optimized,cast-precision").graph):
        path = ortgraph.TrainingSession(stage).export_inference(tmp_path / "model.onnx")
        model = onnx.load(path)
        assert all(t.data_type != onnx.TensorProto.BFLOAT16 for t in model.graph.initializer)
        assert {o.domain for o in model.opset_import} == {""}


def test_a_cast_graph_survives_a_file(samples, tmp_path):
    sample, graph = samples("vit")
    made = ortgraph.optimize(graph, "mark-optimized,cast-precision").graph
    made.save(tmp_path / "cast.onnx")
    read = ortgraph.load(tmp_path / "cast.onnx")
    types = [[[v.dtype for v in n.outputs if v.name] for n in graph.graph] for graph in (read, made)]
    assert types[0] == types[1]
    got = ortgraph.TrainingSession(read, threads=1).gradients(sample.arrays)
    want = ortgraph.TrainingSession(made, threads=1).gradients(sample.arrays)
    assert all((got[k] == want[k]).all() for k in want)


def test_numerics_compares_within_the_precision(samples):
    sample, graph = samples("bert")
    made, _ = sessions(graph, "bf16")
    found = compare(graph, made, sample.arrays, threads=2)
    assert found.precision == "bf16" and found.equal and "tolerances of bf16" in found.text
    assert found.worst_gradient[1] > 1e-4  # would not pass as float32
    kept = made.clone()
    kept.values = {**kept.values, "classifier.weight": kept.values["classifier.weight"] * 1.5}
    assert not compare(graph, kept, sample.arrays, threads=2).equal


def test_symbolic_shapes_wait_for_the_batch(samples):
    sample, _ = samples("mlp")
    graph = ortgraph.capture(sample.module, sample.batch, loss="loss", dynamic={"x": {0: "n"}, "labels": {0: "n"}})
    session = ortgraph.TrainingSession(ortgraph.optimize(graph, "O2", precision="bf16", optimizer="adamw").graph)
    for rows in (48, 20):
        assert np.isfinite(session.step({k: v[:rows] for k, v in sample.arrays.items()}))
