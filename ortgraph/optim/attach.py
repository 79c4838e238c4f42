"""Attaching an optimizer: the update of every trainable parameter becomes part of the graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ortgraph.errors import PassError, SignatureError
from ortgraph.graph import Parameter, Signature, TrainingGraph
from ortgraph.graph.edit import take_type
from ortgraph.ops.spec import COMPOSITE
from ortgraph.optim.base import Optimizer
from ortgraph.optim.frame import Frame
from ortgraph.optim.guard import Guard, make_guard, scale_backward, scaled_gradient

BY = "attach-optimizer"
LEARNING_RATE = "learning_rate"
BEFORE = ("captured", "optimized", "cast")


def attach(graph: TrainingGraph, optimizer: Optimizer, accumulation_steps: int = 1, distributed: bool = False) -> int:
    """Add the update of every trainable parameter, its states and the learning-rate input, in place.

    The graph gets a scalar float32 input ``learning_rate``, an int64 state ``step`` (counts finished updates), the
    optimizer's states (``exp_avg/<name>`` and ``exp_avg_sq/<name>`` of AdamW), and per parameter an output
    ``update/<name>``. With more than one accumulation step also ``accumulator/<name>``, whose output is accumulator +
    gradient; updates then use that sum. With a loss scale also the states of ``ortgraph.optim.guard``; the seed of the
    backward half is then multiplied by the scale inside the graph, and gradient outputs are divided by it. States have
    no values: they start at their ``initial``. The stage is left to the caller.

    Args:
        graph: At stage captured, optimized or cast.
        optimizer: What to attach.
        accumulation_steps: Micro-batches per update.
        distributed: Per parameter an input ``reduced/<name>``, from which everything behind the gradients is computed
            (sums of micro-batches, clipping, the overflow test, updates), and which program ``backward`` replaces by its
            own gradient, or by its sum with it where micro-batches add up. No accumulators then.

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
    _Attach(graph, optimizer, accumulation_steps, distributed).run(reached)
    return len(reached)


def reached_parameters(signature: Signature) -> tuple[Parameter, ...]:
    """Trainable parameters without those that capture found the loss not to depend on."""
    unreached = signature.metadata.get("unreached", "").split("\n")
    return tuple(p for p in signature.trainable if p.gradient is not None or p.name not in unreached)


