"""For whoever has a GPU: gradients against the processor, twenty steps, and times beside torch.compile. Prints JSON.

    python -m bench.gpu_check [--target onnxruntime-training:cuda] [--workload bert-256x4] [--steps 20] [--json out.json]

Never run so far on a device (docs/gpu.md). With a target of the CPU it checks itself.
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ortgraph
from bench.workloads import WORKLOADS
from ortgraph.errors import OrtgraphError
from ortgraph.manager.numerics import relative_errors, tolerance_of
from ortgraph.ops.targets import target_of
from ortgraph.runtime.detect import detect_runtime, device_targets

PRECISIONS = ("fp32", "bf16", "fp16")
WARM_UP = 5
RATE = 1e-4


def check(target: str, workload: str, steps: int, precisions: Sequence[str], compiled: bool) -> dict[str, Any]:
    """All rows of one workload on one target."""
    import onnxruntime
    import torch

    made = WORKLOADS[workload]()
    module, batch = made["module"], made["batch"]
    graph = ortgraph.capture(module, batch)
    arrays = {k: v.numpy() for k, v in batch.items()}
    exact = ortgraph.TrainingSession(graph).gradients(arrays)
    rows = [_row(target, graph, arrays, exact, precision, steps) for precision in precisions]
    if compiled:
        for row in rows:
            row["torch"] = _guarded(lambda r=row: _torch_times(module, batch, r["precision"], target, steps))
    return {
        "target": target,
        "workload": workload,
        "onnxruntime": onnxruntime.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "",
        "rows": rows,
    }


def _guarded(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result, or the error in words: one precision that fails must not hide the others."""
    try:
        return work()
    except (OrtgraphError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _row(
    target: str,
    graph: Any,
    batch: dict[str, np.ndarray],
    exact: dict[str, np.ndarray],
    precision: str,
    steps: int,
) -> dict[str, Any]:
    return {"precision": precision, **_guarded(lambda: _ours(target, graph, batch, exact, precision, steps))}


def _ours(
    target: str,
    graph: Any,
    batch: dict[str, np.ndarray],
    exact: dict[str, np.ndarray],
    precision: str,
    steps: int,
) -> dict[str, Any]:
    start = time.perf_counter()
    optimizer = ortgraph.optim.AdamW(lr=RATE)
    result = ortgraph.optimize(graph, "O2", optimizer=optimizer, target=target, precision=precision)
    session = ortgraph.TrainingSession(result.graph, target=target)
    errors = relative_errors(session.gradients(batch), exact)
    worst = max(errors, key=lambda name: errors[name])
    ready = time.perf_counter() - start
    losses, times = [], []
    for _ in range(WARM_UP + steps):
        begin = time.perf_counter()
        losses.append(session.step(batch))
        times.append(time.perf_counter() - begin)
    limit = tolerance_of(precision).gradient
    return {
        "gradient_error": float(errors[worst]),
        "gradient_error_in": worst,
        "gradient_limit": limit,
        "gradients_ok": bool(errors[worst] <= limit),
        "losses": losses[:steps],
        "loss_falls": losses[-1] < losses[0],
        "ms_ortgraph": statistics.median(times[WARM_UP:]) * 1e3,
        "seconds_to_first_step": ready,
        "copied_updates": len(session.programs[-1].placement.copies),
        "arena_bytes": session.arena_bytes,
    }


def _torch_times(module: Any, batch: dict[str, Any], precision: str, target: str, steps: int) -> dict[str, Any]:
    """Milliseconds of a step of torch.compile with fused AdamW; float16 with a gradient scaler."""
    import torch

    device = "cpu" if target_of(target).on_cpu else "cuda"
    model = copy.deepcopy(module).to(device)
    inputs = {k: v.to(device) for k, v in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
    run = torch.compile(model)
    times = []
    for _ in range(WARM_UP + steps):
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=low or torch.bfloat16, enabled=low is not None):
            loss = run(**inputs).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        float(loss.detach())  # as ours: the loss is read at every step
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return {"ms": statistics.median(times[WARM_UP:]) * 1e3}


def main() -> int:
    """0 when all gradients agree; 1 when some do not or a precision fails; 2 when there is no device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--target", default="", help="the installed runtime's first device when left out")
    parser.add_argument("--workload", default="bert-256x4", choices=sorted(WORKLOADS))
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="may be repeated; all when left out")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-torch", action="store_true", help="without the times of torch.compile")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    runtime = detect_runtime()
    target = given.target or next(iter(device_targets(runtime)), "")
    if not target:
        print(f"{runtime.wheel} {runtime.version} has no provider for a device (docs/gpu.md)", file=sys.stderr)
        return 2
    found = check(target, given.workload, given.steps, given.precision or PRECISIONS, not given.no_torch)
    text = json.dumps(found, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n", encoding="utf-8")
    return 0 if all(row.get("gradients_ok") for row in found["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
