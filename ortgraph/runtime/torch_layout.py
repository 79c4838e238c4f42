"""What a session keeps, in PyTorch's layout: state dicts of the module, the optimizer and the gradient scaler."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

from ortgraph.errors import InputError
from ortgraph.optim import LAMB, AdamW, Optimizer, parse
from ortgraph.optim.base import Settings
from ortgraph.runtime import checkpoint

if TYPE_CHECKING:
    from ortgraph.runtime.session_state import SessionState

Groups = Sequence[Sequence[str]]
# Options of PyTorch's optimizers that would be another update, with the value that is ours.
_FIXED = {"amsgrad": False, "maximize": False, "adam_w_mode": True}
_OF_LAMB = ("bias_correction", "always_adapt", "min_trust", "max_trust")
_SCALER = {"growth_factor": "growth", "backoff_factor": "backoff", "growth_interval": "interval"}


def groups_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[tuple[str, ...], ...]:
    """Names of an optimizer's parameters, group by group.

    Raises:
        InputError: The optimizer has a parameter that is not the module's.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    foreign = sum(id(p) not in names for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise InputError(
            f"{foreign} of the optimizer's parameters are not the module's",
            "the module that the optimizer was made for",
        )
    return tuple(tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups)


def state_dict(session: SessionState, groups: Groups | None = None) -> dict[str, Any]:
    """See ``SessionState.torch_state_dict``."""
    made: dict[str, Any] = {"model": {n: to_torch(v) for n, v in session.state_dict().items()}}
    if session.has_optimizer:
        made["optimizer"] = _optimizer_state(session, groups)
    scaler = _scaler_state(session)
    return {**made, "scaler": scaler} if scaler else made


def load_state_dict(session: SessionState, state: Mapping[str, Any], groups: Groups | None = None) -> None:
    """See ``SessionState.load_torch_state_dict``."""
    targets, values = [], {}
    if state.get("model") is not None:
        fixed = {n for b in session.signature.buffers if b.update is None for n in (b.name, *b.tied)}
        unsaved = fixed - set(state["model"])  # a module need not save what it never changes
        names = {n: source for n, source in session.parameter_inputs().items() if n not in unsaved}
        checkpoint.check_names("the module's state", names, state["model"])
        targets += [(n, session.buffer(source)) for n, source in names.items()]
        values.update({n: to_array(v) for n, v in state["model"].items()})
    rate = None
    if state.get("optimizer") is not None:
        found = _Given(session, state["optimizer"], groups).read()
        targets += [(n, session.buffer(source)) for n, (source, _) in found.values.items()]
        values.update({n: value for n, (_, value) in found.values.items()})
        rate = found.rate
    if state.get("scaler"):
        for name, (source, value) in _scaler_values(session, state["scaler"]).items():
            targets.append((name, session.buffer(source)))
            values[name] = value
    checkpoint.assign("the state", targets, values)
    if rate is not None:
        session.learning_rate = rate
        session.steps = int(values["state/step"]) + session.skipped_steps


def to_torch(value: np.ndarray) -> torch.Tensor:
    """A tensor with a copy of the array's values."""
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(value))


def to_array(value: Any) -> Any:
    """An array of a tensor's values; what is no tensor as it is."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        return value.detach().cpu().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value


# --- optimizers --------------------------------------------------------------------------------------------------


def optimizer_of(session: SessionState) -> Optimizer:
    """The optimizer that the session's graph has."""
    text = session.signature.metadata.get("optimizer")
    if text is None:
        raise InputError("the graph has no optimizer", "ortgraph.optimize(graph, optimizer=ortgraph.optim.AdamW(...))")
    return parse(text)


def torch_optimizer(session: SessionState, groups: Groups | None = None) -> torch.optim.Optimizer:
    """A PyTorch optimizer over empty tensors, with the groups, rates and hyperparameters of the session's."""
    own = optimizer_of(session)
    rate = float(str(np.float32(session.learning_rate)))  # why: 0.01 stays 0.01
    made = []
    for names in _groups(session, own, groups):
        settings = _settings(session, own, names)
        options = {name: getattr(settings, name) for name in own.OVERRIDES}
        tensors = [torch.nn.Parameter(torch.empty(0)) for _ in names]
        scale = settings.lr_scale
        made.append({"params": tensors, "lr": rate * scale, "initial_lr": own.lr * scale, **options})
    if isinstance(own, AdamW):
        return torch.optim.AdamW(made)
    if isinstance(own, LAMB):
        from ortgraph.optim.fused_lamb import FusedLAMB

        return FusedLAMB(made, **{name: getattr(own, name) for name in _OF_LAMB})
    return torch.optim.SGD(made, lr=rate)


