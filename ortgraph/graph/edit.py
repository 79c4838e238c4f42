"""Edit helpers: every new node knows which pass made it and where its origin stands in the user's code."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

PASS_KEY = "ortgraph.pass"  # the pass that made the node
MODULE_KEY = "ortgraph.module"  # module path in the user's model, e.g. encoder.layer.0.attention
SOURCE_KEY = "ortgraph.source"  # file:line in the user's code
PHASE_KEY = "ortgraph.phase"  # forward | backward | optimizer
_INHERITED = (MODULE_KEY, SOURCE_KEY, PHASE_KEY)


class Names:
    """Fresh value and node names in one graph. Build one per edit session: it reads the graph once."""

    def __init__(self, graph: ir.Graph) -> None:
        self._taken: set[str] = {""}
        self._nodes: set[str] = {""}
        for value in (*graph.inputs, *graph.initializers.values()):
            self._taken.add(value.name or "")
        for node in graph.all_nodes():
            self._nodes.add(node.name or "")
            self._taken.update(o.name or "" for o in node.outputs)
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    body = attribute.as_graph()
                    self._taken.update(v.name or "" for v in (*body.inputs, *body.initializers.values()))
        self._next: dict[str, int] = {}
        self._next_node: dict[str, int] = {}

    def fresh(self, base: str) -> str:
        """A free value name: ``base``, else ``base.1``, ``base.2``, ..."""
        return _free(base, self._taken, self._next)

    def fresh_node(self, base: str) -> str:
        """A free node name; nodes and values have names of their own."""
        return _free(base, self._nodes, self._next_node)


def _free(base: str, taken: set[str], following: dict[str, int]) -> str:
    name, n = base, following.get(base, 0)
    while name in taken:
        n += 1
        name = f"{base}.{n}"
    following[base] = n
    taken.add(name)
    return name


def stamp(node: ir.Node, by: str, origins: Iterable[ir.Node] = ()) -> None:
    """Write provenance on ``node``: the pass, and module, source and phase of its first origin that has them."""
    node.metadata_props[PASS_KEY] = by
    for origin in origins:
        for key in _INHERITED:
            if key in origin.metadata_props and key not in node.metadata_props:
                node.metadata_props[key] = origin.metadata_props[key]


def is_used(value: ir.Value) -> bool:
    """Whether a node (subgraphs included) or a graph output reads the value."""
    return value.is_graph_output() or bool(value.uses())


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Let every reader of ``old`` read ``new``, and keep graph output names.

    When ``old`` is a graph output, ``new`` takes over its name, so names in = names out. If ``new`` cannot take it
    (it is a graph input, an initializer or itself a graph output), an Identity node is put before the output.
    """
    if not old.is_graph_output():
        ir.convenience.replace_all_uses_with(old, new)
        return
    node = old.producer()
    assert node is not None and node.graph is not None, "a graph input cannot be replaced"
    graph = node.graph
    for use in tuple(old.uses()):
        use.node.replace_input_with(use.idx, new)
    producer = new.producer()
    if producer is None or new.is_graph_output() or producer.graph is not graph:
        identity = ir.node("Identity", [new], name=f"{old.name}.identity")
        stamp(identity, "replace-value", [node])
        graph.insert_before(node, identity)
        new_output = identity.outputs[0]
    else:
        new_output = new
    new_output.shape, new_output.type = old.shape, old.type
    name = old.name
    old.name = None
    outputs = graph.outputs[:]  # a plain list: searching the graph's own container is slow
    for _ in range(outputs.count(old)):
        at = outputs.index(old)
        graph.outputs[at] = outputs[at] = new_output
    new_output.name = name


def remove_node(node: ir.Node) -> None:
    """Remove a node none of whose outputs is read. What its subgraphs read counts as read no longer."""
    assert node.graph is not None
    node.graph.remove(node, safe=True)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            _release(attribute.as_graph())


def _release(body: ir.Graph) -> None:
    """Let the nodes of a subgraph that is gone read nothing: onnx_ir takes only a removed node's own inputs away."""
    for node in body.all_nodes():
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)


def add_constant(graph: ir.Graph, tensor: ir.TensorProtocol, name: str) -> ir.Value:
    """Register a tensor as a constant (initializer) of a graph, under a name that is free."""
    tensor.name = name
    shape = ir.Shape(tensor.shape.numpy())
    value = ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def trim_inputs(graph: ir.Graph) -> None:
    """Drop absent optional inputs at the end of a node: ONNX Runtime's fusions read them and die (LayerNormalization
    with an empty third input behind an Add)."""
    for node in graph.all_nodes():
        while node.inputs and node.inputs[-1] is None:
            node.resize_inputs(len(node.inputs) - 1)


def take_type(new: ir.Value, old: ir.Value) -> None:
    """Record on ``new`` what is recorded on the value that it replaces: dtype and shape."""
    if old.dtype is not None and old.dtype != new.dtype:
        new.type = ir.TensorType(old.dtype)  # its own: clones share type objects, and setting dtype writes into them
    if old.shape is not None:
        new.shape = old.shape.copy()


def static_shape(value: ir.Value) -> tuple[int, ...] | None:
    """The shape when every dimension is a number, else None."""
    if value.shape is None or not value.shape.is_static():
        return None
    return tuple(int(d) for d in value.shape)  # type: ignore[arg-type]
