"""TrainingSession: gradients, steps, evaluation and state of a hand-written classifier at every stage."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

from ortgraph.errors import BatchError, InputError, NonFiniteLossError
from ortgraph.manager import registry
from ortgraph.optim import AdamW
from ortgraph.passes.lowering.attach_optimizer import AttachOptimizer
from ortgraph.passes.memory.plan_memory import PlanMemory
from ortgraph.runtime.profile import by_operator
from ortgraph.runtime.session import TrainingSession


def call(graph, *passes):
    """Run passes as the manager does: in place, then the stage."""
    for p in passes:
        p.call(graph.model)
        if p.sets_stage:
            graph.signature = graph.signature.replace(stage=p.sets_stage)
    return graph


def lowered():
    from ortgraph.runtime.detect import detect_runtime

    return registry.get("lower")(target=detect_runtime().target)


def at_stage(graph, stage: str, optimizer: AdamW | None = None):
    optimizer = optimizer or AdamW(lr=1e-2)
    chain = {
        "captured": (),
        "stepped": (AttachOptimizer.of(optimizer),),
        "lowered": (AttachOptimizer.of(optimizer), lowered()),
        "planned": (AttachOptimizer.of(optimizer), lowered(), PlanMemory()),
    }
    return call(graph, *chain[stage])


def loss_of(values, batch):
    """The classifier's loss in float64."""
    from math import erf

    p = {k: v.astype(np.float64) for k, v in values.items()}
    h = p["table"][batch["ids"]].reshape(-1, 6)
    a = h @ p["w1"] + p["b1"]
    u = 0.5 * a * (1 + np.vectorize(erf)(a / np.sqrt(2)))
    n = (u - u.mean(-1, keepdims=True)) / np.sqrt(u.var(-1, keepdims=True) + 1e-5)
    logits = (n * p["norm.weight"] + p["norm.bias"]) @ p["w2"] @ p["table"].T
    shifted = logits - logits.max(-1, keepdims=True)
    log_probability = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    labels = batch["labels"].reshape(-1)
    return -log_probability[np.arange(len(labels)), labels].mean(), logits


def central_differences(values, batch, name, step=1e-5):
    result = np.zeros(values[name].shape)
    for index in np.ndindex(*result.shape):
        around = []
        for sign in (1, -1):
            moved = {k: v.astype(np.float64) for k, v in values.items()}
            moved[name][index] += sign * step
            around.append(loss_of(moved, batch)[0])
        result[index] = (around[0] - around[1]) / (2 * step)
    return result


@pytest.mark.parametrize("stage", ["captured", "stepped", "lowered", "planned"])
@pytest.mark.parametrize("threads", [1, 2])
def test_gradients_at_every_stage(classifier_graph, classifier_batch, stage, threads) -> None:
    graph, batch = at_stage(classifier_graph(), stage), classifier_batch()
    session = TrainingSession(graph, threads=threads, poison=True)
    runs = [session.gradients(batch) for _ in range(4)]
    assert list(runs[0]) == list(graph.values)
    for name, found in runs[0].items():
        want = central_differences(graph.values, batch, name)
        assert found.dtype == np.float32 and found.shape == want.shape
        assert np.linalg.norm(found - want) <= 1e-5 * np.linalg.norm(want) + 1e-7, name
        assert all(np.array_equal(found, run[name]) for run in runs)
    assert session.loss(batch) == pytest.approx(loss_of(graph.values, batch)[0], rel=1e-5)
    outputs = session.evaluate(batch)
    assert np.allclose(outputs["logits"], loss_of(graph.values, batch)[1], atol=1e-5)


def test_all_stages_take_the_same_steps(classifier_graph, classifier_batch) -> None:
    states = []
    for stage in ("stepped", "lowered", "planned"):
        session = TrainingSession(at_stage(classifier_graph(), stage), threads=1, poison=True)
        losses = [session.step(classifier_batch(seed=i)) for i in range(6)]
        states.append((losses, session.state_dict()))
    for losses, state in states[1:]:
        assert losses == states[0][0]
        assert all(np.array_equal(state[k], v) for k, v in states[0][1].items())


