"""Modules of PyTorch whose code looks at values where it need not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import transformer
from torch.nn.modules.adaptive import _ASMoutput
from torch.nn.modules.batchnorm import _BatchNorm

from ortgraph.capture.torch_substitutes import in_place_of

_normalize = _BatchNorm.forward


@in_place_of(transformer, "_detect_is_causal_mask")
def is_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether an attention mask is said to be causal. PyTorch compares its values, only to pick a faster kernel."""
    return is_causal is True


@in_place_of(_BatchNorm, "forward")
def batch_norm(self: Any, input: torch.Tensor) -> torch.Tensor:
    """With ``momentum=None``, the cumulative average of the running statistics: their weight is a tensor."""
    if self.momentum is not None or not self.training or not self.track_running_stats:
        return _normalize(self, input)
    self._check_input_dim(input)
    self.num_batches_tracked.add_(1)
    with torch.no_grad():
        weight = 1 / self.num_batches_tracked.to(self.running_mean.dtype)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        variance, mean = torch.var_mean(input, axes)
        self.running_mean.copy_(self.running_mean + weight * (mean - self.running_mean))
        self.running_var.copy_(self.running_var + weight * (variance - self.running_var))
    return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)


@in_place_of(nn.AdaptiveLogSoftmaxWithLoss, "forward")
def adaptive_log_softmax(self: Any, input_: torch.Tensor, target_: torch.Tensor) -> Any:
    """Every row goes through every cluster; its own is picked from the result."""
    rows = input_ if target_.dim() else input_.unsqueeze(0)
    picked = self.log_prob(rows).gather(1, target_.reshape(-1, 1)).squeeze(1)
    return _ASMoutput(picked if target_.dim() else picked[0], -picked.mean())
