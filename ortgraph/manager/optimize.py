"""optimize: from a captured graph to a planned one, and a report of what was done."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from ortgraph.errors import InputError
from ortgraph.graph import TrainingGraph
from ortgraph.manager import registry
from ortgraph.manager.instruments import Instrument
from ortgraph.manager.pass_manager import PassManager, PipelineReport
from ortgraph.manager.pipeline_text import parse_pipeline, pipeline_text
from ortgraph.manager.precision_option import Overrides, precision_pass
from ortgraph.manager.rewrite import op_key
from ortgraph.ops.targets import target_of
from ortgraph.plan.budget import check_budget
from ortgraph.runtime.labelled_rows import seal


@dataclasses.dataclass(frozen=True)
class OptimizeReport(PipelineReport):
    """A PipelineReport with the operators before and after."""

    operators_before: Mapping[str, int] = dataclasses.field(default_factory=dict)
    operators_after: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            **super().to_dict(),
            "operators_before": dict(self.operators_before),
            "operators_after": dict(self.operators_after),
        }


@dataclasses.dataclass(frozen=True)
class OptimizeResult:
    """The rewritten graph and the report."""

    graph: TrainingGraph
    report: OptimizeReport


def count_operators(graph: TrainingGraph) -> dict[str, int]:
    """Nodes per operator, most frequent first, ties by name."""
    counts = Counter(op_key(n) for n in graph.graph)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def optimize(
    graph: TrainingGraph,
    pipeline: str | Sequence[ir.passes.PassBase] = "O2",
    *,
    optimizer: Any = None,
    target: str = "onnxruntime-training",
    precision: str = "fp32",
    precision_overrides: Overrides | None = None,
    memory_budget: str | int | None = None,
    shapes: Mapping[str, int] | None = None,
    accumulation_steps: int = 1,
    loss_scale: Any = None,
    remove_padding: bool = False,
    distributed: bool = False,
    passes_after: Mapping[str, Sequence[ir.passes.PassBase] | str] | None = None,
    verify: str = "signature",
    instruments: Sequence[Instrument] = (),
) -> OptimizeResult:
    """Optimize a training graph. The given graph is not modified.

    Args:
        graph: Any stage from ``captured`` on.
        pipeline: A preset (``O0`` to ``O3``), a text pipeline, or passes.
        optimizer: ``ortgraph.optim.AdamW(...)``, ``LAMB`` or ``SGD`` to attach; None leaves the graph without an
            update. Presets only.
        target: ``onnxruntime-training`` (1.19.2) or ``onnxruntime`` (stock, 1.22 and later), on the processor; with a
            provider behind a colon on a device: ``onnxruntime-training:cuda`` (docs/gpu.md).
        precision: ``fp32``, ``bf16`` or ``fp16``: matrix products, convolutions and attention in that type, sums and
            parameters in float32 (docs/precision.md). Presets only.
        precision_overrides: Operators or modules by ``keep`` (stay in float32) and ``low``, as a mapping or as text:
            ``"keep=layer.3.*|Gelu;low=Softmax"``.
        memory_budget: ``"60%"`` of the activation peak (live intermediates of the given order, nothing recomputed), or
            bytes for the arena (``"30MB"`` or a number). Presets only. Where dimensions stay symbolic the session meets
            it anew for each batch shape.
        shapes: Sizes of symbolic dimensions to bind, such as ``{"batch": 8, "sequence": 128}``.
        accumulation_steps: Micro-batches per update.
        loss_scale: ``"dynamic"``, a number, or a ``LossScale``, in place of the optimizer's. None: the optimizer's, and
            dynamic for ``fp16`` where it has none.
        remove_padding: What works token by token runs over tokens that are no padding, for each batch as its mask says
            (docs/training.md). Presets from ``O2`` on.
        distributed: For a ``DistributedSession``: processes sum gradients between backward and update
            (docs/distributed.md).
        passes_after: Extra passes per stage, as passes or as a text pipeline.
        verify: Level checked after every pass; ``off`` switches it off.
        instruments: Observers.

    Returns:
        ``.graph`` and ``.report``.

    Raises:
        InputError: An option has a value that this release does not take.
        PassError, VerificationError: See PassManager.run.
    """
    _check_kinds(graph, pipeline, optimizer)
    passes = passes_of(
        pipeline,
        optimizer=optimizer,
        target=target,
        precision=precision,
        precision_overrides=precision_overrides,
        memory_budget=memory_budget,
        shapes=shapes,
        accumulation_steps=accumulation_steps,
        loss_scale=loss_scale,
        remove_padding=remove_padding,
        distributed=distributed,
    )
    extra = {k: parse_pipeline(v) if isinstance(v, str) else tuple(v) for k, v in (passes_after or {}).items()}
    result = graph.clone()
    before = count_operators(result)
    report = PassManager(passes, verify, instruments, extra).run(result)
    result.signature = _noted(result, pipeline_text(passes))
    seal(result, complete=not extra)
    full = OptimizeReport(
        **{f.name: getattr(report, f.name) for f in dataclasses.fields(report)},
        operators_before=before,
        operators_after=count_operators(result),
    )
    return OptimizeResult(result, full)


def passes_of(
    pipeline: str | Sequence[ir.passes.PassBase] = "O2",
    *,
    optimizer: Any = None,
    target: str = "onnxruntime-training",
    precision: str = "fp32",
    precision_overrides: Overrides | None = None,
    memory_budget: str | int | None = None,
    shapes: Mapping[str, int] | None = None,
    accumulation_steps: int = 1,
    loss_scale: Any = None,
    remove_padding: bool = False,
    distributed: bool = False,
) -> tuple[ir.passes.PassBase, ...]:
    """The passes that ``optimize`` runs for these options, but for ``passes_after``. Raises as ``optimize``."""
    target = target_of(target).text
    cast = precision_pass(precision, precision_overrides)
    optimizer = _scaled(optimizer, loss_scale, precision)
    if memory_budget is not None:
        memory_budget = check_budget(memory_budget)
    options: dict[str, Any] = {"remove_padding": True} if remove_padding else {}
    if remove_padding and pipeline not in ("O2", "O3"):
        raise InputError("remove_padding goes with O2", "put remove-padding before mark-optimized in your pipeline")
    if isinstance(pipeline, str) and _is_preset(pipeline):
        return tuple(
            registry.preset(
                pipeline,
                optimizer=optimizer,
                target=target,
                shapes=dict(shapes or {}),
                accumulation_steps=accumulation_steps,
                distributed=distributed,
                memory_budget=memory_budget,
                precision=cast,
                **options,
            )
        )
    if cast:
        raise InputError("a precision goes with a preset", f"put {cast} behind mark-optimized in your pipeline")
    if memory_budget is not None:
        raise InputError(
            "a memory budget goes with a preset",
            "put select-recompute{budget=...} before plan-memory in your pipeline",
        )
    if optimizer is not None:
        raise InputError("an optimizer is attached by a preset", "put attach-optimizer{...} into your pipeline")
    return tuple(parse_pipeline(pipeline) if isinstance(pipeline, str) else pipeline)


def _check_kinds(graph: Any, pipeline: Any, optimizer: Any) -> None:
    """Refuse what is easily mistaken for the arguments: a path, a level as a number, PyTorch's optimizer."""
    from ortgraph.optim import Optimizer

    if not isinstance(graph, TrainingGraph):
        raise InputError(f"optimize takes a TrainingGraph, not {type(graph).__name__}", "ortgraph.load(path) reads one")
    if isinstance(pipeline, int) or (isinstance(pipeline, str) and pipeline.startswith("-")):
        raise InputError(f"pipeline is {pipeline!r}", "give a preset, O0 to O3, or a list of passes")
    if not isinstance(optimizer, (Optimizer, str, type(None))):
        kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        raise InputError(f"optimizer is a {kind}", "ortgraph.optim.AdamW(lr=1e-3) becomes part of the graph")


def _scaled(optimizer: Any, loss_scale: Any, precision: str) -> Any:
    """The optimizer with the loss scale that is asked for; a dynamic one where fp16 needs it and none is given."""
    from ortgraph.optim import parse

    if optimizer is None:
        if loss_scale is None:
            return None
        raise InputError("a loss scale belongs to an optimizer, and none is given", "optimizer=ortgraph.optim.AdamW()")
    found: Any = parse(optimizer) if isinstance(optimizer, str) else optimizer
    if loss_scale is None and precision == "fp16" and found.loss_scale is None:
        loss_scale = "dynamic"
    return found if loss_scale is None else dataclasses.replace(found, loss_scale=loss_scale)


def _is_preset(text: str) -> bool:
    return len(text) == 2 and text[0] == "O" and text[1].isdigit()


def _noted(graph: TrainingGraph, pipeline: str):
    signature = graph.signature
    earlier = signature.metadata.get("pipeline", "")
    return signature.replace(
        metadata={**signature.metadata, "pipeline": f"{earlier};{pipeline}" if earlier else pipeline}
    )
