"""What each of two ranks does for test_session: the optimizer in the graph, gradients summed before the update.

Results are arrays by scenario; the test compares them with one process on the joint batch.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import ortgraph
from ortgraph.distributed import DistributedSession, compiling, init
from ortgraph.distributed.parted_program import PartedProgram
from ortgraph.errors import OrtgraphError

RANK = int(os.environ.get("RANK", "0"))
ROWS, WORDS, LENGTH, STEPS = 4, 11, 3, 5


class Net(torch.nn.Module):
    """A token classifier with a mean over labels that count."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(WORDS, 6)
        self.body, self.norm, self.head = torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, WORDS)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.dropout(self.norm(torch.nn.functional.gelu(self.body(self.table(ids)))))
        return torch.nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def batch(i: int, ignored: bool = False) -> dict[str, np.ndarray]:
    """The joint batch of step i; with more ignored labels in the second half."""
    rng = np.random.default_rng(i)
    made = {"ids": rng.integers(0, WORDS, (2 * ROWS, LENGTH)), "labels": rng.integers(0, WORDS, (2 * ROWS, LENGTH))}
    if ignored:
        made["labels"][:ROWS][rng.random((ROWS, LENGTH)) < 0.2] = -100
        made["labels"][ROWS:][rng.random((ROWS, LENGTH)) < 0.7] = -100
    return made


def part(given: dict[str, np.ndarray], of: int = RANK, parts: int = 2) -> dict[str, np.ndarray]:
    rows = 2 * ROWS // parts
    return {k: v[of * rows : (of + 1) * rows] for k, v in given.items()}


def captured(rows: int, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    return ortgraph.capture(Net(dropout), {k: v[:rows] for k, v in batch(0).items()})


def state(session: Any) -> dict[str, np.ndarray]:
    return {**session.state_dict(), **session.optimizer_state_dict()}


def trained(session: Any, data: Callable[[int], Any], **given: Any) -> dict[str, Any]:
    losses = [session.step(data(i), **{k: f(i) for k, f in given.items()}) for i in range(STEPS)]
    return {"losses": np.array(losses), **state(session)}


def fails(call: Callable[[], Any]) -> str:
    try:
        call()
    except OrtgraphError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Broken(Net):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if RANK == 1:
            raise ValueError("rank 1 cannot be traced")
        return super().forward(ids, labels)


class Refusing:
    def run_with_iobinding(self, binding: Any) -> None:
        raise RuntimeError("rank 1 cannot go on")


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    group = init(timeout=60, meeting=os.environ["MEETING"])
    torch.manual_seed(RANK)  # rank 0's values count
    adam = ortgraph.optim.AdamW(lr=1e-2, max_grad_norm=0.05, no_decay=("*.bias",))
    found: dict[str, Any] = {}

    if RANK == 1:
        ours = compiling.optimizing.optimize
        compiling.optimizing.optimize = lambda *a, **k: (_ for _ in ()).throw(AssertionError("rank 1 optimizes"))
    graph = ortgraph.distributed.optimize(captured(ROWS), group, "O2", adam)
    if RANK == 1:
        compiling.optimizing.optimize = ours
    session = DistributedSession(graph, group, threads=1, bucket_bytes=400)
    found["buckets"] = len(session.gradient_buckets.flat)
    found["equal parts"] = trained(session, lambda i: part(batch(i)))
    whole = DistributedSession(graph, group, threads=1, bucket_bytes=400, overlap=False)
    found["without overlap"] = trained(whole, lambda i: part(batch(i)))
    backward = next(p for p in session.programs if isinstance(p, PartedProgram))
    found["finished"] = [p.finished for p in backward.parts]
    session.save_checkpoint(folder / "checkpoint")
    found["straight"] = session.step(part(batch(7)))
    session.load_checkpoint(folder / "checkpoint")
    found["resumed"] = session.step(part(batch(7)))
    found["report"] = str(session.report())

    before = state(session)
    wrong = part(batch(8))
    if RANK == 1:
        wrong["ids"] = wrong["ids"] + WORDS
    found["failed step"] = fails(lambda: session.step(wrong))
    found["unchanged"] = all(np.array_equal(before[k], v) for k, v in state(session).items())
    usual = backward.parts[1].session
    if RANK == 1:
        backward.parts[1].session = Refusing()
    found["failed between sums"] = fails(lambda: session.step(part(batch(8))))
    backward.parts[1].session = usual
    found["unchanged between sums"] = all(np.array_equal(before[k], v) for k, v in state(session).items())
    session.check_memory(part(batch(8)), "backward")
    found["failed capture"] = fails(lambda: ortgraph.distributed.compile(Broken(), part(batch(0)), adam, group))
    found["another rate"] = fails(lambda: session.step(part(batch(8)), learning_rate=0.1 * (1 + RANK)))

    values = session.state_dict()
    session.load_state_dict({k: v + RANK for k, v in values.items()})
    found["other values"] = fails(lambda: session.step(part(batch(8)), learning_rate=1e-2))
    session.load_state_dict(values)
    session.step(part(batch(8)), learning_rate=1e-2)

    graph = ortgraph.distributed.optimize(captured(ROWS), group, "O2", adam)
    items = DistributedSession(graph, group, threads=1)
    data = {i: part(batch(i, ignored=True)) for i in range(STEPS)}
    found["items"] = trained(items, data.__getitem__, items=lambda i: int((data[i]["labels"] != -100).sum()))

    graph = ortgraph.distributed.optimize(captured(ROWS // 2), group, "O2", adam, accumulation_steps=2)
    sums = DistributedSession(graph, group, threads=1)
    for i in range(STEPS):
        sums.accumulate(part(batch(i), RANK, 4))
        sums.step(part(batch(i), RANK + 2, 4))
    found["accumulated"] = state(sums)

    scaled = ortgraph.distributed.optimize(captured(ROWS, dropout=0.3), group, "O2", adam, loss_scale="dynamic")
    careful = DistributedSession(scaled, group, threads=1)
    careful.step(part(batch(0)))
    before = careful.state_dict()
    if RANK == 1:
        careful._memory.persistent["norm.weight"][...] = np.inf
    careful.step(part(batch(1)))
    found["skipped"] = careful.skipped_steps, careful.loss_scale
    names = [n for n in before if n != "norm.weight"]
    found["kept"] = all(np.array_equal(before[n], careful.state_dict()[n]) for n in names)
    keys = [s.input for s in careful.signature.states if s.kind == "random_key"]
    found["key"] = int(careful._memory.persistent[keys[0]])

    if RANK == 1:
        torch.save(found, folder / "rank-1.pt")
        os._exit(7)
    found["gone"] = fails(lambda: session.step(part(batch(9))))
    torch.save(found, folder / "rank-0.pt")


if __name__ == "__main__":
    main()
