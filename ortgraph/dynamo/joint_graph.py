"""From the FX graph that AOTAutograd traced to a training graph: forward alone, or forward and backward in one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch.fx import GraphModule, Node

from ortgraph.capture.torch_assembly import IR_VERSION, remove_dead, to_numpy
from ortgraph.capture.torch_indices import index_notes
from ortgraph.capture.torch_translate import Translation, onnx_dtype
from ortgraph.errors import UnsupportedError
from ortgraph.graph.edit import PHASE_KEY
from ortgraph.graph.index_note import IndexNote
from ortgraph.graph.signature import Buffer, Parameter, Signature, State
from ortgraph.graph.training_graph import TrainingGraph
from ortgraph.ops.spec import COMPOSITE
from ortgraph.runtime.labelled_rows import WITH_OUTPUTS

_OPSET = 18
_MEMBER = re.compile(r"\._modules\['([^']+)'\]|\._(parameters|buffers)\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]|\.(\w+)")


@dataclasses.dataclass(frozen=True)
class Argument:
    """What is known of one input of the compiled function.

    Attributes:
        name: Name for the graph (``encoder.weight``); made unique there.
        kind: ``parameter``, ``buffer`` or ``input``.
    """

    name: str
    kind: str = "input"


@dataclasses.dataclass(frozen=True)
class JointGraph:
    """A training graph and where the arguments and results of the compiled function are in it.

    Attributes:
        graph: At stage ``captured``. It holds no values: parameters belong to PyTorch.
        primals: Graph input of each argument; None for numbers.
        tangents: Graph input of each tangent.
        outputs: Graph output of each forward result; a number or None where the result is one.
        gradients: Graph output of each argument's gradient; None where there is none.
        strides: Of each forward result that is not row-major in PyTorch.
        random: Graph inputs with the random key and the step, when the graph draws.
        notes: Arguments that are read as indices.
        in_arena: Outputs that are handed out where the plan puts them, in the arena; all others have memory of their own.
    """

    graph: TrainingGraph
    primals: tuple[str | None, ...]
    tangents: tuple[str, ...]
    outputs: tuple[Any, ...]
    gradients: tuple[str | None, ...]
    strides: Mapping[int, tuple[int, ...]]
    random: tuple[str, str] | None
    notes: tuple[IndexNote, ...]
    in_arena: frozenset[str] = frozenset()


def arguments_of(graph_module: GraphModule) -> tuple[Argument, ...]:
    """Names and kinds of the inputs of a graph that Dynamo made, after the user's code."""
    found = []
    for node in graph_module.graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        text = getattr(source, "name", "") if source is not None else ""
        text = text() if callable(text) else text
        found.append(_argument(text, node.name))
    return tuple(found)


def _argument(source: str, fallback: str) -> Argument:
    """``L['self']._modules['encoder']._parameters['weight']`` is the parameter ``encoder.weight``."""
    parts, kind = [], "input"
    first = source.find("]") + 1
    for match in _MEMBER.finditer(source, first):
        module, role, member, key, index, attribute = match.groups()
        if role:
            kind = role.removesuffix("s")
        parts.append(module or member or key or index or attribute)
    root = re.match(r"L\['(\w+)'\]", source)
    if kind == "input" and root and root[1] not in ("args", "kwargs", "self", "fn"):
        parts.insert(0, root[1])
    name = ".".join(p for p in parts if p)
    return Argument(name if re.search("[A-Za-z]", name) else fallback.strip("_").removeprefix("l_"), kind)


def joint_graph(
    module: GraphModule, arguments: Sequence[Argument], num_outputs: int, inference: bool = False
) -> JointGraph:
    """Translate a graph of AOTAutograd.

    Args:
        module: Placeholders are the arguments, then the tangents; results are forward results, then gradients.
        arguments: By position; a placeholder that stands for another argument is found by its descriptor.
        num_outputs: Number of forward results.
        inference: There is no backward half.

    Raises:
        UnsupportedError: An operator, a dtype or a symbolic size has no translation.
    """
    return _Assembly(module, arguments, num_outputs, inference).build()


