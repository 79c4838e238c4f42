"""Translation of a traced FX joint graph into ``onnx_ir``, node by node, with dtypes and shapes from the trace."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import sympy
import torch
from torch.fx import Node

from ortgraph.capture.torch_dims import Dim, is_whole, parse_dim, reshape_pattern
from ortgraph.capture.torch_rules import rules
from ortgraph.capture.torch_source import module_path, phase_of, source_line
from ortgraph.errors import CaptureError, UnsupportedError
from ortgraph.graph.edit import MODULE_KEY, PHASE_KEY, SOURCE_KEY, Names
from ortgraph.ops.builder import Builder
from ortgraph.ops.spec import COMPOSITE

PASS = "capture"
DTYPES = {
    torch.float32: ir.DataType.FLOAT, torch.float64: ir.DataType.DOUBLE, torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16, torch.int64: ir.DataType.INT64, torch.int32: ir.DataType.INT32,
    torch.int16: ir.DataType.INT16, torch.int8: ir.DataType.INT8, torch.uint8: ir.DataType.UINT8,
    torch.bool: ir.DataType.BOOL,
}  # fmt: skip
_IGNORED = {
    "_assert_tensor_metadata.default", "_assert_async.msg", "_assert_scalar.default", "sym_constrain_range.default",
    "sym_constrain_range_for_size.default",
}  # fmt: skip
_MAX_FILLED = 1024  # elements up to which a filled tensor is stored instead of expanded


def onnx_dtype(dtype: torch.dtype) -> ir.DataType:
    """The ONNX type of a PyTorch dtype. Raises UnsupportedError when there is none."""
    if dtype not in DTYPES:
        raise UnsupportedError(f"tensors of dtype {dtype} have no translation", "use real float or integer tensors")
    return DTYPES[dtype]


class Translation:
    """The state of one translation, and what rules use to build nodes.

    Args:
        graph: Receives the nodes.
        symbols: Name expression of each symbol of the trace (``s4`` → ``batch``).
    """

    def __init__(self, graph: ir.Graph, symbols: Mapping[sympy.Symbol, sympy.Expr]) -> None:
        self.graph = graph
        self.build = Builder(graph, PASS, names=Names(graph))
        self.env: dict[Node, Any] = {}
        self.fx: Node | None = None
        self.draws = 0
        self.random: tuple[ir.Value, ir.Value] | None = None
        self.flat_indices: dict[ir.Value, ir.Value] = {}  # pooling indices as ONNX counts them
        self._symbols = dict(symbols)
        self._dims: dict[ir.Value, tuple[Dim, ...]] = {}
        self._sources: dict[sympy.Symbol, tuple[ir.Value, int]] = {}
        self._sizes: dict[sympy.Expr, ir.Value] = {}
        self._shapes: dict[tuple[Dim, ...], ir.Value] = {}
        self._transposed: dict[ir.Value, tuple[ir.Value, tuple[int, ...]]] = {}

    # --- values of the trace -------------------------------------------------------------------------------------

    def bind(self, node: Node, value: ir.Value) -> None:
        """Let a placeholder stand for a graph input; its dimensions define symbols."""
        self.env[node] = value
        dims = self.dims_of(node.meta["val"])
        self.record(value, node.meta["val"])
        for axis, dim in enumerate(dims):
            if isinstance(dim, sympy.Symbol):
                self._sources.setdefault(dim, (value, axis))

    def dim(self, size: Any) -> Dim:
        """A size of the trace as an int or an expression of named dimensions."""
        if isinstance(size, torch.SymInt):
            size = size.node.expr
        if not isinstance(size, sympy.Basic):
            return int(size)
        size = size.xreplace(self._symbols)
        return int(size) if size.is_Integer else size

    def dims_of(self, fake: torch.Tensor) -> tuple[Dim, ...]:
        return tuple(self.dim(d) for d in fake.shape)

    def dims(self, value: ir.Value) -> tuple[Dim, ...]:
        """The recorded dimensions of a value."""
        if value in self._dims:
            return self._dims[value]
        assert value.shape is not None, f"%{value.name} has no shape"
        return tuple(d if isinstance(d, int) else parse_dim(d.value) for d in value.shape)

    def record(self, value: ir.Value, fake: torch.Tensor) -> None:
        """Write dtype and shape of the trace on a value; they win over inferred ones."""
        self.typed(value, onnx_dtype(fake.dtype), self.dims_of(fake))

    def typed(self, value: ir.Value, dtype: ir.DataType, dims: Sequence[Dim]) -> ir.Value:
        """Record dtype and dimensions of a value."""
        value.dtype = dtype
        value.shape = ir.Shape([d if isinstance(d, int) else str(d) for d in dims])
        self._dims[value] = tuple(dims)
        return value

    def fake(self, index: int = 0) -> torch.Tensor:
        """The traced result of the operator being translated."""
        assert self.fx is not None
        value = self.fx.meta["val"]
        return value[index] if isinstance(value, (tuple, list)) else value

    def fake_argument(self, name: str) -> Any:
        """The traced value of an argument of the operator being translated."""
        assert self.fx is not None
        argument = call_arguments(self.fx)[name]
        return argument.meta["val"] if isinstance(argument, Node) else argument

    def out_dtype(self, index: int = 0) -> ir.DataType:
        return onnx_dtype(self.fake(index).dtype)

    def out_dims(self, index: int = 0) -> tuple[Dim, ...]:
        return self.dims_of(self.fake(index))

    # --- nodes ---------------------------------------------------------------------------------------------------

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """A standard operator with one output."""
        return self.build.op(op_type, *inputs, **attributes)

    def multi(self, op_type: str, *inputs: ir.Value | None, outputs: int, **attributes: Any) -> tuple[ir.Value, ...]:
        return self.build.multi(op_type, *inputs, outputs=outputs, **attributes)

    def composite(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """A composite with one output (docs/operators.md)."""
        return self.build.op(op_type, *inputs, domain=COMPOSITE, **attributes)

    def composites(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        outputs: int,
        wanted: Sequence[bool] | None = None,
        **attributes: Any,
    ) -> tuple[ir.Value | None, ...]:
        """A composite with several outputs, of which the unwanted ones are left out."""
        made = self.build.multi(op_type, *inputs, outputs=outputs, domain=COMPOSITE, **attributes)
        if wanted is None:
            return made
        for value, keep in zip(made, wanted, strict=True):
            if not keep:
                value.name = ""
        return tuple(value if keep else None for value, keep in zip(made, wanted, strict=True))

    def const(self, value: Any, dtype: ir.DataType | type | None = None) -> ir.Value:
        return self.build.const(value, dtype)

    def scalar(self, value: Any, dtype: ir.DataType) -> ir.Value:
        """A scalar constant. Values outside an integer type's range become its limits, as no comparison differs."""
        if dtype.is_integer() and isinstance(value, float) and not np.isfinite(value):
            info = np.iinfo(dtype.numpy())
            value = info.max if value > 0 else info.min
        if dtype == ir.DataType.BOOL:
            value = bool(value)
        return self.build.const(value, dtype)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        if value.dtype == dtype:
            return value
        dims = self.dims(value)
        return self.typed(self.op("Cast", value, to=int(dtype)), dtype, dims)

    def tensor(self, value: Any, dtype: ir.DataType) -> ir.Value:
        """An operand (value, number or expression of dimensions) in ``dtype``."""
        if isinstance(value, ir.Value):
            return self.cast(value, dtype)
        if isinstance(value, sympy.Basic):
            size = self.op("Squeeze", self.size(value), self.build.ints([0]))
            return self.cast(self.typed(size, ir.DataType.INT64, ()), dtype)
        return self.scalar(value, dtype)

    def transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        """Transpose; a transpose of a transpose is merged or cancelled."""
        perm = tuple(int(p) for p in perm)
        if value in self._transposed:
            value, inner = self._transposed[value]
            perm = tuple(inner[p] for p in perm)
        if perm == tuple(range(len(perm))):
            return value
        dims = self.dims(value)
        result = self.op("Transpose", value, perm=perm)
        assert value.dtype is not None
        self.typed(result, value.dtype, [dims[p] for p in perm])
        self._transposed[result] = (value, perm)
        return result

    def reshape(self, value: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        """Reshape, with 0 and -1 where sizes are symbolic and computed sizes only where these do not suffice."""
        before, dims = self.dims(value), tuple(dims)
        if before == dims:
            return value
        assert value.dtype is not None
        shape = reshape_pattern(before, dims)
        target = self.build.ints(shape) if shape is not None else self.shape_input(dims)
        return self.typed(self.op("Reshape", value, target), value.dtype, dims)

    def expand(self, value: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        if self.dims(value) == tuple(dims):
            return value
        assert value.dtype is not None
        return self.typed(self.op("Expand", value, self.shape_input(dims)), value.dtype, dims)

    def filled(self, value: Any, dims: Sequence[Dim], dtype: ir.DataType) -> ir.Value:
        """A tensor with one value everywhere."""
        static = [d for d in dims if isinstance(d, int)]
        if len(static) == len(dims) and int(np.prod(static)) <= _MAX_FILLED and not isinstance(value, ir.Value):
            return self.build.const(np.full(static, value), dtype)
        scalar = self.tensor(value, dtype)
        return self.expand(scalar, dims)

    def draw(self) -> tuple[ir.Value, ir.Value, int]:
        """Key, step and the number of a new drawing node; the graph gets both inputs at the first draw."""
        if self.random is None:
            made = [
                ir.Value(name=self.build.names.fresh(name), shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
                for name in ("random_key", "random_step")
            ]
            self.graph.inputs.extend(made)
            self.random = (made[0], made[1])
        self.draws += 1
        return (*self.random, self.draws - 1)

    # --- sizes ---------------------------------------------------------------------------------------------------

    def size(self, dim: Dim) -> ir.Value:
        """A size as an int64 tensor of one element."""
        if isinstance(dim, int) or dim.is_Integer:
            return self.build.ints([int(dim)])
        if dim not in self._sizes:
            self._sizes[dim] = self.typed(self._compute_size(dim), ir.DataType.INT64, (1,))
        return self._sizes[dim]

    def shape_input(self, dims: Sequence[Dim]) -> ir.Value:
        """A shape as an int64 tensor."""
        if all(isinstance(d, int) for d in dims):
            return self.build.ints([int(d) for d in dims])
        key = tuple(dims)
        if key not in self._shapes:
            self._shapes[key] = self._concat_sizes(key)
        return self._shapes[key]

    def _concat_sizes(self, dims: tuple[Dim, ...]) -> ir.Value:
        parts: list[ir.Value] = []
        for symbolic, run in itertools.groupby(dims, lambda d: not isinstance(d, int)):
            if symbolic:
                parts += [self.size(d) for d in run]
            else:
                parts.append(self.build.ints([int(d) for d in run]))
        if len(parts) == 1:
            return parts[0]
        return self.typed(self.op("Concat", *parts, axis=0), ir.DataType.INT64, (len(dims),))

    def _compute_size(self, dim: sympy.Expr) -> ir.Value:
        if isinstance(dim, sympy.Symbol):
            if dim not in self._sources:
                raise CaptureError(
                    f"the size {dim} is not a dimension of any input", "use static shapes (dynamic=None)"
                )
            value, axis = self._sources[dim]
            return self.op("Shape", value, start=axis, end=axis + 1)
        if isinstance(dim, (sympy.Add, sympy.Mul)):
            op_type = "Add" if isinstance(dim, sympy.Add) else "Mul"
            result = self.size(dim.args[0]) if is_whole(dim.args[0]) else None
            for term in dim.args[1:]:
                if result is None or not is_whole(term):
                    break
                result = self.op(op_type, result, self.size(term))
            else:
                if result is not None:
                    return result
        if type(dim).__name__ in ("FloorDiv", "CleanDiv"):
            return self.op("Div", self.size(dim.args[0]), self.size(dim.args[1]))
        if type(dim).__name__ in ("Max", "Min"):
            return self.op(type(dim).__name__, *(self.size(a) for a in dim.args))
        raise UnsupportedError(f"the size {dim} has no translation", "use static shapes (dynamic=None)")

    # --- the walk ------------------------------------------------------------------------------------------------

    def convert(self, argument: Any) -> Any:
        """An FX argument: values for tensors, ints or expressions for sizes."""
        if isinstance(argument, Node):
            fake = argument.meta.get("val")
            if isinstance(fake, (torch.SymInt, int)) and not isinstance(fake, bool):
                return self.dim(fake)
            if argument not in self.env:
                hint = "keep it a tensor, without .item()" if "local_scalar_dense" in str(argument.target) else ""
                raise self.unsupported(f"the result of {argument.target}", hint)
            return self.env[argument]
        if isinstance(argument, (list, tuple)):
            return [self.convert(a) for a in argument]
        return argument

    def translate(self, node: Node) -> None:
        """Translate one ``call_function`` node."""
        target = node.target
        if target is operator.getitem:
            source, index = node.args
            assert isinstance(source, Node)
            self.env[node] = self.env[source][index]
            return
        name = _overload_name(target)
        if name in _IGNORED or isinstance(
            node.meta.get("val"), (torch.SymInt, torch.SymBool, torch.SymFloat, int, bool)
        ):
            return
        self.fx = node
        first = len(self.build.made)
        rule = rules().get(name)
        if rule is not None:
            arguments = {k: self.convert(v) for k, v in call_arguments(node).items()}
            result = rule(self, **arguments)
        else:
            result = self._from_library(node)
        made = self.build.made[first:]
        self._note_origin(node, made)
        self.env[node] = self._checked(node, name, result, set(made))

    def unsupported(self, what: str, hint: str = "") -> UnsupportedError:
        """The error for an operator without a rule, with its place in the user's code."""
        node = self.fx
        where = ""
        if node is not None:
            path, line = module_path(node), source_line(node)
            before = node.prev  # custom operators carry no frame of their own: the line of what ran just before is near
            while not line and before.op == "call_function":
                line, before = source_line(before), before.prev
                line = f"near {line}" if line else ""
            where = f" (module {path or '<root>'}" + (f", {line})" if line else ")")
        return UnsupportedError(
            f"{what} has no translation to ONNX{where}",
            hint or "replace the operator, or report it; the rules are ortgraph/capture/torch_rules_*.py",
        )

    def _from_library(self, node: Node) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise self.unsupported(f"the random operator {node.target}", "draw with dropout, rand or bernoulli")
        if "grouped_mm" in str(node.target):
            hint = "set experts_implementation='batched_mm' in the model's config"
            raise self.unsupported(f"the grouped expert product {node.target}", hint)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise self.unsupported(f"the control flow operator {node.target}", "use torch.where on tensor values")
        from ortgraph.capture.torch_library import translate_with_library

        return translate_with_library(self, node)

    def _note_origin(self, node: Node, made: Sequence[ir.Node]) -> None:
        path, line, phase = module_path(node), source_line(node), phase_of(node)
        for new in made:
            new.metadata_props[PHASE_KEY] = phase
            if path:
                new.metadata_props[MODULE_KEY] = path
            if line:
                new.metadata_props[SOURCE_KEY] = line

    def _checked(self, node: Node, name: str, result: Any, made: set[ir.Node]) -> Any:
        fakes = node.meta["val"]
        if not isinstance(fakes, (tuple, list)):
            self._check_value(name, result, fakes, made)
            return result
        if len(result) != len(fakes):
            raise CaptureError(
                f"the rule of aten.{name} gave {len(result)} results instead of {len(fakes)}", "report this"
            )
        for value, fake in zip(result, fakes, strict=True):
            if value is not None and isinstance(fake, torch.Tensor):
                self._check_value(name, value, fake, made)
        return tuple(result)

    def _check_value(self, name: str, value: ir.Value, fake: torch.Tensor, made: set[ir.Node]) -> None:
        if fake.dtype not in DTYPES:
            raise self.unsupported(f"{name} of dtype {fake.dtype}", "use real float or integer tensors")
        dtype, dims = onnx_dtype(fake.dtype), self.dims_of(fake)
        known = value.shape is not None and value.shape.is_static()
        static = all(isinstance(d, int) for d in dims)
        wrong = value.dtype not in (None, dtype) or (known and static and tuple(value.shape or ()) != dims)
        if wrong:
            raise CaptureError(
                f"the rule of aten.{name} gave {value.dtype} {value.shape} where the trace has {dtype} {list(dims)}",
                "report this; the rules are ortgraph/capture/torch_rules_*.py",
            )
        if value.producer() in made:
            self.typed(value, dtype, dims)


def _overload_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return str(target).removeprefix("aten.")
    return str(target)


def call_arguments(node: Node) -> dict[str, Any]:
    """All arguments of an ATen call by schema name, with defaults."""
    schema = node.target._schema  # type: ignore[union-attr]
    bound: dict[str, Any] = {}
    for i, argument in enumerate(schema.arguments):
        if i < len(node.args):
            bound[argument.name] = node.args[i]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound
