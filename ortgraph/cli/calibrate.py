"""``ortgraph calibrate``: measures what operators cost on this machine."""

from __future__ import annotations

import json
import pathlib
from typing import Annotated, Any

import typer

from ortgraph.cli import options
from ortgraph.cli.output import Output, verb

_PARTS = ("all", "lowering", "nodes")


@verb
def run(
    out_path: Annotated[
        pathlib.Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="The table to write; in the cache folder if absent."),
    ] = None,
    part: Annotated[
        str, typer.Option("--part", help="lowering (choices of `lower`), nodes (predicted times), or all.")
    ] = "all",
    seconds: Annotated[float, typer.Option("--seconds", min=1.0, help="Time for measuring nodes.")] = 25.0,
    threads: Annotated[int | None, options.THREADS] = None,
    as_json: bool = options.JSON,
) -> None:
    """Measure this machine in about a minute: costs of alternatives of lowering, and prices that predict a node's time.

    Plans predict with the table in the cache folder; `lower{table=FILE}` lowers with a table. On a busy machine give more
    time: the shortest times count.
    """
    from ortgraph.errors import InputError
    from ortgraph.ops import calibrate, cost_file
    from ortgraph.ops.calibrate_nodes import measure_nodes
    from ortgraph.runtime.detect import detect_runtime
    from ortgraph.runtime.options import default_threads

    out = Output(as_json)
    if part not in _PARTS:
        raise InputError(f"--part {part!r} is unknown", f"one of {', '.join(_PARTS)}")
    target, count = detect_runtime().target, threads or default_threads()
    path = out_path or cost_file.machine_path()
    if path.is_dir():
        raise InputError(f"{path}: is a folder", "give a file name")
    if path.is_file():  # its other sections stay; told before a minute of measuring
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{path}: exists and is no cost table ({error})", "give another file") from error
    machine = calibrate.machine(count)
    sections: dict[str, Any] = {}
    if part != "nodes":
        with out.progress("alternatives of lowering", len(calibrate.CASES)) as tell:
            entries = {}
            for name, entry in calibrate.measure(target, count, lambda: tell(advance=1)):
                entries[name] = entry
            sections["entries"] = entries
    if part != "lowering":
        with out.progress("prices of nodes"):
            sections["nodes"] = measure_nodes(target, count, seconds)
    cost_file.write(path, machine, **sections)
    for name, section in sections.items():
        out.say(f"{name}: {len(section)} measured, {count} threads")
    out.say(f"written: {path}")
    out.result({"path": str(path), "machine": machine, **{n: len(s) for n, s in sections.items()}})
