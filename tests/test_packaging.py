"""The wheel and the sdist hold every package, data file and the licence, and import under their names."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
DATA = (".json", ".cpp", ".h")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A copy of the sources, built without touching the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source") / "ortgraph"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return folder, tracked


def expected(tracked: list[str]) -> set[str]:
    """Files of the packages, under the names they have in the wheel."""
    names = set()
    for name in tracked:
        top, suffix = name.split("/")[0], pathlib.PurePath(name).suffix
        if suffix == ".py" and top in ("ortgraph", "passes", "ops") or suffix in DATA and top == "ops":
            names.add(name if top == "ortgraph" else f"ortgraph/{name}")
    return names


def test_wheel_is_complete(built):
    folder, tracked = built
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    assert expected(tracked) - names == set()
    assert "ortgraph/py.typed" in names
    assert any(n.endswith("LICENSE") for n in names)
    tops = {n.split("/")[0] for n in names if not n.split("/")[0].endswith(".dist-info")}
    assert tops == {"ortgraph"}


def test_sdist_is_complete(built):
    folder, tracked = built
    with tarfile.open(next(folder.glob("*.tar.gz"))) as sdist:
        names = {n.partition("/")[2] for n in sdist.getnames()}
    sources = {n for n in tracked if n.split("/")[0] in ("ortgraph", "passes", "ops") and n.endswith((".py", *DATA))}
    assert sources - names == set()


def test_wheel_imports(built, tmp_path):
    with zipfile.ZipFile(next(built[0].glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    code = (
        f"import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()];"
        f"sys.path.insert(0, {str(tmp_path)!r}); import ortgraph, ortgraph.passes, ortgraph.ops.spec as s;"
        f"assert ortgraph.__file__.startswith({str(tmp_path)!r}), ortgraph.__file__; assert list(s.all_specs())"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
