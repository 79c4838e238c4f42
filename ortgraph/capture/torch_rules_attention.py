"""Scaled dot product attention as a composite."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_translate import Translation

FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@rule(f"{FLASH}.default")
def _attention(
    t: Translation, query: ir.Value, key: ir.Value, value: ir.Value, dropout_p: float, is_causal: bool, attn_mask: Any,
    scale: float | None,
) -> tuple[ir.Value | None, ...]:  # fmt: skip
    _refuse(t, query, key, dropout_p)
    return t.composites(
        "Attention", query, key, value, attn_mask, outputs=2, scale=_scale(t, query, scale), is_causal=int(is_causal)
    )


@rule(f"{FLASH}_backward.default")
def _attention_backward(
    t: Translation, grad_out: ir.Value, query: ir.Value, key: ir.Value, value: ir.Value, out: ir.Value,
    logsumexp: ir.Value, dropout_p: float, is_causal: bool, attn_mask: Any, scale: float | None,
) -> tuple[ir.Value | None, ...]:  # fmt: skip
    _refuse(t, query, key, dropout_p)
    return t.composites(
        "AttentionGrad", grad_out, query, key, value, out, logsumexp, attn_mask, outputs=3,
        scale=_scale(t, query, scale), is_causal=int(is_causal),
    )  # fmt: skip


def _refuse(t: Translation, query: ir.Value, key: ir.Value, dropout_p: float) -> None:
    if dropout_p:
        raise t.unsupported("fused attention with dropout", "use attn_implementation='eager', or dropout 0")


def _scale(t: Translation, query: ir.Value, scale: float | None) -> float:
    if scale is not None:
        return float(scale)
    width = t.dims(query)[-1]
    assert isinstance(width, int)
    return 1 / math.sqrt(width)
