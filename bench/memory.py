"""Memory planning against its targets and lower bounds: layout, order, recompute, PyTorch's budget, runtime, scale.

python -m bench.memory --all --data FOLDER [--json out.json] [--suite layout,order] [--instances rlg1,C]

Every suite prints rows of (suite, instance, setting, value, bound, target, met, seconds). Instances are found in the
folder by their format (``bench.planning_data``); those without a published figure get a row with a bound and no target.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import pathlib
import subprocess
from collections.abc import Iterable, Iterator

from bench.memory_rows import COLUMNS, Row, row, summary, text, write_json
from bench.planning_data import data_folder
from ortgraph.errors import OrtgraphError
from ortgraph.plan import native

# Each module has ``run(setup) -> Iterator[Row]``.
SUITES = {
    "layout": "bench.memory_layout",
    "order": "bench.memory_order",
    "recompute": "bench.memory_recompute",
    "pytorch": "bench.memory_pytorch",
    "runtime": "bench.memory_runtime",
    "lowering": "bench.memory_lowering",
    "scale": "bench.memory_scale",
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a suite is asked to run.

    Attributes:
        data: Folder with instances; None when no suite needs one.
        instances: Only instances whose name contains one of these; empty for all.
    """

    data: pathlib.Path | None
    instances: tuple[str, ...] = ()

    def wants(self, name: str) -> bool:
        return not self.instances or any(part in name for part in self.instances)


def run_suites(names: Iterable[str], setup: Setup) -> Iterator[Row]:
    """Rows of all suites. A suite that fails gives a row without a value that counts as short."""
    for name in names:
        yield from _rows_of(name, setup)


def _rows_of(name: str, setup: Setup) -> Iterator[Row]:
    try:
        yield from importlib.import_module(SUITES[name]).run(setup)
    except (OrtgraphError, ImportError, NotImplementedError, subprocess.SubprocessError) as error:
        yield row(name, "-", f"ended early: {error}", None, at_most=0)


def _print_table(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*COLUMNS[:-2], "", "seconds")
    for column in table.columns[3:]:
        column.justify = "right"
    for r in rows:
        mark = {True: "met", False: "[bold red]SHORT[/]", None: ""}[r.met]
        table.add_row(
            r.suite, r.instance, r.setting, text(r.value), text(r.bound), text(r.target), mark, f"{r.seconds:.2f}"
        )
    Console(width=None if os.isatty(1) else 150).print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every suite (the default)")
    parser.add_argument("--suite", default=",".join(SUITES), help="suites to run, separated by commas")
    parser.add_argument("--instances", default="", help="only instances whose name contains one of these")
    parser.add_argument("--data", help="folder with planning instances (else ORTGRAPH_PLANNING_DATA)")
    parser.add_argument("--json", type=pathlib.Path, help="write the rows there")
    options = parser.parse_args(arguments)
    names = list(SUITES) if options.all else [s for s in options.suite.split(",") if s]
    if unknown := [n for n in names if n not in SUITES]:
        parser.error(f"no suite {unknown[0]!r}; there are {', '.join(SUITES)}")
    needs_data = {"layout", "order", "recompute"}.intersection(names)
    data = data_folder(options.data) if needs_data or options.data else None
    setup = Setup(data, tuple(p for p in options.instances.split(",") if p))

    for source in sorted(pathlib.Path(native.__file__).parent.glob("*.cpp")):
        native.load(source.stem)  # built at first use, which is no part of any figure
    rows: list[Row] = []
    for made in run_suites(names, setup):
        rows.append(made)
        short = "SHORT" if made.met is False else ""
        print(f"{made.suite:9} {made.instance:22} {made.setting:48} {text(made.value):>16} {short}", flush=True)
        if options.json:  # as it grows: a long run that is cut short leaves what it has
            write_json(rows, options.json)
    _print_table(rows)
    print(summary(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
