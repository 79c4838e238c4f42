"""Sequences of tensors that are only taken apart again: PyTorch's exporter writes ``chunk`` and ``split`` so."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortgraph.capture.legalize_control import constant_value
from ortgraph.capture.legalize_saved import BY
from ortgraph.graph import Names, replace_value
from ortgraph.graph.edit import remove_node
from ortgraph.ops.builder import Builder


def split_directly(graph: ir.Graph, names: Names) -> int:
    """SplitToSequence whose parts are read by SequenceAt of a constant position becomes Split. Returns how many.

    Others stay: they are refused where a gradient passes them.
    """
    count = 0
    for node in list(graph):
        if node.op_type != "SplitToSequence" or node.domain not in ("", "ai.onnx"):
            continue
        readers = [use.node for use in node.outputs[0].uses()]
        if node.outputs[0].is_graph_output() or any(r.op_type != "SequenceAt" or r.graph is not graph for r in readers):
            continue
        sizes, keep = _sizes(node)
        places = [None if r.inputs[1] is None else constant_value(r.inputs[1]) for r in readers]
        if sizes is None or any(p is None or not -len(sizes) <= int(p.reshape(())) < len(sizes) for p in places):
            continue
        build = Builder(graph, BY, before=node, origins=[node], names=names)
        axis = node.attributes.get_int("axis", 0)
        parts = build.multi("Split", node.inputs[0], build.ints(sizes), outputs=len(sizes), axis=axis)
        for reader, place in zip(readers, places, strict=True):
            assert place is not None
            part = parts[int(place.reshape(()))]
            replace_value(reader.outputs[0], part if keep else build.op("Squeeze", part, build.ints([axis])))
            remove_node(reader)
        remove_node(node)
        count += 1
    return count


def _sizes(node: ir.Node) -> tuple[list[int] | None, bool]:
    """Lengths of the parts where they are known, and whether a part keeps the axis."""
    x, axis = node.inputs[0], node.attributes.get_int("axis", 0)
    length = None if x is None or x.shape is None else x.shape[axis]
    given = node.inputs[1] if len(node.inputs) > 1 else None
    if given is None:
        return ([1] * length if isinstance(length, int) else None), bool(node.attributes.get_int("keepdims", 1))
    known = constant_value(given)
    if known is None:
        return None, True
    if known.ndim:
        return [int(n) for n in known], True
    if not isinstance(length, int):
        return None, True
    step = int(known)
    return [int(n) for n in np.diff([*range(0, length, step), length])], True
