"""Which ATen operators are taken apart while tracing: those of PyTorch's core table that no rule translates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ortgraph.capture.torch_rules import rules


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decomposition table of the trace. Operators with a rule stay whole."""
    known = rules()
    table = torch._decomp.core_aten_decompositions()
    return {op: f for op, f in table.items() if str(op).removeprefix("aten.") not in known}
