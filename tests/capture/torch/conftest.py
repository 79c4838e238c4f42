"""Runs captured graphs by reference expansion and compares them with PyTorch and float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

import ortgraph
from ortgraph.analysis.bind_shapes import bind_shapes, infer_unknown, is_dynamic
from ortgraph.graph import TrainingGraph
from ortgraph.graph.verify import verify
from ortgraph.ops.expand import expand_composites
from ortgraph.runtime.prepare import FOLD, run_passes


def expanded_model(graph: TrainingGraph, batch: dict[str, Any]) -> bytes:
    """A captured graph with symbolic dimensions bound to a batch and composites expanded, as a file's bytes."""
    arrays = {k: np.asarray(v) for k, v in batch.items()}
    expanded = graph.clone()
    if is_dynamic(expanded):
        bind_shapes(expanded, _sizes(graph, arrays))
        run_passes(expanded, FOLD)
        infer_unknown(expanded)
    expand_composites(expanded)
    return ir.serde.serialize_model(expanded.model).SerializeToString()


def run_model(
    model: bytes, graph: TrainingGraph, batch: dict[str, Any], threads: int, repeats: int, extra: dict[str, Any]
) -> list[dict[str, np.ndarray]]:
    """All outputs, run ``repeats`` times with ONNX Runtime and no optimization of its own."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    arrays = {k: np.asarray(v) for k, v in batch.items()}
    feed = {**graph.values, **arrays, "loss_gradient": np.asarray(1, np.float32), **extra}
    feed = {i.name: feed[i.name] for i in session.get_inputs()}
    names = [o.name for o in session.get_outputs()]
    return [dict(zip(names, session.run(None, feed), strict=True)) for _ in range(repeats)]


def run_graph(
    graph: TrainingGraph, batch: dict[str, Any], threads: int = 1, repeats: int = 1, **extra: Any
) -> list[dict[str, np.ndarray]]:
    """All outputs of a captured graph, by reference expansion."""
    return run_model(expanded_model(graph, batch), graph, batch, threads, repeats, extra)


def _sizes(graph: TrainingGraph, arrays: dict[str, np.ndarray]) -> dict[str, int]:
    """Size of each named dimension in a batch."""
    return {
        dim.value: size
        for value in graph.graph.inputs
        if value.name in arrays
        for dim, size in zip(value.shape, arrays[value.name].shape, strict=True)
        if isinstance(dim, ir.SymbolicDim)
    }


def torch_gradients(module: torch.nn.Module, loss_of: Callable[[torch.nn.Module], torch.Tensor]) -> tuple[float, dict]:
    """Loss and gradients of PyTorch."""
    module.zero_grad()
    loss = loss_of(module)
    loss.backward()
    return loss.item(), {n: p.grad.numpy().copy() for n, p in module.named_parameters() if p.grad is not None}


def as_double(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with floats in float64."""
    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in batch.items()}


def assert_close_gradients(got: dict, want: dict, exact: dict) -> None:
    """The design's measure, norm-wise per gradient."""
    assert set(got) == set(want)
    norm = np.linalg.norm
    typical = float(np.median([norm(g) for g in exact.values()]))
    for name in want:
        error, own, size = norm(got[name] - exact[name]), norm(want[name] - exact[name]), norm(exact[name])
        allowed = 4 * own + 1e-6 * (typical if size < 1e-9 * typical else size)
        assert error <= allowed, f"{name}: error {error:.2e}, PyTorch's {own:.2e}, norm {size:.2e}"


