"""The form of every composite: inputs, outputs, attributes and element types, as a table that the verifier reads.

docs/operators.md is the page to read; a test compares both. Names are the page's: ``?`` marks what may be absent, ``*``
a repeated group.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from ortgraph.ops.precision import PRECISIONS
from ortgraph.ops.shapes import given

_SCALARS = frozenset({"Key", "Step", "LearningRate", "GradScale", "Skip", "Factor"})
_INT64 = frozenset({"Key", "Step"})
_INTEGERS = frozenset({"Target", "Indices", "Labels", "Lengths", "Counts"})
_BOOLEANS = frozenset({"Skip", "Kept"})
_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_WHOLE = (ir.DataType.INT64, ir.DataType.INT32)
_LAYOUTS = ("bhsd", "bshd")


@dataclasses.dataclass(frozen=True)
class Given:
    """What an attribute may be.

    Attributes:
        kind: Its type.
        required: It has no default.
        least, most: Bounds of a number, and of every element of a list.
        choices: The words or numbers it may be.
    """

    kind: ir.AttributeType
    required: bool = False
    least: float | None = None
    most: float | None = None
    choices: tuple[str | int, ...] = ()

    def why_not(self, attribute: ir.Attr) -> str | None:
        """What is wrong with an attribute; None when nothing is."""
        if attribute.is_ref():
            return None  # inside of a function the call gives it
        if attribute.type != self.kind:
            return f"is {attribute.type.name}, expected {self.kind.name}"
        value = attribute.value
        if self.choices and value not in self.choices:
            return f"is {value!r}, expected {' or '.join(map(str, self.choices))}"
        for number in value if self.kind == ir.AttributeType.INTS else [value]:
            if number != number:
                return "is not a number"
            low, high = self.least is not None and number < self.least, self.most is not None and number > self.most
            if low or high:
                bounds = f"at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
                return f"is {value}, expected {bounds}"
        return None


@dataclasses.dataclass(frozen=True)
class CompositeForm:
    """Form of one composite.

    Attributes:
        inputs, outputs: Names, with ``?`` and ``*``.
        attributes: By name; others are not looked at.
        ranks: Number of dimensions of inputs.
        least_ranks: Least number of dimensions of inputs.
        alike: Inputs of one shape.
        windowed: Inputs [N, C, ...] that windows go over: lists have a number for each further dimension, ``pads`` two.
        shared: How many first dimensions of these inputs are equal.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Given] = dataclasses.field(default_factory=dict)
    ranks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    least_ranks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alike: tuple[str, ...] = ()
    windowed: tuple[str, ...] = ()
    shared: int = 0

    def problems(self, node: ir.Node) -> Iterator[str]:
        """What is wrong with a node, types as far as they are recorded."""
        yield from self._arity("input", self.inputs, node.inputs)
        yield from self._arity("output", self.outputs, node.outputs)
        for i, name in enumerate(self.inputs):
            if not name.endswith("?") and given(node, i) is None:
                yield f"its input {i} ({name.rstrip('*')}) is missing"
        for name, allowed in self.attributes.items():
            found = node.attributes.get(name)
            if found is None:
                if allowed.required:
                    yield f"its attribute {name} is missing"
            elif (why := allowed.why_not(found)) is not None:
                yield f"its attribute {name} {why}"
        yield from self._types(node)

    @staticmethod
    def _arity(what: str, names: Sequence[str], values: Sequence[ir.Value | None]) -> Iterator[str]:
        if len(values) > len(names) and not names[-1].endswith("*"):
            yield f"it has {len(values)} {what}s, at most {len(names)} are known"
        if not values:
            yield f"it has no {what}"

    def _types(self, node: ir.Node) -> Iterator[str]:
        named = {n.rstrip("?*"): v for n, v in zip(self._repeated(len(node.inputs)), node.inputs, strict=False)}
        for name, value in named.items():
            if value is None:
                continue
            if value.dtype is not None and value.dtype not in (wanted := _types_of(name)):
                listed = " or ".join(t.name for t in wanted)
                yield f"{name} (%{value.name}) is {value.dtype.name}, expected {listed}"
            if value.shape is None:
                continue
            rank = 0 if name in _SCALARS else self.ranks.get(name)
            if rank is not None and len(value.shape) != rank:
                yield f"{name} (%{value.name}) has {len(value.shape)} dimensions, expected {rank}"
            if len(value.shape) < self.least_ranks.get(name, 0):
                yield f"{name} (%{value.name}) has {len(value.shape)} dimensions, expected {self.least_ranks[name]} or more"
        yield from self._targets(named)
        axis, x = node.attributes.get("axis"), named.get("X", named.get("Y"))
        rank = None if x is None or x.shape is None else len(x.shape)
        known = rank is not None and axis is not None and axis.type == ir.AttributeType.INT
        if known and not -rank <= axis.as_int() < rank:  # type: ignore[operator, union-attr]
            yield f"its attribute axis is {axis.as_int()} for {rank} dimensions"  # type: ignore[union-attr]
        yield from self._windows(node, [v for n in self.windowed if (v := named.get(n)) is not None])
        alike = [v for n in self.alike if (v := named.get(n)) is not None and v.shape is not None]
        for other in alike[1:]:
            if not _fit(alike[0].shape, other.shape):  # type: ignore[arg-type]
                yield f"%{alike[0].name} {list(alike[0].shape)} and %{other.name} {list(other.shape)} differ in shape"  # type: ignore[arg-type]

    def _windows(self, node: ir.Node, values: Sequence[ir.Value]) -> Iterator[str]:
        shapes = [v.shape for v in values if v.shape is not None]
        if len({len(s) for s in shapes}) > 1 or not all(
            _fit(shapes[0][: self.shared], s[: self.shared]) for s in shapes
        ):
            yield f"its inputs do not belong together: {', '.join(f'%{v.name} {v.shape}' for v in values)}"
            return
        for name, allowed in self.attributes.items():
            found = node.attributes.get(name)
            if not shapes or found is None or allowed.kind != ir.AttributeType.INTS or allowed.why_not(found):
                continue
            count = (len(shapes[0]) - 2) * (2 if name == "pads" else 1)
            if len(found.as_ints()) != count:
                yield f"its attribute {name} is {list(found.as_ints())}, expected {count} numbers"

    @staticmethod
    def _targets(named: Mapping[str, ir.Value | None]) -> Iterator[str]:
        scores, target = named.get("Logits", named.get("LogProb")), named.get("Target")
        if scores is None or target is None or scores.shape is None or target.shape is None or len(scores.shape) < 2:
            return
        if not _fit([scores.shape[0], *scores.shape[2:]], list(target.shape)):
            yield f"Target (%{target.name}) is {list(target.shape)} for scores {list(scores.shape)} of [N, C, ...]"

    def _repeated(self, count: int) -> tuple[str, ...]:
        last = self.inputs[-1]
        return (*self.inputs, *(f"{last}{i}" for i in range(len(self.inputs), count) if last.endswith("*")))