class _Attach:
    """One attachment: a frame for what it adds, and the optimizer."""

    def __init__(self, graph: TrainingGraph, optimizer: Optimizer, accumulation_steps: int, distributed: bool) -> None:
        self.graph, self.optimizer, self.accumulation_steps = graph, optimizer, accumulation_steps
        self.distributed = distributed
        self.frame = Frame(graph, BY)
        self.contributed: set[ir.Value] = set()
        self.rates: dict[float, ir.Value] = {}  # learning rate by its factor, one for each group

    def run(self, parameters: Sequence[Parameter]) -> None:
        frame, optimizer, signature = self.frame, self.optimizer, self.graph.signature
        self.rates[1.0] = frame.add_input(LEARNING_RATE, ir.DataType.FLOAT, exact=True)
        step = frame.add_input("optimizer.step", ir.DataType.INT64)
        attempt = frame.op("Add", step, frame.build.const(1, ir.DataType.INT64), name="step")
        for parameter in parameters:
            self._check_gradient(parameter)
        policy, scale = optimizer.loss_scale, None
        scaled: dict[ir.Value, ir.Value] = {}
        if policy is not None:
            scale, scaled = scale_backward(frame)
        gradients = {p.name: scaled_gradient(frame.outputs[p.gradient or ""], scaled) for p in parameters}
        roles: dict[str, dict[str, Any]] = {}
        if self.distributed:
            roles = {p.name: self._reduced(p, gradients) for p in parameters}
        elif self.accumulation_steps > 1:
            gradients = {p.name: self._accumulate(p, gradients[p.name]) for p in parameters}
        guard = make_guard(frame, list(gradients.values()), optimizer.max_grad_norm, policy, scale)
        counted = attempt if guard.skip is None else frame.op("Where", guard.skip, step, attempt, name="step")
        frame.keep("step", step, counted, "step", output="optimizer.step.next")
        updated = {
            p.name: dataclasses.replace(self._update(p, gradients[p.name], attempt, guard), **roles.get(p.name, {}))
            for p in parameters
        }
        frame.mark()
        self.graph.signature = signature.replace(
            parameters=tuple(updated.get(p.name, p) for p in signature.parameters),
            states=(*signature.states, *frame.states),
            scalars={**signature.scalars, LEARNING_RATE: optimizer.lr},
            metadata={
                **signature.metadata,
                "optimizer": str(optimizer),
                "accumulation_steps": str(self.accumulation_steps),
            },
        )

    def _check_gradient(self, parameter: Parameter) -> None:
        """The gradient is there, with dtype and shape recorded."""
        value = self.frame.outputs.get(parameter.gradient or "")
        if value is None:
            raise SignatureError(
                f"trainable parameter {parameter.name!r} has no gradient", "freeze it, or capture the graph again"
            )
        weight = self.frame.inputs[parameter.name]
        if value.dtype is None and weight.dtype is not None:
            value.dtype = weight.dtype
        if value.shape is None or not value.shape.is_static():
            value.shape = weight.shape.copy()  # type: ignore[union-attr]

    def _state(self, prefix: str, parameter: Parameter) -> tuple[str, ir.Value]:
        weight = self.frame.inputs[parameter.name]
        assert weight.dtype is not None and weight.shape is not None
        name = f"{prefix}/{parameter.name}"
        return name, self.frame.add_input(name, weight.dtype, tuple(weight.shape))

    def _accumulate(self, parameter: Parameter, gradient: ir.Value) -> ir.Value:
        name, old = self._state("accumulator", parameter)
        total = self.frame.op("Add", old, gradient, name="accumulate")
        self.frame.keep(name, old, total, "accumulator", parameter=parameter.name)
        return total

    def _reduced(self, parameter: Parameter, gradients: dict[str, ir.Value]) -> dict[str, str]:
        """Put an input in the gradient's place; the two roles that say so."""
        frame, own, weight = self.frame, gradients[parameter.name], self.frame.inputs[parameter.name]
        assert weight.dtype is not None and weight.shape is not None
        reduced = frame.add_input(f"reduced/{parameter.name}", weight.dtype, tuple(weight.shape))
        gradients[parameter.name] = reduced
        if self.accumulation_steps > 1:
            own = frame.op("Add", reduced, own, name="accumulate")
        elif own.producer() is None or own in self.contributed or own.is_graph_output():
            own = frame.op("Identity", own, name="contribution")
        take_type(own, weight)
        self.contributed.add(own)
        return {"reduced": reduced.name or "", "contribution": frame.add_output(own, f"{reduced.name}/own").name or ""}

    def _rate(self, factor: float) -> ir.Value:
        if factor not in self.rates:
            made = self.frame.op("Mul", self.rates[1.0], self.frame.number(factor), name="learning_rate")
            self.rates[factor] = made
        return self.rates[factor]

    def _update(self, parameter: Parameter, gradient: ir.Value, step: ir.Value, guard: Guard) -> Parameter:
        frame, settings = self.frame, self.optimizer.settings(parameter.name)
        weight = frame.inputs[parameter.name]
        kinds = self.optimizer.states(settings)
        named = [self._state(prefix, parameter) for prefix, _ in kinds]
        states: list[ir.Value | None] = [value for _, value in named]
        states += [None] * (self.optimizer.STATES - len(states))
        inputs = [self._rate(settings.lr_scale), step, weight, gradient, *states, guard.scale, guard.skip]
        while inputs[-1] is None:
            inputs.pop()
        composite = self.optimizer.COMPOSITE
        made = frame.build.multi(
            composite, *inputs, outputs=1 + len(named), domain=COMPOSITE, name=composite.lower(),
            **self.optimizer.attributes(settings),
        )  # fmt: skip
        for value in made:
            take_type(value, weight)
        new = frame.add_output(made[0], f"update/{parameter.name}")
        for (name, old), value, (_, kind) in zip(named, made[1:], kinds, strict=True):
            frame.keep(name, old, value, kind, parameter=parameter.name)
        return dataclasses.replace(parameter, update=new.name, group=self.optimizer.group_of(parameter.name))
