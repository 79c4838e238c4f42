"""Runtime detection: none, one, two, and versions."""

from __future__ import annotations

import onnxruntime
import pytest

from ortgraph.errors import RuntimeSetupError
from ortgraph.runtime.detect import (
    Runtime,
    check_torch,
    choose_runtime,
    detect_runtime,
    device_targets,
    installed_wheels,
)
from ortgraph.runtime.options import session_options


def test_the_installed_one() -> None:
    import onnxruntime

    assert detect_runtime() == choose_runtime(installed_wheels())
    assert onnxruntime.__version__.startswith(detect_runtime().version)
    assert (detect_runtime().target == "onnxruntime-training") == ("training" in detect_runtime().wheel)


@pytest.mark.parametrize(
    ("wheels", "target"),
    [
        ({"onnxruntime-training-cpu": "1.19.2"}, "onnxruntime-training"),
        ({"onnxruntime-training": "1.19.2+cu118"}, "onnxruntime-training"),
        ({"onnxruntime": "1.22.0"}, "onnxruntime"),
        ({"onnxruntime-gpu": "1.32.1"}, "onnxruntime"),
    ],
)
def test_supported(wheels, target) -> None:
    assert choose_runtime(wheels).target == target


@pytest.mark.parametrize(
    ("wheels", "words"),
    [
        ({}, "not installed(?s:.*)pip install"),
        ({"onnxruntime": "1.22.0", "onnxruntime-training-cpu": "1.19.2"},
         "both installed(?s:.*)pip uninstall -y onnxruntime onnxruntime-training-cpu && pip install .*-cpu==1.19.2"),
        ({"onnxruntime": "1.22.0", "onnxruntime-gpu": "1.22.0"}, "both installed"),
        ({"onnxruntime": "1.21.1"}, "too old(?s:.*)onnxruntime>=1.22"),
        ({"onnxruntime": "1.9.0"}, "too old"),
        ({"onnxruntime-training-cpu": "1.18.0"}, "not supported(?s:.*)==1.19.2"),
    ],
)  # fmt: skip
def test_refused(wheels, words) -> None:
    with pytest.raises(RuntimeSetupError, match=words):
        choose_runtime(wheels)


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cpu"])
def test_torch_in_range(version) -> None:
    check_torch(version)


@pytest.mark.parametrize(("version", "words"), [("2.14.0", "outside"), ("2.9.1", "outside"), (None, "not installed")])
def test_torch_out_of_range(version, words) -> None:
    with pytest.raises(RuntimeSetupError, match=words):
        check_torch(version)


def test_options_keep_the_file_order() -> None:
    import onnxruntime as ort

    options = session_options(threads=3)
    assert options.execution_order == ort.ExecutionOrder.PRIORITY_BASED
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert options.intra_op_num_threads == 3


@pytest.mark.parametrize(
    ("target", "provider", "found"),
    [
        ("onnxruntime-training", "CUDAExecutionProvider", ("onnxruntime-training:cuda",)),
        ("onnxruntime", "CUDAExecutionProvider", ("onnxruntime:cuda",)),
        ("onnxruntime", "MIGraphXExecutionProvider", ("onnxruntime:migraphx",)),
        ("onnxruntime", "ROCMExecutionProvider", ()),
        ("onnxruntime", "CPUExecutionProvider", ()),
    ],
)
def test_device_targets_are_those_of_the_providers(monkeypatch, target, provider, found):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [provider, "CPUExecutionProvider"])
    assert device_targets(Runtime("wheel", target, "1.22")) == found
