"""What optimizers are as values: hyperparameters, parameter groups, and a text form that parses back."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from ortgraph.errors import InputError
from ortgraph.optim.loss_scale import LossScale

Made = TypeVar("Made", bound="Optimizer")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|inf"
_CALL = re.compile(r"\s*(?P<name>[A-Za-z]\w*)\s*(?:\((?P<inside>.*)\))?\s*", re.DOTALL)
_NAMES = ("match", "no_decay")
_FLAGS = ("nesterov", "bias_correction", "always_adapt")
_PAIRS = ("betas",)


@dataclasses.dataclass(frozen=True)
class Group:
    """Overrides for the parameters whose original name matches a pattern.

    Attributes:
        match: Patterns as of a shell (``*.bias``, ``encoder.layer.0.*``), case-sensitive, on the whole name.
        lr: Learning rate while the optimizer's is at its initial value; a schedule scales both alike.
        betas: Decay rates of the moments (AdamW, LAMB).
        eps: Term added to the denominator (AdamW, LAMB).
        weight_decay: Weight decay.
        momentum: Factor of the momentum buffer (SGD).
        dampening: Dampening of the gradient in the buffer (SGD).
        nesterov: Nesterov momentum (SGD).
    """

    match: tuple[str, ...]
    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    momentum: float | None = None
    dampening: float | None = None
    nesterov: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "match", (self.match,) if isinstance(self.match, str) else tuple(self.match))
        if self.betas is not None:
            object.__setattr__(self, "betas", tuple(map(float, self.betas)))

    def matches(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.match)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Hyperparameters of one parameter. ``lr_scale`` multiplies the learning-rate input; what the optimizer does not
    have keeps its default."""

    lr_scale: float = 1.0
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False


