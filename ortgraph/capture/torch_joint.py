"""Tracing of a PyTorch module into one joint forward+backward FX graph: the only place with private PyTorch API."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from ortgraph.capture.torch_lost import refuse_full_dropout, refuse_parameter_hooks, watch_lost
from ortgraph.capture.torch_sizes import Asked, watch_sizes
from ortgraph.capture.torch_source import running_module, user_frame, user_path
from ortgraph.errors import CaptureError, OrtgraphError, UnsupportedError

_DIMENSION = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]")

# What torch.export stumbles over where forward() differentiates: autograd.grad with a graph, torch.func.grad and the like.
_OF_DERIVATIVES = ("fake tensor in the exported program constant", "functorch tensor", "has no attribute 'constant'")

# PyTorch's loggers that repeat, with a traceback, what the error says
_LOUD = {
    "torch.fx.experimental.symbolic_shapes": logging.ERROR,
    "torch._subclasses.fake_tensor": logging.CRITICAL,
}


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
        limits: Largest size that the module takes, by symbol, where there is one.
        asked: What its code asked about sizes, as it was answered.
    """

    graph_module: GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    constants: Mapping[str, torch.Tensor]
    limits: Mapping[str, int]
    asked: Sequence[Asked]


def trace_joint(
    module: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    dynamic: tuple[set[int], ...],
    decompositions: Mapping[Any, Callable[..., Any]],
    names: Sequence[str],
) -> JointTrace:
    """Trace ``module(*args)`` and its backward.

    Args:
        module: Takes tensors, returns a tuple of tensors; those that require grad get a tangent input.
        args: Example inputs.
        dynamic: Per input its symbolic dimensions.
        decompositions: ATen operators to be decomposed while tracing.
        names: The inputs' names, for messages.

    Raises:
        CaptureError: ``torch.export`` or AOTAutograd refuses the module (data-dependent control flow and the like).
    """
    refuse_parameter_hooks(module)
    refuse_full_dropout(module)
    _refuse_sparse({**dict(module.named_parameters()), **dict(module.named_buffers())}, zip(names, args, strict=True))
    dims = tuple({d: torch.export.Dim.DYNAMIC for d in sorted(axes)} or None for axes in dynamic)
    try:
        with _tracing(), watch_sizes() as asked, watch_lost(module) as lost:
            program = torch.export.export(module, args, strict=False, dynamic_shapes=(dims,) if any(dims) else None)
    except UnsupportedError as error:  # of a substitute
        path, place = _running(error, module)
        raise UnsupportedError(f"{error.what} (module {path or '<root>'}, {place})", error.hint) from error
    except OrtgraphError:
        raise
    except Exception as error:  # noqa: BLE001 - torch.export raises many types; each becomes one sentence
        if any(dims) or not any(words in str(error) for words in _OF_DERIVATIVES):
            raise _refusal(error, "torch.export", names, module) from error
        program = None
    constants: dict[str, torch.Tensor] = {}
    limits: Mapping[Any, Any] = {}
    # where export lost a backward or holds none, AOTAutograd traces the module itself: autograd runs what the user wrote
    source = module
    if program is not None:
        exported = program.module(check_guards=False)
        constants = _constants_to_buffers(exported, set(program.graph_signature.buffers))
        limits = program.range_constraints
        source = module if lost else exported
    try:
        with (
            _tracing(),
            watch_sizes() as later,
            contextlib.ExitStack() as stack,
        ):  # a fake mode is active inside: touch no real tensor here
            fakes = _static_fakes(args) if program is None else _fake_inputs(program)
            graph_module = _aot_joint(stack, source, fakes, decompositions)
    except Exception as error:  # noqa: BLE001 - as above
        if lost:
            raise _lost(error, lost) from error
        raise _refusal(error, "AOTAutograd", names, module) from error
    literals = _attributes_to_inputs(graph_module)
    constants |= {slot.target: getattr(graph_module, slot.target) for slot in literals}
    uppers = {str(symbol): bounds.upper for symbol, bounds in limits.items()}
    added = {slot.node for slot in literals}
    placeholders = [n for n in graph_module.graph.find_nodes(op="placeholder") if n not in added]
    output = graph_module.graph.output_node()
    results = torch.utils._pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None)
    roles = torch.utils._pytree.tree_leaves(output.meta["desc"], is_leaf=lambda x: x is None)
    return JointTrace(
        graph_module,
        (*(_input_slot(node) for node in placeholders), *literals),
        tuple(_output_slot(role, node, names) for role, node in zip(roles, results, strict=True)),
        constants,
        {symbol: int(upper) for symbol, upper in uppers.items() if getattr(upper, "is_Integer", False)},
        (*asked, *later),
    )


