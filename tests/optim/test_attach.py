"""attach: the signature it makes, and PyTorch's numbers over many steps with groups and clipping."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.errors import PassError, SignatureError
from ortgraph.graph import Parameter, Signature, TrainingGraph
from ortgraph.ops.builder import Builder
from ortgraph.optim import AdamW, Group
from ortgraph.optim.attach import attach
from ortgraph.runtime.session import TrainingSession

SHAPES = {"embed.weight": [7, 5], "norm.weight": [5], "head.weight": [5, 3], "head.bias": [3], "scale": []}


def feed_graph(frozen: tuple[str, ...] = ()) -> TrainingGraph:
    """Gradients are data inputs: gradient = input * loss_gradient, so that any sequence of gradients can be played."""
    f = ir.DataType.FLOAT
    p = {n: ir.val(n, dtype=f, shape=s) for n, s in SHAPES.items()}
    fed = {n: ir.val(f"fed.{n}", dtype=f, shape=s) for n, s in SHAPES.items()}
    seed = ir.val("loss_gradient", dtype=f, shape=[])
    graph = ir.Graph([*fed.values(), *p.values(), seed], [], nodes=[], opset_imports={"": 18}, name="joint")
    b = Builder(graph, "capture")
    loss = b.op("ReduceSum", b.op("Add", p["scale"], fed["scale"]), keepdims=0)
    loss.name = "loss"
    graph.outputs.append(loss)
    parameters = []
    for n in SHAPES:
        if n in frozen:
            parameters.append(Parameter(n, trainable=False))
            continue
        g = b.op("Mul", fed[n], seed)
        g.name = f"{n}.grad"
        graph.outputs.append(g)
        parameters.append(Parameter(n, gradient=g.name))
    signature = Signature(
        loss="loss",
        inputs=tuple(v.name for v in fed.values()),
        parameters=tuple(parameters),
        loss_gradient="loss_gradient",
    )
    rng = np.random.default_rng(0)
    values = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    return TrainingGraph(ir.Model(graph, ir_version=10), signature, values)


def gradients_of(step: int) -> dict[str, np.ndarray]:
    """Gradients whose size changes by orders of magnitude from step to step; some are zero."""
    rng = np.random.default_rng(step)
    size = 10.0 ** rng.integers(-4, 3)
    made = {n: (rng.standard_normal(s) * size).astype(np.float32) for n, s in SHAPES.items()}
    if step % 4 == 0:
        made["norm.weight"][:] = 0.0
    return made


OPTIMIZERS = [
    AdamW(),
    AdamW(lr=0.05, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.2),
    AdamW(lr=0.02, weight_decay=0.0, max_grad_norm=1.0),
    AdamW(lr=0.02, weight_decay=0.1, max_grad_norm=1e4, no_decay=("*.bias", "norm.*")),
    AdamW(
        lr=0.01,
        max_grad_norm=0.5,
        no_decay="*.bias",
        groups=(Group("head.*", lr=0.05, weight_decay=0.3, betas=(0.5, 0.9)), Group("embed*", lr=0.0, eps=1e-2)),
    ),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_equals_pytorch_over_forty_steps(optimizer: AdamW) -> None:
    torch = pytest.importorskip("torch", reason="the peer of this comparison")
    graph = feed_graph()
    p = {n: torch.tensor(v, requires_grad=True) for n, v in graph.values.items()}
    exact = {n: torch.tensor(v, dtype=torch.float64, requires_grad=True) for n, v in graph.values.items()}

    def peer_of(values):
        made = []
        for n, v in values.items():
            s = optimizer.settings(n)
            made.append({"params": [v], "lr": optimizer.lr * s.lr_scale, "betas": s.betas, "eps": s.eps,
                         "weight_decay": s.weight_decay})  # fmt: skip
        return torch.optim.AdamW(made)

    peers = [(p, peer_of(p)), (exact, peer_of(exact))]
    rates = [[g["lr"] for g in peer.param_groups] for _, peer in peers]
    assert attach(graph, optimizer) == 5
    session = TrainingSession(graph, threads=2, poison=True)
    for step in range(40):
        factor = 1.0 / (1.0 + 0.1 * step)
        made = gradients_of(step)
        for (values, peer), initial in zip(peers, rates, strict=True):
            for n, v in values.items():
                v.grad = torch.tensor(made[n], dtype=v.dtype)
            if optimizer.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(values.values(), optimizer.max_grad_norm)
            for group, rate in zip(peer.param_groups, initial, strict=True):
                group["lr"] = rate * factor
            peer.step()
        session.step({f"fed.{n}": v for n, v in made.items()}, learning_rate=optimizer.lr * factor)
    state = session.state_dict()
    for n in SHAPES:
        want = exact[n].detach().numpy()
        peer_error = np.linalg.norm(p[n].detach().numpy() - want)
        error = np.linalg.norm(state[n] - want)
        assert error <= 4 * peer_error + 1e-6 * np.linalg.norm(want), (n, error, peer_error)


def test_signature() -> None:
    graph = feed_graph(frozen=("scale",))
    assert attach(graph, AdamW(lr=0.25, groups=(Group("head.*", lr=0.5),)), accumulation_steps=4) == 4
    s = graph.signature
    assert s.scalars == {"learning_rate": 0.25}
    assert {p.name: p.update for p in s.parameters}["scale"] is None
    assert {p.name: p.group for p in s.parameters} == {**{n: 0 for n in SHAPES}, "head.weight": 1, "head.bias": 1}
    kinds: dict[str, int] = {}
    for state in s.states:
        kinds[state.kind] = kinds.get(state.kind, 0) + 1
    assert kinds == {"step": 1, "accumulator": 4, "moment1": 4, "moment2": 4}
    assert {x.name for x in s.states if x.parameter == "head.bias"} == {
        "accumulator/head.bias", "exp_avg/head.bias", "exp_avg_sq/head.bias",
    }  # fmt: skip
    assert AdamW.parse(s.metadata["optimizer"]).lr == 0.25 and s.metadata["accumulation_steps"] == "4"
    inputs = {v.name for v in graph.graph.inputs}
    outputs = {v.name for v in graph.graph.outputs}
    assert {name for _, name in s.graph_inputs()} == inputs
    assert {name for _, name in s.graph_outputs()} == outputs
    for old, new in s.pairs():
        values = {v.name: v for v in (*graph.graph.inputs, *graph.graph.outputs)}
        assert values[old].shape == values[new].shape and values[old].dtype == values[new].dtype
    assert all(n.metadata_props["ortgraph.phase"] == "optimizer" for n in graph.graph if n.op_type == "AdamW")


def test_gradient_outputs_keep_their_names_and_values() -> None:
    graph = feed_graph()
    attach(graph, AdamW(max_grad_norm=1e-3), accumulation_steps=2)
    made = gradients_of(1)
    found = TrainingSession(graph, threads=1).gradients({f"fed.{n}": v for n, v in made.items()})
    assert all(np.array_equal(found[n], made[n]) for n in SHAPES)


def test_one_gradient_value_for_two_parameters() -> None:
    """Two parameters may share one gradient value (x + a + b): each has its own state and update."""
    f = ir.DataType.FLOAT
    a, b_, x = (ir.val(n, dtype=f, shape=[3]) for n in ("a", "b", "x"))
    graph = ir.Graph([x, a, b_], [], nodes=[], opset_imports={"": 18}, name="joint")
    build = Builder(graph, "capture")
    y = build.op("Add", build.op("Add", x, a), b_)
    loss = build.op("ReduceSum", build.op("Mul", y, y), keepdims=0)
    dy = build.op("Mul", y, build.scalar(2.0, y))
    loss.name, dy.name = "loss", "dy"
    graph.outputs.extend([loss, dy])
    signature = Signature(
        loss="loss", inputs=("x",), parameters=(Parameter("a", gradient="dy"), Parameter("b", gradient="dy"))
    )
    values = {"a": np.zeros(3, np.float32), "b": np.ones(3, np.float32)}
    made = TrainingGraph(ir.Model(graph, ir_version=10), signature, values)
    attach(made, AdamW(lr=0.1, weight_decay=0.0))
    session = TrainingSession(made, threads=1, poison=True)
    for _ in range(3):
        session.step({"x": np.array([1.0, -2.0, 3.0], np.float32)})
    state = session.state_dict()
    assert np.allclose(state["b"] - state["a"], 1.0, atol=1e-5) and state["a"].all()


@pytest.mark.parametrize("stage", ["stepped", "lowered", "planned"])
def test_refused_at_later_stages(stage) -> None:
    graph = feed_graph()
    graph.signature = graph.signature.replace(stage=stage)
    with pytest.raises(PassError, match=stage):
        attach(graph, AdamW())


def test_refusals() -> None:
    graph = feed_graph()
    attach(graph, AdamW())
    with pytest.raises(PassError, match="cannot get an optimizer"):
        attach(graph, AdamW())
    with pytest.raises(PassError, match="no trainable parameter"):
        attach(feed_graph(frozen=tuple(SHAPES)), AdamW())
    with pytest.raises(PassError, match="accumulation_steps=0"):
        attach(feed_graph(), AdamW(), accumulation_steps=0)
    graph = feed_graph()
    first, *rest = graph.signature.parameters
    graph.signature = graph.signature.replace(parameters=(Parameter(first.name, gradient=None), *rest))
    with pytest.raises(SignatureError, match="'embed.weight' has no gradient"):
        attach(graph, AdamW())
