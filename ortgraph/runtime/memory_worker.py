"""The process in which ``measure_memory`` measures: reads a task from stdin, writes the figures as JSON to stdout."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ortgraph.runtime import process_memory as memory


def measure_step(task: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Figures of a program of TrainingSession."""
    import ortgraph
    from ortgraph.ops.scratch import scratch_bytes
    from ortgraph.runtime.options import default_threads

    threads = task["threads"] or default_threads()
    batch = dict(np.load(pathlib.Path(folder, "batch.npz")))
    session = ortgraph.TrainingSession(ortgraph.load(task["graph"]), threads=threads, check_finite=False)
    session.program(task["kind"], batch).run()
    # A session that has not run yet holds no temporaries: what its allocator once had it does not give back in full.
    program = session.program(task["kind"], batch).again()
    rise, session_bytes = _rise(program.run, lambda: memory.drop_pages(*program.arena_range()))
    batch_bytes = sum(array.nbytes for array in batch.values())
    kept = session.parameter_bytes + session.state_bytes + batch_bytes
    return {
        "peak": rise,
        "arena": program.arena_bytes,
        "max_load": program.max_load_bytes,
        "temporaries": max((scratch_bytes(node, threads) for node in program.order), default=0),
        "parameters": session.parameter_bytes,
        "states": session.state_bytes,
        "batch": batch_bytes,
        "session": session_bytes - kept,
        "milliseconds": _milliseconds(program.run, task["runs"]),
    }


def measure_unplanned(task: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Figures of loss and gradients in ONNX Runtime with its own allocator."""
    import onnxruntime as ort

    import ortgraph

    graph = ortgraph.load(task["graph"])
    batch = dict(np.load(pathlib.Path(folder, "batch.npz")))
    feeds, model, wanted = _plain(graph, batch)
    options = ort.SessionOptions()
    if not task["optimized"]:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if task["threads"]:
        options.intra_op_num_threads = task["threads"]
    options.log_severity_level = 4
    shrink = ort.RunOptions()
    shrink.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def bound() -> Any:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        for value in session.get_inputs():
            array = feeds[value.name]
            binding.bind_input(value.name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)

        def run(options: Any = None) -> None:
            binding.clear_binding_outputs()
            for name in wanted:
                binding.bind_output(name, "cpu", 0)
            session.run_with_iobinding(binding, options)

        return run, binding.clear_binding_outputs

    bound()[0]()  # code is paged in
    run, forget = bound()
    memory.release_free_memory()
    before = memory.resident()
    for _ in range(2):  # the first run finds out the memory pattern; what it took beyond that is given back
        run(shrink)
        forget()
    rise, now = _rise(run, forget)
    rise, session_bytes = rise + now - before, before
    return {
        "peak": rise,
        "parameters": sum(feeds[n].nbytes for n in feeds if n not in batch),
        "batch": sum(array.nbytes for array in batch.values()),
        "session": session_bytes - sum(array.nbytes for array in feeds.values()),
        "milliseconds": _milliseconds(run, task["runs"]),
    }


def measure_pytorch(task: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of forward and backward in eager PyTorch."""
    import torch

    if task["threads"]:
        torch.set_num_threads(task["threads"])
    made = _function(task["build"])(**task["options"])
    module, batch, loss = made["module"], made["batch"], made.get("loss")
    tensors = list(batch.values()) if isinstance(batch, Mapping) else list(batch)

    def run() -> None:
        outputs = module(**batch) if isinstance(batch, Mapping) else module(*batch)
        _loss_of(outputs, loss).backward()

    def forget() -> None:
        module.zero_grad(set_to_none=True)

    for _ in range(2):
        run()
        forget()
    rise, session_bytes = _rise(run, forget)
    parameters = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
    batch_bytes = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))

    def timed() -> None:
        forget()
        run()

    return {
        "peak": rise,
        "parameters": parameters,
        "batch": batch_bytes,
        "session": session_bytes - parameters - batch_bytes,
        "milliseconds": _milliseconds(timed, task["runs"]),
    }


def _rise(run: Callable[[], object], drop: Callable[[], object]) -> tuple[int, int]:
    """(rise of the high-water mark during one run, resident bytes before it), after ``drop`` gave memory back."""
    drop()
    memory.release_free_memory()
    before = memory.resident()
    memory.reset_peak()
    run()
    return memory.peak() - before, before


def _milliseconds(run: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times) if times else 0.0


def _plain(graph: Any, batch: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], bytes, list[str]]:
    """(arrays by graph input, the joint graph with loss and gradients as outputs, names of those)."""
    import onnx_ir as ir

    from ortgraph.ops.expand import expand_composites

    expand_composites(graph)
    signature = graph.signature
    wanted = list(dict.fromkeys((signature.loss, *signature.gradients.values())))
    kept = [v for v in graph.graph.outputs if v.name in wanted]
    graph.graph.outputs.clear()
    graph.graph.outputs.extend(kept)
    feeds: dict[str, np.ndarray] = {n: np.ascontiguousarray(v) for n, v in graph.values.items()}
    feeds |= {n: np.ascontiguousarray(v) for n, v in batch.items()}
    for value in graph.graph.inputs:
        if value.name not in feeds:
            fill = 1 if value.name == signature.loss_gradient else 0
            feeds[value.name] = np.full(tuple(value.shape), fill, value.dtype.numpy())
    return feeds, ir.to_proto(graph.model).SerializeToString(), [v.name for v in kept]


def _loss_of(outputs: Any, loss: Any) -> Any:
    if callable(loss):
        return loss(outputs)
    if loss is not None:
        return outputs[loss]
    return outputs.loss if hasattr(outputs, "loss") else outputs


def _function(build: str) -> Callable[..., Mapping[str, Any]]:
    source, _, name = build.rpartition(":")
    if not source.endswith(".py"):
        return getattr(importlib.import_module(source), name)
    spec = importlib.util.spec_from_file_location("measured_build", source)
    assert spec is not None and spec.loader is not None, source
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def main() -> None:
    memory.prepare_process()
    task, folder = json.loads(sys.stdin.read()), sys.argv[1]
    what = task["what"]
    if what == "pytorch":
        figures = measure_pytorch(task)
    else:
        figures = (measure_step if what == "step" else measure_unplanned)(task, folder)
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
