"""The page about one run of a pipeline: what fused, what did not and why, and the memory of the result."""

from __future__ import annotations

from ortgraph import __version__
from ortgraph.analysis.bind_shapes import is_dynamic
from ortgraph.graph import TrainingGraph
from ortgraph.manager.optimize import OptimizeReport
from ortgraph.report import tables
from ortgraph.report.html import Page
from ortgraph.report.memory_page import add_planned
from ortgraph.report.svg import bar_chart

_SHOWN_NODES = 12


def optimization_page(source: str, graph: TrainingGraph, report: OptimizeReport, verified: str) -> str:
    """One HTML file.

    Args:
        source: Where the graph came from, for the title.
        graph: The result.
        report: What ``optimize`` reported.
        verified: Level up to which the result was verified.
    """
    page = Page(f"ortgraph: {source}")
    page.figures([
        ("nodes before", f"{report.nodes_before:,}"),
        ("nodes after", f"{report.nodes_after:,}"),
        ("seconds", f"{report.seconds:.2f}"),
        ("verified", verified),
        ("stage", graph.stage),
    ])  # fmt: skip
    add_optimization(page, report)
    add_memory(page, tables.memory_of(graph))
    if graph.stage == "planned" and not is_dynamic(graph):
        add_planned(page, graph)
    page.text(f"ortgraph {__version__}", note=True)
    return page.render()


def add_optimization(page: Page, report: OptimizeReport) -> None:
    """Sections: operators before and after, passes with counts and time, refusals."""
    page.section("Operators before and after")
    changes = tables.operator_change_rows(report.operators_before, report.operators_after)
    page.table(("operator", "before", "after", "change"), changes, right=(1, 2, 3))
    largest = sorted(report.operators_after.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN_NODES]
    page.add_chart(bar_chart("Most frequent operators after", [(k, n, str(n)) for k, n in largest]))
    page.section("What the passes did")
    page.text(f"Pipeline: {report.pipeline}", note=True)
    done = [r for r in report.passes if r.modified]
    page.table((*tables.PASS_COLUMNS, "ms", "verify ms"), tables.pass_rows(done, seconds=True), right=(4, 5, 6))
    idle = [r.name for r in report.passes if not r.modified]
    page.text(f"Nothing to change for {len(idle)} others: {', '.join(dict.fromkeys(idle)) or 'none'}.", note=True)
    page.section("What was left alone or chosen, and why")
    page.text(
        "Places that look like the pattern of a pass but are not safe or not worth rewriting, and for lowering the "
        "alternative that the cost table chose.",
        note=True,
    )
    page.table(("pass", "times", "reason", "first node"), tables.refusal_rows(report.passes), right=(1,))


def add_memory(page: Page, memory: dict[str, int | None]) -> None:
    """Section: bytes of parameters, states and arena."""
    page.section("Memory")
    page.table(("what", "bytes", ""), tables.memory_rows(memory), right=(1,))
    known = [(k.replace("_", " "), float(v), f"{v / 2**20:.1f} MiB") for k, v in memory.items() if v is not None]
    page.add_chart(bar_chart("Bytes of a training step", known))
