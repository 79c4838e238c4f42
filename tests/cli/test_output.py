"""Errors: one message, the documented exit code, a traceback only for bugs."""

from __future__ import annotations

import json

import pytest
import typer

from ortgraph import errors
from ortgraph.cli.output import Output, verb

CODES = [
    (errors.InputError("x is wrong", "give y"), 2),
    (errors.CaptureError("no loss"), 2),
    (errors.PipelineSyntaxError("unknown pass"), 2),
    (errors.PassError("wrong stage"), 2),
    (errors.BatchError("wrong dtype"), 2),
    (errors.SignatureError("none"), 2),
    (errors.VerificationError("broken"), 1),
    (errors.PlanError("overlap"), 1),
    (errors.RuntimeSetupError("two runtimes"), 3),
    (errors.NonFiniteLossError("nan"), 4),
]


def fail_with(error: BaseException, as_json: bool) -> int:
    @verb
    def run(as_json: bool) -> None:
        raise error

    with pytest.raises(typer.Exit) as ended:
        run(as_json=as_json)
    return ended.value.exit_code


@pytest.mark.parametrize(("error", "code"), CODES, ids=[type(e).__name__ for e, _ in CODES])
def test_own_errors_have_a_code_and_no_traceback(error, code, capsys):
    assert fail_with(error, as_json=False) == code
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {error.what}")
    assert "Traceback" not in printed.err and printed.out == ""


def test_the_hint_is_shown(capsys):
    fail_with(errors.InputError("x is wrong", "give y"), as_json=False)
    assert "try: give y" in capsys.readouterr().err


def test_a_bug_shows_a_traceback_and_asks_for_a_report(capsys):
    assert fail_with(ZeroDivisionError("oops"), as_json=False) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err and "mistake in ortgraph" in err and "report it" in err


def test_interruption(capsys):
    assert fail_with(KeyboardInterrupt(), as_json=False) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_with_json_ends_in_one_object(capsys):
    fail_with(errors.InputError("x is wrong", "give y"), as_json=True)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"error": "x is wrong", "hint": "give y", "kind": "InputError", "exit_code": 2}


def test_json_switches_tables_off(capsys):
    import numpy as np

    out = Output(as_json=True)
    out.table("T", ("a",), [(1,)])
    out.say("words")
    out.result({"n": np.float32(0.5), "m": np.int64(3)})
    assert json.loads(capsys.readouterr().out) == {"n": 0.5, "m": 3}


def test_cells_are_no_markup(capsys):
    Output(as_json=False).table("T", ("a",), [("f32[red]x[/red]",)])
    assert "f32[red]x[/red]" in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_drawn_on_terminals_only(terminal, capsys):
    import io

    from rich.console import Console

    drawn = io.StringIO()
    out = Output(as_json=True)
    out.stderr = Console(file=drawn, force_terminal=terminal, width=100)
    with out.progress("training", total=3) as tell:
        tell("loss [1.0]", advance=2)
    assert ("loss [1.0]" in drawn.getvalue()) is terminal
    assert capsys.readouterr().out == ""
