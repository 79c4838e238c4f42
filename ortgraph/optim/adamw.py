"""AdamW as a value: hyperparameters, parameter groups, and a text form that parses back."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Mapping
from typing import Any

from ortgraph.errors import InputError

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|inf"
_CALL = re.compile(r"\s*adamw\s*(?:\((?P<inside>.*)\))?\s*", re.IGNORECASE | re.DOTALL)
_FLOATS = ("lr", "eps", "weight_decay", "max_grad_norm")


@dataclasses.dataclass(frozen=True)
class Group:
    """Overrides for the parameters whose original name matches a pattern.

    Attributes:
        match: Patterns as of a shell (``*.bias``, ``encoder.layer.0.*``), case-sensitive, on the whole name.
        lr: Learning rate while the optimizer's is at its initial value; a schedule scales both alike.
        betas: Decay rates of the moments.
        eps: Term added to the denominator.
        weight_decay: Decoupled weight decay.
    """

    match: tuple[str, ...]
    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "match", (self.match,) if isinstance(self.match, str) else tuple(self.match))
        if self.betas is not None:
            object.__setattr__(self, "betas", tuple(map(float, self.betas)))

    def matches(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.match)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Hyperparameters of one parameter group. ``lr_scale`` multiplies the learning-rate input."""

    lr_scale: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), with the semantics of ``torch.optim.AdamW``.

    Attributes:
        lr: Initial learning rate; ``session.step(batch, learning_rate=...)`` changes it.
        betas: Decay rates of the moments.
        eps: Term added to the denominator, after bias correction.
        weight_decay: Weights are multiplied by ``1 - lr * weight_decay`` first.
        max_grad_norm: Clip all gradients by their global norm, as ``torch.nn.utils.clip_grad_norm_``; None: do not.
        no_decay: Name patterns of parameters without weight decay, e.g. ``("*.bias", "*norm*")``.
        groups: Overrides by name pattern. The first matching group applies; ``no_decay`` applies where that group sets
            no weight_decay.

    Raises:
        InputError: A hyperparameter is out of range.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = None
    no_decay: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (("lr", float), ("eps", float), ("weight_decay", float)):
            object.__setattr__(self, name, kind(getattr(self, name)))
        if self.max_grad_norm is not None:
            object.__setattr__(self, "max_grad_norm", float(self.max_grad_norm))
        object.__setattr__(self, "betas", tuple(map(float, self.betas)))
        no_decay = (self.no_decay,) if isinstance(self.no_decay, str) else tuple(self.no_decay)
        object.__setattr__(self, "no_decay", no_decay)
        object.__setattr__(self, "groups", tuple(Group(**g) if isinstance(g, Mapping) else g for g in self.groups))
        self._check()

    def _check(self) -> None:
        parts: tuple[AdamW | Group, ...] = (self, *self.groups)
        for where in parts:
            for name in ("lr", "eps", "weight_decay"):
                value = getattr(where, name)
                if value is not None and not 0.0 <= value < math.inf:
                    raise InputError(f"AdamW: {name}={value}", f"{name} is finite and not negative")
            if where.betas is not None and (len(where.betas) != 2 or not all(0.0 <= b < 1.0 for b in where.betas)):
                raise InputError(f"AdamW: betas={where.betas}", "two numbers, each at least 0 and below 1")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0.0:
            raise InputError(f"AdamW: max_grad_norm={self.max_grad_norm}", "a positive number, or None")
        if self.lr == 0.0 and any(g.lr for g in self.groups):
            raise InputError(
                "AdamW: lr=0 with a group that has its own lr", "a group's rate is scaled with lr: set lr > 0"
            )
        for pattern in (*self.no_decay, *(p for g in self.groups for p in g.match)):
            if not pattern or re.search(r"[\s:;(){}|]", pattern):
                raise InputError(
                    f"AdamW: name pattern {pattern!r}", "letters, digits, '.', '_', '-', '*', '?', '[...]'"
                )

    def group_of(self, name: str) -> int:
        """Index of the first group that matches a parameter name, plus one; 0 when none does."""
        return next((i for i, g in enumerate(self.groups, start=1) if g.matches(name)), 0)

    def settings(self, name: str) -> Settings:
        """The hyperparameters of the parameter called ``name``."""
        group = self.groups[self.group_of(name) - 1] if self.group_of(name) else Group(match=("*",))
        decay = self.weight_decay
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.no_decay):
            decay = 0.0
        return Settings(
            lr_scale=1.0 if group.lr is None or group.lr == self.lr else group.lr / self.lr,
            betas=self.betas if group.betas is None else group.betas,
            eps=self.eps if group.eps is None else group.eps,
            weight_decay=decay if group.weight_decay is None else group.weight_decay,
        )

    def __str__(self) -> str:
        """``adamw(lr=0.01;no_decay=*.bias:*norm*;group(match=head.*;lr=0.1))``: without spaces or braces."""
        entries = _entries(self)
        entries += [f"group({';'.join(_entries(g))})" for g in self.groups]
        return f"adamw({';'.join(entries)})" if entries else "adamw"

    @staticmethod
    def parse(text: str) -> AdamW:
        """The optimizer that ``str`` wrote. Raises InputError for anything else."""
        found = _CALL.fullmatch(text)
        if found is None:
            raise InputError(
                f"optimizer {text!r} does not parse", "adamw, or adamw(lr=0.001;weight_decay=0.01;no_decay=*.bias)"
            )
        entries = _split(found["inside"] or "")
        groups = [e for e in entries if e.startswith("group(") and e.endswith(")")]
        values = _read([e for e in entries if e not in groups], AdamW, text)
        return AdamW(**values, groups=tuple(Group(**_read(_split(g[6:-1]), Group, text)) for g in groups))


def _entries(item: AdamW | Group) -> list[str]:
    entries = []
    for f in dataclasses.fields(item):
        value = getattr(item, f.name)
        if f.name == "groups" or value == f.default or value is None:
            continue
        entries.append(f"{f.name}={':'.join(map(str, value)) if isinstance(value, tuple) else value}")
    return entries


def _split(text: str) -> list[str]:
    """Split at the semicolons that stand in no inner parentheses."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if c == ";" and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [p.strip() for p in (*parts, text[start:]) if p.strip()]


def _read(entries: list[str], cls: type, text: str) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(cls) if f.name != "groups"]
    values: dict[str, Any] = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not equals or key not in names:
            raise InputError(f"optimizer {text!r}: no option {entry!r}", f"options: {', '.join(names)}, group(...)")
        if key in values:
            raise InputError(f"optimizer {text!r}: {key} is given twice", "give it once")
        values[key] = _value(key, value, text)
    if cls is Group and "match" not in values:
        raise InputError(f"optimizer {text!r}: a group without match=", "group(match=*.bias;weight_decay=0)")
    return values


def _value(key: str, value: str, text: str) -> Any:
    if key in ("match", "no_decay"):
        return tuple(value.split(":"))
    numbers = value.split(":")
    if any(not re.fullmatch(_NUMBER, n) for n in numbers) or (key in _FLOATS and len(numbers) != 1):
        raise InputError(
            f"optimizer {text!r}: {key}={value} is no number", f"{key}=0.1" if key in _FLOATS else "betas=0.9:0.999"
        )
    return float(value) if key in _FLOATS else tuple(map(float, numbers))
