"""LSTM, GRU and RNN written out step by step: the runtime's gradients of them lose terms or are missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ortgraph.capture.legalize_layout import optional, refuse
from ortgraph.graph import is_used
from ortgraph.ops.builder import Builder

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
_PLAIN = frozenset({"Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"})
_TAKES = {"LSTM": 8, "GRU": 6, "RNN": 6}

Activation = Callable[[ir.Value], ir.Value]


@dataclasses.dataclass(frozen=True)
class _Cell:
    """The weights of one direction; a state is None where it is zero.

    Attributes:
        products: X W^T with the biases that are simply added, per step, [batch, gates * hidden].
        recurrent: R^T, [hidden, gates * hidden].
        inner_bias: The recurrent bias of GRU's hidden gate where the reset gate scales it, else None.
        peepholes: LSTM's P for the input, output and forget gate.
        activations: Functions of the gates, in the operator's order.
        valid: Per step which rows of the batch are still running, [batch, 1]; None when all are.
    """

    products: list[ir.Value]
    recurrent: ir.Value
    inner_bias: ir.Value | None
    peepholes: Sequence[ir.Value] | None
    activations: list[Activation]
    valid: list[ir.Value] | None


State = tuple["ir.Value | None", "ir.Value | None"]  # hidden and cell


def unroll(b: Builder, node: ir.Node) -> list[ir.Value]:
    """Every step of every direction. Outputs Y [steps, directions, batch, hidden], Y_h and for LSTM Y_c.

    Raises:
        UnsupportedError: The number of steps or the sizes of the weights are not known, or a form that is not
            written out (``clip``, ``input_forget``, an activation outside the usual ones).
    """
    x, batch_first = node.inputs[0], bool(node.attributes.get_int("layout", 0))
    assert x is not None
    _check(node)
    if batch_first:
        x = b.op("Transpose", x, perm=[1, 0, 2])
    steps, recurrent = x.shape[0] if x.shape is not None else None, node.inputs[2]
    if not isinstance(steps, int) or steps == 0:
        raise refuse(node, "the number of steps is not known: fix it with shapes={...}")
    assert recurrent is not None and recurrent.shape is not None
    count, hidden = recurrent.shape[0], recurrent.shape[2]
    if not isinstance(count, int) or not isinstance(hidden, int):
        raise refuse(node, "the sizes of its weights are not known")
    directions = ("forward", "reverse") if count == 2 else (node.attributes.get_string("direction", "forward"),)
    starts = [_split(b, _by_direction(b, optional(node, i), batch_first), count, 0) for i in (5, 6)]
    weights = [_split(b, optional(node, i), count, 0) for i in (1, 2, 3, 7)]
    valid = _valid(b, node, steps)
    rows, hiddens, cells = [], [], []
    for d, direction in enumerate(directions):
        cell = _cell(b, node, x, [None if parts is None else parts[d] for parts in weights], d, hidden, valid)
        start = tuple(None if part is None else b.op("Squeeze", part[d], b.ints([0])) for part in starts)
        made, (last_hidden, last_cell) = _run(b, node, cell, (start[0], start[1]), direction == "reverse")
        rows.append(made)
        hiddens.append(last_hidden)
        cells.append(last_cell)
    results = []
    if is_used(node.outputs[0]):
        together = [_stacked(b, made, 0) for made in rows]
        whole = _stacked(b, together, 1)
        results.append(b.op("Transpose", whole, perm=[2, 0, 1, 3]) if batch_first else whole)
    else:
        results.append(node.outputs[0])
    for i, last in enumerate((hiddens, cells)[: len(node.outputs) - 1]):
        used = is_used(node.outputs[i + 1])
        results.append(_stacked(b, last, 1 if batch_first else 0) if used else node.outputs[i + 1])
    return results


def _check(node: ir.Node) -> None:
    for name in ("clip", "input_forget"):
        if name in node.attributes and node.attributes[name].value:
            raise refuse(node, f"the attribute {name} has no gradient")
    for i in range(_TAKES[node.op_type], len(node.inputs)):
        if node.inputs[i] is not None:
            raise refuse(node, f"input {i} is not known")


def _by_direction(b: Builder, state: ir.Value | None, batch_first: bool) -> ir.Value | None:
    return b.op("Transpose", state, perm=[1, 0, 2]) if state is not None and batch_first else state


def _split(b: Builder, value: ir.Value | None, count: int, axis: int) -> Sequence[ir.Value] | None:
    """``count`` equal parts along the axis; None for None."""
    if value is None or count == 1:
        return None if value is None else [value]
    assert value.shape is not None
    length = value.shape[axis]
    assert isinstance(length, int)
    return b.multi("Split", value, b.ints([length // count] * count), outputs=count, axis=axis)


def _stacked(b: Builder, values: Sequence[ir.Value | None], axis: int) -> ir.Value:
    where = b.ints([axis])
    parts = [b.op("Unsqueeze", v, where) for v in values]
    return parts[0] if len(parts) == 1 else b.op("Concat", *parts, axis=axis)


def _valid(b: Builder, node: ir.Node, steps: int) -> list[ir.Value] | None:
    """Per step which rows are shorter than their length, when lengths are given."""
    lengths = optional(node, 4)
    if lengths is None:
        return None
    column = b.op("Unsqueeze", b.op("Cast", lengths, to=ir.DataType.INT64), b.ints([1]))
    return [b.op("Greater", column, b.const(step, np.int64)) for step in range(steps)]


def _cell(
    b: Builder,
    node: ir.Node,
    x: ir.Value,
    weights: Sequence[ir.Value | None],
    d: int,
    hidden: int,
    valid: list[ir.Value] | None,
) -> _Cell:
    """The weights of direction ``d``, and its products with X of all steps at once."""
    kind, zero = node.op_type, b.ints([0])
    weight, recurrent, bias, peephole = (None if v is None else b.op("Squeeze", v, zero) for v in weights)
    gates = _GATES[kind]
    product = b.op("MatMul", x, b.op("Transpose", weight, perm=[1, 0]))
    inner = None
    if bias is not None:
        of_input, of_state = b.multi("Split", bias, b.ints([gates * hidden] * 2), outputs=2, axis=0)
        product = b.op("Add", product, of_input)
        if kind == "GRU" and node.attributes.get_int("linear_before_reset", 0) == 1:
            added, inner = b.multi("Split", of_state, b.ints([2 * hidden, hidden]), outputs=2, axis=0)
            of_state = b.op("Pad", added, b.ints([0, hidden]))
        product = b.op("Add", product, of_state)
    assert x.shape is not None and isinstance(x.shape[0], int)
    steps = x.shape[0]
    parts = [product] if steps == 1 else b.multi("Split", product, b.ints([1] * steps), outputs=steps, axis=0)
    names = node.attributes.get_strings("activations", None) or _DEFAULTS[kind] * (d + 1)
    alphas = list(node.attributes.get_floats("activation_alpha", []))
    betas = list(node.attributes.get_floats("activation_beta", []))
    per = len(_DEFAULTS[kind])
    functions = [_activation(b, node, name, alphas, betas) for name in names]
    return _Cell(
        products=[b.op("Squeeze", part, zero) for part in parts],
        recurrent=b.op("Transpose", recurrent, perm=[1, 0]),
        inner_bias=inner,
        peepholes=_split(b, peephole, 3, 0),
        activations=functions[d * per : (d + 1) * per],
        valid=valid,
    )


def _activation(b: Builder, node: ir.Node, name: str, alphas: list[float], betas: list[float]) -> Activation:
    """The function of that name; alphas and betas are consumed in the order of the functions that take them."""
    name = name.capitalize()
    if name in _PLAIN:
        return lambda x: b.op(name, x)
    if name in ("Elu", "Leakyrelu"):
        alpha = alphas.pop(0) if alphas else {"Elu": 1.0, "Leakyrelu": 0.01}[name]
        op_type = {"Elu": "Elu", "Leakyrelu": "LeakyRelu"}[name]
        return lambda x: b.op(op_type, x, alpha=alpha)
    if name == "Hardsigmoid":
        slope, middle = alphas.pop(0) if alphas else 0.2, betas.pop(0) if betas else 0.5
        return lambda x: b.op("HardSigmoid", x, alpha=slope, beta=middle)
    raise refuse(node, f"its activation {name}")


def _run(
    b: Builder, node: ir.Node, cell: _Cell, start: State, reverse: bool
) -> tuple[list[ir.Value | None], tuple[ir.Value, ir.Value | None]]:
    """Hidden states by step, zero where a row has ended, and the last states."""
    steps = len(cell.products)
    state = start
    rows: list[ir.Value | None] = [None] * steps
    advance = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}[node.op_type]
    for step in reversed(range(steps)) if reverse else range(steps):
        following = advance(b, node, cell, cell.products[step], state)
        rows[step] = following[0]
        if cell.valid is not None:
            valid = cell.valid[step]
            rows[step] = _kept(b, valid, following[0], None)
            following = _kept(b, valid, following[0], state[0]), _kept(b, valid, following[1], state[1])
        state = following
    assert state[0] is not None
    return rows, (state[0], state[1])


def _kept(b: Builder, valid: ir.Value, new: ir.Value | None, old: ir.Value | None) -> ir.Value | None:
    """The new state where the row is running, else the old one."""
    if new is None:
        return None
    return b.op("Where", valid, new, old if old is not None else b.scalar(0.0, new))


def _plus(b: Builder, x: ir.Value, left: ir.Value | None, right: ir.Value) -> ir.Value:
    """X + left @ right, where left is zero when None."""
    return x if left is None else b.op("Add", x, b.op("MatMul", left, right))


def _rnn(b: Builder, node: ir.Node, cell: _Cell, x: ir.Value, state: State) -> State:
    """H' = f(X W^T + H R^T + b)"""
    return cell.activations[0](_plus(b, x, state[0], cell.recurrent)), None


