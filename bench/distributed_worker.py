"""One rank of bench.distributed, in a process of its own, pinned to one core with one thread.

Answers ``ready``, then ``run N`` with N step times in seconds, ``sum N`` with N times of an all-reduce of the gradients,
``memory`` with the largest resident bytes since the warm-up.
"""

from __future__ import annotations

import dataclasses
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
class Rank:
    """What one process runs.

    Attributes:
        side: ``torch``, ``ortgraph``, ``zero`` (ZeRO stage 1), ``graph`` (the optimizer in the graph).
        workload: A name of ``bench.workloads``; each rank has a batch of its size.
        rank, size: Of this process; a size of 1 is one process by itself.
        core: The processor that it is pinned to; None: none.
        meeting: Where the ranks meet.
    """

    side: str
    workload: str
    rank: int
    size: int
    core: int | None
    meeting: str


def module_step(rank: Rank, made: dict[str, Any]) -> Callable[[], Any]:
    """A step of a script: module, loss, optimizer, perhaps DistributedDataParallel."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    import ortgraph

    ours = rank.side != "torch"
    module: Any = ortgraph.ORTModule(made["module"], threads=1) if ours else made["module"]
    if rank.size > 1:
        # why views: no side copies gradients to and from its buckets
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    parameters = list(made["module"].parameters())
    optimizer: Any
    if rank.side == "zero":
        optimizer = ZeroRedundancyOptimizer(parameters, ortgraph.optim.FusedAdam, lr=LEARNING_RATE, weight_decay=0.01)
    elif ours:
        optimizer = ortgraph.optim.FusedAdam(parameters, lr=LEARNING_RATE, weight_decay=0.01)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        module(**made["batch"]).loss.backward()
        optimizer.step()

    return step


def graph_step(rank: Rank, made: dict[str, Any]) -> Callable[[], Any]:
    """A step of a DistributedSession."""
    import ortgraph
    from ortgraph.distributed import compile, init

    adam = ortgraph.optim.AdamW(lr=LEARNING_RATE)
    session = compile(made["module"], made["batch"], adam, init(), threads=1)
    batch = {k: v.numpy() for k, v in made["batch"].items()}
    return lambda: session.step(batch)


def main() -> None:
    rank = Rank(**json.loads(sys.argv[1]))
    if rank.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {rank.core})
    try:
        import torch

        from ortgraph.runtime.process_memory import peak, prepare_process, release_free_memory, reset_peak

        prepare_process()
        torch.set_num_threads(1)
        if rank.size > 1:
            torch.distributed.init_process_group("gloo", rank.meeting, rank=rank.rank, world_size=rank.size)
        made = build(rank.workload)
        step = (graph_step if rank.side == "graph" else module_step)(rank, made)
        for _ in range(WARM_UP):
            step()
        release_free_memory()
        reset_peak()
    except Exception:  # noqa: BLE001 - the other process prints it
        print(json.dumps({"error": traceback.format_exc()[-2000:]}), flush=True)
        return
    elements = sum(p.numel() for p in made["module"].parameters() if p.requires_grad)
    print("ready", flush=True)
    for line in sys.stdin:
        command, _, count = line.strip().partition(" ")
        if command == "memory":
            print(json.dumps(peak()), flush=True)
            continue
        call = step
        if command == "sum":
            flat = torch.zeros(elements)

            def call(flat: Any = flat) -> Any:
                return torch.distributed.all_reduce(flat)

        times = []
        for _ in range(int(count)):
            if rank.size > 1:
                torch.distributed.barrier()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
