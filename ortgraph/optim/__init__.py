"""Optimizers that become part of the graph, and learning-rate schedules."""

from ortgraph.optim import schedules
from ortgraph.optim.adamw import AdamW, Group

__all__ = ["AdamW", "Group", "schedules"]
