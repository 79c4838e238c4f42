"""docs/cli.md lists every verb, option and exit code, no others, and its examples run."""

from __future__ import annotations

import pathlib
import re
import shlex

import pytest
import typer.main

from ortgraph.cli import output
from ortgraph.cli.app import VERBS, build_app

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "cli.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def options_of(verb: str) -> set[str]:
    command = typer.main.get_command(build_app()).commands[verb]
    found = {o for p in command.params if p.param_type_name == "option" for o in (*p.opts, *p.secondary_opts)}
    return found - {"-h", "--help"}


@pytest.mark.parametrize("verb", VERBS)
def test_options_are_those_of_the_page(verb):
    cells = re.findall(r"^\| (`-.*?) \|", SECTIONS[verb], re.MULTILINE)
    documented = {o for cell in cells for o in re.findall(r"`(-[\w-]+)`", cell)}
    assert documented == options_of(verb)


def test_verbs_are_those_of_the_page():
    assert re.findall(r"^\| \[(\w+)\]\(#\1\)", PAGE, re.MULTILINE) == list(VERBS)


def test_exit_codes_are_those_of_the_page():
    documented = {int(c) for c in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    codes = {output.FAILED, output.UNUSABLE, output.SETUP, output.NOT_FINITE, output.BUG, output.INTERRUPTED}
    assert documented == {0, *codes}


def test_the_example_runs(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (source,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (commands,) = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "model.py").write_text(source)
    for line in commands.splitlines():
        program, *words = shlex.split(line)
        assert program == "ortgraph"
        ran = cli(*words)
        assert ran.code == 0, f"{line}\n{ran.out}\n{ran.err}"
    assert (tmp_path / "step.html").exists() and (tmp_path / "model.onnx").exists()


def test_documented_json_keys_exist(cli, tmp_path, monkeypatch, graph_file):
    """Keys in the last row of a verb's table are keys of its object."""
    calls = {
        "optimize": ("optimize", graph_file, "-o", tmp_path / "o.onnx", "-O1"),
        "plan": ("plan", graph_file),
        "inspect": ("inspect", graph_file),
        "verify": ("verify", graph_file),
        "diff": ("diff", graph_file, graph_file),
        "passes": ("passes",),
        "doctor": ("doctor",),
    }
    optional = {"explain", "culprit", "numerics", "name", "modified", "counts", "sweep", "max_batch", "output", "stage"}
    for verb, words in calls.items():
        row = re.search(r"^\| `--json` \| (.*) \|$", SECTIONS[verb], re.MULTILINE)
        assert row is not None
        assert set(re.findall(r"`(\w+)`", row[1])) - optional <= set(cli(*words, "--json").json), verb
