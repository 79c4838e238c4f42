"""The table of verbs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import typer

from ortgraph.cli.optional_values import join_optional_values

VERBS = (
    "export",
    "optimize",
    "plan",
    "inspect",
    "verify",
    "diff",
    "passes",
    "train",
    "artifacts",
    "demo",
    "calibrate",
    "doctor",
)

HELP = """An optimizing compiler for ONNX training graphs.

Start with `ortgraph demo`. Every verb takes --json: the last line on stdout is then one JSON object.

Exit codes: 0 done, 1 a check failed or graphs differ, 2 the command or its input cannot be used, 3 the machine's setup
cannot be used, 4 the loss is not finite, 70 a mistake in ortgraph, 130 interrupted.
"""


def build_app() -> typer.Typer:
    """The typer application with every verb."""
    app = typer.Typer(
        name="ortgraph",
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_common)
    for name in VERBS:
        module = importlib.import_module(f"ortgraph.cli.{name}")
        app.command(name)(module.run)
    return app


def _common(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True, callback=lambda on: _version(on)
    ),
) -> None:
    pass


def _version(on: bool) -> None:
    if on:
        from ortgraph import __version__

        print(f"ortgraph {__version__}")
        raise typer.Exit


def run(arguments: Sequence[str] | None = None) -> None:
    """Parse and run; raises SystemExit with the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    build_app()(args=join_optional_values(words), prog_name="ortgraph")
