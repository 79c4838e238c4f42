"""One side of a comparison in a process of its own.

Started with one argument, a Side as JSON. It answers ``ready`` or ``{"error": ...}``, then reads lines: ``run N [FORM]`` is
answered with N step times in seconds, ``profile N [FORM]`` with the times of operators over N steps, ``work`` with the
matrix products of the captured graph and their number, ``warm FORM, FORM`` with why a form cannot run (null: it can).
PyTorch's process has the forms ``eager fp32``, ``compile bf16`` and so on, of one module and one optimizer.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from bench.workloads import build

LEARNING_RATE = 1e-4
WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Side:
    """What one process runs.

    Attributes:
        kind: ``ortgraph``, ``gradients`` (ortgraph without an update), ``module`` and ``module-gradients`` (ORTModule, with
            FusedAdam and alone), ``raw`` and ``raw-gradients`` (the captured
            graph in ONNX Runtime), ``torch``.
        workload: A name of ``bench.workloads`` or ``file.py:function``.
        attention: Attention implementation; empty where there is no choice.
        precision: ``fp32`` or ``bf16``; PyTorch's process has both.
        threads: Threads of one operator.
        level: Preset of ortgraph.
    """

    kind: str
    workload: str
    attention: str = ""
    precision: str = "fp32"
    threads: int = 2
    level: str = "O2"


@dataclasses.dataclass(frozen=True)
class Runner:
    """A step, and what else is asked about it.

    Attributes:
        step: The function that runs one step of a form; sides with one form take any name.
        profile: Rows of ``bench.profile_groups.OperatorTime`` as dicts, over a number of steps of a form.
        work: (batch, rows, inner, columns, count) of every matrix product before anything was optimized.
    """

    step: Callable[[str], Callable[[], Any]]
    profile: Callable[[str, int], list[dict[str, Any]]] | None = None
    work: tuple[tuple[int, ...], ...] = ()


def feeds(made: dict[str, Any]) -> dict[str, Any]:
    """The batch as arrays by the names of the graph's inputs."""
    from ortgraph.capture.torch_batch import read_batch
    from ortgraph.capture.torch_module import is_criterion

    loss = made.get("loss")
    read = read_batch(made["module"], made["batch"], is_criterion(loss), has_loss=callable(loss))
    return {name: tensor.numpy() for name, tensor in zip(read.names, read.tensors, strict=True)}


def captured(side: Side) -> tuple[Any, dict[str, Any]]:
    """The captured graph and the batch."""
    import ortgraph

    made = build(side.workload, side.attention)
    return ortgraph.capture(made["module"], made["batch"], loss=made.get("loss")), feeds(made)


def torch_loss(made: dict[str, Any], compiled: bool) -> Callable[[], Any]:
    """The forward pass, loss included."""
    import torch

    module, batch, loss = made["module"], made["batch"], made.get("loss")
    forward = torch.compile(module) if compiled else module
    if loss is None and isinstance(batch, dict):
        return lambda: forward(**batch).loss
    from ortgraph.capture.torch_batch import read_batch
    from ortgraph.capture.torch_module import Results, TracedStep, is_criterion

    read = read_batch(module, batch, is_criterion(loss), has_loss=callable(loss))
    step = TracedStep(forward, read, loss, (), Results())
    return lambda: step(*read.tensors)[0]


def torch_runner(side: Side) -> Runner:
    """PyTorch's full step: forward, backward, AdamW(fused=True); bf16 by autocast."""
    import torch
    import torch._inductor.config as inductor

    from bench.torch_profile import profile_torch

    torch.set_num_threads(side.threads)
    inductor.cpp.enable_kernel_profile = os.environ.get("BENCH_KERNEL_PROFILE") == "1"
    made = build(side.workload, side.attention)
    optimizer = torch.optim.AdamW(made["module"].parameters(), lr=LEARNING_RATE, fused=True)

    @functools.cache
    def pick(form: str) -> Callable[[], Any]:
        kind, precision = form.split()
        forward = torch_loss(made, kind == "compile")

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = forward()
            loss.backward()
            optimizer.step()

        return step

    return Runner(pick, lambda form, steps: profile_torch(pick(form), steps))


def precision_options(side: Side) -> dict[str, Any]:
    return {} if side.precision == "fp32" else {"precision": side.precision}


def ortgraph_runner(side: Side) -> Runner:
    """Our full step."""
    import ortgraph
    from bench.matrix_work import matrix_work
    from bench.profile_groups import graph_times

    graph, batch = captured(side)
    work = tuple((*dataclasses.astuple(p), n) for p, n in matrix_work(graph).items())
    optimizer = ortgraph.optim.AdamW(lr=LEARNING_RATE)
    result = ortgraph.optimize(graph, side.level, optimizer=optimizer, **precision_options(side))
    del graph
    session = ortgraph.TrainingSession(result.graph, threads=side.threads)

    def profile(form: str, steps: int) -> list[dict[str, Any]]:
        times = session.profile(batch, "step", steps)
        return [dataclasses.asdict(t) for t in graph_times(times, session.program("step", batch).order)]

    return Runner(lambda form: lambda: session.step(batch), profile, work)