def _refuse_sparse(own: Mapping[str, torch.Tensor], inputs: Iterable[tuple[str, torch.Tensor]]) -> None:
    held = [(f"{user_path(path)} of the module", tensor) for path, tensor in own.items()]
    for name, tensor in (*held, *((f"input {name!r}", tensor) for name, tensor in inputs)):
        if tensor.layout != torch.strided:
            raise UnsupportedError(f"{name} is a sparse tensor", "give it as a dense one: .to_dense()")


def _aot_joint(
    stack: contextlib.ExitStack, module: torch.nn.Module, fakes: tuple[Any, ...], decompositions: Mapping[Any, Any]
) -> GraphModule:
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._guards import TracingContext, tracing

    fake_mode = next((f.fake_mode for f in fakes if hasattr(f, "fake_mode")), None)
    if fake_mode is not None:
        stack.enter_context(tracing(TracingContext(fake_mode)))
    return aot_export_joint_with_descriptors(stack, module, fakes, decompositions=dict(decompositions)).graph_module


def _static_fakes(args: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return tuple(mode.from_tensor(argument) for argument in args)


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


def _attributes_to_inputs(traced: GraphModule) -> tuple[Slot, ...]:
    """Tensors that AOTAutograd found in the code itself, when it traced the module and not its export, as buffers."""
    slots = []
    for node in traced.graph.find_nodes(op="get_attr"):
        value = getattr(traced, str(node.target))
        if type(value) is not torch.Tensor:
            continue
        with traced.graph.inserting_before(next(iter(traced.graph.nodes))):
            held = traced.graph.placeholder(str(node.target))
        held.meta["val"] = node.meta.get("val", value)
        node.replace_all_uses_with(held)
        traced.graph.erase_node(node)
        slots.append(Slot("buffer", str(node.target), -1, held))
    return tuple(slots)


def _input_slot(node: Node) -> Slot:
    role = node.meta["desc"]
    kind = type(role).__name__
    if kind == "ParamAOTInput":
        return Slot("parameter", role.target, -1, node)
    if kind == "BufferAOTInput":
        return Slot("buffer", role.target, -1, node)
    if kind == "PlainAOTInput":
        return Slot("input", "", role.idx, node)
    if kind == "TangentAOTInput" and hasattr(role.output, "idx"):
        return Slot("tangent", "", role.output.idx, node)
    if kind == "TangentAOTInput":
        raise _written(getattr(role.output, "mutated_input", role.output), ())
    if kind == "ViewBaseAOTInput":
        raise CaptureError(
            f"the module writes into {_named(role.base_of, ())}, which shares memory with another of its tensors",
            "keep one of them, and slice or reshape it in forward()",
        )
    if kind == "ForwardTokenAOTInput":
        raise UnsupportedError(
            "the module calls an operator with effects (torch.linalg's checks for errors, printing): it has no "
            "translation to ONNX",
            "compute torch.linalg results outside of the graph; take prints out of forward()",
        )
    raise CaptureError(f"the joint trace has an input of kind {kind} ({role})", "report this model")


def _output_slot(role: Any, node: Any, names: Sequence[str]) -> Slot:
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
        raise _written(role.mutated_input, names)
    raise CaptureError(f"the joint trace has an output of kind {kind} ({role})", "report this model")


def _written(role: Any, names: Sequence[str]) -> CaptureError:
    return CaptureError(
        f"the module writes into {_named(role, names)} in place",
        "training inputs and parameters may not be changed by forward(); clone the tensor first "
        "(nn.Embedding(max_norm=) is such a write)",
    )


def _named(role: Any, names: Sequence[str]) -> str:
    """An input of the trace in the user's words."""
    target = getattr(role, "target", None)
    if target is not None:
        return f"{'buffer' if 'Buffer' in type(role).__name__ else 'parameter'} {user_path(target)}"
    index = getattr(role, "idx", None)
    return f"input {names[index]!r}" if isinstance(index, int) and index < len(names) else str(role)


def _running(error: Exception, module: torch.nn.Module) -> tuple[str, str]:
    """Path of the module and line of the user's code that an error came out of."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return running_module(frames, module), user_frame("".join(traceback.format_tb(error.__traceback__)))


def _refusal(error: Exception, by: str, names: Sequence[str], module: torch.nn.Module) -> CaptureError:
    """One sentence from PyTorch's many lines, with the user's names and the place in the user's code."""
    text = _DIMENSION.sub(lambda m: f"dimension {m[2]} of {names[int(m[1])]!r}", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    sentence = next((line[2:] for line in lines if line.startswith("- ")), lines[0] if lines else "no reason given")
    for tail in (" This typically means", " If you're using ", " For more information", " (unhinted"):
        sentence = sentence.split(tail)[0]
    kind, (path, line) = type(error).__name__, _running(error, module)
    if any(words in text for words in _OF_DERIVATIVES):
        hint = "derivatives inside forward() are traced at fixed sizes only: leave dynamic= out"
    elif any(word in text for word in ("data-dependent", "item()", "bool(")) or "DataDependent" in kind:
        hint = (
            "replace Python control flow and .item() on tensor values by torch.where or masks; where it belongs to the "
            "loss, give loss= a function of the scores instead of labels to the module"
        )
        if "experts" in text + path:
            hint = "set experts_implementation='batched_mm' in the model's config; else " + hint
    elif "Constraints violated" in text or "specialized" in sentence:
        hint = "leave this dimension out of dynamic=, or change the code that fixes it"
    else:
        hint = "run the module on this batch alone first; if that works, simplify the code at this place"
    place = user_frame(text) or line
    where = (f" {path}" if path else "") + (f" at {place}" if place else "")
    return CaptureError(f"{by} cannot trace the module{where}: {sentence} ({kind})", hint)


def _lost(error: Exception, lost: Sequence[str]) -> CaptureError:
    sentence = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return CaptureError(
        f"{', '.join(lost)} cannot be traced: {sentence} ({type(error).__name__})",
        "write it with torch operators (a straight-through value is x + (f(x) - x).detach()); checkpoint with "
        "use_reentrant=False; remove hooks",
    )


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    """Settings for the time of a trace.

    oneDNN's recurrent layers would stay opaque operators, so it is off. On failure PyTorch logs and prints the whole
    graph beside the error; the error says what is needed. On success nothing printed is lost.
    """
    levels = {logging.getLogger(name): level for name, level in _LOUD.items()}
    before = {logger: logger.level for logger in levels}
    mkldnn: Any = torch.backends.mkldnn
    onednn, said = mkldnn.enabled, io.StringIO()
    for logger, level in levels.items():
        logger.setLevel(level)
    mkldnn.enabled = False
    try:
        with contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*_flat_weights.* were assigned during export")  # nn.LSTM's own
            yield
    finally:
        mkldnn.enabled = onednn
        for logger, level in before.items():
            logger.setLevel(level)
    sys.stderr.write(said.getvalue())