class _Assembly:
    def __init__(self, module: GraphModule, arguments: Sequence[Argument], num_outputs: int, inference: bool) -> None:
        self.module, self.arguments = module, arguments
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": _OPSET, COMPOSITE: 1}, name="train")
        self.t = Translation(self.graph, {})
        self.names = self.t.build.names
        output = module.graph.output_node()
        leaves = torch.utils._pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None)
        self.results, self.grads = leaves[:num_outputs], leaves[num_outputs:]
        placeholders = module.graph.find_nodes(op="placeholder")
        count = len(placeholders) if inference else len(self.grads)
        self.primals, self.tangents = placeholders[:count], placeholders[count:]

    def build(self) -> JointGraph:
        """See ``joint_graph``."""
        kinds = [self._kind(node, i) for i, node in enumerate(self.primals)]
        primals = tuple(self._primal(node, k.name) for node, k in zip(self.primals, kinds, strict=True))
        tangents = tuple(self._input(node, f"tangent/{i}") for i, node in enumerate(self.tangents))
        for node in self.module.graph.nodes:
            if node.op == "get_attr":
                self.t.env[node] = self.t.build.const(to_numpy(_attribute(self.module, node.target)), name=node.name)
            elif node.op == "call_function":
                self.t.translate(node)
        outputs = tuple(self._output(r, f"output/{i}", "forward") for i, r in enumerate(self.results))
        gradients = tuple(
            self._output(g, f"gradient/{name}", "backward") for g, name in zip(self.grads, primals, strict=False)
        )
        remove_dead(self.graph)
        self.t.raise_obstacles()
        draws = self.t.random
        random = None if draws is None else (str(draws[0].name), str(draws[1].name))
        signature = self._signature(kinds, primals, tangents, outputs, gradients, random)
        order = [name for _, name in signature.graph_inputs()]
        inputs = {v.name: v for v in self.graph.inputs}
        self.graph.inputs[:] = [inputs[n] for n in order]
        model = ir.Model(self.graph, ir_version=IR_VERSION, producer_name="ortgraph")
        read = {n: name for n, name in zip(self.primals, primals, strict=True) if name and not _is_float(n)}
        notes = tuple(index_notes(iter(self.module.graph.nodes), read, self.t.dim))
        strides = {
            i: tuple(r.meta["val"].stride())
            for i, r in enumerate(self.results)
            if isinstance(r, Node) and not r.meta["val"].is_contiguous()
        }
        graph = TrainingGraph(model, signature)
        return JointGraph(graph, primals, tangents, outputs, gradients, strides, random, notes)

    def _kind(self, node: Node, position: int) -> Argument:
        role = node.meta.get("desc")
        index = getattr(role, "idx", position)
        plain = type(role).__name__ == "PlainAOTInput" and 0 <= index < len(self.arguments)
        return self.arguments[index] if plain else Argument(node.name)

    def _primal(self, node: Node, name: str) -> str | None:
        """The graph input of an argument; a number is part of the trace."""
        number = not isinstance(node.meta.get("val"), torch.Tensor) and not node.users
        return None if number else self._input(node, name)

    def _input(self, node: Node, name: str) -> str:
        fake = node.meta.get("val")
        if not isinstance(fake, torch.Tensor) or any(not isinstance(d, int) for d in fake.shape):
            raise UnsupportedError(f"argument {name} is no tensor of fixed shape", "torch.compile(..., dynamic=False)")
        name = self.names.fresh(name)
        value = ir.Value(name=name, type=ir.TensorType(onnx_dtype(fake.dtype)))
        self.graph.inputs.append(value)
        self.t.bind(node, value)
        return name

    def _output(self, result: Any, name: str, phase: str) -> Any:
        if not isinstance(result, Node):
            return result
        if not isinstance(result.meta.get("val"), torch.Tensor):
            raise UnsupportedError(f"{name} is {result.meta.get('val')!r}, no tensor", "return tensors")
        value = self.t.env[result]
        if value.producer() is None or value.is_graph_output():
            dtype, dims = value.dtype, self.t.dims(value)
            assert dtype is not None
            value = self.t.typed(self.t.op("Identity", value), dtype, dims)
            producer = value.producer()
            assert producer is not None
            producer.metadata_props[PHASE_KEY] = phase
        value.name = self.names.fresh(name)
        self.graph.outputs.append(value)
        return value.name

    def _signature(
        self,
        kinds: Sequence[Argument],
        primals: Sequence[str | None],
        tangents: Sequence[str],
        outputs: Sequence[Any],
        gradients: Sequence[str | None],
        random: tuple[str, str] | None,
    ) -> Signature:
        """Roles for the passes. The first scalar float32 result with a tangent is the loss; else the first result is."""
        named = [o for o in outputs if isinstance(o, str)]
        if not named:
            raise UnsupportedError("the graph returns no tensor", "")
        of = dict(zip(primals, gradients, strict=False))
        loss, seed = named[0], None
        mapped = self._tangents_by_output(outputs, tangents)
        for output, tangent in mapped.items():
            value = next(v for v in self.graph.inputs if v.name == tangent)
            if value.dtype == ir.DataType.FLOAT and value.shape is not None and len(value.shape) == 0:
                loss, seed = output, tangent
                break
        cut = next((n for n in self.graph if n.metadata_props.get(PHASE_KEY) == "backward"), None)
        roles = [(k.kind, name) for k, name in zip(kinds, primals, strict=True) if name is not None]
        return Signature(
            loss=loss,
            inputs=tuple(n for kind, n in roles if kind == "input"),
            parameters=tuple(
                Parameter(n, trainable=of.get(n) is not None, gradient=of.get(n))
                for kind, n in roles
                if kind == "parameter"
            ),
            buffers=tuple(Buffer(n) for kind, n in roles if kind == "buffer"),
            outputs=tuple(dict.fromkeys(n for n in named if n != loss)),
            loss_gradient=seed,
            tangents={o: t for o, t in mapped.items() if t != seed},
            input_gradients={
                n: g for n, g in of.items() if n is not None and g is not None and (("parameter", n) not in roles)
            },
            states=()
            if random is None
            else (
                State("random_key", random[0], None, "random_key"),
                State("random_step", random[1], None, "random_step"),
            ),
            first_backward=None if cut is None else cut.name,
            metadata={"capture": f"torch.compile {torch.__version__}", WITH_OUTPUTS: "yes"},
        )

    def _tangents_by_output(self, outputs: Sequence[Any], tangents: Sequence[str]) -> dict[str, str]:
        """Tangent input by the forward result that it belongs to."""
        roles = torch.utils._pytree.tree_leaves(
            self.module.graph.output_node().meta.get("desc"), is_leaf=lambda x: x is None
        )
        found: dict[str, str] = {}
        for node, name in zip(self.tangents, tangents, strict=True):
            of = getattr(node.meta.get("desc"), "output", None)
            at = next((i for i, r in enumerate(roles[: len(outputs)]) if r is not None and r == of), None)
            output = outputs[at] if at is not None else None
            found[output if isinstance(output, str) and output not in found else f"of {name}"] = name
        return found


def _attribute(module: GraphModule, target: Any) -> torch.Tensor:
    value: Any = module
    for part in str(target).split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor) or isinstance(value, torch._subclasses.FakeTensor):
        raise UnsupportedError(f"the attribute {target} is {type(value).__name__}, no tensor", "")
    return value


def _is_float(node: Node) -> bool:
    return node.meta["val"].is_floating_point()
