"""FuseProduct: what surrounds a Product becomes part of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Changes, Refusal
from ortgraph.manager.rewrite import Match, RewritePass, op_key
from ortgraph.ops.builder import Builder
from ortgraph.ops.precision import FP32, PRECISIONS
from ortgraph.ops.shapes import attribute, given
from ortgraph.ops.spec import COMPOSITE
from ortgraph.passes.fusion.operands import (
    FLOAT32,
    permutation,
    producer_of,
    rank,
    reshape_dims,
    same_shape,
    with_constant,
)

_ACTIVATIONS = {f"{COMPOSITE}.Gelu": "gelu", f"{COMPOSITE}.Silu": "silu", "Relu": "relu", "Tanh": "tanh"}
_LARGEST = float(2**127)  # of float32, the type of alpha
Step = Callable[[ir.Node], "Match | Refusal | None"]


@dataclasses.dataclass(frozen=True)
class FuseProduct(RewritePass):
    """activation(c A B + bias) + addend = Product(A, B, bias, addend) {alpha=c, activation}, between casts and views.

    One step at a time, until none is left: a cast of an operand (``operand-cast``: to the precision of the product,
    where nothing else reads it; or from there to float32), the swap of an operand's last two dimensions
    (``transpose``), a constant factor (``scale``), a row added to every row (``bias``), Gelu, Silu, Relu or Tanh
    (``activation``, in float32 between casts too; readers of the value before it read a second output), the sum with
    a value of the same shape (``addend``), the cast of the result (``result-cast``). Reshapes between a product and its
    activation or addend move behind.

    Sums go in only where ``addends`` says so: measured over whole steps (BERT, GPT-2 in bfloat16, one thread) they take
    as long in the generated kernels that read them anyhow, or 1 % less; activations gain 1 to 2 %.

    Refuses when:
        the result is read elsewhere or is a graph output, but for an activation, which leaves it as the second output;
        the bias is no vector of the result's last dimension, the addend would be broadcast or has another type;
        the step does not follow the product's own order (a bias after an activation), or its place is taken.

    Attributes:
        addends: Whether ``addend`` is one of the steps.
    """

    name: ClassVar[str] = "fuse-product"
    roots: ClassVar[frozenset[str]] = frozenset({f"{COMPOSITE}.Product"})
    shared_inner: ClassVar[str] = "keep"  # the steps look at the readers themselves

    addends: bool = False

    def run(self, graph: TrainingGraph, accept: Callable[[int], bool] = lambda index: True) -> Changes:
        total, asked = Changes(), 0

        def next_one(_: int) -> bool:
            nonlocal asked
            asked += 1
            return accept(asked - 1)

        while True:
            changes = super().run(graph, next_one)
            total.counts.update(changes.counts)
            if not sum(changes.counts.values()):
                total.refusals += changes.refusals
                return total

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        refusal: Refusal | None = None
        for step in _STEPS:
            if step is _addend and not self.addends:
                continue
            found = step(node)
            if isinstance(found, Match):
                return found
            refusal = refusal or found
        return refusal or _read_elsewhere(node)

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        product, facts = _product_of(match), match.facts
        inputs = [*product.inputs, *[None] * (4 - len(product.inputs))]
        for index, value in facts.get("inputs", {}).items():  # type: ignore[attr-defined]
            inputs[index] = value
        addend = inputs[3]
        if addend is not None and facts.get("lay"):
            inputs[3] = build.op("Reshape", addend, build.ints(facts["lay"]))  # type: ignore[arg-type]
        while inputs[-1] is None:
            inputs.pop()
        options = {k: a.value for k, a in product.attributes.items()} | facts.get("attributes", {})  # type: ignore[operator]
        two = bool(facts.get("two")) or _second(product) is not None
        made = build.multi("Product", *inputs, outputs=2 if two else 1, domain=COMPOSITE, **options)
        y, old = made[0], match.outputs[-1]
        if facts.get("view"):
            y = build.op("Reshape", y, build.ints(facts["view"]))  # type: ignore[arg-type]
        else:
            y.shape = old.shape
        kept = [made[1]] if two and len(match.outputs) == 2 else []
        for value, before in zip(kept, match.outputs, strict=False):
            value.shape = before.shape
        return [*kept, y]


def _product_of(match: Match) -> ir.Node:
    return next(n for n in match.nodes if op_key(n) == f"{COMPOSITE}.Product")


def _second(node: ir.Node) -> ir.Value | None:
    """The value before the activation, when somebody reads it."""
    z = node.outputs[1] if len(node.outputs) > 1 else None
    return z if z is not None and (z.uses() or z.is_graph_output()) else None


def _made(node: ir.Node, *behind: ir.Node, count: str, **facts: object) -> Match:
    """The product with what stands behind it; a second output that is read stays one."""
    z = _second(node)
    last = behind[-1].outputs[0] if behind else node.outputs[0]
    return Match((node, *behind), (last,) if z is None else (z, last), facts=facts, count=count)


def _sole_reader(value: ir.Value) -> ir.Node | None:
    """The only node that reads a value."""
    readers = {u.node: None for u in value.uses()}
    return next(iter(readers)) if len(readers) == 1 and not value.is_graph_output() else None


def _read_elsewhere(node: ir.Node) -> Refusal | None:
    """Why a step behind the product was not looked at."""
    y = node.outputs[0]
    readers = [u.node for u in y.uses()]
    steps = [r for r in readers if op_key(r) in ("Add", "Mul", "Div", "Cast")]
    if not steps or _sole_reader(y) is not None:
        return None
    others = "a graph output" if y.is_graph_output() else f"read by {len(readers)} nodes"
    return Refusal(node.name or "", f"the product %{y.name} is {others}, {steps[0].op_type} among its readers")


def _views(value: ir.Value) -> Iterator[tuple[ir.Value, tuple[ir.Node, ...]]]:
    """The value, and what Reshapes and a cast to float32 make of it, with the nodes on the way."""
    todo: list[tuple[ir.Value, tuple[ir.Node, ...]]] = [(value, ())]
    while todo:
        one, way = todo.pop()
        yield one, way
        for use in one.uses():
            wider = op_key(use.node) == "Cast" and use.node.outputs[0].dtype == FLOAT32
            if (op_key(use.node) == "Reshape" and use.idx == 0) or wider:
                todo.append((use.node.outputs[0], (*way, use.node)))


def _plain(node: ir.Node, *, bias: bool = True, addend: bool = True, activation: bool = True) -> bool:
    """Whether the named parts are not there yet, and no second output."""
    taken = (bias and given(node, 2) is not None) or (addend and given(node, 3) is not None)
    return not taken and not (activation and (attribute(node, "activation", "none") != "none" or _second(node)))


def _operand_cast(node: ir.Node) -> Match | Refusal | None:
    low = PRECISIONS.get(str(attribute(node, "precision", FP32)), FLOAT32)
    refusal = None
    for i in (0, 1):
        cast = producer_of(node.inputs[i], "Cast")
        source = cast.inputs[0] if cast is not None else None
        if cast is None or source is None or low == FLOAT32:
            continue
        if source.dtype == low and cast.outputs[0].dtype == FLOAT32:
            return _before(node, cast, "operand-cast", inputs={i: source})
        if source.dtype != FLOAT32 or cast.outputs[0].dtype != low:
            continue
        others = [u.node for u in cast.outputs[0].uses() if u.node is not node]
        if not others and not cast.outputs[0].is_graph_output():
            same = {j: source for j in (0, 1) if node.inputs[j] is cast.outputs[0]}
            return _before(node, cast, "operand-cast", inputs=same)
        refusal = Refusal(node.name or "", f"the cast %{cast.outputs[0].name} of an operand is read elsewhere too")
    return refusal


def _before(node: ir.Node, first: ir.Node, count: str, **facts: object) -> Match:
    found = _made(node, count=count, **facts)
    return dataclasses.replace(found, nodes=(first, *found.nodes))


def _transpose(node: ir.Node) -> Match | Refusal | None:
    for i in (0, 1):
        turned = producer_of(node.inputs[i], "Transpose")
        perm = permutation(turned) if turned is not None else None
        if turned is None or perm is None or len(perm) < 2:
            continue
        n = len(perm)
        if perm != (*range(n - 2), n - 1, n - 2):
            continue
        if len(turned.outputs[0].uses()) > 1 or turned.outputs[0].is_graph_output():
            return Refusal(node.name or "", f"the transposed operand %{turned.outputs[0].name} is read elsewhere too")
        name = ("transA", "transB")[i]
        flag = {name: 1 - attribute(node, name, 0)}
        return _before(node, turned, "transpose", inputs={i: turned.inputs[0]}, attributes=flag)
    return None


def _scale(node: ir.Node) -> Match | Refusal | None:
    reader = _sole_reader(node.outputs[0])
    if reader is None or op_key(reader) not in ("Mul", "Div"):
        return None
    found = with_constant(reader)
    if found is None or (reader.op_type == "Div" and (found[2] == 0 or found[1] == 0)):
        return None
    if not _plain(node) or node.outputs[0].dtype != FLOAT32:
        return Refusal(node.name or "", "the factor stands behind a bias, an activation, a sum or a rounding")
    alpha = attribute(node, "alpha", 1.0) * (found[1] if reader.op_type == "Mul" else 1.0 / found[1])
    if alpha == 0.0 or not abs(alpha) <= _LARGEST:
        return Refusal(node.name or "", f"alpha would be {alpha}")
    return _made(node, reader, count="scale", attributes={"alpha": float(alpha)})


def _bias(node: ir.Node) -> Match | Refusal | None:
    reader = _sole_reader(node.outputs[0])
    if reader is None or op_key(reader) != "Add":
        return None
    y = node.outputs[0]
    other = reader.inputs[1 if reader.inputs[0] is y else 0]
    if other is None or other is y or rank(other) != 1 or (rank(y) or 0) < 2:
        return None
    if not _plain(node) or y.dtype != FLOAT32:
        return Refusal(node.name or "", "the bias stands behind another bias, an activation, a sum or a rounding")
    if other.shape is None or y.shape is None or other.shape[0] != y.shape[-1] or not isinstance(y.shape[-1], int):
        return Refusal(node.name or "", f"the bias %{other.name} is no vector of the result's last dimension")
    return _made(node, reader, count="bias", inputs={2: other})


def _activation(node: ir.Node) -> Match | Refusal | None:
    if attribute(node, "activation", "none") != "none" or given(node, 3) is not None or _second(node) is not None:
        return None
    y = node.outputs[0]
    for value, way in _views(y):
        for reader in (u.node for u in value.uses()):
            name = _ACTIVATIONS.get(op_key(reader))
            behind = [reader] if name is not None else []
            if behind and reader.outputs[0].dtype != y.dtype:  # in float32, between casts
                cast = _sole_reader(reader.outputs[0])
                behind = [reader, cast] if cast is not None and op_key(cast) == "Cast" else []
            if not behind or behind[-1].outputs[0].dtype != y.dtype:
                continue
            made = behind[-1].outputs[0]
            form = "gelu_tanh" if name == "gelu" and attribute(reader, "approximate", "none") == "tanh" else name
            view = _target(made) if any(n.op_type == "Reshape" for n in way) else None
            if view is None and made.shape != y.shape:
                return Refusal(node.name or "", f"the shape of %{made.name} cannot be written as a constant")
            alone = not y.is_graph_output() and _only_way(y, way, reader)
            return Match(
                (node, *way, *behind), (made,) if alone else (y, made),
                facts={"attributes": {"activation": form}, "two": not alone, "view": view}, count="activation", at=node,
            )  # fmt: skip
    return None


def _only_way(y: ir.Value, way: Sequence[ir.Node], reader: ir.Node) -> bool:
    """Whether nobody but the activation reads the value or a view of it."""
    values, readers = [y, *(n.outputs[0] for n in way)], (*way, reader)
    return all(
        not value.is_graph_output() and all(u.node is after for u in value.uses())
        for value, after in zip(values, readers, strict=True)
    )


def _addend(node: ir.Node) -> Match | Refusal | None:
    y, way = node.outputs[0], []
    reader = _sole_reader(y)
    while reader is not None and op_key(reader) == "Reshape" and reader.inputs[0] is y:
        way.append(reader)
        y = reader.outputs[0]
        reader = _sole_reader(y)
    if reader is None or op_key(reader) != "Add":
        return None
    other = reader.inputs[1 if reader.inputs[0] is y else 0]
    if other is None or other is y or reader.inputs[0] is reader.inputs[1] or rank(other) == 1:
        return None
    if given(node, 3) is not None:
        return Refusal(node.name or "", "the product has an addend already")
    if _second(node) is not None and other.producer() is not None:
        return Refusal(node.name or "", "readers of the value before the activation may come before the addend")
    if other.dtype != node.outputs[0].dtype or not same_shape(other, y):
        return Refusal(node.name or "", f"the addend %{other.name} has another shape or type")
    facts: dict[str, object] = {"inputs": {3: other}}
    if way:
        view, lay = _target(y), _target(node.outputs[0])
        if view is None or lay is None:
            return Refusal(node.name or "", f"the shape of %{y.name} cannot be written as a constant")
        facts |= {"view": view, "lay": lay}
    return _made(node, *way, reader, count="addend", **facts)


def _result_cast(node: ir.Node) -> Match | Refusal | None:
    reader = _sole_reader(node.outputs[0])
    if reader is None or op_key(reader) != "Cast" or node.outputs[0].dtype != FLOAT32:
        return None
    to = reader.outputs[0].dtype
    if to is None or to not in PRECISIONS.values() or to == FLOAT32:
        return None
    if _second(node) is not None or given(node, 3) is not None:
        return Refusal(node.name or "", "the addend or the value before the activation has the type of the result")
    return _made(node, reader, count="result-cast", attributes={"to": int(to)})


def _target(value: ir.Value) -> list[int] | None:
    """A constant Reshape target for the value's recorded shape."""
    return None if value.shape is None else reshape_dims(tuple(value.shape))


_STEPS: tuple[Step, ...] = (_operand_cast, _transpose, _scale, _bias, _activation, _addend, _result_cast)
