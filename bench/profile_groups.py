"""Groups of operators, for both sides of a profile: what a step spends its time on, by purpose."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgraph.runtime.profile import NodeTime

# In the order of the table. ``overhead`` is the step's time outside of its operators.
GROUPS = (
    "products", "attention", "convolution", "element-wise", "generated", "norms", "reductions", "loss", "embedding",
    "pooling", "casts", "movement", "optimizer", "other", "overhead",
)  # fmt: skip
COUNTED = ("products", "attention", "convolution")  # groups whose rate is reported

_BY_CLASS = {
    "product": "products", "convolution": "convolution", "elementwise": "element-wise", "transcendental": "element-wise",
    "reduction": "reductions", "leading_reduction": "reductions", "norm": "norms", "pool": "pooling", "copy": "movement",
    "transpose": "movement", "free": "movement", "random": "element-wise", "optimizer": "optimizer",
    "gather": "movement", "scatter": "movement",
}  # fmt: skip
_LOSS = re.compile(r"CrossEntropy|Nll|LogSoftmax|LogSumExp|NegativeLogLikelihood")
_SCORES = re.compile(r"^(Attention|.*Softmax)")
_UPDATES = re.compile(r"^(Multi)?(AdamW|Adam|Lamb|Sgd|SGD)|GradScale|AllFinite|SquaredNorm")


@dataclasses.dataclass(frozen=True)
class OperatorTime:
    """Time of an operator's calls in one step.

    Attributes:
        operator: Name.
        group: One of GROUPS.
        calls: Calls per step.
        milliseconds: Per step, of all calls.
        flops: Floating point operations of matrix products and convolutions per step.
    """

    operator: str
    group: str
    calls: float
    milliseconds: float
    flops: int = 0


def node_group(node: ir.Node) -> str:
    """The group of a node of our graph."""
    from ortgraph.ops.work import class_of

    name = node.op_type
    if node.domain == "ortgraph.generated" or name.startswith("Fused_"):
        return "generated"
    if name == "Cast":
        return "casts"
    if _UPDATES.search(name) or name == "EmbeddingAdamW":
        return "optimizer"
    if name.startswith("Embedding"):
        return "embedding"
    if _LOSS.search(name):
        return "loss"
    if _SCORES.search(name):
        return "attention"
    kind = class_of(node)
    if kind == "product" or name == "Product":
        return "attention" if _is_batched(node) else "products"
    if kind == "gather" and _looks_up_rows(node):
        return "embedding"
    return _BY_CLASS.get(kind, "other")


def _is_batched(node: ir.Node) -> bool:
    """Both operands differ from product to product of a batch: scores and context of attention."""
    second = node.inputs[1]
    return second is not None and second.shape is not None and len(second.shape) > 2 and second.shape[-3] != 1


def _looks_up_rows(node: ir.Node) -> bool:
    table = node.inputs[0]
    return table is not None and table.producer() is None and table.shape is not None and len(table.shape) == 2


def node_flops(node: ir.Node) -> int:
    """Operations of a matrix product, convolution or attention; 0 for all else."""
    from ortgraph.ops.spec import spec_of
    from ortgraph.ops.work import class_of

    counted = class_of(node) in ("product", "convolution") or node.op_type in ("Product", "Attention", "AttentionGrad")
    rule = spec_of(node).flops if counted else None
    return rule(node) if rule is not None else 0


def graph_times(times: Iterable[NodeTime], order: Sequence[ir.Node]) -> list[OperatorTime]:
    """Times of nodes, summed by operator and group."""
    nodes = {n.name: n for n in order}
    rows = []
    for t in times:
        node = nodes.get(t.node)
        group, flops = (node_group(node), node_flops(node)) if node is not None else ("other", 0)
        rows.append(OperatorTime(t.operator.removeprefix("ortgraph."), group, 1, t.microseconds / 1e3, flops))
    return summed(rows)


def summed(rows: Iterable[OperatorTime]) -> list[OperatorTime]:
    """One row per operator and group, the dearest first."""
    sums: dict[tuple[str, str], OperatorTime] = {}
    for r in rows:
        old = sums.get((r.operator, r.group), OperatorTime(r.operator, r.group, 0, 0.0))
        sums[r.operator, r.group] = dataclasses.replace(
            old,
            calls=old.calls + r.calls,
            milliseconds=old.milliseconds + r.milliseconds,
            flops=old.flops + r.flops,
        )
    return sorted(sums.values(), key=lambda r: (-r.milliseconds, r.operator, r.group))


def by_group(rows: Iterable[OperatorTime], step_ms: float) -> dict[str, dict[str, float]]:
    """``{group: {ms, calls, gflops_per_s}}`` in the order of GROUPS; ``overhead`` is what is left of the step."""
    found: dict[str, list[OperatorTime]] = {}
    for r in rows:
        found.setdefault(r.group, []).append(r)
    table: dict[str, dict[str, float]] = {}
    for group in GROUPS[:-1]:
        if group not in found:
            continue
        ms = math.fsum(r.milliseconds for r in found[group])
        entry = {"ms": ms, "calls": sum(r.calls for r in found[group])}
        flops = sum(r.flops for r in found[group])
        if flops and ms:
            entry["gflops_per_s"] = flops / ms / 1e6
        table[group] = entry
    table["overhead"] = {"ms": step_ms - math.fsum(e["ms"] for e in table.values()), "calls": 0}
    return table


# PyTorch: names of operators (``aten::`` and the like) and of Inductor's kernels, the first match counts.
_TORCH: tuple[tuple[str, str], ...] = (
    (r"^## |CompiledF|Torch-Compiled|TorchDynamo|AOTDispatcher|^autograd::|Backward\d*$|AccumulateGrad|ProfilerStep", "overhead"),
    (r"adam|_foreach|optimizer\.step|Optimizer\.", "optimizer"),
    (r"nll_loss|cross_entropy|log_softmax", "loss"),
    (r"attention|softmax|::bmm|::baddbmm|bmm", "attention"),
    (r"::conv|convolution|_convolution_pointwise|mkldnn_conv", "convolution"),
    (r"::mm\b|::addmm|::linear|mkl_linear|_linear_pointwise|::matmul|packed_gemm|micro_gemm|cpp_.*gemm", "products"),
    (r"embedding", "embedding"),
    (r"_norm|rsqrt_pow|mean_pow|pow_mean|var_mean", "norms"),
    (r"pool", "pooling"),
    (r"_to_copy$|::copy_|::_to_copy|::to\b", "casts"),
    (r"::fill_|::zero_|::cat|::clone|::contiguous|::slice|::select|::index|::gather|::scatter|::empty|::as_strided|"
     r"::view|::reshape|::transpose|::t\b|::permute|::expand|::unsqueeze|::squeeze|::split|::chunk|::detach|::arange|"
     r"::resize|::zeros|::ones|::full|::reinterpret_tensor|mkldnn_reorder|::to_dense|constant_pad", "movement"),
    (r"::sum|::mean|::amax|::all|::any|::max\b|::min\b", "reductions"),
    (r"cpp_fused", "element-wise"),
    (r"::(add|sub|mul|div|gelu|relu|tanh|silu|sigmoid|pow|neg|exp|log|where|masked_fill|threshold|rsqrt|eq|ne|lt|le|gt|ge|"
     r"cos|sin|clamp|bitwise|logical|sqrt|abs|ceil|minimum|maximum|rsub|reciprocal)", "element-wise"),
)  # fmt: skip
_COMPILED = tuple((re.compile(p), g) for p, g in _TORCH)


def torch_group(name: str) -> str:
    """The group of a profiled PyTorch event. A fused kernel counts with the dearest function in its name."""
    return next((group for pattern, group in _COMPILED if pattern.search(name)), "other")


def torch_flops(name: str, shapes: Sequence[Sequence[int]]) -> int:
    """Operations of a matrix product from the shapes of its inputs; 0 for all else and for unknown forms."""
    base = name.rsplit("::", 1)[-1]
    two = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}.get(base)
    if two is not None and len(shapes) > two[1]:
        a, b = shapes[two[0]], shapes[two[1]]
        return 2 * math.prod(a) * b[-1] if a and b else 0
    weight = {"_linear_pointwise": 1, "_mkl_linear": 2}.get(base)
    if weight is not None and len(shapes) > weight:
        x, w = shapes[0], shapes[weight]
        return 2 * math.prod(x) * w[0] if x and len(w) == 2 else 0
    return 0


def rates(table: Mapping[str, Mapping[str, float]]) -> str:
    """Achieved rates of the counted groups, in words."""
    found = [f"{g} {table[g]['gflops_per_s']:.0f}" for g in COUNTED if "gflops_per_s" in table.get(g, {})]
    return "GFLOP/s: " + ", ".join(found) if found else ""
