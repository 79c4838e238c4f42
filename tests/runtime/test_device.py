"""Sessions whose memory is not NumPy's: a device that is host memory of ONNX Runtime's under another name."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest

import ortgraph
from ortgraph.errors import InputError, RuntimeSetupError
from ortgraph.ops.targets import DEVICE_TARGETS, target_of
from ortgraph.runtime import device as devices
from ortgraph.runtime import session as sessions
from ortgraph.runtime.detect import detect_runtime
from ortgraph.runtime.device import HOST, Device, DeviceArray, device_of

APART = Device("cpu", 0, ("CPUExecutionProvider",), on_host=False)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> str:
    """A target on a device: its graphs are the device's, its memory is ONNX Runtime's, its kernels are the processor's."""
    monkeypatch.setattr(sessions, "device_of", lambda target: HOST if target_of(target).on_cpu else APART)
    return f"{detect_runtime().target}:cuda"


def stepped(graph, target, **options):
    optimizer = ortgraph.optim.AdamW(lr=0.05, weight_decay=0.01)
    return ortgraph.optimize(graph, "O2", optimizer=optimizer, target=target, **options).graph


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_array_is_read_as_it_was_written(dtype, shape):
    array = DeviceArray(np.dtype(dtype), shape, APART)
    values = (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype(dtype)
    array[...] = values
    before = array.copy()
    assert before.dtype == values.dtype and np.array_equal(before, values)
    array.fill(1)
    assert np.array_equal(before, values), "a copy does not follow"
    assert np.array_equal(np.asarray(array), np.ones(shape, dtype))
    assert array.nbytes == values.nbytes


def test_array_converts_and_broadcasts_like_numpy():
    array = DeviceArray(np.dtype(np.float32), (2, 2), APART)
    array[...] = 3
    array[...] = np.array([1, 2], np.int64)
    assert np.array_equal(array.copy(), [[1, 2], [1, 2]])
    with pytest.raises(ValueError, match="broadcast"):
        array[...] = np.zeros(3)
    scalar = DeviceArray(np.dtype(np.float32), (), APART)
    scalar[...] = 0.5
    assert float(scalar) == 0.5 == scalar.item()


@pytest.mark.parametrize("level", ["captured", "O2"])
def test_training_is_that_of_the_host(apart, classifier_graph, classifier_batch, level):
    graph = classifier_graph()
    mine = stepped(graph, apart)
    batches = [classifier_batch(seed=i) for i in range(4)]
    with_device = ortgraph.TrainingSession(graph if level == "captured" else mine, target=apart)
    host = ortgraph.TrainingSession(graph if level == "captured" else stepped(graph, detect_runtime().target))
    assert isinstance(with_device._memory.persistent["w1"], DeviceArray)
    assert isinstance(host._memory.persistent["w1"], np.ndarray)
    for name, gradient in host.gradients(batches[0]).items():
        np.testing.assert_allclose(with_device.gradients(batches[0])[name], gradient, rtol=2e-4, atol=1e-6)
    assert with_device.evaluate(batches[0]).keys() == host.evaluate(batches[0]).keys()
    np.testing.assert_allclose(
        with_device.evaluate(batches[0])["logits"], host.evaluate(batches[0])["logits"], rtol=1e-4, atol=1e-6
    )
    if level == "captured":
        return
    for batch in batches:
        assert with_device.step(batch) == pytest.approx(host.step(batch), rel=1e-4)
    for name, value in host.state_dict().items():
        np.testing.assert_allclose(with_device.state_dict()[name], value, rtol=1e-3, atol=1e-4)
    assert with_device.optimizer_state_dict()["step"] == 4


def test_nothing_that_is_read_changes_with_the_next_run(apart, classifier_graph, classifier_batch):
    session = ortgraph.TrainingSession(stepped(classifier_graph(), apart), target=apart)
    first = session.program("gradients", classifier_batch(seed=0))
    first.run()
    kept = {n: first.value(o) for n, o in session.signature.gradients.items()}
    copies = {n: v.copy() for n, v in kept.items()}
    session.gradients(classifier_batch(seed=5))
    for name, value in kept.items():
        assert np.array_equal(value, copies[name])


def test_a_checkpoint_goes_from_device_to_host_and_back(apart, classifier_graph, classifier_batch, tmp_path):
    graph = stepped(classifier_graph(), apart)
    session = ortgraph.TrainingSession(graph, target=apart)
    session.step(classifier_batch(), learning_rate=0.01)
    session.save_checkpoint(tmp_path / "c")
    host = ortgraph.TrainingSession(stepped(classifier_graph(), detect_runtime().target))
    host.load_checkpoint(tmp_path / "c")
    for name, value in session.state_dict().items():
        assert np.array_equal(host.state_dict()[name], value)
    assert host.learning_rate == session.learning_rate == np.float32(0.01)
    host.step(classifier_batch(seed=3))
    host.save_checkpoint(tmp_path / "d")
    session.load_checkpoint(tmp_path / "d")
    assert np.array_equal(session.state_dict()["w1"], host.state_dict()["w1"])
    assert np.array_equal(session.trained_graph().values["w1"], host.state_dict()["w1"])


def test_accumulation_zeroes_its_sums_on_the_device(apart, classifier_graph, classifier_batch):
    sessions_ = []
    for target in (apart, detect_runtime().target):
        graph = stepped(classifier_graph(), target, accumulation_steps=2)
        session = ortgraph.TrainingSession(graph, target=apart if target == apart else None)
        for i in range(2):
            session.accumulate(classifier_batch(seed=2 * i))
            session.step(classifier_batch(seed=2 * i + 1))
        sessions_.append(session)
    for name, value in sessions_[1].state_dict().items():
        np.testing.assert_allclose(sessions_[0].state_dict()[name], value, rtol=1e-3, atol=1e-4)


def test_updates_that_cannot_be_in_place_are_copied(apart, classifier_graph, classifier_batch, monkeypatch):
    from ortgraph.runtime import ort_session as programs

    seen = []
    real = programs.replaced_operators
    monkeypatch.setattr(programs, "replaced_operators", lambda a, b: seen.append(1) or ["MemcpyToHost", *real(a, b)])
    session = ortgraph.TrainingSession(stepped(classifier_graph(), apart), target=apart)
    monkeypatch.setattr(programs, "replaced_operators", real)
    plain = ortgraph.TrainingSession(stepped(classifier_graph(), apart), target=apart)
    expected = plain.step(classifier_batch())
    monkeypatch.setattr(programs, "replaced_operators", lambda a, b: seen.append(1) or ["MemcpyToHost"])
    assert session.step(classifier_batch()) == expected and seen
    assert session.programs[-1].placement.copies and not plain.programs[-1].placement.copies
    for name, value in plain.state_dict().items():
        assert np.array_equal(session.state_dict()[name], value)


def test_only_element_wise_operators_write_over_their_inputs(apart, classifier_graph, classifier_batch):
    from ortgraph.ops.spec import spec_of

    session = ortgraph.TrainingSession(stepped(classifier_graph(), apart), target=apart)
    session.step(classifier_batch())
    program = session.programs[-1]
    makers = {o.name: node for node in program.order for o in node.outputs}
    assert program.placement.in_place
    for name in program.placement.in_place:
        assert spec_of(makers[name]).elementwise and makers[name].op_type not in ("Sum", "Max", "Min", "Mean")


def test_checks_of_host_memory_are_refused(apart, classifier_graph, classifier_batch):
    graph = stepped(classifier_graph(), apart)
    with pytest.raises(InputError, match="poison=True checks memory of the host"):
        ortgraph.TrainingSession(graph, target=apart, poison=True)
    with pytest.raises(InputError, match="memory is checked on the host"):
        ortgraph.TrainingSession(graph, target=apart).check_memory(classifier_batch())


def test_a_graph_lowered_to_kernels_of_the_processor_is_refused(apart, classifier_graph):
    from ortgraph.ops.spec import GENERATED, KERNELS

    graph = stepped(classifier_graph(), detect_runtime().target)
    if not any(n.domain in (KERNELS, GENERATED) for n in graph.graph):
        pytest.skip("there is no compiler")
    with pytest.raises(InputError, match="kernels of the processor"):
        ortgraph.TrainingSession(graph, target=apart)


@pytest.mark.parametrize("text", DEVICE_TARGETS)
def test_a_provider_that_is_not_there_is_named_with_its_package(text, classifier_graph):
    if target_of(text).provider.execution in ort.get_available_providers():
        pytest.skip("it is there")
    with pytest.raises(RuntimeSetupError) as caught:
        ortgraph.TrainingSession(classifier_graph(), target=text)
    assert target_of(text).provider.execution in caught.value.what and "CPUExecutionProvider" in caught.value.what
    wanted = {"onnxruntime-training:cuda": "ortgraph[cuda]", "onnxruntime:cuda": "ortgraph[stock-gpu]"}
    assert wanted.get(text, "install a build") in caught.value.hint


def test_a_provider_that_is_there_gives_its_device(monkeypatch):
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    device = device_of("onnxruntime:cuda")
    assert device == Device("cuda", 0, ("CUDAExecutionProvider", "CPUExecutionProvider"), on_host=False)
    assert device.session_providers() == [("CUDAExecutionProvider", {"device_id": "0"}), "CPUExecutionProvider"]
    assert device_of("onnxruntime") is HOST


def test_a_runtime_that_falls_back_is_noticed():
    class Fallen:
        def get_providers(self):
            return ["CPUExecutionProvider"]

    with pytest.raises(RuntimeSetupError, match="CUDAExecutionProvider did not start"):
        Device("cuda", 0, ("CUDAExecutionProvider",), on_host=False).check_session(Fallen())


def test_memory_that_cannot_be_had_is_an_error_in_words():
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("there is a device")
    with pytest.raises(RuntimeSetupError, match="no memory of 8 bytes on cuda:0"):
        DeviceArray(np.dtype(np.float32), (2,), devices.Device("cuda", on_host=False))
