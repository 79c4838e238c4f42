"""What is traced: the user's module with its loss, flat tensors in, the loss and detached outputs out."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ortgraph.capture.torch_batch import Batch
from ortgraph.capture.torch_source import ROOT
from ortgraph.capture.torch_substitutes import Substituting
from ortgraph.errors import CaptureError, InputError

LOSS = "loss"
Loss = Callable[..., torch.Tensor] | str | int | None


@dataclasses.dataclass
class Results:
    """What the traced call returned: names of the outputs after the loss, and the loss's own name."""

    loss: str = LOSS
    names: tuple[str, ...] = ()


class TracedStep(torch.nn.Module):
    """Takes the batch's tensors; returns (loss, outputs...), where only the loss and ``tangents`` carry gradients.

    When ``traced``, functions of PyTorch that cannot be traced are replaced (``torch_substitutes``).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        batch: Batch,
        loss: Loss,
        tangents: Sequence[str],
        results: Results,
        *,
        traced: bool = False,
    ) -> None:
        super().__init__()
        self._mode = Substituting() if traced else contextlib.nullcontext()
        self.add_module(ROOT, module)
        if isinstance(loss, torch.nn.Module):
            self.add_module(LOSS, loss)
        self._call = (batch, loss, tuple(tangents), results)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, loss, tangents, results = self._call
        args, kwargs, target = batch.rebuild(tensors)
        buffers = [(m, n, b) for m in self.modules() for n, b in m._buffers.items() if b is not None]
        with self._mode:
            outputs = getattr(self, ROOT)(*args, **kwargs)
            _write_assigned(buffers)
            named = named_outputs(outputs)
            value, name = _loss_of(loss, outputs, named, batch, tensors, target)
        results.loss = name
        rest = {k: v for k, v in named.items() if v is not value}
        results.names = tuple(rest)
        unknown = [k for k in tangents if k not in rest]
        if unknown:
            raise InputError(f"tangents names {unknown}, the outputs are {list(rest)}", "name outputs besides the loss")
        return value.reshape(()), *(v if k in tangents else v.detach() for k, v in rest.items())


def _write_assigned(buffers: Sequence[tuple[torch.nn.Module, str, torch.Tensor]]) -> None:
    """Turn ``self.buffer = new`` into a write to the buffer: export forgets assignments inside submodules."""
    for module, name, old in buffers:
        new = module._buffers.get(name)
        if new is old:
            continue
        if new is None or new.shape != old.shape or new.dtype != old.dtype:
            raise CaptureError(
                f"{type(module).__name__}.forward() replaces the buffer {name!r} by one of another shape or dtype",
                "keep shape and dtype, or return it as an output",
            )
        module._buffers[name] = old
        old.copy_(new.detach())


def named_outputs(outputs: Any) -> dict[str, torch.Tensor]:
    """Tensors of a module's result by name: field names, else ``output`` or ``output_<position>``.

    Nested containers join names with a dot. What is neither tensor nor container (caches) is left out.
    """
    if isinstance(outputs, torch.Tensor):
        return {"output": outputs}
    found: dict[str, torch.Tensor] = {}
    if isinstance(outputs, (tuple, list)) and not hasattr(outputs, "_fields"):
        for i, item in enumerate(outputs):
            _collect(found, f"output_{i}", item)
    else:
        for name, item in _fields(outputs).items():
            _collect(found, str(name), item)
    return found


def _collect(found: dict[str, torch.Tensor], name: str, item: Any) -> None:
    if isinstance(item, torch.Tensor):
        found[name] = item
        return
    if isinstance(item, (tuple, list)) and not hasattr(item, "_fields"):
        for i, inner in enumerate(item):
            _collect(found, f"{name}.{i}", inner)
        return
    for key, inner in _fields(item).items():
        _collect(found, f"{name}.{key}", inner)


def _fields(item: Any) -> dict[Any, Any]:
    if isinstance(item, Mapping):
        return dict(item)
    if hasattr(item, "_fields"):
        return {k: getattr(item, k) for k in item._fields}
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
    return {}


def _loss_of(
    loss: Loss, outputs: Any, named: dict[str, torch.Tensor], batch: Batch, tensors: Sequence[torch.Tensor], target: Any
) -> tuple[torch.Tensor, str]:
    if loss is None:
        value, name = _own_loss(outputs, named)
    elif isinstance(loss, str):
        if loss not in named:
            raise InputError(
                f"loss={loss!r} is not an output of the module; it has {list(named)}",
                "name one of these, or give a callable: loss=torch.nn.CrossEntropyLoss()",
            )
        value, name = named[loss], loss
    elif isinstance(loss, int):
        if not isinstance(outputs, (tuple, list)) or not -len(outputs) <= loss < len(outputs):
            raise InputError(
                f"loss={loss} does not index the module's result ({type(outputs).__name__})", "give a name"
            )
        value, name = outputs[loss], LOSS
    else:
        value = _called(loss, outputs, named, batch, tensors, target)
        name = LOSS if LOSS not in named or named[LOSS] is value else "training_loss"
    if not isinstance(value, torch.Tensor):
        raise CaptureError(f"the loss is {type(value).__name__}, not a tensor", "return a scalar tensor")
    if value.numel() != 1 or not value.is_floating_point():
        raise CaptureError(
            f"the loss has shape {tuple(value.shape)} and dtype {value.dtype}; it has to be one floating point number",
            "reduce it, for example with .mean(), or give loss= (an output name, an index or a callable)",
        )
    if not value.requires_grad:
        raise CaptureError(
            "the loss does not depend on any trainable parameter",
            "check requires_grad of the parameters and that forward() does not detach or run under no_grad",
        )
    return value, name


def _own_loss(outputs: Any, named: dict[str, torch.Tensor]) -> tuple[Any, str]:
    if isinstance(outputs, torch.Tensor):
        return outputs, LOSS
    if named.get(LOSS) is not None:
        return named[LOSS], LOSS
    own = getattr(outputs, LOSS, None)
    if isinstance(own, torch.Tensor):
        return own, LOSS
    if isinstance(outputs, (tuple, list)):
        for item in outputs:
            if isinstance(item, torch.Tensor) and item.numel() == 1 and item.is_floating_point():
                return item, LOSS
    raise CaptureError(
        f"the module returned no loss (outputs: {list(named) or type(outputs).__name__})",
        "give the labels in the batch, or loss= (an output name, an index or a callable)",
    )


def _called(
    loss: Callable[..., Any], outputs: Any, named: dict[str, torch.Tensor], batch: Batch, tensors: Any, target: Any
) -> Any:
    if batch.criterion:
        first = outputs if isinstance(outputs, torch.Tensor) else next(iter(named.values()), None)
        return loss(first, target)
    if takes_batch(loss):
        return loss(outputs, batch.restore(tensors))
    return loss(outputs)


# Names of a second parameter that gets the labels; by any other name it gets the whole batch.
_TARGETS = ("target", "targets", "label", "labels", "y", "y_true", "t")


def is_criterion(loss: Loss) -> bool:
    """Whether a loss is called as ``loss(output, target)``: a torch.nn loss, or a second parameter of ``_TARGETS``."""
    if isinstance(loss, torch.nn.Module):
        return True
    if not callable(loss):
        return False
    names = _positional(loss)
    return len(names) > 1 and names[1] in _TARGETS


def takes_batch(loss: Callable[..., Any]) -> bool:
    """Whether a callable wants the batch as its second argument."""
    return len(_positional(loss)) > 1


def _positional(loss: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        found = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError) as error:
        raise InputError(f"the parameters of loss={loss!r} cannot be read", "wrap it in a lambda") from error
    needed = [p.name for p in found if p.kind in kinds and p.default is p.empty]
    if len(needed) < 2 and any(p.kind is p.VAR_POSITIONAL for p in found):
        needed = [*needed, "outputs", "batch"][:2]
    return needed
