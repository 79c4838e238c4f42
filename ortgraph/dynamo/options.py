"""What ``torch.compile(..., options=...)`` and ``ORTModule`` take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ortgraph.errors import InputError


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the PyTorch backend.

    Attributes:
        pipeline, precision, precision_overrides, memory_budget, passes_after, target: As in ``ortgraph.optimize``.
            ``target`` is the installed runtime when left out.
        budget_required: Raise where a graph cannot be planned within the budget; False: plan it without one, with a warning.
        after_capture: Functions of the ``TrainingGraph``, or ``onnx_ir`` passes, applied right after translation: one, or
            a list. A function may change the graph or return another.
        remove_padding: Where loss and gradients are computed at once, what works token by token runs over tokens that are no
            padding, for each batch as its mask says; where that cannot be, a ``PaddingWarning`` says why.
        threads: Threads of one operator; None means PyTorch's number (``torch.get_num_threads()``).
        joint: Run forward and backward at once where the caller can be expected to go backward from a scalar loss alone; False:
            always two programs.
        fallback: Let PyTorch run a graph that cannot be compiled, with a warning; False raises instead.
        cache: Keep optimized graphs on disk, and take them from there.
    """

    pipeline: Any = "O2"
    precision: str = "fp32"
    precision_overrides: Any = None
    memory_budget: str | int | None = None
    budget_required: bool = True
    passes_after: Mapping[str, Any] | None = None
    target: str | None = None
    after_capture: Callable[..., Any] | Sequence[Any] = ()
    remove_padding: bool = False
    threads: int | None = None
    joint: bool = True
    fallback: bool = True
    cache: bool = True

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> Options:
        """Read a dict of options.

        Raises:
            InputError: An unknown option, or a value that cannot be one.
        """
        names = [f.name for f in dataclasses.fields(Options)]
        unknown = [k for k in given or {} if k not in names]
        if unknown:
            raise InputError(f"backend ortgraph has no option {unknown[0]!r}", f"it takes {', '.join(names)}")
        options = Options(**(given or {}))
        if options.threads is not None and (not isinstance(options.threads, int) or options.threads < 1):
            raise InputError(f"threads={options.threads!r}", "a positive number, or None for PyTorch's")
        if options.remove_padding and options.pipeline not in ("O2", "O3"):
            raise InputError("remove_padding goes with O2", "leave pipeline out, or remove_padding")
        return options

    @property
    def hooks(self) -> tuple[Any, ...]:
        """``after_capture`` as a tuple."""
        return tuple(self.after_capture) if isinstance(self.after_capture, Sequence) else (self.after_capture,)
