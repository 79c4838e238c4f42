"""Building, caching and loading the library; what happens without a compiler; the stock runtime."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.errors import RuntimeSetupError
from ortgraph.ops import generated, kernels
from ortgraph.ops.kernels import library
from ortgraph.ops.kernels.lock import one_at_a_time

BUILD = "from ortgraph.ops import kernels; print(kernels.available(), kernels.library_path())"


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Forget what was built; an empty cache folder."""
    monkeypatch.setenv("ORTGRAPH_CACHE_DIR", str(tmp_path))
    kernels._built.cache_clear()
    yield tmp_path
    kernels._built.cache_clear()


def test_without_a_compiler_it_says_so(fresh, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not kernels.available()
    assert "no-such-compiler" in kernels.reason() and "install g++" in kernels.reason()
    with pytest.raises(RuntimeSetupError, match="no-such-compiler"):
        kernels.library_path()


def test_a_failing_compiler_is_quoted(fresh, monkeypatch):
    compiler = fresh / "broken"
    compiler.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo broken 1.0 && exit 0\necho 'out of cheese' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert not kernels.available() and "out of cheese" in kernels.reason()
    assert not list(fresh.rglob("*.so*"))


def test_an_unwritable_cache_is_a_reason(fresh, monkeypatch):
    blocked = fresh / "file"
    blocked.write_text("")
    monkeypatch.setenv("ORTGRAPH_CACHE_DIR", str(blocked))
    assert not kernels.available() and "ORTGRAPH_CACHE_DIR" in kernels.reason()
    assert "ORTGRAPH_CACHE_DIR" in generated.reason()  # no kernel could be written when a session wants it


def test_a_compiler_that_is_killed_is_told_from_one_that_fails(fresh, monkeypatch):
    compiler = fresh / "short-lived"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit 0\nkill -9 $$\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert not kernels.available() and "signal 9" in kernels.reason()
    assert not list(fresh.rglob("*.so*")) and not list(fresh.rglob("*.o"))


@pytest.mark.parametrize("damage", ["emptied", "cut", "one bit"])
def test_what_a_crash_or_a_bad_disk_leaves_is_compiled_again(fresh, tmp_path, damage):
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" __attribute__((visibility("default"))) int answer() { return 42; }')
    try:
        made = library.build_library("libanswer.so", [source])
    except RuntimeSetupError as error:
        pytest.skip(str(error))
    whole = made.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    made.write_bytes({"emptied": b"", "cut": whole[: len(whole) // 2], "one bit": bytes(flipped)}[damage])
    assert library.build_library("libanswer.so", [source]) == made
    assert library.intact(made) and made.stat().st_size == len(whole)
    assert ctypes.CDLL(str(made)).answer() == 42


def test_a_library_that_does_not_load_is_a_reason(fresh, monkeypatch):
    path = fresh / "text.so"
    path.write_text("no library")
    monkeypatch.setattr(library, "build", lambda: path)
    assert not kernels.available() and "another disk" in kernels.reason()


def test_the_key_follows_sources_flags_and_processor(monkeypatch):
    try:
        compiler = library.find_compiler()
    except RuntimeSetupError as error:
        pytest.skip(str(error))
    base = library.content_key(compiler, ("-O3",), library.sources())
    assert (
        base
        == library.content_key(compiler, ("-O3",), library.sources())
        != library.content_key(compiler, ("-O2",), library.sources())
    )
    monkeypatch.setattr(library, "_processor", lambda: ("another",))
    assert library.content_key(compiler, ("-O3",), library.sources()) != base
    monkeypatch.undo()
    monkeypatch.setattr(library, "sources", lambda: [pathlib.Path(__file__)])
    assert library.content_key(compiler, ("-O3",), library.sources()) != base


def test_a_built_library_is_found_again(monkeypatch):
    if not kernels.available():
        pytest.skip(kernels.reason())

    def refuse(*args):
        raise AssertionError("compiled again")

    monkeypatch.setattr(library, "compile_units", refuse)
    assert library.build() == kernels.library_path()


COUNTING = """#!/bin/sh
[ "$1" = --version ] && echo counting 1.0 && exit 0
echo "$*" >> "$RUNS"
[ -n "$HANG" ] && exec sleep 60
sleep 0.3
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""
BUILD_ONE = """
import pathlib, sys
from ortgraph.ops.kernels import library
print(library.build_library("libone.so", [pathlib.Path(sys.argv[1])]))
"""


@pytest.fixture
def starts(tmp_path):
    """Starts processes that build a library with a compiler that counts its runs."""
    source, compiler, runs = tmp_path / "one.cpp", tmp_path / "counting", tmp_path / "runs"
    source.write_text("int one();")
    compiler.write_text(COUNTING)
    compiler.chmod(0o755)
    given = {**os.environ, "CXX": str(compiler), "RUNS": str(runs), "ORTGRAPH_CACHE_DIR": str(tmp_path / "cache")}
    running = []

    def start(**more):
        command = [sys.executable, "-c", BUILD_ONE, str(source)]
        pipe = subprocess.PIPE
        running.append(
            subprocess.Popen(
                command, stdout=pipe, stderr=pipe, text=True, env={**given, **more}, start_new_session=True
            )
        )
        return running[-1]

    yield start, lambda: runs.read_text().splitlines() if runs.exists() else []
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="a compiler in sh")
def test_of_processes_that_want_a_library_one_compiles_it(starts):
    start, runs = starts
    said = [p.communicate(timeout=60) for p in (start(), start())]
    assert said[0][0].endswith("libone.so\n") and said[0][0] == said[1][0], said
    assert len(runs()) == 2  # one unit, one link


@pytest.mark.skipif(sys.platform == "win32", reason="a compiler in sh")
def test_a_process_that_is_killed_while_it_compiles_holds_nobody_up(starts):
    start, runs = starts
    killed = start(HANG="1")
    end = time.monotonic() + 30
    while not runs() and time.monotonic() < end:
        time.sleep(0.02)
    second = start()
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(1.5)  # it waits
    os.kill(killed.pid, signal.SIGKILL)  # its compiler lives on
    out, err = second.communicate(timeout=30)
    assert second.returncode == 0 and out.endswith("libone.so\n"), err


def test_a_lock_that_cannot_be_had_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    with one_at_a_time(tmp_path / "file" / "lock"):
        pass
    start = time.monotonic()
    with one_at_a_time(tmp_path / "lock"), one_at_a_time(tmp_path / "lock", longest=0.1):
        assert 0.1 < time.monotonic() - start < 5


@pytest.mark.slow
def test_processes_that_build_at_once_share_one_library(tmp_path):
    if not kernels.available():
        pytest.skip(kernels.reason())
    command = [sys.executable, "-c", BUILD]
    environment = {**os.environ, "ORTGRAPH_CACHE_DIR": str(tmp_path)}
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    said = {p.communicate(timeout=280)[0] for p in running}
    assert len(said) == 1 and said.pop().startswith("True ")
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {library._LIBRARY, library.LOCK}  # no others left


def test_reason_for_a_node():
    def node(op, *types, domain="ortgraph", shape=(3, 4), **attributes):
        inputs = [ir.Value(name=f"x{i}", type=ir.TensorType(t), shape=ir.Shape(shape)) for i, t in enumerate(types)]
        return ir.node(op, inputs, attributes, domain=domain)

    f, half, i64, i32 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT64, ir.DataType.INT32
    assert kernels.reason(node("Gelu", f)) is None
    assert kernels.reason(node("Softmax", f, domain="")) is None
    assert "no kernel for ortgraph.Unknown" in kernels.reason(node("Unknown", f))
    assert "X as FLOAT, not FLOAT16" in kernels.reason(node("Gelu", half))
    assert kernels.reason(node("EmbeddingGrad", f, i64, rows=4)) is None
    assert "Indices as INT64" in kernels.reason(node("EmbeddingGrad", f, i32, rows=4))
    assert kernels.reason(node("SoftmaxGrad", f, f, axis=1)) is None
    assert "last axis" in kernels.reason(node("SoftmaxGrad", f, f, axis=0))

    def reduce(axes, **attributes):
        made = node("ReduceSum", f, domain="", **attributes)
        constant = ir.Value(name="axes", const_value=ir.tensor(np.array(axes, np.int64)))
        return ir.node("ReduceSum", [made.inputs[0], constant], attributes)

    assert kernels.reason(reduce([0], keepdims=0)) is None and kernels.reason(reduce([-2], keepdims=0)) is None
    assert kernels.reason(reduce([0])) is None
    for wrong in (reduce([1], keepdims=0), reduce([0, 1], keepdims=0), reduce([], keepdims=0)):
        assert "all dimensions but the last" in kernels.reason(wrong)
    assert kernels.reason(node("CrossEntropy", f, i64)) is None
    assert "[N, C]" in kernels.reason(node("CrossEntropy", f, i64, shape=(3, 4, 5)))


STOCK = textwrap.dedent("""
    import sys, numpy as np, onnxruntime as ort
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.register_custom_ops_library(sys.argv[1])
    session = ort.InferenceSession(sys.argv[2], options, providers=["CPUExecutionProvider"])
    feeds = dict(np.load(sys.argv[3]))
    np.savez(sys.argv[4], *session.run(None, feeds))
    print(ort.__version__)
""")


@pytest.mark.slow
def test_one_binary_in_the_stock_runtime(kernel, tmp_path):
    """Every kernel gives the same bits in another ONNX Runtime. ORTGRAPH_STOCK_PYTHON names a Python that has one."""
    other = os.environ.get("ORTGRAPH_STOCK_PYTHON")
    if not other:
        pytest.skip("ORTGRAPH_STOCK_PYTHON is not set")
    import importlib.util

    found = importlib.util.spec_from_file_location("kernel_cases", pathlib.Path(__file__).with_name("test_inplace.py"))
    cases = importlib.util.module_from_spec(found)
    found.loader.exec_module(cases)
    for name, (inputs, outputs, attributes) in cases.CASES.items():
        runner = kernel(name, inputs, outputs, **attributes)
        model, feeds, result = (tmp_path / f"{name}.{end}" for end in ("onnx", "npz", "out.npz"))
        model.write_bytes(runner.model)
        np.savez(feeds, **runner.feeds)
        command = [other, "-c", STOCK, str(kernels.library_path()), str(model), str(feeds), str(result)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, (name, done.stderr[-2000:])
        got = np.load(result)
        for mine, theirs in zip(runner.run(), (got[k] for k in got.files), strict=True):
            assert np.array_equal(mine, theirs), (name, done.stdout)
