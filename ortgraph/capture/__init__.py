"""Ways in: capture from PyTorch, from ONNX files, from on-device training artifacts."""

from __future__ import annotations

from typing import Any

from ortgraph.capture.torch_capture import capture

__all__ = ["capture", "from_onnx"]


def __getattr__(name: str) -> Any:
    if name == "from_onnx":
        from ortgraph.capture.from_onnx import from_onnx

        globals()["from_onnx"] = from_onnx  # the import put the submodule there
        return from_onnx
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
