"""Measuring prices of nodes: the fit, the shared memory, and a short run of everything."""

from __future__ import annotations

import numpy as np
import pytest

from ortgraph.ops import calibrate_nodes
from ortgraph.ops.calibrate_nodes import Pool, Sample, measure_nodes, non_negative_least_squares, prices
from ortgraph.ops.node_cases import NODE_CASES
from ortgraph.ops.targets import STOCK, TRAINING
from ortgraph.ops.work import Work

ort = pytest.importorskip("onnxruntime")


def test_least_squares_recovers_and_stays_non_negative():
    rng = np.random.default_rng(0)
    a = rng.random((40, 4))
    wanted = np.array([3.0, 0.0, 0.5, 2.0])
    assert np.allclose(non_negative_least_squares(a, a @ wanted), wanted, atol=1e-6)
    pulled = non_negative_least_squares(a, a @ np.array([1.0, -1.0, 1.0, 0.0]))
    assert (pulled >= 0).all() and pulled[1] == 0.0


def test_pool_hands_out_aligned_views_in_turn():
    pool = Pool(1 << 12)
    first, second = pool.take(np.dtype(np.float32), (8, 8)), pool.take(np.dtype(np.float32), (8, 8))
    assert not np.may_share_memory(first, second)
    assert second.ctypes.data - first.ctypes.data == 256
    views = [pool.take(np.dtype(np.float32), (16, 16)) for _ in range(5)]
    assert all(np.may_share_memory(v, pool.floats) for v in views)
    assert not np.may_share_memory(pool.take(np.dtype(np.float32), (64, 64)), pool.floats)


def sample(name, moved, *seconds, kind="elementwise"):
    made = Sample(Work(kind, (name, kind), 0, moved), lambda: None, 1)
    made.shortest, made.runs = sorted(seconds), 100
    return made


def test_prices_ascend_and_classes_take_after_an_operator():
    found = prices([sample("Add", 1000, 9e-6), sample("Add", 100, 5e-6), sample("Add", 4000, 8e-6)], overhead=1.0)
    assert found["Add"] == {"points": [[100, 4.0], [1000, 8.0], [4000, 8.0]]}
    assert found["elementwise"] == {"points": found["Add"]["points"], "like": "Add"}


def test_settled_needs_runs_that_agree():
    assert sample("Add", 1, 1.0, 1.01, 1.02).settled(40)
    assert not sample("Add", 1, 1.0, 1.01, 1.2).settled(40)
    assert not sample("Add", 1, 1.0, 1.01, 1.02).settled(400)


def test_every_case_runs(monkeypatch):
    """One try of every case at its small sizes, and of some products."""
    monkeypatch.setattr(calibrate_nodes, "SIZES", 2)
    monkeypatch.setattr(calibrate_nodes, "PRODUCTS", calibrate_nodes.PRODUCTS[:2])
    monkeypatch.setattr(calibrate_nodes, "CONVOLUTIONS", calibrate_nodes.CONVOLUTIONS[:1])
    monkeypatch.setattr(calibrate_nodes, "_TRIES", 1)
    target = TRAINING if hasattr(ort, "training") else STOCK
    found = measure_nodes(target, threads=1, seconds=0.0, cases=NODE_CASES)
    assert {"Add", "Add:row", "product:NN", "product:TT", "Conv", "free", "other", "softmax"} <= set(found)
    assert list(found) == sorted(found)
    if target == TRAINING:
        assert {"com.microsoft.ConvGrad", "com.microsoft.LayerNormalizationGrad"} <= set(found)