@pytest.mark.parametrize("clip", [None, 0.3])
def test_steps_equal_pytorch(classifier_graph, classifier_batch, clip) -> None:
    torch = pytest.importorskip("torch", reason="the peer of this comparison")
    F = torch.nn.functional
    optimizer = AdamW(lr=2e-2, max_grad_norm=clip, no_decay=("b1", "norm.*"))
    graph = at_stage(classifier_graph(), "planned", optimizer)
    p = {k: torch.tensor(v, requires_grad=True) for k, v in graph.values.items()}
    plain = [p[k] for k in ("b1", "norm.weight", "norm.bias")]
    groups = [{"params": [p[k] for k in ("table", "w1", "w2")]}, {"params": plain, "weight_decay": 0.0}]
    peer = torch.optim.AdamW(groups, lr=2e-2)
    session = TrainingSession(graph, threads=2)
    for i in range(25):
        batch = classifier_batch(seed=i)
        peer.zero_grad()
        h = F.embedding(torch.tensor(batch["ids"]), p["table"]).reshape(-1, 6)
        n = F.layer_norm(F.gelu(h @ p["w1"] + p["b1"]), (8,), p["norm.weight"], p["norm.bias"])
        loss = F.cross_entropy(n @ p["w2"] @ p["table"].T, torch.tensor(batch["labels"]).reshape(-1))
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(p.values(), clip)
        for group in peer.param_groups:
            group["lr"] = 2e-2 / (1 + i)
        peer.step()
        assert session.step(batch, learning_rate=2e-2 / (1 + i)) == pytest.approx(loss.item(), abs=2e-5)
    state = session.state_dict()
    assert max(float(np.abs(state[k] - v.detach().numpy()).max()) for k, v in p.items()) < 2e-5
    moments = session.optimizer_state_dict()
    for k, v in p.items():
        assert np.allclose(moments[f"exp_avg/{k}"], peer.state[v]["exp_avg"].numpy(), atol=1e-6)
        assert np.allclose(moments[f"exp_avg_sq/{k}"], peer.state[v]["exp_avg_sq"].numpy(), atol=1e-7)
    assert moments["step"] == 25 == session.steps


def test_updates_are_written_in_place(classifier_graph, classifier_batch) -> None:
    session = TrainingSession(at_stage(classifier_graph(), "planned"), threads=1)
    session.step(classifier_batch())
    (program,) = session.programs
    weights = {p.update for p in session.signature.parameters}
    assert not {new for _, new in program.placement.copies} & weights


def test_gradients_and_evaluation_commit_nothing(classifier_graph, classifier_batch) -> None:
    one, two = (TrainingSession(at_stage(classifier_graph(), "planned"), threads=2) for _ in range(2))
    for i in range(3):
        batch = classifier_batch(seed=i)
        two.gradients(classifier_batch(seed=9))
        two.evaluate(batch)
        two.loss(batch)
        assert one.step(batch) == two.step(batch)
        two.gradients(batch)
    assert all(np.array_equal(v, two.state_dict()[k]) for k, v in one.state_dict().items())
    assert all(np.array_equal(v, two.optimizer_state_dict()[k]) for k, v in one.optimizer_state_dict().items())


def test_reused_batch_memory(classifier_graph, classifier_batch) -> None:
    """The caller may write the next batch into the same arrays, and results never change afterwards."""
    one, two = (TrainingSession(at_stage(classifier_graph(batch=1), "planned"), threads=1) for _ in range(2))
    shared = classifier_batch(batch=1)
    results = []
    for i in range(4):
        fresh = classifier_batch(batch=1, seed=i)
        for k, v in fresh.items():
            shared[k][...] = v
        before = {k: v.copy() for k, v in shared.items()}
        gradients = two.gradients(shared)
        results.append((gradients, {k: v.copy() for k, v in gradients.items()}))
        assert one.step(fresh) == two.step(shared)
        assert all(np.array_equal(before[k], shared[k]) for k in shared)
    assert all(np.array_equal(kept[k], then[k]) for kept, then in results for k in kept)


def test_loss_gradient_scales_gradients(classifier_graph, classifier_batch) -> None:
    session = TrainingSession(classifier_graph(), threads=1)
    one, half = session.gradients(classifier_batch()), session.gradients(classifier_batch(), loss_gradient=0.5)
    assert all(np.allclose(half[k], 0.5 * one[k], rtol=1e-5, atol=1e-8) for k in one)
    again = session.gradients(classifier_batch())
    assert all(np.array_equal(again[k], one[k]) for k in one)


