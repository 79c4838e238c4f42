"""Ways in which a captured gradient could be wrong without an error."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ortgraph
from ortgraph.errors import CaptureError


class Round(torch.autograd.Function):
    """Rounds; its gradient is three times the incoming one."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


rounded = Round.apply  # as libraries name it, before anything is captured


class Two(nn.Module):
    """Two linear layers, combined by a function."""

    def __init__(self, combine=None) -> None:
        super().__init__()
        self.a, self.b, self.combine = nn.Linear(4, 4), nn.Linear(4, 4), combine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.combine(self, x).square().sum()


def without_gradient(m, x):
    with torch.no_grad():
        h = m.a(x)
    return h * m.b(x) + m.a(x).detach() + m.b(x) * 2


def hooked(m, x):
    h = m.a(x)
    if h.requires_grad:
        h.register_hook(lambda grad: grad * 2)
    return m.b(h)


def recomputed(m, x):
    return m.b(torch.utils.checkpoint.checkpoint(lambda y: torch.tanh(m.a(y)), x, use_reentrant=False))


def inner_gradient(m, x):
    (g,) = torch.autograd.grad(m.a(x).square().sum(), m.a.weight, create_graph=True)
    return g + m.b.weight


def written_in_place(m, x):
    h = m.a(x)
    h[:, 1] = m.b(x)[:, 0] * 2
    h[0].mul_(3)
    return h.relu_() + h


def aliased(m, x):
    h = m.a(x)
    view = h.view(-1)
    h += m.b(x)
    return h * view.view_as(h)


@pytest.mark.parametrize(
    "combine",
    [
        lambda m, x: Round.apply(m.a(x)) * m.b(x), lambda m, x: rounded(m.a(x)) * m.b(x),
        lambda m, x: rounded(m.a(x)) * torch.tensor([0.5, 1, 2, 3]) * m.b(x),
        without_gradient, hooked, recomputed, inner_gradient, written_in_place, aliased,
    ],
    ids=["function", "named_function", "function_and_literal", "no_grad",
         "hook", "checkpoint", "inner_gradient", "in_place", "alias"],
)  # fmt: skip
def test_gradients_as_autograd_has_them(check_capture, combine):
    torch.manual_seed(0)
    check_capture(Two(combine), {"x": torch.randn(3, 4)})


def test_module_backward_hooks_run(check_capture):
    torch.manual_seed(0)
    module = Two(lambda m, x: m.a(m.b(x)))
    module.a.register_full_backward_hook(lambda m, inputs, outputs: (inputs[0] * 7,))
    graph = check_capture(module, {"x": torch.randn(3, 4)})
    module.a._backward_hooks.clear()
    plain = ortgraph.capture(module, {"x": torch.randn(3, 4)})
    assert graph.text() != plain.text()


def test_autograd_functions_are_left_as_they_were():
    module = torch.autograd.function
    before, hook = module._is_setup_context_defined, torch.Tensor.register_hook
    ortgraph.capture(Two(lambda m, x: Round.apply(m.a(x)) * m.b(x)), torch.ones(3, 4))
    assert module._is_setup_context_defined is before and torch.Tensor.register_hook is hook
    onednn = torch.backends.mkldnn.enabled
    with pytest.raises(CaptureError):
        ortgraph.capture(Two(lambda m, x: m.a(x) if x.sum() > 0 else m.b(x)), torch.ones(3, 4))
    assert module._is_setup_context_defined is before and torch.backends.mkldnn.enabled is onednn


def test_parameter_hooks_are_refused():
    module = Two(lambda m, x: m.a(m.b(x)))
    handle = module.b.weight.register_hook(lambda grad: grad * 5)
    with pytest.raises(CaptureError, match=r"parameter b\.weight has a gradient hook"):
        ortgraph.capture(module, torch.ones(3, 4))
    handle.remove()
    ortgraph.capture(module, torch.ones(3, 4))


def test_reentrant_checkpoints_are_refused_by_name():
    module = Two(
        lambda m, x: torch.utils.checkpoint.checkpoint(lambda y: torch.tanh(m.a(y)), m.b(x), use_reentrant=True)
    )
    with pytest.raises(CaptureError, match="CheckpointFunction") as caught:
        ortgraph.capture(module, torch.ones(3, 4))
    assert "use_reentrant=False" in caught.value.hint


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_parametrized_weights(run_captured, norm):
    torch.manual_seed(0)
    module = Two(lambda m, x: m.a(m.b(x)))
    norm(module.a)
    x = torch.randn(3, 4)
    before = copy.deepcopy(module)
    graph = ortgraph.capture(module, x)
    got = run_captured(graph, {"x": x})[0]
    before(x).backward()
    for name, parameter in before.named_parameters():
        np.testing.assert_allclose(got[f"gradient/{name}"], parameter.grad.numpy(), rtol=2e-5, atol=1e-5)
    for buffer in graph.signature.buffers:
        if buffer.update:
            np.testing.assert_allclose(
                got[buffer.update], dict(before.named_buffers())[buffer.name], rtol=1e-5, atol=1e-6
            )


def test_one_tensor_given_twice_stays_two_inputs(run_captured):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x, y):
            return (self.w * x).sum() + (self.w * y * 10).sum()

    same = torch.ones(3)
    graph = ortgraph.capture(Pair(), {"x": same, "y": same})
    assert graph.signature.inputs == ("x", "y")
    got = run_captured(graph, {"x": np.full(3, 2, np.float32), "y": np.full(3, 3, np.float32)})[0]
    assert got["gradient/w"].tolist() == [32, 32, 32]


