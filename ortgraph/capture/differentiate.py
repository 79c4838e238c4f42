"""Differentiation by ONNX Runtime's gradient builder, in a process of its own since the builder can abort."""

from __future__ import annotations

import json
import logging
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import onnx

from ortgraph.capture.gradient_worker import MISSING
from ortgraph.errors import RuntimeSetupError, UnsupportedError

logger = logging.getLogger(__name__)
_WORKER = pathlib.Path(__file__).with_name("gradient_worker.py")


def differentiate(forward: onnx.ModelProto, loss: str, parameters: Sequence[str]) -> onnx.ModelProto:
    """The joint graph: ``forward`` plus, for each parameter, an output ``<parameter>_grad``.

    Args:
        forward: A legal forward model whose node names are unique.
        loss: Name of the value that is differentiated.
        parameters: Graph inputs or initializers to differentiate by.

    Raises:
        RuntimeSetupError: onnxruntime-training is not installed.
        UnsupportedError: The builder refuses the graph, or dies on it; names the likely node.
    """
    failure = _attempt(forward, loss, parameters)
    if isinstance(failure, onnx.ModelProto):
        return failure
    node = _culprit(forward, failure) or _probe(forward)
    place = f"node {node.name!r} ({node.op_type})" if node is not None else "the graph"
    raise UnsupportedError(
        f"ONNX Runtime's gradient builder cannot differentiate {place}: {_first_sentence(failure)}",
        "replace this operator in the model, or freeze the parameters before it with trainable=[...]",
    )


def _attempt(forward: onnx.ModelProto, loss: str, parameters: Sequence[str]) -> onnx.ModelProto | str:
    """The joint graph, or why there is none."""
    with tempfile.TemporaryDirectory(prefix="ortgraph-") as name:
        folder = pathlib.Path(name)
        onnx.save_model(forward, folder / "forward.onnx")
        (folder / "request.json").write_text(json.dumps({"loss": loss, "parameters": list(parameters)}))
        worker = subprocess.run(
            [sys.executable, str(_WORKER), "."],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if worker.returncode == 0:
            return onnx.load_model(folder / "joint.onnx")
        error = folder / "error.txt"
        said = error.read_text(errors="replace") if error.exists() else worker.stderr
        logger.debug("gradient worker ended with %s: %s", worker.returncode, said)
        if worker.returncode == MISSING:
            raise RuntimeSetupError(
                f"differentiating an ONNX model needs the gradient builder of onnxruntime-training 1.19.2 ({said})",
                'pip install "ortgraph[cpu]" in an environment without the stock onnxruntime',
            )
        if error.exists():
            return said
        return f"it ended the worker process with {_exit_text(worker.returncode)}. {said[-2000:]}"


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _first_sentence(text: str) -> str:
    """The builder's reason without its C++ prefix."""
    reason = text.strip().splitlines()[0] if text.strip() else "no reason given"
    reason = re.sub(r"^\S+\.(?:cc|h):\d+ .*\)(?: const)? (?=\S)", "", reason)
    return reason[:400]


def _culprit(forward: onnx.ModelProto, text: str) -> onnx.NodeProto | None:
    """The node that the builder's message names."""
    named = [n for n in forward.graph.node if re.search(rf"(?<![\w.]){re.escape(n.name)}(?![\w.])", text)]
    return named[0] if len(named) == 1 else None


def _probe(forward: onnx.ModelProto) -> onnx.NodeProto | None:
    """Differentiate each kind of node alone and return the first on which the builder fails or dies."""
    types = {v.name: v for v in (*forward.graph.input, *forward.graph.value_info, *forward.graph.output)}
    tensors = {t.name: t for t in forward.graph.initializer}
    seen: set[bytes] = set()
    for node in forward.graph.node:
        alone = onnx.NodeProto()
        alone.CopyFrom(node)
        kind = node.op_type.encode() + b"".join(sorted(a.SerializeToString() for a in node.attribute))
        single = None if kind in seen else _single(alone, types, tensors, forward)
        seen.add(kind)
        if single is None:
            continue
        model, floats = single
        if not isinstance(_attempt(model, "probe_loss", floats), onnx.ModelProto):
            return node
    return None


def _single(
    node: onnx.NodeProto,
    types: dict[str, onnx.ValueInfoProto],
    tensors: dict[str, onnx.TensorProto],
    forward: onnx.ModelProto,
) -> tuple[onnx.ModelProto, list[str]] | None:
    """A model of one node whose first output is summed up; None when its types are not known."""
    used = dict.fromkeys(n for n in node.input if n)
    if any(n not in types and n not in tensors for n in used) or node.output[0] not in types:
        return None
    floats = [n for n in used if n in types and types[n].type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    if not floats or types[node.output[0]].type.tensor_type.elem_type != onnx.TensorProto.FLOAT:
        return None
    total = onnx.helper.make_node("ReduceSum", [node.output[0]], ["probe_loss"], name="probe_sum", keepdims=0)
    graph = onnx.helper.make_graph(
        [node, total],
        "probe",
        [types[n] for n in used if n in types],
        [onnx.helper.make_tensor_value_info("probe_loss", onnx.TensorProto.FLOAT, [])],
        [tensors[n] for n in used if n in tensors],
    )
    model = onnx.helper.make_model(graph, ir_version=forward.ir_version, opset_imports=forward.opset_import)
    return model, floats
