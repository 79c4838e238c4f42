"""Ordering nodes: the rule that makes in-place updates safe."""

from ortgraph.plan.schedule.updates import order_updates

__all__ = ["order_updates"]
