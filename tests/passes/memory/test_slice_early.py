"""slice-early: where slices go, what stays put, and the memory of a classifier that reads its first token."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import ortgraph
from ortgraph.passes.memory.slice_early import SliceEarly
from ortgraph.runtime.session import TrainingSession


def cut(b, x, rows=2):
    return b.op("Slice", x, b.ints([0]), b.ints([rows]), b.ints([0]))


def chain(b, x, rows=2, late=None, cuts=1):
    """A saved value, a few steps later read in part."""
    saved = b.op("Exp", x)
    y = b.op("Tanh", b.op("Sin", b.op("Neg", saved)))
    parts = [cut(b, saved, rows) for _ in range(cuts)]
    more = [] if late is None else late(b, saved)
    return [b.op("ReduceSum", y, keepdims=0), *(b.op("Neg", p) for p in parts), *more]


def make(bench, **options):
    return bench.make(lambda b, x: chain(b, x, **options), {"x": (64, 8)})


def ops(bench, graph):
    return " ".join(bench.ops(graph))


def test_a_slice_follows_the_last_whole_reader(bench):
    graph = make(bench)
    assert ops(bench, graph) == "Exp Neg Sin Tanh Slice ReduceSum Neg"
    assert bench.apply(graph, SliceEarly(), tolerance=0) == {"moved": 1}
    assert ops(bench, graph) == "Exp Neg Slice Sin Tanh ReduceSum Neg"


def test_slices_of_one_value_move_together(bench):
    graph = make(bench, cuts=3)
    assert bench.apply(graph, SliceEarly(), tolerance=0) == {"moved": 3}
    assert ops(bench, graph) == "Exp Neg Slice Slice Slice Sin Tanh ReduceSum Neg Neg Neg"


def test_a_part_by_another_part_comes_behind_both(bench):
    """Indices that are a part of an early value move up; what they look up is made later and stays there."""

    def body(b, x, i):
        table = b.op("Abs", i)
        saved = b.op("Exp", b.op("Sin", x))
        y = b.op("Tanh", b.op("Neg", saved))
        index = b.op("Gather", table, b.const([1], np.int64), axis=0)
        return [b.op("ReduceSum", y, keepdims=0), b.op("Neg", b.op("Gather", saved, index, axis=0))]

    graph = bench.make(body, {"x": (64, 8), "i": (4,)}, {"i": ir.DataType.INT64})
    assert bench.apply(graph, SliceEarly(), tolerance=0) == {"moved": 2}
    assert ops(bench, graph) == "Abs Gather Sin Exp Neg Gather Tanh ReduceSum Neg"


def test_a_lookup_waits_for_its_indices(bench):
    def body(b, x, i):
        saved = b.op("Exp", x)
        y = b.op("Sin", b.op("Neg", saved))
        index = b.op("Abs", i)
        z = b.op("Tanh", y)
        return [b.op("ReduceSum", z, keepdims=0), b.op("Gather", saved, index, axis=0)]

    graph = bench.make(body, {"x": (64, 8), "i": (2,)}, {"i": ir.DataType.INT64})
    assert bench.apply(graph, SliceEarly(), tolerance=0) == {"moved": 1}
    assert ops(bench, graph) == "Exp Neg Sin Abs Gather Tanh ReduceSum"


def test_slices_of_slices(bench):
    def body(b, x):
        saved = b.op("Exp", x)
        y = b.op("Sin", b.op("Neg", saved))
        return [b.op("ReduceSum", y, keepdims=0), b.op("Neg", cut(b, cut(b, saved, 8)))]

    graph = bench.make(body, {"x": (64, 8)})
    assert bench.apply(graph, SliceEarly(), tolerance=0) == {"moved": 2}
    assert ops(bench, graph) == "Exp Neg Slice Slice Sin ReduceSum Neg"


@pytest.mark.parametrize(
    "options",
    [
        {"late": lambda b, saved: [b.op("Cos", saved)]},  # the whole is read again, after the slice
        {"late": lambda b, saved: [saved]},  # the whole is an output
    ],
)
def test_a_value_that_lives_on_keeps_its_slices_where_they_are(bench, options):
    assert bench.refusals(make(bench, **options), SliceEarly()) == []


def test_parts_as_large_as_the_whole_stay(bench):
    assert bench.refusals(make(bench, rows=33), SliceEarly()) == ["the parts take more than 0.5 of the whole"]
    assert bench.refusals(make(bench, rows=20, cuts=2), SliceEarly()) == ["the parts take more than 0.5 of the whole"]


def test_inputs_and_symbolic_shapes_stay(bench):
    graph = bench.make(lambda b, x: [b.op("Exp", b.op("Neg", x)), cut(b, x)], {"x": (64, 8)})
    assert bench.refusals(graph, SliceEarly()) == []
    graph = bench.make(chain, {"x": ("batch", 8)})
    assert bench.refusals(graph, SliceEarly()) == ["a shape is symbolic"]


def test_a_classifier_with_dropout_that_reads_the_first_token():
    torch = pytest.importorskip("torch")

    class First(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))
            self.head = torch.nn.Linear(32, 3)

        def forward(self, x, y):
            for layer in self.layers:
                x = torch.nn.functional.dropout(torch.nn.functional.gelu(layer(x)), 0.1)
            return torch.nn.functional.cross_entropy(self.head(x[:, 0]), y)

    batch = {"x": torch.randn(4, 64, 32), "y": torch.tensor([0, 1, 2, 0])}
    feeds = {k: v.numpy() for k, v in batch.items()}
    captured = ortgraph.capture(First(), batch)
    results = []
    for tail in ("", ",slice-early"):
        graph = ortgraph.optimize(captured, f"narrow-rows,mark-optimized,lower,eliminate-dead-code{tail}").graph
        session = TrainingSession(graph)
        results.append((session.gradients(feeds), session.arena_bytes))
    (want, before), (got, after) = results
    assert after < before
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])
