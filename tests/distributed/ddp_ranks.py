"""What each of two ranks does for test_ddp: DistributedDataParallel over the doors of torch.compile.

Each scenario returns tensors by name; the test compares them with PyTorch in one process, and between ranks.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ortgraph

RANK = int(os.environ["RANK"])
ROWS = 4  # of each rank


class Net(torch.nn.Module):
    """Two layers; with batch statistics, or with a layer that nothing uses."""

    def __init__(self, batch_norm: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.body = torch.nn.Linear(8, 16, bias=not batch_norm)  # in front of a batch norm its gradient is rounding
        self.head = torch.nn.Linear(16, 3)
        self.norm = torch.nn.BatchNorm1d(16) if batch_norm else torch.nn.LayerNorm(16)
        self.spare = torch.nn.Linear(2, 2) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.nn.functional.gelu(self.norm(self.body(x))))


def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The joint batch of step i."""
    generator = torch.Generator().manual_seed(i)
    return torch.randn(2 * ROWS, 8, generator=generator), torch.randint(0, 3, (2 * ROWS,), generator=generator)


def mine(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(i)
    part = slice(RANK * ROWS, (RANK + 1) * ROWS)
    return x[part], y[part]


def train(
    module: Any, net: Net, data: Callable[[int], Any], steps: int = 5, make: Any = None
) -> dict[str, torch.Tensor]:
    """Gradients of the first step, and state after five steps of AdamW."""
    found = {}
    optimizer = make(net.parameters()) if make else torch.optim.AdamW(net.parameters(), lr=1e-2)
    for i in range(steps):
        optimizer.zero_grad()
        x, y = data(i)
        cross_entropy(module(x), y).backward()
        if i == 0:
            found.update({f"{n}.grad": p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})
        optimizer.step()
    return {**found, **{n: v.detach().clone() for n, v in net.state_dict().items()}}


def accumulate(module: Any, net: Net) -> dict[str, torch.Tensor]:
    """Gradients of two batches, of which only the second is sent."""
    with module.no_sync():
        x, y = mine(0)
        cross_entropy(module(x), y).backward()
    x, y = mine(1)
    cross_entropy(module(x), y).backward()
    return {n: p.grad.clone() for n, p in net.named_parameters()}


def shared(zero: list[Any]) -> Callable[[Any], Any]:
    """Makes an optimizer whose states are shared out among the ranks (ZeRO stage 1)."""

    def make(parameters: Any) -> Any:
        kind = ortgraph.optim.FusedAdam
        zero.append(ZeroRedundancyOptimizer(parameters, kind, lr=1e-2, weight_decay=1e-2))
        return zero[0]

    return make


def joint(net: Net) -> dict[str, torch.Tensor]:
    for i in (0, 1):
        x, y = batch(i)
        cross_entropy(net(x), y).backward()
    return {n: p.grad.clone() for n, p in net.named_parameters()}


def main() -> None:
    torch.distributed.init_process_group("gloo", os.environ["MEETING"], rank=RANK, world_size=2)
    torch.manual_seed(0)
    plain, with_buffers, with_spare = Net(), Net(batch_norm=True), Net(unused=True)
    graphs: list[str] = []
    options = {"fallback": False, "after_capture": lambda graph: graphs.append(graph.signature.loss)}

    def door(net: Net, kind: str, **ddp: Any) -> tuple[Any, Net]:
        own = copy.deepcopy(net)
        if kind == "module":
            return DistributedDataParallel(ortgraph.ORTModule(own, **options), **ddp), own
        if kind == "compile":
            return torch.compile(DistributedDataParallel(own, **ddp), backend="ortgraph", options=options), own
        return DistributedDataParallel(own, **ddp), own

    found: dict[str, Any] = {"joint": train(own := copy.deepcopy(plain), own, batch)}
    for kind in ("module", "compile", "eager"):
        found[kind] = train(*door(plain, kind), mine)
    for kind in ("module", "eager"):
        found[f"buffers {kind}"] = train(*door(with_buffers, kind), mine)
        spare = {"find_unused_parameters": True}
        found[f"spare {kind}"] = train(*door(with_spare, kind, **spare), mine, steps=2)
    found["accumulated"] = accumulate(*door(plain, "module"))
    found["accumulated joint"] = joint(copy.deepcopy(plain))
    wide = Net()
    wide.body = torch.nn.Sequential(torch.nn.Linear(8, 600), torch.nn.Linear(600, 600), torch.nn.Linear(600, 16))
    module, _ = door(wide, "module", bucket_cap_mb=1)
    zero: list[Any] = []
    found["zero"] = train(*door(plain, "module"), mine, make=shared(zero))
    found["zero states"] = [p.numel() for p in zero[0].optim.state]
    zero[0].consolidate_state_dict(to=0)
    if RANK == 0:  # what one process can go on with
        ortgraph.optim.FusedAdam(copy.deepcopy(plain).parameters()).load_state_dict(zero[0].state_dict())
    before = len(graphs)
    module(mine(0)[0]).sum().backward()
    found["graphs of a wide module"] = len(graphs) - before
    torch.save(found, f"{sys.argv[1]}/rank-{RANK}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
