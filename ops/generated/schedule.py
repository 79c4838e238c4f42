"""Schedule of a region: how often a row is walked, and what is kept between the walks.

A reduction is known when its row has been walked, so what depends on it is computed in the next *stage*. A number that a
later stage needs again is computed again from the inputs when that is cheap, else kept in a row of scratch, or read back
from the output that it was written to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from ortgraph.ops.generated.expressions import CHOICE, NUMBER, REDUCTIONS, ROW, Access, Region, Width

_DEAR = frozenset({
    "exp", "log", "tanh", "erf", "sigmoid", "gelu", "gelu_tanh", "gelu_slope", "gelu_tanh_slope", "silu_slope", "pow",
    "sin", "cos", "softplus", "div", "sqrt", "reciprocal",
})  # fmt: skip
_DEAR_COST = 8
_KEEP = 5  # from this cost on (an element-wise operation or a load is 1) a number is kept rather than computed again


@dataclasses.dataclass(frozen=True)
class Loop:
    """One walk over the rows of one width.

    Attributes:
        stage: When it runs.
        width: Of the rows.
        reductions: Made in this walk.
        results: Positions of the outputs written in this walk.
        kept: Expressions whose rows are kept for later stages, in scratch.
    """

    stage: int
    width: Width
    reductions: tuple[int, ...]
    results: tuple[int, ...]
    kept: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """All walks in order.

    Attributes:
        stage: Stage from which each expression is known.
        loops: In order.
        kept: Row of scratch by expression.
        reread: Output by expression that is read back from it.
        drawn: Row of scratch by drawing expression.
    """

    region: Region
    stage: tuple[int, ...]
    loops: tuple[Loop, ...]
    kept: dict[int, int]
    reread: dict[int, int]
    drawn: dict[int, int]

    @property
    def scratch_rows(self) -> int:
        return len(self.kept) + len(self.drawn)


def schedule(region: Region) -> Schedule:
    """The schedule of a region."""
    stages = _stages(region)
    exprs = region.exprs
    outputs = {
        r.expr: i
        for i, r in reversed(list(enumerate(region.results)))
        if not r.column and r.dtype == ir.DataType.FLOAT and exprs[r.expr].kind == NUMBER and exprs[r.expr].width != ROW
    }
    needed = _needed_later(region, stages)
    reread = {e: outputs[e] for e in needed if e in outputs and exprs[e].op != "load"}
    kept: dict[int, int] = {}
    for e in needed:
        if e not in reread and exprs[e].kind == NUMBER and _cost(region, e, stages, {*reread, *kept}) >= _KEEP:
            kept[e] = len(kept)
    # A row that only an expression kept in its place needs is no longer asked for.
    needed = _needed_later(region, stages, {*reread, *kept})
    kept = {e: i for i, e in enumerate(k for k in kept if k in needed)}
    reread = {e: o for e, o in reread.items() if e in needed}
    drawn = {e: len(kept) + i for i, e in enumerate(k for k, x in enumerate(exprs) if x.op in ("draw", "uniform"))}
    return Schedule(region, stages, _loops(region, stages, kept), kept, reread, drawn)


def _stages(region: Region) -> tuple[int, ...]:
    found: list[int] = []
    for e in region.exprs:
        known = max((found[a] for a in e.args), default=0)
        found.append(known + (e.op in REDUCTIONS))
    return tuple(found)


def _roots(region: Region, stages: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(stage, expression) for every row that a walk must have."""
    for e in region.exprs:
        if e.op in REDUCTIONS:
            yield stages[e.args[0]], e.args[0]
    for r in region.results:
        if r.width != ROW:
            yield stages[r.expr], r.expr


def _needed_later(region: Region, stages: tuple[int, ...], held: set[int] = frozenset()) -> list[int]:  # type: ignore[assignment]
    """Expressions that a stage after their own reads directly, in order; ``held`` ones are looked through no further."""
    found: set[int] = set()
    seen: set[tuple[int, int]] = set()
    todo = list(_roots(region, stages))
    while todo:
        stage, e = todo.pop()
        if (stage, e) in seen:
            continue
        seen.add((stage, e))
        expr = region.exprs[e]
        if expr.width == ROW:
            continue
        if stages[e] < stage:
            found.add(e)
            if e in held:
                continue
        todo.extend((stage, a) for a in expr.args)
    return sorted(found, key=lambda e: (-stages[e], -e))


