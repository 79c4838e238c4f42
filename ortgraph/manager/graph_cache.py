"""Optimized graphs on disk: what one process has compiled, later ones and those beside it read.

A file is named by a hash of everything that its content depends on: the graph before (constants and provenance included,
source lines not), the options, the code of this package, the runtime, the kernels, the processor and the cost table. It
is written under another name and renamed, and starts with a checksum, so that a reader gets a whole graph or none.
Processes that need the same graph at the same time, as the ranks of one job do, wait for the first of them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from ortgraph.errors import OrtgraphError
from ortgraph.graph import TrainingGraph
from ortgraph.graph.edit import SOURCE_KEY
from ortgraph.ops.kernels.lock import one_at_a_time

logger = logging.getLogger(__name__)
_SUFFIX = ".graph"
_MAX_BYTES = 512 << 20  # of all graphs together; those unused for longest go first
_MAX_ENTRY = 64 << 20  # larger ones hold constants for the most part, and are not worth their place
_PACKAGES = ("ortgraph", "ortgraph.passes", "ortgraph.ops")
_SOURCES = (".py", ".cpp", ".h", ".json")


def folder() -> pathlib.Path:
    """Where graphs are kept: ``$ORTGRAPH_CACHE_DIR/graphs``, else in the user's cache folder (XDG)."""
    from ortgraph.ops.kernels.library import cache_folder

    return cache_folder().parent / "graphs"


def cached(graph: TrainingGraph, facts: Sequence[str], make: Callable[[], TrainingGraph]) -> TrainingGraph:
    """The graph that ``make`` returns, from disk when it was made before.

    Args:
        graph: What ``make`` starts from.
        facts: All options that ``make`` depends on, as text.
        make: Optimizes; what it returns has the values of ``graph``, or more, and is then not kept.
    """
    path = folder() / f"{key_of(graph, facts)}{_SUFFIX}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("compiled graphs are not kept: %s", error)
        return make()
    # keys share a few lock files, so that these need not be cleaned up
    with one_at_a_time(path.with_name(f"lock-{path.name[:1]}")):
        found = _read(path, graph)
        if found is not None:
            logger.info("compiled graph read from %s", path)
            return found
        made = make()
        if made.values.keys() == graph.values.keys() and all(made.values[k] is v for k, v in graph.values.items()):
            _write(path, made.model)
    return made


def entries() -> list[tuple[pathlib.Path, int]]:
    """The kept graphs with their sizes in bytes, the one unused for longest first."""
    found = []
    for path in folder().glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):  # another process may clear the cache
            state = path.stat()
            found.append((state.st_mtime, path, state.st_size))
    return [(path, size) for _, path, size in sorted(found)]


def clear() -> int:
    """Remove every kept graph; returns how many there were."""
    removed = 0
    for path, _ in entries():
        with contextlib.suppress(OSError):
            path.unlink()
            removed += 1
    return removed


def key_of(graph: TrainingGraph, facts: Sequence[str]) -> str:
    """The name under which a result is kept."""
    proto = ir.to_proto(graph.model)
    for node in (*proto.graph.node, *(n for f in proto.functions for n in f.node)):
        kept = [p for p in node.metadata_props if p.key != SOURCE_KEY]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    digest = hashlib.sha256(proto.SerializeToString(deterministic=True))
    for fact in (*facts, *_environment()):
        digest.update(b"\0" + fact.encode())
    return digest.hexdigest()[:32]


def text_of(*options: Any) -> tuple[str, ...] | None:
    """Options as facts for ``cached``; None when one is code, whose text says nothing about what it does."""
    plain = (str, int, float, bool, type(None))

    def known(option: Any) -> bool:
        if isinstance(option, Mapping):
            return all(isinstance(k, str) and known(v) for k, v in option.items())
        if isinstance(option, (tuple, list)):
            return all(known(v) for v in option)
        return isinstance(option, plain)

    return tuple(repr(o) for o in options) if known(options) else None


def _environment() -> tuple[str, ...]:
    """What the machine and the installed packages contribute."""
    from ortgraph.ops import generated, kernels
    from ortgraph.runtime.detect import detect_runtime
    from ortgraph.runtime.options import default_threads

    runtime = detect_runtime()
    # the library's path names compiler, flags, processor and sources
    built = str(kernels.library_path()) if kernels.available() else kernels.reason()
    return (
        _code(), _measured(), f"{runtime.wheel} {runtime.version}", f"onnx {onnx.__version__}, {ir.__version__}",
        str(built), generated.reason() or "compiles", f"{default_threads()} processors",
    )  # fmt: skip


@functools.cache
def _code() -> str:
    """A hash of this package's code."""
    import importlib

    digest = hashlib.sha256()
    for name in _PACKAGES:
        root = pathlib.Path(importlib.import_module(name).__path__[0])
        for path in sorted(p for p in root.rglob("*") if p.suffix in _SOURCES):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _measured() -> str:
    """A hash of the cost table that ``ortgraph calibrate`` has written for this machine, if there is one."""
    from ortgraph.ops.cost_file import machine_path

    path = machine_path()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "shipped costs"


def _read(path: pathlib.Path, graph: TrainingGraph) -> TrainingGraph | None:
    """What a file holds, with the values of ``graph``; None when there is no file, or none that can be used."""
    try:
        checksum, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(content).hexdigest().encode() != checksum:
        logger.warning("%s is damaged: compiling again", path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    try:
        return TrainingGraph(ir.from_proto(onnx.load_model_from_string(content)), values=graph.values)
    except OrtgraphError as error:
        logger.warning("%s is not used: %s", path, error)
        return None


def _write(path: pathlib.Path, model: ir.Model) -> None:
    content = ir.to_proto(model).SerializeToString(deterministic=True)
    if len(content) > _MAX_ENTRY:
        return
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as fresh:
            fresh.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        os.replace(fresh.name, path)
    except OSError as error:
        logger.warning("the compiled graph is not kept: %s", error)
        return
    kept = entries()
    total = sum(size for _, size in kept)
    for old, size in kept[:-1]:
        if total <= _MAX_BYTES:
            break
        with contextlib.suppress(OSError):
            old.unlink()
        total -= size
