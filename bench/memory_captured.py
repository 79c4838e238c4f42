"""Planning problems of captured training graphs: the step program of a lowered graph with AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ortgraph.plan.operations import OperationGraph


def step_problem(made: dict[str, Any], level: str = "O2") -> OperationGraph:
    """Operations of one optimizer step of a workload (``bench.workloads``), in the order that would be planned."""
    import ortgraph
    from ortgraph.plan.program_plan import program_problem

    graph = ortgraph.capture(made["module"], made["batch"])
    lowered = ortgraph.optimize(graph, level, optimizer=ortgraph.optim.AdamW()).graph
    return program_problem(lowered, "step")[1].operations


def gpt(layers: int = 4, level: str = "O2") -> OperationGraph:
    """GPT of width 128, batch 8, sequence 128."""
    from bench.workloads import gpt_blocks

    return step_problem(gpt_blocks(layers=layers), level)


def bert() -> OperationGraph:
    from bench.workloads import WORKLOADS

    return step_problem(WORKLOADS["bert-256x4"]())


def cnn() -> OperationGraph:
    import torch

    from bench.memory_pytorch_models import Cnn

    torch.manual_seed(0)
    return step_problem({"module": Cnn().train(), "batch": (torch.randn(2, 3, 16, 16),)})


CAPTURED: dict[str, Callable[[], OperationGraph]] = {"GPT 4x128": gpt, "BERT 256x4": bert, "CNN 8 blocks": cnn}
