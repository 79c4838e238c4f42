"""One side of a comparison in a process of its own: reads ``run N`` lines, answers with N step times in seconds."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

from bench.workloads import WORKLOADS

LEARNING_RATE = 1e-4


def torch_step(workload: str, attention: str, compiled: bool, threads: int) -> Callable[[], None]:
    """PyTorch's full step: forward, backward, AdamW(fused=True)."""
    import torch

    torch.set_num_threads(threads)
    made = WORKLOADS[workload](attention=attention)
    module, batch = made["module"], made["batch"]
    forward = torch.compile(module) if compiled else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        forward(**batch).loss.backward()
        optimizer.step()

    return step


def ortgraph_step(workload: str, attention: str, level: str, threads: int) -> Callable[[], None]:
    """Our full step on onnxruntime-training."""
    import ortgraph

    made = WORKLOADS[workload](attention=attention)
    graph = ortgraph.capture(made["module"], made["batch"])
    result = ortgraph.optimize(graph, level, optimizer=ortgraph.optim.AdamW(lr=LEARNING_RATE))
    session = ortgraph.TrainingSession(result.graph, threads=threads)
    batch = {k: v.numpy() for k, v in made["batch"].items()}
    return lambda: session.step(batch)


def ortgraph_gradients(workload: str, attention: str, level: str, threads: int) -> Callable[[], None]:
    """Our forward and backward without an update, gradients left in the arena."""
    import ortgraph

    made = WORKLOADS[workload](attention=attention)
    result = ortgraph.optimize(ortgraph.capture(made["module"], made["batch"]), level)
    session = ortgraph.TrainingSession(result.graph, threads=threads)
    session.gradients({k: v.numpy() for k, v in made["batch"].items()})
    (program,) = (p for p in session.programs if p.name == "gradients")
    return program.run


def raw_step(workload: str, attention: str, threads: int, update: bool) -> Callable[[], None]:
    """The captured joint graph, composites expanded, with all of ONNX Runtime's own optimizations on.

    With ``update`` AdamW is part of the graph, as standard operators.
    """
    import numpy as np
    import onnx_ir as ir
    import onnxruntime as ort

    import ortgraph
    from ortgraph.ops.expand import expand_composites
    from ortgraph.optim.attach import attach

    made = WORKLOADS[workload](attention=attention)
    graph = ortgraph.capture(made["module"], made["batch"])
    if update:
        attach(graph, ortgraph.optim.AdamW(lr=LEARNING_RATE))
    expand_composites(graph)
    signature = graph.signature
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = ort.InferenceSession(
        ir.to_proto(graph.model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    feeds = {k: v.numpy() for k, v in made["batch"].items()}
    feeds.update({k: np.ascontiguousarray(v) for k, v in graph.values.items()})
    feeds.update({k: np.asarray(v, np.float32) for k, v in signature.scalars.items()})
    if signature.loss_gradient:
        feeds[signature.loss_gradient] = np.ones((), np.float32)
    for value in graph.graph.inputs:
        if value.name not in feeds:
            feeds[value.name] = np.zeros(tuple(value.shape), value.dtype.numpy())
    held = {i.name: ort.OrtValue.ortvalue_from_numpy(feeds[i.name].copy()) for i in session.get_inputs()}
    for name, value in held.items():
        binding.bind_ortvalue_input(name, value)
    pairs = list(signature.pairs())
    spare = {target: ort.OrtValue.ortvalue_from_numpy(feeds[source].copy()) for source, target in pairs}
    binding.bind_output(signature.loss)
    for name in () if update else signature.gradients.values():
        binding.bind_output(name)
    for _, target in pairs:
        binding.bind_ortvalue_output(target, spare[target])

    def step() -> None:
        session.run_with_iobinding(binding)
        for source, target in pairs:  # double buffering: the new value becomes the next step's input
            held[source], spare[target] = spare[target], held[source]
            binding.bind_ortvalue_input(source, held[source])
            binding.bind_ortvalue_output(target, spare[target])

    return step


def make(side: str, workload: str, attention: str, threads: int) -> Callable[[], None]:
    if side == "eager":
        return torch_step(workload, attention, False, threads)
    if side == "compile":
        return torch_step(workload, attention, True, threads)
    if side in ("raw", "raw-gradients"):
        return raw_step(workload, attention, threads, update=side == "raw")
    if side.startswith("gradients-"):
        return ortgraph_gradients(workload, attention, side.removeprefix("gradients-"), threads)
    return ortgraph_step(workload, attention, side.removeprefix("ortgraph-"), threads)


def main() -> None:
    side, workload, attention, threads = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print do not disturb the answers
    step = make(side, workload, attention, threads)
    for _ in range(3):
        step()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line.split()[1])):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
        print(json.dumps(times), file=answers, flush=True)


if __name__ == "__main__":
    main()
