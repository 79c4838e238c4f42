"""Compiled kernels for ONNX Runtime: operators of domain ``ortgraph.kernels`` in one custom-operator library.

A graph that uses the domain needs the library in its session::

    options.register_custom_ops_library(str(kernels.library_path()))
"""

from __future__ import annotations

import functools
import pathlib

from ortgraph.errors import RuntimeSetupError
from ortgraph.ops.kernels import build

DOMAIN = "ortgraph.kernels"


def library_path() -> pathlib.Path:
    """The compiled library; built at the first call on a machine (about ten seconds), then found in the cache.

    Raises:
        RuntimeSetupError: There is no compiler, or compiling failed.
    """
    library, error = _built()
    if library is None:
        raise RuntimeSetupError(f"compiled kernels are not available: {error}", "lower without them (target 'onnx')")
    return library


def available() -> bool:
    """Whether kernels can be used here. Builds the library when that has not been done yet; never raises."""
    return _built()[0] is not None


def reason() -> str:
    """Why kernels cannot be used here; empty when they can."""
    return _built()[1]


@functools.cache
def _built() -> tuple[pathlib.Path | None, str]:
    try:
        return build.build(), ""
    except RuntimeSetupError as error:
        return None, str(error)
