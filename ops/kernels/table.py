"""The kernels of the library: what each one takes, gives, may overwrite and allocates."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from ortgraph.graph.edit import static_shape
from ortgraph.ops.kernels import attention_scratch, product_scratch
from ortgraph.ops.kernels.windows import (
    conv_grad_scratch,
    conv_grad_thread_scratch,
    conv_scratch,
    conv_thread_scratch,
)
from ortgraph.ops.shapes import attribute
from ortgraph.ops.spec import COMPOSITE

_MAX_PARTS = 32  # kernel.h: pieces that work is cut into, whatever the number of threads
_GRAIN = 8192  # kernel.h: elements of a piece at least
MULTI = 256  # tensors of one MultiAdamW, MultiLAMB or MultiSGD: for so many, in-place pairs are listed

_LETTERS = {ir.DataType.FLOAT: "f", ir.DataType.BFLOAT16: "b", ir.DataType.FLOAT16: "h"}

Scratch = Callable[[ir.Node], int]


@dataclasses.dataclass(frozen=True)
class KernelEntry:
    """One operator of domain ``ortgraph.kernels``.

    All tensors are float32 but those in ``integers``, ``booleans`` and, where a node says so, ``low``.

    Attributes:
        name: Operator name.
        inputs: Input names; ``?`` marks an optional one, ``*`` a repeated group.
        outputs: Output names, likewise.
        attributes: Attribute names that the kernel's node carries.
        inplace: (input, output) pairs: the output may lie over the input when the shapes are equal.
        implements: (domain, operator) that it replaces one to one; None for a fused extra.
        integers: Inputs that are int64.
        booleans: Inputs and outputs that are bool.
        low: Groups of inputs and outputs that may be bfloat16 too. The names of a group share one type; the order is
            that of the groups in C++ (``low(0)``, ``low(1)``, ...). See ``variant_name``.
        half: Whether float16 is one of these types.
        scratch: Bytes that a run allocates, from a node with static shapes.
        thread_scratch: Bytes that each thread needs beside, likewise.
        doc: One line: the equation.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...] = ()
    inplace: tuple[tuple[int, int], ...] = ()
    implements: tuple[str, str] | None = None
    integers: frozenset[str] = frozenset()
    booleans: frozenset[str] = frozenset()
    low: tuple[tuple[str, ...], ...] = ()
    half: bool = False
    scratch: Scratch = lambda node: 0
    thread_scratch: Scratch = lambda node: 0
    doc: str = ""

    @property
    def types(self) -> tuple[ir.DataType, ...]:
        """What the members of ``low`` may be."""
        return tuple(t for t in _LETTERS if t != ir.DataType.FLOAT16 or self.half)

    @property
    def named_groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of ``low`` that have an output: their types are in the operator's name."""
        return tuple(group for group in self.low if any(name in self.outputs for name in group))

    def input_names(self, count: int) -> tuple[str, ...]:
        """Names of ``count`` inputs: the last one again and again where it is a repeated group."""
        repeated = self.inputs[-1:] if self.inputs[-1].endswith("*") else ()
        return (*self.inputs, *repeated * (count - len(self.inputs)))[:count]

    def variants(self) -> tuple[str, ...]:
        """Every operator name of this kernel, the float32 one first."""
        letters = [_LETTERS[t] for t in self.types]
        return tuple(
            _suffixed(self.name, chosen) for chosen in itertools.product(letters, repeat=len(self.named_groups))
        )


def _suffixed(name: str, letters: Sequence[str]) -> str:
    return name if all(letter == "f" for letter in letters) else f"{name}_{''.join(letters)}"


def base_name(op_type: str) -> str:
    """``LayerNorm`` for ``LayerNorm`` and ``LayerNorm_b``: the name in the table."""
    return op_type.partition("_")[0]


