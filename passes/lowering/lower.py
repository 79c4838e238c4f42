"""Lower: replace every composite by what the target runs."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import onnx_ir as ir

from ortgraph.errors import InputError, UnsupportedError
from ortgraph.graph import Names, TrainingGraph, replace_value
from ortgraph.graph.edit import remove_node, take_type
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.ops.alternatives import (
    Alternative,
    CostTable,
    alternatives,
    has_choice,
    has_kernel,
    kernel_reason,
    load_table,
)
from ortgraph.ops.builder import Builder
from ortgraph.ops.exact_forms import exact_form
from ortgraph.ops.precision import sees_low
from ortgraph.ops.spec import COMPOSITE, GENERATED, spec_of
from ortgraph.ops.targets import TRAINING, beside_reason, low_reason, reason_not_run, target_of
from ortgraph.passes.precision.legalize_precision import legalize
from ortgraph.runtime.inference_export import keep_evaluation_form


@dataclasses.dataclass(frozen=True)
class Lower(GraphPass):
    """Each composite becomes its cheapest alternative; operators that the target lacks become their expansion.

    A standard operator with a compiled kernel or a faster standard form is replaced where that is cheaper, one whose
    kernel in the runtime loses digits (``ortgraph.ops.exact_forms``) always.

    Alternatives are an operator of the target's own (``runtime``), a compiled kernel (``kernel``) and the reference
    expansion (``expansion``), chosen per node by the cost table; equal costs go to the first. Every choice is reported
    with the figures it was made by. Expansions may share work (Attention and its gradient): run
    ``eliminate-common-subexpressions`` afterwards.

    Refuses when:
        an expansion needs sizes that are symbolic still: the composite stays, the session lowers it once they are bound.

    Raises an error when:
        a node of an unknown domain, or of an operator that the target does not run, has no expansion;
        the target or the preferred alternative has an unknown name.

    Attributes:
        target: ``onnxruntime-training`` or ``onnxruntime``; with a provider ``onnxruntime-training:cuda`` and so on
            (``ortgraph.ops.targets.TARGETS``): nothing compiled runs there, and the first alternative that applies is
            taken, since nothing was measured.
        table: Path of a cost table; empty for the one shipped.
        prefer: ``expansion``, ``runtime`` or ``kernel``: taken wherever it applies, whatever it costs.
        kernels: Whether compiled kernels take part. Without a compiler they do not, and the reasons say so.
    """

    name: ClassVar[str] = "lower"
    stages: ClassVar[tuple[str, ...]] = ("captured", "optimized", "cast", "stepped", "lowered")
    sets_stage: ClassVar[str | None] = "lowered"

    target: str = TRAINING
    table: str = ""
    prefer: str = ""
    kernels: bool = True

    def run(self, graph: TrainingGraph) -> Changes:
        target = target_of(self.target, "lower: ")
        if self.prefer not in ("", "expansion", "runtime", "kernel"):
            raise InputError(f"lower: unknown alternative {self.prefer!r}", "expansion, runtime or kernel")
        if graph.has_signature:
            keep_evaluation_form(graph)  # why here: afterwards dropout and batch statistics cannot be told apart
        changes, table, names = Changes(), load_table(self.table), Names(graph.graph)
        legalize(graph, self._no_low_form, changes, self.name, names)
        opset = graph.graph.opset_imports.get("", 18)
        # Last first, so that a composite made by an expansion is met next.
        todo = list(graph.graph.all_nodes())[::-1]
        while todo:
            node = todo.pop()
            reason = reason_not_run(node, target.text, opset)
            if node.domain == GENERATED and (not self.kernels or self.prefer == "expansion"):
                reason = "kernels are switched off"
            if reason is None and not has_choice(node):
                continue
            made = self._replace(node, table, names, reason, changes)
            todo.extend(reversed(made))
        legalize(graph, functools.partial(low_reason, target=target.text), changes, self.name, names)
        beside = [(node, why) for node in graph.graph if (why := beside_reason(node, target.text)) is not None]
        changes.refusals += [
            Refusal(node.name or "", f"runs on the processor, between copies: {why}") for node, why in beside
        ]
        imports = graph.graph.opset_imports
        if any(n.domain == "com.microsoft" for n in graph.graph.all_nodes()):
            imports.setdefault("com.microsoft", 1)
        left = any(n.domain == COMPOSITE for n in graph.graph.all_nodes())
        if not left and imports.pop(COMPOSITE, None) is not None and not changes.counts:
            changes.counts["unused-import"] += 1
        return changes

    def _no_low_form(self, node: ir.Node) -> str | None:
        """Why a node is lowered between casts: neither a kernel nor its expansion takes low values."""
        if exact_form(node, self.target) is not None:
            return low_reason(node, self.target)
        if node.domain != COMPOSITE or spec_of(node).expands_low:
            return None
        if not target_of(self.target).on_cpu:
            runs = any(a.name == "runtime" and a.applies(node) is None for a in self._alternatives(node))
            return None if runs else f"{node.op_type} has no form on low values in {self.target}"
        compiled = self.kernels and self.prefer in ("", "kernel") and has_kernel(node)
        return kernel_reason(node) if compiled else f"{node.op_type} has no expansion on low values"

    def _alternatives(self, node: ir.Node) -> tuple[Alternative, ...]:
        standard = node.domain != COMPOSITE and self.prefer in ("expansion", "runtime")
        return alternatives(node, target_of(self.target).text, self.kernels and not standard)

    def _replace(
        self, node: ir.Node, table: CostTable, names: Names, reason: str | None, changes: Changes
    ) -> list[ir.Node]:
        choice, why = self._choose(node, table)
        if choice is None or (choice.name == "native" and reason is not None):
            raise UnsupportedError(
                f"lower: node {node.name!r} ({node.domain or 'ai.onnx'}.{node.op_type}) cannot run on {self.target}: "
                + "; ".join(filter(None, (reason, why))),
                "use another target, or give the operator an expansion (ortgraph.ops.spec.register)",
            )
        if choice.name == "native":
            return []
        assert node.graph is not None
        build = Builder(node.graph, self.name, before=node, origins=[node], names=names)
        try:
            results = choice.build(build, node)
        except UnsupportedError as error:
            if not _is_symbolic(node):
                raise
            _take_back(build)
            changes.refusals.append(Refusal(node.name or "", f"left until sizes are bound: {error.what}"))
            return []
        for old, new in zip(node.outputs, results, strict=False):
            _redirect(node, old, new)
        node.graph.remove(node, safe=True)
        changes.counts[f"{node.op_type}.{choice.name}"] += 1
        changes.refusals.append(Refusal(node.name or "", why))
        return build.made

    def _choose(self, node: ir.Node, table: CostTable) -> tuple[Alternative | None, str]:
        """The cheapest alternative that applies, and the reasons in words."""
        priced: list[tuple[float, int, Alternative]] = []
        words = []
        on_cpu = target_of(self.target).on_cpu
        for i, candidate in enumerate(self._alternatives(node)):
            reason = candidate.applies(node)
            if reason is None and on_cpu and candidate.name == "runtime" and sees_low(node):
                reason = "ONNX Runtime's kernel takes float32"
            if reason is not None:
                words.append(f"no {candidate.name}: {reason}")
                continue
            # why: nothing is measured on devices; their own operators come first
            cost = candidate.cost(node, table).microseconds if on_cpu else float(i)
            words.append(f"{candidate.name} {cost:.1f} us" if on_cpu else candidate.name)
            priced.append((cost, i, candidate))
        if not priced:
            return None, "; ".join(words)
        preferred = (self.prefer, "native") if self.prefer in ("expansion", "runtime") else (self.prefer,)
        wanted = [p for p in priced if p[2].name in preferred] or priced
        chosen = min(wanted, key=lambda p: p[:2])[2]
        return chosen, f"{node.op_type}: {chosen.name} chosen ({'; '.join(words)})"


def _take_back(build: Builder) -> None:
    for node in reversed(build.made):
        remove_node(node)
    for constant in build.constants:
        if not constant.uses() and constant.name is not None:
            build.graph.initializers.pop(constant.name, None)


def _is_symbolic(node: ir.Node) -> bool:
    values = (*node.inputs, *node.outputs)
    return any(v is not None and v.shape is not None and not v.shape.is_static() for v in values)


def _redirect(node: ir.Node, old: ir.Value, new: ir.Value | None) -> None:
    if not (old.uses() or old.is_graph_output()):
        return
    if new is None:
        raise UnsupportedError(
            f"lower: output %{old.name} of {node.op_type} {node.name!r} is read, but its alternative does not make it",
            "this is a fault of the operator's table entry; report it",
        )
    # What capture recorded (symbolic dimensions by name) is at least as exact as what inference finds again.
    take_type(new, old)
    replace_value(old, new)
