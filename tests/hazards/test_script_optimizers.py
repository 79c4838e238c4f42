"""FusedAdam and FP16_Optimizer in scripts that do more than step: writes between steps, other optimizers' states, copies."""

from __future__ import annotations

import copy
import io

import pytest

torch = pytest.importorskip("torch", reason="optimizers for PyTorch scripts")

from ortgraph.errors import InputError  # noqa: E402
from ortgraph.optim import FP16_Optimizer, FusedAdam, script_optimizer  # noqa: E402

LOW = [torch.float16, torch.bfloat16]


@pytest.fixture(params=["kernel", "torch"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(script_optimizer, "compiled", lambda: False)
    elif not script_optimizer.compiled():
        pytest.skip("no compiler")


def stepped(parameter, optimizer, steps=1):
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return parameter


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", LOW)
def test_a_parameter_that_was_written_between_steps_keeps_what_was_written(dtype):
    parameter = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = FusedAdam([parameter], lr=0.125)
    stepped(parameter, optimizer)
    with torch.no_grad():
        parameter.fill_(5.0)  # as module.load_state_dict does
    stepped(parameter, optimizer)
    assert torch.allclose(parameter.float(), torch.tensor(4.875), atol=0.04)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", LOW)
def test_small_steps_still_add_up_in_the_master(dtype):
    parameter = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = FusedAdam([parameter], lr=1e-5)
    half = FusedAdam([twin := torch.nn.Parameter(parameter.detach().clone())], lr=1e-5)
    stepped(parameter, optimizer, 40)
    stepped(twin, half, 20)
    again = FusedAdam([twin], lr=1e-5)
    again.load_state_dict(half.state_dict())
    stepped(twin, again, 20)
    master = optimizer.master(parameter)
    assert torch.allclose(master, torch.tensor(1.0 - 40e-5), atol=1e-6)
    assert torch.equal(master, again.master(twin))


@pytest.mark.parametrize("option", ["maximize", "amsgrad"])
def test_options_that_would_be_another_update_are_refused(option):
    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(InputError, match=option):
        FusedAdam([{"params": [parameter], option: True}])
    other = stepped_torch(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], **{option: True}))
    with pytest.raises(InputError, match=option):
        FusedAdam([parameter]).load_state_dict(other.state_dict())


def stepped_torch(optimizer):
    parameter = optimizer.param_groups[0]["params"][0]
    stepped(parameter, optimizer)
    return optimizer


def test_a_refused_step_counts_for_no_parameter():
    dense, table = torch.nn.Parameter(torch.ones(2)), torch.nn.Embedding(3, 2, sparse=True)
    optimizer = FusedAdam([{"params": [dense]}, {"params": [table.weight]}])
    dense.grad = torch.ones(2)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(InputError, match="dense"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(2)) and "step" not in optimizer.state[dense]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_steps_as_the_original(how, dtype):
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 4).to(dtype)
    pair = [(module, FP16_Optimizer(FusedAdam(module.parameters(), lr=1e-2)))]

    def step(module, optimizer):
        optimizer.zero_grad()
        optimizer.backward(module(torch.ones(2, 4, dtype=dtype)).square().mean())
        optimizer.step()

    step(*pair[0])
    if how == "deepcopy":
        pair.append(copy.deepcopy(pair[0]))
    else:
        torch.save(pair[0], file := io.BytesIO())
        file.seek(0)
        pair.append(torch.load(file, weights_only=False))
    for one in pair:
        step(*one)
        assert one[1].param_groups is one[1].optimizer.param_groups
    assert pair[1][0].weight is not module.weight and torch.equal(pair[1][0].weight, module.weight)
    assert pair[1][1].loss_scale == pair[0][1].loss_scale
