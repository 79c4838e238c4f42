"""The backend ``ortgraph`` of ``torch.compile``."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ortgraph.capture.torch_capture import check_torch
from ortgraph.capture.torch_decompositions import decompositions
from ortgraph.dynamo.joint_graph import arguments_of
from ortgraph.dynamo.options import Options
from ortgraph.dynamo.partition import Compiler
from ortgraph.dynamo.per_shape import PerShape, is_symbolic, numbers_in, with_numbers
from ortgraph.errors import CaptureError, OrtgraphError, RuntimeSetupError, UnsupportedError

logger = logging.getLogger(__name__)
_CANNOT = (CaptureError, RuntimeSetupError)  # a graph that is refused, as opposed to a mistake in an option


class FallbackWarning(UserWarning):
    """PyTorch runs a graph that could not be compiled."""


def backend(
    graph_module: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | Options | None = None
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured: ``torch.compile(model, backend="ortgraph", options={...})``.

    Args:
        graph_module: Dynamo's graph.
        example_inputs: Its inputs, as Dynamo gives them.
        options: See ``Options``.

    Returns:
        A function of the same inputs.

    Raises:
        InputError: An unknown option.
        CaptureError: The graph cannot be compiled and ``fallback`` is off.
    """
    chosen = options if isinstance(options, Options) else Options.of(options)
    check_torch(allow_untested=False)
    numbers = numbers_in(graph_module)
    if numbers or is_symbolic(example_inputs):
        return PerShape(lambda args: _compile(with_numbers(graph_module, args, numbers), args, chosen), numbers)
    return _compile(graph_module, example_inputs, chosen)


def _compile(graph_module: GraphModule, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Compile, or let PyTorch run what cannot be compiled, and a batch that is empty."""
    if _is_empty(graph_module, inputs):
        return graph_module.forward
    try:
        return compile_static(graph_module, inputs, options)
    except _CANNOT as error:
        if not options.fallback:
            raise
        _warn(error)
        return graph_module.forward


def compile_static(graph_module: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """AOTAutograd over one graph of fixed shapes."""
    from torch._dynamo.backends.common import aot_autograd

    elsewhere = next((x for x in example_inputs if isinstance(x, torch.Tensor) and x.device.type != "cpu"), None)
    if elsewhere is not None:  # why: values are bound by their addresses in this process's memory
        raise UnsupportedError(
            f"a tensor is on {elsewhere.device}", "move module and batch to the processor: this backend runs there"
        )
    compiler = Compiler(arguments_of(graph_module), options)
    compile_with = aot_autograd(
        fw_compiler=compiler.forward,
        bw_compiler=compiler.backward,
        inference_compiler=compiler.inference,
        partition_fn=compiler.partition,
        decompositions=decompositions(),
    )
    return compile_with(graph_module, example_inputs)


def _is_empty(graph_module: GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a tensor of the batch has no elements: kernels of the runtime refuse some of what PyTorch defines then."""
    kinds = zip(arguments_of(graph_module), inputs, strict=True)
    return any(a.kind == "input" and isinstance(x, torch.Tensor) and x.numel() == 0 for a, x in kinds)


def _warn(error: OrtgraphError) -> None:
    warnings.warn(
        f"PyTorch runs this graph: {error.what}\n  try: {error.hint}"
        if error.hint
        else f"PyTorch runs this graph: {error.what}",
        FallbackWarning,
        stacklevel=3,
    )
