"""Options that several verbs share, and the little languages of their values."""

from __future__ import annotations

import ast
import difflib
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import typer

from ortgraph.errors import InputError, OrtgraphError, PipelineSyntaxError
from ortgraph.graph import TrainingGraph

JSON = typer.Option(False, "--json", help="Print one JSON object as the last line of stdout.")
FORCE = typer.Option(False, "--force", help="Allow OUT to replace an input.")
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
    """``adamw`` or ``adamw{lr=1e-3 betas=0.9|0.999}`` to an optimizer of ``ortgraph.optim``; None for None.

    Raises:
        InputError: The text does not parse, the optimizer is unknown, or it does not take an option.
    """
    if text is None:
        return None
    found = _CALL.fullmatch(text.strip())
    if found is None:
        raise InputError(f"--optimizer: {text!r} does not parse", "--optimizer 'adamw{lr=1e-3 weight_decay=0.01}'")
    import ortgraph.optim as optim

    known = {
        n.lower(): getattr(optim, n)
        for n in getattr(optim, "__all__", ("AdamW",))
        if isinstance(getattr(optim, n), type)
    }
    cls = known.get(found["name"].lower())
    if cls is None:
        near = difflib.get_close_matches(found["name"].lower(), list(known), n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(sorted(known))}"
        raise InputError(f"--optimizer: unknown optimizer {found['name']!r}", hint)
    options = {}
    for item in (found["options"] or "").replace(",", " ").split():
        key, equals, value = item.partition("=")
        if not equals:
            raise InputError(f"--optimizer: {item!r} is not OPTION=VALUE", "--optimizer 'adamw{lr=1e-3}'")
        options[key.replace("-", "_")] = _number(item, value)
    try:
        return cls(**options)
    except OrtgraphError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError(
            f"--optimizer {found['name']}: {error}", "see the optimizer's arguments in ortgraph.optim"
        ) from error


def _number(item: str, text: str) -> Any:
    if text in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text]
    try:
        values = tuple(ast.literal_eval(part) for part in text.split("|"))
    except (ValueError, SyntaxError) as error:
        raise InputError(f"--optimizer: the value of {item!r} is no number", "lr=1e-3, betas=0.9|0.999") from error
    return values if len(values) > 1 else values[0]


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


def _same(a: pathlib.Path, b: pathlib.Path) -> bool:
    return a.resolve() == b.resolve() or (a.exists() and b.exists() and a.samefile(b))


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
