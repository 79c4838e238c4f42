"""Imports go one way: graph <- ops <- the rest of ortgraph <- passes; heavy packages are imported on use."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "onnxruntime")


def imported(path: pathlib.Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{a.name}" for a in node.names)
    return names


def layer(folder: str) -> list[pathlib.Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def offending(files: list[pathlib.Path], allowed: tuple[str, ...]) -> list[str]:
    bad = []
    for path in files:
        for name in sorted(imported(path)):
            ours = name.startswith("ortgraph.")
            if ours and not any(name == a or name.startswith(a + ".") for a in allowed):
                bad.append(f"{path.relative_to(ROOT)} imports {name}")
    return bad


def test_graph_imports_only_graph():
    assert offending(layer("ortgraph/graph"), ("ortgraph.graph", "ortgraph.errors")) == []


def test_ops_import_only_graph_and_ops():
    assert offending(layer("ops"), ("ortgraph.graph", "ortgraph.ops", "ortgraph.errors")) == []


def test_mechanism_never_imports_passes():
    bad = [
        f"{p.relative_to(ROOT)}" for p in layer("ortgraph") if any(n.startswith("ortgraph.passes") for n in imported(p))
    ]
    assert bad == []


@pytest.mark.parametrize("package", HEAVY)
def test_import_is_light(package):
    code = f"import sys, ortgraph, ortgraph.manager; sys.exit({package!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd="/", check=False).returncode == 0


@pytest.mark.parametrize("folder", ["passes", "ops"])
def test_folder_refuses_another_name(folder):
    run = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert f"ortgraph.{folder}" in run.stderr and "pip install -e ." in run.stderr