class Optimizer:
    """Base of the optimizers that become part of the graph; subclasses are frozen dataclasses.

    Class attributes:
        TEXT: Name in the text form, such as ``adamw``.
        COMPOSITE: Operator of domain ``ortgraph`` that updates one parameter.
        STATES: How many states the composite has inputs for.
        OVERRIDES: Fields that a group may set.
    """

    TEXT: ClassVar[str]
    COMPOSITE: ClassVar[str]
    STATES: ClassVar[int]
    OVERRIDES: ClassVar[tuple[str, ...]]

    lr: float
    weight_decay: float
    max_grad_norm: float | None
    no_decay: tuple[str, ...]
    groups: tuple[Group, ...]
    loss_scale: LossScale | None

    def attributes(self, settings: Settings) -> dict[str, Any]:
        """Attributes of the composite for a parameter with these settings."""
        raise NotImplementedError

    def states(self, settings: Settings) -> tuple[tuple[str, str], ...]:
        """(prefix of the name, kind) of every state of a parameter, in the order of the composite's inputs."""
        raise NotImplementedError

    def group_of(self, name: str) -> int:
        """Index of the first group that matches a parameter name, plus one; 0 when none does."""
        return next((i for i, g in enumerate(self.groups, start=1) if g.matches(name)), 0)

    def settings(self, name: str) -> Settings:
        """The hyperparameters of the parameter called ``name``."""
        group = self.groups[self.group_of(name) - 1] if self.group_of(name) else Group(match=("*",))
        values = {field: getattr(self, field) for field in self.OVERRIDES}
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.no_decay):
            values["weight_decay"] = 0.0
        given = {field: getattr(group, field) for field in self.OVERRIDES}
        values.update({field: value for field, value in given.items() if value is not None})
        return Settings(lr_scale=1.0 if group.lr is None or group.lr == self.lr else group.lr / self.lr, **values)

    def per_parameter(self: Made, attributes: Callable[[str], Mapping[str, Any] | None], names: Iterable[str]) -> Made:
        """The optimizer with the hyperparameters that a function gives for a parameter's name.

        Args:
            attributes: Overrides for a name: ``lr``, ``weight_decay``, ``betas``, ... as of ``Group``; empty or None: none. What
                a group says of the parameter holds where the function says nothing.
            names: The parameters, such as ``graph.signature.gradients``.

        Raises:
            InputError: An override is unknown or out of range.
        """
        made: dict[tuple[tuple[str, Any], ...], list[str]] = {}
        for name in names:
            given = dict(attributes(name) or {})
            if not given:
                continue
            group = self.group_of(name)
            of_group = dataclasses.asdict(self.groups[group - 1]) if group else {}
            merged = {k: v for k, v in {**of_group, **given}.items() if v is not None and k != "match"}
            unknown = sorted(set(given) - {"lr", *self.OVERRIDES})
            if unknown:
                raise self._fail(f"{unknown[0]!r} for {name!r}", f"lr, {', '.join(self.OVERRIDES)}")
            key = tuple(sorted((k, tuple(v) if isinstance(v, list | tuple) else v) for k, v in merged.items()))
            made.setdefault(key, []).append(re.sub(r"([*?[])", r"[\1]", name))
        groups = tuple(Group(tuple(matching), **dict(key)) for key, matching in made.items())
        return dataclasses.replace(self, groups=(*groups, *self.groups))  # type: ignore[type-var]

    # -- checks -------------------------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        for field in ("lr", "eps", "weight_decay", "momentum", "dampening", "min_trust"):
            if hasattr(self, field):
                object.__setattr__(self, field, float(getattr(self, field)))
        for field in ("max_grad_norm", "max_trust"):
            if getattr(self, field, None) is not None:
                object.__setattr__(self, field, float(getattr(self, field)))
        if hasattr(self, "betas"):
            object.__setattr__(self, "betas", tuple(map(float, self.betas)))
        no_decay = (self.no_decay,) if isinstance(self.no_decay, str) else tuple(self.no_decay)
        object.__setattr__(self, "no_decay", no_decay)
        object.__setattr__(self, "groups", tuple(Group(**g) if isinstance(g, Mapping) else g for g in self.groups))
        object.__setattr__(self, "loss_scale", LossScale.of(self.loss_scale))
        parts: tuple[Optimizer | Group, ...] = (self, *self.groups)
        for where in parts:
            self._check_numbers(where)
        self._check()

    def _fail(self, what: str, hint: str) -> InputError:
        return InputError(f"{type(self).__name__}: {what}", hint)

    def _check_numbers(self, where: Optimizer | Group) -> None:
        for name in ("lr", "eps", "weight_decay", "momentum", "dampening", "min_trust"):
            value = getattr(where, name, None)
            if value is not None and not 0.0 <= value < math.inf:
                raise self._fail(f"{name}={value}", f"{name} is finite and not negative")
        betas = getattr(where, "betas", None)
        if betas is not None and (len(betas) != 2 or not all(0.0 <= b < 1.0 for b in betas)):
            raise self._fail(f"betas={betas}", "two numbers, each at least 0 and below 1")
        foreign = [f for f in ("betas", "eps", "momentum", "dampening", "nesterov") if f not in self.OVERRIDES]
        for name in foreign if isinstance(where, Group) else ():
            if getattr(where, name) is not None:
                raise self._fail(f"a group sets {name}", f"a group sets lr, {', '.join(self.OVERRIDES)}")

    def _check(self) -> None:
        if self.max_grad_norm is not None and not self.max_grad_norm > 0.0:
            raise self._fail(f"max_grad_norm={self.max_grad_norm}", "a positive number, or None")
        if self.lr == 0.0 and any(g.lr for g in self.groups):
            raise self._fail("lr=0 with a group that has its own lr", "a group's rate is scaled with lr: set lr > 0")
        for pattern in (*self.no_decay, *(p for g in self.groups for p in g.match)):
            if not pattern or re.search(r"[\s:;(){}|]", pattern):
                raise self._fail(f"name pattern {pattern!r}", "letters, digits, '.', '_', '-', '*', '?', '[...]'")

    # -- text ---------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """``adamw(lr=0.01;no_decay=*.bias:*norm*;group(match=head.*;lr=0.1))``: without spaces or braces."""
        entries = _entries(self)
        entries += [f"group({';'.join(_entries(g))})" for g in self.groups]
        return f"{self.TEXT}({';'.join(entries)})" if entries else self.TEXT

    @classmethod
    def parse(cls: type[Made], text: str) -> Made:
        """The optimizer that ``str`` wrote. Raises InputError for anything else."""
        found = _CALL.fullmatch(text)
        if found is None or found["name"].lower() != cls.TEXT:
            example = f"{cls.TEXT}(lr=0.001;weight_decay=0.01;no_decay=*.bias)"
            raise InputError(f"optimizer {text!r} does not parse", f"{cls.TEXT}, or {example}")
        entries = _split(found["inside"] or "")
        groups = [e for e in entries if e.startswith("group(") and e.endswith(")")]
        values = _read([e for e in entries if e not in groups], cls, text)
        made: Any = cls  # a dataclass, which the base is not
        return made(**values, groups=tuple(Group(**_read(_split(g[6:-1]), Group, text)) for g in groups))


def name_of(text: str) -> str:
    """The optimizer's name in a text form, in lower case; empty when it does not parse."""
    found = _CALL.fullmatch(text)
    return "" if found is None else found["name"].lower()


def _entries(item: Any) -> list[str]:
    entries = []
    for f in dataclasses.fields(item):
        value = getattr(item, f.name)
        if f.name == "groups" or value == f.default or value is None:
            continue
        written = str(value).lower() if isinstance(value, bool) else value
        entries.append(f"{f.name}={':'.join(map(str, value)) if isinstance(value, tuple) else written}")
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
    if key in _NAMES:
        return tuple(value.split(":"))
    if key == "loss_scale":
        return LossScale.parse(value)
    if key in _FLAGS:
        if value.lower() not in ("true", "false"):
            raise InputError(f"optimizer {text!r}: {key}={value}", f"{key}=true or {key}=false")
        return value.lower() == "true"
    numbers = value.split(":")
    if any(not re.fullmatch(_NUMBER, n) for n in numbers) or (key not in _PAIRS and len(numbers) != 1):
        example = "betas=0.9:0.999" if key in _PAIRS else f"{key}=0.1"
        raise InputError(f"optimizer {text!r}: {key}={value} is no number", example)
    return tuple(map(float, numbers)) if key in _PAIRS else float(value)
