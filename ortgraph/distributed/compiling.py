"""One process optimizes, the others read what it made."""

from __future__ import annotations

from typing import Any

from ortgraph.capture import capture
from ortgraph.distributed.group import Group
from ortgraph.distributed.session import DistributedSession
from ortgraph.graph import TrainingGraph
from ortgraph.manager import optimize as optimizing
from ortgraph.manager.graph_cache import cached, key_of, text_of
from ortgraph.runtime.batch import Batch


def optimize(
    graph: TrainingGraph, group: Group, pipeline: str = "O2", optimizer: Any = None, **options: Any
) -> TrainingGraph:
    """``ortgraph.optimize`` for several processes: rank 0 optimizes and keeps the graph on disk, the others read it.

    Where they do not share a disk, or an option is code, each optimizes by itself. All end with the same graph.

    Args:
        graph: Captured, the same in all processes.
        group: The processes.
        pipeline, optimizer, options: As for ``ortgraph.optimize``.

    Raises:
        DistributedError: A process failed, or processes have different graphs.
        OrtgraphError: This process failed.
    """

    def make() -> TrainingGraph:
        return optimizing.optimize(graph, pipeline, optimizer=optimizer, distributed=True, **options).graph

    facts = text_of("distributed", pipeline, None if optimizer is None else str(optimizer), options)
    made = None
    for turn in (True, False):
        with group.together("optimizing"):
            if turn == (group.rank == 0):
                made = make() if facts is None else cached(graph, facts, make)
    assert made is not None
    group.same("optimized graph", key_of(made, ()))
    return made


def compile(
    module: Any,
    batch: Batch,
    optimizer: Any,
    group: Group,
    *,
    loss: Any = None,
    dynamic: Any = None,
    threads: int | None = None,
    pipeline: str = "O2",
    **options: Any,
) -> DistributedSession:
    """Capture, optimize and make a session, in all processes; when one fails, all stop.

    Args:
        module: The same in all processes; values are rank 0's.
        batch: An example of one process's part.
        optimizer: ``ortgraph.optim.AdamW(...)``, ``LAMB`` or ``SGD``.
        group: From ``ortgraph.distributed.init``.
        loss, dynamic: As for ``ortgraph.capture``.
        threads: As for ``DistributedSession``.
        pipeline, options: As for ``ortgraph.optimize``.

    Raises:
        DistributedError: Another process failed.
        OrtgraphError: This process failed.
    """
    graph = None
    with group.together("capture"):
        graph = capture(module, batch, loss=loss, dynamic=dynamic)
    assert graph is not None
    session = DistributedSession(optimize(graph, group, pipeline, optimizer, **options), group, threads=threads)
    values = session.graph.values
    for name in values.keys() & session.parameter_inputs().values():
        values[name] = session.buffer(name)  # why: nobody else has this graph, so a second copy serves nobody
    return session