def _groups(session: SessionState, own: Optimizer, groups: Groups | None) -> list[list[str]]:
    """Names by group: those given, or one group for each set of hyperparameters."""
    names = [p.name for p in session.signature.parameters]
    if groups is None:
        by_settings: dict[Settings, list[str]] = {}
        for name in names:
            by_settings.setdefault(own.settings(name), []).append(name)
        return list(by_settings.values())
    first = {n: p.name for p in session.signature.parameters for n in (p.name, *p.tied)}
    listed = [n for group in groups for n in group]
    unknown = sorted(set(listed) - set(first))
    missing = sorted(_updated(session) - {first[n] for n in listed if n in first})
    if unknown or missing or len(set(listed)) != len(listed):
        parts = [f"no {missing[0]!r}"] * bool(missing) + [f"unknown {unknown[0]!r}"] * bool(unknown)
        raise InputError(
            f"the groups do not fit the graph: {'; '.join(parts) or 'a name twice'}",
            "ortgraph.runtime.torch_layout.groups_of(module, optimizer)",
        )
    return [[first[n] for n in group] for group in groups]


def _updated(session: SessionState) -> set[str]:
    return {p.name for p in session.signature.parameters if p.update is not None}


def _settings(session: SessionState, own: Optimizer, names: Sequence[str]) -> Settings:
    """The hyperparameters that all parameters of a group have."""
    updated = _updated(session)
    found = {own.settings(n): n for n in names if n in updated}
    if len(found) > 1:
        one, two = list(found.values())[:2]
        raise InputError(
            f"{one!r} and {two!r} are in one group and have other hyperparameters in the graph",
            "leave groups out, or attach an optimizer with these groups",
        )
    if found:
        return next(iter(found))
    return own.settings(names[0]) if names else dataclasses.replace(own.settings(""), lr_scale=1.0)


def _optimizer_state(session: SessionState, groups: Groups | None) -> dict[str, Any]:
    for s in session.signature.states:
        if s.kind == "accumulator" and np.asarray(session.buffer(s.input)).any():
            raise InputError(
                "gradients were accumulated and not applied: PyTorch's layout has no place for them", "step first"
            )
    own = optimizer_of(session)
    made = torch_optimizer(session, groups).state_dict()
    by_parameter = _states(session)
    step = session.optimizer_state_dict()["step"]
    if step == 0:
        return made
    order = [n for group in _groups(session, own, groups) for n in group]
    for i, name in enumerate(order):
        if name not in by_parameter and name not in _updated(session):
            continue
        moments = {s: to_torch(np.asarray(session.buffer(x))) for s, x in by_parameter.get(name, {}).items()}
        made["state"][i] = {"step": torch.tensor(float(step)), **moments}
    return made


def _states(session: SessionState) -> dict[str, dict[str, str]]:
    """Graph inputs of a parameter's states, by parameter and PyTorch's name of the state."""
    found: dict[str, dict[str, str]] = {}
    for s in session.signature.states:
        if s.parameter is not None and s.kind != "accumulator":
            found.setdefault(s.parameter, {})[s.name.removesuffix(f"/{s.parameter}")] = s.input
    return found


