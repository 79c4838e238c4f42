"""What comparison and bisection notice: passes that are wrong in ways that no other level can see."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch", reason="capture needs PyTorch")

import ortgraph  # noqa: E402
from ortgraph.graph import TrainingGraph  # noqa: E402
from ortgraph.graph.verify import check  # noqa: E402
from ortgraph.manager.base import Changes, GraphPass  # noqa: E402
from ortgraph.manager.bisect import bisect  # noqa: E402
from ortgraph.manager.numerics import compare, example_batch  # noqa: E402
from ortgraph.ops import Builder  # noqa: E402
from ortgraph.passes.pipelines import PRESETS  # noqa: E402

ADAMW = ortgraph.optim.AdamW(lr=1e-3, weight_decay=0.1)


class Net(torch.nn.Module):
    """Two layers of one shape, running statistics, an ignored class and two outputs."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = torch.nn.Embedding(5, 4), torch.nn.BatchNorm1d(4)
        self.one, self.two, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 5)

    def forward(self, ids, labels):
        h = self.norm(self.two(torch.relu(self.one(self.table(ids)))))
        logits = self.head(h)
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=3)
        return {"loss": loss, "logits": logits, "hidden": h}


@pytest.fixture(scope="module")
def captured() -> TrainingGraph:
    torch.manual_seed(0)
    ids = torch.arange(12) % 5
    return ortgraph.capture(Net(), {"ids": ids, "labels": ids})


@dataclasses.dataclass(frozen=True)
class Wrong(GraphPass):
    """A pass that does one wrong thing and keeps every structural rule."""

    name: ClassVar[str] = "wrong"
    stages: ClassVar[tuple[str, ...]] = ("captured", "optimized", "stepped", "lowered")
    what: str = ""

    def run(self, graph: TrainingGraph) -> Changes:
        kind, _, rest = self.what.partition(" ")
        changes = Changes()
        changes.counts["wrong"] = 1
        {"scale": scale, "swap": swap, "swap-inputs": swap_inputs, "ignore": drop_ignored}[kind](graph, rest)
        return changes


def output(graph: TrainingGraph, name: str) -> ir.Value:
    return next(v for v in graph.graph.outputs if v.name == name)


def scale(graph: TrainingGraph, name: str) -> None:
    value = output(graph, name)
    build = Builder(graph.graph, "wrong", before=None)
    value.name = f"{name}.unscaled"
    made = build.op("Mul", value, build.scalar(1.001, value))
    index = list(graph.graph.outputs).index(value)
    graph.graph.outputs[index] = made
    made.name = name


def swap(graph: TrainingGraph, names: str) -> None:
    a, b = (output(graph, n) for n in names.split())
    outputs = list(graph.graph.outputs)
    i, j = outputs.index(a), outputs.index(b)
    a.name, b.name = b.name + ".swap", a.name + ".swap"
    graph.graph.outputs[i], graph.graph.outputs[j] = b, a
    a.name, b.name = a.name.removesuffix(".swap"), b.name.removesuffix(".swap")


def swap_inputs(graph: TrainingGraph, names: str) -> None:
    a, b = (next(v for v in graph.graph.inputs if v.name == n) for n in names.split())
    uses_a, uses_b = tuple(a.uses()), tuple(b.uses())
    for node, index in uses_a:
        node.replace_input_with(index, b)
    for node, index in uses_b:
        node.replace_input_with(index, a)


def drop_ignored(graph: TrainingGraph, _: str) -> None:
    for node in graph.graph:
        if "ignore_index" in node.attributes:
            node.attributes["ignore_index"] = ir.AttrInt64("ignore_index", -100)


BEFORE = [
    "scale gradient/one.weight", "swap gradient/one.weight gradient/two.weight", "swap gradient/one.bias gradient/two.bias",
    "swap-inputs one.weight two.weight", "ignore", "scale logits", "scale hidden", "scale update/norm.running_mean",
    "scale update/norm.running_var",
]  # fmt: skip
AFTER = [
    "scale update/one.weight", "scale update/head.bias", "swap update/one.weight update/two.weight",
    "scale exp_avg/one.bias/next", "scale exp_avg_sq/two.weight/next", "swap exp_avg/one.bias/next exp_avg/two.bias/next",
    "scale gradient/head.bias",
]  # fmt: skip


def pipeline(what: str, stage: str):
    preset = list(PRESETS["O0"](optimizer=ADAMW, target="onnxruntime-training", shapes={}, accumulation_steps=1))
    at = next(i for i, p in enumerate(preset) if p.name == stage)
    return preset[: at + 1] + [Wrong(what)] + preset[at + 1 :]


@pytest.mark.parametrize(
    ("what", "stage"), [*((w, "mark-optimized") for w in BEFORE), *((w, "attach-optimizer") for w in AFTER)]
)
def test_comparison_notices(captured, what, stage):
    batch = example_batch(captured)
    wrong = ortgraph.optimize(captured, pipeline(what, stage)).graph  # structure and signature are fine
    assert not check(wrong, "types")
    result = compare(captured, wrong, batch)
    assert not result.equal, result


@pytest.mark.parametrize(
    ("what", "stage"), [("ignore", "mark-optimized"), ("scale update/one.weight", "attach-optimizer")]
)
def test_bisection_finds_it(captured, what, stage):
    culprit = bisect(captured, pipeline(what, stage), example_batch(captured))
    assert culprit is not None and culprit.name == "wrong", culprit


@pytest.mark.parametrize(("level", "steps"), [("O0", 1), ("O1", 2), ("O2", 1), ("O2", 2)])
def test_comparison_is_content_with_what_is_right(captured, level, steps):
    batch = example_batch(captured)
    right = ortgraph.optimize(captured, level, optimizer=ADAMW, accumulation_steps=steps).graph
    result = compare(captured, right, batch)
    assert result.equal, result
    assert {"logits", "hidden", "update/one.weight", "exp_avg/one.bias/next", "update/norm.running_mean"} <= set(
        result.values
    )


def test_a_wrong_kernel_is_not_compared_with_itself(captured, monkeypatch):
    """The reference runs standard operators only, whoever asks."""
    from ortgraph.runtime import session as sessions

    seen = []
    original = sessions.TrainingSession.__init__

    def spy(self, graph, *args, **options):
        seen.append({n.domain for n in graph.graph})
        original(self, graph, *args, **options)

    monkeypatch.setattr(sessions.TrainingSession, "__init__", spy)
    compare(captured, ortgraph.optimize(captured, "O2").graph, example_batch(captured))
    assert seen[0] == {""}


def test_example_batches_hold_ignored_targets(captured):
    batch = example_batch(captured)
    assert 0 < np.count_nonzero(batch["labels"] == 3) < batch["labels"].size
    assert set(np.unique(batch["ids"])) <= set(range(5)) and batch["ids"].max() > 1
