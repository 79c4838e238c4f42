"""SGD against torch.optim.SGD, LAMB against its formula in numpy, over twenty steps; their text forms."""

from __future__ import annotations

import importlib.util
import pathlib

import numpy as np
import pytest

from ortgraph.errors import InputError
from ortgraph.optim import LAMB, SGD, AdamW, Group, LossScale, parse
from ortgraph.optim.attach import attach
from ortgraph.runtime.session import TrainingSession

_SPEC = importlib.util.spec_from_file_location("attach_cases", pathlib.Path(__file__).with_name("test_attach.py"))
attach_cases = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(attach_cases)
SHAPES, feed_graph, gradients_of = attach_cases.SHAPES, attach_cases.feed_graph, attach_cases.gradients_of

SGDS = [
    SGD(),
    SGD(lr=0.05, weight_decay=0.1),
    SGD(lr=0.05, momentum=0.9),
    SGD(lr=0.02, momentum=0.8, dampening=0.3, weight_decay=0.01),
    SGD(lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1, no_decay="*.bias", max_grad_norm=1.0),
    SGD(
        lr=0.02,
        momentum=0.9,
        groups=(Group("head.*", lr=0.1, momentum=0.5, nesterov=True), Group("embed*", momentum=0.0)),
    ),
]
LAMBS = [
    LAMB(lr=0.01),
    LAMB(lr=0.02, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, no_decay=("*.bias",), max_grad_norm=0.5),
    LAMB(lr=0.02, max_trust=0.5, min_trust=0.1, always_adapt=True, no_decay="*"),
    LAMB(lr=0.02, bias_correction=False, groups=(Group("embed*", weight_decay=0.0, lr=0.1),)),
]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("optimizer", SGDS, ids=str)
def test_sgd_equals_pytorch(optimizer: SGD, accumulation: int) -> None:
    torch = pytest.importorskip("torch", reason="the peer of this comparison")
    graph = feed_graph()
    exact = {n: torch.tensor(v, dtype=torch.float64, requires_grad=True) for n, v in graph.values.items()}
    groups = []
    for n, v in exact.items():
        s = optimizer.settings(n)
        groups.append({"params": [v], "lr": optimizer.lr * s.lr_scale, "momentum": s.momentum, "nesterov": s.nesterov,
                       "dampening": s.dampening, "weight_decay": s.weight_decay})  # fmt: skip
    peer = torch.optim.SGD(groups)
    assert attach(graph, optimizer, accumulation) == 5
    session = TrainingSession(graph, threads=2, poison=True)
    for step in range(20):
        parts = [gradients_of(accumulation * step + i) for i in range(accumulation)]
        for n, v in exact.items():
            v.grad = torch.tensor(sum(p[n].astype(np.float64) for p in parts) / accumulation)
        if optimizer.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(exact.values(), optimizer.max_grad_norm)
        peer.step()
        for p in parts[:-1]:
            session.accumulate({f"fed.{n}": v for n, v in p.items()})
        session.step({f"fed.{n}": v for n, v in parts[-1].items()})
    for n, v in session.state_dict().items():
        want = exact[n].detach().numpy()
        assert np.linalg.norm(v - want) <= 3e-6 * np.linalg.norm(want) + 1e-7, n


def lamb_step(optimizer: LAMB, name: str, rate: float, step: int, w, g, m, v):
    """One step by the formula, in float64."""
    s = optimizer.settings(name)
    (beta1, beta2), decay = s.betas, s.weight_decay
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    mean, square = m, v
    if optimizer.bias_correction:
        mean, square = m / (1 - beta1**step), v / (1 - beta2**step)
    u = mean / (np.sqrt(square) + s.eps) + decay * w
    ratio = 1.0
    if optimizer.always_adapt or decay:
        size_w, size_u = np.sqrt((w * w).sum()), np.sqrt((u * u).sum())
        ratio = size_w / size_u if size_w > 0 and size_u > 0 else 1.0
        ratio = min(max(ratio, optimizer.min_trust), optimizer.max_trust or np.inf)
    return w - rate * s.lr_scale * ratio * u, m, v


@pytest.mark.parametrize("optimizer", LAMBS, ids=str)
def test_lamb_equals_its_formula(optimizer: LAMB) -> None:
    graph = feed_graph()
    exact = {n: [v.astype(np.float64), np.zeros(v.shape), np.zeros(v.shape)] for n, v in graph.values.items()}
    attach(graph, optimizer)
    session = TrainingSession(graph, threads=2, poison=True)
    for step in range(1, 21):
        made, rate = gradients_of(step), optimizer.lr / step**0.5
        clip = 1.0
        if optimizer.max_grad_norm is not None:
            norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in made.values()))
            clip = min(1.0, optimizer.max_grad_norm / (norm + 1e-6))
        for n, state in exact.items():
            exact[n] = list(lamb_step(optimizer, n, rate, step, state[0], made[n] * clip, *state[1:]))
        session.step({f"fed.{n}": g for n, g in made.items()}, learning_rate=rate)
    values, states = session.state_dict(), session.optimizer_state_dict()
    for n, (w, m, v) in exact.items():
        for got, want in ((values[n], w), (states[f"exp_avg/{n}"], m), (states[f"exp_avg_sq/{n}"], v)):
            assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want) + 1e-7, n


def test_lamb_of_zero_weights_moves_them() -> None:
    """A norm of zero gives trust ratio 1, not 0 and not NaN."""
    graph = feed_graph()
    graph.values = {n: np.zeros_like(v) for n, v in graph.values.items()}
    attach(graph, LAMB(lr=0.1))
    session = TrainingSession(graph, threads=1)
    session.step({f"fed.{n}": v for n, v in gradients_of(1).items()})
    assert all(np.isfinite(v).all() and v.any() for v in session.state_dict().values())


@pytest.mark.parametrize(
    "optimizer",
    [
        *SGDS, *LAMBS, AdamW(loss_scale="dynamic"), AdamW(loss_scale=1024), SGD(nesterov=True, momentum=0.9),
        LAMB(loss_scale=LossScale(initial=16.0, interval=5, minimum=2.0)),
    ],
    ids=str,
)  # fmt: skip
def test_text_round_trip(optimizer) -> None:
    text = str(optimizer)
    assert parse(text) == optimizer == type(optimizer).parse(text)
    assert not any(c in text for c in " {}|,")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rmsprop", "one of adamw, lamb, sgd"),
        ("sgd(nesterov=true)", "nesterov without momentum"),
        ("sgd(nesterov=yes;momentum=0.9)", "nesterov=true"),
        ("sgd(momentum=0.9;group(match=a;dampening=0.5;nesterov=true))", "nesterov"),
        ("sgd(group(match=a;betas=0.9:0.9))", "a group sets lr, momentum"),
        ("lamb(group(match=a;momentum=0.9))", "a group sets lr, betas"),
        ("lamb(max_trust=0)", "max_trust"),
        ("adamw(loss_scale=big)", "loss_scale 'big' does not parse"),
        ("adamw(loss_scale=dynamic:0)", "positive"),
        ("adamw(loss_scale=dynamic:8:0.5)", "growth"),
        ("adamw(loss_scale=8:2)", "does not parse"),
    ],
)
def test_text_that_does_not_parse(text, words) -> None:
    with pytest.raises(InputError) as caught:
        parse(text)
    assert words in f"{caught.value.what} {caught.value.hint}"
