"""The file that holds measured costs: ``entries`` (alternatives of lowering) and ``nodes`` (prices of nodes)."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

SHIPPED = pathlib.Path(__file__).with_name("cost_table.json")
_MACHINE = "cost_table.json"


def machine_path() -> pathlib.Path:
    """Where ``ortgraph calibrate`` writes: the user's cache folder (``$ORTGRAPH_CACHE_DIR``, else XDG's)."""
    from ortgraph.ops.kernels.library import cache_folder

    return cache_folder().parent / _MACHINE


def machine_table() -> str:
    """Path of the table calibrated on this machine; empty (the shipped one) when there is none."""
    path = machine_path()
    return str(path) if path.is_file() else ""


def write(path: str | os.PathLike[str], machine: Mapping[str, object], **sections: Mapping[str, Any]) -> None:
    """Write a table, an entry a line, sorted; sections that are not given stay as in the file, or as shipped.

    Args:
        path: The file.
        machine: What the figures were measured on.
        sections: ``entries``, ``nodes``.
    """
    target = pathlib.Path(path)
    data: dict[str, Any] = json.loads((target if target.is_file() else SHIPPED).read_text(encoding="utf-8"))
    data |= {"machine": dict(machine), **sections}
    parts = []
    for name, section in data.items():
        lines = [f" {json.dumps(k)}: {json.dumps(section[k])}" for k in sorted(section)]
        parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_suffix(f".{os.getpid()}")
    made.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    made.replace(target)
