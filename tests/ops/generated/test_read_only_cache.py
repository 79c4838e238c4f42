"""A cache of kernels that was filled before and can only be read, as in an image; what killed processes left in one."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import time

import numpy as np
import pytest

from ortgraph.ops import generated
from ortgraph.ops.generated import compiled
from ortgraph.ops.kernels import library
from ortgraph.ops.targets import TRAINING, reason_not_run


def chains(*kinds):
    """A body with a chain for each input, whose sizes must differ so that each is a region of its own."""
    return lambda b, *values: [b.op(k, b.op("Mul", v, b.op("Tanh", v))) for k, v in zip(kinds, values, strict=True)]


def written_only(compiler, *arguments):
    """Stands for a call of the compiler."""
    pathlib.Path(arguments[arguments.index("-o") + 1]).write_bytes(b"binary")


@pytest.fixture(params=["stub", pytest.param("compiler", marks=pytest.mark.slow)])
def read_only(request, fused, monkeypatch, tmp_path):
    """A graph of two kernels, with which the cache was filled that can be written no longer."""
    if request.param == "stub":  # the slow form compiles, and runs what it made
        monkeypatch.setattr(library, "call", written_only)
    usual = library.scratch

    @contextlib.contextmanager
    def scratch(folder):
        if folder.is_relative_to(tmp_path):
            raise OSError(errno.EROFS, "Read-only file system", str(folder))
        with usual(folder) as made:
            yield made

    monkeypatch.setattr(compiled, "kernel_folder", lambda: tmp_path / "generated")
    monkeypatch.setattr(compiled, "_precompiled", lambda compiler, folder: ())
    compiled.build.cache_clear()
    filling = fused(chains("Exp", "Neg"), {"x": (4, 8), "y": (4, 9)}, regions=2)
    generated.library_path(filling.graph.model)
    compiled.build.cache_clear()
    monkeypatch.setattr(library, "scratch", scratch)
    yield filling
    compiled.build.cache_clear()


def test_kernels_that_are_there_run_and_others_are_not_made(request, fused, read_only, tmp_path):
    assert generated.library_path(read_only.graph.model).is_relative_to(tmp_path)
    case = fused(chains("Exp", "Abs"), {"x": (4, 8), "y": (4, 9)}, regions=1)
    refused = [r.reason for r in case.changes.refusals if "Read-only" in r.reason]
    assert len(refused) == 1 and "ORTGRAPH_CACHE_DIR" in refused[0]
    assert not generated.library_path(case.graph.model).is_relative_to(tmp_path)  # linked for this process
    if request.node.callspec.params["read_only"] == "compiler":
        runs_right(case)
    node = case.node
    assert reason_not_run(node, TRAINING, 18) is None
    for path in (tmp_path / "generated").rglob(f"{node.op_type}_*.o"):
        path.unlink()
    assert "Read-only" in reason_not_run(node, TRAINING, 18)  # so that lowering expands it


def runs_right(case):
    feeds = case.feeds()
    x, y = (feeds[n].astype(np.float64) for n in ("x", "y"))
    for got, want in zip(case.run(feeds), (np.exp(x * np.tanh(x)), np.abs(y * np.tanh(y))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_folders_of_killed_processes_are_removed_once_they_are_old(tmp_path):
    old, young, other = (tmp_path / name for name in ("tmpold", "tmpyoung", "objects"))
    for folder in (old, young, other):
        folder.mkdir()
        (folder / "half.o").write_bytes(b"half")
    for folder in (old, other):
        os.utime(folder, (time.time() - 2 * library._STALE,) * 2)
    with library.scratch(tmp_path):
        assert not old.exists() and young.exists() and other.exists()
