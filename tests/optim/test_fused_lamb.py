"""FusedLAMB against its formula in float64, and against LAMB in a graph."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="optimizers for PyTorch scripts")

from ortgraph.errors import InputError  # noqa: E402
from ortgraph.optim import FusedLAMB, script_optimizer  # noqa: E402

SHAPES = [(70, 5), (5,), (), (0, 3), (41000,), (8, 3)]
OPTIONS: list[dict[str, Any]] = [
    {"weight_decay": 0.1},
    {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "always_adapt": True, "max_trust": 0.5},
    {"weight_decay": 0.01, "bias_correction": False, "min_trust": 2.0},
    {},
]


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(script_optimizer, "compiled", lambda: False)
    elif not script_optimizer.compiled():
        pytest.skip("no compiler")
    return request.param


def weights() -> list[Any]:
    made = torch.Generator().manual_seed(0)
    own = [torch.randn(s, generator=made) for s in SHAPES]
    own[1].zero_()  # a norm of zero: trust ratio 1
    own[-1] = torch.randn(3, 8, generator=made).t()  # not contiguous
    return [torch.nn.Parameter(w) for w in own]


def formula(w: Any, g: Any, state: dict[str, Any], n: int, o: dict[str, Any]) -> Any:
    beta1, beta2 = o["betas"]
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
    one, two = (1 - beta1**n, 1 - beta2**n) if o["bias_correction"] else (1, 1)
    u = state["m"] / one / ((state["v"] / two).sqrt() + o["eps"]) + o["weight_decay"] * w
    trust = 1.0
    if o["weight_decay"] or o["always_adapt"]:
        trust = float(w.norm() / u.norm()) if w.norm() > 0 and u.norm() > 0 else 1.0
        trust = min(max(trust, o["min_trust"]), o["max_trust"] or math.inf)
    return w - o["lr"] * trust * u


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_step_is_the_formulas(way: str, options: dict[str, Any]) -> None:
    own = weights()
    exact = [(p.detach().double(), {}) for p in own]
    optimizer = FusedLAMB(own, **options)
    for n in range(1, 11):
        made = torch.Generator().manual_seed(n)
        for i, p in enumerate(own):
            g = torch.randn(SHAPES[i], generator=made) * 10.0 ** (n % 4 - 2)
            p.grad = g
            exact[i] = (formula(exact[i][0], g.double(), exact[i][1], n, optimizer.param_groups[0]), exact[i][1])
        optimizer.step()
        for p, (want, _) in zip(own, exact, strict=True):
            assert (p.detach().double() - want).norm() <= 3e-6 * want.norm() + 1e-9, (n, p.shape)
    p.grad = p.grad.to_sparse()
    with pytest.raises(InputError, match="FusedLAMB takes dense"):
        optimizer.step()


def test_the_same_bits_at_any_number_of_threads_and_a_closure() -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            own = weights()
            optimizer = FusedLAMB(own, lr=0.1, weight_decay=0.1)
            loss = optimizer.step(lambda own=own: [p.square().sum().backward() for p in own] and 1.5)
            assert loss == 1.5
            results.append(own)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_other_dtypes_go_by_pytorch(way: str) -> None:
    p, q = (torch.nn.Parameter(torch.ones(4, dtype=t)) for t in (torch.float32, torch.bfloat16))
    for x in (p, q):
        x.grad = torch.ones_like(x)
    FusedLAMB([p, q], lr=0.5).step()
    assert torch.allclose(p, torch.full((4,), 0.5), atol=1e-5) and torch.allclose(q.float(), p, atol=1e-2)
