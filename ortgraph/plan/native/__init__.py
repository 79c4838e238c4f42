"""Compiled inner loops of the planners: one small C library per solver, built at first use into the user's cache.

A solver calls ``load("name")`` for ``name.cpp`` of this folder (plain C functions, called through ctypes) and falls back to
Python when it returns None, which happens where there is no compiler.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import pathlib
import re

from ortgraph.errors import RuntimeSetupError
from ortgraph.ops.kernels.library import build_library

logger = logging.getLogger(__name__)
_FOLDER = pathlib.Path(__file__).parent


@functools.cache
def load(name: str) -> ctypes.CDLL | None:
    """The compiled ``name.cpp``, None where it cannot be built (the reason is logged once)."""
    source = _FOLDER / f"{name}.cpp"
    try:
        return ctypes.CDLL(str(build_library(f"libortgraph_{name}.so", [source, *_headers(source)])))
    except RuntimeSetupError as error:
        logger.warning("planner %s runs in Python, slower and with weaker results: %s", name, error)
        return None


def _headers(source: pathlib.Path) -> list[pathlib.Path]:
    """Headers of this folder that a source includes, at any depth, sorted."""
    found: set[pathlib.Path] = set()
    waiting = [source]
    while waiting:
        included = {_FOLDER / h for h in re.findall(r'#include "([^"]+)"', waiting.pop().read_text(encoding="utf-8"))}
        waiting += included - found
        found |= included
    return sorted(found)
