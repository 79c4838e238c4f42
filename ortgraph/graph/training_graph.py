"""TrainingGraph: the one type that every stage takes."""

from __future__ import annotations

import functools
import importlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Mapping

import numpy as np
import onnx
import onnx_ir as ir
import safetensors
import safetensors.numpy

from ortgraph.errors import InputError, SignatureError
from ortgraph.graph.signature import Signature
from ortgraph.graph.writing import writing

METADATA_KEY = "ortgraph.signature"
_GENERATED = "ortgraph.ops.generated"  # keeps the bodies of fused regions, which are functions of the model


@functools.lru_cache(maxsize=64)
def _decode(text: str) -> Signature:
    return Signature.from_json(text)


class TrainingGraph:
    """An ``onnx_ir.Model`` with a Signature, and the values of its parameters, buffers and states.

    Args:
        model: The joint graph. Its metadata holds the signature unless ``signature`` is given.
        signature: Stored into the model's metadata.
        values: Values by graph input name (parameters, buffers, states); shared, never copied by passes.
    """

    def __init__(
        self, model: ir.Model, signature: Signature | None = None, values: Mapping[str, np.ndarray] | None = None
    ) -> None:
        self.model = model
        self.values: dict[str, np.ndarray] = dict(values or {})
        if signature is not None:
            self.signature = signature
        if model.functions:
            importlib.import_module(_GENERATED).adopt(model)

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    @property
    def has_signature(self) -> bool:
        return METADATA_KEY in self.model.metadata_props

    @property
    def signature(self) -> Signature:
        """The roles of inputs and outputs. Raises SignatureError when the model carries none."""
        text = self.model.metadata_props.get(METADATA_KEY)
        if text is None:
            raise SignatureError(
                "this ONNX graph has no ortgraph signature (which output is the loss, which inputs are parameters)",
                "capture it with ortgraph.capture / ortgraph.from_onnx(path, loss=...), or `ortgraph export`",
            )
        return _decode(text)

    @signature.setter
    def signature(self, signature: Signature) -> None:
        self.model.metadata_props[METADATA_KEY] = signature.to_json()

    @property
    def stage(self) -> str:
        return self.signature.stage

    def _input_names(self) -> set[str]:
        return {str(v.name) for v in self.graph.inputs}

    def node_count(self) -> int:
        return sum(1 for _ in self.graph)

    def clone(self) -> TrainingGraph:
        """A deep copy of the graph; the values are shared."""
        return TrainingGraph(self.model.clone(), values=self.values)

    def text(self) -> str:
        """Canonical text: stable, no addresses, with roles and provenance."""
        from ortgraph.graph.text import to_text

        return to_text(self)

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write ``path`` (.onnx) and the values beside it (.safetensors, under original names), atomically.

        Raises:
            InputError: The path does not end in .onnx, its folder does not exist, the files cannot be written, or the
                graph has no input for a value.
        """
        path = pathlib.Path(path)
        if path.suffix != ".onnx":
            raise InputError(f"{path}: a training graph is saved as an .onnx file", f"{path.with_suffix('.onnx')}")
        if not path.parent.is_dir():
            raise InputError(f"{path.parent}: no such folder", "make the folder first")
        if self.has_signature:
            _refuse_unknown(path, self.values, self._input_names())
        proto = ir.serde.serialize_model(self.model)
        weights = path.with_suffix(".safetensors")
        values = {k: np.asarray(v, order="C") for k, v in self.values.items()}
        with writing(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=".ortgraph-") as folder:
            parts = [(pathlib.Path(folder, "graph.onnx"), path), (pathlib.Path(folder, "values.safetensors"), weights)]
            onnx.save_model(proto, parts[0][0])
            safetensors.numpy.save_file(values, parts[1][0])
            shutil.copymode(parts[0][0], parts[1][0])  # safetensors writes for the owner only
            for written, final in reversed(parts):
                os.replace(written, final)
        return path


def load(path: str | os.PathLike[str]) -> TrainingGraph:
    """Read a training graph saved by ``TrainingGraph.save``.

    The values of a graph with a signature come from the ``.safetensors`` beside the file when there is one.

    Raises:
        InputError: The file is missing, is not ONNX, or its values (in the .safetensors, or in files that the
            model names) are not whole or do not fit.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise InputError(
            f"{path}: no such file", "check the path; `ortgraph export file.py:build -o train.onnx` makes one"
        )
    try:
        model = ir.load(path)
        if not list(model.graph) and not list(model.graph.outputs):
            raise ValueError("the graph is empty")
    except Exception as error:  # noqa: BLE001 - protobuf raises many types, each means "not ONNX"
        raise InputError(
            f"{path}: not a readable ONNX model ({error})", "give a file written by an ONNX exporter"
        ) from error
    _check_external(path, model)
    graph = TrainingGraph(model)
    weights = path.with_suffix(".safetensors")
    if graph.has_signature and weights.is_file():
        graph.values.update(_read_values(weights, graph._input_names()))
    return graph


def _check_external(path: pathlib.Path, model: ir.Model) -> None:
    """Tensors in other files are read when they are needed: say here what would fail then."""
    attributes = (a for node in model.graph.all_nodes() for a in node.attributes.values() if not a.is_ref())
    tensors = [a.value for a in attributes if a.type == ir.AttributeType.TENSOR]
    tensors += [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    for tensor in tensors:
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        data = pathlib.Path(tensor.path)
        if ".." in pathlib.PurePath(tensor.location).parts or pathlib.PurePath(tensor.location).is_absolute():
            raise InputError(
                f"{path}: values of {tensor.name} are outside of its folder ({data})", "save the model anew"
            )
        end = (tensor.offset or 0) + tensor.nbytes
        if not data.is_file() or data.stat().st_size < end:
            what = "is shorter than its tensors" if data.is_file() else "is missing"
            raise InputError(f"{path}: {data}, which holds values of {tensor.name}, {what}", "copy both files again")


def _read_values(path: pathlib.Path, inputs: set[str]) -> dict[str, np.ndarray]:
    try:
        values = safetensors.numpy.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable safetensors file ({error})", "save the graph again") from error
    _refuse_unknown(path, values, inputs)
    return values


def _refuse_unknown(path: pathlib.Path, values: Iterable[str], inputs: set[str]) -> None:
    unknown = sorted(set(values) - inputs)
    if unknown:
        shown = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        raise InputError(
            f"{path}: the graph has no input for {shown}",
            "save the graph again, so that both files are of one graph, or remove these values",
        )
