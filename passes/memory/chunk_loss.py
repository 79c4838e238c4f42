"""ChunkLoss: the scores of a large vocabulary are never whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph, replace_value, static_shape
from ortgraph.manager.base import Refusal
from ortgraph.manager.rewrite import Match, RewritePass
from ortgraph.ops.builder import Builder
from ortgraph.ops.loss import DEFAULT_IGNORE, kept_rows
from ortgraph.ops.shapes import attribute, given
from ortgraph.ops.spec import COMPOSITE
from ortgraph.passes.fusion.operands import FLOATS
from ortgraph.passes.memory.loss_head import LossHead, NotAHead, Result, find_head, reaches, scores_of, sources

_TILE = 16  # rows of a chunk are a multiple of this where there are enough of them: products run in blocks of rows
# Each chunk packs the weight anew. One thread, 32,000 classes, depth 512, the three products of 512 rows: 277 ms whole,
# 285 by 256 rows, 307 by 128, 352 by 64.
_FULL_SPEED = 256


@dataclasses.dataclass(frozen=True)
class ChunkLoss(RewritePass):
    """loss, dH, dW, dB of CrossEntropy(H W + B), by chunks of rows: scores [rows, classes] never exist as a whole.

    For each chunk the scores, their share of the loss and their gradient stand next to each other (the gradient is
    written over the scores), followed by the rows of dH and by the sums of dW and dB so far, dW written over the sum
    that it replaces. No product is computed twice: the gradient needs nothing but its seed and the number of labels
    that count, and both are known before the loss. Where the seed depends on the loss itself, gradients are computed
    for a seed of 1 and multiplied afterwards. Sums run in another order than without chunks.

    Scores (or their log-probabilities) that are a model output, or are read for one, stay for the programs that ask
    for that output; ``step``, ``accumulate`` and ``gradients`` do not, ``evaluate`` then computes the product twice.

    Refuses when:
        the scores take no more than ``least_bytes``, or fit in one chunk;
        rows or classes are symbolic, or the scores are not [rows, classes];
        the scores do not come from a product of rows with a matrix, by views and slices of rows;
        anything but the loss, its gradient and model outputs depends on the scores;
        the gradient of the scores is read by anything but the products that make dH, dW and dB, or is an output;
        the loss has one entry per row, or soft labels (label smoothing).

    Attributes:
        least_bytes: Scores up to this size stay whole.
        chunk_bytes: Scores of a chunk take at most this, if that leaves the 256 rows that products need to run at full
            speed.
        rows: Rows of a chunk at most, whatever they take; 0 leaves it to ``chunk_bytes``.
    """

    name: ClassVar[str] = "chunk-loss"
    stages: ClassVar[tuple[str, ...]] = ("captured", "optimized", "cast", "stepped")
    roots: ClassVar[frozenset[str]] = frozenset({f"{COMPOSITE}.CrossEntropy"})
    shared_inner: ClassVar[str] = "keep"  # why: scores may also be a model output; ``match`` looks at every reader

    least_bytes: int = 1 << 25
    chunk_bytes: int = 1 << 24
    rows: int = 0

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        try:
            head = find_head(node)
        except NotAHead as found:
            return Refusal(node.name or "", str(found))
        if head.loss.inputs[0] is None or head.loss.inputs[0].dtype is None:
            return Refusal(node.name or "", "the element type of the scores is not known")
        position = {n: i for i, n in enumerate(graph.graph)}
        nodes = tuple(sorted(dict.fromkeys(head.nodes), key=position.__getitem__))
        outputs = (node.outputs[0], *(r.value for r in head.results))
        chunks = _chunks(head, self.rows, self.chunk_bytes)
        facts = {"head": head, "chunks": chunks, "signature": graph.signature, "position": position}
        return Match(nodes, outputs, facts=facts, count="chunked", at=node)

    def check(self, match: Match, graph: TrainingGraph) -> str | None:
        head, chunks = match.facts["head"], match.facts["chunks"]
        assert isinstance(head, LossHead) and isinstance(chunks, tuple)
        scores = head.loss.inputs[0]
        assert scores is not None and scores.dtype is not None
        if attribute(head.loss, "reduction", "mean") == "none":
            return "the loss has one entry per row"
        if scores.dtype not in FLOATS:
            return f"element type {scores.dtype}: Gemm runs in float32 and float64"
        size = head.rows * _row_bytes(head)
        if size <= self.least_bytes:
            return f"the scores take {size} bytes, least_bytes is {self.least_bytes}"
        if len(chunks) < 2:
            return f"the scores of {head.rows} rows fit in one chunk"
        return _reader(head, graph)

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        head, chunks = match.facts["head"], match.facts["chunks"]
        assert isinstance(head, LossHead) and isinstance(chunks, tuple)
        return _Chunked(build, head, match.facts["position"]).write(chunks)  # type: ignore[arg-type]


def _chunks(head: LossHead, rows: int, chunk_bytes: int) -> tuple[tuple[int, int], ...]:
    """(first row, row after the last) of chunks of about equal size."""
    most = rows or max(_FULL_SPEED, chunk_bytes // _row_bytes(head))
    size = -(-head.rows // -(-head.rows // most)) if head.rows else 1
    if most >= _TILE:
        size = min(-(-size // _TILE) * _TILE, most // _TILE * _TILE)
    return tuple((at, min(head.rows, at + size)) for at in range(0, head.rows, size))


def _row_bytes(head: LossHead) -> int:
    scores = head.loss.inputs[0]
    assert scores is not None and scores.dtype is not None
    return max(1, -(-head.classes * scores.dtype.bitwidth // 8))


def _reader(head: LossHead, graph: TrainingGraph) -> str | None:
    """Who keeps the scores from being cut, or None. Model outputs do not: programs that train leave them out."""
    inside, harmless = set(head.nodes), set(graph.signature.outputs)
    for value in scores_of(head):
        if value.is_graph_output() and value.name not in harmless:
            return f"%{value.name} is a graph output"
        for use in value.uses():
            if use.node in inside:
                continue
            if use.node.graph is not graph.graph:
                return f"%{value.name} is read by subgraph node {use.node.op_type} {use.node.name!r}"
            for result in use.node.outputs:
                for met in reaches(result, graph.graph, inside):
                    if isinstance(met, ir.Node) or met.name not in harmless:
                        what = f"node {met.name!r}" if isinstance(met, ir.Node) else f"output %{met.name}"
                        return f"%{value.name} is also read by {use.node.op_type} {use.node.name!r}, for {what}"
    return None


class _Chunked:
    """The nodes that replace one head."""

    def __init__(self, build: Builder, head: LossHead, position: dict[ir.Node, int]) -> None:
        self.head, self.graph = head, build.graph
        self.forward = Builder(build.graph, build.by, head.loss, (head.loss, head.product), build.names)
        self.backward = Builder(build.graph, build.by, head.loss, (head.gradient,), build.names)
        self.late = Builder(build.graph, build.by, head.gradient, (head.gradient,), build.names)
        self.position = position
        self.mean = attribute(head.loss, "reduction", "mean") == "mean"
        self.ignore = attribute(head.loss, "ignore_index", DEFAULT_IGNORE)
        self.labels, self.class_weight = head.loss.inputs[1], given(head.loss, 2)

    def write(self, chunks: tuple[tuple[int, int], ...]) -> list[ir.Value]:
        head, b, d = self.head, self.forward, self.backward
        hidden = self._selected_rows()
        total = self._total_weight() if len(head.loss.outputs) > 2 else None
        seed, late = self._seed()
        factor = d.op("Div", seed, total) if self.mean else seed
        losses: list[ir.Value] = []
        rows_of_hidden: list[ir.Value] = []
        sums: dict[Result, ir.Value] = {}
        weight_results = [r for r in head.results if r.kind == "weight"]
        bias_results = [r for r in head.results if r.kind == "bias"]
        for start, end in chunks:
            x = b.op("Slice", hidden, b.ints([start]), b.ints([end]), b.ints([0]))
            labels = b.op("Slice", self.labels, b.ints([start]), b.ints([end]), b.ints([0]))
            scores = _product(b, x, head.weight, head.bias, transB=int(head.classes_first))
            loss, d_scores = b.multi(
                "CrossEntropyAndGrad", factor, scores, labels, self.class_weight, outputs=2, domain=COMPOSITE,
                ignore_index=self.ignore,
            )  # fmt: skip
            losses.append(loss)
            if any(r.kind == "hidden" for r in head.results):
                rows_of_hidden.append(_product(d, d_scores, head.weight, None, transB=int(not head.classes_first)))
            for result in weight_results:
                pair = (x, d_scores) if result.transposed else (d_scores, x)
                sums[result] = _product(d, *pair, sums.get(result), transA=1)
            for result in bias_results:
                part = d.op("ReduceSum", d_scores, d.ints([0]), keepdims=1)
                sums[result] = d.op("Add", sums[result], part) if result in sums else part
        loss = b.op("Sum", *losses)
        if self.mean:
            loss = b.op("Div", loss, total)
        made = [loss]
        d_hidden = d.op("Concat", *rows_of_hidden, axis=0) if rows_of_hidden else None
        for result in head.results:
            value = self._laid_out(result, d_hidden if result.kind == "hidden" else sums[result])
            made.append(value if late is None else self.late.op("Mul", value, late))
        return made

    def _total_weight(self) -> ir.Value:
        """The weight of all labels that count; from the labels alone."""
        b, old = self.forward, self.head.loss.outputs[2]
        like = self.head.loss.inputs[0]
        assert self.labels is not None and like is not None
        row_weight = kept_rows(b, self.labels, self.class_weight, self.ignore, like)[2]
        total = b.op("ReduceSum", row_weight, keepdims=0)
        replace_value(old, total)
        return total

    def _seed(self) -> tuple[ir.Value, ir.Value | None]:
        """(seed of the gradients, what multiplies them afterwards). What the seed depends on moves before the loss."""
        head = self.head
        seed = head.gradient.inputs[0]
        assert seed is not None
        behind = sources(seed)
        if head.loss in behind:
            return self.backward.scalar(1.0, seed), seed
        anchor = self.position[head.loss]
        moved = sorted((n for n in behind if self.position.get(n, -1) > anchor), key=self.position.__getitem__)
        for node in moved:
            self.graph.remove(node)
        self.graph.insert_before(head.loss, moved)
        return seed, None

    def _selected_rows(self) -> ir.Value:
        """The rows of the left operand that reach the loss, [rows, depth]."""
        b, head = self.forward, self.head
        value = head.hidden
        if any(n.op_type == "Slice" for n in head.forward):
            for node in head.forward:
                if node.op_type == "Slice":
                    value = b.op("Slice", value, *node.inputs[1:])
                elif node.op_type != "Add":
                    value = b.op("Reshape", value, b.ints([*_dims(node.outputs[0])[:-1], head.depth]))
        return self._shaped(b, value, (head.rows, head.depth))

    def _laid_out(self, result: Result, value: ir.Value | None) -> ir.Value:
        """The gradient in the shape that it has in the graph; rows that do not reach the loss are zero."""
        b = self.backward
        assert value is not None
        if result.kind == "hidden" and any(n.op_type == "Pad" for n in result.path):
            for node in result.path:
                if node.op_type == "Pad":
                    value = b.op("Pad", value, *node.inputs[1:])
                else:
                    value = b.op("Reshape", value, b.ints([*_dims(node.outputs[0])[:-1], self.head.depth]))
        return self._shaped(b, value, _dims(result.value))

    @staticmethod
    def _shaped(b: Builder, value: ir.Value, shape: tuple[int, ...]) -> ir.Value:
        return value if static_shape(value) == shape else b.op("Reshape", value, b.ints(shape))


def _product(b: Builder, left: ir.Value, right: ir.Value, addend: ir.Value | None, **flips: int) -> ir.Value:
    inputs = (left, right) if addend is None else (left, right, addend)
    used: dict[str, Any] = {k: v for k, v in flips.items() if v}
    return b.op("Gemm", *inputs, **used)


def _dims(value: ir.Value) -> tuple[int, ...]:
    shape = static_shape(value)
    assert shape is not None
    return shape
