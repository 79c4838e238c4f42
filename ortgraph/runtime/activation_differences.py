"""What each module of a PyTorch model makes, beside what the graph makes of it: where do the numbers depart?"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.errors import InputError
from ortgraph.graph import TrainingGraph
from ortgraph.graph.edit import MODULE_KEY, PHASE_KEY
from ortgraph.graph.text import node_text
from ortgraph.manager.numerics import relative_errors, tolerance_of
from ortgraph.ops.precision import FP32
from ortgraph.ops.targets import MOVES_LOW
from ortgraph.runtime.reference_evaluator import Evaluation, Overflow, evaluate_reference

_CONTAINERS = (dict, list, tuple)


@dataclasses.dataclass(frozen=True)
class Difference:
    """One activation or gradient on both sides.

    Attributes:
        module: Path of the module, or name of the parameter for a gradient.
        kind: ``activation`` or ``gradient``.
        node: The operator of the graph that makes it, in words.
        error: |graph - PyTorch| / |PyTorch|, norm-wise; infinite where only one side is finite. A gradient far below
            the median norm is measured against the median.
    """

    module: str
    kind: str
    node: str
    error: float


@dataclasses.dataclass(frozen=True)
class ActivationReport:
    """All differences in order of computation, and operators that overflow.

    Attributes:
        rows: Activations in the order in which PyTorch computes them, then gradients in the graph's order.
        overflows: Operators that make infinities from finite numbers.
        tolerance: Error above which a row departs.
        unmatched: Modules whose output no value of the graph stands for (fused away, or of another shape).
    """

    rows: tuple[Difference, ...]
    overflows: tuple[Overflow, ...]
    tolerance: float
    unmatched: tuple[str, ...]

    @property
    def first_departure(self) -> Difference | None:
        """The first row beyond the tolerance; None when all agree."""
        return next((row for row in self.rows if not row.error <= self.tolerance), None)

    @property
    def text(self) -> str:
        """The report in lines: what departs first, then every row."""
        first = self.first_departure
        head = [f"all {len(self.rows)} agree within {self.tolerance:.1e}"]
        if first is not None:
            head = [f"{first.kind} of {first.module} departs by {first.error:.1e}: {first.node}"]
        head += [f"overflow in {o.module or o.node}: {o.text}" for o in self.overflows]
        return "\n".join([*head, *(f"{r.error:9.2e}  {r.kind:10} {r.module}" for r in self.rows)])


def activation_differences(
    module: Any,
    graph: TrainingGraph,
    batch: Mapping[str, Any],
    *,
    autocast: Any = None,
    loss: Any = None,
    tolerance: float | None = None,
) -> ActivationReport:
    """Run a module and a graph captured from it on one batch, and compare activations and gradients module by module.

    The graph is evaluated with every low value really rounded (``evaluate_reference``), so it is given before
    lowering. Random layers must be off.

    Args:
        module: The ``torch.nn.Module`` that the graph was captured from. Its parameters are those of ``graph.values``.
        graph: At stage ``captured`` to ``stepped``.
        batch: Tensors or arrays by input name.
        autocast: A torch dtype: run the module under autocast; None: in the type of its parameters.
        loss: The loss among the module's outputs, as for ``capture``: a name, an index or a callable; None: ``.loss``,
            else the output itself.
        tolerance: Error above which a row departs; None: that of the graph's precision.

    Raises:
        InputError: The module gives no loss.
        UnsupportedError: The graph was lowered to kernels.
    """
    made, gradients = _torch_side(module, batch, autocast, loss)
    arrays = {name: np.asarray(_array(item)) for name, item in batch.items()}
    evaluation = evaluate_reference(graph, arrays)
    values = _forward_values(graph)
    rows: list[Difference] = []
    unmatched: list[str] = []
    for path, array in made:
        value = _output_of(path, values, evaluation, array)
        if value is None:
            unmatched.append(path)
            continue
        got = evaluation.values[value.name or ""].reshape(array.shape)
        error = relative_errors({path: got}, {path: array})[path]
        rows.append(Difference(path, "activation", _told(value), error))
    outputs = {v.name: v for v in graph.graph.outputs}
    order = {node: i for i, node in enumerate(graph.graph)}
    found = {name: outputs[g] for name, g in graph.signature.gradients.items() if name in gradients}
    errors = relative_errors(
        {n: evaluation.values[v.name or ""] for n, v in found.items()}, {n: gradients[n] for n in found}
    )
    for name, value in sorted(found.items(), key=lambda item: order.get(item[1].producer(), 0)):  # type: ignore[arg-type]
        rows.append(Difference(name, "gradient", _told(value), errors[name]))
    if tolerance is None:
        tolerance = tolerance_of(graph.signature.metadata.get("precision", FP32)).gradient
    return ActivationReport(tuple(rows), evaluation.overflows, tolerance, tuple(unmatched))


def _torch_side(
    module: Any, batch: Mapping[str, Any], autocast: Any, loss: Any
) -> tuple[list[tuple[str, np.ndarray]], dict[str, np.ndarray]]:
    """(module path, output) in order of computation, and gradients by parameter name."""
    import torch

    made: list[tuple[str, np.ndarray]] = []

    def remember(path: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            first = next(_tensors(output), None)
            if first is not None and first.is_floating_point():
                made.append((path, _array(first)))

        return hook

    tensors = {k: v if isinstance(v, torch.Tensor) else torch.from_numpy(np.asarray(v)) for k, v in batch.items()}
    context = torch.autocast("cpu", dtype=autocast) if autocast is not None else contextlib.nullcontext()
    before = {p: p.grad for p in module.parameters()}
    handles = [m.register_forward_hook(remember(path)) for path, m in module.named_modules() if path]
    try:
        module.zero_grad(set_to_none=True)
        with context:
            output = module(**tensors)
            total = _loss(output, loss)
        total.backward()
        gradients = {n: _array(p.grad) for n, p in module.named_parameters() if p.grad is not None}
    finally:
        for handle in handles:
            handle.remove()
        for parameter, gradient in before.items():
            parameter.grad = gradient
    return made, gradients


def _loss(output: Any, loss: Any) -> Any:
    if callable(loss):
        return loss(output)
    if isinstance(loss, str):
        return output[loss] if isinstance(output, Mapping) else getattr(output, loss)
    if isinstance(loss, int):
        return output[loss]
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if getattr(found, "ndim", None) != 0:
        raise InputError("the module gives no scalar loss", "name it: loss='loss', an index, or a callable")
    return found


def _tensors(output: Any) -> Iterator[Any]:
    if hasattr(output, "is_floating_point"):
        yield output
    elif isinstance(output, _CONTAINERS):
        for item in output.values() if isinstance(output, dict) else output:
            yield from _tensors(item)


def _array(tensor: Any) -> np.ndarray:
    if not hasattr(tensor, "detach"):
        return np.asarray(tensor)
    tensor = tensor.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy().copy()


def _forward_values(graph: TrainingGraph) -> list[ir.Value]:
    """Results of the forward half that belong to a module, in node order."""
    return [
        output
        for node in graph.graph
        if MODULE_KEY in node.metadata_props and node.metadata_props.get(PHASE_KEY, "forward") == "forward"
        for output in node.outputs
        if output.name
    ]


def _output_of(path: str, values: list[ir.Value], evaluation: Evaluation, array: np.ndarray) -> ir.Value | None:
    """The value that stands for a module's output: made by the last operator in it that computes, or a view of that."""
    last: ir.Node | None = None
    for value in reversed(values):
        maker = _maker(value, path)
        if maker is None:
            continue
        last = last or maker
        if maker is not last:
            return None
        if _fits(evaluation, value, array):
            return value
    return None


