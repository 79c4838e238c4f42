"""Alternatives: the ways in which a target can run a composite operator, with their cost."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from ortgraph.errors import InputError
from ortgraph.ops.attention import score_count
from ortgraph.ops.builder import Builder
from ortgraph.ops.device_forms import DEVICE_FORMS
from ortgraph.ops.exact_forms import EXACT_FORMS, exact_form
from ortgraph.ops.kernels.table import BY_OPERATOR
from ortgraph.ops.runtime_forms import RUNTIME_FORMS, STANDARD_FORMS
from ortgraph.ops.shapes import attribute
from ortgraph.ops.spec import COMPOSITE, spec_of
from ortgraph.ops.targets import CPU_TARGETS, TARGETS, target_of

SHIPPED_TABLE = pathlib.Path(__file__).with_name("cost_table.json")
UNKNOWN_DIMENSION = 64  # a symbolic dimension counts as this many: only the ratio of alternatives matters
_ITEM_BYTES = 4
# Without a measurement an expansion is priced as this many passes over its data, a runtime operator as one.
_DEFAULT = {"expansion": (40.0, 4.0), "runtime": (10.0, 2.0), "native": (5.0, 2.0), "kernel": (5.0, 0.3)}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Predicted cost of one run.

    Attributes:
        microseconds: Time.
        moved: Bytes read and written.
        scratch: Bytes of temporaries beyond inputs and outputs.
    """

    microseconds: float
    moved: int = 0
    scratch: int = 0


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Measured cost per alternative: ``entries["Gelu.runtime"] = {"fixed_us", "ns_per_element", ...}``.

    ``element`` counts the largest input or output of the node. The text identity of the table is part of what makes
    a lowering reproducible, so it is hashable by its source.
    """

    source: str
    entries: Mapping[str, Mapping[str, float]]

    def cost(self, node: ir.Node, alternative: str) -> Cost:
        n = elements(node)
        entry = self.entries.get(f"{variant(node)}.{alternative}") or self.entries.get(f"{node.op_type}.{alternative}")
        if entry is None:
            fixed, per_element = _DEFAULT.get(alternative, _DEFAULT["runtime"])
            return Cost(fixed + per_element * n / 1e3, n * _ITEM_BYTES * 2)
        return Cost(
            entry["fixed_us"] + entry["ns_per_element"] * n / 1e3,
            int(n * entry.get("moved_per_element", 2 * _ITEM_BYTES)),
            int(n * entry.get("scratch_per_element", 0)),
        )


@dataclasses.dataclass(frozen=True)
class Alternative:
    """One way to run a composite.

    Attributes:
        name: ``expansion``, ``runtime`` (an operator of the target), ``kernel``, or ``native`` (left as it is).
        targets: Targets that have it.
        applies: Why it cannot be used for a node, or None.
        build: Makes the outputs before the node; None for an output that it does not make.
        cost: Predicted cost from a table.
    """

    name: str
    targets: tuple[str, ...]
    applies: Callable[[ir.Node], str | None]
    build: Callable[[Builder, ir.Node], Sequence[ir.Value | None]]
    cost: Callable[[ir.Node, CostTable], Cost]


def variant(node: ir.Node) -> str:
    """Operator name with the attribute that changes its cost: ``Gelu:tanh``, ``Transpose:rows`` (rows stay whole),
    ``ReduceSum:rows`` (over all dimensions but the last)."""
    if node.op_type == "Transpose":
        perm = attribute(node, "perm")
        return "Transpose:rows" if perm and perm[-1] == len(perm) - 1 else "Transpose"
    if node.op_type == "ReduceSum" and STANDARD_FORMS["ReduceSum"].applies(node) is None:
        return "ReduceSum:rows"
    form = attribute(node, "approximate", "none")
    return node.op_type if form == "none" else f"{node.op_type}:{form}"


def elements(node: ir.Node) -> int:
    """Elements of the node's largest input or output, for attention its scores; an unknown dimension counts as
    UNKNOWN_DIMENSION."""
    if node.op_type in ("Attention", "AttentionGrad"):
        return max(score_count(node, UNKNOWN_DIMENSION), 1)
    return max((_count(v) for v in (*node.inputs, *node.outputs) if v is not None), default=1)


def _count(value: ir.Value) -> int:
    if value.shape is None:
        return 1
    return math.prod(d if isinstance(d, int) else UNKNOWN_DIMENSION for d in value.shape)


def load_table(path: str = "") -> CostTable:
    """The cost table at ``path``, or the one shipped with the package.

    Raises:
        InputError: The file is missing or is not a cost table.
    """
    return _load(str(path or SHIPPED_TABLE))


@functools.lru_cache(maxsize=8)
def _load(path: str) -> CostTable:
    try:
        entries = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["entries"]
        if not all({"fixed_us", "ns_per_element"} <= set(entry) for entry in entries.values()):
            raise ValueError("an entry lacks fixed_us or ns_per_element")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a cost table ({error})", "make one with `ortgraph calibrate`") from error
    return CostTable(path, entries)


def alternatives(node: ir.Node, target: str, kernels: bool = True) -> tuple[Alternative, ...]:
    """All alternatives that ``target`` has for the node's operator, in a fixed order (ties go to the first).

    Args:
        node: A composite, a com.microsoft training operator, or a standard operator that a kernel may stand for.
        target: One of ortgraph.ops.targets.TARGETS.
        kernels: Whether compiled kernels take part.
    """
    found: list[Alternative] = []
    right = _key(node) in EXACT_FORMS and exact_form(node, target) is None  # the runtime's kernel needs no replacement
    if kernels and has_kernel(node) and not right:
        found.append(Alternative("kernel", CPU_TARGETS, kernel_reason, _kernel, _priced("kernel")))
    if node.domain == COMPOSITE:
        forms = (RUNTIME_FORMS if target_of(target).on_cpu else DEVICE_FORMS).get(node.op_type, ())
        found += [Alternative("runtime", f.targets, f.applies, f.build, _priced("runtime")) for f in forms]
    elif has_choice(node):
        form = STANDARD_FORMS.get(node.op_type)
        if form is not None:
            found.append(Alternative("runtime", form.targets, form.applies, form.build, _priced("runtime")))
        native = functools.partial(native_reason, target=target, kernels=kernels)
        found.append(Alternative("native", TARGETS, native, _as_it_is, _priced("native")))
        exact = exact_form(node, target)
        if exact is not None and exact.build is not None:
            found.append(Alternative("expansion", exact.targets, lambda node: None, _exact, _priced("expansion")))
    if spec_of(node).expand is not None:
        found.append(Alternative("expansion", TARGETS, lambda node: None, _expand, _priced("expansion")))
    return tuple(a for a in found if target in a.targets)


def has_choice(node: ir.Node) -> bool:
    """Whether lowering may replace an operator that the target runs already."""
    domain, op_type = _key(node)
    return has_kernel(node) or _key(node) in EXACT_FORMS or (domain == "" and op_type in STANDARD_FORMS)


def native_reason(node: ir.Node, target: str, kernels: bool = True) -> str | None:
    """Why an operator that the target runs is not left as it is: its kernel loses digits, and something else does not."""
    exact = exact_form(node, target)
    if exact is None:
        return None
    if exact.build is not None or spec_of(node).expand is not None:
        return exact.why
    return exact.why if kernels and has_kernel(node) and kernel_reason(node) is None else None


def has_kernel(node: ir.Node) -> bool:
    """Whether a compiled kernel computes the node's operator, for some types and forms."""
    return _key(node) in BY_OPERATOR


def _key(node: ir.Node) -> tuple[str, str]:
    return "" if node.domain == "ai.onnx" else node.domain, node.op_type


def kernel_reason(node: ir.Node) -> str | None:
    """Why no compiled kernel stands for the node here; None when one does."""
    from ortgraph.ops import kernels

    return kernels.reason(node) or (None if kernels.available() else kernels.reason())


def _kernel(builder: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    from ortgraph.ops import kernels

    return kernels.build(builder, node)


def _as_it_is(builder: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    return node.outputs


def _priced(name: str) -> Callable[[ir.Node, CostTable], Cost]:
    return lambda node, table: table.cost(node, name)


def _exact(builder: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    build = EXACT_FORMS[_key(node)].build
    assert build is not None
    return [build(builder, node)]


def _expand(builder: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    expand = spec_of(node).expand
    assert expand is not None
    return expand(builder, node)
