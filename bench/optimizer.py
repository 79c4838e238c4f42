"""AdamW over 100 million parameters: our kernels against the machine's copy bandwidth and PyTorch's fused AdamW.

    python -m bench.optimizer [--rounds 9] [--threads 2] [--json out.json]

The parameters are BERT-base's: 199 tensors from 2 elements to a table of 30,522 rows, 109 million in all. An update moves
28 bytes per parameter (weight, gradient and two states read; weight and states written). ``copy`` bandwidth is the best
of copying between two large buffers and of rewriting one in place, bytes read and written both counted: a copy reads the
lines that it writes too, unless it streams, and an update in place does not. Sides are processes of their own and run in
turn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.processes import Worker, alone, build_shim, machine
from bench.worker import time_steps

BYTES = 28  # per parameter and update
COPIED = 1 << 27  # floats of a buffer
GOAL = 0.8  # of the copy bandwidth
_HYPER = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.01}
OURS = ("one call", "a call per tensor")


def parameter_shapes(layers: int = 12, width: int = 768, words: int = 30522) -> list[tuple[int, ...]]:
    """Shapes of BERT's parameters."""
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    square: list[tuple[int, ...]] = [(width, width), (width,)]
    layer = [*square * 4, *norm, (4 * width, width), (4 * width,), (width, 4 * width), (width,), *norm]
    return [(words, width), (512, width), (2, width), *norm, *layer * layers, *square, (2, width), (2,)]


def count(shapes: list[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))


def kernel_update(threads: int, multi: bool) -> Callable[[], Any]:
    """Our kernels over their inputs, in one session: one node for all parameters or one for each."""
    import numpy as np
    import onnx_ir as ir
    import onnxruntime as ort

    from ortgraph.ops import kernels
    from ortgraph.ops.builder import Builder
    from ortgraph.runtime.options import session_options

    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18, kernels.DOMAIN: 1}, name="update")
    held: dict[str, Any] = {}

    def declare(name: str, array: Any) -> ir.Value:
        held[name] = array
        value = ir.val(name, dtype=ir.DataType.from_numpy(array.dtype), shape=list(array.shape))
        graph.inputs.append(value)
        return value

    head = [declare("rate", np.asarray(1e-4, np.float32)), declare("step", np.asarray(3, np.int64))]
    groups = [[declare(f"{k}{i}", array) for k, array in tensors(i, s)] for i, s in enumerate(parameter_shapes())]
    b = Builder(graph, "bench")
    entry = kernels.BY_OPERATOR["ortgraph", "AdamW"]
    absent = sum(name.endswith("?") for name in entry.inputs)  # a scale, a skip: before the groups of the one call
    if multi:
        flat = [v for group in groups for v in group]
        made = b.multi(
            "MultiAdamW", *head, *[None] * absent, *flat, outputs=3 * len(groups), domain=kernels.DOMAIN, **_HYPER
        )
        results = [list(made[i : i + 3]) for i in range(0, len(made), 3)]
    else:
        results = [list(b.multi("AdamW", *head, *g, outputs=3, domain=kernels.DOMAIN, **_HYPER)) for g in groups]
    options = session_options(threads)
    options.register_custom_ops_library(str(kernels.library_path()))
    places = {}
    for group, result in zip(groups, results, strict=True):
        for value, source in zip(result, (group[0], *group[2:]), strict=True):
            graph.outputs.append(value)
            places[value.name] = source.name
    text = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = ort.InferenceSession(text, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    memory = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in held.items()}
    for name, value in memory.items():
        binding.bind_ortvalue_input(name, value)
    for name, source in places.items():
        binding.bind_ortvalue_output(name, memory[source])
    held.clear()
    return lambda: session.run_with_iobinding(binding)


