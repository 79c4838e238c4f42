"""Values at which a rewritten gradient may differ from PyTorch's: zeros, ties, infinite slopes, booleans."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs PyTorch")
from torch.nn import functional as F  # noqa: E402

import ortgraph  # noqa: E402

WAYS = (
    "O0",
    "O2",
    "lower{prefer=expansion}",
    "lower{kernels=false}",
    "mark-optimized,lower{target=onnxruntime kernels=false}",
)


class Weighted(torch.nn.Module):
    """sum(f(w x) k): k makes the gradient of every element its own."""

    def __init__(self, function, shape):
        super().__init__()
        self.function, self.w = function, torch.nn.Parameter(torch.ones(shape))

    def forward(self, x, k):
        h = self.function(self.w * x)
        return (h * k.flatten()[: h.numel()].reshape(h.shape)).sum()


def require_gradient(function, x, way):
    torch.manual_seed(0)
    module, batch = Weighted(function, x.shape), {"x": x, "k": torch.rand(2 * x.numel()) + 0.5}
    module(**batch).backward()
    session = ortgraph.TrainingSession(ortgraph.optimize(ortgraph.capture(module, batch), way, verify="types").graph)
    got = session.gradients(batch)["w"]
    np.testing.assert_allclose(got, module.w.grad.numpy(), rtol=2e-5, atol=1e-6, equal_nan=True)
    assert session.loss(batch) == pytest.approx(module(**batch).item(), rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "gate",
    [
        F.relu,
        lambda v: v.clamp(min=0),
        lambda v: F.threshold(v, 0.0, 0.0),
        lambda v: v.masked_fill(v < 0, 0),
        lambda v: F.max_pool1d(F.relu(v)[None], 2),
        lambda v: F.leaky_relu(F.relu(v)),
    ],
    ids=["relu", "clamp", "threshold", "masked_fill", "max_pool", "two gates"],
)
def test_a_closed_gate_stops_an_infinite_gradient(gate, way):
    """d sqrt(relu(x)): the slope of the root is infinite where the gate is closed, and must not become NaN."""
    x = torch.linspace(-1, 1, 60 * 70).reshape(60, 70)
    require_gradient(lambda v: gate(v).sqrt(), x, way)


ROWS = torch.tensor(
    [[0, 0, 0, 0], [1, 1, 1, 1], [1, 2, 2, 0], [-1, 1, -1, 1], [0.5, -0.5, 0, 0.5], [3, 6, -3, -6]], dtype=torch.float32
)


@pytest.mark.parametrize("way", ("O0", "O2"))
@pytest.mark.parametrize(
    "function",
    [
        lambda v: v.nan_to_num(), lambda v: torch.logaddexp(v, v.flip(0)),
        lambda v: v.norm(dim=-1), lambda v: v.amax(-1), lambda v: v.max(-1).values, lambda v: v.prod(-1),
        lambda v: torch.maximum(v, v.flip(0)), lambda v: F.relu(v).pow(1.5),
        lambda v: v * torch.maximum(v > 0, v > 1) * torch.minimum(v < 3, v != 0.5),
    ],
    ids=["nan_to_num", "logaddexp", "norm", "amax", "max", "prod", "maximum", "pow", "bool max"],
)  # fmt: skip
def test_ties_zeros_and_booleans(function, way):
    require_gradient(function, ROWS, way)
