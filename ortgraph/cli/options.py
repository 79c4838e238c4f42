"""Options that several verbs share, and the little languages of their values."""

from __future__ import annotations

import difflib
import os
import pathlib
import re
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import typer

from ortgraph.cli.output import Output
from ortgraph.errors import InputError, PipelineSyntaxError
from ortgraph.graph import TrainingGraph, load

JSON = typer.Option(False, "--json", help="Print one JSON object as the last line of stdout.")
FORCE = typer.Option(False, "--force", help="Allow OUT to replace an input.")
SHAPES = typer.Option("--shapes", metavar="SIZES", help="Sizes of symbolic dimensions: batch=8,sequence=128.")
BATCH = typer.Option("--batch", metavar="FILE", help="Compare on this batch: an .npz file of arrays by input name.")
THREADS = typer.Option("--threads", min=1, help="Threads of one operator; all processors if absent.")
PRECISION = typer.Option("fp32", "--precision", metavar="NAME", help="fp32, bf16 or fp16 (docs/precision.md).")
OVERRIDES = typer.Option(
    None, "--precision-overrides", metavar="TEXT", help="By operator or module: 'keep=layer.3.*|Gelu;low=Softmax'."
)
LEVEL = typer.Option(2, "-O", metavar="LEVEL", help="Preset: -O0, -O1, -O2 or -O3.")

_NAME = re.compile(r"[A-Za-z_][\w.]*")
_CALL = re.compile(r"(?P<name>[A-Za-z]\w*)\s*(?:\{(?P<options>[^{}]*)\})?")


def parse_sizes(text: str | None) -> dict[str, int]:
    """``batch=8,sequence=128`` to sizes by dimension name.

    Raises:
        InputError: Anything else, a size below 1, or a name given twice.
    """
    sizes: dict[str, int] = {}
    for part in _parts(text):
        name, equals, size = (p.strip() for p in part.partition("="))
        if not equals or not _NAME.fullmatch(name) or not size.isdecimal() or int(size) < 1:
            raise InputError(f"--shapes: {part.strip()!r} is not NAME=SIZE", "--shapes batch=8,sequence=128")
        if name in sizes:
            raise InputError(f"--shapes: {name} is given twice", "give each dimension once")
        sizes[name] = int(size)
    return sizes


def parse_dynamic(texts: Iterable[str]) -> dict[str, dict[int, str]]:
    """``x:0=batch,1=sequence`` (one per data input) to dimension names by axis.

    Raises:
        InputError: Anything else, or an input or axis given twice.
    """
    dynamic: dict[str, dict[int, str]] = {}
    for text in texts:
        name, colon, axes = text.partition(":")
        if not colon or not name.strip() or name in dynamic:
            raise InputError(
                f"--dynamic: {text!r} is not INPUT:AXIS=NAME,... with a new input", "--dynamic x:0=batch,1=sequence"
            )
        dynamic[name.strip()] = named = {}
        for part in _parts(axes):
            axis, _, dim = (p.strip() for p in part.partition("="))
            if not axis.isdecimal() or not _NAME.fullmatch(dim) or int(axis) in named:
                raise InputError(
                    f"--dynamic {name}: {part.strip()!r} is not AXIS=NAME with a new axis",
                    "--dynamic x:0=batch,1=sequence",
                )
            named[int(axis)] = dim
    return dynamic


def _parts(text: str | None) -> list[str]:
    return text.split(",") if text and text.strip() else []


def parse_optimizer(text: str | None) -> Any:
    """``adamw``, ``lamb``, ``sgd`` or ``adamw{lr=1e-3 betas=0.9|0.999}`` to an optimizer of ``ortgraph.optim``; None for None.

    Raises:
        InputError: The text does not parse, the optimizer is unknown, or it does not take an option.
    """
    if text is None:
        return None
    from ortgraph.optim import BY_TEXT, parse

    found = _CALL.fullmatch(text.strip())
    if found is None and "(" in text:
        return parse(text)  # the form that graphs and reports show
    if found is None:
        raise InputError(f"--optimizer: {text!r} does not parse", "--optimizer 'adamw{lr=1e-3 weight_decay=0.01}'")
    if found["name"].lower() not in BY_TEXT:
        near = difflib.get_close_matches(found["name"].lower(), BY_TEXT, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(BY_TEXT)}"
        raise InputError(f"--optimizer: unknown optimizer {found['name']!r}", hint)
    entries = (found["options"] or "").replace(",", " ").split()
    return parse(f"{found['name']}({';'.join(e.replace('|', ':') for e in entries)})")


