"""Attaching an optimizer: the update of every trainable parameter becomes part of the graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from ortgraph.errors import PassError, SignatureError
from ortgraph.graph import Names, Parameter, Signature, State, TrainingGraph
from ortgraph.graph.edit import PHASE_KEY, take_type
from ortgraph.ops.builder import Builder
from ortgraph.ops.spec import COMPOSITE
from ortgraph.optim.adamw import AdamW

BY = "attach-optimizer"
LEARNING_RATE = "learning_rate"
BEFORE = ("captured", "optimized", "cast")
CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6


def attach(graph: TrainingGraph, optimizer: AdamW, accumulation_steps: int = 1) -> int:
    """Add the update of every trainable parameter, its states and the learning-rate input, in place.

    The graph gets a scalar float32 input ``learning_rate``, an int64 state ``step`` (counts finished updates), states
    ``exp_avg/<name>`` and ``exp_avg_sq/<name>``, and per parameter an output ``update/<name>``. With more than one
    accumulation step also ``accumulator/<name>``, whose output is accumulator + gradient; updates then use that sum.
    States have no values: they start at zero. The stage is left to the caller.

    Args:
        graph: At stage captured, optimized or cast.
        optimizer: What to attach.
        accumulation_steps: Micro-batches per update.

    A trainable parameter that the loss does not reach (a capture says which) is left as it is, as PyTorch's
    optimizers leave parameters whose ``grad`` is None.

    Returns:
        The number of parameters that are updated.

    Raises:
        PassError: The graph has an optimizer already, is at a later stage, or has no trainable parameter.
        SignatureError: A trainable parameter has no gradient.
    """
    signature = graph.signature
    if signature.stage not in BEFORE or LEARNING_RATE in signature.scalars:
        raise PassError(
            f"a graph at stage {signature.stage} cannot get an optimizer (again)", "start from the captured graph"
        )
    if accumulation_steps < 1:
        raise PassError(f"accumulation_steps={accumulation_steps}", "at least 1")
    reached = reached_parameters(signature)
    if not reached:
        raise PassError("the graph has no trainable parameter", "set requires_grad, or name parameters with trainable=")
    _Attach(graph, optimizer, accumulation_steps).run(reached)
    return len(reached)


def reached_parameters(signature: Signature) -> tuple[Parameter, ...]:
    """Trainable parameters without those that capture found the loss not to depend on."""
    unreached = signature.metadata.get("unreached", "").split("\n")
    return tuple(p for p in signature.trainable if p.gradient is not None or p.name not in unreached)


class _Attach:
    """One attachment: the graph, where nodes go, and what the signature gains."""

    def __init__(self, graph: TrainingGraph, optimizer: AdamW, accumulation_steps: int) -> None:
        self.graph, self.optimizer, self.accumulation_steps = graph, optimizer, accumulation_steps
        self.build = Builder(graph.graph, BY, names=Names(graph.graph))
        self.inputs = {v.name: v for v in graph.graph.inputs}
        self.outputs = {v.name: v for v in graph.graph.outputs}
        self.states: list[State] = []

    def run(self, parameters: Sequence[Parameter]) -> None:
        signature = self.graph.signature
        self.rate = self._input(LEARNING_RATE, ir.DataType.FLOAT, ())
        step = self._input("optimizer.step", ir.DataType.INT64, ())
        step_next = self._output(
            self.build.op("Add", step, self.build.const(1, ir.DataType.INT64), name="step"), "optimizer.step.next"
        )
        self.states.append(State("step", step.name or "", step_next.name, "step"))
        gradients = {p.name: self._gradient(p) for p in parameters}
        if self.accumulation_steps > 1:
            gradients = {p.name: self._accumulate(p, gradients[p.name]) for p in parameters}
        scale = self._clip(list(gradients.values()))
        updated = {p.name: self._update(p, gradients[p.name], step_next, scale) for p in parameters}
        for node in self.build.made:
            node.metadata_props[PHASE_KEY] = "optimizer"
        self.graph.signature = signature.replace(
            parameters=tuple(updated.get(p.name, p) for p in signature.parameters),
            states=(*signature.states, *self.states),
            scalars={**signature.scalars, LEARNING_RATE: self.optimizer.lr},
            metadata={
                **signature.metadata,
                "optimizer": str(self.optimizer),
                "accumulation_steps": str(self.accumulation_steps),
            },
        )

    def _input(self, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
        value = ir.Value(name=self.build.names.fresh(name), type=ir.TensorType(dtype), shape=ir.Shape(shape))
        if name == LEARNING_RATE and value.name != name:
            raise PassError(f"the graph has a value called {name!r} already", "rename that input of the model")
        self.graph.graph.inputs.append(value)
        return value

    def _output(self, value: ir.Value, name: str) -> ir.Value:
        value.name = self.build.names.fresh(name)
        self.graph.graph.outputs.append(value)
        return value

    def _gradient(self, parameter: Parameter) -> ir.Value:
        value = self.outputs.get(parameter.gradient)
        if value is None:
            raise SignatureError(
                f"trainable parameter {parameter.name!r} has no gradient", "freeze it, or capture the graph again"
            )
        weight = self.inputs[parameter.name]
        if value.dtype is None and weight.dtype is not None:
            value.dtype = weight.dtype
        if value.shape is None or not value.shape.is_static():
            value.shape = weight.shape.copy()  # type: ignore[union-attr]
        return value

    def _state(self, prefix: str, parameter: Parameter) -> tuple[str, ir.Value]:
        weight = self.inputs[parameter.name]
        assert weight.dtype is not None and weight.shape is not None
        name = f"{prefix}/{parameter.name}"
        return name, self._input(name, weight.dtype, tuple(weight.shape))  # type: ignore[arg-type]

    def _keep(self, name: str, old: ir.Value, new: ir.Value, kind: str, parameter: Parameter) -> ir.Value:
        new = self._output(new, f"{name}/next")
        self.states.append(State(name, old.name or "", new.name, kind, parameter.name))
        return new

    def _accumulate(self, parameter: Parameter, gradient: ir.Value) -> ir.Value:
        name, old = self._state("accumulator", parameter)
        return self._keep(name, old, self.build.op("Add", old, gradient, name="accumulate"), "accumulator", parameter)

    def _clip(self, gradients: list[ir.Value]) -> ir.Value | None:
        """min(1, max_norm / (global norm + 1e-6)), a float32 scalar."""
        limit = self.optimizer.max_grad_norm
        if limit is None:
            return None
        b = self.build
        squares = [b.op("ReduceSumSquare", self._float(g), keepdims=0, name="clip") for g in gradients]
        total = squares[0] if len(squares) == 1 else b.op("Sum", *squares, name="clip")
        norm = b.op("Add", b.op("Sqrt", total, name="clip"), b.const(CLIP_EPSILON, ir.DataType.FLOAT), name="clip")
        scale = b.op("Div", b.const(limit, ir.DataType.FLOAT), norm, name="clip")
        return b.op("Min", scale, b.const(1.0, ir.DataType.FLOAT), name="clip")

    def _float(self, value: ir.Value) -> ir.Value:
        if value.dtype == ir.DataType.FLOAT:
            return value
        return self.build.op("Cast", value, to=ir.DataType.FLOAT, name="clip")

    def _update(self, parameter: Parameter, gradient: ir.Value, step: ir.Value, scale: ir.Value | None) -> Parameter:
        settings = self.optimizer.settings(parameter.name)
        rate = self.rate
        if settings.lr_scale != 1.0:
            rate = self.build.op(
                "Mul", rate, self.build.const(settings.lr_scale, ir.DataType.FLOAT), name="learning_rate"
            )
        weight = self.inputs[parameter.name]
        kinds = {"exp_avg": "moment1", "exp_avg_sq": "moment2"}
        named = [self._state(prefix, parameter) for prefix in kinds]
        moments = [value for _, value in named]
        inputs = [rate, step, weight, gradient, *moments, *([scale] if scale is not None else [])]
        made = self.build.multi(
            "AdamW", *inputs, outputs=3, domain=COMPOSITE, name="adamw",
            beta1=settings.betas[0], beta2=settings.betas[1], epsilon=settings.eps, weight_decay=settings.weight_decay,
        )  # fmt: skip
        for value in made:
            take_type(value, weight)
        new = self._output(made[0], f"update/{parameter.name}")
        for (name, old), value, kind in zip(named, made[1:], kinds.values(), strict=True):
            self._keep(name, old, value, kind, parameter)
        return dataclasses.replace(parameter, update=new.name, group=self.optimizer.group_of(parameter.name))
