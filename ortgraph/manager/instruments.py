"""Observation of passes from outside: timing, text dumps, reproducers. Passes never print, time or save."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import onnx_ir as ir

from ortgraph.errors import InputError, OrtgraphError
from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import GraphPass

if TYPE_CHECKING:
    from ortgraph.manager.pass_manager import PassRecord


class Instrument:
    """Hooks around each pass. The default does nothing."""

    def before(self, p: ir.passes.PassBase, graph: TrainingGraph) -> None:
        """Called before the pass runs."""

    def after(self, p: ir.passes.PassBase, graph: TrainingGraph, record: PassRecord) -> None:
        """Called after the pass ran and was verified."""

    def failed(self, p: ir.passes.PassBase, graph: TrainingGraph, error: OrtgraphError) -> None:
        """Called when the pass raised or broke an invariant."""


def pass_name(p: ir.passes.PassBase) -> str:
    return p.name if isinstance(p, GraphPass) else type(p).__name__


class TextDump(Instrument):
    """Writes the canonical text after each pass (or after the named one) as ``NN-pass.txt``."""

    def __init__(self, folder: pathlib.Path, only: str | None = None) -> None:
        self.folder, self.only, self.count = folder, only, 0
        _make_folder(folder)

    def after(self, p: ir.passes.PassBase, graph: TrainingGraph, record: PassRecord) -> None:
        self.count += 1
        if self.only in (None, record.name):
            (self.folder / f"{self.count:02d}-{record.name}.txt").write_text(graph.text())


class Reproducer(Instrument):
    """Keeps the graph as it was before each pass; when one fails, saves it with the command that repeats the failure."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.graph: TrainingGraph | None = None
        _make_folder(folder)

    def before(self, p: ir.passes.PassBase, graph: TrainingGraph) -> None:
        self.graph = graph.clone()

    def failed(self, p: ir.passes.PassBase, graph: TrainingGraph, error: OrtgraphError) -> None:
        assert self.graph is not None
        self.graph.save(self.folder / "before.onnx")
        text = str(p) if isinstance(p, GraphPass) else pass_name(p)
        command = f"ortgraph optimize before.onnx -o after.onnx -p '{text}'"
        (self.folder / "reproduce.txt").write_text(f"{command}\n\n{error}\n")


class Progress(Instrument):
    """Calls ``tell(name)`` as each pass starts; the command line draws a bar from it."""

    def __init__(self, tell) -> None:
        self.tell = tell

    def before(self, p: ir.passes.PassBase, graph: TrainingGraph) -> None:
        self.tell(pass_name(p))


def _make_folder(folder: pathlib.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error})", "give another folder") from error
