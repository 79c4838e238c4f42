"""Matrix work of a graph: every product and convolution as matrix products, before anything is optimized."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.profile_groups import node_flops

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgraph.graph import TrainingGraph


@dataclasses.dataclass(frozen=True, order=True)
class MatrixProduct:
    """``batch`` products of [rows, inner] by [inner, columns]."""

    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.rows * self.inner * self.columns


def matrix_work(graph: TrainingGraph) -> Counter[MatrixProduct]:
    """How often each product occurs in one run. A convolution counts as the product of its windows.

    Attention counts two products forward and four backward: what is computed again instead of kept is not work.
    """
    return Counter(p for node in graph.graph for p in _products(node) if p.flops)


def total_flops(work: Counter[MatrixProduct]) -> int:
    """Operations of one run."""
    return sum(count * product.flops for product, count in work.items())


def _products(node: ir.Node) -> Iterator[MatrixProduct]:
    if node.op_type in ("Conv", "ConvTranspose", "ConvGrad"):
        yield from _convolutions(node)
    elif node.op_type in ("Attention", "AttentionGrad"):
        yield from _attention(node)
    else:
        flops = node_flops(node)
        dims = _dims(node.outputs[0]) if flops else ()
        if dims:
            yield _folded(node, flops, (1, 1, *dims))


def _folded(node: ir.Node, flops: int, dims: tuple[int, ...]) -> MatrixProduct:
    """A product by its result; one with a single second matrix is one tall product."""
    inner = flops // (2 * math.prod(dims))
    second = node.inputs[1]
    if node.op_type != "Einsum" and second is not None and len(_dims(second)) <= 2:
        return MatrixProduct(1, math.prod(dims[:-1]), inner, dims[-1])
    return MatrixProduct(math.prod(dims[:-2]), dims[-2], inner, dims[-1])


def _convolutions(node: ir.Node) -> Iterator[MatrixProduct]:
    gradient = node.op_type == "ConvGrad"
    weight = _dims(node.inputs[2 if gradient else 1])
    # positions of the convolution's windows: its result, or what a transposed one reads
    y = _dims(node.outputs[0] if node.op_type == "Conv" else node.inputs[0])
    attribute = node.attributes.get("group")
    group = attribute.as_int() if attribute is not None else 1
    if not weight or not y:
        return
    positions, filters, window = y[0] * math.prod(y[2:]), weight[0] // group, math.prod(weight[1:])
    forward = MatrixProduct(group, positions, window, filters)
    if not gradient:
        yield forward if node.op_type == "Conv" else MatrixProduct(group, positions, filters, window)
        return
    if _wanted(node, 0):
        yield MatrixProduct(group, positions, filters, window)
    if _wanted(node, 1):
        yield MatrixProduct(group, filters, positions, window)


def _wanted(node: ir.Node, output: int) -> bool:
    return len(node.outputs) > output and bool(node.outputs[output].name)


def _attention(node: ir.Node) -> Iterator[MatrixProduct]:
    first = 1 if node.op_type == "AttentionGrad" else 0
    q, k, v = (_dims(node.inputs[first + i]) for i in range(3))
    if not q or not k or not v:
        return
    batch, queries, keys, width, out = math.prod(q[:-2]), q[-2], k[-2], q[-1], v[-1]
    if not first:
        yield MatrixProduct(batch, queries, width, keys)
        yield MatrixProduct(batch, queries, keys, out)
        return
    yield MatrixProduct(batch, keys, queries, out)
    yield MatrixProduct(batch, queries, out, keys)
    yield MatrixProduct(batch, queries, keys, width)
    yield MatrixProduct(batch, keys, queries, width)


def _dims(value: ir.Value | None) -> tuple[int, ...]:
    """The shape; empty when it is not known as numbers."""
    if value is None or value.shape is None:
        return ()
    dims = tuple(value.shape)
    return dims if all(isinstance(d, int) for d in dims) else ()  # type: ignore[return-value]
