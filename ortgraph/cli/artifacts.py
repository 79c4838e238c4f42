"""``ortgraph artifacts``: from a model to what a device trains."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Any

import typer

from ortgraph.cli import options
from ortgraph.cli.output import Output, verb
from ortgraph.errors import InputError, UnsupportedError
from ortgraph.graph import TrainingGraph, load

_SOURCE = typer.Argument(
    metavar="MODEL.onnx|TRAIN.onnx|FILE.py:BUILD", help="A forward model, a training graph or a build function."
)
_OUTPUT = typer.Option("-o", "--output", metavar="FOLDER", help="A new folder.")
_STANDARD = typer.Option("--standard", help="Standard operators only: for stock onnxruntime, with a driver.")
_LOSS = typer.Option("--loss", help="For MODEL.onnx: cross_entropy, mse, l1, bce_with_logits, or a scalar output.")
_ON = typer.Option("--loss-on", metavar="OUTPUT", help="For MODEL.onnx: the output that the loss reads.")
_TRAINABLE = typer.Option("--trainable", metavar="PATTERN", help="For MODEL.onnx: weights to train, may be repeated.")
_OPTIMIZER = typer.Option("--optimizer", metavar="NAME", help="adamw, lamb, sgd or 'adamw{lr=1e-3}'.")
_BUDGET = typer.Option("--memory-budget", metavar="BUDGET", help="With --standard: 60% of intermediates, or bytes.")


@verb
def run(
    source: Annotated[str, _SOURCE],
    output: Annotated[pathlib.Path, _OUTPUT],
    standard: Annotated[bool, _STANDARD] = False,
    loss: Annotated[str | None, _LOSS] = None,
    loss_on: Annotated[str | None, _ON] = None,
    trainable: Annotated[list[str], _TRAINABLE] = [],  # noqa: B006
    optimizer: Annotated[str, _OPTIMIZER] = "adamw",
    shapes: Annotated[str | None, options.SHAPES] = None,
    memory_budget: Annotated[str | None, _BUDGET] = None,
    as_json: bool = options.JSON,
) -> None:
    """Write a folder that onnxruntime.training.api trains or, with --standard, any onnxruntime."""
    out = Output(as_json)
    chosen, sizes = options.parse_optimizer(optimizer), options.parse_sizes(shapes)
    if memory_budget is not None and not standard:
        raise InputError("--memory-budget goes with --standard: the training API places memory itself", "leave it out")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: exists and is not an empty folder", "give a new folder: nothing is overwritten")
    options.check_folder(output)
    graph = _read(out, source, loss, loss_on, trainable)
    options.named_sizes(graph, sizes)
    if standard:
        from ortgraph.capture.standard_step import write_standard

        with out.progress(f"writing {output}"):
            manifest = write_standard(graph, output, chosen, shapes=sizes, memory_budget=memory_budget)
        memory = manifest["memory"]
        told = "" if memory is None else f"; a step takes {sum(memory.values()):,} bytes beside its results"
        out.say(f"wrote {output}: {len(manifest['parameters'])} parameters, standard operators only{told}")
        out.result({"output": str(output), "standard": True, "memory": memory})
        return
    _for_training_api(out, graph, output, chosen, sizes)
    out.say(f"wrote {output}, for onnxruntime.training.api")
    out.result({"output": str(output), "standard": False, "optimizer": str(chosen)})


def _read(out: Output, source: str, loss: str | None, loss_on: str | None, trainable: list[str]) -> TrainingGraph:
    """The captured training graph of any of the three sources."""
    path = pathlib.Path(source)
    given = loss is not None or loss_on is not None or bool(trainable)
    if path.suffix != ".onnx":
        if given:
            raise InputError("--loss, --loss-on and --trainable go with MODEL.onnx", "put 'loss' into the build dict")
        from ortgraph.cli.capturing import capture_build

        return capture_build(out, source)[1]
    if not path.is_file():
        raise InputError(f"{path}: no such file", "check the path")
    if not given and (graph := load(path)).has_signature:
        return graph
    from ortgraph.capture.from_onnx import from_onnx

    with out.progress(f"differentiating {path}"):
        return from_onnx(path, loss=loss, trainable=trainable or None, output=loss_on)


def _for_training_api(
    out: Output, graph: TrainingGraph, output: pathlib.Path, optimizer: Any, sizes: dict[str, int]
) -> None:
    from ortgraph.capture.artifacts import write_artifacts
    from ortgraph.cli.artifact_folder import passes_to_optimized
    from ortgraph.cli.optimize_run import apply, make_request
    from ortgraph.manager import pipeline_text

    spec = _spec(optimizer)
    text = ",".join(f"{n}={s}" for n, s in sizes.items())
    request = make_request(
        level=2, pipeline=None, optimizer=None, target="onnxruntime-training", budget=None, precision="fp32",
        overrides=None, shapes=text or None, batch=None, verify="signature", explain=None, print_after=None,
        reproducer=None, plugins=(),
    )  # fmt: skip
    request = dataclasses.replace(request, pipeline=pipeline_text(passes_to_optimized(request)))
    result = apply(out, graph, request)
    with out.progress(f"writing {output}"):
        write_artifacts(result.graph, output, spec)


def _spec(optimizer: Any) -> Any:
    """The training API's optimizer with the same settings.

    Raises:
        UnsupportedError: It has none.
    """
    from ortgraph.capture.artifacts import OptimizerSpec
    from ortgraph.optim import SGD, AdamW

    simple = not (optimizer.groups or optimizer.no_decay or optimizer.max_grad_norm or optimizer.loss_scale)
    if isinstance(optimizer, AdamW) and simple:
        alpha, beta = optimizer.betas
        return OptimizerSpec(
            "AdamWOptimizer",
            {"alpha": alpha, "beta": beta, "epsilon": optimizer.eps, "weight_decay": optimizer.weight_decay},
        )
    if isinstance(optimizer, SGD) and simple and not (optimizer.momentum or optimizer.weight_decay):
        return OptimizerSpec("SGDOptimizerV2")
    raise UnsupportedError(
        f"onnxruntime.training.api has no {optimizer}",
        "adamw or sgd without momentum, decay groups and clipping; or --standard, which takes them all",
    )
