"""The signature of a training graph: which graph input and output plays which role.

Stored as JSON under ``ortgraph.signature`` in the model's metadata, so that it survives every tool that keeps
metadata. All names are names of graph inputs or outputs; parameters and buffers carry their original module names.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from ortgraph.errors import SignatureError

VERSION = 1
STAGES = ("captured", "optimized", "cast", "stepped", "lowered", "planned")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A weight: a graph input without initializer.

    Attributes:
        name: Graph input, the original module name (``encoder.layer.0.weight``).
        trainable: Whether the optimizer updates it. A frozen parameter has no gradient.
        gradient: Graph output holding d loss / d parameter, same shape and dtype; None when frozen.
        update: Graph output holding the new value, once an optimizer is attached.
        tied: Further module names of the same tensor. It has one gradient and one optimizer state.
        group: Index of the optimizer's parameter group.
        reduced: Graph input that the update reads in place of the gradient, where the optimizer is attached for several
            processes: between program ``backward`` and program ``update`` they sum it.
        contribution: Graph output of ``backward`` that replaces it: this process's gradient, or its running sum.
    """

    name: str
    trainable: bool = True
    gradient: str | None = None
    update: str | None = None
    tied: tuple[str, ...] = ()
    group: int = 0
    reduced: str | None = None
    contribution: str | None = None


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A module buffer (running statistics and the like): a graph input, updated by a graph output or constant."""

    name: str
    update: str | None = None
    tied: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class State:
    """A persistent value that the step reads and writes.

    Attributes:
        name: Name in checkpoints (``exp_avg/encoder.layer.0.weight``).
        input: Graph input.
        output: Graph output with the next value; None when the step leaves it unchanged (the random key).
        kind: ``moment1``, ``moment2``, ``step``, ``accumulator``, ``loss_scale`` (float32 scalar), ``good_steps`` and
            ``skipped_steps`` (int64 scalars), ``random_key`` (int64 scalar), ``random_step`` (int64 scalar, advances at
            every run that draws).
        parameter: The parameter that it belongs to, if any.
        initial: Every element before the first step, unless the graph holds a value.
    """

    name: str
    input: str
    output: str | None
    kind: str
    parameter: str | None = None
    initial: float = 0.0


@dataclasses.dataclass(frozen=True)
class Signature:
    """Roles of all graph inputs and outputs.

    Attributes:
        stage: One of STAGES.
        inputs: Data inputs (the batch), in the order of the example batch.
        parameters: Trainable and frozen weights.
        buffers: Module buffers.
        loss: Graph output with the scalar loss.
        outputs: Further outputs of the model, under their original names.
        loss_gradient: float32 scalar graph input, the seed of the backward half; None if the graph has none.
        tangents: Per further differentiable output its tangent input (same shape), if asked for.
        input_gradients: Per data input its gradient output, where asked for.
        states: Optimizer moments, counters, random key, accumulators.
        scalars: Further scalar inputs fed at each run, with their default (``learning_rate``).
        first_backward: Name of the first backward node (the cut); None if unknown.
        metadata: Free text entries (optimizer text, pipeline text, capture options).
    """

    loss: str
    stage: str = "captured"
    inputs: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    outputs: tuple[str, ...] = ()
    loss_gradient: str | None = None
    tangents: dict[str, str] = dataclasses.field(default_factory=dict)
    input_gradients: dict[str, str] = dataclasses.field(default_factory=dict)
    states: tuple[State, ...] = ()
    scalars: dict[str, float] = dataclasses.field(default_factory=dict)
    first_backward: str | None = None
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise SignatureError(f"unknown stage {self.stage!r}", f"one of {', '.join(STAGES)}")
        if self.version != VERSION:
            raise SignatureError(f"signature version {self.version}, this release reads {VERSION}", "update ortgraph")

    def replace(self, **changes: object) -> Signature:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @property
    def trainable(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.trainable)

    @property
    def gradients(self) -> dict[str, str]:
        """Gradient output by parameter name."""
        return {p.name: p.gradient for p in self.parameters if p.gradient is not None}

    @property
    def reduces(self) -> bool:
        """Whether gradients are summed over processes between backward and update."""
        return any(p.reduced is not None for p in self.parameters)

    def graph_inputs(self) -> Iterator[tuple[str, str]]:
        """(role, name) of every graph input."""
        for name in self.inputs:
            yield "input", name
        for p in self.parameters:
            yield ("parameter" if p.trainable else "frozen"), p.name
            if p.reduced is not None:
                yield "reduced", p.reduced
        for b in self.buffers:
            yield "buffer", b.name
        for s in self.states:
            yield "state", s.input
        if self.loss_gradient is not None:
            yield "loss_gradient", self.loss_gradient
        for name in self.tangents.values():
            yield "tangent", name
        for name in self.scalars:
            yield "scalar", name

    def graph_outputs(self) -> Iterator[tuple[str, str]]:
        """(role, name) of every graph output. A name may play two roles (a loss that is also an output)."""
        yield "loss", self.loss
        for name in self.outputs:
            yield "output", name
        for p in self.parameters:
            if p.gradient is not None:
                yield "gradient", p.gradient
            if p.update is not None:
                yield "update", p.update
            if p.contribution is not None:
                yield "contribution", p.contribution
        for name in self.input_gradients.values():
            yield "input_gradient", name
        for b in self.buffers:
            if b.update is not None:
                yield "buffer_update", b.update
        for s in self.states:
            if s.output is not None:
                yield "state_update", s.output

    def pairs(self) -> Iterator[tuple[str, str]]:
        """(input, output) of every persistent value that a step replaces."""
        for p in self.parameters:
            if p.update is not None:
                yield p.name, p.update
            if p.reduced is not None and p.contribution is not None:
                yield p.reduced, p.contribution
        for b in self.buffers:
            if b.update is not None:
                yield b.name, b.update
        for s in self.states:
            if s.output is not None:
                yield s.input, s.output

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Signature:
        try:
            d = json.loads(text)
            d["parameters"] = tuple(Parameter(**{**p, "tied": tuple(p["tied"])}) for p in d["parameters"])
            d["buffers"] = tuple(Buffer(**{**b, "tied": tuple(b["tied"])}) for b in d["buffers"])
            d["states"] = tuple(State(**s) for s in d["states"])
            d["inputs"], d["outputs"] = tuple(d["inputs"]), tuple(d["outputs"])
            return Signature(**d)
        except (ValueError, KeyError, TypeError) as error:
            raise SignatureError(f"the stored signature does not parse: {error}", "capture the graph again") from error
