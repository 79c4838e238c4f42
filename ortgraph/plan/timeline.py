"""What fills the memory at each step of a sequence: live bytes by role, and the values alive at the peak."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from ortgraph.analysis.liveness import values_read
from ortgraph.graph import TrainingGraph
from ortgraph.graph.edit import MODULE_KEY, PHASE_KEY, static_shape
from ortgraph.manager.rewrite import op_key
from ortgraph.plan.graph_problem import GraphProblem
from ortgraph.plan.rebuild import RECOMPUTE_KEY
from ortgraph.plan.simulate import Lifetime, lifetimes, simulate

# In the order in which pictures stack them: what lives long at the bottom.
ROLES = ("outputs", "gradients", "activations", "recomputed", "temporaries")
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


@dataclasses.dataclass(frozen=True)
class Occupant:
    """A value that is alive at the peak.

    Attributes:
        name: The value.
        bytes: Its size.
        role: One of ROLES.
        operator: What makes it.
        module: Module path of its node in the user's model; empty where it is not known.
        phase: ``forward``, ``backward`` or ``optimizer``.
        shape: Its sizes.
        lower: Step that makes it.
        upper: Last step that reads it.
    """

    name: str
    bytes: int
    role: str
    operator: str
    module: str
    phase: str
    shape: tuple[int, ...]
    lower: int
    upper: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A sequence as a picture shows it.

    Attributes:
        bands: int64 [steps] by role; they sum to the live bytes of ``simulate``.
        peak_step: First step with the most live bytes.
        backward_step: First step of the backward half; None when there is none.
        occupants: What is alive at the peak, largest first. With the scratch of the step they sum to the peak.
        scratch: Scratch of the peak step.
    """

    bands: dict[str, np.ndarray]
    peak_step: int
    backward_step: int | None
    occupants: tuple[Occupant, ...]
    scratch: int

    @property
    def live(self) -> np.ndarray:
        """Live bytes at each step."""
        return np.sum(list(self.bands.values()), axis=0)


@dataclasses.dataclass(frozen=True)
class Roles:
    """Phase of every operation, and what each value is for, of one problem."""

    problem: GraphProblem
    phases: tuple[str, ...]
    gradients: frozenset[int]

    def of(self, life: Lifetime, first: bool, backward_step: int | None) -> str:
        """The role of an evaluation of a value.

        Args:
            life: The evaluation.
            first: Nothing has evaluated the value before.
            backward_step: See Timeline.
        """
        operations = self.problem.operations
        made = operations.producer[life.value]
        if life.value in self.gradients:
            return "gradients"
        if operations.values[life.value].kept:
            return "outputs"
        if not first or RECOMPUTE_KEY in self.problem.nodes[made].metadata_props:
            return "recomputed"
        saved = self.phases[made] == FORWARD and backward_step is not None and life.upper > backward_step
        return "activations" if saved else "temporaries"


def find_roles(graph: TrainingGraph, problem: GraphProblem) -> Roles:
    """Forward is what the loss and the model's outputs need; backward what gradients need besides; the rest updates.

    A node outside the forward half keeps the phase that it was captured with, where it has one: a mask that only the
    backward half reads is made by a forward node.
    """
    signature = graph.signature
    outputs = {v.name: v for v in graph.graph.outputs}

    def ancestors(names: Collection[str]) -> set[ir.Node]:
        found: set[ir.Node] = set()
        stack = [outputs[n].producer() for n in names if n in outputs]
        while stack:
            node = stack.pop()
            if node is not None and node not in found:
                found.add(node)
                stack.extend(v.producer() for v in values_read(node))
        return found

    forward = ancestors([signature.loss, *signature.outputs])
    backward = ancestors([*signature.gradients.values(), *signature.input_gradients.values()])
    phases = []
    for node in problem.nodes:
        recorded = node.metadata_props.get(PHASE_KEY)
        copied = RECOMPUTE_KEY in node.metadata_props
        if node in forward or (recorded == FORWARD and not copied):
            phases.append(FORWARD)
        else:
            phases.append(BACKWARD if node in backward or copied else OPTIMIZER)
    index = {storage: v for v, storage in enumerate(problem.storages)}
    views = {o: node for node in problem.views for o in node.outputs}
    gradients = set()
    for name in signature.gradients.values():
        value = outputs.get(name)
        while value is not None and value not in index and value in views:
            value = next((i for i in views[value].inputs if i is not None), None)
        if value is not None and value in index:
            gradients.add(index[value])
    return Roles(problem, tuple(phases), frozenset(gradients))


def timeline(roles: Roles, sequence: Sequence[int]) -> Timeline:
    """Bands, peak and what is alive there, of a valid sequence.

    Raises:
        PlanError: The sequence is not valid.
    """
    operations = roles.problem.operations
    profile = simulate(operations, sequence)
    peak = int(np.argmax(profile.live)) if len(sequence) else 0
    change = {role: np.zeros(len(sequence) + 1, dtype=np.int64) for role in ROLES}
    backward = next((t for t, i in enumerate(sequence) if roles.phases[i] == BACKWARD), None)
    born: dict[int, int] = {}
    dies: dict[tuple[int, int], tuple[int, str]] = {}
    labelled: list[tuple[Lifetime, str]] = []
    for life in lifetimes(operations, sequence):
        role = roles.of(life, born.setdefault(life.value, life.lower) == life.lower, backward)
        labelled.append((life, role))
        size = operations.values[life.value].size
        change[role][life.lower] += size
        change[role][life.upper] -= size
        dies[life.value, life.upper - 1] = (life.lower, role)
    bands = {role: np.cumsum(c[:-1]) for role, c in change.items()}
    gone: set[int] = set()  # written over by the step of the peak: its bytes are counted as the result's
    for t, i in enumerate(sequence):
        operation = operations.operations[i]
        bands["temporaries"][t] += operation.scratch
        taken: set[int] = set()
        for source, result in operation.inplace:
            made, role = dies.get((source, t), (t, ""))
            if source in taken or result in taken or made == t:
                continue
            taken |= {source, result}
            bands[role][t] -= operations.values[result].size
            if t == peak:
                gone.add(source)
    alive = [(life, role) for life, role in labelled if life.lower <= peak < life.upper and life.value not in gone]
    occupants = [_occupant(roles, life, role) for life, role in alive if operations.values[life.value].size]
    occupants.sort(key=lambda o: (-o.bytes, o.lower, o.name))
    scratch = operations.operations[sequence[peak]].scratch if len(sequence) else 0
    return Timeline(bands, peak, backward, tuple(occupants), scratch)


def _occupant(roles: Roles, life: Lifetime, role: str) -> Occupant:
    problem = roles.problem
    made = problem.operations.producer[life.value]
    node, storage = problem.nodes[made], problem.storages[life.value]
    return Occupant(
        problem.operations.values[life.value].name,
        problem.operations.values[life.value].size,
        role,
        op_key(node),
        node.metadata_props.get(MODULE_KEY, ""),
        roles.phases[made],
        static_shape(storage) or (),
        life.lower,
        life.upper - 1,
    )


def recomputed_operators(problem: GraphProblem, sequence: Sequence[int]) -> dict[str, int]:
    """Evaluations beyond the first by operator, those of an earlier plan included; most frequent first."""
    seen: set[int] = set()
    counts: Counter[str] = Counter()
    for i in sequence:
        if i in seen or RECOMPUTE_KEY in problem.nodes[i].metadata_props:
            counts[op_key(problem.nodes[i])] += 1
        seen.add(i)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
