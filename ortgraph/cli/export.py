"""``ortgraph export``: from a model to a training graph."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any

import typer

from ortgraph.cli import options
from ortgraph.cli.output import Output, verb
from ortgraph.errors import CaptureError, InputError
from ortgraph.graph import TrainingGraph, load

_INPUT = typer.Argument(metavar="FILE.py:BUILD|MODEL.onnx", help="A build function, or a forward model in ONNX.")
_OUTPUT = typer.Option("-o", "--output", metavar="OUT", help="The training graph to write (.onnx).")
_OPSET = typer.Option("--opset", min=18, max=21, help="ONNX opset, 18 to 21.")
_DYNAMIC = typer.Option(
    "--dynamic", metavar="INPUT:AXIS=NAME,...", help="Symbolic dimensions, once per input: x:0=batch,1=sequence."
)
_LOSS = typer.Option("--loss", help="For MODEL.onnx: cross_entropy, mse, l1, bce_with_logits, or a scalar output.")
_ON = typer.Option("--loss-on", metavar="OUTPUT", help="For MODEL.onnx: the output that the loss reads.")
_TRAINABLE = typer.Option("--trainable", metavar="PATTERN", help="For MODEL.onnx: weights to train, may be repeated.")


@verb
def run(
    source: Annotated[str, _INPUT],
    output: Annotated[pathlib.Path, _OUTPUT],
    opset: Annotated[int | None, _OPSET] = None,
    dynamic: Annotated[list[str], _DYNAMIC] = [],  # noqa: B006
    loss: Annotated[str | None, _LOSS] = None,
    loss_on: Annotated[str | None, _ON] = None,
    trainable: Annotated[list[str], _TRAINABLE] = [],  # noqa: B006
    force: bool = options.FORCE,
    as_json: bool = options.JSON,
) -> None:
    """Capture one training step of a PyTorch module or of an ONNX forward model, and write it."""
    out = Output(as_json)
    axes = options.parse_dynamic(dynamic)
    path = pathlib.Path(source)
    is_onnx = path.suffix == ".onnx"
    inputs = [path, path.with_suffix(".safetensors")] if is_onnx else []
    options.check_output(output, inputs, suffix=".onnx", force=force)
    if is_onnx:
        graph = _from_onnx(out, path, loss, loss_on, trainable, opset, bool(axes))
    elif loss is not None or loss_on is not None or trainable:
        raise InputError(
            "--loss, --loss-on and --trainable go with MODEL.onnx", "put 'loss' into the build function's dict"
        )
    else:
        from ortgraph.cli.capturing import capture_build

        _, graph = capture_build(out, source, axes or None, opset)
    options.save_graph(graph, output)
    _show(out, graph, output)


def _from_onnx(
    out: Output,
    path: pathlib.Path,
    loss: str | None,
    loss_on: str | None,
    trainable: list[str],
    opset: int | None,
    has_axes: bool,
) -> TrainingGraph:
    from ortgraph.capture.from_onnx import from_onnx

    if has_axes:
        raise InputError("--dynamic goes with a build file", "an ONNX model brings its own symbolic dimensions")
    if not path.is_file():
        raise InputError(f"{path}: no such file", "check the path")
    try:
        with out.progress(f"differentiating {path}"):
            return from_onnx(path, loss=loss, trainable=trainable or None, output=loss_on, opset=opset)
    except CaptureError as error:
        if load(path).has_signature:
            raise InputError(f"{path}: is a training graph already", f"ortgraph optimize {path} -o OUT.onnx") from error
        raise


def _show(out: Output, graph: TrainingGraph, output: pathlib.Path) -> None:
    from ortgraph.report import tables

    signature = graph.signature
    inputs = tables.value_rows([("input", n) for n in signature.inputs], graph)
    out.table("Inputs", ("name", "type"), [r[1:] for r in inputs])
    elements = sum(v.size for n, v in graph.values.items() if n in {p.name for p in signature.trainable})
    out.say(f"{graph.node_count()} nodes, {len(signature.trainable)} trainable parameters ({elements:,} numbers)")
    out.say(f"wrote {output} and {output.with_suffix('.safetensors').name} (stage {signature.stage})")
    data: dict[str, Any] = {
        "output": str(output),
        "stage": signature.stage,
        "nodes": graph.node_count(),
        "loss": signature.loss,
        "inputs": {name: kind for _, name, kind in inputs},
        "outputs": list(signature.outputs),
        "trainable": len(signature.trainable),
        "trainable_elements": elements,
    }
    out.result(data)
