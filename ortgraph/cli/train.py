"""``ortgraph train``: capture, optimize and train what a build function returns."""

from __future__ import annotations

import functools
import itertools
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import numpy as np
import typer

from ortgraph.capture.build_spec import BuildSpec, UserCode
from ortgraph.cli import options
from ortgraph.cli.output import Output, verb
from ortgraph.errors import InputError, NonFiniteLossError
from ortgraph.manager.precision_option import precision_pass
from ortgraph.plan.budget import check_budget

_TARGET = typer.Argument(metavar="FILE.py:BUILD", help="A build function.")
_STEPS = typer.Option(
    "--steps", min=1, help="Steps in total, those before --resume included; one pass over the data if absent."
)
_BATCHES = typer.Option("--batches", min=1, metavar="N", help="Use only the first N batches of the data.")
_CHECKPOINT = typer.Option("--checkpoint", metavar="DIR", help="Where to save the state at the end.")
_EVERY = typer.Option("--save-every", min=1, metavar="N", help="Also save a checkpoint every N steps.")
_RESUME = typer.Option("--resume", help="Go on from --checkpoint; the data is read on from the same place.")
_OPTIMIZER = typer.Option(
    "--optimizer", metavar="NAME", help="adamw, lamb, sgd or 'adamw{lr=1e-3}'; replaces the build function's."
)
_OPTIMIZE = typer.Option(
    "--optimize/--no-optimize", help="Optimize the graph first (-O2), or run it as captured (-O0)."
)
_BUDGET = typer.Option("--memory-budget", metavar="BUDGET", help="60% of what the given order needs, or bytes: 30MB.")
_RUNTIME = typer.Option("--target", help="What computes: onnxruntime-training:cuda and so on; the installed one's CPU.")
_INFERENCE = typer.Option("--export-inference", metavar="FILE", help="Write the trained model for inference (.onnx).")


@verb
def run(
    target: Annotated[str, _TARGET],
    steps: Annotated[int | None, _STEPS] = None,
    batches: Annotated[int | None, _BATCHES] = None,
    checkpoint: Annotated[pathlib.Path | None, _CHECKPOINT] = None,
    save_every: Annotated[int | None, _EVERY] = None,
    resume: Annotated[bool, _RESUME] = False,
    optimizer: Annotated[str | None, _OPTIMIZER] = None,
    optimize: Annotated[bool, _OPTIMIZE] = True,
    level: int = options.LEVEL,
    precision: str = options.PRECISION,
    precision_overrides: str | None = options.OVERRIDES,
    memory_budget: Annotated[str | None, _BUDGET] = None,
    threads: Annotated[int | None, options.THREADS] = None,
    export_inference: Annotated[pathlib.Path | None, _INFERENCE] = None,
    runtime: Annotated[str | None, _RUNTIME] = None,
    as_json: bool = options.JSON,
) -> None:
    """Train for some steps, with checkpoints; then evaluate, if the build function says how."""
    out = Output(as_json)
    if checkpoint is None and (resume or save_every):
        raise InputError("--resume and --save-every need a folder", "--checkpoint DIR")
    if resume and checkpoint is not None and not checkpoint.is_dir():
        raise InputError(f"{checkpoint}: no such checkpoint", "train without --resume first")
    if checkpoint is not None:
        options.check_folder(checkpoint)
    if export_inference is not None:
        options.check_output(export_inference, [], suffix=".onnx")
    chosen = options.parse_optimizer(optimizer)
    budget = None if memory_budget is None else check_budget(memory_budget)
    preset = options.pipeline_of(level if optimize else 0, None)
    precision_pass(precision, precision_overrides)  # an unknown one is refused before any work
    cast = {"precision": precision, "precision_overrides": precision_overrides}
    spec, session, report = _session(out, target, chosen, preset, budget, threads, cast, runtime)
    if resume:
        session.load_checkpoint(checkpoint)
        out.say(f"resumed {checkpoint} at step {session.steps}")
    save = None if checkpoint is None else functools.partial(session.save_checkpoint, checkpoint)
    losses, milliseconds = _train(out, spec, session, steps, batches, save, save_every)
    write = functools.partial(_write, session, save, export_inference)
    try:
        scores = evaluate(spec, session)
    except NonFiniteLossError:
        raise
    except BaseException:  # the training is kept when only what follows it fails
        write()
        raise
    write()
    _show(out, losses, milliseconds, session, scores, report, checkpoint)


def _write(session: Any, save: Callable[[], object] | None, inference: pathlib.Path | None) -> None:
    if save is not None:
        save()
    if inference is not None:
        session.export_inference(inference)


