"""Training in several processes: ranks, a group that stops together, the optimizer in the graph with an all-reduce.

``init`` needs PyTorch, whose process groups carry the sums; see docs/distributed.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ortgraph.distributed.ranks import Place, place_of

if TYPE_CHECKING:
    from ortgraph.distributed.compiling import compile, optimize
    from ortgraph.distributed.group import Group, init
    from ortgraph.distributed.session import DistributedSession

__all__ = ["DistributedSession", "Group", "Place", "compile", "init", "optimize", "place_of"]

_LAZY = {
    "DistributedSession": "ortgraph.distributed.session",
    "Group": "ortgraph.distributed.group",
    "compile": "ortgraph.distributed.compiling",
    "init": "ortgraph.distributed.group",
    "optimize": "ortgraph.distributed.compiling",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ortgraph.distributed' has no attribute {name!r}")
