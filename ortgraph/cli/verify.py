"""``ortgraph verify``: does a graph keep the invariants, and does it compute what another one computes?"""

from __future__ import annotations

import pathlib
from typing import Annotated, Any

import typer

from ortgraph.cli import options
from ortgraph.cli.output import FAILED, Output, verb
from ortgraph.errors import InputError
from ortgraph.graph import TrainingGraph

_LEVELS = ("structure", "signature", "types", "runtime", "numerics")
_SHOWN = 20
_REFERENCE = typer.Option("--reference", metavar="OTHER", help="Compare loss and every gradient with this graph.")
_LEVEL = typer.Option("--level", help=f"{', '.join(_LEVELS)}; numerics when --reference is given, else types.")


@verb
def run(
    path: Annotated[pathlib.Path, typer.Argument(metavar="IN", help="A graph (.onnx).")],
    reference: Annotated[pathlib.Path | None, _REFERENCE] = None,
    level: Annotated[str | None, _LEVEL] = None,
    shapes: Annotated[str | None, options.SHAPES] = None,
    batch: Annotated[pathlib.Path | None, options.BATCH] = None,
    as_json: bool = options.JSON,
) -> None:
    """Check the invariants of a graph (docs/invariants.md); with --reference also its numbers."""
    from ortgraph.graph import verify as rules

    out = Output(as_json)
    level = level or ("types" if reference is None else "numerics")
    if level not in _LEVELS:
        raise InputError(f"--level: unknown level {level!r}", f"one of {', '.join(_LEVELS)}")
    if (level == "numerics") != (reference is not None):
        raise InputError("level numerics and --reference go together", "--reference OTHER.onnx")
    sizes = options.parse_sizes(shapes)
    graph = options.read_graph(out, path)
    found = rules.check(graph, "runtime" if level == "numerics" else level)
    out.table(f"{path}: broken invariants", ("invariant", "what"), [(v.rule, v.what) for v in found[:_SHOWN]])
    data: dict[str, Any] = {"level": level, "violations": [{"rule": v.rule, "what": v.what} for v in found]}
    ok = not found
    if reference is not None and ok:
        compared = _compare(out, graph, options.read_graph(out, reference), sizes, batch)
        ok, data["numerics"] = compared["equal"], compared
    if not graph.has_signature:
        out.say("no ortgraph signature: rules about roles were not checked")
    out.say(f"{path}: {'verified' if ok else 'NOT verified'} (level {level})")
    out.result({"ok": ok, **data})
    if not ok:
        raise typer.Exit(FAILED)


def _compare(
    out: Output, graph: TrainingGraph, reference: TrainingGraph, sizes: dict[str, int], batch: pathlib.Path | None
) -> dict[str, Any]:
    from ortgraph.manager.numerics import compare

    mine, theirs = set(graph.signature.gradients), set(reference.signature.gradients)
    if mine != theirs:
        names = ", ".join(sorted(mine ^ theirs)[:3])
        raise InputError(f"the graphs train different parameters: {names}", "compare graphs of one model")
    feeds = options.batch_of(reference, sizes, batch)
    with out.progress("comparing loss and gradients"):
        result = compare(reference, graph, feeds)
    rows = sorted(result.gradients.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN]
    out.table(
        "Gradients, largest difference first", ("parameter", "relative difference"), [(k, f"{v:.1e}") for k, v in rows]
    )
    if result.precision != "fp32":
        out.say(
            f"tolerances of {result.precision}: loss {result.tolerance.loss:.1e}, gradients {result.tolerance.gradient:.1e}"
        )
    out.say(f"loss: relative difference {result.loss:.1e}")
    if result.values:
        name, error = result.worst_value
        out.say(f"outputs and new values: relative difference up to {error:.1e} (%{name})")
    return {
        "equal": result.equal,
        "loss": result.loss,
        "gradient": result.worst_gradient[1],
        "parameter": result.worst_gradient[0],
        "value": result.worst_value[1],
        "value_name": result.worst_value[0],
        "precision": result.precision,
        "loss_tolerance": result.tolerance.loss,
        "gradient_tolerance": result.tolerance.gradient,
    }