def output_types(op_type: str) -> Mapping[str, ir.DataType]:
    """Types of the outputs that may be in low precision, by output name, of a kernel's variant."""
    entry = KERNELS[base_name(op_type)]
    letters = op_type.partition("_")[2] or "f" * len(entry.named_groups)
    by_letter = {letter: dtype for dtype, letter in _LETTERS.items()}
    return {
        name: by_letter[letter]
        for group, letter in zip(entry.named_groups, letters, strict=True)
        for name in group
        if name in entry.outputs
    }


def variant_name(name: str, outputs: Sequence[ir.DataType | None]) -> str:
    """The operator of domain ``ortgraph.kernels`` for given output types.

    ONNX Runtime tells custom operators of one name apart by the types of their inputs only. So the name ends in one
    letter (f: float32, b: bfloat16, h: float16) for each group of outputs, unless all of these are float32.

    Args:
        name: Name in the table.
        outputs: Types of the node's outputs; None for an absent one.
    """
    entry = KERNELS[name]
    given = dict(zip(entry.outputs, outputs, strict=False))
    letters = []
    for group in entry.named_groups:
        found = [given[n] for n in group if given.get(n) is not None]
        letters.append(_LETTERS[found[0]] if found else "f")  # type: ignore[index]
    return _suffixed(name, letters)


def _size(node: ir.Node, index: int) -> tuple[int, ...]:
    value = node.inputs[index]
    return (static_shape(value) if value is not None else None) or ()


