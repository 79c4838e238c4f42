"""Forward operators without a rule of ours: the exporter's function library, inlined node by node."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ortgraph.capture.torch_translate import Translation


def translate_with_library(t: Translation, node: Node) -> Any:
    """Translate a node with onnxscript's function library. Raises UnsupportedError when it has none."""
    raise t.unsupported(str(node.target))
