"""Roles of inputs and outputs, statistics, randomness, provenance, hooks."""

from __future__ import annotations

import copy

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ortgraph
from ortgraph.graph.edit import MODULE_KEY, PASS_KEY, PHASE_KEY, SOURCE_KEY
from ortgraph.graph.verify import verify

# --- roles -------------------------------------------------------------------------------------------------------


class Roles(nn.Module):
    """Tied, frozen, unused, zero-initialised parameters; a constant tensor; an updated and a plain buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.full((4,), 1.5), requires_grad=False)
        self.zero_a, self.zero_b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.full((4,), 0.25), persistent=False)
        self.constant = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.count += 1
        h = (self.embed(ids) + self.zero_a + self.zero_b + self.shift) * self.frozen * self.constant.to(self.shift)
        return F.cross_entropy(self.head(h), labels)


def test_roles(check_capture, run_captured):
    torch.manual_seed(0)
    module = Roles()
    batch = {"ids": torch.tensor([1, 1, 1, 3, 0]), "labels": torch.tensor([2, 0, 6, 6, 1])}
    with pytest.warns(UserWarning, match="does not depend on unused"):
        graph = check_capture(module, batch)
    s = graph.signature
    assert s.stage == "captured"
    by_name = {p.name: p for p in s.parameters}
    assert by_name["embed.weight"].tied == ("head.weight",)
    assert not by_name["frozen"].trainable and by_name["frozen"].gradient is None
    assert by_name["unused"].trainable and by_name["unused"].gradient is None
    assert set(s.gradients) == {"embed.weight", "zero_a", "zero_b"}
    assert {b.name: b.update is not None for b in s.buffers} == {"count": True, "shift": False}
    assert run_captured(graph, batch, random_step=np.int64(0))[0]["update/count"] == 1
    inputs = {v.name for v in graph.graph.inputs}
    assert {"unused", "frozen", "zero_a", "zero_b", "count", "shift"} <= inputs
    assert not inputs & set(graph.graph.initializers)
    assert set(graph.values) == set(by_name) | {"count", "shift"}
    np.testing.assert_array_equal(graph.values["embed.weight"], module.embed.weight.detach().numpy())


def test_values_are_copies(plain):
    graph = ortgraph.capture(plain, torch.ones(2, 5), loss=lambda o: o.sum())
    before = graph.values["first.weight"].copy()
    with torch.no_grad():
        plain.first.weight.zero_()
    np.testing.assert_array_equal(graph.values["first.weight"], before)


def test_loss_gradient_scales_every_gradient(run_captured, scores):
    module, x, y = scores
    graph = ortgraph.capture(module, (x, y), loss=nn.CrossEntropyLoss())
    assert graph.signature.loss_gradient == "loss_gradient"
    batch = {"x": x, "target": y}
    one = run_captured(graph, batch)[0]
    half = run_captured(graph, batch, loss_gradient=np.asarray(0.5, np.float32))[0]
    for name in graph.signature.gradients.values():
        np.testing.assert_array_equal(half[name], one[name] / 2)
    assert half["loss"] == one["loss"]


def test_tangents_and_input_gradients(run_captured, scores):
    module, x, y = scores
    options = {"loss": nn.CrossEntropyLoss(), "tangents": ["output"], "input_gradients": ["x"]}
    graph = ortgraph.capture(module, (x, y), **options)
    verify(graph, "types")
    assert graph.signature.tangents == {"output": "tangent/output"}
    assert graph.signature.input_gradients == {"x": "gradient/x"}
    seed = torch.randn(4, 3)
    got = run_captured(graph, {"x": x, "target": y, "tangent/output": seed})[0]
    inner = x.clone().requires_grad_()
    scores_ = module(inner)
    (F.cross_entropy(scores_, y) + (scores_ * seed).sum()).backward()
    np.testing.assert_allclose(got["gradient/x"], inner.grad.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["gradient/first.weight"], module.first.weight.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_other_outputs_add_no_backward_work(scores):
    module, x, y = scores
    only = ortgraph.capture(module, (x, y), loss=nn.CrossEntropyLoss())
    backward = [n for n in only.graph if n.metadata_props[PHASE_KEY] == "backward"]
    assert not only.signature.tangents
    assert {n.op_type for n in backward} <= {
        "NllLossGrad", "LogSoftmaxGrad", "Transpose", "MatMul", "ReduceSum", "Reshape", "ReluGrad"
    }  # fmt: skip


def test_frozen_first_layer_costs_no_backward_work(scores):
    module, x, y = scores
    full = ortgraph.capture(module, (x, y), loss=nn.CrossEntropyLoss()).node_count()
    module.first.requires_grad_(False)
    graph = ortgraph.capture(module, (x, y), loss=nn.CrossEntropyLoss())
    assert set(graph.signature.gradients) == {"second.weight", "second.bias"}
    assert not any(n.op_type == "ReluGrad" for n in graph.graph)
    assert graph.node_count() < full


def test_module_is_left_alone(scores):
    module, x, y = scores
    module.second.eval()
    norm = nn.BatchNorm1d(3)
    whole = nn.Sequential(module, norm)
    state = copy.deepcopy(whole.state_dict())
    ortgraph.capture(whole, (x, y), loss=nn.CrossEntropyLoss())
    assert [m.training for m in whole.modules()] == [True, True, True, False, True]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, state[name])
    assert all(p.grad is None for p in whole.parameters())


# --- batch statistics, randomness --------------------------------------------------------------------------------


def test_batch_norm_statistics_are_updated(run_captured):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, momentum=0.3)).train()
    x = torch.randn(4, 2, 6, 6)
    graph = ortgraph.capture(module, x, loss=lambda o: o.square().mean())
    got = run_captured(graph, {"input": x})[0]
    assert {b.name for b in graph.signature.buffers if b.update} == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    module(x)
    for name, buffer in module.named_buffers():
        np.testing.assert_allclose(got[f"update/{name}"], buffer.numpy(), rtol=1e-5, atol=1e-6)


def test_batch_norm_in_evaluation_mode(check_capture):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh())
    module(torch.randn(4, 2, 6, 6) * 3)
    module[1].eval()

    def of(module, batch):
        return module(batch["input"]).square().mean()

    graph = check_capture(module, {"input": torch.randn(4, 2, 6, 6)}, loss=lambda o: o.square().mean(), loss_of=of)
    assert not any(b.update for b in graph.signature.buffers)


class Dropped(nn.Module):
    """Two dropouts on one input, around a product."""

    def __init__(self, p: float = 0.4) -> None:
        super().__init__()
        self.a, self.b, self.linear = nn.Dropout(p), nn.Dropout(p), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        a, b = self.a(x), self.b(x)
        return {"loss": self.linear(a * b).square().mean(), "a": a, "b": b}


def test_dropout_masks_are_functions_of_key_step_and_node(run_captured):
    torch.manual_seed(5)
    module, x = Dropped(), torch.ones(64, 16)
    graph = ortgraph.capture(module, {"x": x})
    states = {s.kind: s for s in graph.signature.states}
    assert states["random_key"].output is None and states["random_step"].output == "update/random_step"
    assert graph.values["random_key"] == torch.initial_seed() and graph.values["random_step"] == 0
    nodes = [n.attributes["node"].as_int() for n in graph.graph if n.op_type == "Dropout"]
    assert len(set(nodes)) == len(nodes) == 2
    first, again = run_captured(graph, {"x": x}, 2, repeats=2)
    later = run_captured(graph, {"x": x}, random_step=np.asarray(1, np.int64))[0]
    assert all(np.array_equal(first[k], again[k]) for k in first)
    assert first["update/random_step"] == 1
    assert not np.array_equal(first["a"], first["b"]) and not np.array_equal(first["a"], later["a"])
    assert abs((first["a"] > 0).mean() - 0.6) < 0.06
    # the backward half reuses the masks: with both known, PyTorch's gradient follows
    product = torch.from_numpy(first["a"] * first["b"])
    module.linear(product).square().mean().backward()
    np.testing.assert_allclose(first["gradient/linear.weight"], module.linear.weight.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_dropout_gradient_goes_through_the_mask(run_captured):
    torch.manual_seed(5)
    module, x = Dropped(), torch.randn(64, 16)
    graph = ortgraph.capture(module, {"x": x}, input_gradients=["x"])
    got = run_captured(graph, {"x": x})[0]
    inner = x.clone().requires_grad_()
    a, b = (torch.from_numpy((got[k] != 0) / np.float32(0.6)).float() for k in ("a", "b"))
    module.linear(inner * a * (inner * b)).square().mean().backward()
    np.testing.assert_allclose(got["gradient/x"], inner.grad.numpy(), rtol=1e-4, atol=1e-7)


def test_evaluation_mode_draws_nothing():
    for module in (Dropped().eval(), Dropped(0.0)):
        graph = ortgraph.capture(module, {"x": torch.ones(2, 16)})
        assert not graph.signature.states and "random_key" not in graph.values


def test_random_operators(run_captured):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2000))

        def forward(self, x):
            uniform, normal = torch.rand_like(x), torch.randn_like(x)
            kept = torch.bernoulli(torch.full_like(x, 0.3))
            return {"loss": (self.w * uniform * kept).sum(), "uniform": uniform, "normal": normal, "kept": kept}

    got = run_captured(ortgraph.capture(Noisy(), torch.ones(2000)), {"x": np.ones(2000, np.float32)})[0]
    assert abs(got["uniform"].mean() - 0.5) < 0.03 and abs(got["kept"].mean() - 0.3) < 0.05
    assert abs(got["normal"].mean()) < 0.1 and abs(got["normal"].std() - 1) < 0.08
    np.testing.assert_array_equal(got["gradient/w"], got["uniform"] * got["kept"])


# --- provenance, opset, hooks ------------------------------------------------------------------------------------


def test_nodes_know_module_source_and_phase(scores):
    module, x, y = scores
    graph = ortgraph.capture(module, (x, y), loss=nn.CrossEntropyLoss())
    nodes = list(graph.graph)
    assert all(n.metadata_props[PASS_KEY] == "capture" for n in nodes)
    phases = [n.metadata_props[PHASE_KEY] for n in nodes]
    assert phases == sorted(phases, reverse=True) and set(phases) == {"forward", "backward"}
    first = next(n for n in nodes if n.name == graph.signature.first_backward)
    assert nodes.index(first) == phases.index("backward")
    gemms = [n for n in nodes if n.op_type == "Gemm"]
    assert [n.metadata_props[MODULE_KEY] for n in gemms] == ["first", "second"]
    relu_grad = next(n for n in nodes if n.op_type == "ReluGrad")
    assert "conftest.py:" in relu_grad.metadata_props[SOURCE_KEY]  # where the module stands
    backward = {n.metadata_props.get(MODULE_KEY) for n in nodes if n.metadata_props[PHASE_KEY] == "backward"}
    assert {"first", "second"} <= backward


def test_text_is_stable(scores):
    module, x, y = scores
    texts = {ortgraph.capture(module, (x, y), loss=nn.CrossEntropyLoss()).text() for _ in range(2)}
    assert len(texts) == 1


def test_opset_and_file_round_trip(check_capture, run_captured, tmp_path, scores, plain_loss):
    module, x, y = scores
    batch = {"x": x, "target": y}
    graph = check_capture(module, batch, loss=nn.CrossEntropyLoss(), loss_of=plain_loss, opset=21)
    assert graph.graph.opset_imports[""] == 21
    graph.save(tmp_path / "train.onnx")
    again = ortgraph.load(tmp_path / "train.onnx")
    assert again.signature == graph.signature
    first, second = (run_captured(g, batch)[0] for g in (graph, again))
    assert all(np.array_equal(first[k], second[k]) for k in first)


def test_hooks_run_right_after_capture(scores):
    module, x, y = scores
    seen = []

    class Note(ir.passes.InPlacePass):
        def call(self, model):
            seen.append(sum(1 for _ in model.graph))
            return ir.passes.PassResult(model, False)

    def rename(graph):
        seen.append(graph.stage)
        graph.signature = graph.signature.replace(metadata={"mine": "yes"})

    graph = ortgraph.capture(module, (x, y), loss=nn.CrossEntropyLoss(), after=[Note(), rename])
    assert seen == [graph.node_count(), "captured"] and graph.signature.metadata == {"mine": "yes"}
    assert "first.weight" in graph.values


def test_low_precision_parameters_are_stored_as_such():
    module = nn.Linear(3, 2).to(torch.bfloat16)
    graph = ortgraph.capture(module, torch.ones(4, 3, dtype=torch.bfloat16), loss=lambda o: o.float().sum())
    assert graph.values["weight"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(graph.values["weight"].astype(np.float32), module.weight.detach().float().numpy())
    gradient = next(o for o in graph.graph.outputs if o.name == "gradient/weight")
    assert gradient.dtype == ir.DataType.BFLOAT16


def test_library_functions_are_inlined(check_capture):
    class Erfc(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return (torch.exp2(self.w * x) * torch.special.erfc(x)).sum()

    graph = check_capture(Erfc(), {"x": torch.tensor([0.1, -0.5, 2.0, 0.3])})
    assert {n.domain for n in graph.graph} == {""}
