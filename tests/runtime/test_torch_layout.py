"""State dicts of PyTorch in and out: the same values exactly, and the same training from there on."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="state dicts of PyTorch")

import ortgraph  # noqa: E402
from ortgraph.errors import InputError  # noqa: E402
from ortgraph.optim import LAMB, SGD, AdamW, FusedLAMB, LossScale  # noqa: E402
from ortgraph.runtime.torch_layout import groups_of  # noqa: E402

STEPS, TOLERANCE = 3, 1e-6


class Net(torch.nn.Module):
    """A tied head, a frozen and an unused parameter, buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.table = torch.nn.LayerNorm(8), torch.nn.Embedding(11, 8)
        self.body, self.batch, self.unused = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(2, 2)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight
        self.body.bias.requires_grad_(False)

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.batch(torch.tanh(self.body(self.norm(self.table(ids)))))
        return torch.nn.functional.cross_entropy(self.head(hidden), y)


def batches(n: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(seed)
    return [{k: torch.randint(0, 11, (6,), generator=made) for k in ("ids", "y")} for _ in range(n)]


@pytest.fixture(scope="module")
def captured() -> Any:
    with pytest.warns(UserWarning, match="unused"):
        return ortgraph.capture(Net(), batches(1)[0])


def peer(kind: str, module: torch.nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    """The graph's optimizer and PyTorch's; the second group comes first among the module's parameters."""
    decay = [p for n, p in module.named_parameters() if not n.startswith(("norm", "batch"))]
    rest = [p for n, p in module.named_parameters() if n.startswith(("norm", "batch"))]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    common: dict[str, Any] = {"weight_decay": 0.1, "no_decay": ("norm.*", "batch.*"), "max_grad_norm": 0.5}
    if kind == "adamw":
        return AdamW(lr=0.01, betas=(0.8, 0.95), **common), torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))
    if kind == "lamb":
        return LAMB(lr=0.01, **common), FusedLAMB(groups, lr=0.01)
    return SGD(lr=0.01, momentum=0.9, **common), torch.optim.SGD(groups, lr=0.01, momentum=0.9)


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, some: list[dict[str, torch.Tensor]]) -> None:
    for batch in some:
        optimizer.zero_grad()
        module(**batch).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()