def tensors(index: int, shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Weight, gradient and both states of a parameter."""
    import numpy as np

    draw = np.random.default_rng(index)
    for kind in "wgmv":
        array = draw.standard_normal(shape, np.float32) * np.float32(0.02)
        yield kind, np.square(array) if kind == "v" else array


def torch_update(threads: int) -> Callable[[], Any]:
    """``torch.optim.AdamW(fused=True)``."""
    import torch

    torch.set_num_threads(threads)
    parameters = []
    for i, shape in enumerate(parameter_shapes()):
        made = dict(tensors(i, shape))
        parameter = torch.nn.Parameter(torch.from_numpy(made["w"]))
        parameter.grad = torch.from_numpy(made["g"])
        parameters.append(parameter)
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=True).step


def copy_arrays(threads: int) -> Callable[[], Any]:
    """NumPy's copy, a part for every thread."""
    import numpy as np

    source, target = np.ones(COPIED, np.float32), np.zeros(COPIED, np.float32)
    pool = ThreadPoolExecutor(threads)
    parts = [slice(i * COPIED // threads, (i + 1) * COPIED // threads) for i in range(threads)]
    return lambda: list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))


def copy_tensors(threads: int) -> Callable[[], Any]:
    """PyTorch's copy."""
    import torch

    torch.set_num_threads(threads)
    source, target = torch.ones(COPIED), torch.zeros(COPIED)
    return lambda: target.copy_(source)


def rewrite_tensor(threads: int) -> Callable[[], Any]:
    """A pass of PyTorch's over one tensor, in place."""
    import torch

    torch.set_num_threads(threads)
    target = torch.ones(COPIED)
    return lambda: target.mul_(1.0)


SIDES: dict[str, Callable[[int], Callable[[], Any]]] = {
    OURS[0]: lambda threads: kernel_update(threads, multi=True),
    OURS[1]: lambda threads: kernel_update(threads, multi=False),
    "PyTorch fused AdamW": torch_update,
    "copy, NumPy": copy_arrays,
    "copy, PyTorch": copy_tensors,
    "copy, in place": rewrite_tensor,
}


def figures(rounds: dict[str, list[float]], parameters: int) -> dict[str, Any]:
    """What the seconds of all sides come to, round by round.

    Returns:
        ``gb_per_s`` by side; ``share_of_copy`` and ``against_pytorch`` (median and quartiles) of our fastest form.
    """
    moved = {name: 8 * COPIED if name.startswith("copy") else BYTES * parameters for name in rounds}
    rate = {n: [moved[n] / s / 1e9 for s in seconds] for n, seconds in rounds.items()}
    ours = min((n for n in OURS if n in rounds), key=lambda n: statistics.median(rounds[n]))
    copies = [max(values) for values in zip(*(r for n, r in rate.items() if n.startswith("copy")), strict=True)]
    return {
        "parameters": parameters,
        "form": ours,
        "gb_per_s": {n: statistics.median(r) for n, r in rate.items()},
        "ms": {n: 1e3 * statistics.median(s) for n, s in rounds.items()},
        "share_of_copy": _quartiles([a / b for a, b in zip(rate[ours], copies, strict=True)]),
        "against_pytorch": _quartiles(
            [a / b for a, b in zip(rounds["PyTorch fused AdamW"], rounds[ours], strict=True)]
        ),
        "target_share": GOAL,
    }


def _quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": middle, "low": low, "high": high}


def serve(side: str, threads: int) -> None:
    """A side's process: every line is answered with the seconds of one run."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    step = SIDES[side](threads)
    time_steps(step, 2)
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(time_steps(step, 1)), file=answers, flush=True)


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        serve(*json.loads(sys.argv[1]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lock", help="file whose lock is held during a round")
    parser.add_argument("--json", help="file to write")
    options = parser.parse_args()
    workers: dict[str, Worker] = {}
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        shim = build_shim(folder)
        try:
            for name in SIDES:
                preload = shim if "PyTorch" in name else None
                workers[name] = Worker([name, options.threads], options.threads, preload, module="bench.optimizer")
                workers[name].wait_ready()
                if workers[name].error:
                    raise SystemExit(f"{name}: {workers[name].error}")
            for _ in range(options.rounds):
                with alone(options.lock):
                    for name, worker in workers.items():
                        seconds[name] += worker.ask("run") or ()
        finally:
            for worker in workers.values():
                worker.close()
    found = {"machine": machine(), **figures(seconds, count(parameter_shapes()))}
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    print(text(found))


def text(found: dict[str, Any]) -> str:
    """The figures in words."""
    share, gain = found["share_of_copy"], found["against_pytorch"]
    lines = [f"{found['machine']}: AdamW over {found['parameters'] / 1e6:.0f} million parameters"]
    for name, rate in found["gb_per_s"].items():
        lines.append(f"  {name:24} {found['ms'][name]:8.1f} ms  {rate:7.1f} GB/s")
    lines.append(
        f"ortgraph ({found['form']}): {share['median']:.0%} of the copy bandwidth ({share['low']:.0%} to"
        f" {share['high']:.0%}; target {found['target_share']:.0%}), {gain['median']:.2f} x PyTorch's speed"
        f" ({gain['low']:.2f} to {gain['high']:.2f}; target 1)"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
