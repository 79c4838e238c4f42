"""The registry of families: a name, how to build a tiny model with its batch, and what has to be installed.

A family is a function with the decorator ``family`` in one of the modules of ``MODULES``::

    @family("lstm", kind="recurrent")
    def lstm() -> Built:
        return Built(Classifier(), {"x": torch.randn(3, 5, 4), "y": torch.tensor([0, 2, 1])})

Builders take ``attention`` where the family has several attention implementations. They draw weights and batches after
``torch.manual_seed``, so that a family is the same in every process. Dropout stands at ``DROPOUT`` where there is any:
the proof compares values with it off, and with it on through the masks that the graph draws.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ortgraph.errors import InputError

MODULES = (
    "layers",
    "encoders",
    "decoders",
    "seq2seq",
    "vision",
    "speech",
    "pairs",
    "recurrent",
    "handwritten",
    "refused",
)
DROPOUT = 0.1
ATTENTION = ("eager", "sdpa")


@dataclasses.dataclass(frozen=True)
class Built:
    """One model with its batch.

    Attributes:
        module: In training mode as a whole; ``prepare`` switches it on.
        batch: As ``ortgraph.capture`` takes it.
        loss: As ``ortgraph.capture`` takes it; None: the module returns its loss.
        dynamic: Symbolic dimensions by input; None: static.
        evaluation: Sub-modules that stay in evaluation mode, by name.
        exact: Changes a module before it counts in float64, where PyTorch lacks an operator of it there.
    """

    module: torch.nn.Module
    batch: Any
    loss: Any = None
    dynamic: Mapping[str, Any] | None = None
    evaluation: tuple[str, ...] = ()
    exact: Callable[[torch.nn.Module], None] | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """One entry.

    Attributes:
        name: Unique; part of the command line and the table.
        build: Builds it; keyword arguments are ``options``.
        kind: Section of the table.
        requires: Packages that have to be installed.
        attention: Attention implementations to build it with; empty: it has no choice.
        refused: Words of the one error that capture gives; empty: the family is captured.
        note: What the table says about it.
    """

    name: str
    build: Callable[..., Built]
    kind: str
    requires: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    refused: str = ""
    note: str = ""

    def cases(self) -> tuple[Case, ...]:
        """One case per attention implementation."""
        return tuple(Case(self, a) for a in self.attention) or (Case(self),)

    def missing(self) -> tuple[str, ...]:
        """Required packages that are not installed."""
        return tuple(p for p in self.requires if importlib.util.find_spec(p) is None)


@dataclasses.dataclass(frozen=True)
class Case:
    """A family with one attention implementation. ``name`` is ``family`` or ``family/attention``."""

    family: Family
    attention: str = ""

    @property
    def name(self) -> str:
        return f"{self.family.name}/{self.attention}" if self.attention else self.family.name

    def build(self) -> Built:
        """The model in training mode, the same each time."""
        torch.manual_seed(zlib.crc32(self.family.name.encode()) % 2**31)
        built = self.family.build(**({"attention": self.attention} if self.attention else {}))
        built.module.train()
        for name in built.evaluation:
            built.module.get_submodule(name).eval()
        return built


_FAMILIES: dict[str, Family] = {}


def family(
    name: str,
    *,
    kind: str,
    requires: Sequence[str] = (),
    attention: Sequence[str] = (),
    refused: str = "",
    note: str = "",
) -> Callable[[Callable[..., Built]], Callable[..., Built]]:
    """Register a builder; the arguments are the attributes of ``Family``."""

    def register(build: Callable[..., Built]) -> Callable[..., Built]:
        if name in _FAMILIES:
            raise ValueError(f"the family {name!r} is registered twice")
        _FAMILIES[name] = Family(name, build, kind, tuple(requires), tuple(attention), refused, note)
        return build

    return register


@functools.cache
def families() -> dict[str, Family]:
    """All families by name, in the order of the modules."""
    for module in MODULES:
        importlib.import_module(f"bench.coverage.{module}")
    return dict(_FAMILIES)


def cases(only: Sequence[str] = ()) -> tuple[Case, ...]:
    """Cases of the families named by ``only`` (families, or cases such as ``bert/sdpa``); all when it is empty.

    Raises:
        InputError: A name is unknown.
    """
    every = [case for f in families().values() for case in f.cases()]
    unknown = [n for n in only if not any(n in (c.name, c.family.name) for c in every)]
    if unknown:
        raise InputError(f"unknown families: {', '.join(unknown)}", f"choose from {', '.join(families())}")
    return tuple(c for c in every if not only or c.name in only or c.family.name in only)


def rotating(every: Sequence[Case], key: str, count: int) -> tuple[Case, ...]:
    """``count`` cases that ``key`` (a commit, a version, a date) chooses: the same ones for the same key.

    Of those whose packages are installed.
    """

    def order(case: Case) -> str:
        return hashlib.sha256(f"{key}:{case.name}".encode()).hexdigest()

    chosen = sorted((c for c in every if not c.family.missing()), key=order)[:count]
    return tuple(c for c in every if c in chosen)
