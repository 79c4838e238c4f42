"""From a joint trace to a training graph: inputs, outputs and signature around the translated nodes."""

from __future__ import annotations

import dataclasses
import json
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir
import sympy
import torch

from ortgraph.analysis.size_conditions import METADATA_KEY
from ortgraph.capture.torch_batch import Batch
from ortgraph.capture.torch_constants import steps_of_constants
from ortgraph.capture.torch_dims import named_dim
from ortgraph.capture.torch_indices import index_notes
from ortgraph.capture.torch_joint import JointTrace, Slot
from ortgraph.capture.torch_module import Results
from ortgraph.capture.torch_source import user_path
from ortgraph.capture.torch_translate import Translation, onnx_dtype
from ortgraph.capture.torch_values import PASS
from ortgraph.errors import CaptureError
from ortgraph.graph.edit import PASS_KEY, PHASE_KEY
from ortgraph.graph.index_note import to_metadata
from ortgraph.graph.signature import Buffer, Parameter, Signature, State
from ortgraph.graph.training_graph import TrainingGraph
from ortgraph.ops.spec import COMPOSITE

logger = logging.getLogger(__name__)
IR_VERSION = 10
LOSS_GRADIENT = "loss_gradient"


class UnusedParameterWarning(UserWarning):
    """A trainable parameter that the loss does not depend on."""


