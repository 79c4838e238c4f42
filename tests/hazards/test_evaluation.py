"""What is different in evaluation, as PyTorch has it: dropout, running statistics, and models that ONNX Runtime loads."""

from __future__ import annotations

import copy
import logging

import numpy as np
import onnxruntime
import pytest

torch = pytest.importorskip("torch", reason="capture needs PyTorch")
from torch import nn  # noqa: E402

import ortgraph  # noqa: E402
from ortgraph.errors import InputError  # noqa: E402

ADAMW = ortgraph.optim.AdamW(lr=1e-2)


class Net(nn.Module):
    """scale, the layer that is given, and a head."""

    def __init__(self, layer: nn.Module, width: int = 30):
        super().__init__()
        self.scale, self.layer, self.head = nn.Parameter(torch.ones(())), layer, nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.layer(x * self.scale).flatten(1))


class Twice(nn.Module):
    """One norm, applied twice: the second time it trains on statistics that the first has updated."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=0.6)

    def forward(self, x):
        return self.norm(self.norm(x).tanh() * 2 + 1)


class Residual(nn.Module):
    """A norm without bias behind a sum, which ONNX Runtime fuses when it loads the exported model."""

    def __init__(self, **options):
        super().__init__()
        self.body, self.norm = nn.Linear(5, 5), nn.LayerNorm(5, **options)

    def forward(self, x):
        return self.norm(x + self.body(x))


def trained(layer, level):
    """(module with the trained values, in evaluation mode; session; batch)."""
    torch.manual_seed(0)
    module, batch = Net(layer), (torch.randn(4, 6, 5) * 3 + 1, torch.tensor([0, 2, 1, 0]))
    graph = ortgraph.capture(module, batch, loss=nn.CrossEntropyLoss())
    session = ortgraph.TrainingSession(ortgraph.optimize(graph, level, optimizer=ADAMW).graph)
    for _ in range(2):
        session.step(batch)
    after = copy.deepcopy(module)
    after.load_state_dict({k: torch.tensor(v) for k, v in session.state_dict().items()}, strict=False)
    return after.eval(), session, batch


LAYERS = {
    "a norm that is used twice": Twice,
    "a norm without running statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "instance norm without statistics": lambda: nn.InstanceNorm1d(6, affine=True),
    "instance norm with statistics": lambda: nn.InstanceNorm1d(6, track_running_stats=True),
    "layer norm without bias": lambda: Residual(bias=False),
    "layer norm without scale": lambda: Residual(elementwise_affine=False),
    "attention with one head": lambda: nn.TransformerEncoderLayer(5, 1, 7, dropout=0.5, batch_first=True),
}


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("name", LAYERS)
def test_evaluation_and_export(name, level, tmp_path):
    module, session, batch = trained(LAYERS[name](), level)
    with torch.no_grad():
        want = module(batch[0]).numpy()
    scores = session.signature.outputs[0]
    np.testing.assert_allclose(session.evaluate(batch)[scores], want, rtol=1e-4, atol=1e-5)
    path = session.export_inference(tmp_path / "model.onnx")
    model = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(model.run([scores], {"x": batch[0].numpy()})[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [nn.Dropout1d(0.5), nn.AlphaDropout(0.5)])
def test_what_goes_on_drawing_is_said(layer, tmp_path, caplog):
    """Capture sees no layer in these, only draws: no model is written that draws, and evaluation says so."""
    _, session, batch = trained(layer, "O2")
    with caplog.at_level(logging.WARNING, logger="ortgraph"):
        session.evaluate(batch)
    assert "draws random numbers" in caplog.text and "layer" in caplog.text
    with pytest.raises(InputError, match="depends on random numbers(.|\n)*layer"):
        session.export_inference(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