def _types_of(name: str) -> tuple[ir.DataType, ...]:
    if name in _INT64:
        return (ir.DataType.INT64,)
    if name in _INTEGERS:
        return _WHOLE
    return (ir.DataType.BOOL,) if name in _BOOLEANS else _FLOATS


def _fit(a: Sequence[int | ir.SymbolicDim], b: Sequence[int | ir.SymbolicDim]) -> bool:
    if len(a) != len(b):
        return False
    return all(x == y for x, y in zip(a, b, strict=True) if isinstance(x, int) and isinstance(y, int))


def _ints(least: int) -> Given:
    return Given(ir.AttributeType.INTS, least=least)


def _word(*choices: str) -> Given:
    return Given(ir.AttributeType.STRING, choices=choices)


_INT, _FLOAT = Given(ir.AttributeType.INT), Given(ir.AttributeType.FLOAT)
_FLAG = Given(ir.AttributeType.INT, least=0, most=1)
_NUMBER = Given(ir.AttributeType.INT, required=True)
_RATIO = Given(ir.AttributeType.FLOAT, least=0.0, most=1.0)
_SMALL = Given(ir.AttributeType.FLOAT, least=0.0)
_SIZE = Given(ir.AttributeType.INT, required=True, least=0)
_PRECISION = _word(*PRECISIONS)
_AXIS = {"axis": _INT}
_FLOAT_TYPE = Given(ir.AttributeType.INT, choices=tuple(int(t) for t in _FLOATS))
_LOSS = {"reduction": _word("none", "mean", "sum"), "ignore_index": _INT}
_WINDOW = {"strides": _ints(1), "pads": _ints(0), "dilations": _ints(1), "group": Given(ir.AttributeType.INT, least=1)}
_LAYOUT = _word(*_LAYOUTS, *(",".join(w) for w in itertools.product(_LAYOUTS, repeat=4)))
_ATTENTION = {
    "scale": _FLOAT, "is_causal": _FLAG, "layout": _LAYOUT, "precision": _PRECISION, "ratio": _RATIO, "node": _INT,
}  # fmt: skip
_ADAM = {"beta1": _RATIO, "beta2": _RATIO, "epsilon": _SMALL, "weight_decay": _FLOAT}
_CTC = {"LogProb": 3, "Labels": 2, "Lengths": 1, "Counts": 1}
_UPDATE = ("LearningRate", "Step", "W", "G")
_GUARD = ("GradScale?", "Skip?")


