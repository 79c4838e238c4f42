"""``ortgraph inspect``: what is in a graph."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any

import typer

from ortgraph.cli import options
from ortgraph.cli.output import Output, verb


@verb
def run(
    path: Annotated[pathlib.Path, typer.Argument(metavar="IN", help="A graph (.onnx).")],
    text: Annotated[bool, typer.Option("--text", help="Print the canonical text of the whole graph.")] = False,
    every: Annotated[bool, typer.Option("--all", help="List every parameter, buffer and state.")] = False,
    as_json: bool = options.JSON,
) -> None:
    """Show stage, inputs, outputs, parameters, states, operators and memory of a graph."""
    from ortgraph.report import tables

    out = Output(as_json)
    graph = options.read_graph(out, path)
    if text:
        out.say(graph.text())
        out.result({"path": str(path), "text": graph.text()})
        return
    operators = tables.operator_rows(graph)
    data: dict[str, Any] = {"path": str(path), "nodes": graph.node_count(), "operators": dict(operators)}
    opset = graph.graph.opset_imports.get("", "?")
    out.say(f"{path}: {graph.node_count()} nodes, opset {opset}, IR {graph.model.ir_version}")
    if graph.has_signature:
        data |= _roles(out, graph, every)
    else:
        out.say("no ortgraph signature: a plain ONNX file; `ortgraph export` turns a model into a training graph")
        rows = tables.value_rows([("input", v.name or "") for v in graph.graph.inputs], graph)
        rows += tables.value_rows([("output", v.name or "") for v in graph.graph.outputs], graph)
        data |= {"stage": None, "values": [dict(zip(tables.VALUE_COLUMNS, r, strict=True)) for r in rows]}
        out.table("Inputs and outputs", tables.VALUE_COLUMNS, rows)
    out.table("Operators", ("operator", "nodes"), operators, right=(1,))
    out.result(data)


def _roles(out: Output, graph: Any, every: bool) -> dict[str, Any]:
    from ortgraph.report import tables

    signature = graph.signature
    memory = tables.memory_of(graph)
    out.say(f"stage {signature.stage}, loss %{signature.loss}, {len(signature.trainable)} trainable parameters")
    out.table("Roles", ("role", "tensors", "elements", "bytes"), tables.role_rows(graph), right=(1, 2, 3))
    hidden = set() if every else {"parameter", "frozen", "buffer", "state"}
    inputs = [(r, n) for r, n in signature.graph_inputs() if r not in hidden]
    outputs = [(r, n) for r, n in signature.graph_outputs() if every or r in ("loss", "output", "input_gradient")]
    rows = tables.value_rows(inputs, graph) + tables.value_rows(outputs, graph)
    out.table("Inputs and outputs", tables.VALUE_COLUMNS, rows)
    out.table("Memory", ("what", "bytes", ""), tables.memory_rows(memory), right=(1,))
    for key, value in sorted(signature.metadata.items()):
        if value in ("", "{}"):
            continue
        out.say(f"{key}: {value}")
    return {
        "stage": signature.stage,
        "loss": signature.loss,
        "parameters": len(signature.parameters),
        "trainable": len(signature.trainable),
        "states": len(signature.states),
        "values": [dict(zip(tables.VALUE_COLUMNS, r, strict=True)) for r in rows],
        "memory": memory,
        "metadata": dict(signature.metadata),
    }
