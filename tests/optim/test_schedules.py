"""Learning-rate schedules against PyTorch-style formulas."""

from __future__ import annotations

import math

import pytest

from ortgraph.errors import InputError
from ortgraph.optim import schedules


def test_constant() -> None:
    assert [schedules.constant(0.5)(s) for s in (0, 7)] == [0.5, 0.5]
    assert [schedules.constant(0.5, warmup_steps=4)(s) for s in (0, 1, 4, 9)] == [0.0, 0.125, 0.5, 0.5]


def test_linear() -> None:
    rate = schedules.linear(1.0, total_steps=10, warmup_steps=2)
    assert [rate(s) for s in (0, 1, 2, 6, 10, 12)] == [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]


def test_cosine() -> None:
    rate = schedules.cosine(1.0, total_steps=12, warmup_steps=2, minimum=0.1)
    assert rate(1) == 0.5 and rate(2) == 1.0 and rate(12) == pytest.approx(0.1) and rate(99) == pytest.approx(0.1)
    assert rate(7) == pytest.approx(0.1 + 0.9 * 0.5)
    assert all(rate(s) > rate(s + 1) for s in range(2, 11)) and not math.isnan(rate(0))


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "polynomial"])
def test_every_step_is_that_of_transformers(name: str, warmup: int) -> None:
    torch = pytest.importorskip("torch", reason="the peer of this comparison")
    optimization = pytest.importorskip("transformers.optimization", reason="the peer of this comparison")
    lr, total = 0.3, 17
    options = {"polynomial": {"power": 2.0, "lr_end": 0.01}}.get(name, {})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    peer = optimization.get_scheduler(
        "constant_with_warmup" if name == "constant" else name,
        optimizer,
        warmup,
        total,
        scheduler_specific_kwargs=options,
    )
    ours = {
        "constant": lambda: schedules.constant(lr, warmup),
        "linear": lambda: schedules.linear(lr, total, warmup),
        "cosine": lambda: schedules.cosine(lr, total, warmup),
        "polynomial": lambda: schedules.polynomial(lr, total, warmup, power=2.0, minimum=0.01),
    }[name]()
    for step in range(total + (0 if name == "cosine" else 3)):  # behind its end theirs goes up again
        assert ours(step) == pytest.approx(peer.get_last_lr()[0], rel=1e-12, abs=1e-15), step
        optimizer.step()
        peer.step()


@pytest.mark.parametrize(("total", "warmup"), [(0, 0), (3, 3), (3, 5), (3, -1)])
def test_impossible(total, warmup) -> None:
    for make in (schedules.linear, schedules.cosine, schedules.polynomial):
        with pytest.raises(InputError, match="total_steps > warmup_steps"):
            make(1.0, total, warmup)
    with pytest.raises(InputError, match="minimum < lr"):
        schedules.polynomial(0.1, 10, minimum=0.1)
