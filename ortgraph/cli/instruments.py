"""Instruments that print: passes never do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from ortgraph.cli.output import Output
from ortgraph.graph import TrainingGraph
from ortgraph.manager.instruments import Instrument

if TYPE_CHECKING:
    from ortgraph.manager.pass_manager import PassRecord


class PrintAfter(Instrument):
    """Prints the canonical text after each pass, or after the named one."""

    def __init__(self, out: Output, only: str | None) -> None:
        self.out, self.only = out, only

    def after(self, p: ir.passes.PassBase, graph: TrainingGraph, record: PassRecord) -> None:
        if self.only not in (None, record.name):
            return
        say = self.out.note if self.out.as_json else self.out.say
        say(f"--- after {record.text}\n{graph.text()}")
