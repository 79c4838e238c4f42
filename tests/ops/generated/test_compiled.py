"""The header of generated kernels is compiled once, where the compiler can use that."""

from __future__ import annotations

import subprocess

import pytest

from ortgraph.ops.generated import compiled
from ortgraph.ops.kernels import library


@pytest.fixture
def compiler() -> str:
    found = compiled.library.find_compiler()
    if "Free Software Foundation" not in library.version(found):
        pytest.skip("GCC's form of compiled headers")
    return found


def test_units_find_the_compiled_header(compiler, tmp_path):
    options = compiled._precompiled(compiler, tmp_path)
    (made,) = tmp_path.iterdir()
    written = made.stat().st_mtime_ns
    assert compiled._precompiled(compiler, tmp_path) == options and made.stat().st_mtime_ns == written
    unit = tmp_path / "unit.cpp"
    unit.write_text(compiled._ENTRY.format(declarations="", calls=""))
    command = [compiler, *options, *compiled._flags(), "-H", "-fsyntax-only", str(unit)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert said.splitlines()[0] == f"! {made}"


def test_a_compiler_that_knows_no_such_file_gets_none(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "version", lambda compiler: "clang version 19.1.7")
    assert compiled._precompiled("clang++", tmp_path) == () and not list(tmp_path.iterdir())


def test_a_header_that_does_not_compile_is_no_flag_but_an_error(compiler, tmp_path, monkeypatch):
    broken = tmp_path / "generated.h"
    broken.write_text("#error cheese")
    monkeypatch.setattr(compiled, "_HEADER", broken)
    with pytest.raises(compiled.RuntimeSetupError, match="cheese"):
        compiled._precompiled(compiler, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
