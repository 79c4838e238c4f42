"""Loss scaling in the graph: overflow, recovery, resume in between; a skipped step changes no bit."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.errors import NonFiniteLossError, PassError
from ortgraph.graph import Parameter, Signature, TrainingGraph
from ortgraph.graph.verify import verify
from ortgraph.ops.builder import Builder
from ortgraph.optim import LAMB, SGD, AdamW, LossScale, Optimizer
from ortgraph.passes.lowering.attach_optimizer import AttachOptimizer
from ortgraph.passes.lowering.lower import Lower
from ortgraph.runtime.session import TrainingSession

SHAPES = {"w": [70, 5], "b": [5], "scalar": []}
OVERFLOW = 1e34  # finite, but not times 65536
OPTIMIZERS = [
    AdamW(lr=0.01, loss_scale="dynamic"),
    LAMB(lr=0.01, max_grad_norm=1.0, loss_scale="dynamic"),
    SGD(lr=0.01, momentum=0.9, loss_scale="dynamic"),
]


def fed_graph() -> TrainingGraph:
    """gradient = data input times seed, loss = the scalar parameter times a data input: any sequence can be played."""
    f = ir.DataType.FLOAT
    p = {n: ir.val(n, dtype=f, shape=s) for n, s in SHAPES.items()}
    fed = {n: ir.val(f"fed.{n}", dtype=f, shape=s) for n, s in SHAPES.items()}
    seed = ir.val("loss_gradient", dtype=f, shape=[])
    graph = ir.Graph([*fed.values(), *p.values(), seed], [], nodes=[], opset_imports={"": 18}, name="joint")
    b = Builder(graph, "capture")
    loss = b.op("Mul", p["scalar"], fed["scalar"])
    loss.name = "loss"
    graph.outputs.append(loss)
    for n in SHAPES:
        g = b.op("Mul", fed[n], seed)
        g.name = f"{n}.grad"
        graph.outputs.append(g)
    dx = b.op("Mul", p["scalar"], seed)
    dx.name = "dx"
    graph.outputs.append(dx)
    signature = Signature(
        loss="loss",
        inputs=tuple(v.name or "" for v in fed.values()),
        parameters=tuple(Parameter(n, gradient=f"{n}.grad") for n in SHAPES),
        loss_gradient="loss_gradient",
        input_gradients={"fed.scalar": "dx"},
    )
    rng = np.random.default_rng(0)
    values = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    return TrainingGraph(ir.Model(graph, ir_version=10), signature, values)


def made_session(optimizer: Optimizer, accumulation_steps: int = 1, prefer: str = "", threads: int = 2, **options):
    graph = fed_graph()
    AttachOptimizer.of(optimizer, accumulation_steps).call(graph.model)
    graph.signature = graph.signature.replace(stage="stepped")
    verify(graph, "types")
    if prefer:
        Lower(prefer=prefer).call(graph.model)
        graph.signature = graph.signature.replace(stage="lowered")
    return TrainingSession(graph, threads=threads, **options)


def fed_batch(step: int, factor: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {f"fed.{n}": (rng.standard_normal(s) * factor).astype(np.float32) for n, s in SHAPES.items()}


def everything(session: TrainingSession) -> dict[str, np.ndarray]:
    return {**session.state_dict(), **{f"state {k}": v for k, v in session.optimizer_state_dict().items()}}


def assert_equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray], but: tuple[str, ...] = ()) -> None:
    assert list(a) == list(b)
    for name in a:
        assert name in but or np.array_equal(a[name], b[name]), name


@pytest.mark.parametrize("prefer", ["kernel", "expansion"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.TEXT)
def test_a_skipped_step_changes_no_bit(optimizer, prefer) -> None:
    session = made_session(optimizer, prefer=prefer, poison=True)
    for step in range(3):
        session.step(fed_batch(step))
    before = everything(session)
    assert session.loss_scale == 65536 and session.skipped_steps == 0
    for times, bad in enumerate((OVERFLOW, np.inf, np.nan), start=1):
        session.step(fed_batch(3, bad))
        after = everything(session)
        assert_equal(before, after, ("state loss_scale", "state good_steps", "state skipped_steps"))
        assert after["state step"] == 3 and after["state good_steps"] == 0
        assert session.skipped_steps == times and session.loss_scale == 65536 / 2**times
    session.step(fed_batch(4))
    other = made_session(optimizer, prefer=prefer)
    for step in (0, 1, 2, 4):
        other.step(fed_batch(step))
    recovered, never = everything(session), everything(other)
    scalars = {"state loss_scale", "state skipped_steps", "state good_steps"}
    for name in set(never) - scalars:
        np.testing.assert_allclose(recovered[name], never[name], rtol=2e-6, atol=1e-12)
    assert recovered["state step"] == 4, "bias correction counts finished updates only"


def test_the_first_step_may_overflow() -> None:
    session, other = made_session(OPTIMIZERS[0]), made_session(OPTIMIZERS[0])
    session.step(fed_batch(0, OVERFLOW))
    for one in (session, other):
        one.step(fed_batch(1))
    scalars = ("state loss_scale", "state skipped_steps")
    assert_equal(everything(session), everything(other), scalars)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_a_scale_that_is_a_power_of_two_changes_nothing(limit) -> None:
    scaled = made_session(AdamW(lr=0.01, max_grad_norm=limit, loss_scale=1024.0))
    plain = made_session(AdamW(lr=0.01, max_grad_norm=limit))
    for step in range(10):
        assert scaled.step(fed_batch(step)) == plain.step(fed_batch(step))
    a, b = scaled.state_dict(), plain.state_dict()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0 if limit is None else 2e-6, atol=1e-9)
    assert scaled.loss_scale == 1024 and scaled.skipped_steps == 0 and plain.loss_scale == 1


def test_a_fixed_scale_skips_and_stays() -> None:
    session = made_session(AdamW(lr=0.01, loss_scale=65536.0))
    session.step(fed_batch(0))
    before = session.state_dict()
    session.step(fed_batch(1, OVERFLOW))
    assert_equal(before, session.state_dict())
    assert session.loss_scale == 65536 and session.skipped_steps == 1
    assert "good_steps" not in session.optimizer_state_dict()


def test_the_scale_moves_as_it_should() -> None:
    """Against the rule in plain Python, limits included."""
    policy = LossScale(initial=8.0, growth=4.0, backoff=0.25, interval=3, minimum=1.0, maximum=64.0)
    session = made_session(SGD(lr=1e-3, loss_scale=policy))
    scale, good, skipped = 8.0, 0, 0
    bad = {2, 3, 4, 5, 16, 17}
    for step in range(24):
        session.step(fed_batch(step, np.inf if step in bad else 1.0))
        if step in bad:
            scale, good, skipped = max(scale * 0.25, 1.0), 0, skipped + 1
        else:
            good += 1
            if good == 3:
                scale, good = min(scale * 4.0, 64.0), 0
        state = session.optimizer_state_dict()
        assert (session.loss_scale, state["good_steps"], session.skipped_steps) == (scale, good, skipped), step
    assert scale == 64.0 or skipped == 6


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("stop", [3, 4, 6])
def test_resume_before_at_and_after_an_overflow(tmp_path, threads, stop) -> None:
    optimizer = AdamW(lr=0.01, max_grad_norm=1.0, loss_scale=LossScale(interval=2))
    batches = [fed_batch(i, OVERFLOW if i in (3, 5) else 1.0) for i in range(9)]
    whole, first = (made_session(optimizer, threads=threads) for _ in range(2))
    losses = [whole.step(b) for b in batches]
    for b in batches[:stop]:
        first.step(b)
    first.save_checkpoint(tmp_path / "c")
    second = made_session(optimizer, threads=threads)
    second.load_checkpoint(tmp_path / "c")
    assert [second.step(b) for b in batches[stop:]] == losses[stop:]
    assert_equal(everything(whole), everything(second))
    assert second.skipped_steps == 2 and second.steps == 9


def test_an_overflow_in_a_micro_batch_skips_the_step() -> None:
    session = made_session(AdamW(lr=0.01, max_grad_norm=1.0, loss_scale="dynamic"), accumulation_steps=3)
    plain = made_session(AdamW(lr=0.01, max_grad_norm=1.0), accumulation_steps=3)
    before = session.state_dict()
    session.accumulate(fed_batch(0))
    session.accumulate(fed_batch(1, OVERFLOW))
    session.step(fed_batch(2))
    assert_equal(before, session.state_dict())
    assert session.skipped_steps == 1
    for one in (session, plain):
        for i in range(3, 5):
            one.accumulate(fed_batch(i))
        one.step(fed_batch(5))
    a, b = session.state_dict(), plain.state_dict()
    assert session.optimizer_state_dict()["step"] == 1
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=2e-6, atol=1e-9)


def test_gradients_are_those_of_the_loss() -> None:
    session = made_session(AdamW(loss_scale="dynamic"))
    batch = fed_batch(0)
    found = session.gradients(batch, loss_gradient=0.5)
    for name in SHAPES:
        assert np.array_equal(found[name], batch[f"fed.{name}"] * np.float32(0.5))
    assert np.array_equal(session.input_gradients(batch)["fed.scalar"], session.state_dict()["scalar"])


def test_a_loss_that_is_not_finite() -> None:
    """An error only where the step was not skipped."""
    session = made_session(AdamW(lr=0.01, loss_scale="dynamic"))
    session.load_state_dict({**session.state_dict(), "scalar": np.array(np.inf, np.float32)})
    loss = session.step(fed_batch(0, np.inf))
    assert not np.isfinite(loss) and session.skipped_steps == 1
    with pytest.raises(NonFiniteLossError, match="step 2"):
        session.step(fed_batch(1))


def test_states_have_their_kinds_and_start() -> None:
    graph = fed_graph()
    AttachOptimizer.of(AdamW(loss_scale=LossScale(initial=4096.0))).call(graph.model)
    kinds = {s.kind: s for s in graph.signature.states if s.parameter is None}
    assert set(kinds) == {"step", "loss_scale", "good_steps", "skipped_steps"}
    assert kinds["loss_scale"].initial == 4096.0
    assert Signature.from_json(graph.signature.to_json()) == graph.signature


def test_without_a_seed_there_is_no_scaling() -> None:
    graph = fed_graph()
    graph.signature = graph.signature.replace(loss_gradient=None)
    with pytest.raises(PassError, match="cannot scale its loss"):
        AttachOptimizer.of(AdamW(loss_scale="dynamic")).run(graph)


def test_optimize_takes_a_scale() -> None:
    from ortgraph.errors import InputError
    from ortgraph.manager.optimize import optimize

    made = optimize(fed_graph(), "O2", optimizer=AdamW(lr=0.01), loss_scale=256.0)
    session = TrainingSession(made.graph)
    assert session.loss_scale == 256.0
    session.step(fed_batch(0))
    before = session.state_dict()
    session.step(fed_batch(0, np.inf))
    assert_equal(before, session.state_dict())
    with pytest.raises(InputError, match="belongs to an optimizer"):
        optimize(fed_graph(), "O2", loss_scale="dynamic")
