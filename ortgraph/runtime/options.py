"""ONNX Runtime session options that make the file order the execution order."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ortgraph.errors import InputError

if TYPE_CHECKING:
    import onnxruntime

QUIET = 4  # fatal only: errors reach the user as exceptions, warnings are about every output bound and not read


def default_threads() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def session_options(
    threads: int | None = None, profile_prefix: str | None = None, alternate: bool = False
) -> onnxruntime.SessionOptions:
    """Options under which nodes run one after the other, in file order, unchanged.

    No graph rewrite (it would merge recomputed nodes and move updates before readers), no memory pattern and no reuse
    (every value has its place already). The runtime's own arena is off: it would serve kernel temporaries only, and keep a
    block for every size that it met, where malloc needs the largest one. Times are the same.

    Args:
        threads: Threads of one operator; None means all processors of this process.
        profile_prefix: Write ONNX Runtime's profile to files that start so.
        alternate: Other threads work between two runs, those of a second session or PyTorch's: do not keep the
            processors busy with waiting for the next run.

    Raises:
        InputError: ``threads`` is not positive.
    """
    import onnxruntime as ort

    if threads is not None and threads < 1:
        raise InputError(f"threads={threads}", "a positive number, or None for all processors")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.intra_op_num_threads = threads or default_threads()
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False
    options.enable_mem_reuse = False
    options.enable_cpu_mem_arena = False
    options.log_severity_level = QUIET
    if alternate:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile_prefix
    return options
