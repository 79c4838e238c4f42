"""Element-wise arithmetic, comparisons, logic, casts."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_translate import DTYPES, Translation, onnx_dtype

BOOL = ir.DataType.BOOL


_ON_BOOL = {"Mul": "And", "Max": "Or", "Min": "And"}


def _plain(op_type: str) -> Any:
    def apply(t: Translation, self: Any, other: Any) -> ir.Value:
        dtype = t.out_dtype()
        op = _ON_BOOL.get(op_type, op_type) if dtype == BOOL else op_type
        return t.op(op, t.tensor(self, dtype), t.tensor(other, dtype))

    return apply


for _op, _aten in (("Mul", "mul"), ("Pow", "pow")):
    _overloads = ("Tensor", "Scalar") if _aten == "mul" else ()
    if _overloads:
        rule(*(f"{_aten}.{o}" for o in _overloads))(_plain(_op))
for _op, _aten in (("Max", "maximum"), ("Min", "minimum")):
    rule(f"{_aten}.default")(_plain(_op))


@rule("add.Tensor", "add.Scalar")
def _add(t: Translation, self: Any, other: Any, alpha: Any) -> ir.Value:
    dtype = t.out_dtype()
    if dtype == BOOL:
        return t.op("Or", t.tensor(self, dtype), t.tensor(other, dtype))
    return t.op("Add", t.tensor(self, dtype), _scaled(t, other, alpha, dtype))


@rule("sub.Tensor", "sub.Scalar")
def _sub(t: Translation, self: Any, other: Any, alpha: Any) -> ir.Value:
    dtype = t.out_dtype()
    return t.op("Sub", t.tensor(self, dtype), _scaled(t, other, alpha, dtype))


@rule("rsub.Tensor", "rsub.Scalar")
def _rsub(t: Translation, self: Any, other: Any, alpha: Any) -> ir.Value:
    dtype = t.out_dtype()
    return t.op("Sub", t.tensor(other, dtype), _scaled(t, self, alpha, dtype))


def _scaled(t: Translation, value: Any, alpha: Any, dtype: ir.DataType) -> ir.Value:
    operand = t.tensor(value, dtype)
    return operand if alpha == 1 else t.op("Mul", operand, t.scalar(alpha, dtype))


@rule("div.Tensor", "div.Scalar")
def _div(t: Translation, self: Any, other: Any) -> ir.Value:
    return _plain("Div")(t, self, other)


@rule("div.Tensor_mode", "div.Scalar_mode")
def _div_mode(t: Translation, self: Any, other: Any, rounding_mode: str | None) -> ir.Value:
    dtype = t.out_dtype()
    a, b = t.tensor(self, dtype), t.tensor(other, dtype)
    if rounding_mode is None:
        return t.op("Div", a, b)
    if rounding_mode == "trunc":
        quotient = t.op("Div", a, b)
        if dtype.is_integer():
            return quotient
        return t.op("Mul", t.op("Sign", quotient), t.op("Floor", t.op("Abs", quotient)))
    return _floor_divide(t, a, b, dtype)


@rule("floor_divide.default", "floor_divide.Scalar")
def _floor_division(t: Translation, self: Any, other: Any) -> ir.Value:
    dtype = t.out_dtype()
    return _floor_divide(t, t.tensor(self, dtype), t.tensor(other, dtype), dtype)


def _floor_divide(t: Translation, a: ir.Value, b: ir.Value, dtype: ir.DataType) -> ir.Value:
    if not dtype.is_integer():
        return t.op("Floor", t.op("Div", a, b))
    # a - mod(a, b) is divisible, and ONNX's integer Mod takes the sign of the divisor as Python's does
    return t.op("Div", t.op("Sub", a, t.op("Mod", a, b)), b)


@rule("remainder.Tensor", "remainder.Scalar")
def _remainder(t: Translation, self: Any, other: Any) -> ir.Value:
    dtype = t.out_dtype()
    a, b = t.tensor(self, dtype), t.tensor(other, dtype)
    if dtype.is_integer():
        return t.op("Mod", a, b)
    return t.op("Sub", a, t.op("Mul", t.op("Floor", t.op("Div", a, b)), b))


@rule("fmod.Tensor", "fmod.Scalar")
def _fmod(t: Translation, self: Any, other: Any) -> ir.Value:
    dtype = t.out_dtype()
    return t.op("Mod", t.tensor(self, dtype), t.tensor(other, dtype), fmod=1)


@rule("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def _pow(t: Translation, self: Any, exponent: Any) -> ir.Value:
    dtype = t.out_dtype()
    base = t.tensor(self, dtype)
    if exponent == 2:
        return t.op("Mul", base, base)
    if exponent == 1:
        return base
    if exponent == 0.5:
        return t.op("Sqrt", base)
    if exponent == -1 and not dtype.is_integer():
        return t.op("Reciprocal", base)
    return t.op("Pow", base, t.tensor(exponent, dtype))


# --- comparisons and logic ---------------------------------------------------------------------------------------

_COMPARISONS = {
    "eq": ("Equal", False), "ne": ("Equal", True), "lt": ("Less", False), "le": ("LessOrEqual", False),
    "gt": ("Greater", False), "ge": ("GreaterOrEqual", False),
}  # fmt: skip


def _comparison(op_type: str, negate: bool) -> Any:
    def apply(t: Translation, self: Any, other: Any) -> ir.Value:
        dtype = onnx_dtype(torch.result_type(t.fake_argument("self"), t.fake_argument("other")))
        if dtype == BOOL and op_type != "Equal":
            dtype = ir.DataType.INT32
        result = t.op(op_type, t.tensor(self, dtype), t.tensor(other, dtype))
        return t.op("Not", result) if negate else result

    return apply


for _aten, (_op, _negate) in _COMPARISONS.items():
    rule(f"{_aten}.Tensor", f"{_aten}.Scalar")(_comparison(_op, _negate))


def _logic(op_type: str, bitwise: str | None) -> Any:
    def apply(t: Translation, self: Any, other: Any) -> ir.Value:
        dtype = t.out_dtype()
        if dtype == BOOL:
            return t.op(op_type, _truth(t, self), _truth(t, other))
        if bitwise is None:
            raise t.unsupported(f"{op_type} on {dtype}")
        return t.op(bitwise, t.tensor(self, dtype), t.tensor(other, dtype))

    return apply


def _truth(t: Translation, value: Any) -> ir.Value:
    if not isinstance(value, ir.Value):
        return t.scalar(bool(value), BOOL)
    return t.cast(value, BOOL)


for _aten, _op in (("and", "And"), ("or", "Or"), ("xor", "Xor")):
    rule(f"logical_{_aten}.default")(_logic(_op, None))
    rule(f"bitwise_{_aten}.Tensor", f"bitwise_{_aten}.Scalar")(_logic(_op, f"Bitwise{_op}"))


@rule("logical_not.default")
def _logical_not(t: Translation, self: ir.Value) -> ir.Value:
    return t.op("Not", _truth(t, self))


@rule("bitwise_not.default")
def _bitwise_not(t: Translation, self: ir.Value) -> ir.Value:
    return t.op("Not" if self.dtype == BOOL else "BitwiseNot", self)


# --- functions of one argument -----------------------------------------------------------------------------------

_UNARY = {
    "neg": "Neg", "abs": "Abs", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "sin": "Sin", "cos": "Cos", "tan": "Tan",
    "tanh": "Tanh", "sigmoid": "Sigmoid", "erf": "Erf", "floor": "Floor", "ceil": "Ceil", "round": "Round",
    "sign": "Sign", "reciprocal": "Reciprocal", "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh",
    "cosh": "Cosh", "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "isnan": "IsNaN", "isinf": "IsInf",
}  # fmt: skip


def _unary(aten: str, op_type: str) -> Any:
    def apply(t: Translation, self: ir.Value) -> ir.Value:
        assert self.dtype is not None
        if aten in ("floor", "ceil", "round") and self.dtype.is_integer():
            return self
        if aten in ("isnan", "isinf"):
            return t.op(op_type, self)
        return t.op(op_type, t.cast(self, t.out_dtype()))

    return apply


for _aten, _op in _UNARY.items():
    rule(f"{_aten}.default")(_unary(_aten, _op))


@rule("rsqrt.default")
def _rsqrt(t: Translation, self: ir.Value) -> ir.Value:
    return t.op("Reciprocal", t.op("Sqrt", t.cast(self, t.out_dtype())))


@rule("log2.default", "log10.default")
def _log_base(t: Translation, self: ir.Value) -> ir.Value:
    dtype = t.out_dtype()
    assert t.fx is not None
    base = 2 if "log2" in str(t.fx.target) else 10
    return t.op("Mul", t.op("Log", t.cast(self, dtype)), t.scalar(1 / math.log(base), dtype))


@rule("log1p.default")
def _log1p(t: Translation, self: ir.Value) -> ir.Value:
    """log(1 + x) without cancellation: x * log(u) / (u - 1) with u = 1 + x (Higham), and x where u rounds to 1."""
    dtype = t.out_dtype()
    x, one = t.cast(self, dtype), t.scalar(1, dtype)
    u = t.op("Add", x, one)
    excess = t.op("Sub", u, one)
    tiny = t.op("Equal", excess, t.scalar(0, dtype))
    safe = t.op("Where", tiny, one, excess)
    value = t.op("Mul", t.op("Log", u), t.op("Div", x, safe))
    whole = t.op("Or", tiny, t.op("IsInf", u))
    return t.op("Where", whole, x, value)


# erfcx(a) (1 + a) by powers of (a - 3) / (a + 3), highest first, for 0 <= a <= 10.1; relative error 2e-9.
_SCALED_ERFC = (
    -0.000107495752, -0.000377268855, 0.000702925919, 0.00164343025, -0.00976348008, 0.0219503462, -0.0238027559,
    -0.0102346438, 0.099020713, -0.230927353, 0.716004605,
)  # fmt: skip


@rule("erfc.default")
def _erfc(t: Translation, self: ir.Value) -> ir.Value:
    """1 - erf(x) without cancellation: exp(-a^2) erfcx(a) with a = |x|, and 2 less that for negative x."""
    out, dtype = t.out_dtype(), ir.DataType.FLOAT
    if out == ir.DataType.DOUBLE:
        raise t.unsupported("erfc in double precision", "compute it in float32")

    def number(value: float) -> ir.Value:
        return t.scalar(value, dtype)

    x = t.cast(self, dtype)
    a = t.op("Min", t.op("Abs", x), number(10.1))  # erfc is 0 beyond
    lead = t.op("Mul", t.op("Floor", t.op("Mul", a, number(16))), number(1 / 16))  # its square has no rounding error
    rest = t.op("Mul", t.op("Sub", a, lead), t.op("Add", a, lead))
    density = t.op("Mul", t.op("Exp", t.op("Neg", t.op("Mul", lead, lead))), t.op("Exp", t.op("Neg", rest)))
    q = t.op("Div", t.op("Sub", a, number(3)), t.op("Add", a, number(3)))
    scaled = number(_SCALED_ERFC[0])
    for coefficient in _SCALED_ERFC[1:]:
        scaled = t.op("Add", t.op("Mul", scaled, q), number(coefficient))
    tail = t.op("Mul", density, t.op("Div", scaled, t.op("Add", a, number(1))))
    negative = t.op("Less", x, number(0))
    return t.cast(t.op("Where", negative, t.op("Sub", number(2), tail), tail), out)


@rule("special_erfcx.default", "special_log_ndtr.default", "logcumsumexp.default")
def _unstable(t: Translation, self: ir.Value, dim: int | None = None) -> ir.Value:
    raise t.unsupported("a function without a form in ONNX operators that keeps its digits", "use torch.logsigmoid or "
                        "torch.logsumexp, or compute it outside of the graph")  # fmt: skip


@rule("expm1.default")
def _expm1(t: Translation, self: ir.Value) -> ir.Value:
    """exp(x) - 1 without cancellation, as 2 * sinh(x / 2) * exp(x / 2); x / 2 is cut where the result is -1."""
    dtype = t.out_dtype()
    least_half = -5.0 if dtype == ir.DataType.FLOAT16 else -44.0  # sinh is finite there, and exp(2 x) below the digits
    half, least = t.op("Mul", t.cast(self, dtype), t.scalar(0.5, dtype)), t.scalar(least_half, dtype)
    half = t.op("Where", t.op("Less", half, least), least, half)
    return t.op("Mul", t.op("Mul", t.scalar(2, dtype), t.op("Sinh", half)), t.op("Exp", half))


@rule("clamp.default", "clamp.Tensor", "clamp_min.default", "clamp_max.default", "hardtanh.default")
def _clamp(
    t: Translation, self: ir.Value, min: Any = None, max: Any = None, min_val: Any = None, max_val: Any = None
) -> ir.Value:
    dtype = t.out_dtype()
    value = t.cast(self, dtype)
    low, high = (min_val if min is None else min), (max_val if max is None else max)
    if low is not None:
        value = t.op("Max", value, t.tensor(low, dtype))
    if high is not None:
        value = t.op("Min", value, t.tensor(high, dtype))
    return value


# --- casts and copies --------------------------------------------------------------------------------------------


@rule(
    "clone.default", "detach.default", "alias.default", "lift_fresh_copy.default", "lift_fresh.default",
    "contiguous.default", "detach_.default",
)  # fmt: skip
def _same(t: Translation, self: ir.Value, **_: Any) -> ir.Value:
    return self


@rule("_to_copy.default")
def _to_copy(t: Translation, self: ir.Value, dtype: torch.dtype | None, **_: Any) -> ir.Value:
    return self if dtype is None else t.cast(self, DTYPES[dtype])


@rule("copy.default")
def _copy(t: Translation, self: ir.Value, src: ir.Value, **_: Any) -> ir.Value:
    return t.expand(t.cast(src, t.out_dtype()), t.out_dims())


@rule("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(t: Translation, condition: ir.Value, self: Any, other: Any) -> ir.Value:
    dtype = t.out_dtype()
    return t.op("Where", t.cast(condition, BOOL), t.tensor(self, dtype), t.tensor(other, dtype))


@rule("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(t: Translation, self: ir.Value, mask: ir.Value, value: Any) -> ir.Value:
    return t.op("Where", mask, t.tensor(value, t.out_dtype()), self)


@rule("trunc.default")
def _trunc(t: Translation, self: ir.Value) -> ir.Value:
    assert self.dtype is not None
    if self.dtype.is_integer():
        return self
    return t.op("Mul", t.op("Sign", self), t.op("Floor", t.op("Abs", self)))


@rule("atan2.default")
def _atan2(t: Translation, self: ir.Value, other: ir.Value) -> ir.Value:
    """The angle of (other, self): arctangent of the quotient, moved by pi in the left half plane, pi/2 on the axis."""
    dtype = t.out_dtype()
    y, x = t.cast(self, dtype), t.cast(other, dtype)
    zero, pi = t.scalar(0, dtype), t.scalar(math.pi, dtype)
    on_axis = t.op("Equal", x, zero)
    angle = t.op("Atan", t.op("Div", y, t.op("Where", on_axis, t.scalar(1, dtype), x)))
    below = t.op("Less", y, zero)
    turned = t.op("Where", below, t.op("Sub", angle, pi), t.op("Add", angle, pi))
    angle = t.op("Where", t.op("Less", x, zero), turned, angle)
    upright = t.op("Mul", t.op("Sign", y), t.scalar(math.pi / 2, dtype))
    return t.op("Where", on_axis, upright, angle)
