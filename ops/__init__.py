"""What is known about operators: specifications, shapes, costs, expansions, kernels."""

if __name__ != "ortgraph.ops":
    raise ImportError("this folder is the package ortgraph.ops; install with: pip install -e . (see README)")

from ortgraph.ops.builder import Builder
from ortgraph.ops.infer import infer_graph, infer_node
from ortgraph.ops.spec import OpSpec, all_specs, spec_of

__all__ = ["Builder", "OpSpec", "all_specs", "infer_graph", "infer_node", "spec_of"]