def _gradient(saved: str, **attributes: Given) -> CompositeForm:
    return CompositeForm(("dY", saved), ("dX",), attributes, alike=("dY", saved))


FORMS: dict[str, CompositeForm] = {
    "Product": CompositeForm(
        ("A", "B", "Bias?", "Addend?"), ("Y?", "Z?"),
        {
            "transA": _FLAG, "transB": _FLAG, "alpha": _FLOAT, "precision": _PRECISION, "to": _FLOAT_TYPE,
            "activation": _word("none", "gelu", "gelu_tanh", "relu", "silu", "tanh"),
        },
        ranks={"Bias": 1}, least_ranks={"A": 2, "B": 2},
    ),
    "Gelu": CompositeForm(("X",), ("Y",), {"approximate": _word("none", "tanh")}),
    "GeluGrad": _gradient("X", approximate=_word("none", "tanh")),
    "Silu": CompositeForm(("X",), ("Y",)),
    "SiluGrad": _gradient("X"),
    "ReluGrad": _gradient("Y"),
    "TanhGrad": _gradient("Y"),
    "SigmoidGrad": _gradient("Y"),
    "SoftmaxGrad": _gradient("Y", axis=_INT),
    "LogSoftmaxGrad": _gradient("Y", axis=_INT),
    "LayerNormGrad": CompositeForm(
        ("dY", "X", "Mean", "InvStdDev", "Scale?"), ("dX", "dScale?", "dBias?"), _AXIS, alike=("dY", "X")
    ),
    "BatchNorm": CompositeForm(
        ("X", "Scale", "Bias", "RunningMean", "RunningVar"),
        ("Y", "NewMean", "NewVar", "SavedMean", "SavedInvStd"),
        {"epsilon": _SMALL, "momentum": _FLOAT},
        ranks=dict.fromkeys(("Scale", "Bias", "RunningMean", "RunningVar"), 1), least_ranks={"X": 2},
    ),
    "BatchNormGrad": CompositeForm(
        ("dY", "X", "Scale", "SavedMean", "SavedInvStd"), ("dX", "dScale", "dBias"),
        ranks=dict.fromkeys(("Scale", "SavedMean", "SavedInvStd"), 1), least_ranks={"X": 2}, alike=("dY", "X"),
    ),
    "NllLoss": CompositeForm(
        ("LogProb", "Target", "Weight?"), ("Loss", "TotalWeight"), _LOSS,
        ranks={"Weight": 1}, least_ranks={"LogProb": 2, "Target": 1},
    ),
    "NllLossGrad": CompositeForm(
        ("dLoss", "LogProb", "Target", "Weight?", "TotalWeight"), ("dLogProb",), _LOSS,
        ranks={"Weight": 1}, least_ranks={"LogProb": 2, "Target": 1},
    ),
    "CrossEntropy": CompositeForm(
        ("Logits", "Target", "Weight?"), ("Loss", "LogProb", "TotalWeight"), _LOSS,
        ranks={"Weight": 1}, least_ranks={"Logits": 2, "Target": 1},
    ),
    "CrossEntropyGrad": CompositeForm(
        ("dLoss", "LogProb", "Target", "Weight?", "TotalWeight"), ("dLogits",), _LOSS,
        ranks={"Weight": 1}, least_ranks={"LogProb": 2, "Target": 1},
    ),
    "CrossEntropyAndGrad": CompositeForm(
        ("Factor", "Logits", "Target", "Weight?"), ("Loss", "dLogits"), {"ignore_index": _INT},
        ranks={"Weight": 1}, least_ranks={"Logits": 2, "Target": 1},
    ),
    "CtcLoss": CompositeForm(
        ("LogProb", "Labels", "Lengths", "Counts"), ("Loss", "Alpha?"), {"blank": _INT}, ranks=_CTC
    ),
    "CtcLossGrad": CompositeForm(
        ("dLoss", "LogProb", "Labels", "Lengths", "Counts", "Loss", "Alpha"), ("dLogProb",), {"blank": _INT},
        ranks={**_CTC, "dLoss": 1, "Loss": 1, "Alpha": 3}, alike=("dLoss", "Loss"),
    ),
    "EmbeddingGrad": CompositeForm(
        ("dY", "Indices"), ("dTable",), {"rows": _SIZE, "padding_idx": _INT}, least_ranks={"dY": 1}
    ),
    "ConvGrad": CompositeForm(
        ("dY", "X", "W"), ("dX?", "dW?", "dBias?"), _WINDOW, least_ranks={"dY": 3, "X": 3, "W": 3},
        windowed=("dY", "X", "W")
    ),
    "MaxPoolGrad": CompositeForm(
        ("dY", "Indices", "X"), ("dX",), least_ranks={"dY": 3, "X": 3}, alike=("dY", "Indices"),
        windowed=("dY", "X"), shared=2
    ),
    "AveragePoolGrad": CompositeForm(
        ("dY", "X"), ("dX",),
        {
            "kernel_shape": dataclasses.replace(_ints(1), required=True), "strides": _ints(1), "pads": _ints(0),
            "count_include_pad": _FLAG, "ceil_mode": _FLAG,
        },
        least_ranks={"dY": 3, "X": 3}, windowed=("dY", "X"), shared=2,
    ),
    "Attention": CompositeForm(
        ("Q", "K", "V", "Mask?", "Key?", "Step?"), ("Y?", "LogSumExp?"), _ATTENTION,
        ranks=dict.fromkeys("QKV", 4),
    ),
    "AttentionGrad": CompositeForm(
        ("dY", "Q", "K", "V", "Y", "LogSumExp", "Mask?", "Key?", "Step?"), ("dQ?", "dK?", "dV?"), _ATTENTION,
        ranks={**dict.fromkeys(("dY", "Q", "K", "V", "Y"), 4), "LogSumExp": 3}, alike=("dY", "Y"),
    ),
    "Dropout": CompositeForm(("X", "Key", "Step"), ("Y", "Mask"), {"ratio": _RATIO, "node": _NUMBER}),
    "DropoutGrad": CompositeForm(("dY", "Kept"), ("dX",), {"ratio": _RATIO, "draw": _INT}, alike=("dY", "Kept")),
    "RandomUniform": CompositeForm(("Key", "Step"), ("U",), {"node": _NUMBER, "shape": _ints(0)}),
    "AdamW": CompositeForm(
        (*_UPDATE, "M", "V", *_GUARD), ("W'", "M'", "V'"), _ADAM, alike=("W", "G", "M", "V")
    ),
    "LAMB": CompositeForm(
        (*_UPDATE, "M", "V", *_GUARD), ("W'", "M'", "V'"),
        {**_ADAM, "bias_correction": _FLAG, "min_trust": _SMALL, "max_trust": _SMALL, "adapt": _FLAG},
        alike=("W", "G", "M", "V"),
    ),
    "SGD": CompositeForm(
        (*_UPDATE, "Buffer?", *_GUARD), ("W'", "Buffer'?"),
        {"momentum": _FLOAT, "dampening": _FLOAT, "weight_decay": _FLOAT, "nesterov": _FLAG},
        alike=("W", "G", "Buffer"),
    ),
    "SquaredNorm": CompositeForm(("G*",), ("Sum",)),
}  # fmt: skip
