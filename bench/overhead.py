"""What a step costs beyond its kernels: Python and binding, at 1,000 nodes on tiny tensors.

    python -m bench.overhead [--nodes 1000] [--repeats 200] [--json]

Three times of the same graph are taken in turn, and medians of differences printed: plain ``InferenceSession.run``
with the same options (nothing bound but its results), the bound arena (every value bound), ``TrainingSession.step``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ortgraph.graph import Parameter, Signature, State, TrainingGraph
from ortgraph.ops.builder import Builder
from ortgraph.runtime.options import session_options
from ortgraph.runtime.ort_session import program_model
from ortgraph.runtime.session import TrainingSession

WIDTH = 8
PARAMETERS = 40


def chain_graph(nodes: int) -> TrainingGraph:
    """A lowered graph of about ``nodes`` element-wise nodes and 40 updated parameters; w' = w - rate * tanh(...)."""
    f = ir.DataType.FLOAT
    x = ir.val("x", dtype=f, shape=[WIDTH, WIDTH])
    weights = [ir.val(f"w{i}", dtype=f, shape=[WIDTH, WIDTH]) for i in range(PARAMETERS)]
    rate, step = ir.val("learning_rate", dtype=f, shape=[]), ir.val("step", dtype=ir.DataType.INT64, shape=[])
    graph = ir.Graph([x, *weights, rate, step], [], nodes=[], opset_imports={"": 18}, name="chain")
    b = Builder(graph, "bench")
    value, gradients = x, []
    per_parameter = max(1, (nodes - 3 * PARAMETERS - 2) // PARAMETERS)
    for w in weights:
        value = b.op("Mul", value, w)
        for i in range(per_parameter - 1):
            value = b.op("Tanh" if i % 2 else "Neg", value)
        gradients.append(value)
    loss = b.op("ReduceMean", value, keepdims=0)
    loss.name = "loss"
    graph.outputs.append(loss)
    parameters = []
    for w, g in zip(weights, gradients, strict=True):
        gradient = b.op("Tanh", g)
        new = b.op("Sub", w, b.op("Mul", gradient, rate))
        gradient.name, new.name = f"{w.name}.grad", f"update/{w.name}"
        graph.outputs.extend([gradient, new])
        parameters.append(Parameter(w.name or "", gradient=gradient.name, update=new.name))
    after = b.op("Add", step, b.const(1, np.int64))
    after.name = "step.next"
    graph.outputs.append(after)
    signature = Signature(
        loss="loss",
        stage="lowered",
        inputs=("x",),
        parameters=tuple(parameters),
        states=(State("step", "step", "step.next", "step"),),
        scalars={"learning_rate": 1e-3},
    )
    values = {w.name or "": np.ones((WIDTH, WIDTH), np.float32) for w in weights}
    return TrainingGraph(ir.Model(graph, ir_version=10), signature, values)


def plain_run(graph: TrainingGraph) -> Callable[[], object]:
    """The same graph by ``InferenceSession.run``: the loss and the new parameters come back as new arrays."""
    import onnxruntime as ort

    g = graph.graph
    wanted = [v for v in g.outputs if not (v.name or "").endswith(".grad")]
    model = program_model(graph.model, list(g), list(g.inputs), wanted)
    session = ort.InferenceSession(model.SerializeToString(), session_options(1), providers=["CPUExecutionProvider"])
    feeds = {v.name: np.ones(list(v.shape or ()), v.dtype.numpy()) for v in g.inputs}  # type: ignore[union-attr]
    names = [v.name for v in wanted]
    return lambda: session.run(names, feeds)


def measure(nodes: int, repeats: int) -> dict[str, float]:
    """Medians in microseconds of the three ways and of their differences, runs in turn."""
    graph = chain_graph(nodes)
    session = TrainingSession(graph, threads=1)
    batch = {"x": np.ones((WIDTH, WIDTH), np.float32)}
    session.step(batch)
    (program,) = session.programs
    ways = {"plain": plain_run(graph), "bound": program.run, "step": lambda: session.step(batch)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    orders = list(itertools.permutations(ways))  # which way runs before another decides what is in the caches
    for i in range(repeats + 20):
        for name in orders[i % len(orders)]:
            run = ways[name]
            start = time.perf_counter()
            run()
            times[name].append(1e6 * (time.perf_counter() - start))
    kept = {name: t[20:] for name, t in times.items()}
    median = {name: statistics.median(t) for name, t in kept.items()}
    python = statistics.median(s - b for s, b in zip(kept["step"], kept["bound"], strict=True))
    binding = statistics.median(b - p for b, p in zip(kept["bound"], kept["plain"], strict=True))
    return {
        "nodes": len(program.order),
        "bound_values": len(program.placement.offsets) + len(program.placement.at_input),
        "plain_us": median["plain"],
        "bound_us": median["bound"],
        "step_us": median["step"],
        "binding_us": binding,
        "python_us": python,
        "overhead_us": max(0.0, binding) + python,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.nodes, options.repeats)
    if options.json:
        print(json.dumps(found))
        return
    print(f"{found['nodes']} nodes, {found['bound_values']} bound values; medians of {options.repeats} runs in turn")
    print(f"plain InferenceSession.run   {found['plain_us']:8.0f} us")
    print(f"bound arena                  {found['bound_us']:8.0f} us   binding {found['binding_us']:+.0f} us")
    print(f"TrainingSession.step         {found['step_us']:8.0f} us   Python  {found['python_us']:+.0f} us")
    print(
        f"overhead of a step           {found['overhead_us']:8.0f} us   (goal: at most 1000; a step is the upper bound)"
    )


if __name__ == "__main__":
    main()