def test_buffer_assigned_or_written_under_two_names(run_captured):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.register_buffer("assigned", torch.zeros(3))
            self.register_buffer("written", torch.ones(3))
            self.register_buffer("again", self.written)

        def forward(self, x):
            self.assigned = self.assigned + x
            self.written.mul_(2)
            return (self.w * self.assigned * self.again).sum()

    graph = ortgraph.capture(Counts(), torch.ones(3))
    tied = {b.name: b.tied for b in graph.signature.buffers}
    assert tied == {"assigned": (), "written": ("again",)}
    got = run_captured(graph, {"x": np.full(3, 5, np.float32)})[0]
    assert got["update/assigned"].tolist() == [5, 5, 5] and got["update/written"].tolist() == [2, 2, 2]
    assert got["gradient/w"].tolist() == [10, 10, 10]


def test_parameter_used_by_several_names_and_calls(check_capture):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight
            self.third = self.second

        def forward(self, x):
            return self.third(torch.tanh(self.second(torch.tanh(self.first(x))))).square().sum()

    torch.manual_seed(0)
    graph = check_capture(Shared(), {"x": torch.randn(3, 4)})
    tied = {p.name: p.tied for p in graph.signature.parameters}
    assert tied["first.weight"] == ("second.weight", "third.weight") and tied["second.bias"] == ("third.bias",)


def test_repeated_rows_are_summed_at_two_threads(check_capture):
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.direct = nn.Embedding(3, 32, padding_idx=1), nn.Parameter(torch.randn(3, 32))

        def forward(self, ids):
            gathered = self.direct.gather(0, ids.flatten()[:32].expand(40, 32))
            return (self.table(ids) * self.direct[ids] + gathered[0]).square().mean()

    torch.manual_seed(0)
    check_capture(Rows(), {"ids": torch.randint(0, 3, (16, 64))}, repeats=20)


def test_max_pool_in_several_planes(check_capture):
    """Indices count over the tensor in ONNX, within a plane in PyTorch."""

    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 3, 6, 6))

        def forward(self, x):
            y, at = F.max_pool2d(self.w * x, 3, 2, 1, return_indices=True)
            return (y * at).square().mean() + F.max_unpool2d(y, at, 3, 2, 1, output_size=(6, 6)).square().sum()

    torch.manual_seed(0)
    check_capture(Pool(), {"x": torch.rand(2, 3, 6, 6) + 0.5})


class Noisy(nn.Module):
    """A Transformer layer with dropout everywhere, in float64 and without GELU so that ONNX Runtime runs it as such."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True, activation="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mul(torch.arange(8, dtype=x.dtype)).sum()


def test_dropout_gradient_is_the_slope_of_the_drawn_loss(run_captured):
    torch.manual_seed(0)
    module, x = Noisy().double(), torch.randn(3, 5, 8, dtype=torch.float64)
    graph = ortgraph.capture(module, x)
    assert sum(n.op_type == "Dropout" for n in graph.graph) == 4
    generator = np.random.default_rng(0)
    names = [p.name for p in graph.signature.parameters]
    direction = {n: generator.standard_normal(graph.values[n].shape) for n in names}
    here = run_captured(graph, {"x": x})[0]
    step = 1e-6
    ends = []
    for sign in (1, -1):
        moved = {n: graph.values[n] + sign * step * direction[n] for n in names}
        ends.append(run_captured(graph, {"x": x}, **moved)[0]["loss"])
    slope = (ends[0] - ends[1]) / (2 * step)
    want = sum((here[f"gradient/{n}"] * direction[n]).sum() for n in names)
    assert slope == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("kind", [torch.nn.Dropout, torch.nn.AlphaDropout])
@pytest.mark.filterwarnings("ignore::ortgraph.capture.torch_step.EvaluationModeWarning")
def test_dropout_of_everything_is_refused(kind):
    """Traced, it is a zero that ``evaluate`` and the exported model would keep."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), kind(1.0))
    with pytest.raises(CaptureError, match=r"module 1 drops everything"):
        ortgraph.capture(module.train(), (torch.ones(2, 3),), loss=lambda out: out.sum())
    module.eval()
    ortgraph.capture(module, (torch.ones(2, 3),), loss=lambda out: out.sum())


@pytest.mark.parametrize("alpha", [None, 0.05, 1.0])
def test_expm1_far_below_zero_is_minus_one(alpha):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([-1e30, -400.0, -178.0, -89.0, -40.0, -3.0, -1e-4, 2.0]))

        def forward(self, x):
            z = self.w * x
            return (torch.expm1(z) if alpha is None else torch.nn.functional.celu(z, alpha)).sum()

    module, batch = Model(), {"x": torch.ones(1)}
    loss = module(**batch)
    loss.backward()
    session = ortgraph.TrainingSession(ortgraph.capture(module, batch))
    assert session.loss(batch) == pytest.approx(loss.item(), rel=1e-5)
    np.testing.assert_allclose(session.gradients(batch)["w"], module.w.grad.numpy(), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("function", [torch.special.erfcx, torch.special.log_ndtr], ids=["erfcx", "log_ndtr"])
def test_functions_that_lose_their_digits_are_refused(function):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(8))

        def forward(self, x):
            return function(self.w * x).sum()

    with pytest.raises(ortgraph.errors.UnsupportedError, match="keeps its digits"):
        ortgraph.capture(Model(), {"x": torch.ones(1)})
