"""The training graph, its signature, canonical text, edit helpers and verifier."""

from ortgraph.graph.edit import Names, is_used, replace_value, stamp, static_shape
from ortgraph.graph.signature import STAGES, Buffer, Parameter, Signature, State
from ortgraph.graph.training_graph import TrainingGraph, load

__all__ = [
    "STAGES",
    "Buffer",
    "Names",
    "Parameter",
    "Signature",
    "State",
    "TrainingGraph",
    "is_used",
    "load",
    "replace_value",
    "stamp",
    "static_shape",
]