def row_parts(rows: int, width: int) -> int:
    """Number of pieces that ``rows`` rows are cut into."""
    piece = max(-(-rows // _MAX_PARTS), _GRAIN // max(width, 1), 1)
    return -(-rows // piece)


def _sums(index: int, count: int) -> Scratch:
    """``count`` rows of partial column sums for each piece of input ``index`` (rows over its last dimension)."""

    def scratch(node: ir.Node) -> int:
        *lead, width = _size(node, index) or (0,)
        return 4 * count * width * row_parts(math.prod(lead), width)

    return scratch


def _norm_sums(node: ir.Node) -> int:
    shape = _size(node, 1)
    axis = attribute(node, "axis", -1) % max(len(shape), 1)
    rows, width = math.prod(shape[:axis]), math.prod(shape[axis:])
    return 8 * width * row_parts(rows, width)


def _bias_sums(node: ir.Node) -> int:
    return 0 if (_size(node, 0) or (0,))[-1] >= 2048 else _sums(0, 1)(node)


def _lookups(node: ir.Node) -> int:
    return 4 * (attribute(node, "rows", 0) + math.prod(_size(node, 1)))


def _table_lookups(node: ir.Node) -> int:
    rows, width = _size(node, 2) or (0, 0)
    return 4 * (rows + math.prod(_size(node, 4)) + width * row_parts(rows, width))


def _sum_lookups(node: ir.Node) -> int:
    rows, width = _size(node, 2) or (0, 0)
    return 4 * (rows + math.prod(_size(node, 1)) + width * row_parts(rows, width))


def _per_row(index: int) -> Scratch:
    return lambda node: 4 * (_size(node, index) or (0,))[0]


def _slices(node: ir.Node) -> int:
    return 8 * sum(-(-math.prod(_size(node, i)) // 32768) for i in range(len(node.inputs)))


def _lamb_sums(node: ir.Node) -> int:
    """Two doubles for each slice and a float for each tensor, in scratch that is rounded up to 64 bytes."""
    single = len(node.outputs) == 3 and not node.op_type.startswith("Multi")
    weights = [2] if single else range(4, len(node.inputs), 4)
    slices = sum(-(-math.prod(_size(node, i)) // 32768) for i in weights)
    return -(-16 * slices // 64) * 64 + -(-4 * len(weights) // 64) * 64


_ADAM = ("beta1", "beta2", "epsilon", "weight_decay")
_LAMB = (*_ADAM, "bias_correction", "min_trust", "max_trust", "adapt")
_SGD = ("momentum", "dampening", "weight_decay", "nesterov")
_UPDATE = ("LearningRate", "Step", "W", "G")
_SKIP = frozenset({"Skip?"})
_LOSS = ("reduction", "ignore_index")
_STEP = frozenset({"Step"})
_DRAW = frozenset({"Key", "Step"})
_MAY_DRAW = frozenset({"Key?", "Step?"})
_ATTENTION = ("scale", "is_causal", "layout", "precision", "ratio", "node")
_MASK = frozenset({"Mask", "Mask?"})
_TARGET = frozenset({"Target"})
_BOTH = ((0, 0), (1, 0))


def _composite(name: str, *args: Any, **kwargs: Any) -> KernelEntry:
    return dataclasses.replace(KernelEntry(name, *args, **kwargs), implements=(COMPOSITE, name))


def _multi(name: str, attributes: tuple[str, ...], states: int, scratch: Scratch = lambda node: 0) -> KernelEntry:
    """The update of many tensors in one call. SGD without momentum has no state, and no pair of one."""
    pairs = ((0, 0), *((2 + i, 1 + i) for i in range(states)))
    return KernelEntry(
        f"Multi{name}", ("LearningRate", "Step", "GradScale?", "Skip?", "W,G,states*"), ("W',states'*",), attributes,
        tuple((4 + (2 + states) * t + i, (1 + states) * t + o) for t in range(MULTI) for i, o in pairs),
        integers=_STEP, booleans=_SKIP, scratch=scratch,
        doc=f"{name} for several tensors: inputs W, G and states, outputs W' and states' of each in turn",
    )  # fmt: skip


def _gradient(name: str, saved: str, doc: str) -> KernelEntry:
    return _composite(name, ("dY", saved), ("dX",), inplace=_BOTH, doc=doc)


_POOL = ("kernel_shape", "strides", "pads", "count_include_pad")
_WINDOW = ("strides", "pads", "dilations", "group", "kernel_shape", "auto_pad", "precision")

_ENTRIES = (
    _composite(
        "BatchNorm", ("X", "Scale", "Bias", "RunningMean", "RunningVar"),
        ("Y?", "NewMean?", "NewVar?", "SavedMean?", "SavedInvStd?"), ("epsilon", "momentum"), ((0, 0), (3, 1), (4, 2)),
        low=(("X",), ("Y?",)), doc="the composite: three passes over a channel that stays in the cache",
    ),
    _composite(
        "BatchNormGrad", ("dY", "X", "Scale", "SavedMean", "SavedInvStd"), ("dX?", "dScale?", "dBias?"), (),
        (*_BOTH, (2, 1)), low=(("dY",), ("X",), ("dX?",)), doc="the composite in two passes",
    ),
    KernelEntry(
        "MaxPool", ("X",), ("Y?", "Indices?"), ("kernel_shape", "strides", "pads"), implements=("", "MaxPool"),
        doc="the largest value of each window and its place, flat; NaN where a window has one",
    ),
    _composite(
        "MaxPoolGrad", ("dY", "Indices", "X"), ("dX",), integers=frozenset({"Indices"}),
        doc="dX[Indices[i]] += dY[i], where indices stay in their plane",
    ),
    _composite("AveragePoolGrad", ("dY", "X"), ("dX",), _POOL, doc="the composite over one or two spatial dimensions"),
    KernelEntry(
        "Conv", ("X", "W", "B?"), ("Y",), _WINDOW, implements=("", "Conv"), low=(("X",), ("W",), ("Y",)),
        scratch=conv_scratch, thread_scratch=conv_thread_scratch,
        doc="Y = X * W + B over one or two spatial dimensions",
    ),
    _composite(
        "ConvGrad", ("dY", "X", "W"), ("dX?", "dW?", "dBias?"), _WINDOW, low=(("dY",), ("X",), ("W",), ("dX?",)),
        scratch=conv_grad_scratch, thread_scratch=conv_grad_thread_scratch,
        doc="the composite over one or two spatial dimensions",
    ),
    _composite(
        "AdamW", (*_UPDATE, "M", "V", "GradScale?", "Skip?"), ("W'", "M'", "V'"), _ADAM, ((2, 0), (4, 1), (5, 2)),
        integers=_STEP, booleans=_SKIP, doc="the composite in one pass",
    ),
    _composite(
        "LAMB", (*_UPDATE, "M", "V", "GradScale?", "Skip?"), ("W'", "M'", "V'"), _LAMB, ((2, 0), (4, 1), (5, 2)),
        integers=_STEP, booleans=_SKIP, scratch=_lamb_sums, doc="the composite in two passes",
    ),
    _composite(
        "SGD", (*_UPDATE, "Buffer?", "GradScale?", "Skip?"), ("W'", "Buffer'?"), _SGD, ((2, 0), (4, 1)),
        integers=_STEP, booleans=_SKIP, doc="the composite in one pass",
    ),
    _multi("AdamW", _ADAM, 2),
    _multi("LAMB", _LAMB, 2, _lamb_sums),
    _multi("SGD", _SGD, 1),
    _composite(
        "Product", ("A", "B", "Bias?", "Addend?"), ("Y?", "Z?"),
        ("transA", "transB", "alpha", "precision", "activation"), ((3, 0),), low=(("A",), ("B",), ("Addend?", "Y?", "Z?")),
        half=True, scratch=product_scratch.bias_bytes, thread_scratch=product_scratch.thread_bytes,
        doc="the composite: operands are rounded while they are packed, the rest is done on finished sums",
    ),
    KernelEntry(
        "EmbeddingAdamW", ("LearningRate", "Step", "W", "dY", "Indices", "M", "V", "GradScale?"), ("W'", "M'", "V'"),
        (*_ADAM, "padding_idx"), ((2, 0), (5, 1), (6, 2)), integers=frozenset({"Step", "Indices"}),
        scratch=_table_lookups, doc="AdamW(W, EmbeddingGrad(dY, Indices), M, V) without the gradient table",
    ),
    _composite(
        "EmbeddingGrad", ("dY", "Indices"), ("dTable",), ("rows", "padding_idx"), integers=frozenset({"Indices"}),
        scratch=_lookups, doc="dTable[r] = sum of dY[i] where Indices[i] = r, in order of i",
    ),
    KernelEntry(
        "EmbeddingGradAdd", ("dY", "Indices", "Addend"), ("Sum",), ("padding_idx",), ((2, 0),),
        integers=frozenset({"Indices"}), scratch=_sum_lookups, doc="Sum = Addend + EmbeddingGrad(dY, Indices)",
    ),
    _composite(
        "Attention", ("Q", "K", "V", "Mask?", "Key?", "Step?"), ("Y?", "LogSumExp?"), _ATTENTION,
        integers=_MAY_DRAW, low=(("Q", "K", "V", "Y?"), ("Mask?",)), thread_scratch=attention_scratch.forward,
        doc="the composite in blocks of keys; probabilities are never in memory",
    ),
    _composite(
        "AttentionGrad", ("dY", "Q", "K", "V", "Y", "LogSumExp", "Mask?", "Key?", "Step?"), ("dQ?", "dK?", "dV?"),
        _ATTENTION, ((1, 0), (2, 1), (3, 2)), integers=_MAY_DRAW,
        low=(("dY", "Q", "K", "V", "Y", "dQ?", "dK?", "dV?"), ("Mask?",)), thread_scratch=attention_scratch.backward,
        doc="the composite; probabilities are made again from scores and LogSumExp",
    ),
    _composite("Gelu", ("X",), ("Y",), ("approximate",), ((0, 0),), doc="Y = X Phi(X)"),
    _composite("GeluGrad", ("dY", "X"), ("dX",), ("approximate",), _BOTH, doc="dX = dY (Phi(X) + X phi(X))"),
    KernelEntry(
        "BiasGelu", ("X", "Bias"), ("Y",), ("approximate",), ((0, 0),), doc="Y = Gelu(X + Bias), Bias [last dimension]"
    ),
    KernelEntry(
        "BiasGeluGrad", ("dY", "X", "Bias?"), ("dX", "dBias?"), ("approximate",), _BOTH, scratch=_sums(1, 1),
        doc="dX = GeluGrad(dY, X + Bias), dBias = sum of dX over rows; X is the value before the bias",
    ),
    _composite("Silu", ("X",), ("Y",), inplace=((0, 0),), doc="Y = X sigmoid(X)"),
    KernelEntry("Sigmoid", ("X",), ("Y",), (), ((0, 0),), ("", "Sigmoid"), doc="Y = 1 / (1 + exp(-X))"),
    KernelEntry("Log", ("X",), ("Y",), (), ((0, 0),), ("", "Log"), doc="Y = log(X)"),
    KernelEntry("Sqrt", ("X",), ("Y",), (), ((0, 0),), ("", "Sqrt"), doc="Y = sqrt(X)"),
    KernelEntry("Erf", ("X",), ("Y",), (), ((0, 0),), ("", "Erf"), doc="Y = erf(X)"),
    KernelEntry(
        "Elu", ("X",), ("Y",), ("alpha",), ((0, 0),), ("", "Elu"), doc="Y = X where X > 0, else alpha (exp(X) - 1)"
    ),
    _gradient("SiluGrad", "X", "dX = dY s (1 + X (1 - s)), s = sigmoid(X)"),
    _gradient("ReluGrad", "Y", "dX = dY where Y > 0, else 0"),
    _gradient("TanhGrad", "Y", "dX = dY (1 - Y^2)"),
    _gradient("SigmoidGrad", "Y", "dX = dY Y (1 - Y)"),
    KernelEntry(
        "LayerNorm", ("X", "Scale", "Bias?"), ("Y", "Mean?", "InvStdDev?"), ("axis", "epsilon"), ((0, 0),),
        ("", "LayerNormalization"), doc="Y = Scale (X - mean) / sqrt(var + epsilon) + Bias",
    ),
    KernelEntry(
        "AddLayerNorm", ("A", "B", "Scale", "Bias?", "Addend?"), ("Sum", "Y", "Mean?", "InvStdDev?"),
        ("axis", "epsilon"), ((0, 0), (1, 0), (0, 1), (1, 1)),
        doc="Sum = A + Addend + B, Y = LayerNorm(Sum); Addend is the bias of the product that made A",
    ),
    _composite(
        "LayerNormGrad", ("dY", "X", "Mean", "InvStdDev", "Scale?"), ("dX?", "dScale?", "dBias?"), ("axis",), _BOTH,
        scratch=_norm_sums, doc="dX = InvStd (g - mean(g) - x_hat mean(g x_hat)), g = dY Scale",
    ),
    KernelEntry(
        "LayerNormGradAdd", ("dY", "X", "Mean", "InvStdDev", "Scale?", "Residual"), ("dX?", "dScale?", "dBias?"),
        ("axis",), (*_BOTH, (5, 0)), scratch=_norm_sums, doc="LayerNormGrad with Residual added to dX",
    ),
    KernelEntry(
        "AddLayerNormGrad", ("dY", "X", "Mean", "InvStdDev", "Scale?", "dY2"), ("dX?", "dScale?", "dBias?"),
        ("axis",), (*_BOTH, (5, 0)), scratch=_norm_sums, doc="LayerNormGrad of dY + dY2",
    ),
    KernelEntry("Softmax", ("X",), ("Y",), ("axis",), ((0, 0),), ("", "Softmax"), doc="softmax over the last axis"),
    KernelEntry(
        "ScaledMaskedSoftmax", ("X", "Mask?"), ("Y",), ("scale", "zero_empty_rows"), ((0, 0),),
        doc="softmax(scale X + Mask) over the last axis; Mask broadcasts to X; zero_empty_rows: rows of -inf give 0",
    ),
    _composite("SoftmaxGrad", ("dY", "Y"), ("dX",), ("axis",), _BOTH, doc="dX = Y (dY - sum(Y dY)), last axis"),
    KernelEntry(
        "ScaledSoftmaxGrad", ("dY", "Y"), ("dX",), ("scale",), _BOTH, doc="dX = scale Y (dY - sum(Y dY)), last axis"
    ),
    _composite("LogSoftmaxGrad", ("dY", "Y"), ("dX",), ("axis",), _BOTH, doc="dX = dY - exp(Y) sum(dY), last axis"),
    _composite(
        "CrossEntropy", ("Logits", "Target", "Weight?"), ("Loss?", "LogProb?", "TotalWeight?"), _LOSS, ((0, 1),),
        integers=_TARGET, scratch=_per_row(0), doc="the composite for Logits [N, C]",
    ),
    _composite(
        "CrossEntropyGrad", ("dLoss", "LogProb", "Target", "Weight?", "TotalWeight?"), ("dLogits",), _LOSS, ((1, 0),),
        integers=_TARGET, low=(("dLogits",),),
        doc="dLogits = dLoss w[t] / TotalWeight (exp(LogProb) - onehot(t)) for [N, C]",
    ),
    _composite(
        "CrossEntropyAndGrad", ("Factor", "Logits", "Target", "Weight?"), ("Loss?", "dLogits"), ("ignore_index",),
        ((1, 1),), integers=_TARGET, scratch=_per_row(1), doc="the composite for Logits [N, C], each row read once",
    ),
    KernelEntry(
        "LogSumExp", ("X",), ("Y",), low=(("X",),), doc="log(sum(exp(X))) over the last dimension, which becomes 1",
    ),
    KernelEntry(
        "CrossEntropyStatisticsGrad", ("dLoss", "Logits", "Target", "Weight?", "TotalWeight?", "LogSumExp"),
        ("dLogits",), _LOSS, ((1, 0),), integers=_TARGET, low=(("Logits",), ("dLogits",)),
        doc="CrossEntropyGrad from Logits and LogSumExp",
    ),
    _composite(
        "Dropout", ("X", "Key", "Step"), ("Y?", "Mask?"), ("ratio", "node"), ((0, 0),), integers=_DRAW, booleans=_MASK,
        doc="Mask = U(Key, Step, node) >= ratio, Y = X Mask / (1 - ratio); on dY it gives dX, so no Mask need be kept",
    ),
    _composite(
        "DropoutGrad", ("dY", "Mask"), ("dX",), ("ratio", "draw"), ((0, 0),), booleans=_MASK,
        doc="dX = dY Mask / (1 - ratio)",
    ),
    _composite("RandomUniform", ("Key", "Step"), ("U",), ("node", "shape"), integers=_DRAW, doc="U in [0, 1)"),
    _composite("SquaredNorm", ("G*",), ("Sum",), scratch=_slices, doc="the composite with one visit of each element"),
    KernelEntry("Transpose", ("X",), ("Y",), ("perm",), doc="Y's dimension i is X's perm[i]"),
    KernelEntry(
        "BiasGrad", ("dY",), ("dBias",), ("keepdims",), implements=("", "ReduceSum"), scratch=_bias_sums,
        doc="sum over all dimensions but the last",
    ),
)  # fmt: skip

KERNELS: Mapping[str, KernelEntry] = {entry.name: entry for entry in _ENTRIES}
BY_OPERATOR: Mapping[tuple[str, str], KernelEntry] = {
    entry.implements: entry for entry in _ENTRIES if entry.implements is not None
}
