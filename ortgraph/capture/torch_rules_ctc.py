"""Connectionist temporal classification as composites."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_translate import Translation


@rule("ortgraph.ctc_loss.default")
def _ctc_loss(t: Translation, blank: int, **tensors: ir.Value) -> tuple[ir.Value | None, ...]:
    return t.composites("CtcLoss", *tensors.values(), outputs=2, blank=blank)


@rule("ortgraph.ctc_loss_backward.default")
def _ctc_loss_backward(t: Translation, blank: int, **tensors: Any) -> ir.Value:
    return t.composite("CtcLossGrad", *tensors.values(), blank=blank)
