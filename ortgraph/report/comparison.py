"""The page about a training run of ortgraph beside PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ortgraph import __version__
from ortgraph.graph import TrainingGraph
from ortgraph.manager.optimize import OptimizeResult, count_operators
from ortgraph.report import tables
from ortgraph.report.html import Page
from ortgraph.report.optimization import add_memory, add_optimization
from ortgraph.report.svg import histogram, line_chart

_SHOWN_GRADIENTS = 20


class Curves(Protocol):
    """Losses and step times of both sides."""

    loss_pytorch: list[float]
    loss_ortgraph: list[float]

    def timed(self) -> tuple[list[float], list[float]]: ...


def comparison_page(
    result: Mapping[str, Any],
    optimized: OptimizeResult,
    before: TrainingGraph,
    errors: Mapping[str, Mapping[str, float]],
    curves: Curves,
    remarks: Sequence[str],
) -> str:
    """One HTML file.

    Args:
        result: The figures that the demo prints.
        optimized: Result of ``optimize``.
        before: The same step without optimizations.
        errors: Relative gradient differences by measure, then by parameter.
        curves: Losses and step times.
        remarks: What a reader has to know about the figures.
    """
    page = Page("ortgraph beside PyTorch")
    page.figures([
        ("times as fast", "too few steps" if result["speedup"] is None else f"{result['speedup']:.2f}"),
        ("ms per step, PyTorch", f"{result['ms_per_step_pytorch']:.1f}"),
        ("ms per step, ortgraph", f"{result['ms_per_step_ortgraph']:.1f}"),
        ("largest gradient difference", f"{result['gradient_max_relative_error']:.1e}"),
        ("largest loss difference", f"{result['loss_max_difference']:.1e}"),
        ("accuracy, PyTorch", f"{result['accuracy_pytorch']:.1%}"),
        ("accuracy, ortgraph", f"{result['accuracy_ortgraph']:.1%}"),
    ])  # fmt: skip
    for remark in remarks:
        page.text(remark)
    _add_training(page, result, curves)
    _add_gradients(page, errors)
    page.section("One training step, unoptimized and optimized")
    page.text("Both columns hold the whole step: forward, backward and update, lowered for the runtime.", note=True)
    rows = tables.operator_change_rows(count_operators(before), count_operators(optimized.graph))
    page.table(("operator", "-O0", "-O2", "change"), rows, right=(1, 2, 3))
    add_optimization(page, optimized.report)
    add_memory(page, _memory(result))
    page.text(f"ortgraph {__version__}", note=True)
    return page.render()


def _add_training(page: Page, result: Mapping[str, Any], curves: Curves) -> None:
    page.section("Training")
    page.text(
        f"{result['steps']} steps with the same initial weights and the same batches, {result['threads']} threads "
        "each. The two run in turn, step by step; the ratio is the median over steps."
    )
    losses = {"PyTorch": curves.loss_pytorch, "ortgraph": curves.loss_ortgraph}
    page.add_chart(line_chart("Loss", losses, "step", "loss"))
    difference = [abs(a - b) for a, b in zip(curves.loss_pytorch, curves.loss_ortgraph, strict=True)]
    page.add_chart(line_chart("Difference of the losses", {"|difference|": difference}, "step", "difference"))
    eager, ours = curves.timed()
    page.add_chart(histogram("Time per step", {"PyTorch": eager, "ortgraph": ours}, "milliseconds"))


def _add_gradients(page: Page, errors: Mapping[str, Mapping[str, float]]) -> None:
    page.section("Gradients")
    page.text(
        "Norm of the difference by norm of the reference, before the first step. A gradient far smaller than the "
        "others (a bias that the loss does not depend on) is measured against them."
    )
    rows = tables.gradient_rows(errors)
    page.text(f"The {min(len(rows), _SHOWN_GRADIENTS)} largest of {len(rows)}:", note=True)
    columns = range(1, len(errors) + 1)
    page.table(("parameter", *errors), rows[:_SHOWN_GRADIENTS], right=tuple(columns))


def _memory(result: Mapping[str, Any]) -> dict[str, int | None]:
    keys = {
        "parameters": "parameter_bytes",
        "states": "state_bytes",
        "arena": "arena_bytes",
        "arena_bound": "arena_bound_bytes",
    }
    return {name: result[key] for name, key in keys.items()}
