"""Programs for labelled rows: the graph as it was before its head was cut, and how many rows a batch needs."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import logging
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortgraph.analysis.bind_shapes import bind_shapes, infer_unknown, is_dynamic
from ortgraph.errors import PlanError
from ortgraph.graph import TrainingGraph
from ortgraph.graph.edit import remove_node
from ortgraph.graph.text import to_text
from ortgraph.graph.verify import verify
from ortgraph.plan.stored_budget import stored_budget
from ortgraph.runtime.prepare import FOLD, RECOMPUTE, prepare, recorded_passes, run_passes

logger = logging.getLogger(__name__)
METADATA_KEY = "ortgraph.labelled_rows"
PADDING_KEY = "ortgraph.padding"  # of ortgraph.runtime.padded_rows
FORMS = (METADATA_KEY, PADDING_KEY)
PASS = "select-labelled-rows"
REFUSED_KEY = "ortgraph.padding.refused"  # why a graph has no form of PADDING_KEY
WITH_OUTPUTS = "outputs_of_training"  # in a signature's metadata: every program gives the model outputs, too
KEY = "labelled rows"  # stands beside the names of dimensions in the key of a program
_PARTS = 16
# Rows of a buffer, in sixteenths. Masked language models label 15 % of the rows, which three sixteenths hold. With more
# than three quarters labelled the whole graph serves: gathering and scattering cost, too. All of them and the whole
# graph are no more programs than a session keeps.
BUFFERS = (1, 2, 3, 4, 6, 8, 12)
KINDS = frozenset(
    {"step", "accumulate", "backward", "gradients", "input_gradients", "loss"}
)  # programs without model outputs
_FLOAT = re.compile(r"(?<![\w.])\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?![\w.])")
_HEADING = re.compile(r"^function .*$", re.MULTILINE)
_OTHER_FORMS = ("ortgraph.evaluation", "ortgraph.plan", "ortgraph.budget")


@dataclasses.dataclass(frozen=True)
class LabelNote:
    """Which labels count.

    Attributes:
        input: The data input with the labels.
        ignore: The label that does not count.
    """

    input: str
    ignore: int

    def rows(self, labels: np.ndarray, of: int = 0) -> int:
        """Rows of the smallest buffer that holds a batch's labels; 0 where the whole graph serves.

        Args:
            labels: Of the batch.
            of: All rows, where they are fewer than labels.
        """
        total = of or labels.size
        part = -(-total // _PARTS)
        labelled = int(np.count_nonzero(labels != self.ignore))
        return next((n * part for n in BUFFERS if labelled <= n * part < total), 0)


def without_outputs(graph: TrainingGraph) -> TrainingGraph:
    """A copy that computes no model outputs, as programs that train; all of them where these do, too."""
    form = graph.clone()
    if WITH_OUTPUTS in graph.signature.metadata:
        return form
    form.signature = form.signature.replace(outputs=())
    wanted = {name for _, name in form.signature.graph_outputs()}
    g = form.graph
    kept = [v for v in g.outputs if v.name in wanted]
    del g.outputs[:]
    g.outputs.extend(kept)
    for node in reversed(list(g)):
        if not any(o.uses() or o.is_graph_output() for o in node.outputs):
            remove_node(node)
    for name in [n for n, v in g.initializers.items() if not v.uses() and not v.is_graph_output()]:
        g.initializers.pop(name)
    return form


def keep_form(graph: TrainingGraph, note: Any, key: str = METADATA_KEY) -> None:
    """Store the graph as it is, without model outputs, in its own metadata, for ``kept_form``.

    The form travels with the graph through the rest of its pipeline, as the evaluation form does.

    Args:
        graph: Before a pass whose rows a session chooses.
        note: A dataclass: what a session has to know to choose them.
        key: One of ``FORMS``.
    """
    form = without_outputs(graph)
    for other in (*FORMS, *_OTHER_FORMS):
        form.model.metadata_props.pop(other, None)
    packed = zlib.compress(ir.to_proto(form.model).SerializeToString(deterministic=True), 6)
    stored = {**dataclasses.asdict(note), "form": base64.b64encode(packed).decode()}
    graph.model.metadata_props[key] = json.dumps(stored)


def seal(graph: TrainingGraph, complete: bool) -> None:
    """Note, at the end of a pipeline, which graph the forms belong to: one that is changed later has none.

    Args:
        graph: As the pipeline left it.
        complete: The recorded pipeline says all that was done to the graph after a form was kept; without it the
            form would lead to another graph, and is dropped.
    """
    for key in FORMS:
        stored = graph.model.metadata_props.pop(key, None)
        if stored is not None and complete:
            graph.model.metadata_props[key] = json.dumps({**json.loads(stored), "of": _identity(graph)})


def label_note(graph: TrainingGraph) -> LabelNote | None:
    """What ``keep_form`` noted; None when there is nothing, or when the graph is not as its pipeline left it."""
    read = stored_note(graph, METADATA_KEY, PASS)
    return None if read is None else LabelNote(read["input"], read["ignore"])


def stored_note(graph: TrainingGraph, key: str, kept_by: str) -> dict[str, Any] | None:
    """The note of a form that fits the graph; None when there is none, or when the graph was changed afterwards."""
    stored = graph.model.metadata_props.get(key)
    if stored is None or kept_by not in recorded_names(graph):
        return None
    read = json.loads(stored)
    return read if read.get("of") == _identity(graph) else None


def _identity(graph: TrainingGraph) -> str:
    """A hash of the graph's text that a file keeps: float attributes in float32, inputs of functions without types."""
    text = _FLOAT.sub(lambda found: str(np.float32(found[0])), to_text(graph, provenance=False))
    text = _HEADING.sub(lambda found: re.sub(r" [^ ,)]*\[[^\]]*\]", "", found[0]), text)
    return hashlib.sha256(text.encode()).hexdigest()