def _lstm(b: Builder, node: ir.Node, cell: _Cell, x: ir.Value, state: State) -> State:
    """C' = f C + i c, H' = o h(C'), gates in the order i, o, f, c."""
    hidden, old = state
    gate, candidate, squash = cell.activations
    parts = _split(b, _plus(b, x, hidden, cell.recurrent), 4, 1)
    assert parts is not None
    i, o, f, c = parts
    p_i, p_o, p_f = cell.peepholes or (None, None, None)

    def peep(value: ir.Value, weight: ir.Value | None, seen: ir.Value | None) -> ir.Value:
        return value if weight is None or seen is None else b.op("Add", value, b.op("Mul", weight, seen))

    new = b.op("Mul", gate(peep(i, p_i, old)), candidate(c))
    if old is not None:
        new = b.op("Add", b.op("Mul", gate(peep(f, p_f, old)), old), new)
    return b.op("Mul", gate(peep(o, p_o, new)), squash(new)), new


def _gru(b: Builder, node: ir.Node, cell: _Cell, x: ir.Value, state: State) -> State:
    """H' = (1 - z) h + z H, gates in the order z, r, h."""
    old, (gate, candidate) = state[0], cell.activations
    parts = _split(b, x, 3, 1)
    recurrent = _split(b, cell.recurrent, 3, 1)
    assert parts is not None and recurrent is not None
    z = gate(_plus(b, parts[0], old, recurrent[0]))
    r = gate(_plus(b, parts[1], old, recurrent[1]))
    inner = parts[2]
    if node.attributes.get_int("linear_before_reset", 0):
        scaled = None if old is None else b.op("MatMul", old, recurrent[2])
        if cell.inner_bias is not None:
            scaled = cell.inner_bias if scaled is None else b.op("Add", scaled, cell.inner_bias)
        inner = inner if scaled is None else b.op("Add", inner, b.op("Mul", r, scaled))
    elif old is not None:
        inner = b.op("Add", inner, b.op("MatMul", b.op("Mul", r, old), recurrent[2]))
    new = candidate(inner)
    kept = b.op("Mul", b.op("Sub", b.scalar(1.0, new), z), new)
    return (kept if old is None else b.op("Add", kept, b.op("Mul", z, old))), None
