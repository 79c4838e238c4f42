"""The ``ortgraph`` command: one verb a file. docs/cli.md is the reference."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code (docs/cli.md lists them).

    Args:
        arguments: Words after the program's name; those of the process when None.
    """
    from ortgraph.cli.app import run

    run(arguments)
