"""Operator table: element-wise operators of the ONNX standard.

``inplace`` facts hold for ONNX Runtime's CPU kernels, 1.19.2 and 1.32 (tests/ops/test_inplace.py): a kernel may write
over an input that has the output's own shape and dtype; an input that is broadcast never has it.
"""

from __future__ import annotations

import onnx_ir as ir

from ortgraph.ops.shapes import Types, attribute, broadcast, broadcast_rule, elements_flops, like, shape_of
from ortgraph.ops.spec import OpSpec, register

_BOTH = ((0, 0), (1, 0))


def _unary(op_type: str, doc: str, flops: int = 1, precision: str = "any", inplace: bool = True) -> OpSpec:
    return OpSpec(
        "", op_type, elementwise=True, inplace=((0, 0),) if inplace else (), precision=precision, infer=like(0),
        flops=elements_flops(flops), doc=doc,
    )  # fmt: skip


def _binary(op_type: str, doc: str, commutative: bool = False, precision: str = "any", flops: int = 1) -> OpSpec:
    return OpSpec(
        "", op_type, elementwise=True, inplace=_BOTH, commutative=commutative, precision=precision,
        infer=broadcast_rule(), flops=elements_flops(flops), doc=doc,
    )  # fmt: skip


def _compare(op_type: str, doc: str, commutative: bool = False) -> OpSpec:
    return OpSpec(
        "", op_type, elementwise=True, commutative=commutative, precision="any",
        infer=broadcast_rule(ir.DataType.BOOL), flops=elements_flops(1), doc=doc,
    )  # fmt: skip


def _logical(op_type: str, doc: str) -> OpSpec:
    return OpSpec(
        "", op_type, elementwise=True, inplace=_BOTH, commutative=True, precision="any",
        infer=broadcast_rule(ir.DataType.BOOL), flops=elements_flops(1), doc=doc,
    )  # fmt: skip


def _cast_types(node: ir.Node) -> Types | None:
    to = attribute(node, "to")
    return None if to is None else [(ir.DataType(to), shape_of(node.inputs[0]))]


def _where_types(node: ir.Node) -> Types | None:
    condition, x, y = node.inputs
    if x is None or x.dtype is None:
        return None
    return [(x.dtype, broadcast(*(shape_of(v) for v in (condition, x, y))))]


def _bool_like(node: ir.Node) -> Types:
    return [(ir.DataType.BOOL, shape_of(node.inputs[0]))]


register(
    _unary("Abs", "Y = |X|"),
    _unary("Acos", "Y = acos(X)", 10, "float32"),
    _unary("Acosh", "Y = acosh(X)", 10, "float32"),
    _unary("Asin", "Y = asin(X)", 10, "float32"),
    _unary("Asinh", "Y = asinh(X)", 10, "float32"),
    _unary("Atan", "Y = atan(X)", 10, "float32"),
    _unary("Atanh", "Y = atanh(X)", 10, "float32"),
    _unary("BitwiseNot", "Y = ~X"),
    _unary("Ceil", "Y = ceil(X)"),
    _unary("Celu", "Y = max(X, 0) + min(0, alpha (exp(X / alpha) - 1))", 8),
    _unary("Clip", "Y = min(max(X, low), high)", 2),
    _unary("Cos", "Y = cos(X)", 10, "float32"),
    _unary("Cosh", "Y = cosh(X)", 10, "float32"),
    _unary("Elu", "Y = X where X > 0, else alpha (exp(X) - 1)", 6),
    _unary("Erf", "Y = erf(X)", 10),
    _unary("Exp", "Y = exp(X)", 6, "float32"),
    _unary("Floor", "Y = floor(X)"),
    _unary("Gelu", "Y = X Phi(X), opset 20", 10, "float32", inplace=False),
    _unary("HardSigmoid", "Y = min(max(alpha X + beta, 0), 1)", 4),
    _unary("HardSwish", "Y = X min(max(X / 6 + 1/2, 0), 1)", 5),
    _unary("LeakyRelu", "Y = X where X >= 0, else alpha X", 2),
    _unary("Log", "Y = log(X)", 6, "float32"),
    _unary("Mish", "Y = X tanh(softplus(X))", 16, "float32"),
    _unary("Neg", "Y = -X"),
    _unary("Not", "Y = not X"),
    _unary("Reciprocal", "Y = 1 / X", 2, "float32"),
    _unary("Relu", "Y = max(X, 0)"),
    _unary("Round", "Y = X to the nearest integer, half to even"),
    _unary("Selu", "Y = gamma (X where X > 0, else alpha (exp(X) - 1))", 7),
    _unary("Shrink", "Y = X + bias, 0 or X - bias by lambd", 3),
    _unary("Sigmoid", "Y = 1 / (1 + exp(-X))", 8),
    _unary("Sign", "Y = sign(X)"),
    _unary("Sin", "Y = sin(X)", 10, "float32"),
    _unary("Sinh", "Y = sinh(X)", 10, "float32"),
    _unary("Softplus", "Y = log(1 + exp(X))", 10, "float32"),
    _unary("Softsign", "Y = X / (1 + |X|)", 3),
    _unary("Sqrt", "Y = sqrt(X)", 4, "float32"),
    _unary("Tan", "Y = tan(X)", 10, "float32"),
    _unary("Tanh", "Y = tanh(X)", 8),
    _unary("ThresholdedRelu", "Y = X where X > alpha, else 0"),
    _binary("Add", "C = A + B", commutative=True),
    _binary("BitShift", "C = A << B or A >> B"),
    _binary("BitwiseAnd", "C = A & B", commutative=True),
    _binary("BitwiseOr", "C = A | B", commutative=True),
    _binary("BitwiseXor", "C = A ^ B", commutative=True),
    _binary("Div", "C = A / B", flops=2),
    _binary("Max", "Y = the greatest input", commutative=True),
    _binary("Mean", "Y = mean of the inputs", commutative=True, precision="float32"),
    _binary("Min", "Y = the least input", commutative=True),
    _binary("Mod", "C = A mod B"),
    _binary("Mul", "C = A B", commutative=True),
    _binary("PRelu", "Y = X where X >= 0, else slope X"),
    _binary("Pow", "C = A^B", precision="float32", flops=10),
    _binary("Sub", "C = A - B"),
    _binary("Sum", "Y = sum of the inputs", commutative=True),
    _compare("Equal", "C = (A == B)", commutative=True),
    _compare("Greater", "C = (A > B)"),
    _compare("GreaterOrEqual", "C = (A >= B)"),
    _compare("Less", "C = (A < B)"),
    _compare("LessOrEqual", "C = (A <= B)"),
    _logical("And", "C = A and B"),
    _logical("Or", "C = A or B"),
    _logical("Xor", "C = A xor B"),
    OpSpec("", "IsInf", elementwise=True, precision="any", infer=_bool_like, doc="Y = (X is infinite)"),
    OpSpec("", "IsNaN", elementwise=True, precision="any", infer=_bool_like, doc="Y = (X is not a number)"),
    OpSpec("", "Cast", elementwise=True, inplace=((0, 0),), precision="any", infer=_cast_types,
           doc="Y = X as dtype to"),
    OpSpec("", "CastLike", elementwise=True, precision="any", doc="Y = X as the dtype of the second input"),
    OpSpec("", "Where", elementwise=True, inplace=((1, 0), (2, 0)), precision="any", infer=_where_types,
           flops=elements_flops(1), doc="Y = X where the condition holds, else the third input"),
)  # fmt: skip
