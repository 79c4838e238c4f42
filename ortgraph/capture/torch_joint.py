"""Tracing of a PyTorch module into one joint forward+backward FX graph: the only place with private PyTorch API."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ortgraph.errors import CaptureError, OrtgraphError


@dataclasses.dataclass(frozen=True)
class Slot:
    """One input or output of the joint graph.

    Attributes:
        kind: Inputs: ``parameter``, ``buffer``, ``input``, ``tangent``. Outputs: ``output``, ``gradient`` (of a
            parameter), ``input_gradient``, ``buffer_update``.
        target: Module path of the parameter or buffer.
        index: Position among the module's inputs or outputs.
        node: The FX node; None for an output that does not exist (no gradient).
    """

    kind: str
    target: str
    index: int
    node: Node | None


@dataclasses.dataclass(frozen=True)
class JointTrace:
    """A traced joint graph; it is read and never run.

    Attributes:
        graph_module: The FX graph; every node has its fake value in ``meta["val"]``.
        inputs: Placeholders in order.
        outputs: Results in order.
        constants: Tensors that tracing lifted out of the code, by the ``target`` of their buffer slot.
        ranges: Range of each symbol, as text, by symbol.
    """

    graph_module: GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    constants: Mapping[str, torch.Tensor]
    ranges: Mapping[str, str]


def trace_joint(
    module: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    dynamic: tuple[set[int], ...],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> JointTrace:
    """Trace ``module(*args)`` and its backward.

    Args:
        module: Takes tensors, returns a tuple of tensors; those that require grad get a tangent input.
        args: Example inputs.
        dynamic: Per input its symbolic dimensions.
        decompositions: ATen operators to be decomposed while tracing.

    Raises:
        CaptureError: ``torch.export`` or AOTAutograd refuses the module (data-dependent control flow and the like).
    """
    dims = tuple({d: torch.export.Dim.DYNAMIC for d in sorted(axes)} or None for axes in dynamic)
    try:
        program = torch.export.export(module, args, strict=False, dynamic_shapes=(dims,) if any(dims) else None)
    except OrtgraphError:
        raise
    except Exception as error:  # noqa: BLE001 - torch.export raises many types; each becomes one sentence
        raise _refusal(error, "torch.export") from error
    exported = program.module(check_guards=False)
    constants = _constants_to_buffers(exported, set(program.graph_signature.buffers))
    fakes = _fake_inputs(program)
    try:
        with contextlib.ExitStack() as stack:  # a fake mode is active inside: touch no real tensor here
            graph_module = _aot_joint(stack, exported, fakes, decompositions)
    except Exception as error:  # noqa: BLE001 - as above
        raise _refusal(error, "AOTAutograd") from error
    ranges = {str(symbol): str(value) for symbol, value in program.range_constraints.items()}
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    output = graph_module.graph.output_node()
    results = torch.utils._pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None)
    roles = torch.utils._pytree.tree_leaves(output.meta["desc"], is_leaf=lambda x: x is None)
    return JointTrace(
        graph_module,
        tuple(_input_slot(node) for node in placeholders),
        tuple(_output_slot(role, node) for role, node in zip(roles, results, strict=True)),
        constants,
        ranges,
    )


def _aot_joint(
    stack: contextlib.ExitStack, exported: GraphModule, fakes: tuple[Any, ...], decompositions: Mapping[Any, Any]
) -> GraphModule:
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._guards import TracingContext, tracing

    fake_mode = next((f.fake_mode for f in fakes if hasattr(f, "fake_mode")), None)
    if fake_mode is not None:
        stack.enter_context(tracing(TracingContext(fake_mode)))
    return aot_export_joint_with_descriptors(stack, exported, fakes, decompositions=dict(decompositions)).graph_module


def _fake_inputs(program: torch.export.ExportedProgram) -> tuple[Any, ...]:
    user = set(program.graph_signature.user_inputs)
    return tuple(n.meta["val"] for n in program.graph.find_nodes(op="placeholder") if n.name in user)


def _constants_to_buffers(exported: GraphModule, buffers: set[str]) -> dict[str, torch.Tensor]:
    """AOTAutograd takes no plain tensor attributes: register those that the code lifted as buffers."""
    constants: dict[str, torch.Tensor] = {}
    for path, owner in exported.named_modules():
        for name, value in list(vars(owner).items()):
            if isinstance(value, torch.Tensor):
                delattr(owner, name)
                owner.register_buffer(name, value, persistent=False)
        for name, value in owner.named_buffers(recurse=False):
            target = f"{path}.{name}" if path else name
            if target not in buffers:
                constants[target] = value
    return constants


def _input_slot(node: Node) -> Slot:
    role = node.meta["desc"]
    kind = type(role).__name__
    if kind == "ParamAOTInput":
        return Slot("parameter", role.target, -1, node)
    if kind == "BufferAOTInput":
        return Slot("buffer", role.target, -1, node)
    if kind == "PlainAOTInput":
        return Slot("input", "", role.idx, node)
    if kind == "TangentAOTInput":
        return Slot("tangent", "", role.output.idx, node)
    raise CaptureError(f"the joint trace has an input of kind {kind} ({role})", "report this model")


def _output_slot(role: Any, node: Any) -> Slot:
    kind = type(role).__name__
    node = node if isinstance(node, Node) else None
    if role is None:
        return Slot("dropped", "", -1, None)
    if kind == "PlainAOTOutput":
        return Slot("output", "", role.idx, node)
    if kind == "GradAOTOutput":
        of = role.grad_of
        if type(of).__name__ == "ParamAOTInput":
            return Slot("gradient", of.target, -1, node)
        if type(of).__name__ == "PlainAOTInput":
            return Slot("input_gradient", "", of.idx, node)
        return Slot("dropped", "", -1, None)
    if kind == "InputMutationAOTOutput" and type(role.mutated_input).__name__ == "BufferAOTInput":
        return Slot("buffer_update", role.mutated_input.target, -1, node)
    if kind == "InputMutationAOTOutput":
        raise CaptureError(
            f"the module writes into {role.mutated_input} in place",
            "training inputs and parameters may not be changed by forward(); clone the tensor first",
        )
    raise CaptureError(f"the joint trace has an output of kind {kind} ({role})", "report this model")


def _refusal(error: Exception, by: str) -> CaptureError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    sentence = next((line for line in lines if not line.startswith("While executing")), type(error).__name__)
    place = next((line for line in reversed(lines) if line.startswith("File ")), "")
    hint = "replace Python control flow or .item() on tensor values by torch.where or torch.cond-free code"
    if "specializ" in str(error) or "Constraint" in type(error).__name__:
        hint = "leave this dimension out of dynamic=, or give an example batch in which it is at least 2"
    elif not any(word in str(error) for word in ("data-dependent", "DataDependent", "item()", "guard on", "branch")):
        hint = "run module(*batch) alone first; if that works, simplify the code at this place"
    where = f" at {place}" if place else ""
    return CaptureError(f"{by} cannot trace the module: {sentence} ({type(error).__name__}){where}", hint)