def gradients_runner(side: Side) -> Runner:
    """Our forward and backward without an update, gradients left in the arena."""
    import ortgraph

    graph, batch = captured(side)
    result = ortgraph.optimize(graph, side.level, **precision_options(side))
    session = ortgraph.TrainingSession(result.graph, threads=side.threads)
    session.gradients(batch)
    (program,) = (p for p in session.programs if p.name == "gradients")
    return Runner(lambda form: program.run)


def raw_runner(side: Side) -> Runner:
    """The captured joint graph, composites expanded, with all of ONNX Runtime's own optimizations on.

    AdamW is part of the graph, as standard operators, but for ``raw-gradients``.
    """
    import numpy as np
    import onnx_ir as ir
    import onnxruntime as ort

    import ortgraph
    from ortgraph.ops.expand import expand_composites
    from ortgraph.optim.attach import attach

    if side.precision != "fp32":
        raise ValueError("ONNX Runtime's CPU provider computes in float32")
    update = side.kind == "raw"
    graph, feed = captured(side)
    if update:
        attach(graph, ortgraph.optim.AdamW(lr=LEARNING_RATE))
    expand_composites(graph)
    signature = graph.signature
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = side.threads
    options.log_severity_level = 3
    session = ort.InferenceSession(
        ir.to_proto(graph.model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    feed.update({k: np.ascontiguousarray(v) for k, v in graph.values.items()})
    feed.update({k: np.asarray(v, np.float32) for k, v in signature.scalars.items()})
    if signature.loss_gradient:
        feed[signature.loss_gradient] = np.ones((), np.float32)
    for value in graph.graph.inputs:
        if value.name not in feed:
            feed[value.name] = np.zeros(tuple(value.shape), value.dtype.numpy())
    held = {i.name: ort.OrtValue.ortvalue_from_numpy(feed[i.name].copy()) for i in session.get_inputs()}
    for name, value in held.items():
        binding.bind_ortvalue_input(name, value)
    pairs = list(signature.pairs())
    spare = {target: ort.OrtValue.ortvalue_from_numpy(feed[source].copy()) for source, target in pairs}
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

    return Runner(lambda form: step)


def module_runner(side: Side) -> Runner:
    """ORTModule: forward and backward, and FusedAdam unless gradients alone are asked for."""
    import torch

    import ortgraph
    from ortgraph.optim import FusedAdam

    torch.set_num_threads(side.threads)
    made = build(side.workload, side.attention)
    module, batch = made["module"], made["batch"]
    compiled = ortgraph.ORTModule(module, pipeline=side.level, fallback=False, **precision_options(side))
    optimizer = FusedAdam(module.parameters(), lr=LEARNING_RATE) if side.kind == "module" else None
    parameters = list(module.parameters())

    def step() -> None:
        for p in parameters:
            p.grad = None
        compiled(**batch).loss.backward()
        if optimizer is not None:
            optimizer.step()

    return Runner(lambda form: step)


MAKERS: dict[str, Callable[[Side], Runner]] = {
    "torch": torch_runner,
    "raw": raw_runner,
    "raw-gradients": raw_runner,
    "gradients": gradients_runner,
    "module": module_runner,
    "module-gradients": module_runner,
    "ortgraph": ortgraph_runner,
}


def time_steps(step: Callable[[], Any], steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return times


def answer(runner: Runner, command: str) -> Any:
    """The answer to one line.

    Raises:
        ValueError: The side has no profile.
    """
    word, *rest = command.split(maxsplit=1)
    if word == "work":
        return runner.work
    if word == "warm":
        return {form: warm(runner, form) for form in rest[0].split(", ")}
    count, *form = rest[0].split(maxsplit=1)
    name = form[0] if form else ""
    if word == "run":
        return time_steps(runner.step(name), int(count))
    if runner.profile is None:
        raise ValueError("this side has no profile")
    return runner.profile(name, int(count))


def warm(runner: Runner, form: str) -> str | None:
    """The first steps of a form; why it cannot run."""
    try:
        time_steps(runner.step(form), WARM_UP)
    except Exception as error:  # noqa: BLE001 - whatever it is becomes a row of the report
        traceback.print_exc()
        return in_one_line(error)
    return None


def in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print do not disturb the answers
    side = Side(**json.loads(sys.argv[1]))
    try:
        runner = MAKERS[side.kind](side)
        if side.kind != "torch":
            time_steps(runner.step(""), WARM_UP)
    except Exception as error:  # noqa: BLE001 - whatever it is becomes a row of the report
        traceback.print_exc()
        print(json.dumps({"error": in_one_line(error)}), file=answers, flush=True)
        return
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(runner, line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
