"""Nodes with several outputs: the gradient builder wants a gradient for each of some, and drops those of others."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ortgraph.capture.data_path import receives_gradient
from ortgraph.capture.legalize_layout import refuse
from ortgraph.capture.legalize_saved import BY
from ortgraph.errors import UnsupportedError
from ortgraph.graph import Names, is_used, replace_value
from ortgraph.graph.edit import remove_node
from ortgraph.ops.builder import Builder

# Their outputs after the first are saved for the backward half: the builder drops a gradient that comes from there.
_SAVING = frozenset({"BatchNormInternal", "LayerNormalization", "SimplifiedLayerNormalization"})
_RUNNING = (3, 4)  # inputs of BatchNormInternal that no gradient passes


def slice_partial_splits(path: Sequence[ir.Node], loss: ir.Value, names: Names) -> int:
    """A Split with a part that gets no gradient becomes a Slice per part: the builder joins the gradients of all parts.

    Raises:
        UnsupportedError: The sizes of the parts are not known.
    """
    count, nodes = 0, set(path)
    for node in path:
        if node.op_type != "Split" or all(o is loss or receives_gradient(o, nodes) for o in node.outputs):
            continue
        assert isinstance(node.graph, ir.Graph)
        build = Builder(node.graph, BY, before=node, origins=[node], names=names)
        axis, start = node.attributes.get_int("axis", 0), 0
        for output in node.outputs:
            size = None if output.shape is None else output.shape[axis]
            if not isinstance(size, int):
                raise refuse(node, "some parts reach the loss and some do not, and their sizes are not known")
            bounds = [build.ints([start]), build.ints([start + size]), build.ints([axis])]
            if is_used(output):
                replace_value(output, build.op("Slice", node.inputs[0], *bounds))
            start += size
        remove_node(node)
        count += 1
    return count


def refuse_read_statistics(path: Sequence[ir.Node]) -> None:
    """Refuse statistics of a normalization that lie on the data path.

    Raises:
        UnsupportedError: Names the node and the output: the gradient would silently miss a term.
    """
    nodes = set(path)
    for node in path:
        for output in node.outputs[1:] if node.op_type in _SAVING else ():
            readers = {u.node for u in output.uses() if u.node.op_type != "BatchNormInternal" or u.idx not in _RUNNING}
            if receives_gradient(output, nodes & readers):
                raise UnsupportedError(
                    f"node {node.name!r}: the loss reads its statistics (%{output.name}), which have no gradient",
                    "compute the mean and the variance with ReduceMean in the model",
                )
