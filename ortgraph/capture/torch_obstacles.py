"""Everything that keeps a module from being captured, found by running it once as it is.

A trace stops at the first ``if`` on a tensor's values. A plain run does not: what it meets on its way is noted, with the
place, and the reader of the list sees the whole of what is to be changed. What a branch not taken holds is not seen.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ortgraph.capture.torch_batch import read_batch
from ortgraph.capture.torch_decompositions import decompositions
from ortgraph.capture.torch_library import known_to_library
from ortgraph.capture.torch_module import Loss, Results, TracedStep, is_criterion
from ortgraph.capture.torch_rules import rules
from ortgraph.capture.torch_source import user_frame, user_path
from ortgraph.capture.torch_translate import DTYPES

Obstacle = tuple[str, str]  # what, and what to try

_READS = {"_local_scalar_dense.default", "equal.default", "is_nonzero.default"}
_SIZED_BY_VALUES = {"nonzero.default", "unique_dim.default", "_unique2.default", "unique_consecutive.default"}
# what an eager run calls where a trace calls something else
_EAGER_ONLY = {
    "native_batch_norm.default", "_batch_norm_with_update.default", "detach.default", "set_.source_Tensor",
    "masked_select.default", "_has_compatible_shallow_copy_type.default", "record_stream.default",
}  # fmt: skip


def find_obstacles(module: torch.nn.Module, example_batch: Any, loss: Loss = None) -> tuple[Obstacle, ...]:
    """Run forward and loss of a copy of the module, and list what no graph can hold.

    Args:
        module: As for ``ortgraph.capture``; it is not changed.
        example_batch: The same.
        loss: The same.

    Returns:
        Each obstacle once, with its place: values that are read, results whose size depends on values, complex and
        sparse tensors, operators without translation. Empty when there is none, or when the run itself fails at once.
    """
    batch = read_batch(module, example_batch, is_criterion(loss), has_loss=callable(loss))
    step = TracedStep(copy.deepcopy(module), batch, loss, (), Results(), traced=True)
    watch = _Watch()
    # whatever the module raises of its own accord, the trace has said it; what was met until then counts
    with contextlib.suppress(Exception), _as_traced(), _paths(step, watch), watch:
        step(*batch.tensors)
    return tuple(watch.found)


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Obstacle, None] = {}
        self.path: list[str] = []
        self._known = {*rules(), *(str(op).removeprefix("aten.") for op in decompositions()), *_EAGER_ONLY}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = self._obstacle(func, args, result)
        if found is not None:
            what, hint = found
            self.found.setdefault((f"{what} ({self._place()})", hint))
        return result

    def _obstacle(self, func: Any, args: Sequence[Any], result: Any) -> Obstacle | None:
        name = str(func).removeprefix("aten.")
        if name in _READS:
            return "a tensor's value is read: if, while, .item() or int()", "use torch.where or masks"
        indices = args[1] if name == "index.Tensor" else ()
        if name in _SIZED_BY_VALUES or any(i is not None and i.dtype == torch.bool for i in indices):
            return f"the size of the result of {name} depends on values", "use torch.where, masked_fill or weights"
        if any(isinstance(a, torch.Tensor) and not _ordinary(a) for a in args):
            return None  # it only follows from what made them
        results = result if isinstance(result, (tuple, list)) else (result,)
        tensors = [r for r in results if isinstance(r, torch.Tensor)]
        if any(r.layout != torch.strided for r in tensors):
            return f"{name} makes a sparse tensor", "use dense tensors"
        odd = next((r.dtype for r in tensors if r.dtype not in DTYPES), None)
        if odd is not None:
            return f"{name} makes a tensor of dtype {odd}", "use real float or integer tensors"
        if self._translated(func, name):
            return None
        return f"{name} has no translation to ONNX", "replace the operator"

    def _translated(self, func: Any, name: str) -> bool:
        head = name.partition(".")[0]
        if head.endswith("_"):  # a trace has no operators that work in place
            return any(known.partition(".")[0] == head.removesuffix("_") for known in self._known)
        return func.is_view or name in self._known or known_to_library(f"aten.{name}")

    def _place(self) -> str:
        line = user_frame("".join(traceback.format_stack()))
        return f"module {self.path[-1] if self.path else '<root>'}" + (f", {line}" if line else "")


def _ordinary(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.dtype in DTYPES


@contextlib.contextmanager
def _paths(step: torch.nn.Module, watch: _Watch) -> Iterator[None]:
    """Keep the path of the module that runs."""
    handles = []
    for path, part in step.named_modules():
        shown = user_path(path) or "<root>"
        handles.append(part.register_forward_pre_hook(lambda *_, shown=shown: watch.path.append(shown)))
        handles.append(part.register_forward_hook(lambda *_: watch.path.pop() and None, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _as_traced() -> Iterator[None]:
    """Let code that asks whether it is exported take the same way as in a trace; oneDNN's layers would be opaque."""
    mkldnn: Any = torch.backends.mkldnn
    compiler: Any = torch.compiler
    before = mkldnn.enabled, compiler._is_exporting_flag
    mkldnn.enabled, compiler._is_exporting_flag = False, True
    try:
        yield
    finally:
        mkldnn.enabled, compiler._is_exporting_flag = before
