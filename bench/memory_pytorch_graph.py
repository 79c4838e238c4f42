"""PyTorch's joint graphs and partitions as operation graphs and sequences, for one judge.

View-like nodes are aliases: they cost nothing, and reading one reads the memory that it shows. What remains are
operations with the bytes that they write and their FLOPs (``torch.utils.flop_counter``; element-wise work counts as 0).
Parameters, the batch and the tangent are no part of the plan.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_module
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.compilers import nop
from torch.fx.traceback import preserve_node_meta
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from ortgraph.plan.operations import Operation, OperationGraph, PlanValue

_ALSO_ALIASES = frozenset({torch.ops.aten._unsafe_view.default, torch.ops.aten.detach.default})


@dataclasses.dataclass(frozen=True)
class JointGraph:
    """A joint forward and backward graph as a planning problem.

    Attributes:
        problem: Operations in the order of PyTorch's default partition (forward, then backward).
        operation: Index of the operation by name of the node that runs it (not of aliases and parts).
    """

    problem: OperationGraph
    operation: dict[str, int]

    def sequence(self, names: Iterable[str]) -> list[int]:
        """Operations by nodes in execution order; nodes that run nothing are left out."""
        return [self.operation[n] for n in names if n in self.operation]


Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


@dataclasses.dataclass(frozen=True)
class TracedModel:
    """A joint graph and what PyTorch's partitioners have to know beside it."""

    joint: fx.GraphModule
    inputs: list[object]
    outputs: int
    options: dict[str, Any]

    def run(self, partition: Partition, checkpointed: bool = False) -> list[str]:
        """Names of the nodes that both halves of a partition run, forward first.

        Args:
            partition: A partitioner.
            checkpointed: Mark every block's forward nodes as ``torch.compile`` marks those of a checkpoint.
        """
        joint = _copy(self.joint)
        for node in joint.graph.nodes:
            block = (node.meta.get("custom") or {}).get("block")
            if checkpointed and block is not None and node.meta.get("partitioner_tag") == "is_forward":
                node.meta["recompute"], node.meta["ac_graph_id"] = CheckpointPolicy.PREFER_RECOMPUTE, block
        halves = partition(joint, self.inputs, num_fwd_outputs=self.outputs, **self.options)
        return [n.name for half in halves for n in half.graph.nodes if n.op == "call_function"]


def trace(module: torch.nn.Module, inputs: torch.Tensor) -> TracedModel:
    """The joint graph of a module that returns its loss, common subexpressions merged as partitioners do first."""
    seen: list[tuple[fx.GraphModule, list[object], int, dict[str, Any]]] = []

    def keep(joint: fx.GraphModule, values: list[object], *, num_fwd_outputs: int, **options: Any):
        seen.append((joint, values, num_fwd_outputs, options))
        return partitioners.default_partition(_copy(joint), values, num_fwd_outputs=num_fwd_outputs, **options)

    with preserve_node_meta():
        aot_module(module, fw_compiler=nop, bw_compiler=nop, partition_fn=keep)(inputs).backward()
    traced, values, outputs, options = seen[0]
    return TracedModel(fx.GraphModule(traced, fx_graph_cse(traced.graph)), values, outputs, options)


def _copy(joint: fx.GraphModule) -> fx.GraphModule:
    """A copy with the same names; partitioners change what they are given."""
    graph = fx.Graph()
    mapped: dict[fx.Node, fx.Node] = {}
    for node in joint.graph.nodes:
        mapped[node] = graph.node_copy(node, mapped.__getitem__)
        mapped[node].name = node.name
        mapped[node].meta = dict(node.meta)
    return fx.GraphModule(joint, graph)


def convert(traced: TracedModel, order: list[str], gradients_kept: bool = False) -> JointGraph:
    """The planning problem of a joint graph.

    Args:
        traced: The joint graph.
        order: Its nodes as PyTorch's default partition runs them.
        gradients_kept: Results live to the end; by default they die at once, as in the published figures.
    """
    nodes = {n.name: n for n in traced.joint.graph.nodes}
    results = nodes["output"].all_input_nodes if gradients_kept else []
    value_of: dict[tuple[fx.Node, int], int] = {}  # (node that writes, which result)
    values: list[PlanValue] = []
    operations: list[Operation] = []
    index: dict[str, int] = {}
    kept = {w for n in results for w in _written(n)}
    for name in dict.fromkeys(order):
        node = nodes[name]
        if is_alias(node):
            continue
        read = sorted({value_of[w] for n in node.all_input_nodes for w in _written(n) if w in value_of})
        made = []
        for part, size in enumerate(_sizes(node)):
            value_of[node, part] = len(values)
            made.append(len(values))
            values.append(PlanValue(f"{name}:{part}", size, (node, part) in kept))
        index[name] = len(operations)
        operations.append(Operation(name, flops(node), tuple(read), tuple(made)))
    return JointGraph(OperationGraph(tuple(operations), tuple(values)), index)


def is_alias(node: fx.Node) -> bool:
    """Whether the node writes no memory: views, and parts of a tuple."""
    if node.op != "call_function":
        return False
    target = node.target
    if target is operator.getitem or target in _ALSO_ALIASES:
        return True
    returns = getattr(getattr(target, "_schema", None), "returns", ())
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _written(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """The results that a node's value shows: its own, or that of the node behind views."""
    if node.op == "placeholder":
        return []
    if not is_alias(node):
        return [(node, part) for part in range(len(_sizes(node)))]
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return []
    behind = _written(source)
    # The parts of a split are views of one memory; those of other operators are results of their own.
    if node.target is operator.getitem and not is_alias(source):
        return [w for w in behind if w[1] == node.args[1]]
    return behind


def _sizes(node: fx.Node) -> list[int]:
    made = node.meta.get("val")
    parts = made if isinstance(made, (tuple, list)) else [made]
    return [p.numel() * p.element_size() if isinstance(p, torch.Tensor) else 0 for p in parts]


def flops(node: fx.Node) -> int:
    """FLOPs by the formulas of PyTorch's own counter."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, options = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(formula(*args, **options, out_val=node.meta["val"]))
