"""What ``torch.export`` drops without a word: backward functions written by hand, hooks on gradients."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from ortgraph.capture.torch_source import running_module, user_frame, user_path
from ortgraph.errors import CaptureError

_OF_CUSTOM_OPERATOR = (
    "GeneratedBackwardFor_"  # torch.library's own: export keeps the operator, and with it the backward
)


@contextlib.contextmanager
def watch_lost(module: torch.nn.Module) -> Iterator[list[str]]:
    """Collect the custom ``autograd.Function`` and the tensor hooks that run inside, each described once, with its place.

    Export records the forward of such a function and the tensor of such a hook, but neither's backward: the gradient
    would be silently another.
    """
    lost: list[str] = []
    function: Any = torch.autograd.function
    tensor: Any = torch.Tensor
    has_context, register_hook = function._is_setup_context_defined, tensor.register_hook

    def note(what: str) -> None:
        path = running_module((frame for frame, _ in reversed(list(traceback.walk_stack(None)))), module)
        said = f"{what} (module {path or '<root>'}, {user_frame(''.join(traceback.format_stack()))})"
        if said not in lost:
            lost.append(said)

    def noted_apply(setup_context: Any) -> bool:
        cls = sys._getframe(1).f_locals["cls"]  # called by Function.apply: code may hold that under a name of its own
        if not cls.__name__.startswith(_OF_CUSTOM_OPERATOR):
            note(f"the backward of the autograd function {cls.__name__}")
        return has_context(setup_context)

    def noted_hook(self: torch.Tensor, hook: Any) -> Any:
        note(f"the tensor hook {getattr(hook, '__qualname__', hook)}")
        return register_hook(self, hook)

    function._is_setup_context_defined = noted_apply
    tensor.register_hook = noted_hook
    try:
        yield lost
    finally:
        function._is_setup_context_defined = has_context
        tensor.register_hook = register_hook


def refuse_parameter_hooks(module: torch.nn.Module) -> None:
    """Raise CaptureError when a trainable parameter carries a gradient hook, which no trace can see."""
    for path, parameter in module.named_parameters():
        hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if parameter.requires_grad and hooks:
            raise CaptureError(
                f"parameter {user_path(path)} has a gradient hook, which would not run in the graph",
                "remove the hook (handle.remove()), or do its work in the optimizer",
            )


def refuse_full_dropout(module: torch.nn.Module) -> None:
    """Raise CaptureError for dropout of everything: its trace is a plain zero, which evaluation could not switch off."""
    for path, part in module.named_modules():
        if isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.training and part.p == 1.0:
            raise CaptureError(
                f"module {user_path(path)} drops everything (p=1): its result is a constant zero in evaluation, too",
                "take the module out, or give p below 1",
            )