class _Given:
    """The state dict of a PyTorch optimizer, read for a session.

    Attributes:
        values: (graph input, value) by name.
        rate: The learning rate.
    """

    def __init__(self, session: SessionState, state: Mapping[str, Any], groups: Groups | None) -> None:
        self.session, self.state, self.own = session, state, optimizer_of(session)
        self.values: dict[str, tuple[str, Any]] = {}
        self.rate: float | None = None
        self.param_groups: Sequence[Mapping[str, Any]] = state["param_groups"]
        if groups is None and all("param_names" in group for group in self.param_groups):
            groups = [group["param_names"] for group in self.param_groups]
        self.groups = _groups(session, self.own, groups)
        sizes, wanted = [len(g["params"]) for g in self.param_groups], [len(g) for g in self.groups]
        if sizes != wanted:
            raise InputError(
                f"the optimizer's state has groups of {sizes} parameters, the names given for it are {wanted}",
                "groups=ortgraph.runtime.torch_layout.groups_of(module, optimizer)",
            )

    def read(self) -> _Given:
        steps: dict[float, str] = {}  # of those that say it: a parameter without momentum does not
        states = _states(self.session)
        updated = _updated(self.session)
        for group, names in zip(self.param_groups, self.groups, strict=True):
            self._check_group(group, names)
            for i, name in zip(group["params"], names, strict=True):
                given = self.state["state"].get(i, {})
                if name in updated:
                    self._read_parameter(name, given, states.get(name, {}))
                    if "step" in given or name in states:
                        begun = any(value is not None for value in given.values())
                        steps.setdefault(float(given.get("step", begun)), name)
                elif given:
                    raise InputError(
                        f"the state has moments of {name!r}, which the graph does not update", "capture it trainable"
                    )
        if len(steps) > 1:
            (one, a), (two, b) = list(steps.items())[:2]
            raise InputError(
                f"{a!r} was updated {one:g} times and {b!r} {two:g} times: a graph counts steps once for all",
                "continue in PyTorch, or freeze the parameter whose gradient was None",
            )
        for s in self.session.signature.states:
            if s.kind == "step":
                self.values["state/step"] = (s.input, np.array(int(next(iter(steps), 0)), np.int64))
            if s.kind == "accumulator":
                self.values[f"state/{s.name}"] = (s.input, self._zeros(s.input))
        return self

    def _read_parameter(self, name: str, given: Mapping[str, Any], states: Mapping[str, str]) -> None:
        """Note the states of a parameter."""
        known = {k for k, v in given.items() if v is not None} - {"step"}
        if known - set(states) or (known and set(states) - known):
            raise InputError(
                f"the state of {name!r} is {sorted(known)}, that of {self.own.TEXT} is {sorted(states)}",
                "the state of the optimizer that the graph has",
            )
        for kind, source in states.items():
            value = to_array(given[kind]) if known else self._zeros(source)
            self.values[f"state/{kind}/{name}"] = (source, value)

    def _zeros(self, source: str) -> np.ndarray:
        buffer = self.session.buffer(source)
        return np.zeros(buffer.shape, buffer.dtype)

    def _check_group(self, group: Mapping[str, Any], names: Sequence[str]) -> None:
        """Raise InputError where the group's hyperparameters are not the graph's; note the rate."""
        if not any(n in _updated(self.session) for n in names):
            return
        settings = _settings(self.session, self.own, names)
        wanted: dict[str, Any] = {**_FIXED, **{name: getattr(settings, name) for name in self.own.OVERRIDES}}
        if isinstance(self.own, LAMB):
            wanted.update({name: getattr(self.own, name) for name in _OF_LAMB})
        elif isinstance(self.own, AdamW):
            wanted.update(bias_correction=True, decoupled_weight_decay=True)
        for name, value in wanted.items():
            other = group.get(name, value if name not in self.own.OVERRIDES else None)
            same = tuple(other) == value if isinstance(other, list | tuple) else other == value
            if not same and not (name in ("decoupled_weight_decay", "adam_w_mode") and not settings.weight_decay):
                raise InputError(
                    f"the optimizer's state has {name}={other}, the graph has {name}={value} for {names[0]!r}",
                    f"attach {self.own.TEXT} with {name}={other}, or set it in the state's param_groups",
                )
        if settings.lr_scale == 0.0:
            return
        rate = float(group["lr"]) / settings.lr_scale
        if self.rate is not None and abs(rate - self.rate) > 1e-6 * abs(self.rate):
            raise InputError(
                f"the learning rates of the groups are not those of the graph: {names[0]!r} has {group['lr']}",
                "attach an optimizer whose groups have rates of this proportion",
            )
        self.rate = rate if self.rate is None else self.rate


# --- the gradient scaler -----------------------------------------------------------------------------------------


def _scaler_state(session: SessionState) -> dict[str, Any]:
    """As of ``torch.amp.GradScaler``; empty without a loss scale."""
    inputs = {s.kind: s.input for s in session.signature.states}
    policy = optimizer_of(session).loss_scale if "loss_scale" in inputs else None
    if policy is None:
        return {}
    good = int(session.buffer(inputs["good_steps"])) if "good_steps" in inputs else 0
    factors = {theirs: getattr(policy, ours) for theirs, ours in _SCALER.items()}
    if not policy.dynamic:
        factors.update(growth_factor=1.0, backoff_factor=1.0)
    return {"scale": session.loss_scale, **factors, "_growth_tracker": good}


def _scaler_values(session: SessionState, given: Mapping[str, Any]) -> dict[str, tuple[str, np.ndarray]]:
    own = _scaler_state(session)
    if not own:
        raise InputError(
            "the state has a loss scale, the graph has none", "ortgraph.optimize(..., loss_scale='dynamic')"
        )
    for name in _SCALER:
        if float(given[name]) != float(own[name]):
            raise InputError(
                f"the state's scaler has {name}={given[name]}, the graph's has {own[name]}",
                f"loss_scale=ortgraph.optim.LossScale({_SCALER[name]}={given[name]})",
            )
    inputs = {s.kind: s.input for s in session.signature.states}
    made = {"state/loss_scale": (inputs["loss_scale"], np.array(given["scale"], np.float32))}
    if "good_steps" in inputs:
        made["state/good_steps"] = (inputs["good_steps"], np.array(given["_growth_tracker"], np.int64))
    return made
