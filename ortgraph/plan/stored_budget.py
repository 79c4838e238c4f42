"""The memory budget that a graph was rewritten for, kept in its model, so that a later edit cannot lose it unnoticed."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortgraph.graph import TrainingGraph

logger = logging.getLogger(__name__)
METADATA_KEY = "ortgraph.budget"
CAUSE = "nodes were merged, removed or moved after select-recompute"
HINT = "run select-recompute after all other passes, right before plan-memory{keep_order=true}"


def store_budget(graph: TrainingGraph, program: str, arena_bytes: int) -> None:
    """Note what the arena of a program may take: its budget without kernel scratch."""
    graph.model.metadata_props[METADATA_KEY] = json.dumps({"program": program, "arena_bytes": arena_bytes})


def stored_budget(graph: TrainingGraph, program: str) -> int | None:
    """Bytes that the arena of a program may take, None without a budget for it."""
    text = graph.model.metadata_props.get(METADATA_KEY)
    if text is None:
        return None
    try:
        noted = json.loads(text)
        return int(noted["arena_bytes"]) if noted["program"] == program else None
    except (ValueError, TypeError, KeyError):
        logger.warning("the stored memory budget does not parse; none is kept")
        return None


def warn_if_over(program: str, arena_bytes: int, limit: int | None) -> None:
    """Say that a program does not keep its budget; it runs all the same."""
    if limit is not None and arena_bytes > limit:
        logger.warning(
            "program %s: an arena of %d bytes is over the %d bytes that the memory budget leaves for it: %s; %s",
            program, arena_bytes, limit, CAUSE, HINT,
        )  # fmt: skip