def kept_form(graph: TrainingGraph, key: str = METADATA_KEY) -> TrainingGraph:
    """The graph that ``keep_form`` stored, with the same values."""
    packed = json.loads(graph.model.metadata_props[key])["form"]
    model = ir.from_proto(onnx.load_from_string(zlib.decompress(base64.b64decode(packed))))
    model.metadata_props[_OTHER_FORMS[0]] = ""  # why: programs that evaluate come from the whole graph
    return TrainingGraph(model, values=graph.values)


def recorded_names(graph: TrainingGraph) -> list[str]:
    """Names of the passes of the graph's own pipeline."""
    return [p.name for p in recorded_passes(graph)]


def prepare_labelled(graph: TrainingGraph, rows: int, dims: Mapping[str, int], target: str) -> TrainingGraph | None:
    """The form with a buffer of ``rows`` rows, taken through what the graph's own pipeline did after it was kept.

    Args:
        graph: With a form that fits it (``label_note``). Not changed.
        rows: Rows of the buffer.
        dims: Size by name of every symbolic dimension.
        target: ``onnxruntime-training`` or ``onnxruntime``.

    Returns:
        A lowered graph with static shapes; None when nothing would get smaller.
    """
    form = kept_form(graph)
    if is_dynamic(form):
        bind_shapes(form, dims)
        run_passes(form, FOLD)
        infer_unknown(form)
    before = form.node_count()
    run_passes(form, f"{PASS}{{rows={rows}}}")
    if METADATA_KEY in form.model.metadata_props or form.node_count() == before:
        return None
    try:
        run_passes(form, ",".join(later_passes(graph, target)))
    except PlanError as error:
        logger.info("labelled rows: the whole graph serves: %s", error)
        return None
    verify(form, "signature", by=PASS)
    return prepare(form, {}, target)


def later_passes(graph: TrainingGraph, target: str, kept_by: str = PASS, rows: int = 0) -> Iterator[str]:
    """The passes that follow in the graph's own pipeline, for this target and within the memory that the graph has.

    Args:
        graph: As its pipeline left it.
        target: That it is to run on.
        kept_by: The pass behind which they come.
        rows: Rows of the buffer for labelled rows, where that pass follows; 0: all.
    """
    passes = recorded_passes(graph)
    for p in passes[[p.name for p in passes].index(kept_by) + 1 :]:
        if p.name == PASS and not rows:
            continue
        if p.name == PASS:
            p = dataclasses.replace(p, rows=rows, least_rows=1)
        if p.name == RECOMPUTE and "%" in p.budget:
            limit = next(
                (b for program in ("step", "backward", "gradients") if (b := stored_budget(graph, program))), None
            )
            yield str(p if limit is None else dataclasses.replace(p, budget=str(limit)))
        elif p.name == "lower":
            yield str(dataclasses.replace(p, target=target))
        elif p.name != "plan-memory":
            yield str(p)
