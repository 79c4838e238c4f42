"""Translation of a traced FX joint graph into ``onnx_ir``, node by node, with dtypes and shapes from the trace."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from ortgraph.capture.torch_dims import Dim
from ortgraph.capture.torch_rules import rules
from ortgraph.capture.torch_source import module_path, phase_of, source_line
from ortgraph.capture.torch_values import GraphValues
from ortgraph.errors import CaptureError, OrtgraphError, UnsupportedError
from ortgraph.graph.edit import MODULE_KEY, PHASE_KEY, SOURCE_KEY

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


def onnx_dtype(dtype: torch.dtype) -> ir.DataType:
    """The ONNX type of a PyTorch dtype. Raises UnsupportedError when there is none."""
    if dtype not in DTYPES:
        raise UnsupportedError(f"tensors of dtype {dtype} have no translation", "use real float or integer tensors")
    return DTYPES[dtype]


class Translation(GraphValues):
    """The state of one translation, and what rules use to build nodes.

    Args:
        graph: Receives the nodes.
        symbols: Name expression of each symbol of the trace (``s4`` → ``batch``).
    """

    def __init__(self, graph: ir.Graph, symbols: Mapping[sympy.Symbol, sympy.Expr]) -> None:
        super().__init__(graph)
        self.env: dict[Node, Any] = {}
        self.fx: Node | None = None
        self.draws = 0
        self.random: tuple[ir.Value, ir.Value] | None = None
        self.flat_indices: dict[ir.Value, ir.Value] = {}  # pooling indices as ONNX counts them
        self.obstacles: dict[ir.Node, tuple[Node, UnsupportedError]] = {}
        self._beyond: set[ir.Node] = set()  # obstacles whose results have no type or size
        self._symbols = dict(symbols)

    # --- values of the trace -------------------------------------------------------------------------------------

    def bind(self, node: Node, value: ir.Value) -> None:
        """Let a placeholder stand for a graph input; its dimensions define symbols."""
        self.env[node] = value
        dims = self.dims_of(node.meta["val"])
        self.record(value, node.meta["val"])
        for axis, dim in enumerate(dims):
            if isinstance(dim, sympy.Symbol):
                self.sources.setdefault(dim, (value, axis))

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

    def record(self, value: ir.Value, fake: torch.Tensor) -> None:
        """Write dtype and shape of the trace on a value; they win over inferred ones."""
        self.typed(value, onnx_dtype(fake.dtype), self.dims_of(fake))

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
        try:
            result = self._apply_rule(node, name)
            made = self.build.made[first:]
            checked = self._checked(node, name, result, set(made))
        except UnsupportedError as error:
            self._stand_in(node, error)
            return
        self._note_origin(node, made)
        self.env[node] = checked

    def _apply_rule(self, node: Node, name: str) -> Any:
        self._refuse_dtypes(node, name)
        rule = rules().get(name)
        if rule is None:
            return self._from_library(node)
        arguments = {k: self.convert(v) for k, v in call_arguments(node).items()}
        try:
            return rule(self, **arguments)
        except OrtgraphError:
            raise
        except Exception as error:  # noqa: BLE001 - a call that the rule was not written for, whatever it stumbles over
            raise self.unsupported(f"this call of {name} ({type(error).__name__}: {error})") from error

    def _stand_in(self, node: Node, error: UnsupportedError) -> None:
        """Go on after an obstacle with values that nothing computes, so that every obstacle is found.

        What only follows from an obstacle, because its result has no ONNX type or size, is none of its own.
        """
        read = [v for a in node.all_input_nodes for v in _leaves(self.env.get(a)) if isinstance(v, ir.Value)]
        fakes = node.meta["val"]
        several = isinstance(fakes, (tuple, list))
        tensors = [f if isinstance(f, torch.Tensor) else None for f in (fakes if several else [fakes])]
        stand = ir.Node("ortgraph.capture", "Obstacle", list(dict.fromkeys(read)), num_outputs=len(tensors),
                        name=self.build.names.fresh_node("obstacle"))  # fmt: skip
        self.graph.append(stand)
        for value, fake in zip(stand.outputs, tensors, strict=True):
            value.name = self.build.names.fresh("obstacle")
            if fake is not None:
                self.typed(value, DTYPES.get(fake.dtype, ir.DataType.FLOAT), self.dims_of(fake))
        if not any(v.producer() in self._beyond for v in read):
            self.obstacles[stand] = (node, error)
        if any(f is not None and (f.dtype not in DTYPES or has_free_unbacked_symbols(f)) for f in tensors):
            self._beyond.add(stand)
        self.env[node] = tuple(stand.outputs) if several else stand.outputs[0]

    def raise_obstacles(self) -> None:
        """Raise one error for every obstacle that the graph still depends on; none when there is none.

        A backward half is named where the forward half at its place has a translation.
        """
        alive = [found for stand, found in self.obstacles.items() if stand.graph is not None]
        forward = {_place(node) for node, _ in alive if phase_of(node) == "forward"}
        named = [error for node, error in alive if phase_of(node) == "forward" or _place(node) not in forward]
        if named:
            raise UnsupportedError.of(named)

    def _refuse_dtypes(self, node: Node, name: str) -> None:
        fakes = node.meta["val"]
        for fake in fakes if isinstance(fakes, (tuple, list)) else (fakes,):
            if isinstance(fake, torch.Tensor) and fake.dtype not in DTYPES:
                raise self.unsupported(f"{name} of dtype {fake.dtype}", "use real float or integer tensors")

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
            hint or _hint(what),
        )

    def _from_library(self, node: Node) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise self.unsupported(f"the random operator {node.target}", "draw with dropout, rand or bernoulli")
        if "grouped_mm" in str(node.target):
            hint = "set experts_implementation='batched_mm' in the model's config"
            raise self.unsupported(f"the grouped expert product {node.target}", hint)
        if str(node.target).startswith(("aten.linalg_", "aten._linalg_")):
            hint = "compute it outside of the graph and give the result as an input or a buffer"
            raise self.unsupported(f"the matrix decomposition {node.target}", hint)
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


def _hint(what: str) -> str:
    if any(name in what for name in ("nonzero", "masked_select", "unique", "bincount")):
        return "use torch.where, masked_fill or weights: sizes may not depend on values"
    return "replace the operator, or report it; the rules are ortgraph/capture/torch_rules_*.py"


def _place(node: Node) -> tuple[str, str]:
    return module_path(node), source_line(node)


def _leaves(value: Any) -> list[Any]:
    return [v for item in value for v in _leaves(item)] if isinstance(value, (list, tuple)) else [value]


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