def test_accumulation_equals_the_large_batch(classifier_graph, classifier_batch) -> None:
    optimizer = AdamW(lr=1e-2, max_grad_norm=0.5)
    whole = TrainingSession(at_stage(classifier_graph(batch=6), "planned", optimizer), threads=1, poison=True)
    graph = call(
        classifier_graph(batch=2), AttachOptimizer.of(optimizer, accumulation_steps=3), lowered(), PlanMemory()
    )
    parts = TrainingSession(graph, threads=1, poison=True)
    for i in range(4):
        batch = classifier_batch(batch=6, seed=i)
        pieces = [{k: v[2 * j : 2 * j + 2] for k, v in batch.items()} for j in range(3)]
        losses = [parts.accumulate(pieces[0]), parts.accumulate(pieces[1])]
        parts.gradients(batch=pieces[2])
        losses.append(parts.step(pieces[2]))
        assert whole.step(batch) == pytest.approx(np.mean(losses), rel=1e-5)
        accumulators = {k: v for k, v in parts.optimizer_state_dict().items() if k.startswith("accumulator/")}
        assert len(accumulators) == 6 and not any(v.any() for v in accumulators.values())
    assert parts.steps == whole.steps == 4 == int(parts.optimizer_state_dict()["step"])
    a, b = whole.state_dict(), parts.state_dict()
    assert all(np.allclose(a[k], b[k], atol=2e-5) for k in a)
    assert parts.arena_bytes == max(p.arena_bytes for p in parts.programs)


def test_state_dict_round_trip(classifier_graph, classifier_batch) -> None:
    session = TrainingSession(at_stage(classifier_graph(), "stepped"), threads=1)
    state = session.state_dict()
    assert list(state) == ["table", "head.weight", "w1", "b1", "norm.weight", "norm.bias", "w2"]
    assert np.array_equal(state["table"], state["head.weight"])
    state["table"][:] = 0.0
    assert session.state_dict()["table"].any(), "state_dict gives copies"
    new = {k: v + 1.0 for k, v in session.state_dict().items()}
    session.load_state_dict(new)
    assert all(np.array_equal(session.state_dict()[k], v) for k, v in new.items())
    session.load_state_dict(TrainingSession(classifier_graph(), threads=1).state_dict())
    assert session.loss(classifier_batch()) == TrainingSession(classifier_graph(), threads=1).loss(classifier_batch())


def test_state_dict_that_does_not_fit(classifier_graph) -> None:
    session = TrainingSession(classifier_graph(), threads=1)
    good = session.state_dict()
    bad = [
        ({k: v for k, v in good.items() if k != "w1"}, "missing 'w1'"),
        ({**good, "w9": good["w1"]}, "unknown 'w9'"),
        ({**good, "w1": good["w1"].T}, r"'w1' is float32\[8, 6\], the graph has float32\[6, 8\]"),
        ({**good, "w1": good["w1"].astype(np.float64)}, "'w1' is float64"),
        ({**good, "table": good["table"] + 1}, "one tied tensor but differ"),
    ]
    for state, words in bad:
        state = {**state, **({"b1": good["b1"] + 5} if "b1" in state else {})}
        with pytest.raises(InputError, match=words):
            session.load_state_dict(state)
        assert np.array_equal(session.state_dict()["b1"], good["b1"]), "nothing changes when something does not fit"


def test_step_without_optimizer(classifier_graph, classifier_batch) -> None:
    session = TrainingSession(classifier_graph(), threads=1)
    for call_it in (session.step, session.accumulate):
        with pytest.raises(InputError, match="has no optimizer"):
            call_it(classifier_batch())
    with pytest.raises(InputError, match="cannot accumulate"):
        TrainingSession(at_stage(classifier_graph(), "stepped"), threads=1).accumulate(classifier_batch())


def test_missing_value_of_a_parameter(classifier_graph) -> None:
    graph = classifier_graph()
    del graph.values["w1"]
    with pytest.raises(InputError, match="'w1' has no value"):
        TrainingSession(graph)


def test_nonfinite_loss(classifier_graph, classifier_batch) -> None:
    graph = at_stage(classifier_graph(), "planned")
    graph.values["w2"] = np.full((8, 6), np.nan, np.float32)
    with pytest.raises(NonFiniteLossError, match="nan at step 1"):
        TrainingSession(graph, threads=1).step(classifier_batch())
    assert np.isnan(TrainingSession(graph, threads=1, check_finite=False).step(classifier_batch()))


