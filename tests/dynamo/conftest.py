"""Fixtures: a clean Dynamo for each test, and the measure of gradients against float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ortgraph


@pytest.fixture(autouse=True)
def clean_dynamo() -> Iterator[None]:
    """No code that an earlier test compiled, and PyTorch's random state put back."""
    torch._dynamo.reset()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def doubled(batch: Any) -> Any:
    """The batch with float tensors in float64, each a leaf as in the batch."""
    if isinstance(batch, torch.Tensor):
        made = batch.detach().clone() if not batch.is_floating_point() else batch.detach().double()
        return made.requires_grad_(batch.requires_grad)
    if isinstance(batch, dict):
        return {k: doubled(v) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(doubled(v) for v in batch)
    return batch


def fresh(batch: Any) -> Any:
    """A copy whose tensors have no gradient yet."""
    return torch.utils._pytree.tree_map(
        lambda t: t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t, batch
    )


def gradients_of(module: torch.nn.Module, call: Callable[[Any], Any], batch: Any) -> dict[str, torch.Tensor]:
    """Run ``call(batch)``, which goes backward, and collect every gradient, those of the batch too."""
    call(batch)
    found = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    leaves = [t for t in torch.utils._pytree.tree_leaves(batch) if isinstance(t, torch.Tensor) and t.grad is not None]
    return {**found, **{f"batch {i}": t.grad for i, t in enumerate(leaves)}}


@pytest.fixture
def wrap() -> Callable[..., ortgraph.ORTModule]:
    """An ORTModule that refuses instead of falling back, without kernels that have to be compiled."""
    return lambda module, **options: ortgraph.ORTModule(module, **{"fallback": False, "pipeline": "O1", **options})


@pytest.fixture
def check_gradients(wrap: Callable[..., ortgraph.ORTModule]) -> Callable[..., ortgraph.ORTModule]:
    """``check(module, batch, step, threads=2, **options)``: gradients as right as PyTorch's own.

    ``step(module, batch)`` runs forward and backward of a module. Per gradient the error against float64 is at most 4
    times that of PyTorch in float32, plus 1e-6 of its norm, plus 1e-6 of the median norm.
    """

    def check(
        module: torch.nn.Module, batch: Any, step: Callable[..., Any], threads: int = 2, **options: Any
    ) -> ortgraph.ORTModule:
        torch.set_num_threads(threads)
        eager, exact = copy.deepcopy(module), copy.deepcopy(module).double()
        compiled = wrap(module, **options)
        got = gradients_of(module, lambda b: step(compiled, b), fresh(batch))
        own = gradients_of(eager, lambda b: step(eager, b), fresh(batch))
        want = gradients_of(exact, lambda b: step(exact, b), doubled(batch))
        assert list(got) == list(own) == list(want) and got
        norms = sorted(float(g.norm()) for g in want.values())
        floor = 1e-6 * norms[len(norms) // 2]
        for name, reference in want.items():
            error = float((got[name].double() - reference).norm())
            allowed = 4 * float((own[name].double() - reference).norm()) + 1e-6 * float(reference.norm()) + floor
            assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
        for (name, ours), theirs in zip(module.named_buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"buffer {n}: {m}")
        return compiled

    return check
