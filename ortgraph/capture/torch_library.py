"""Forward operators without a rule of ours: the exporter's function library, inlined node by node."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import onnxscript
import torch
from onnxscript import evaluator
from torch.fx import Node

from ortgraph.capture.torch_translate import Translation, call_arguments, onnx_dtype
from ortgraph.errors import UnsupportedError

# The library's functions that a test compares with PyTorch. Of the rest some are wrong without a word: hamming_window
# has another constant, scatter_reduce forgets to divide by the count, nll_loss_backward by the number of rows.
_PROVEN = {
    "__lshift__.Scalar", "__rshift__.Scalar", "addbmm.default", "angle.default", "bitwise_and.Scalar_Tensor",
    "bitwise_left_shift.Tensor", "bitwise_left_shift.Tensor_Scalar", "bitwise_or.Scalar_Tensor",
    "bitwise_right_shift.Tensor", "bitwise_right_shift.Tensor_Scalar", "bitwise_xor.Scalar_Tensor",
    "blackman_window.default", "exp2.default", "remainder.Scalar_Tensor", "round.decimals", "signbit.default",
    "unfold.default", "upsample_bicubic2d.default", "upsample_bilinear2d.default", "upsample_trilinear3d.default",
}  # fmt: skip
_WITHOUT_MEANING = {"device", "layout", "pin_memory", "memory_format", "non_blocking", "requires_grad"}


def translate_with_library(t: Translation, node: Node) -> Any:
    """Translate a node with onnxscript's function library.

    Raises:
        UnsupportedError: The library has no function for the operator, none that is proven, or none that fits the call.
    """
    name = str(node.target)
    function = _function(name)
    if function is None:
        raise t.unsupported(name)
    arguments = {k: _argument(t.convert(v)) for k, v in call_arguments(node).items() if k not in _WITHOUT_MEANING}
    known = inspect.signature(_python(function)).parameters
    given = {k: v for k, v in arguments.items() if k in known and v is not None}
    first = [given.pop(k) for k in ("self",) if k in given]  # "self" is also a parameter of the functions' own __call__
    try:
        with _inlining(t):
            result = function(*first, **given)
    except UnsupportedError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the library's function raises, it does not fit this call
        raise t.unsupported(f"{name} (the function library failed: {error})") from error
    return list(result) if isinstance(result, tuple) else result


def known_to_library(name: str) -> bool:
    """Whether the library translates an operator (``aten.addcmul.default``)."""
    return _function(name) is not None


@functools.cache
def _library() -> Mapping[str, Any]:
    import onnxscript.function_libs.torch_lib.ops  # noqa: F401 - fills the registry
    from onnxscript.function_libs.torch_lib.registration import default_registry

    return {name: entry.overloads[0] for name, entry in default_registry.items() if entry.overloads}


def _function(name: str) -> Any:
    if name.removeprefix("aten.") not in _PROVEN:
        return None
    namespace, _, rest = name.partition(".")
    return _library().get(f"{namespace}::{rest.removesuffix('.default')}")


def _python(function: Any) -> Any:
    return getattr(function, "function", None) or getattr(function, "func", function)


def _argument(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return int(onnx_dtype(value))
    return value


@contextlib.contextmanager
def _inlining(t: Translation) -> Iterator[None]:
    inliner = _Inliner(t)
    before = ir.set_value_magic_handler(inliner)
    try:
        with evaluator.default_as(inliner):
            yield
    finally:
        ir.set_value_magic_handler(before)


class _Inliner:
    """An onnxscript evaluator that appends the operators of a function to the graph instead of running them."""

    def __init__(self, t: Translation) -> None:
        self.t = t

    def eval_op(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if op.name == "Constant":
            return self._constant(kwargs)
        signature = op.op_signature
        inputs, attributes = self._split(signature, args, kwargs)
        count = _output_count(op.name, signature, attributes)
        made = self.t.multi(op.name, *inputs, outputs=count, **attributes)
        return made[0] if count == 1 else made

    def eval_function(self, function: onnxscript.OnnxFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return function.function(*args, **kwargs)

    def _split(
        self, signature: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        operands: list[tuple[str, Any]] = []
        attributes: dict[str, Any] = {}
        rest = list(args)
        for parameter in signature.params:
            if isinstance(parameter, ir.schemas.AttributeParameter):
                value = kwargs.get(parameter.name)
                if value is not None:
                    attributes[parameter.name] = _attribute(parameter.type, value)
                continue
            constraint = parameter.type_constraint.name
            taken = rest if parameter.variadic else rest[:1] or [kwargs.get(parameter.name)]
            operands += [(constraint, v) for v in taken]
            rest = [] if parameter.variadic else rest[1:]
        bound = {c: v.dtype for c, v in operands if isinstance(v, ir.Value)}
        inputs = [self._operand(v, bound.get(c)) for c, v in operands]
        while inputs and inputs[-1] is None:
            inputs.pop()
        return inputs, attributes

    def _operand(self, value: Any, dtype: ir.DataType | None) -> ir.Value | None:
        if value is None or isinstance(value, ir.Value):
            return value
        if dtype is None:
            first = value[0] if isinstance(value, (list, tuple)) and value else value
            if isinstance(first, bool):
                dtype = ir.DataType.BOOL
            else:
                dtype = ir.DataType.FLOAT if isinstance(first, float) else ir.DataType.INT64
        if isinstance(value, (list, tuple)) and any(not isinstance(v, (int, float)) for v in value):
            return self.t.shape_input(value)
        return self.t.const(value, dtype)

    def _constant(self, kwargs: Mapping[str, Any]) -> ir.Value:
        kind, value = next((k, v) for k, v in kwargs.items() if v is not None)
        if isinstance(value, onnx.TensorProto):
            value = ir.serde.deserialize_tensor(value)
        if isinstance(value, ir.TensorProtocol):
            return self.t.const(value.numpy(), value.dtype)
        return self.t.const(value, ir.DataType.FLOAT if "float" in kind else ir.DataType.INT64)

    # arithmetic on values inside library functions

    def Add(self, lhs: Any, rhs: Any) -> ir.Value:
        return self._binary("Add", lhs, rhs)

    def Sub(self, lhs: Any, rhs: Any) -> ir.Value:
        return self._binary("Sub", lhs, rhs)

    def Mul(self, lhs: Any, rhs: Any) -> ir.Value:
        return self._binary("Mul", lhs, rhs)

    def Div(self, lhs: Any, rhs: Any) -> ir.Value:
        return self._binary("Div", lhs, rhs)

    def Neg(self, operand: ir.Value) -> ir.Value:
        return self.t.op("Neg", operand)

    def _binary(self, op_type: str, lhs: Any, rhs: Any) -> ir.Value:
        dtype = next(v.dtype for v in (lhs, rhs) if isinstance(v, ir.Value))
        left, right = self._operand(lhs, dtype), self._operand(rhs, dtype)
        return self.t.op(op_type, left, right)


def _attribute(kind: ir.AttributeType, value: Any) -> Any:
    if kind == ir.AttributeType.INT:
        return int(value)
    if kind == ir.AttributeType.INTS:
        return [int(v) for v in value]
    if kind == ir.AttributeType.FLOAT:
        return float(value)
    return value


def _output_count(name: str, signature: Any, attributes: Mapping[str, Any]) -> int:
    if name == "Split":
        return int(attributes.get("num_outputs", 1))
    if name in ("BatchNormalization", "LayerNormalization", "Dropout", "MaxPool"):
        return 1
    return len(signature.outputs)
