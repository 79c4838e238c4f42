"""Random operators of forward models, written over uniform numbers that are functions of key, step and node number.

ONNX Runtime's own keep a hidden generator state: loss and gradients would see other numbers, and no run could be resumed.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from ortgraph.errors import UnsupportedError
from ortgraph.graph import Names, replace_value
from ortgraph.graph.edit import remove_node
from ortgraph.ops.builder import Builder

BY = "legalize"
FLOAT = ir.DataType.FLOAT
_UNIFORM = frozenset({"RandomUniform", "RandomUniformLike"})  # in [0, 1), float32: what stands for ours until the end
_DRAWS = _UNIFORM | {"RandomNormal", "RandomNormalLike", "Bernoulli", "Multinomial"}
_LEAST = 2.0**-25  # half of the generator's unit: what stands for an exponential number of 0


def uniform_draws(graph: ir.Graph, names: Names) -> list[ir.Node]:
    """Rewrite every random operator; returns the nodes that stand for uniform numbers.

    Raises:
        UnsupportedError: The rank of what is drawn is not known.
    """
    stand_ins: list[ir.Node] = []
    for node in list(graph):
        if node.op_type not in _DRAWS or node.domain not in ("", "ai.onnx"):
            continue
        old = node.outputs[0]
        if old.shape is None or old.dtype is None:
            raise UnsupportedError(
                f"node {node.name!r}: the shape of what {node.op_type} draws is not known", "fix it with shapes={...}"
            )
        build = Builder(graph, BY, before=node, origins=[node], names=names)
        made = _Draw(build, node, stand_ins).result()
        replace_value(old, build.op("Cast", made, to=int(old.dtype)) if made.dtype != old.dtype else made)
        remove_node(node)
    return stand_ins


class _Draw:
    """The numbers that one operator draws."""

    def __init__(self, build: Builder, node: ir.Node, stand_ins: list[ir.Node]) -> None:
        self.build, self.node, self.stand_ins = build, node, stand_ins

    def result(self) -> ir.Value:
        kind, node = self.node.op_type.removesuffix("Like"), self.node
        if kind == "Bernoulli":
            return self.build.op("Less", self._uniform(), self._as_float())
        if kind == "Multinomial":
            return self._multinomial()
        if kind == "RandomNormal":
            return self._scaled(
                self._normal(), node.attributes.get_float("scale", 1.0), node.attributes.get_float("mean", 0.0)
            )
        low = node.attributes.get_float("low", 0.0)
        return self._scaled(self._uniform(), node.attributes.get_float("high", 1.0) - low, low)

    def _as_float(self) -> ir.Value:
        value = self.node.inputs[0]
        assert value is not None
        return value if value.dtype == FLOAT else self.build.op("Cast", value, to=int(FLOAT))

    def _uniform(self, like: ir.Value | None = None) -> ir.Value:
        like = like or (self.node.inputs[0] if self.node.inputs else None)
        if like is None:
            made = self.build.op("RandomUniform", shape=self.node.attributes["shape"].as_ints(), dtype=int(FLOAT))
        else:
            made = self.build.op("RandomUniformLike", like, dtype=int(FLOAT))
        producer = made.producer()
        assert producer is not None
        self.stand_ins.append(producer)
        return made

    def _number(self, value: float) -> ir.Value:
        return self.build.const(value, FLOAT)

    def _scaled(self, drawn: ir.Value, scale: float, shift: float) -> ir.Value:
        drawn = drawn if scale == 1.0 else self.build.op("Mul", drawn, self._number(scale))
        return drawn if shift == 0.0 else self.build.op("Add", drawn, self._number(shift))

    def _log(self, drawn: ir.Value) -> ir.Value:
        return self.build.op("Log", self.build.op("Sub", self._number(1.0), drawn))

    def _normal(self) -> ir.Value:
        """Box and Muller, sqrt(-2 log(1 - u)) cos(2 pi v)."""
        u, v = self._uniform(), self._uniform()
        radius = self.build.op("Sqrt", self.build.op("Mul", self._number(-2.0), self._log(u)))
        return self.build.op("Mul", radius, self.build.op("Cos", self.build.op("Mul", self._number(2 * math.pi), v)))

    def _multinomial(self) -> ir.Value:
        """The largest log p - log e of exponential numbers e: the first of independent arrivals with rates p."""
        build, samples = self.build, self.node.attributes.get_int("sample_size", 1)
        rates = build.op("Unsqueeze", self._as_float(), build.ints([1]))
        wide = build.op("Expand", rates, build.const(np.array([1, samples, 1], np.int64)))
        waiting = build.op("Max", build.op("Neg", self._log(self._uniform(wide))), self._number(_LEAST))
        return build.op("ArgMax", build.op("Sub", rates, build.op("Log", waiting)), axis=2, keepdims=0)