def own_loss(module: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The loss of a module that returns it."""
    result = module(**batch)
    return result if isinstance(result, torch.Tensor) else result["loss"]


@pytest.fixture
def check_capture() -> Callable[..., TrainingGraph]:
    """Capture a module, compare every gradient at 1 and 2 threads, and repeat for bit equality."""

    def check(
        module: torch.nn.Module,
        batch: dict[str, Any],
        *,
        repeats: int = 3,
        loss_of: Callable[[torch.nn.Module, dict[str, Any]], torch.Tensor] = own_loss,
        run_batches: Sequence[dict[str, Any]] = (),
        **options: Any,
    ) -> TrainingGraph:
        double = copy.deepcopy(module).double()
        before = copy.deepcopy(module)
        graph = ortgraph.capture(module, batch, **options)
        verify(graph, "types")
        for used in run_batches or (batch,):
            loss, want = torch_gradients(copy.deepcopy(before), lambda m, b=used: loss_of(m, b))
            _, exact = torch_gradients(copy.deepcopy(double), lambda m, b=used: loss_of(m, as_double(b)))
            model = expanded_model(graph, used)
            for threads in (1, 2):
                runs = run_model(model, graph, used, threads, repeats, {})
                for run in runs[1:]:
                    assert all(np.array_equal(run[k], runs[0][k]) for k in run), "repeats differ"
                got = {n: runs[0][g] for n, g in graph.signature.gradients.items()}
                assert_close_gradients(got, want, exact)
                assert abs(runs[0][graph.signature.loss].item() - loss) <= 1e-5 * (abs(loss) + 1e-3)
        return graph

    return check


class _Many(torch.nn.Module):
    """Weighted sums of functions, each of a parameter of its own and perhaps of a layer; every sum is an output."""

    def __init__(self, cases: dict[str, tuple], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.functions = {name: case[1] for name, case in cases.items()}
        self.w, self.layer = torch.nn.ParameterDict(), torch.nn.ModuleDict()
        for name, (shape, _, *layer) in cases.items():
            self.w[name] = torch.nn.Parameter(torch.randn(shape, generator=generator))
            if layer:
                self.layer[name] = layer[0]()
            with torch.no_grad():
                out = self.called(name, torch.ones(()))
            self.register_buffer(f"c_{name}", torch.randn(out.shape, generator=generator))

    def called(self, name: str, x: torch.Tensor) -> torch.Tensor:
        w = self.w[name] * x
        return self.functions[name](self.layer[name], w) if name in self.layer else self.functions[name](w)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        sums = {}
        for name in self.functions:
            out = self.called(name, x)
            sums[f"sum_{name}"] = (out.to(x.dtype) * getattr(self, f"c_{name}")).sum()
        return {"loss": torch.stack(list(sums.values())).sum(), **sums}


@pytest.fixture
def check_together() -> Callable[..., TrainingGraph]:
    """Capture many functions as one graph; every gradient and every result at 1 and 2 threads.

    Cases by name: a parameter's shape, a function of it, and perhaps a maker of a layer, which the function gets first.
    """

    def check(cases: dict[str, tuple], seed: int = 3) -> TrainingGraph:
        torch.manual_seed(seed)
        module, batch = _Many(cases, seed), {"x": torch.ones(())}
        double = copy.deepcopy(module).double()
        before = copy.deepcopy(module)
        graph = ortgraph.capture(module, batch)
        verify(graph, "types")
        _, want = torch_gradients(copy.deepcopy(before), lambda m: own_loss(m, batch))
        _, exact = torch_gradients(copy.deepcopy(double), lambda m: own_loss(m, as_double(batch)))
        results = [{k: v.item() for k, v in m(**b).items()} for m, b in ((before, batch), (double, as_double(batch)))]
        model = expanded_model(graph, batch)
        for threads in (1, 2):
            first, again = run_model(model, graph, batch, threads, 2, {})
            assert all(np.array_equal(first[k], again[k]) for k in first), "repeats differ"
            for name in graph.signature.outputs:
                own, true = results[0][name], results[1][name]
                terms = module.get_buffer(f"c_{name.removeprefix('sum_')}").numel()
                error = abs(first[name].item() - true)
                assert error <= 4 * abs(own - true) + 1e-6 * (abs(true) + terms), f"{name}: {error:.2e}"
            assert_close_gradients({n: first[g] for n, g in graph.signature.gradients.items()}, want, exact)
        return graph

    return check


@pytest.fixture
def check_presets() -> Callable[..., dict[str, TrainingGraph]]:
    """Optimize a captured graph, compare every gradient at 1 and 2 threads, and repeat for bit equality."""

    def check(
        graph: TrainingGraph,
        module: torch.nn.Module,
        batch: dict[str, Any],
        *,
        presets: Sequence[str] = ("O0", "O2"),
        repeats: int = 3,
    ) -> dict[str, TrainingGraph]:
        loss, want = torch_gradients(copy.deepcopy(module), lambda m: own_loss(m, batch))
        _, exact = torch_gradients(copy.deepcopy(module).double(), lambda m: own_loss(m, as_double(batch)))
        optimized = {preset: ortgraph.optimize(graph, preset, verify="types").graph for preset in presets}
        for preset, result in optimized.items():
            for threads in (1, 2):
                session = ortgraph.TrainingSession(result, threads=threads)
                runs = [session.gradients(batch) for _ in range(repeats)]
                for run in runs[1:]:
                    assert all(np.array_equal(run[k], runs[0][k]) for k in run), f"{preset}: repeats differ"
                assert_close_gradients(runs[0], want, exact)
                assert abs(session.loss(batch) - loss) <= 1e-5 * (abs(loss) + 1e-3)
        return optimized

    return check


@pytest.fixture
def run_captured() -> Callable[..., list[dict[str, np.ndarray]]]:
    """``run_graph`` for tests."""
    return run_graph


class Plain(torch.nn.Module):
    """Scores only; the loss comes from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 8), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        h = torch.relu(self.first(x))
        return self.second(h if scale is None else h * scale)


@pytest.fixture
def plain() -> torch.nn.Module:
    """A module that returns scores only: 5 features in, 3 classes out."""
    return Plain()


@pytest.fixture
def plain_loss() -> Callable[[torch.nn.Module, dict[str, Any]], torch.Tensor]:
    """The loss of ``plain`` on a batch with items x and target."""
    return lambda module, batch: torch.nn.functional.cross_entropy(module(batch["x"]), batch["target"])


@pytest.fixture
def scores() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """``plain`` with fixed weights, features and classes."""
    torch.manual_seed(0)
    return Plain(), torch.randn(4, 5), torch.tensor([0, 2, 1, 1])
