"""Operator graphs of the kinds that recompute selection meets: random ones with every feature, and a transformer's step."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ortgraph.plan.operations import Operation, OperationGraph, PlanValue


def _random_graph(seed: int, size: int = 7, plain: bool = False) -> OperationGraph:
    """Skips of any length; unless plain also kept values, scratch, pairs in place, updates, operations evaluated once."""
    draw = random.Random(seed)
    operations: list[Operation] = []
    values: list[PlanValue] = []
    for i in range(size):
        read = tuple(v for v in range(len(values)) if draw.random() < (0.7 if v == len(values) - 1 else 0.25))
        made = tuple(range(len(values), len(values) + (1 if plain else draw.choice([1, 1, 1, 2]))))
        values += [PlanValue(f"v{v}", draw.randint(1, 5), not plain and draw.random() < 0.1) for v in made]
        cost, scratch = float(draw.randint(0, 5)), 0 if plain else draw.choice([0, 0, 1])
        pairs = tuple((u, v) for u in read for v in made if not plain and values[u].size == values[v].size)
        after = () if plain or draw.random() < 0.8 or not i else (draw.randrange(i),)
        again = plain or draw.random() > 0.15
        operations.append(Operation(f"o{i}", cost, read, made, again, scratch, pairs, after))
    return OperationGraph(tuple(operations), tuple(values))


class _Builder:
    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.values: list[PlanValue] = []

    def add(self, name: str, cost: float, size: int, *read: int, kept: bool = False) -> int:
        i = len(self.operations)
        self.operations.append(Operation(name, cost, tuple(sorted(set(read))), (i,)))
        self.values.append(PlanValue(name, size, kept))
        return i

    def graph(self) -> OperationGraph:
        return OperationGraph(tuple(self.operations), tuple(self.values))


def _transformer(layers: int, elementwise: float = 0.0, width: int = 128, rows: int = 1024, keys: int = 512):
    """Forward and backward of pre-norm blocks, float32; matrix products cost FLOPs, the rest `elementwise` per element.

    Returns the graph, and the operations of each block's forward half.
    """
    b = _Builder()
    bytes_x, bytes_h, bytes_s = 4 * rows * width, 16 * rows * width, 4 * rows * keys
    product, attend = 2.0 * rows * width * width, 2.0 * rows * keys * width / 4

    def point(name: str, size: int, *read: int) -> int:
        return b.add(name, elementwise * size / 4, size, *read)

    blocks: list[range] = []
    saved: list[dict[str, int]] = []
    x = point("embed", bytes_x)
    for k in range(layers):
        first, s = len(b.operations), {"x": x}
        s["n1"] = point(f"norm1.{k}", bytes_x, x)
        for head in "qkv":
            s[head] = b.add(f"{head}.{k}", product, bytes_x, s["n1"])
        scores = b.add(f"scores.{k}", attend, bytes_s, s["q"], s["k"])
        shifted = point(f"exp.{k}", bytes_s, scores)
        s["p"] = point(f"softmax.{k}", bytes_s, shifted)
        s["c"] = b.add(f"context.{k}", attend, bytes_x, s["p"], s["v"])
        s["r"] = point(f"residual1.{k}", bytes_x, x, b.add(f"project.{k}", product, bytes_x, s["c"]))
        s["n2"] = point(f"norm2.{k}", bytes_x, s["r"])
        s["h"] = b.add(f"up.{k}", 4 * product, bytes_h, s["n2"])
        s["e"] = point(f"erf.{k}", bytes_h, s["h"])
        s["g"] = point(f"gelu.{k}", bytes_h, s["h"], s["e"])
        blocks.append(range(first, len(b.operations)))
        x = point(f"residual2.{k}", bytes_x, s["r"], b.add(f"down.{k}", 4 * product, bytes_x, s["g"]))
        saved.append(s)
    d = point("loss gradient", bytes_x, x)
    for k in reversed(range(layers)):
        s = saved[k]
        b.add(f"d down weight.{k}", 4 * product, 16 * width * width, s["g"], d, kept=True)
        dh = point(f"d gelu.{k}", bytes_h, b.add(f"d down.{k}", 4 * product, bytes_h, d), s["h"], s["e"])
        b.add(f"d up weight.{k}", 4 * product, 16 * width * width, s["n2"], dh, kept=True)
        d = point(f"d norm2.{k}", bytes_x, b.add(f"d up.{k}", 4 * product, bytes_x, dh), s["r"], d)
        b.add(f"d project weight.{k}", product, 4 * width * width, s["c"], d, kept=True)
        dc = b.add(f"d project.{k}", product, bytes_x, d)
        dv = b.add(f"d v.{k}", attend, bytes_x, s["p"], dc)
        ds = point(f"d scores.{k}", bytes_s, b.add(f"d softmax.{k}", attend, bytes_s, dc, s["v"]), s["p"])
        dq, dk = b.add(f"d q.{k}", attend, bytes_x, ds, s["k"]), b.add(f"d k.{k}", attend, bytes_x, ds, s["q"])
        parts = []
        for head, gradient in zip("qkv", (dq, dk, dv), strict=True):
            b.add(f"d {head} weight.{k}", product, 4 * width * width, s["n1"], gradient, kept=True)
            parts.append(b.add(f"d {head} input.{k}", product, bytes_x, gradient))
        d = point(f"d norm1.{k}", bytes_x, *parts, s["x"], d)
    return b.graph(), blocks


@pytest.fixture(scope="session")
def random_graph() -> Callable[..., OperationGraph]:
    return _random_graph


@pytest.fixture(scope="session")
def transformer() -> Callable[..., tuple[OperationGraph, list[range]]]:
    return _transformer