def test_learning_rate(classifier_graph, classifier_batch) -> None:
    session = TrainingSession(at_stage(classifier_graph(), "planned", AdamW(lr=0.25)), threads=1)
    assert session.learning_rate == 0.25
    before = session.state_dict()
    session.step(classifier_batch(), learning_rate=0.0)
    assert session.learning_rate == 0.0
    assert all(np.array_equal(before[k], v) for k, v in session.state_dict().items())
    session.learning_rate = 0.5
    session.step(classifier_batch())
    assert not np.array_equal(before["w1"], session.state_dict()["w1"])


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf")])
def test_a_rate_that_is_no_rate(classifier_graph, classifier_batch, rate) -> None:
    session = TrainingSession(at_stage(classifier_graph(), "stepped", AdamW(lr=0.25)), threads=1)
    before = session.state_dict()
    with pytest.raises(InputError, match="the learning rate is"):
        session.step(classifier_batch(), learning_rate=rate)
    assert session.learning_rate == 0.25
    assert all(np.array_equal(v, before[k]) for k, v in session.state_dict().items())


@dataclasses.dataclass
class Result:
    graph: object = None
    report: object = None


@pytest.mark.parametrize(("given", "hint"), [("train.onnx", "ortgraph.load"), (Result(), "result.graph")])
def test_what_is_no_graph(given, hint) -> None:
    with pytest.raises(InputError, match=rf"(?s)not (str|Result).*{hint}"):
        TrainingSession(given)


def test_the_graph_is_not_changed(classifier_graph, classifier_batch) -> None:
    graph = at_stage(classifier_graph(), "stepped")
    before, values = graph.text(), {k: v.copy() for k, v in graph.values.items()}
    session = TrainingSession(graph, threads=1)
    session.step(classifier_batch())
    session.evaluate(classifier_batch())
    assert graph.text() == before and all(np.array_equal(values[k], v) for k, v in graph.values.items())
    trained = session.trained_graph()
    assert np.array_equal(trained.values["w1"], session.state_dict()["w1"])
    again = TrainingSession(trained, threads=1)
    assert again.step(classifier_batch(seed=5)) == session.step(classifier_batch(seed=5))


@pytest.mark.parametrize("stage", ["captured", "stepped"])
def test_dynamic_batch(classifier_graph, classifier_batch, stage, caplog) -> None:
    """The last partial batch runs on a dynamic graph; each shape is planned once."""
    caplog.set_level(logging.INFO)
    session = TrainingSession(at_stage(classifier_graph(batch="batch"), stage), threads=1, poison=True)
    for size in (4, 4, 1, 4, 7):
        batch = classifier_batch(batch=size)
        static = TrainingSession(classifier_graph(batch=size), threads=1).gradients(batch)
        found = session.gradients(batch)
        assert all(np.allclose(found[k], static[k], atol=1e-6) for k in static)
    assert len(session.programs) == 3
    assert caplog.text.count("gradients: planned for batch=") == 3
    if stage == "stepped":
        assert [session.step(classifier_batch(batch=n)) > 0 for n in (4, 2)] == [True, True]


def test_shapes_kept_are_bounded(classifier_graph, classifier_batch) -> None:
    session = TrainingSession(classifier_graph(batch="batch"), threads=1)
    for size in range(1, 12):
        session.loss(classifier_batch(batch=size))
    assert len(session.programs) == 8 and len(session._prepared) == 8
    session.loss(classifier_batch(batch=1))
    assert len(session.programs) == 8


def test_figures(classifier_graph, classifier_batch) -> None:
    session = TrainingSession(at_stage(classifier_graph(), "planned"), threads=1)
    assert session.arena_bytes == 0
    session.step(classifier_batch())
    assert session.arena_bytes >= session.max_load_bytes > 0
    count = 11 * 6 + 6 * 8 + 8 + 8 + 8 + 8 * 6
    assert session.parameter_bytes == 4 * count and session.state_bytes == 8 * count + 8


def test_static_graph_refuses_another_size(classifier_graph, classifier_batch) -> None:
    with pytest.raises(BatchError, match=r"'ids' has shape \[2, 3\], the graph wants \[4, 3\](?s:.*)dynamic="):
        TrainingSession(classifier_graph(), threads=1).loss(classifier_batch(batch=2))


@pytest.mark.parametrize("stage", ["stepped", "planned"])
def test_index_out_of_range(classifier_graph, classifier_batch, stage, capfd) -> None:
    session, other = (TrainingSession(at_stage(classifier_graph(), stage), threads=1) for _ in range(2))
    batch = classifier_batch()
    for call_it in (session.step, session.gradients, session.evaluate):
        with pytest.raises(BatchError, match="out of data bounds(?s:.*)outside their range"):
            call_it({**batch, "ids": batch["ids"] + 1000})
    assert session.step(batch) == other.step(batch), "nothing was updated by the batch that failed"
    assert all(np.array_equal(v, other.state_dict()[k]) for k, v in session.state_dict().items())
    assert "Error" not in capfd.readouterr().err


