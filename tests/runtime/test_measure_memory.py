"""Measured memory: the rise of the resident size in a fresh process is what was planned and declared."""

from __future__ import annotations

import platform

import numpy as np
import pytest

from ortgraph.errors import InputError, RuntimeSetupError
from ortgraph.runtime.measure_memory import MeasuredMemory, measure_pytorch, measure_step, measure_unplanned

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="measured on Linux")
ROWS, WIDTH = 1024, 2048
TENSOR = 4 * ROWS * WIDTH  # 8.4 MB
rng = np.random.default_rng(0)


def layers(bench, chosen=False):
    """y = tanh(tanh(x) w) and loss = sum(y tanh(x)): at most three tensors at once; with ``chosen`` also a Where."""
    made = bench()
    x = made.input("x", rng.standard_normal((ROWS, WIDTH)).astype(np.float32))
    w = made.input("w", rng.standard_normal((WIDTH, WIDTH)).astype(np.float32))
    h = made.op("Tanh", x)
    y = made.op("Tanh", made.op("MatMul", h, w))
    if chosen:
        y = made.op("Where", made.op("Greater", h, y), y, h)
    made.output(made.op("ReduceSum", made.op("Transpose", made.op("Mul", y, h), perm=[1, 0]), keepdims=0, name="loss"))
    return made


@pytest.mark.parametrize(("chosen", "threads"), [(False, 1), (False, 2), (True, 2)])
def test_measured_is_planned_plus_declared(bench, chosen, threads):
    made = layers(bench, chosen)
    measured = measure_step(made.training_graph(), made.values, "loss", threads=threads, runs=1)
    assert measured.arena >= 2 * TENSOR
    assert measured.temporaries == (2 * TENSOR if chosen else 0)
    assert measured.batch == sum(a.nbytes for a in made.values.values()) and measured.parameters == 0
    assert measured.session > 20e6 and measured.milliseconds > 0
    if not chosen:
        assert abs(measured.deviation) < 0.03
    else:  # arena and temporaries are not needed at the same moment in full
        assert 0.9 * measured.arena < measured.peak < 1.03 * measured.planned


def test_the_runtime_by_itself(bench):
    made = layers(bench)
    measured = measure_unplanned(made.training_graph(), made.values, threads=1, optimized=False, runs=1)
    assert 2 * TENSOR * 0.97 < measured.peak < 6 * TENSOR
    assert measured.planned == 0 and measured.deviation == 0.0


def test_pytorch(tmp_path):
    pytest.importorskip("torch")
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\n"
        "class Chain(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.scale = torch.nn.Parameter(torch.ones(()))\n"
        "    def forward(self, x):\n"
        "        y = (x * self.scale).exp()\n"  # saves the result
        "        return y.sin().sum()\n"  # saves its input, which is that result
        f"def build(rows):\n    return {{'module': Chain(), 'batch': {{'x': torch.randn(rows, {WIDTH})}}}}\n"
    )
    measured = measure_pytorch(f"{file}:build", {"rows": ROWS}, threads=1, runs=1)
    assert measured.batch == TENSOR and measured.parameters == 4
    # y and, in the backward half, cos(y), the gradient of y and their product; expanded scalars take no memory
    assert 2 * TENSOR * 0.97 < measured.peak < 4 * TENSOR * 1.03


def test_planned_and_deviation():
    measured = MeasuredMemory(peak=103, arena=90, temporaries=10)
    assert measured.planned == 100 and measured.deviation == pytest.approx(0.03)


def test_what_cannot_be_measured_says_so(bench, tmp_path):
    made = layers(bench)
    with pytest.raises(InputError, match="cannot measure 'profile'"):
        measure_step(made.training_graph(), made.values, "profile")
    with pytest.raises(RuntimeSetupError, match="measuring memory failed: .*has no input|measuring memory failed"):
        measure_step(made.training_graph(), {"x": made.values["x"]}, "loss")
    missing = tmp_path / "none.py"
    with pytest.raises(RuntimeSetupError, match="measuring memory failed"):
        measure_pytorch(f"{missing}:build")
