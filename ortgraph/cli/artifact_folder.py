"""``ortgraph optimize`` on a folder of ONNX Runtime's on-device training artifacts: a folder in, a folder out."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from ortgraph.cli import options
from ortgraph.cli.optimize_run import Request, apply
from ortgraph.cli.output import Output
from ortgraph.errors import InputError
from ortgraph.ops.precision import FP32


def optimize(out: Output, source: pathlib.Path, output: pathlib.Path, request: Request) -> Any:
    """Read, rewrite, verify and write. Returns the OptimizeResult.

    Of a preset only the passes up to stage ``optimized`` run: the optimizer is a model of its own here, and the
    on-device runtime places memory itself.

    Raises:
        InputError: An option does not go with folders, or OUT is not a new folder.
    """
    from ortgraph.capture.artifacts import read_artifacts, write_artifacts
    from ortgraph.manager import pipeline_text

    if request.optimizer is not None:
        raise InputError("--optimizer goes with a graph: artifacts keep their own optimizer", "leave --optimizer out")
    if request.budget is not None:
        raise InputError(
            "--memory-budget goes with a graph: the on-device runtime places memory itself", "leave it out"
        )
    if request.precision != FP32:
        raise InputError("--precision goes with a graph: the on-device runtime trains in float32", "leave it out")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: exists and is not an empty folder", "give a new folder: nothing is overwritten")
    options.check_folder(output)
    with out.progress(f"reading {source}"):
        graph = read_artifacts(source)
    options.named_sizes(graph, request.sizes)
    passes = passes_to_optimized(request)
    result = apply(out, graph, dataclasses.replace(request, pipeline=pipeline_text(passes)))
    try:
        with out.progress(f"writing {output}"):
            write_artifacts(result.graph, output)
    except OSError as error:
        raise InputError(f"{output}: cannot be written ({error.strerror or error})", "give another folder") from error
    return result


def passes_to_optimized(request: Request) -> list[Any]:
    """The passes of a preset until the graph is ``optimized``; a spelled-out pipeline as it stands."""
    from ortgraph.manager import parse_pipeline, registry

    if request.pipeline not in registry.preset_names():
        return list(parse_pipeline(request.pipeline))
    preset = registry.preset(
        request.pipeline, optimizer=None, target=request.target, shapes=request.sizes, accumulation_steps=1
    )
    last = next(i for i, p in enumerate(preset) if getattr(p, "sets_stage", None) == "optimized")
    return list(preset[: last + 1])