def pipeline_of(level: int, pipeline: str | None) -> str:
    """The preset or text pipeline that ``-O`` and ``-p`` name.

    Raises:
        PipelineSyntaxError: There is no such preset.
    """
    if pipeline is not None:
        return pipeline
    from ortgraph.manager import registry

    known = registry.preset_names()
    if f"O{level}" not in known:
        raise PipelineSyntaxError(
            f"unknown preset O{level}", f"one of {', '.join(f'-{n}' for n in known)}, or -p PIPELINE"
        )
    return f"O{level}"


def check_output(
    path: pathlib.Path, inputs: Iterable[pathlib.Path], *, suffix: str, force: bool = False
) -> pathlib.Path:
    """Refuse an output that cannot be written or would replace an input, before any work is done.

    Args:
        path: The file to be written.
        inputs: Files that were read.
        suffix: What the path must end in.
        force: Allow an input to be replaced.

    Raises:
        InputError: Says which of these it is.
    """
    if not path.name:
        raise InputError("the output has no name", f"-o OUT{suffix}")
    if path.suffix != suffix:
        raise InputError(f"{path}: the output is a {suffix} file", f"-o {path.with_suffix(suffix)}")
    if path.is_dir():
        raise InputError(f"{path}: is a folder", "give a file name")
    folder = path.parent
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder", f"mkdir -p {folder}")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise InputError(f"{path}: cannot be written (permission denied)", "give another folder")
    if not force and any(_same(path, i) for i in inputs):
        raise InputError(f"{path}: is the input, which is never overwritten", "give another -o, or --force")
    return path


def check_folder(path: pathlib.Path) -> None:
    """Refuse a folder that cannot be made or written, before any work is done.

    Raises:
        InputError: Its parent is missing, or one of them may not be written.
    """
    parent = path.absolute().parent
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: is a file", "give a folder")
    if not parent.is_dir():
        raise InputError(f"{parent}: no such folder", f"mkdir -p {parent}")
    if not os.access(path if path.is_dir() else parent, os.W_OK):
        raise InputError(f"{path}: cannot be written (permission denied)", "give another folder")


def _same(a: pathlib.Path, b: pathlib.Path) -> bool:
    return a.resolve() == b.resolve() or (a.exists() and b.exists() and a.samefile(b))


def read_graph(out: Output, path: pathlib.Path) -> TrainingGraph:
    """``load`` with a spinner: a large file takes seconds.

    Raises:
        InputError: See ``ortgraph.load``; also when the path is a folder or names a build function.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a folder, not an .onnx file", "name the file in it")
    if str(path).partition(":")[0].endswith(".py"):
        raise InputError(
            f"{path}: is a build function, and this command takes a training graph (.onnx)",
            f"`ortgraph export {path} -o train.onnx` first, then name train.onnx",
        )
    with out.progress(f"reading {path}"):
        return load(path)


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a text file.

    Raises:
        InputError: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})", "give another path") from error


def save_graph(graph: TrainingGraph, path: pathlib.Path) -> pathlib.Path:
    """``graph.save`` with a full disk or a lost folder told as an InputError."""
    try:
        return graph.save(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})", "give another path") from error


def named_sizes(graph: TrainingGraph, sizes: Mapping[str, int]) -> None:
    """Refuse a dimension name that no input of the graph has.

    Raises:
        InputError: Names the nearest dimension.
    """
    known = sorted(
        {str(d) for v in graph.graph.inputs for d in (v.shape or ()) if not isinstance(d, int) and str(d) != "None"}
    )
    for name in sizes:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = (
            f"did you mean {near[0]}?" if near else f"symbolic dimensions of this graph: {', '.join(known) or 'none'}"
        )
        raise InputError(f"--shapes: no input has a symbolic dimension called {name!r}", hint)


def batch_of(graph: TrainingGraph, sizes: Mapping[str, int], path: pathlib.Path | None) -> dict[str, np.ndarray]:
    """The batch of an .npz file, or one made up from the graph's input types.

    Raises:
        InputError: The file is missing, no .npz, or lacks an input.
    """
    from ortgraph.manager.numerics import example_batch

    if any(not isinstance(d, int) for v in graph.graph.inputs for d in (v.shape or ())):
        named_sizes(graph, sizes)
    if path is None:
        return example_batch(graph, sizes)
    if not path.is_file():
        raise InputError(f"{path}: no such file", "numpy.savez(path, **batch) writes one")
    try:
        with np.load(path, allow_pickle=False) as stored:
            batch = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, AttributeError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path}: not a readable .npz file ({error})", "numpy.savez(path, **batch) writes one"
        ) from error
    missing = [n for n in graph.signature.inputs if n not in batch]
    if missing:
        raise InputError(f"{path}: has no array {missing[0]!r}", f"give {', '.join(graph.signature.inputs)}")
    return batch
