"""ORTModule: a PyTorch module whose forward and backward run as compiled graphs."""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ortgraph.dynamo.backend import backend
from ortgraph.dynamo.options import Options
from ortgraph.errors import InputError, OrtgraphError

_OWN = frozenset({"_original", "_options", "_compiled", "training"})
_LOGGED_ONCE = ("warning_once", "info_once")  # methods that transformers adds to loggers
_MADE = ("_compiled", "forward")
_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def compiled(function: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """A function through the backend.

    Dynamo counts the graphs of a code object, and hands the ninth to PyTorch: each function gets a code object of its own,
    so that the modules of one process do not count together.
    """
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return torch.compile(own, backend=backend, options=options)  # type: ignore[call-overload]


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    """Settings of Dynamo for whatever it traces inside.

    It guards on the hooks of modules, so that one which is registered or removed later is noticed; messages that
    transformers logs once do not cut the graph; and within DistributedDataParallel there is one graph, where it would cut at
    the ends of gradient buckets.
    """
    config = torch._dynamo.config
    once = {f for name in _LOGGED_ONCE if (f := getattr(logging.Logger, name, None)) is not None}
    wanted = {"skip_nnmodule_hook_guards": False, "ignore_logging_functions": config.ignore_logging_functions | once}
    if DistributedDataParallel._get_active_ddp_module() is not None:
        wanted["optimize_ddp"] = False
    before = {name: getattr(config, name) for name in wanted}
    for name, value in wanted.items():  # why not config.patch: it takes four times as long, at every call
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def run(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call what ``compiled`` made; an error of this package that Dynamo wraps is raised as it was."""
    try:
        with _tracing():
            return function(*args, **kwargs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, OrtgraphError):
            raise error.inner_exception from error
        raise


def _described(function: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with the signature of the module's own ``forward``: trainers choose the columns of a data set by it."""

    @functools.wraps(like)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(function, *args, **kwargs)

    return forward


class ORTModule(torch.nn.Module):
    """Wraps a module: called like it, trained by any PyTorch optimizer, saved under its own names.

    Parameters, buffers and sub-modules are those of the wrapped module, without a prefix, and so are attributes that the
    wrapper lacks. What ``torch.compile(module, backend="ortgraph")`` does is done here: a graph per part that Dynamo can
    trace, one for training and one for evaluation, another for each new shape.

    Args:
        module: The module; it is shared, not copied.
        options: See ``ortgraph.dynamo.options.Options``.

    Raises:
        InputError: What is wrapped is no module, is wrapped already, or an option is unknown.
    """

    _original: torch.nn.Module
    _options: Options
    _compiled: Callable[..., Any]

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        if not isinstance(module, torch.nn.Module):
            raise InputError(
                f"ORTModule wraps a torch.nn.Module, not {type(module).__name__}", "give the module itself"
            )
        if isinstance(module, ORTModule):
            raise InputError("the module is an ORTModule already", "use it as it is")
        super().__init__()
        self._link(module, Options.of(options))
        self.training = module.training

    def _link(self, module: torch.nn.Module, options: Options) -> None:
        own = self.__dict__
        own.update(_original=module, _options=options)
        own["_compiled"] = compiled(self._call(), options)
        if type(self).forward is ORTModule.forward:
            own["forward"] = _described(own["_compiled"], module.forward)
        for name in _SHARED:
            own[name] = getattr(module, name)

    def _call(self) -> Callable[..., Any]:
        """What is compiled."""
        module = self._original

        def call(*args: Any, **kwargs: Any) -> Any:
            return module(*args, **kwargs)

        return call

    def _get_name(self) -> str:
        return self._original._get_name()  # why: trainers choose by the name of the model's class

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        return self._original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the wrapped module returns.

        Raises:
            OrtgraphError: A part cannot be compiled and ``fallback`` is off, or an operator refuses its input.
        """
        return run(self._compiled, *args, **kwargs)

    def train(self, mode: bool = True) -> ORTModule:
        """Training mode of the wrapped module."""
        self._original.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the wrapped module, under its names."""
        return self._original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load what ``state_dict`` of the wrapped module returns."""
        return self._original.load_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> ORTModule:
        self._original._apply(*args, **kwargs)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original")
            if original is None:
                raise
            return getattr(original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in _OWN or (name in self.__dict__ and name not in _MADE)
        if own or "_original" not in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self._original, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._original)})

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in (*_MADE, *_SHARED)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._link(state["_original"], state["_options"])
