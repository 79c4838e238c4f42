"""Scratch that kernels allocate in a run: declared (ortgraph.ops.scratch) against counted.

    python -m bench.scratch [--threads 1,2] [--json]

Every operator runs alone, inputs and outputs bound, in a process whose malloc is counted (a preloaded library, compiled
here) and whose ONNX Runtime allocates without an arena. Declared may be above counted by what depends on the version.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from ortgraph.ops import kernels
from ortgraph.ops.calibrate import Case, case_graph
from ortgraph.ops.scratch import scratch_bytes
from ortgraph.ops.spec import CONTRIB, KERNELS, lookup
from ortgraph.ops.targets import STOCK, TRAINING, reason_not_run

OVERHEAD = 4096  # what a run allocates for itself: argument lists, closures
COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
static void *(*next_malloc)(size_t), *(*next_calloc)(size_t, size_t), *(*next_realloc)(void *, size_t);
static void *(*next_aligned)(size_t, size_t);
static int (*next_posix)(void **, size_t, size_t);
static void (*next_free)(void *);
static atomic_long live, peak;
static char early[65536];  /* dlsym itself calls calloc */
static size_t used;
static void find(void) {
  if (next_malloc) return;
  next_free = dlsym(RTLD_NEXT, "free"); next_calloc = dlsym(RTLD_NEXT, "calloc");
  next_realloc = dlsym(RTLD_NEXT, "realloc"); next_aligned = dlsym(RTLD_NEXT, "aligned_alloc");
  next_posix = dlsym(RTLD_NEXT, "posix_memalign"); next_malloc = dlsym(RTLD_NEXT, "malloc");
}
static void *add(void *p) {
  if (!p) return p;
  long now = atomic_fetch_add(&live, (long)malloc_usable_size(p)) + (long)malloc_usable_size(p), top = peak;
  while (now > top && !atomic_compare_exchange_weak(&peak, &top, now)) {}
  return p;
}
static void drop(void *p) { if (p) atomic_fetch_sub(&live, (long)malloc_usable_size(p)); }
static int is_early(void *p) { return (char *)p >= early && (char *)p < early + sizeof early; }
void *malloc(size_t n) { find(); return add(next_malloc(n)); }
void *calloc(size_t a, size_t b) {
  if (next_calloc) return add(next_calloc(a, b));
  void *p = early + used; used += (a * b + 15) & ~(size_t)15; return p;
}
void *realloc(void *q, size_t n) {
  find();
  if (is_early(q)) { void *p = malloc(n); memcpy(p, q, n); return p; }
  drop(q); return add(next_realloc(q, n));
}
void free(void *p) { if (!p || is_early(p)) return; find(); drop(p); next_free(p); }
void *aligned_alloc(size_t a, size_t n) { find(); return add(next_aligned(a, n)); }
void *memalign(size_t a, size_t n) { find(); return add(next_aligned(a, n)); }
int posix_memalign(void **p, size_t a, size_t n) { find(); int r = next_posix(p, a, n); if (!r) add(*p); return r; }
long counter_reset(void) { peak = live; return live; }
long counter_peak(void) { return peak; }
"""
_X = (256, 512)
_N = (2, 8, 32, 64)


def _case(op_type: str, *shapes: tuple[int, ...] | None, outputs: int = 1, domain: str = "", **options: object) -> Case:
    fields = {k: options.pop(k) for k in ("integers", "booleans", "constants") if k in options}
    return Case(op_type, lambda size: shapes, outputs, options, domain=domain, **fields)  # type: ignore[arg-type]


