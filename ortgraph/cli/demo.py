"""``ortgraph demo``: a real model on real text, trained by PyTorch and by ortgraph side by side."""

from __future__ import annotations

import json
import os
import pathlib
import statistics
from typing import Annotated, Any

import typer

from ortgraph.cli import options
from ortgraph.cli.output import Output, verb
from ortgraph.errors import InputError, VerificationError
from ortgraph.manager.precision_option import check_precision

FILES = (
    "captured.onnx", "captured.safetensors", "step.onnx", "step.safetensors", "classifier.onnx", "classifier.onnx.data",
    "result.json", "report.html",
)  # fmt: skip
_BATCH, _LR = 8, 5e-4
_STEPS, _QUICK_STEPS = 320, 64
_QUICK_HELD_OUT, _QUICK_SECONDS = 200, 18.0
_SHOWN_OPERATORS = 24
_MEAN = 8  # steps whose mean loss is printed: single batches are noisy
_AMD = (
    "PyTorch's float32 products take MKL's slow path on AMD processors unless MKL is told otherwise: that is part of "
    "the speed-up. `python -m bench.step` compares with PyTorch at its best setting."
)
_BUSY_SHARE = 0.5  # of the cores: above this other programs share them
_BUSY = (
    "The machine is busy (load {load:.1f} on {cores} cores): step times say little, PyTorch's least of all, since its "
    "threads wait for each other in a loop."
)

_QUICK = typer.Option("--quick", help="A minute instead of five: fewer steps.")
_OUT = typer.Option("--out", metavar="DIR", help="Where to write graphs and report.")
_STEPS_OPTION = typer.Option("--steps", min=4, help="Training steps; replaces those of the full or quick run.")


@verb
def run(
    quick: Annotated[bool, _QUICK] = False,
    folder: Annotated[pathlib.Path, _OUT] = pathlib.Path("ortgraph-demo"),
    steps: Annotated[int | None, _STEPS_OPTION] = None,
    precision: str = options.PRECISION,
    threads: Annotated[int | None, options.THREADS] = None,
    as_json: bool = options.JSON,
) -> None:
    """Which standard-library package does a docstring come from? Train a Transformer both ways and compare."""
    from ortgraph.runtime.detect import check_torch, detect_runtime, torch_version

    out = Output(as_json)
    check_precision(precision)
    check_torch(torch_version())
    detect_runtime()
    _prepare(folder)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = [_BUSY.format(load=load, cores=cores)] if load > _BUSY_SHARE * cores else []
    for remark in busy:
        out.note(remark)
    with out.progress("starting PyTorch"):
        from ortgraph.cli.demo_run import Plan

    limited = quick and steps is None
    plan = Plan(
        steps=steps or (_QUICK_STEPS if quick else _STEPS),
        batch=_BATCH,
        held_out=_QUICK_HELD_OUT if quick else 1 << 30,
        seconds=_QUICK_SECONDS if limited else None,
        lr=_LR,
        threads=threads or cores,
        precision=precision,
    )
    outcome = _measure(out, plan, folder)
    remarks = [*_too_few(plan, outcome["result"]), *busy, *_processor_remarks()]
    _write(folder, outcome, remarks)
    _show(out, outcome, folder, remarks)
    out.result(outcome["result"])


def _too_few(plan: Any, result: dict[str, Any]) -> list[str]:
    """Why there is no speed-up, where there is none."""
    from ortgraph.cli.demo_run import LEAST_TIMED, WARM_UP

    if result["speedup"] is not None:
        return []
    done = result["steps"]
    cause = f"--steps {done}" if done == plan.steps else f"the {plan.seconds:g} seconds of --quick were over"
    return [
        f"Stopped after {done} steps per side ({cause}), {WARM_UP} of them warm-up: too few steps to compare: use "
        f"--steps {WARM_UP + LEAST_TIMED} or more."
    ]