def _cost(region: Region, e: int, stages: tuple[int, ...], held: set[int]) -> int:
    total, seen, todo = 0, set(), [e]
    while todo:
        x = todo.pop()
        if x in seen:
            continue
        seen.add(x)
        expr = region.exprs[x]
        if expr.width == ROW or expr.op == "const":
            continue
        if x != e and x in held and stages[x] <= stages[e]:
            total += 1
            continue
        total += _DEAR_COST if expr.op in _DEAR else expr.op not in ("slice", "concat")
        todo.extend(expr.args)
    return total


def _loops(region: Region, stages: tuple[int, ...], kept: dict[int, int]) -> tuple[Loop, ...]:
    exprs = region.exprs
    groups: dict[tuple[int, str], tuple[Width, list[int], list[int], list[int]]] = {}

    def at(stage: int, width: Width) -> tuple[Width, list[int], list[int], list[int]]:
        return groups.setdefault((stage, str(width)), (width, [], [], []))

    for i, e in enumerate(exprs):
        if e.op in REDUCTIONS:
            at(stages[e.args[0]], e.data)[1].append(i)
    for i, r in enumerate(region.results):
        if r.width != ROW:
            at(stages[r.expr], r.width)[2].append(i)
    for i in kept:
        at(stages[i], exprs[i].width)[3].append(i)
    order = sorted(groups, key=lambda key: key[0])  # stable: widths of one stage in order of first use
    return tuple(Loop(stage, groups[stage, name][0], *map(tuple, groups[stage, name][1:])) for stage, name in order)


def inplace_pairs(plan: Schedule) -> tuple[tuple[int, int], ...]:
    """(input, output) pairs: the output may lie over the input when types and shapes are equal.

    Every number of the input is read before, or in the same step of the same walk as, the output's is written there.
    """
    region = plan.region
    last, bad = _last_reads(plan)
    written = {result: i for i, loop in enumerate(plan.loops) for result in loop.results}
    pairs = []
    for i, dtype in enumerate(region.inputs):
        if i in bad:
            continue
        for o, result in enumerate(region.results):
            if result.column or result.dtype != dtype or i not in last:
                continue
            # One number per row is read when a row begins, and written when it ends.
            row_result = result.width == ROW
            if row_result != (last[i] < 0):
                continue
            if row_result or last[i] <= written[o]:
                pairs.append((i, o))
    return tuple(pairs)


def _last_reads(plan: Schedule) -> tuple[dict[int, int], set[int]]:
    """Last walk that reads each dense input (-1: one number per row), and inputs that are read out of step."""
    region, last, bad = plan.region, dict[int, int](), set[int]()
    for e in region.exprs:
        if isinstance(e.data, Access) and (
            e.op == "counter" or not e.data.dense or e.kind == CHOICE and e.op != "load"
        ):
            bad.add(e.data.input)
    for number, loop in enumerate(plan.loops):
        roots = [region.exprs[r].args[0] for r in loop.reductions] + list(loop.kept)
        roots += [region.results[r].expr for r in loop.results]
        for index, moved in reads(plan, loop.stage, roots):
            access = region.exprs[index].data
            if not isinstance(access, Access):
                continue
            if moved or region.exprs[index].width != loop.width:
                bad.add(access.input)
            last[access.input] = max(last.get(access.input, -1), number)
    for e in region.exprs:
        if isinstance(e.data, Access) and e.width == ROW:
            (bad.add if e.data.input in last else lambda i: last.setdefault(i, -1))(e.data.input)
    return last, bad


def reads(plan: Schedule, stage: int, roots: list[int]) -> Iterator[tuple[int, bool]]:
    """Expressions of rows that a walk evaluates or loads, and whether at other columns than its own."""
    seen: set[tuple[int, bool]] = set()
    todo = [(r, False) for r in roots]
    while todo:
        e, moved = todo.pop()
        if (e, moved) in seen or plan.region.exprs[e].width == ROW:
            continue
        seen.add((e, moved))
        yield e, moved
        expr = plan.region.exprs[e]
        if plan.stage[e] < stage and (e in plan.kept or e in plan.reread):
            continue
        todo.extend((a, moved or expr.op in ("slice", "concat")) for a in expr.args)