@dataclasses.dataclass(frozen=True)
class Tensors:
    """Parameters or buffers by user name. A tensor with several names goes by the first.

    Attributes:
        values: Tensors by first name.
        first: First name by every name.
    """

    values: Mapping[str, torch.Tensor]
    first: Mapping[str, str]

    @staticmethod
    def of(named: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
        """Read the pairs of ``named_parameters(remove_duplicate=False)`` and the like."""
        values: dict[str, torch.Tensor] = {}
        first: dict[str, str] = {}
        seen: dict[int, str] = {}
        for path, tensor in named:
            name = user_path(path)
            first[name] = seen.setdefault(id(tensor), name)
            values.setdefault(first[name], tensor)
        return Tensors(values, first)

    def tied(self, name: str) -> tuple[str, ...]:
        """The further names of a tensor."""
        return tuple(n for n, f in self.first.items() if f == name and n != name)


class Assembly:
    """Builds the training graph of one trace."""

    def __init__(
        self,
        trace: JointTrace,
        batch: Batch,
        axes: Sequence[Mapping[int, str]],
        results: Results,
        parameters: Tensors,
        buffers: Tensors,
        opset: int,
    ) -> None:
        self.trace, self.batch, self.axes, self.results = trace, batch, axes, results
        self.parameters, self.buffers = parameters, buffers
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": opset, COMPOSITE: 1}, name="train")
        self.t = Translation(self.graph, self._symbols())
        self.names = self.t.build.names
        self.roles: dict[str, str] = {}  # role text → name in the graph
        self.states: tuple[State, ...] = ()

    def build(self, tangents: Sequence[str]) -> TrainingGraph:
        """Translate the trace and write inputs, outputs, signature and values."""
        self._name_inputs(tangents)
        self._reserve_outputs()
        self._bind_placeholders()
        self.trace.graph_module.graph.eliminate_dead_code(_is_kept)  # what only checks of values read needs no rule
        steps = self._steps()
        for node in self.trace.graph_module.graph.nodes:
            if node in steps:
                self.t.env[node] = self.t.build.const(to_numpy(steps[node]))
            elif node.op == "call_function":
                self.t.translate(node)
        signature = self._outputs(tangents)
        values = self._random_states()
        remove_dead(self.graph)
        self.t.raise_obstacles()
        cut = next((n for n in self.graph if n.metadata_props.get(PHASE_KEY) == "backward"), None)
        signature = signature.replace(states=self.states, first_backward=None if cut is None else cut.name)
        order = [name for _, name in signature.graph_inputs()]
        inputs = {v.name: v for v in self.graph.inputs}
        self.graph.inputs[:] = [inputs[n] for n in order]
        for name, tensor in (*self.parameters.values.items(), *self.buffers.values.items()):
            values[name] = to_numpy(tensor)
        model = ir.Model(self.graph, ir_version=IR_VERSION, producer_name="ortgraph")
        return TrainingGraph(model, signature, values)

    def _steps(self) -> dict[torch.fx.Node, torch.Tensor]:
        """Constants whose digits matter, by the node that they stand for."""
        lifted = {
            slot.node: self.trace.constants[slot.target]
            for slot in self.trace.inputs
            if slot.node is not None and slot.kind == "buffer" and slot.target in self.trace.constants
            and user_path(slot.target) not in self.buffers.first
        }  # fmt: skip
        return steps_of_constants(self.trace.graph_module.graph, lifted)

    # --- inputs --------------------------------------------------------------------------------------------------

    def _name_inputs(self, tangents: Sequence[str]) -> None:
        """Parameters and buffers keep their names whatever happens; a batch input of the same name gives way."""
        wanted = [(f"parameter:{n}", n) for n in self.parameters.values]
        wanted += [(f"buffer:{n}", n) for n in self.buffers.values]
        wanted += [(f"input:{i}", n) for i, n in enumerate(self.batch.names)]
        wanted.append(("loss_gradient", LOSS_GRADIENT))
        wanted += [(f"tangent:{n}", f"tangent/{n}") for n in tangents]
        self._reserve(wanted)

    def _reserve_outputs(self) -> None:
        wanted = [("loss", self.results.loss)]
        wanted += [(f"output:{n}", n) for n in self.results.names]
        wanted += [(f"gradient:{n}", f"gradient/{n}") for n in self.parameters.values]
        wanted += [(f"update:{n}", f"update/{n}") for n in self.buffers.values]
        self._reserve(wanted)

    def _reserve(self, wanted: Sequence[tuple[str, str]]) -> None:
        for role, name in wanted:
            self.roles[role] = self.names.fresh(name)
            if self.roles[role] != name:
                logger.warning("%s is called %r in the graph, since %r is taken", role, self.roles[role], name)

    def _bind_placeholders(self) -> None:
        made: dict[str, ir.Value] = {}
        for slot in self.trace.inputs:
            assert slot.node is not None
            constant = self.trace.constants.get(slot.target) if slot.kind == "buffer" else None
            if constant is not None and user_path(slot.target) not in self.buffers.first:
                self.t.env[slot.node] = self.t.build.const(to_numpy(constant), name=user_path(slot.target))
                continue
            if slot.kind == "tangent" and slot.index == 0:
                self.t.env[slot.node] = self._loss_seed(slot)
                continue
            name = self.roles[self._role(slot)]
            if name not in made:
                made[name] = ir.Value(name=name, type=ir.TensorType(onnx_dtype(slot.node.meta["val"].dtype)))
                self.graph.inputs.append(made[name])
            self.t.bind(slot.node, made[name])
        if not any(s.kind == "tangent" and s.index == 0 for s in self.trace.inputs):
            raise CaptureError(
                "the loss does not depend on any trainable parameter",
                "check requires_grad of the parameters and that forward() does not detach or run under no_grad",
            )
        self._bind_unread()

    def _role(self, slot: Slot) -> str:
        if slot.kind == "input":
            return f"input:{slot.index}"
        if slot.kind == "tangent":
            return f"tangent:{self.results.names[slot.index - 1]}"
        tensors = self.parameters if slot.kind == "parameter" else self.buffers
        return f"{slot.kind}:{tensors.first[user_path(slot.target)]}"

    def _loss_seed(self, slot: Slot) -> ir.Value:
        assert slot.node is not None
        seed = ir.Value(name=self.roles["loss_gradient"], shape=ir.Shape([]), type=ir.TensorType(ir.DataType.FLOAT))
        self.graph.inputs.append(seed)
        cast = self.t.cast(seed, onnx_dtype(slot.node.meta["val"].dtype))
        self._mark(cast, "backward")
        return cast

    def _bind_unread(self) -> None:
        """Tensors that the traced code never reads are inputs of the graph all the same."""
        present = {v.name for v in self.graph.inputs}
        tensors = [(f"parameter:{n}", v) for n, v in self.parameters.values.items()]
        tensors += [(f"buffer:{n}", v) for n, v in self.buffers.values.items()]
        for role, tensor in tensors:
            if self.roles[role] not in present:
                typed = ir.TensorType(onnx_dtype(tensor.dtype))
                self.graph.inputs.append(ir.Value(name=self.roles[role], shape=ir.Shape(tensor.shape), type=typed))

    def _symbols(self) -> dict[sympy.Symbol, sympy.Expr]:
        """The user's names of the trace's symbols. Equal sizes keep the name that comes first."""
        found: dict[sympy.Symbol, sympy.Expr] = {}
        for slot in self.trace.inputs:
            if slot.kind != "input":
                continue
            assert slot.node is not None
            for axis, name in self.axes[slot.index].items():
                size = slot.node.meta["val"].shape[axis]
                where = f"dimension {axis} of {self.batch.names[slot.index]!r}"
                if not isinstance(size, torch.SymInt):
                    raise CaptureError(
                        f"{where} cannot be symbolic ({name!r}): the module needs it to be {int(size)}",
                        "leave it out of dynamic=, or change the code that fixes it",
                    )
                expression = size.node.expr
                if not isinstance(expression, sympy.Symbol):
                    logger.warning("%s, named %r, is bound to be %s", where, name, expression)
                    continue
                known = found.setdefault(expression, named_dim(name))
                if known.name != name:
                    logger.warning("%s, named %r, is bound to equal %r", where, name, known.name)
        return found

    # --- outputs -------------------------------------------------------------------------------------------------

    def _outputs(self, tangents: Sequence[str]) -> Signature:
        slots = self.trace.outputs
        by_index = {s.index: s.node for s in slots if s.kind == "output"}
        loss = self._output("loss", self._value(by_index[0]))
        outputs = [
            self._output(f"output:{name}", self._value(by_index[i + 1])) for i, name in enumerate(self.results.names)
        ]
        gradients = self._gradients()
        unused = [n for n, v in self.parameters.values.items() if v.requires_grad and n not in gradients]
        if unused:
            text = f"the loss does not depend on {', '.join(unused)}: captured without gradient"
            warnings.warn(text, UnusedParameterWarning, stacklevel=5)
        input_gradients: dict[str, str] = {}
        updates: dict[str, str] = {}
        for slot in slots:
            if slot.kind == "input_gradient" and slot.node is not None:
                name = self.roles[f"input:{slot.index}"]
                role = f"input_gradient:{name}"
                self._reserve([(role, f"gradient/{name}")])
                input_gradients[name] = self._output(role, self._value(slot.node), "backward")
            if slot.kind == "buffer_update" and slot.node is not None:
                name = self.buffers.first[user_path(slot.target)]
                updates[name] = self._output(f"update:{name}", self._value(slot.node))
        return Signature(
            loss=loss,
            inputs=tuple(self.roles[f"input:{i}"] for i in range(len(self.batch.names))),
            parameters=tuple(
                Parameter(n, trainable=v.requires_grad, gradient=gradients.get(n), tied=self.parameters.tied(n))
                for n, v in self.parameters.values.items()
            ),
            buffers=tuple(Buffer(n, update=updates.get(n), tied=self.buffers.tied(n)) for n in self.buffers.values),
            outputs=tuple(outputs),
            loss_gradient=self.roles["loss_gradient"],
            tangents={self.roles[f"output:{n}"]: self.roles[f"tangent:{n}"] for n in tangents},
            input_gradients=input_gradients,
            metadata={
                "capture": f"torch {torch.__version__}",
                "limits": json.dumps(self._limits()),
                METADATA_KEY: json.dumps(self._conditions()),
                "unreached": "\n".join(unused),
                **self._renamed(),
                **self._index_notes(),
            },
        )

    def _index_notes(self) -> dict[str, str]:
        """Which data inputs are read as indices, as a metadata entry."""
        slots = {s.node: self.roles[self._role(s)] for s in self.trace.inputs if s.kind == "input" and s.node}
        return to_metadata(index_notes(iter(self.trace.graph_module.graph.nodes), slots, self.t.dim))

    def _renamed(self) -> dict[str, str]:
        """The user's names of inputs that had to give way, as a metadata entry; none when all kept theirs."""
        names = {self.roles[f"input:{i}"]: n for i, n in enumerate(self.batch.names)}
        changed = {k: n for k, n in names.items() if k != n}
        return {"renamed_inputs": json.dumps(changed)} if changed else {}

    def _gradients(self) -> dict[str, str]:
        """One gradient per tensor: those of tied names are summed."""
        parts: dict[str, list[ir.Value]] = {}
        for slot in self.trace.outputs:
            if slot.kind == "gradient" and slot.node is not None:
                parts.setdefault(self.parameters.first[user_path(slot.target)], []).append(self._value(slot.node))
        made: dict[str, str] = {}
        for name in self.parameters.values:
            if name not in parts:
                continue
            total = parts[name][0]
            for part in parts[name][1:]:
                total = self.t.op("Add", total, part)
                self._mark(total, "backward")
            made[name] = self._output(f"gradient:{name}", total, "backward")
        return made

    def _limits(self) -> dict[str, int]:
        """Largest size of each named dimension that the module takes (a table of positions, for example)."""
        found: dict[str, int] = {}
        for symbol, name in self._symbols().items():
            limit = self.trace.limits.get(str(symbol))
            if limit is not None:
                found[str(name)] = min(limit, found.get(str(name), limit))
        return found

    def _conditions(self) -> list[tuple[str, str]]:
        """What sizes have to fulfil, and the line of the module that asked; each condition once."""
        names = self._symbols()
        found: dict[str, str] = {}
        for asked in self.trace.asked:
            if asked.condition.free_symbols <= set(names):
                found.setdefault(asked.text(names), asked.place)
        return [(text, place) for text, place in found.items() if text != "True"]

    def _value(self, node: torch.fx.Node | None) -> ir.Value:
        assert node is not None
        return self.t.env[node]

    def _output(self, role: str, value: ir.Value, phase: str = "forward") -> str:
        """Let a value be the graph output of a role, under the role's name."""
        name = self.roles[role]
        if value.producer() is None or value.is_graph_output():
            copy = self.t.op("Identity", value)
            assert value.dtype is not None
            value = self.t.typed(copy, value.dtype, self.t.dims(value))
            self._mark(value, phase)
        value.name = name
        self.graph.outputs.append(value)
        return name

    def _mark(self, value: ir.Value, phase: str) -> None:
        producer = value.producer()
        if producer is not None and PHASE_KEY not in producer.metadata_props:
            producer.metadata_props[PHASE_KEY] = phase

    # --- randomness ----------------------------------------------------------------------------------------------

    def _random_states(self) -> dict[str, np.ndarray]:
        if self.t.random is None:
            return {}
        key, step = self.t.random
        add = ir.node("Add", [step, self.t.const(1, ir.DataType.INT64)], name=self.names.fresh("random_step.next"))
        add.metadata_props.update({PASS_KEY: PASS, PHASE_KEY: "forward"})
        first = next((n for n in self.graph if n.metadata_props.get(PHASE_KEY) == "backward"), None)
        if first is not None:
            self.graph.insert_before(first, add)
        else:
            self.graph.append(add)
        following = self.t.typed(add.outputs[0], ir.DataType.INT64, ())
        following.name = self.names.fresh(f"update/{step.name}")
        self.graph.outputs.append(following)
        assert key.name and step.name
        self.states = (
            State("random_key", key.name, None, "random_key"),
            State("random_step", step.name, following.name, "random_step"),
        )
        seed = torch.initial_seed() & (2**63 - 1)
        return {key.name: np.asarray(seed, np.int64), step.name: np.asarray(0, np.int64)}


def _is_kept(node: torch.fx.Node) -> bool:
    """Whether a node of the trace stays without a reader. Draws do: their numbers count the calls of the module."""
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op != "call_function" or random


def remove_dead(graph: ir.Graph) -> None:
    """Remove nodes that no output needs, then constants that nobody reads."""
    for node in reversed(tuple(graph)):
        if not any(o.uses() or o.is_graph_output() for o in node.outputs):
            graph.remove(node, safe=True)
    for name, value in tuple(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy of a tensor's values."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16)
    return tensor.numpy().copy()
