"""AttachOptimizer: the training step gets its update."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Changes, GraphPass
from ortgraph.optim import Optimizer, parse
from ortgraph.optim.attach import BEFORE, attach
from ortgraph.runtime.inference_export import keep_evaluation_form


@dataclasses.dataclass(frozen=True)
class AttachOptimizer(GraphPass):
    """W', states' = AdamW, LAMB or SGD(learning_rate, step, W, dW, states) for every trainable parameter.

    Adds signature entries: updates, optimizer states, the ``learning_rate`` scalar, accumulators. See
    ``ortgraph.optim.attach``.

    Refuses when:
        the graph has an optimizer already, or no trainable parameter with a gradient (both are errors).

    Attributes:
        optimizer: Text form of the optimizer, ``adamw(lr=0.001;weight_decay=0.01)``, ``lamb(...)`` or ``sgd(...)``; ``of``
            takes the object.
        accumulation_steps: Micro-batches per update; more than 1 adds accumulators.
        distributed: Updates read inputs ``reduced/<name>``, which processes sum between backward and update.
    """

    name: ClassVar[str] = "attach-optimizer"
    stages: ClassVar[tuple[str, ...]] = BEFORE
    sets_stage: ClassVar[str | None] = "stepped"

    optimizer: str = "adamw"
    accumulation_steps: int = 1
    distributed: bool = False

    @staticmethod
    def of(optimizer: Optimizer | str, accumulation_steps: int = 1, distributed: bool = False) -> AttachOptimizer:
        """The pass that attaches this optimizer."""
        return AttachOptimizer(str(optimizer), accumulation_steps, distributed)

    def run(self, graph: TrainingGraph) -> Changes:
        changes = Changes()
        keep_evaluation_form(graph)  # why here: lowering follows, and afterwards dropout cannot be told apart
        changes.counts["updates"] = attach(graph, parse(self.optimizer), self.accumulation_steps, self.distributed)
        return changes
