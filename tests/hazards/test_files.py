"""Files that were changed after planning: right numbers or one clear error, never other numbers."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="capture needs PyTorch")

import ortgraph  # noqa: E402
from ortgraph.errors import OrtgraphError, SignatureError, VerificationError  # noqa: E402

BATCH = (np.ones((3, 4), np.float32), np.zeros((3, 4), np.float32))
PLAN, SIGNATURE = "ortgraph.plan", "ortgraph.signature"


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    graph = ortgraph.capture(module, tuple(map(torch.from_numpy, BATCH)), loss=torch.nn.MSELoss())
    result = ortgraph.optimize(graph, "O2", optimizer=ortgraph.optim.AdamW(lr=0.1))
    return result.graph.save(tmp_path_factory.mktemp("planned") / "step.onnx")


def changed(planned, folder, change):
    model = onnx.load(planned)
    change(model, {e.key: e for e in model.metadata_props})
    path = folder / "changed.onnx"
    onnx.save(model, path)
    path.with_suffix(".safetensors").write_bytes(planned.with_suffix(".safetensors").read_bytes())
    return path


def trained(path):
    session = ortgraph.TrainingSession(ortgraph.load(path))
    losses = [session.step(BATCH) for _ in range(3)]
    return losses, session.state_dict()


def plan(change):
    def apply(model, entries):
        stored = json.loads(entries[PLAN].value)
        entries[PLAN].value = change(stored)

    return apply


def moved(offset):
    return plan(lambda p: json.dumps({**p, "offsets": {k: offset(v) for k, v in p["offsets"].items()}}))


@pytest.mark.parametrize(
    "change",
    [
        moved(lambda v: 0), moved(lambda v: -64), moved(lambda v: v + 1), moved(lambda v: v * 2**40), moved(str),
        plan(lambda p: "{oops"), plan(lambda p: "[1]"), plan(lambda p: '{"program": "step"}'), plan(lambda p: "null"),
        plan(lambda p: json.dumps({**p, "offsets": {"a": 0}})),
    ],
    ids=["overlap", "negative", "odd", "huge", "text", "garbage", "list", "no offsets", "null", "another graph"],
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_made_anew(planned, tmp_path, change):
    want, got = trained(planned), trained(changed(planned, tmp_path, change))
    assert got[0] == want[0]
    for name, value in want[1].items():
        np.testing.assert_array_equal(got[1][name], value)


def test_nodes_out_of_order_are_refused(planned, tmp_path):
    """A planned graph is run in file order: the arena would be wrong in the order that the runtime makes of it."""

    def reverse(model, _):
        nodes = list(model.graph.node)[::-1]
        del model.graph.node[:]
        model.graph.node.extend(nodes)

    with pytest.raises(VerificationError, match="defined-before-use"):
        trained(changed(planned, tmp_path, reverse))


def test_updates_moved_before_the_last_reader_are_copied(planned, tmp_path):
    """A foreign sort may put an update first; what reads the old weight afterwards must still read it."""

    def early(model, _):
        nodes, done = list(model.graph.node), {v.name for v in (*model.graph.input, *model.graph.initializer)}
        del model.graph.node[:]
        while nodes:
            ready = [n for n in nodes if all(not i or i in done for i in n.input)]
            first = next((n for n in ready if any(o.startswith("update/") for o in n.output)), ready[0])
            nodes.remove(first)
            done.update(first.output)
            model.graph.node.append(first)

    want, got = trained(planned), trained(changed(planned, tmp_path, early))
    assert got[0] == want[0]
    for name, value in want[1].items():
        np.testing.assert_array_equal(got[1][name], value)


def signature(change):
    def apply(model, entries):
        stored = json.loads(entries[SIGNATURE].value)
        entries[SIGNATURE].value = json.dumps(change(stored))

    return apply


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (signature(lambda s: {**s, "loss": "nowhere"}), VerificationError),
        (signature(lambda s: {**s, "parameters": None}), SignatureError),
        (signature(lambda s: []), SignatureError),
        (signature(lambda s: {**s, "version": 99}), SignatureError),
        (signature(lambda s: {**s, "stage": "done"}), SignatureError),
        (signature(lambda s: {**s, "inputs": s["inputs"][:1]}), VerificationError),
        (signature(lambda s: {**s, "metadata": {**s["metadata"], "accumulation_steps": "many"}}), SignatureError),
        (signature(lambda s: {**s, "parameters": [{**p, "gradient": 5} for p in s["parameters"]]}), OrtgraphError),
    ],
    ids=["loss", "parameters", "list", "version", "stage", "input", "accumulation", "gradient"],
)
def test_a_signature_that_does_not_fit_is_one_error(planned, tmp_path, change, error):
    with pytest.raises(error):
        trained(changed(planned, tmp_path, change))