def near(session: Any, module: torch.nn.Module) -> None:
    found, wanted = session.state_dict(), module.state_dict()
    assert set(found) == set(wanted)
    for name, value in found.items():
        np.testing.assert_allclose(value, wanted[name].numpy(), rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lamb"])
def test_training_goes_on_in_the_other(captured: Any, kind: str) -> None:
    module = Net()
    own, optimizer = peer(kind, module)
    groups = groups_of(module, optimizer)
    session = ortgraph.TrainingSession(ortgraph.optimize(captured, "O0", optimizer=own).graph)
    fresh = session.torch_state_dict(groups)["optimizer"]
    assert not fresh["state"] and [len(g["params"]) for g in fresh["param_groups"]] == [len(g) for g in groups]
    some = batches(3 * STEPS)
    train(module, optimizer, some[:STEPS])
    given = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    session.load_torch_state_dict(given, groups)
    back = session.torch_state_dict(groups)
    assert same(back["model"], dict(given["model"]))
    for i, state in given["optimizer"]["state"].items():
        counted = {} if kind == "sgd" else {"step": state["step"]}  # PyTorch's SGD does not count
        wanted = {k: v for k, v in state.items() if v is not None} | counted
        assert same({k: back["optimizer"]["state"][i][k] for k in wanted}, wanted)
    assert set(back["optimizer"]["state"]) == set(given["optimizer"]["state"])
    for one, two in zip(back["optimizer"]["param_groups"], given["optimizer"]["param_groups"], strict=True):
        assert {k: v for k, v in one.items() if k != "initial_lr"} == two
    train(module, optimizer, some[STEPS : 2 * STEPS])
    for batch in some[STEPS : 2 * STEPS]:
        session.step(batch)
    near(session, module)
    other = Net()
    _, second = peer(kind, other)
    made = copy.deepcopy(session.torch_state_dict(groups))
    other.load_state_dict(made["model"])
    second.load_state_dict(made["optimizer"])
    train(other, second, some[2 * STEPS :])
    for batch in some[2 * STEPS :]:
        session.step(batch)
    near(session, other)


def test_scaler_and_names(captured: Any) -> None:
    """A scaler that has grown and backed off; an optimizer whose state says its names."""
    policy = LossScale(initial=1024.0, interval=3)
    graph = ortgraph.optimize(captured, "O0", optimizer=AdamW(lr=0.01, loss_scale=policy)).graph
    session, module = ortgraph.TrainingSession(graph), Net()
    optimizer = torch.optim.AdamW(module.named_parameters(), lr=0.01, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for i, batch in enumerate(batches(5)):
        optimizer.zero_grad()
        scaler.scale(module(**batch) * (float("inf") if i == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1024.0  # halved once, doubled once
    given = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    session.load_torch_state_dict(given)
    assert session.torch_state_dict()["scaler"] == {**scaler.state_dict(), "scale": 1024.0}
    assert session.steps == 4, "updates, without what was skipped"
    session.load_torch_state_dict({"scaler": {**scaler.state_dict(), "_growth_tracker": 2}})
    session.step(batches(1)[0])
    assert session.loss_scale == 2048.0
    with pytest.raises(InputError, match="growth_interval=7(?s:.*)interval=7"):
        session.load_torch_state_dict({"scaler": {**scaler.state_dict(), "growth_interval": 7}})


def test_what_does_not_fit_is_refused(captured: Any) -> None:
    module = Net()
    own, optimizer = peer("adamw", module)
    groups = groups_of(module, optimizer)
    session = ortgraph.TrainingSession(ortgraph.optimize(captured, "O0", optimizer=own, accumulation_steps=2).graph)
    train(module, optimizer, batches(2))
    good = optimizer.state_dict()
    before = {**session.state_dict(), **session.optimizer_state_dict()}

    def refuses(words: str, state: dict[str, Any], names: Any = groups, **more: Any) -> None:
        with pytest.raises(InputError, match=words):
            session.load_torch_state_dict({"optimizer": state, **more}, names)
        now = {**session.state_dict(), **session.optimizer_state_dict()}
        assert all(np.array_equal(before[k], v) for k, v in now.items())

    def changed(**values: Any) -> dict[str, Any]:
        state = copy.deepcopy(good)
        state["param_groups"][0].update(values)
        return state

    refuses(r"groups of \[5, 4\] parameters, the names given for it are \[4, 5\]", good, groups[::-1])
    refuses("unknown 'nowhere'", good, [[*groups[0][1:], "nowhere"], groups[1]])
    refuses("amsgrad=True", changed(amsgrad=True))
    refuses(r"betas=\(0.9, 0.999\), the graph has betas=\(0.8, 0.95\)", changed(betas=(0.9, 0.999)))
    refuses("learning rates of the groups", changed(lr=0.02))
    refuses("decoupled_weight_decay=False", changed(decoupled_weight_decay=False))
    other = Net()
    _, momentum = peer("sgd", other)
    train(other, momentum, batches(2))
    refuses("has betas=None", momentum.state_dict())
    uneven = copy.deepcopy(good)
    uneven["state"][0]["step"] += 1
    refuses("was updated 3 times", uneven)
    refuses("missing 'norm.bias'", good, model={k: v for k, v in Net().state_dict().items() if k != "norm.bias"})
    refuses("the graph has none", good, scaler=torch.amp.GradScaler("cpu").state_dict())
    batch = batches(1)[0]
    session.accumulate(batch)
    with pytest.raises(InputError, match="accumulated and not applied"):
        session.torch_state_dict(groups)