def _session(
    out: Output,
    target: str,
    chosen: Any,
    preset: str,
    budget: str | None,
    threads: int | None,
    cast: dict[str, Any],
    runtime: str | None,
) -> tuple[BuildSpec, Any, Any]:
    import ortgraph
    from ortgraph.cli.capturing import capture_build
    from ortgraph.manager.instruments import Progress
    from ortgraph.ops.targets import target_of
    from ortgraph.runtime.detect import detect_runtime
    from ortgraph.runtime.device import device_of

    installed = detect_runtime().target  # without a runtime nothing below is worth the wait
    runs_on = target_of(runtime or installed, "--target: ").text
    device_of(runs_on)
    spec, graph = capture_build(out, target)
    chosen = chosen or spec.optimizer or ortgraph.optim.AdamW()
    if not isinstance(chosen, ortgraph.optim.Optimizer):
        raise InputError(f"{target}: 'optimizer' is {type(chosen).__name__}", "ortgraph.optim.AdamW(lr=1e-3)")
    with out.progress("optimizing") as tell:
        instruments = [Progress(tell)]
        result = ortgraph.optimize(
            graph, preset, optimizer=chosen, target=runs_on, memory_budget=budget, instruments=instruments, **cast
        )
    out.say(f"{preset}: {result.report.nodes_before} → {result.report.nodes_after} nodes")
    return spec, ortgraph.TrainingSession(result.graph, threads=threads, target=runs_on), result.report


def endless(spec: BuildSpec, limit: int | None) -> Iterator[Any]:
    """Batches of the data, pass after pass.

    Raises:
        InputError: A pass yields nothing (an empty data set, or an iterator that can be read only once).
    """
    for epoch in itertools.count(1):
        empty = True
        for batch in spec.batches(limit):
            empty = False
            yield batch
        if empty:
            raise InputError(
                f"{spec.source}: data yields no batch in pass {epoch}", "return a list or a DataLoader, no generator"
            )


def _train(
    out: Output,
    spec: BuildSpec,
    session: Any,
    steps: int | None,
    limit: int | None,
    save: Callable[[], object] | None,
    save_every: int | None,
) -> tuple[list[float], list[float]]:
    """Returns losses and milliseconds per step."""
    from ortgraph.cli.capturing import feeds

    done = session.steps  # the data is read on from where the checkpoint was made
    source = spec.batches(limit) if steps is None else itertools.islice(endless(spec, limit), steps)
    losses: list[float] = []
    milliseconds: list[float] = []
    with out.progress("training", total=None if steps is None else max(steps - done, 0)) as tell:
        for batch in itertools.islice(source, done, None):
            arrays = feeds(spec, batch)
            started = time.perf_counter()
            losses.append(session.step(arrays))
            milliseconds.append((time.perf_counter() - started) * 1e3)
            tell(f"step {session.steps}, loss {losses[-1]:.4f}", advance=1)
            if save is not None and save_every is not None and session.steps % save_every == 0:
                save()
    if not losses:
        out.note(f"nothing to do: {done} steps are done already")
    return losses, milliseconds


def evaluate(spec: BuildSpec, session: Any) -> dict[str, float]:
    """What the build function's ``evaluate`` says: its own numbers, or the mean loss over its batches.

    Raises:
        InputError: The function raises, or returns something else than numbers.
        NonFiniteLossError: The loss (of a function: the number that it calls ``loss``) is NaN or infinite.
    """
    scores = _scores(spec, session)
    if not math.isfinite(scores.get("loss", 0.0)):
        raise NonFiniteLossError(
            f"the loss of the evaluation after step {session.steps} is {scores['loss']}; this state is not saved",
            "lower the learning rate or set max_grad_norm",
        )
    return scores


def _scores(spec: BuildSpec, session: Any) -> dict[str, float]:
    from ortgraph.cli.capturing import feeds

    if spec.evaluate is None:
        return {}
    if callable(spec.evaluate):
        with UserCode(spec.file, f"{spec.source}: evaluate"):
            scores = spec.evaluate(session)
        named = scores if isinstance(scores, dict) else {"score": scores}
        try:
            return {str(k): float(v) for k, v in named.items()}
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{spec.source}: evaluate returned {scores!r}", "return a number or a dict of numbers"
            ) from error
    losses = [float(session.evaluate(feeds(spec, b))[session.signature.loss]) for b in spec.evaluate]
    return {"loss": float(np.mean(losses))} if losses else {}


def _show(
    out: Output,
    losses: list[float],
    milliseconds: list[float],
    session: Any,
    scores: dict[str, float],
    report: Any,
    checkpoint: pathlib.Path | None,
) -> None:
    # The first step also makes the program: it is left out where there are others.
    median = statistics.median(milliseconds[1:] or milliseconds) if milliseconds else None
    if losses:
        out.say(f"step {session.steps}: loss {losses[0]:.4f} → {losses[-1]:.4f}, {median:.3g} ms per step (median)")
    for name, value in scores.items():
        out.say(f"evaluation: {name} {value:.4f}")
    if checkpoint is not None:
        out.say(f"saved {checkpoint}")
    out.result({
        "steps": session.steps,
        "losses": losses,
        "ms_per_step": median,
        "evaluation": scores,
        "nodes_before": report.nodes_before,
        "nodes_after": report.nodes_after,
        "arena_bytes": session.arena_bytes,
        "checkpoint": None if checkpoint is None else str(checkpoint),
    })  # fmt: skip
