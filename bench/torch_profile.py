"""PyTorch's own profiler, per operator and step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from bench.profile_groups import OperatorTime, summed, torch_flops, torch_group


def profile_torch(step: Callable[[], Any], steps: int) -> list[dict[str, Any]]:
    """Self time by operator, per step; leaves count, what only calls others has little time of its own."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        for _ in range(steps):
            step()
    rows = []
    for event in found.key_averages(group_by_input_shape=True):
        if event.self_cpu_time_total <= 0:
            continue
        flops = torch_flops(event.key, event.input_shapes or ()) * event.count // steps
        milliseconds = event.self_cpu_time_total / 1e3 / steps
        rows.append(OperatorTime(event.key, torch_group(event.key), event.count / steps, milliseconds, flops))
    return [dataclasses.asdict(r) for r in summed(rows)]