def _convolutions() -> Iterator[Case]:
    for n, c, f, d, k, stride, group in (
        (1, 4, 4, 8, 3, 1, 1), (4, 16, 16, 32, 3, 1, 1), (8, 64, 128, 28, 3, 2, 1), (8, 64, 64, 28, 1, 1, 1),
        (8, 64, 64, 28, 1, 2, 1), (4, 256, 256, 7, 3, 1, 1), (4, 3, 32, 64, 7, 2, 1), (4, 64, 64, 28, 3, 1, 64),
        (4, 64, 64, 28, 3, 1, 4),
    ):  # fmt: skip
        out = (d + 2 * (k // 2) - k) // stride + 1
        options = {"pads": [k // 2] * 4, "strides": [stride] * 2, "group": group, "dilations": [1, 1]}
        x, w, y = (n, c, d, d), (f, c // group, k, k), (n, f, out, out)
        yield _case("Conv", x, w, **options)
        yield _case("ConvGrad", y, x, w, outputs=3, domain=CONTRIB, **options)


def cases() -> list[Case]:
    """Operators with scratch, and those that are known to have none."""
    found = [
        _case("Where", _X, _X, _X, booleans=frozenset({0})),
        _case("Where", (1, 512), _X, (), booleans=frozenset({0})),
        _case("ScatterElements", _X, _X, _X, axis=0, integers={1: 9}),
        _case("LayerNormalization", _X, (512,), (512,), outputs=3, axis=-1),
        _case("LayerNormalizationGrad", _X, _X, (512,), (256, 1), (256, 1), outputs=3, domain=CONTRIB, axis=-1),
        _case("SoftmaxCrossEntropyLossInternal", _X, (256,), outputs=2, domain=CONTRIB, integers={1: 9}, reduction="mean"),
        _case("BiasGelu", _X, (512,), domain=CONTRIB),
        _case("BiasGeluGrad_dX", _X, _X, (512,), domain=CONTRIB),
        _case("Gelu", _X, domain=CONTRIB),
        _case("GeluGrad", _X, _X, domain=CONTRIB),
        *(_case("Sum", *[_X] * n) for n in (2, 3, 5)),
        _case("ReduceSum", _X, (1,), constants={1: [0]}),
        _case("ReduceSum", _X, (1,), constants={1: [1]}),
        _case("Transpose", (8, 32, 8, 64), perm=[0, 2, 3, 1]),
        _case("Gather", (1000, 512), (256,), integers={1: 1000}),
        _case("Einsum", (4, 64, 8, 32), (4, 64, 8, 32), equation="bihd,bjhd->bhij"),
        _case("MatMul", (1024, 256), (256, 512)),
        _case("MatMul", (64, 32, 64), (64, 64, 32)),
        _case("Gemm", (256, 1024), (256, 512), transA=1),
        _case("FusedMatMul", (8, 4, 128, 64), (8, 4, 128, 64), domain=CONTRIB, transB=1, alpha=0.125),
        _case("LayerNormGrad", _X, _X, (256, 1), (256, 1), (512,), outputs=3, domain=KERNELS, axis=-1),
        _case("BiasGrad", _X, domain=KERNELS, keepdims=0),
        _case("EmbeddingGrad", _X, (256,), domain=KERNELS, rows=1000, padding_idx=-1, integers={1: 1000}),
        _case("Gelu", _X, domain=KERNELS, approximate="none"),
        *_convolutions(),
    ]  # fmt: skip
    for axis in (1, 3):
        found += [_case(op, _N, axis=axis) for op in ("Softmax", "LogSoftmax")]
        found += [_case(op, _N, _N, domain=CONTRIB, axis=axis) for op in ("SoftmaxGrad_13", "LogSoftmaxGrad_13")]
    return found


def runnable(target: str) -> list[Case]:
    """The cases that the runtime and this machine run."""
    found = []
    for case in cases():
        node = next(iter(case_graph(case, 0, None)[0]))
        if case.domain == KERNELS and not kernels.available():
            continue
        if lookup(case.domain, case.op_type).known and reason_not_run(node, target, 18) is None:
            found.append(case)
    return found


def label(case: Case) -> str:
    shapes = " ".join("x".join(map(str, s)) or "scalar" for s in case.shapes(0) if s is not None)
    words = [f"{k}={v}" for k, v in case.attributes.items() if k in ("axis", "group", "strides", "transA", "transB")]
    return " ".join((f"{case.domain}.{case.op_type}" if case.domain else case.op_type, shapes, *words))


def compare(chosen: Sequence[Case], threads: int) -> list[tuple[str, int, int]]:
    """(label, declared bytes, counted bytes) of each case.

    Raises:
        FileNotFoundError: There is no C compiler.
        subprocess.CalledProcessError: The compiler or the counting process failed.
    """
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    made = [case_graph(case, 0, None) for case in chosen]
    library = str(kernels.library_path()) if kernels.available() else ""
    with tempfile.TemporaryDirectory() as folder:
        source, counter, work = (pathlib.Path(folder, n) for n in ("counter.c", "counter.so", "work.pickle"))
        source.write_text(COUNTER)
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(counter), str(source), "-ldl"], check=True)
        models = [(_model(graph), feeds) for graph, feeds in made]
        work.write_bytes(pickle.dumps((models, library, threads)))
        command = [sys.executable, __file__, "--worker", str(work), "--counter", str(counter)]
        done = subprocess.run(
            command, env={**os.environ, "LD_PRELOAD": str(counter)}, stdout=subprocess.PIPE, check=True, text=True
        )
    counted = json.loads(done.stdout.splitlines()[-1])
    declared = [scratch_bytes(next(iter(graph)), threads) for graph, _ in made]
    return list(zip(map(label, chosen), declared, counted, strict=True))


def _model(graph: ir.Graph) -> bytes:
    return ir.serde.serialize_model(ir.Model(graph, ir_version=10)).SerializeToString()


def work(path: str, counter: str) -> list[int]:
    """In the counting process: peak bytes of a run of each model, beyond what lived before it."""
    import onnxruntime as ort

    models, library, threads = pickle.loads(pathlib.Path(path).read_bytes())
    count = ctypes.CDLL(counter)
    count.counter_reset.restype = count.counter_peak.restype = ctypes.c_long
    peaks = []
    for model, feeds in models:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = threads
        options.enable_mem_pattern = options.enable_mem_reuse = options.enable_cpu_mem_arena = False
        options.log_severity_level = 4
        if library:
            options.register_custom_ops_library(library)
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        results = [r if r.flags.c_contiguous else r.copy() for r in session.run(None, feeds)]
        binding = session.io_binding()
        for name, array in feeds.items():
            binding.bind_input(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
        for output, array in zip(session.get_outputs(), results, strict=True):
            binding.bind_output(output.name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
        session.run_with_iobinding(binding)  # what a kernel keeps from its first run on is no scratch
        before = count.counter_reset()
        session.run_with_iobinding(binding)
        peaks.append(count.counter_peak() - before)
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--counter", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(options.worker, options.counter)))
        return
    import onnxruntime as ort

    chosen = runnable(TRAINING if hasattr(ort, "training") else STOCK)
    rows = [(n, *row) for n in map(int, options.threads.split(",")) for row in compare(chosen, n)]
    if options.json:
        print(json.dumps([dict(zip(("threads", "case", "declared", "counted"), r, strict=True)) for r in rows]))
        return
    for threads, name, declared, counted in rows:
        print(f"{threads} threads  {declared:9d} declared {counted:9d} counted  {name}")


if __name__ == "__main__":
    main()
