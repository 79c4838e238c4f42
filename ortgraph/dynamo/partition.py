"""What AOTAutograd calls: a partitioner that compiles the joint graph whole, and compilers that hand out its halves.

AOTAutograd wants two FX graphs from a partitioner and compiles each. Here both are compiled together, so the FX graphs
are stand-ins that say what goes in and out: the forward one returns the results and what is saved, the backward one
takes what is saved and the tangents.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ortgraph.dynamo.by_rows import GraphsByRows
from ortgraph.dynamo.compiled_graph import CompiledGraph
from ortgraph.dynamo.joint_graph import Argument, JointGraph, joint_graph
from ortgraph.dynamo.one_run import OneRun, whole
from ortgraph.dynamo.optimized import optimized, target_of
from ortgraph.dynamo.options import Options
from ortgraph.dynamo.zero_tangents import without_tangents
from ortgraph.runtime.labelled_rows import REFUSED_KEY

_COMPILED = "ortgraph_compiled"


class PaddingWarning(UserWarning):
    """``remove_padding`` was asked for, and a graph computes the rows of padding all the same."""


def warn_of_padding(reason: str) -> None:
    """Say why; PyTorch's and Python's filters show a text once."""
    warnings.warn(f"rows of padding are computed: {reason}", PaddingWarning, stacklevel=2)


class Compiler:
    """Compiles the graph that one call of the backend gets.

    Args:
        arguments: Of the function, by position.
        options: Options.
    """

    def __init__(self, arguments: Sequence[Argument], options: Options) -> None:
        self.arguments, self.options = arguments, options

    def partition(
        self, joint_module: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[GraphModule, GraphModule]:
        """AOTAutograd's ``partition_fn``."""
        with real_tensors():
            joint = joint_graph(joint_module, self.arguments, num_fwd_outputs)
            why = self._why_two(joint_module, joint)
            compiled = self._halves(joint, why) if why else self._one_run(joint_module, joint)
        return _stand_ins(joint_module, num_fwd_outputs, compiled)

    def _halves(self, joint: JointGraph, why: str) -> CompiledGraph:
        """Forward and backward as two programs, which compute all rows."""
        if self.options.remove_padding:
            warn_of_padding(why)
        options = dataclasses.replace(self.options, remove_padding=False)
        return CompiledGraph(joint, optimized(joint, options), threads_of(options))

    def _why_two(self, module: GraphModule, joint: JointGraph) -> str:
        """Why forward and backward cannot run at once; empty where they can."""
        if not self.options.joint:
            return "joint=False asks for forward and backward as two programs"
        if self._in_half_precision(module):
            return "float16 gradients wait for the scale of the loss"
        if joint.graph.signature.loss_gradient is None:
            return "the graph returns no loss, a scalar float32 with a gradient"
        if len(joint.tangents) > 1 and _scalars(joint) > 1:
            return "several scalar results could be the loss"
        if len(joint.tangents) > 1 and _writes_arguments(module):
            return "the module writes its buffers, so that its forward half could not run again for another result"
        return ""

    def _one_run(self, module: GraphModule, joint: JointGraph) -> OneRun:
        """Forward and backward at once."""
        seed = joint.graph.signature.loss_gradient
        assert seed is not None
        at, alone = joint.tangents.index(seed), joint
        others = [i for i in range(len(joint.tangents)) if i != at]
        if others:
            copied = without_tangents(module, len(joint.gradients), others)
            alone = joint_graph(copied, self.arguments, len(joint.outputs))

        def halves() -> CompiledGraph:
            with real_tensors():
                fresh = joint_graph(module, self.arguments, len(joint.outputs))
                return self._halves(fresh, "another result than the loss got a gradient, or calls wait for theirs")

        graph = optimized(alone, self.options)
        graphs = GraphsByRows(whole(alone), graph, threads_of(self.options), target_of(self.options))
        if self.options.remove_padding and not graphs.without_padding:
            warn_of_padding(
                graph.model.metadata_props.get(REFUSED_KEY, "passes_after cannot be repeated for fewer rows")
            )
        return OneRun(graphs, halves, joint, at)

    def _in_half_precision(self, module: GraphModule) -> bool:
        """Whether gradients are float16 somewhere: those of a loss without its scale may vanish."""
        if "fp16" in f"{self.options.precision} {self.options.precision_overrides}":
            return True
        values = (n.meta.get("val") for n in module.graph.nodes)
        return any(isinstance(v, torch.Tensor) and v.dtype == torch.float16 for v in values)

    def forward(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """AOTAutograd's ``fw_compiler``."""
        return _boxed(module.meta[_COMPILED].forward)

    def backward(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """AOTAutograd's ``bw_compiler``."""
        return _boxed(module.meta[_COMPILED].backward)

    def inference(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """AOTAutograd's ``inference_compiler``: a graph without backward half."""
        with real_tensors():
            count = len(torch.utils._pytree.tree_leaves(module.graph.output_node().args[0], is_leaf=_none))
            joint = joint_graph(module, self.arguments, count, inference=True)
            options = dataclasses.replace(self.options, remove_padding=False)
            compiled = CompiledGraph(joint, optimized(joint, options), threads_of(options))
        return _boxed(compiled.infer)


@contextlib.contextmanager
def real_tensors() -> Any:
    """Tensors made inside are real ones, whatever AOTAutograd traces with."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch.no_grad():
        yield


def threads_of(options: Options) -> int:
    """Threads of one operator."""
    return options.threads or torch.get_num_threads()


def _boxed(function: Callable[[list[Any]], list[Any]]) -> Callable[..., Any]:
    """AOTAutograd's calling convention: one list, which the callee may empty."""

    def call(args: list[Any]) -> list[Any]:
        given = list(args)
        args.clear()
        return function(given)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _none(value: Any) -> bool:
    return value is None


def _writes_arguments(joint: GraphModule) -> bool:
    """Whether a result replaces an argument."""
    roles = torch.utils._pytree.tree_leaves(joint.graph.output_node().meta.get("desc"), is_leaf=_none)
    return any(type(r).__name__ in ("InputMutationAOTOutput", "MetadataMutationAOTOutput") for r in roles)


def _scalars(joint: JointGraph) -> int:
    """Number of tangents that are scalars."""
    shapes = {v.name: v.shape for v in joint.graph.graph.inputs}
    return sum(shapes[t] is not None and len(shapes[t]) == 0 for t in joint.tangents)  # type: ignore[arg-type]


def _stand_ins(
    joint: GraphModule, num_outputs: int, compiled: CompiledGraph | OneRun
) -> tuple[GraphModule, GraphModule]:
    leaves = torch.utils._pytree.tree_leaves(joint.graph.output_node().args[0], is_leaf=_none)
    results, gradients = leaves[:num_outputs], leaves[num_outputs:]
    placeholders = joint.graph.find_nodes(op="placeholder")
    primals, tangents = placeholders[: len(gradients)], placeholders[len(gradients) :]

    with real_tensors():
        # why no fake tensor: it would count as a donated buffer, and retain_graph be refused
        token = torch.empty(compiled.token_bytes, dtype=torch.uint8, device="meta")
    forward = Graph()
    inputs = [_placeholder(forward, n) for n in primals]
    made = [_stand_in(forward, r) for r in results]
    saved = [_stand_in(forward, token, "arena")]
    saved += [inputs[i] for i in compiled.saved_args]
    saved += [made[i] for i in compiled.saved_results]
    with real_tensors():
        types = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in compiled.saved_types]
    saved += [_stand_in(forward, t, f"saved_{i}") for i, t in enumerate(types)]
    forward.output((*made, *saved))

    backward = Graph()
    for node in (*saved, *tangents):
        _placeholder(backward, node)
    backward.output(tuple(_stand_in(backward, g) for g in gradients))
    modules = GraphModule({}, forward), GraphModule({}, backward)
    for module in modules:
        module.meta[_COMPILED] = compiled
    return modules


def _placeholder(graph: Graph, like: Node) -> Node:
    node = graph.placeholder(like.name)
    node.meta = {k: v for k, v in like.meta.items() if k in ("val", "tensor_meta", "desc")}
    return node


def _stand_in(graph: Graph, result: Any, name: str | None = None) -> Any:
    """A node for a result of the compiled code: it has a type and is never run."""
    if isinstance(result, torch.Tensor):
        node = graph.create_node("call_function", _not_run, (), name=name)
        node.meta["val"] = result
        return node
    if not isinstance(result, Node):
        return result
    node = graph.create_node("call_function", _not_run, (), name=f"{result.name}_made")
    node.meta = {k: v for k, v in result.meta.items() if k in ("val", "tensor_meta")}
    return node


def _not_run() -> None:
    raise AssertionError("this graph is a description; the compiled function runs in its place")
