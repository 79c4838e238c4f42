"""ORTModule as scripts use modules: names, states, copies, hooks, data parallelism; and the backend's options."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import ortgraph
from ortgraph.dynamo.backend import FallbackWarning
from ortgraph.errors import InputError, UnsupportedError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(6, 12), nn.Dropout(0.25), nn.Linear(12, 3)
        self.register_buffer("scale", torch.tensor(2.0))
        self.config = {"classes": 3}

    def forward(self, x, *, shift=0.0):
        return self.head(self.drop(torch.relu(self.body(x)))) * self.scale + shift

    def classes(self) -> int:
        return self.config["classes"]


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return torch.linalg.inv(self.a(x) + 5 * torch.eye(4)).sum()


def test_names_are_those_of_the_module(wrap):
    module = Net()
    compiled = wrap(module)
    assert list(compiled.state_dict()) == list(module.state_dict())
    for method in ("named_parameters", "named_buffers", "named_children"):
        assert [n for n, _ in getattr(compiled, method)()] == [n for n, _ in getattr(module, method)()]
    assert all(a is b for a, b in zip(compiled.parameters(), module.parameters(), strict=True))
    assert (
        compiled.module is module
        and compiled.classes() == 3
        and compiled.get_parameter("head.bias") is module.head.bias
    )
    compiled.config = {"classes": 4}
    assert module.config == {"classes": 4} and compiled.classes() == 4
    assert inspect.signature(compiled.forward) == inspect.signature(module.forward)
    other = Net()
    compiled.load_state_dict(other.state_dict())
    assert torch.equal(module.head.weight, other.head.weight)
    compiled.to(torch.float64)
    assert (
        compiled.head.weight.dtype == module.head.weight.dtype == torch.float64
        and compiled.scale.dtype == torch.float64
    )
    with pytest.raises(AttributeError, match="nothing"):
        compiled.nothing  # noqa: B018


def test_mode_and_hooks(wrap):
    module = Net()
    compiled = wrap(module)
    seen = []
    compiled.register_forward_pre_hook(lambda m, args: seen.append("before"))
    compiled.register_forward_hook(lambda m, args, out: seen.append(tuple(out.shape)))
    compiled.eval()
    assert not module.training and not module.drop.training and not compiled.training
    x = torch.randn(5, 6)
    torch.testing.assert_close(compiled(x, shift=1.0), module(x, shift=1.0))
    assert seen == ["before", (5, 3)]
    compiled.train()
    assert module.drop.training


def test_gradient_hooks_run(wrap):
    compiled = wrap(Net())
    seen = []
    compiled.head.weight.register_hook(lambda g: seen.append("tensor") or 2 * g)
    compiled.head.bias.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    compiled.eval()
    x = torch.randn(5, 6)
    compiled(x).sum().backward()
    doubled = compiled.head.weight.grad.clone()
    assert sorted(seen) == ["accumulated", "tensor"]
    eager = copy.deepcopy(compiled.module)
    eager.zero_grad()
    eager(x).sum().backward()
    torch.testing.assert_close(doubled, 2 * eager.head.weight.grad)


def test_hooks_that_come_and_go_between_calls(wrap):
    """Dynamo does not guard on hooks by itself: one that is registered after the first call would never run."""
    module = Net().eval()
    eager = copy.deepcopy(module)
    compiled = wrap(module, pipeline="O0")
    x = torch.randn(5, 6)
    found = []
    for call, m in ((compiled, module), (eager, eager)):
        results = [call(x)]
        for register in (
            lambda m: m.head.register_forward_hook(lambda _, args, out: out * 3),
            lambda m: m.body.register_forward_pre_hook(lambda _, args: (args[0] - 1,)),
            lambda m: m.head.register_full_backward_hook(lambda _, given, made: (given[0] * 2,)),
        ):
            handle = register(m)
            results.append(call(x))
            handle.remove()
            results[-1].square().sum().backward()
        results.append(call(x))
        found.append([r.detach() for r in results] + [p.grad for p in m.parameters()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies(wrap, way):
    compiled = wrap(Net()).eval()
    x = torch.randn(5, 6)
    before = compiled(x)
    if way == "deepcopy":
        other = copy.deepcopy(compiled)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(compiled))
    else:
        file = io.BytesIO()
        torch.save(compiled, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert isinstance(other, ortgraph.ORTModule) and not other.training
    assert other.head.weight is not compiled.head.weight
    assert torch.equal(other(x), before)
    with torch.no_grad():
        other.head.weight.zero_()
    assert torch.equal(compiled(x), before) and not torch.equal(other(x), before)


def test_any_optimizer_trains(wrap):
    module = Net().eval()
    eager = copy.deepcopy(module)
    compiled = wrap(module)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (compiled, eager)]
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    for _ in range(4):
        losses = []
        for m, optimizer in zip((compiled, eager), optimizers, strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(m(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1])
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_dropout_follows_the_seed(wrap):
    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(40, 50))

        def forward(self):
            return nn.functional.dropout(self.weight, 0.3)

    compiled = wrap(Drop())
    torch.manual_seed(3)
    first, second = compiled(), compiled()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(compiled(), first) and torch.equal(compiled(), second)
    state = torch.get_rng_state()
    third = compiled()
    torch.set_rng_state(state)
    assert torch.equal(compiled(), third)
    assert abs(float((first == 0).float().mean()) - 0.3) < 0.05
    assert torch.equal(first[first != 0], torch.full_like(first[first != 0], 1 / 0.7))
    second.sum().backward()  # the mask of its own forward call, though others ran since
    assert torch.equal(compiled.weight.grad, second.detach())


def test_checkpointed_module_draws_the_same_mask_again(wrap):
    compiled = wrap(nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5)))
    x = torch.randn(4, 6, requires_grad=True)
    kept = torch.utils.checkpoint.checkpoint(compiled, x, use_reentrant=False)
    kept.sum().backward()
    assert torch.equal(compiled.module[0].bias.grad, 2.0 * (kept != 0).sum(0))


def test_saved_tensor_hooks_see_the_arena(wrap):
    module = Net().eval()
    eager = copy.deepcopy(module)
    compiled = wrap(module)
    x = torch.randn(5, 6)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True).copy(), torch.from_numpy):
        loss = (compiled(x) ** 2).sum()
    loss.backward()
    (eager(x) ** 2).sum().backward()
    torch.testing.assert_close(module.body.weight.grad, eager.body.weight.grad)


def test_what_cannot_be_compiled_runs_in_pytorch():
    module = Inverse()
    eager = copy.deepcopy(module)
    x = torch.randn(4, 4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compiled = ortgraph.ORTModule(module)
        for _ in range(2):
            compiled(x).backward()
    texts = [str(w.message) for w in said if issubclass(w.category, FallbackWarning)]
    assert len(texts) == 1 and "linalg_inv" in texts[0] and "test_ort_module.py" in texts[0]
    for _ in range(2):
        eager(x).backward()
    torch.testing.assert_close(module.a.weight.grad, eager.a.weight.grad)


def test_refusal_instead_of_fallback():
    with pytest.raises(UnsupportedError, match="linalg_inv"):
        ortgraph.ORTModule(Inverse(), fallback=False)(torch.randn(4, 4))


def test_options_are_checked(wrap):
    with pytest.raises(InputError, match="no option 'presision'"):
        ortgraph.ORTModule(Net(), presision="bf16")
    with pytest.raises(InputError, match="threads=0"):
        ortgraph.ORTModule(Net(), threads=0)
    with pytest.raises(InputError, match="not dict"):
        ortgraph.ORTModule({})
    with pytest.raises(InputError, match="already"):
        ortgraph.ORTModule(wrap(Net()))


def test_hook_on_the_graph_sees_names_and_may_change_it(wrap):
    seen = []

    def hook(graph):
        seen.append((graph.stage, [p.name for p in graph.signature.parameters], list(graph.signature.inputs)))

    compiled = wrap(Net().eval(), after_capture=hook)
    compiled(torch.randn(5, 6)).sum().backward()
    (stage, parameters, inputs), *_ = seen
    assert stage == "captured" and sorted(parameters) == ["body.bias", "body.weight", "head.bias", "head.weight"]
    assert len(inputs) == 1

    def drops_a_gradient(graph):
        graph.graph.outputs.pop()

    with pytest.raises(ortgraph.errors.OrtgraphError):
        wrap(Net().eval(), after_capture=drops_a_gradient)(torch.randn(5, 6))


def test_backend_is_found_by_name():
    assert "ortgraph" in torch._dynamo.list_backends()
    function = torch.compile(lambda x: x.sin() + 1, backend="ortgraph", options={"pipeline": "O1", "fallback": False})
    x = torch.randn(3, requires_grad=True)
    function(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_memory_budget_keeps_gradients(check_gradients):
    module = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))

    def step(m, batch):
        (m(*batch) ** 2).mean().backward()

    check_gradients(module, (torch.randn(64, 16),), step, memory_budget="70%")


def test_bf16_precision_is_near_pytorch():
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    eager = copy.deepcopy(module)
    compiled = ortgraph.ORTModule(module, precision="bf16", fallback=False)
    x = torch.randn(16, 32)
    for m in (compiled, eager):
        (m(x) ** 2).mean().backward()
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32
        assert (ours.grad - theirs.grad).norm() < 2e-2 * theirs.grad.norm()
        assert not torch.equal(ours.grad, theirs.grad)


def test_a_compiled_graph_is_read_by_another_process(tmp_path):
    code = """
import logging, sys, torch, ortgraph
from ortgraph.manager import graph_cache
graph_cache.folder = lambda: __import__("pathlib").Path(sys.argv[1])
logging.basicConfig(level=logging.INFO)
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8, eps=1e-12), torch.nn.GELU(), torch.nn.Linear(8, 2))
compiled = ortgraph.ORTModule(module, fallback=False)
(compiled(torch.ones(3, 6).cumsum(0)) ** 2).sum().backward()
print(float(module[0].weight.grad.norm()))
"""
    runs = [
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    assert ["compiled graph read" in r.stderr for r in runs] == [False, True], "the package must not change meanwhile"