def test_tangents_and_input_gradients(bench) -> None:
    """y = 2x + w, loss = sum(y x): dw = dL x + dy, dx = dL (y + 2x) + 2 dy."""
    import onnx_ir as ir

    from ortgraph.graph import Parameter, Signature, TrainingGraph

    t = bench()
    one = np.array([1.0, 2.0, 3.0], np.float32)
    x, w, tangent = t.input("x", one), t.input("w", one), t.input("y.tangent", one)
    seed = t.input("loss_gradient", np.array(1, np.float32))
    two = t.build.scalar(2.0, x)
    y = t.op("Add", t.op("Mul", x, two), w, name="y")
    dy = t.op("Add", t.op("Mul", x, seed), tangent, name="dw")
    dx = t.op("Add", t.op("Mul", y, seed), t.op("Mul", dy, two), name="dx")
    t.output(t.op("ReduceSum", t.op("Mul", y, x), keepdims=0, name="loss"), y, dy, dx)
    signature = Signature(
        loss="loss", inputs=("x",), outputs=("y",), parameters=(Parameter("w", gradient="dw"),),
        loss_gradient="loss_gradient", tangents={"y": "y.tangent"}, input_gradients={"x": "dx"},
    )  # fmt: skip
    session = TrainingSession(TrainingGraph(ir.Model(t.graph, ir_version=10), signature, {"w": one}), threads=1)
    batch, extra = {"x": 2 * one}, np.array([10.0, 0.0, -1.0], np.float32)
    assert np.array_equal(session.gradients(batch)["w"], 2 * one)
    assert np.array_equal(session.gradients(batch, tangents={"y": extra})["w"], 2 * one + extra)
    assert np.array_equal(session.gradients(batch, 0.0, {"y": extra})["w"], extra)
    assert np.array_equal(session.gradients(batch)["w"], 2 * one), "a tangent that is left out is zero again"
    assert np.array_equal(session.input_gradients(batch)["x"], 9 * one)
    for tangents in ({"z": extra}, {"y": extra[:2]}):
        with pytest.raises(BatchError, match="tangent"):
            session.gradients(batch, tangents=tangents)


@pytest.mark.parametrize("kind", ["gradients", "step"])
def test_profile(classifier_graph, classifier_batch, kind) -> None:
    session = TrainingSession(at_stage(classifier_graph(), "planned"), threads=1)
    other = TrainingSession(at_stage(classifier_graph(), "planned"), threads=1)
    times = session.profile(classifier_batch(), kind, runs=3)
    products = [t for t in times if "MatMul" in t.operator or t.operator == "Gemm"]
    assert len(times) > 20 and len(products) >= 6 and all(t.microseconds >= 0 for t in times)
    assert [t.node for t in times] == [n.name for n in session.programs[0].order]
    assert sum(count for count, _ in by_operator(times).values()) == len(times)
    assert session.step(classifier_batch()) == other.step(classifier_batch()), "profiling trains nothing"


@pytest.mark.parametrize("threads", [1, 2])
def test_step_equals_the_same_nodes_unbound(classifier_graph, classifier_batch, threads) -> None:
    """The runtime's own allocation, same nodes and order: every new weight and state bit for bit."""
    import onnxruntime as ort

    from ortgraph.ops import kernels
    from ortgraph.runtime.options import session_options
    from ortgraph.runtime.ort_session import program_model

    graph = at_stage(classifier_graph(), "planned", AdamW(lr=0.05, max_grad_norm=0.7))
    session = TrainingSession(graph, threads=threads, poison=True)
    session.step(classifier_batch())
    (program,) = session.programs
    pairs = list(graph.signature.pairs())
    wanted = [v for v in graph.graph.outputs if v.name in {new for _, new in pairs}]
    options = session_options(threads)
    if any(n.domain == kernels.DOMAIN for n in program.order):
        options.register_custom_ops_library(str(kernels.library_path()))
    inputs = [v for v in graph.graph.inputs if v.name in program.inputs]
    model = program_model(graph.model, program.order, inputs, wanted).SerializeToString()
    plain = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    for i in range(3):
        batch = classifier_batch(seed=i)
        feeds = {v.name: program.inputs[v.name].copy() for v in inputs} | batch
        expected = dict(zip((v.name for v in wanted), plain.run([v.name for v in wanted], feeds), strict=True))
        session.step(batch)
        assert all(np.array_equal(program.inputs[old], expected[new]) for old, new in pairs)