def _maker(value: ir.Value, path: str) -> ir.Node | None:
    """The operator in the module (or below) that computed what the value is a view or cast of; None: none there."""
    node = value.producer()
    while node is not None:
        module = node.metadata_props.get(MODULE_KEY, "")
        if module != path and not module.startswith(f"{path}."):
            return None
        source = node.inputs[0] if node.inputs else None
        table = node.op_type == "Gather" and source is not None and source.producer() is None
        if table or not (node.op_type in MOVES_LOW or node.op_type == "Cast"):
            return node
        node = None if source is None else source.producer()
    return None


def _fits(evaluation: Evaluation, value: ir.Value, array: np.ndarray) -> bool:
    """Whether the value has the array's elements in the array's order, as far as shapes tell."""
    made = evaluation.values.get(value.name or "")
    if made is None or made.dtype.kind != "f" or made.size != array.size:
        return False
    a, b = _borders(made.shape), _borders(array.shape)
    return a <= b or b <= a


def _borders(shape: tuple[int, ...]) -> set[int]:
    """Products of leading dimensions: those of a split or merged dimension are a superset or subset."""
    return {math.prod(shape[:i]) for i in range(1, len(shape) + 1)}


def _told(value: ir.Value) -> str:
    producer = value.producer()
    return "" if producer is None else node_text(producer)
