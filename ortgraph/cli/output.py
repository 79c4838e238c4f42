"""What a verb prints, how it fails, and its exit codes.

Tables go to stdout, progress and errors to stderr. With ``--json`` tables are off and the last line of stdout is one
JSON object, for errors too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ortgraph.errors import (
    NonFiniteLossError,
    OrtgraphError,
    PlanError,
    RuntimeSetupError,
    VerificationError,
)

FAILED, UNUSABLE, SETUP, NOT_FINITE, BUG, INTERRUPTED = 1, 2, 3, 4, 70, 130
_CODES: tuple[tuple[type[OrtgraphError], int], ...] = (
    (VerificationError, FAILED),
    (PlanError, FAILED),
    (RuntimeSetupError, SETUP),
    (NonFiniteLossError, NOT_FINITE),
)
_ROOM = 12  # characters that a column wants
_PIPED = 120  # width of tables that go to a file or a pipe
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
ISSUES = "please report it with the command and the lines above"


def exit_code(error: OrtgraphError) -> int:
    """The exit code of an error of ours; UNUSABLE when the class has no code of its own."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), UNUSABLE)


class Output:
    """Where a verb's words go.

    Args:
        as_json: Print nothing on stdout but the final object.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        piped = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPED
        self.stdout = Console(highlight=False, soft_wrap=True, width=piped)
        self.stderr = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(self, text: str = "") -> None:
        """A line for people; markup is not interpreted."""
        if not self.as_json:
            self.stdout.print(text, markup=False)

    def note(self, text: str) -> None:
        """A remark beside the result, on stderr."""
        self.stderr.print(text, markup=False)

    def table(
        self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()
    ) -> None:
        """A table, if it has rows. ``right`` holds the positions of right-aligned columns."""
        rows = list(rows)
        if self.as_json or not rows:
            return
        table = Table(title=title, title_justify="left", header_style="bold")
        # names stay in one line where that leaves room for the other columns
        whole = self.stdout.width - max(len(str(row[0])) for row in rows) >= _ROOM * (len(columns) - 1)
        for position, name in enumerate(columns):
            justify: Any = "right" if position in right else "left"
            table.add_column(name, justify=justify, overflow="fold", no_wrap=whole and position == 0)
        for row in rows:
            table.add_row(*(_escape(str(cell)) for cell in row))
        self.stdout.print(table, soft_wrap=False)

    @contextlib.contextmanager
    def progress(self, what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
        """A bar on stderr (a spinner without ``total``); call the result with a text and the step count.

        Nothing is drawn when stderr is no terminal.
        """
        columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
        columns += [BarColumn(), MofNCompleteColumn()] if total is not None else []
        with Progress(
            *columns, TimeElapsedColumn(), console=self.stderr, transient=True, disable=not self.stderr.is_terminal
        ) as bar:
            task = bar.add_task(what, total=total)

            def tell(text: str = "", advance: int = 0) -> None:
                bar.update(task, description=f"{what} {text}".rstrip(), advance=advance)

            yield tell

    def result(self, data: dict[str, Any]) -> None:
        """The final object of ``--json``."""
        if self.as_json:
            print(json.dumps(data, default=_plain), flush=True)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


def _plain(value: Any) -> Any:
    """Numbers of numpy and paths in JSON."""
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """Turn errors into one message and an exit code. A user's mistake never shows a traceback; a bug of ours does."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        as_json = bool(kwargs.get("as_json"))
        try:
            with _own_warnings():
                function(*args, **kwargs)
        except OrtgraphError as error:
            _fail(error.what, error.hint, type(error).__name__, exit_code(error), as_json)
        except KeyboardInterrupt:
            _fail("interrupted", "", "KeyboardInterrupt", INTERRUPTED, as_json)
        except (typer.Exit, typer.Abort, SystemExit, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001 - the last place that can tell the user whose mistake it is
            traceback.print_exc()
            what = f"this is a mistake in ortgraph: {type(error).__name__}: {error}"
            _fail(what, ISSUES, type(error).__name__, BUG, as_json)

    return run


@contextlib.contextmanager
def _own_warnings() -> Iterator[None]:
    """Our warnings are a line for the user; those of other packages stay as they are."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Any, category: Any, filename: str, *rest: Any, **named: Any) -> None:
            if filename.startswith(_PACKAGE) or category.__module__.startswith("ortgraph."):
                print(f"warning: {message}", file=sys.stderr, flush=True)
            else:
                usual(message, category, filename, *rest, **named)

        warnings.showwarning = show
        yield


def _fail(what: str, hint: str, kind: str, code: int, as_json: bool) -> None:
    lines = [f"error: {what}"] + ([f"  try: {hint}"] if hint else [])
    print("\n".join(lines), file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps({"error": what, "hint": hint, "kind": kind, "exit_code": code}), flush=True)
    raise typer.Exit(code)
