"""A disk without room: one sentence, and what stood there stays."""

import resource
import signal

import numpy as np
import pytest
import torch

import ortgraph
from ortgraph.errors import InputError


@pytest.fixture
def no_room(request):
    """Files of this process end at some bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def at(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    yield at
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, ignored)


@pytest.fixture(scope="module")
def session():
    module = torch.nn.Linear(8, 8)
    graph = ortgraph.capture(module, (torch.ones(2, 8), torch.ones(2, 8)), loss=torch.nn.MSELoss())
    result = ortgraph.optimize(graph, "O0", optimizer=ortgraph.optim.AdamW(lr=1e-2)).graph
    return ortgraph.TrainingSession(result)


@pytest.mark.parametrize("size", [0, 200])
def test_files_that_do_not_fit(session, tmp_path, no_room, size):
    graph, model, folder = session.graph, tmp_path / "a.onnx", tmp_path / "checkpoint"
    attempts = (
        lambda: graph.save(model),
        lambda: session.save_checkpoint(folder),
        lambda: session.export_inference(tmp_path / "b.onnx"),
    )
    for attempt in attempts:
        attempt()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    batch = {n: np.ones((2, 8), np.float32) for n in graph.signature.inputs}
    session.step(batch)
    no_room(size)
    for attempt in attempts:
        with pytest.raises(InputError, match="cannot be written .*unchanged"):
            attempt()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