def _prepare(folder: pathlib.Path) -> None:
    """Make the folder, or accept one that holds nothing but an earlier demo.

    Raises:
        InputError: It holds other files, or cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file", "--out DIR")
    foreign = sorted(p.name for p in folder.iterdir() if p.name not in FILES) if folder.is_dir() else []
    if foreign:
        raise InputError(f"{folder}: holds {foreign[0]!r}, which the demo did not write", "--out DIR with a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error.strerror})", "--out DIR in a folder of yours") from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder}: cannot be written", "--out DIR in a folder of yours")


def _measure(out: Output, plan: Any, folder: pathlib.Path) -> dict[str, Any]:
    import torch

    import ortgraph
    from ortgraph.cli import demo_run
    from ortgraph.cli.demo_data import load_demo_data
    from ortgraph.cli.demo_model import make_model
    from ortgraph.manager.instruments import Progress
    from ortgraph.manager.numerics import reference_form
    from ortgraph.runtime.detect import detect_runtime

    torch.set_num_threads(plan.threads)
    with out.progress("reading docstrings"):
        data = load_demo_data()
    batches = list(data.batches(plan.batch, plan.steps))
    model = make_model()
    parameters = sum(p.numel() for p in model.parameters())
    out.say(f"{len(data.train):,} docstrings of the standard library to train on, {len(data.held_out)} held out, "
            f"{len(data.classes)} packages; a Transformer of {parameters / 1e6:.1f} million parameters")  # fmt: skip
    with out.progress("capturing"):
        captured = ortgraph.capture(model, {k: torch.from_numpy(v) for k, v in batches[0].items()}, loss=0)
    optimizer, target = ortgraph.optim.AdamW(lr=plan.lr, weight_decay=0.01), detect_runtime().target
    with out.progress("optimizing") as tell:
        lowered = ortgraph.optimize(captured, "O0", optimizer=optimizer, target=target)
        watch = [Progress(tell)]
        optimized = ortgraph.optimize(
            captured, "O2", optimizer=optimizer, target=target, precision=plan.precision, instruments=watch
        )
    captured.save(folder / "captured.onnx")
    optimized.graph.save(folder / "step.onnx")
    session = ortgraph.TrainingSession(optimized.graph, threads=plan.threads)
    with out.progress("verifying gradients"):
        plain = ortgraph.TrainingSession(reference_form(captured), threads=plan.threads)
        errors = demo_run.gradient_errors(model, session, plain, batches[0], plan.precision)
        del plain
    worst = _check_gradients(errors, plan.precision)
    with out.progress("training both", total=plan.steps) as tell:
        curves = demo_run.train_both(model, session, batches, plan, tell)
    with out.progress("classifying held-out documents"):
        accuracy = demo_run.accuracies(model, session, data, plan)
    session.export_inference(folder / "classifier.onnx")
    eager, ours = curves.timed()
    result = {
        "nodes_before": lowered.graph.node_count(),
        "nodes_after": optimized.graph.node_count(),
        "nodes_captured": captured.node_count(),
        "gradient_max_relative_error": worst,
        "loss_max_difference": curves.loss_max_difference,
        "ms_per_step_pytorch": statistics.median(eager),
        "ms_per_step_ortgraph": statistics.median(ours),
        "speedup": curves.speedup,
        "accuracy_pytorch": accuracy[0],
        "accuracy_ortgraph": accuracy[1],
        "accuracy_guessing": data.held_out.largest_class,
        "arena_bytes": session.arena_bytes,
        "arena_bound_bytes": session.max_load_bytes,
        "parameter_bytes": session.parameter_bytes,
        "state_bytes": session.state_bytes,
        "steps": len(curves.loss_pytorch),
        "threads": plan.threads,
        "precision": plan.precision,
        "parameters": parameters,
        "folder": str(folder),
    }
    return {"result": result, "errors": errors, "curves": curves, "before": lowered.graph, "optimized": optimized}


def _check_gradients(errors: dict[str, dict[str, float]], precision: str) -> float:
    """The largest difference to PyTorch and to the unoptimized graph. Raises VerificationError above the tolerance."""
    from ortgraph.cli.demo_run import GRADIENTS
    from ortgraph.manager.numerics import tolerance_of

    worst, name = max((v, k) for measure in GRADIENTS[:2] for k, v in errors[measure].items())
    if worst > tolerance_of(precision).gradient:
        raise VerificationError(
            f"the gradient of %{name} is off by {worst:.1e}", "please report this with `ortgraph doctor`"
        )
    return worst


def _write(folder: pathlib.Path, outcome: dict[str, Any], remarks: list[str]) -> None:
    from ortgraph.report.comparison import comparison_page

    options.write_text(folder / "result.json", json.dumps(outcome["result"], indent=1) + "\n")
    page = comparison_page(
        outcome["result"], outcome["optimized"], outcome["before"], outcome["errors"], outcome["curves"], remarks
    )
    options.write_text(folder / "report.html", page)


def _processor_remarks() -> list[str]:
    from ortgraph.cli.doctor import processor_name

    name = processor_name()
    return [f"Processor: {name}.", *([_AMD] if "AMD" in name else [])]


def _show(out: Output, outcome: dict[str, Any], folder: pathlib.Path, remarks: list[str]) -> None:
    from ortgraph.manager.optimize import count_operators
    from ortgraph.report import tables

    rows = tables.operator_change_rows(count_operators(outcome["before"]), count_operators(outcome["optimized"].graph))
    columns = ("operator", "unoptimized (-O0)", "-O2", "change")
    out.table("Nodes of one training step", columns, rows[:_SHOWN_OPERATORS], right=(1, 2, 3))
    for name, text in _summary(outcome["result"], outcome["curves"]):
        out.say(f"{name:<15} {text}")
    for remark in remarks:
        out.say(remark)
    out.say(f"wrote {folder / 'report.html'} and the graphs beside it")


def _summary(r: dict[str, Any], curves: Any) -> list[tuple[str, str]]:
    speedup = "none: too few steps to compare"
    if r["speedup"] is not None:
        timed = len(curves.timed()[0])
        speedup = f"{r['speedup']:.2f} (median ratio of {timed} steps run in turn, {r['threads']} threads each)"
    mib = {k: r[k] / 2**20 for k in r if k.endswith("_bytes")}
    ends = curves.loss_pytorch[:_MEAN], curves.loss_pytorch[-_MEAN:], curves.loss_ortgraph[-_MEAN:]
    first, eager, ours = (statistics.mean(losses) for losses in ends)
    return [
        ("nodes", f"{r['nodes_before']} → {r['nodes_after']} (-O0 → -O2, forward, backward and update)"),
        ("gradients", f"largest relative difference to PyTorch and to the unoptimized graph "
                      f"{r['gradient_max_relative_error']:.1e}"),
        ("time per step", f"PyTorch {r['ms_per_step_pytorch']:.1f} ms, ortgraph {r['ms_per_step_ortgraph']:.1f} ms"),
        ("speed-up", speedup),
        ("loss", f"{first:.3f} → PyTorch {eager:.3f}, ortgraph {ours:.3f}; the curves differ by at most "
                 f"{r['loss_max_difference']:.1e}"),
        ("accuracy", f"PyTorch {r['accuracy_pytorch']:.1%}, ortgraph {r['accuracy_ortgraph']:.1%} of held-out texts "
                     f"(always guessing one package: {r['accuracy_guessing']:.1%})"),
        ("memory", f"arena {mib['arena_bytes']:.1f} MiB (no plan below {mib['arena_bound_bytes']:.1f}), parameters "
                   f"{mib['parameter_bytes']:.1f}, states {mib['state_bytes']:.1f}"),
    ]  # fmt: skip
