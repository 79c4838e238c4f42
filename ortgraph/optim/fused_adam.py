"""FusedAdam: Adam and AdamW for training scripts, by compiled kernels on the memory of PyTorch tensors."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ortgraph.errors import InputError
from ortgraph.ops import updates
from ortgraph.optim.script_optimizer import TYPES, Flat, by_kernel, evaluate, refuse_sparse

logger = logging.getLogger(__name__)
_LOW = (torch.float16, torch.bfloat16)
_MASTER = "master"
_FLOAT_STATES = ("exp_avg", "exp_avg_sq", _MASTER)
_ABSENT = ("amsgrad", "maximize")  # options of PyTorch's optimizers that would be another update


class FusedAdam(torch.optim.Optimizer):
    """Adam with the arithmetic of ``torch.optim.AdamW``: one pass over weights, gradients and moments.

    A float32 parameter is updated in place. A float16 or bfloat16 parameter has a float32 master and float32 moments;
    the parameter is the master, rounded; where it is written between steps, the master follows. ``state_dict`` has the
    shape of ``torch.optim.AdamW``'s (``step``, ``exp_avg``, ``exp_avg_sq``, and ``master`` of low-precision parameters),
    and each reads the other's. Parameters on other devices or of other dtypes are updated by PyTorch operators, as are
    all where there is no compiler (with a warning).

    Args:
        params: Tensors, or groups as dicts.
        lr: Learning rate.
        bias_correction: Divide moments by ``1 - beta^step``.
        betas: Decay rates of the moments.
        eps: Term added to the denominator.
        adam_w_mode: Weights decay by themselves (AdamW); False: decay is a part of the gradient (Adam).
        weight_decay: Weight decay.

    Raises:
        InputError: A hyperparameter is out of range, or a gradient is sparse or complex.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "adam_w_mode": adam_w_mode,
            "weight_decay": weight_decay,
        }  # fmt: skip
        self._seen: dict[int, int] = {}  # version of each low-precision parameter that its master was rounded to
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        values = {**self.defaults, **param_group}
        _refuse_absent([values])
        for name in ("lr", "eps", "weight_decay"):
            if not 0.0 <= float(values[name]) < math.inf:
                raise InputError(f"FusedAdam: {name}={values[name]}", f"{name} is finite and not negative")
        betas = values["betas"]
        if len(betas) != 2 or not all(0.0 <= float(b) < 1.0 for b in betas):
            raise InputError(f"FusedAdam: betas={betas}", "two numbers, each at least 0 and below 1")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._seen = {}
        for group in self.param_groups:  # what torch.optim.AdamW's groups lack
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Also reads the state of ``torch.optim.AdamW``. Masters that are missing are made from the parameters."""
        if any("max_exp_avg_sq" in s for s in state_dict["state"].values()):
            raise InputError("FusedAdam: the state is one of amsgrad", "FusedAdam has no amsgrad")
        _refuse_absent(state_dict["param_groups"])
        super().load_state_dict(dict(state_dict))
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        # PyTorch casts states to the parameter's dtype and shares their memory: take copies of them as they were.
        for i, p in zip(ids, own, strict=True):
            given = state_dict["state"].get(i, {})
            if "step" in given:
                self.state[p]["step"] = torch.tensor(float(given["step"]), dtype=torch.float32)
            for name in _FLOAT_STATES:
                if name in given:
                    dtype = torch.float32 if p.dtype in _LOW else p.dtype
                    self.state[p][name] = given[name].detach().to(p.device, dtype, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float = 1.0) -> Any:
        """One update of every parameter that has a gradient.

        Args:
            closure: Evaluates the loss again, as in PyTorch.
            grad_scale: Multiplied into every gradient (the inverse of a loss scale, a clip factor).
        """
        loss = evaluate(closure)
        refuse_sparse(self)
        for group in self.param_groups:
            buckets: dict[tuple[Any, ...], list[torch.Tensor]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                self._prepare(p)
                key = (float(self.state[p]["step"]), p.dtype, p.grad.dtype, by_kernel(p) and by_kernel(p.grad))
                buckets.setdefault(key, []).append(p)
            for (step, _, _, kernel), parameters in buckets.items():
                update = self._update_by_kernel if kernel else self._update_by_torch
                update(parameters, group, step, grad_scale)
                self._seen.update({id(p): p._version for p in parameters if p.dtype in _LOW})
        return loss

    def master(self, parameter: torch.Tensor) -> torch.Tensor:
        """The float32 weights of a low-precision parameter; the parameter itself otherwise."""
        if parameter.dtype not in _LOW:
            return parameter
        state = self.state[parameter]
        if _MASTER not in state:
            state[_MASTER] = parameter.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        return state[_MASTER]

    def _prepare(self, p: torch.Tensor) -> None:
        """States of a parameter, and the count of this step."""
        state = self.state[p]
        # Perhaps written since the last step, by load_state_dict or an average.
        written = _MASTER in state and self._seen.get(id(p)) != p._version
        if written and not torch.equal(state[_MASTER].to(p.dtype), p):
            state[_MASTER].copy_(p)  # why: the parameter is what the caller sees, its master is old
        if "step" not in state:
            like = self.master(p)
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(like, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(like, memory_format=torch.preserve_format)
        state["step"] += 1

    def _update_by_kernel(
        self, parameters: Sequence[torch.Tensor], group: Mapping[str, Any], step: float, grad_scale: float
    ) -> None:
        weights = [Flat(self.master(p)) for p in parameters]
        first, second = ([Flat(self.state[p][name]) for p in parameters] for name in _FLOAT_STATES[:2])
        gradients = [p.grad.contiguous() for p in parameters]  # type: ignore[union-attr]
        low = [Flat(p) for p in parameters] if parameters[0].dtype in _LOW else None
        updates.adam(
            [g.numel() for g in gradients],
            [w.address for w in weights],
            [g.data_ptr() for g in gradients],
            [m.address for m in first],
            [v.address for v in second],
            gradient_type=TYPES[gradients[0].dtype],
            low=None if low is None else [x.address for x in low],
            low_type=TYPES[parameters[0].dtype] if low is not None else updates.BFLOAT16,
            lr=float(group["lr"]), step=step, betas=tuple(map(float, group["betas"])),  # type: ignore[arg-type]
            eps=float(group["eps"]), weight_decay=float(group["weight_decay"]), grad_scale=grad_scale,
            decoupled=bool(group["adam_w_mode"]), bias_correction=bool(group["bias_correction"]),
            threads=torch.get_num_threads(),
        )  # fmt: skip
        for flat in (*weights, *first, *second, *(low or ())):
            flat.put_back()
        torch.autograd.graph.increment_version(parameters)  # so that autograd sees what it did not do

    def _update_by_torch(
        self, parameters: Sequence[torch.Tensor], group: Mapping[str, Any], step: float, grad_scale: float
    ) -> None:
        (beta1, beta2), lr, decay = group["betas"], float(group["lr"]), float(group["weight_decay"])
        corrected = bool(group["bias_correction"])
        size = lr / (1 - beta1**step if corrected else 1.0)
        root2 = math.sqrt(1 - beta2**step) if corrected else 1.0
        for p in parameters:
            w, m, v = self.master(p), self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
            g = p.grad.to(w.dtype) * grad_scale  # type: ignore[union-attr]
            if decay and group["adam_w_mode"]:
                w.mul_(1 - lr * decay)
            elif decay:
                g = g.add(w, alpha=decay)
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            w.addcdiv_(m, v.sqrt().div_(root2).add_(group["eps"]), value=-size)
            if w is not p:
                p.copy_(w)


def _refuse_absent(groups: Iterable[Mapping[str, Any]]) -> None:
    found = next((name for group in groups for name in _ABSENT if group.get(name)), None)
    if found is not None:
        raise InputError(f"FusedAdam: a group has {found}", f"FusedAdam has no {found}: use torch.optim.AdamW")


def global_norm(tensors: Sequence[torch.Tensor]) -> float:
    """The norm of all elements of all tensors; infinite or NaN when an element is. The sum is made in double."""
    total = 0.0
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if by_kernel(tensor):
            by_type.setdefault(tensor.dtype, []).append(tensor.detach().contiguous())
        else:
            total += float(tensor.detach().double().square().sum())
    for dtype, group in by_type.items():
        sizes, addresses = [t.numel() for t in group], [t.data_ptr() for t in group]
        total += updates.squared_norm(sizes, addresses, TYPES[dtype], torch.get_num_threads())
    return math.sqrt(total) if total >= 0 else math.nan
