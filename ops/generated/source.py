"""C++ of a region: one class per kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortgraph.ops.generated.expressions import CHOICE, REDUCTIONS, ROW, Access, Region
from ortgraph.ops.generated.layout import Layout, group_count, layout
from ortgraph.ops.generated.schedule import Loop, Schedule, schedule

FUNCTIONS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}",
    "abs": "magnitude({0})", "exp": "exp({0})", "log": "logarithm({0})", "sqrt": "root({0})",
    "reciprocal": "1.0f / {0}", "sigmoid": "sigmoid({0})", "tanh": "hyperbolic_tangent({0})",
    "erf": "error_function({0})", "relu": "clip_low({0}, V{{}})", "floor": "round_down({0})", "ceil": "round_up({0})",
    "round": "round_even({0})", "sign": "sign({0})", "sin": "sine({0})", "cos": "cosine({0})",
    "softplus": "softplus({0})", "maximum": "maximum({0}, {1})", "minimum": "minimum({0}, {1})",
    "pow": "power({0}, {1})", "clip_low": "clip_low({0}, {1})", "clip_high": "clip_high({0}, {1})",
    "select": "select({0}, {1}, {2})", "indicator": "indicator({0})", "as_bf16": "as_bf16({0})",
    "as_half": "as_half({0})", "gelu": "gelu({0})", "gelu_tanh": "gelu_tanh({0})", "gelu_slope": "gelu_slope({0})",
    "gelu_tanh_slope": "gelu_tanh_slope({0})", "silu_slope": "silu_slope({0})", "greater": "{0} > {1}",
    "greater_equal": "{0} >= {1}", "less": "{0} < {1}", "less_equal": "{0} <= {1}", "equal": "equals({0}, {1})",
    "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}", "is_nan": "{0} != {0}",
    "is_inf": "magnitude({0}) == std::numeric_limits<float>::infinity()", "truth": "{0} != 0.0f",
    "select_mask": "select_mask({0}, {1}, {2})",
}  # fmt: skip
_TYPES = {
    ir.DataType.FLOAT: ("float", "kFloat"), ir.DataType.BFLOAT16: ("Bf16", "kBfloat16"),
    ir.DataType.FLOAT16: ("Half", "kHalf"), ir.DataType.BOOL: ("bool", "kBool"),
    ir.DataType.INT64: ("std::int64_t", "kInt64"),
}  # fmt: skip
_START = {
    "sum": "V{}", "max": "splat(-std::numeric_limits<float>::infinity())",
    "peak": "splat(-std::numeric_limits<float>::infinity())",
    "min": "splat(std::numeric_limits<float>::infinity())",
}  # fmt: skip


class Writer:
    """Writes one kernel.

    Args:
        name: Operator and class name.
        region: What it computes.
    """

    def __init__(self, name: str, region: Region) -> None:
        self.name, self.region = name, region
        self.plan: Schedule = schedule(region)
        self.layout: Layout = layout(region)
        self.lines: list[str] = []
        self.depth = 0
        self._width = {w: f"w{i}" for i, w in enumerate(region.widths)}
        self._columns = [i for i, r in enumerate(region.results) if r.column]

    def text(self) -> str:
        """The source of the unit."""
        self._line('#include "generated.h"', "", "namespace ortgraph {", "namespace {", "")
        self._line(f"class {self.name} final : public Kernel {{", " public:")
        self.depth = 1
        self._constructor()
        self._open("void compute(const Context& context) const override {")
        self._compute()
        self._close("}")
        self._fields()
        self.depth = 0
        self._line("};", "", "}  // namespace", "", f"void add_{self.name}(Definitions& to) {{")
        ins = ", ".join(f"Port{{{_TYPES[t][1]}, kRequired}}" for t in self.region.inputs)
        outs = ", ".join(f"Port{{{_TYPES[r.dtype][1]}, kRequired}}" for r in self.region.results)
        self._line(f'  static Definition definition("{self.name}", {{{ins}}}, {{{outs}}}, make<{self.name}>);')
        self._line("  to.push_back(&definition);", "}", "", "}  // namespace ortgraph")
        return "\n".join(self.lines) + "\n"

    # -- outline ----------------------------------------------------------------------------------------------------

    def _line(self, *lines: str) -> None:
        self.lines += [("  " * self.depth + line) if line else "" for line in lines]

    def _open(self, line: str) -> None:
        self._line(line)
        self.depth += 1

    def _close(self, line: str) -> None:
        self.depth -= 1
        self._line(line)

    def _constructor(self) -> None:
        self._open(f"explicit {self.name}(const Attributes& a) {{")
        self._line('rows_ = a.integer("rows", 0);')
        if self.region.widths:
            self._line('widths_ = a.shape("widths");')
        for i in range(len(self.region.inputs)):
            self._line(f'counts_[{i}] = a.integer("count{i}", 0);')
        for i in range(len(self.region.results)):
            self._line(f'shapes_[{i}] = a.shape("shape{i}");')
        for i, leading in enumerate(self.layout.patterns):
            for what in ("sizes", "strides"):
                self._line(f'const Shape {what}{i} = a.shape("{what}{i}");')
                self._line(f"std::copy_n({what}{i}.dim.begin(), {group_count(leading)}, {what}{i}_);")
        for i, name in enumerate(self.region.draws):
            self._line(f'node{i}_ = a.integer("{name}", 0);')
        self._close("}")

    def _fields(self) -> None:
        self.depth -= 1
        self._line("", " private:")
        self.depth += 1
        self._line("std::int64_t rows_;", f"std::int64_t counts_[{max(1, len(self.region.inputs))}];")
        self._line("Shape widths_;", f"Shape shapes_[{len(self.region.results)}];")
        for i, leading in enumerate(self.layout.patterns):
            n = group_count(leading)
            self._line(f"std::int64_t sizes{i}_[{n}], strides{i}_[{n}];")
        for i in range(len(self.region.draws)):
            self._line(f"std::int64_t node{i}_;")

    # -- compute ----------------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        region = self.region
        counters = {e.data.input for e in region.exprs if e.op == "counter" and isinstance(e.data, Access)}
        for i, dtype in enumerate(region.inputs):
            kind = _TYPES[dtype][0]
            if i not in counters:
                self._line(f"const auto* in{i} = static_cast<const {kind}*>(data_of(context, {i}, counts_[{i}]));")
        for i, result in enumerate(region.results):
            kind = _TYPES[result.dtype][0]
            self._line(f"auto* out{i} = static_cast<{kind}*>(context.output({i}, shapes_[{i}]));")
        for i, w in enumerate(region.widths):
            static = isinstance(w, int) and self.layout.merged == 0
            self._line(f"const std::int64_t w{i} = {w if static else f'widths_.dim[{i}]'};")
        self._line("const std::int64_t rows = rows_;")
        for i, e in enumerate(region.exprs):
            if e.op == "const":
                number = _literal(e.data) if e.kind != CHOICE else f"Mask{{}} - {int(bool(e.data))}"
                self._line(f"const auto c{i} = {f'splat({number})' if e.kind != CHOICE else number};")
            elif e.op in ("draw", "uniform"):
                key, step = (region.exprs[a].data.input for a in e.args)
                name, ratio = e.data
                node = region.draws.index(name)
                self._line(f"const Generator g{i}(context.input({key}), context.input({step}), node{node}_);")
                if e.op == "draw":
                    self._line(f"const Threshold h{i}({ratio!r});")
            elif self._hoisted(i):
                self._line(f"const auto r{i} = one(in{e.data.input});")
        if self.layout.tiled:
            self._tiles()
        else:
            self._rows()

    def _hoisted(self, i: int) -> bool:
        e = self.region.exprs[i]
        return e.op == "load" and e.width == ROW and isinstance(e.data, Access) and e.data.uniform and not e.data.varies

    def _tiles(self) -> None:
        self._line("const std::int64_t tiles = (w0 + kTile - 1) / kTile;")
        self._open("context.rows(rows * tiles, std::min(w0, kTile), [&](std::int64_t begin, std::int64_t end) {")
        self._workspace("std::min(w0, kTile)")
        self._open("for (std::int64_t t = begin; t < end; ++t) {")
        self._line("const std::int64_t r = t / tiles, first = (t - r * tiles) * kTile;")
        self._line("const std::int64_t n0 = std::min(kTile, w0 - first);")
        self._row("n0")
        self._close("}")
        self._close("});")

    def _rows(self) -> None:
        main = "w0" if self.region.widths else "std::int64_t{1}"
        if self._columns:
            self._line(f"const Partials partials(rows, w0, {len(self._columns)});")
        self._open(f"context.rows(rows, {main}, [&](std::int64_t begin, std::int64_t end) {{")
        widest = ", ".join(self._width[w] for w in self.region.widths)
        self._workspace(f"std::max({{{widest}}})" if len(self.region.widths) > 1 else main)
        if self._columns:
            self._line("float* sums = partials.clear(begin);")
        for i in range(len(self.layout.patterns)):
            self._line(f"Walk walk{i}(begin, sizes{i}_, strides{i}_);")
        self._open("for (std::int64_t r = begin; r < end; ++r) {")
        self._row("")
        for i in range(len(self.layout.patterns)):
            self._line(f"walk{i}.next();")
        self._close("}")
        self._close("});")
        for position, i in enumerate(self._columns):
            if self.region.results[i].dtype == ir.DataType.FLOAT:
                self._line(f"partials.total({position} * w0, w0, out{i});")
            else:
                self._line(f"Scratch<float> total{i}(static_cast<std::size_t>(w0));")
                self._line(f"partials.total({position} * w0, w0, total{i}.data());")
                self._line(f"columns(0, w0, [&](std::int64_t j, auto span) {{ "
                           f"put(out{i} + j, get(total{i}.data() + j, span), span); }});")  # fmt: skip

    def _workspace(self, width: str) -> None:
        if self.plan.scratch_rows:
            self._line(f"Workspace<{self.plan.scratch_rows}> workspace({width});")

    def _row(self, tile: str) -> None:
        """One row, or one tile of it (``tile`` is its width)."""
        region, plan = self.region, self.plan
        for i in range(len(self.layout.patterns)):
            offset = f"row_offset(r, sizes{i}_, strides{i}_)" if tile else f"walk{i}.offset()"
            self._line(f"const std::int64_t at{i} = {offset};")
        self._pointers(tile)
        for e, row in plan.kept.items():
            self._line(f"float* k{e} = workspace.row({row});")
        for e, row in plan.drawn.items():
            w = self._width[region.exprs[e].width]
            self._line(f"std::int32_t* d{e} = workspace.words({row});")
            start, count = (f"r * {w} + first", tile) if tile else (f"r * {w}", w)
            self._line(f"draw_words(g{e}, {start}, {count}, d{e});")
        self._row_numbers(0)
        for number, loop in enumerate(plan.loops):
            self._loop(loop, tile)
            if number + 1 == len(plan.loops) or plan.loops[number + 1].stage != loop.stage:
                self._row_numbers(loop.stage + 1)
        for i, result in enumerate(region.results):
            if result.width == ROW:
                self._line(f"put_one(out{i} + r, {self._name(result.expr)});")

    def _pointers(self, tile: str) -> None:
        more = " + first" if tile else ""
        for i, e in enumerate(self.region.exprs):
            if e.op != "load" or self._hoisted(i):
                continue
            access: Access = e.data
            pattern = self.layout.pattern(access)
            row = f"at{pattern}" if pattern is not None else "r" if self.layout.dense(access) else ""
            if e.width == ROW:
                self._line(f"const auto r{i} = one(in{access.input}{f' + {row}' if row else ''});")
            else:
                w = self._width[e.width]
                self._line(f"const auto* x{i} = in{access.input}{f' + {row} * {w}' if row else ''}{more};")
        for i, result in enumerate(self.region.results):
            if not result.column and result.width != ROW:
                self._line(f"auto* y{i} = out{i} + r * {self._width[result.width]}{more};")

    def _row_numbers(self, stage: int) -> None:
        for i, e in enumerate(self.region.exprs):
            if e.width != ROW or e.op in ("load", "const", "counter", *REDUCTIONS) or self.plan.stage[i] != stage:
                continue
            if e.op == "width":
                self._line(f"const V r{i} = splat(static_cast<float>({self._width[e.data]}));")
                continue
            kind = "Mask" if e.kind == CHOICE else "V"
            self._line(f"const {kind} r{i} = {FUNCTIONS[e.op].format(*map(self._name, e.args))};")

    def _name(self, e: int) -> str:
        """A number per row, or a constant."""
        return f"c{e}" if self.region.exprs[e].op == "const" else f"r{e}"

    def _loop(self, loop: Loop, tile: str) -> None:
        exprs = self.region.exprs
        for i in loop.reductions:
            self._line(f"V a{i} = {_START[exprs[i].op]};")
        roots = [exprs[i].args[0] for i in loop.reductions]
        roots += [self.region.results[i].expr for i in loop.results] + list(loop.kept)
        end = tile or self._width[loop.width]
        cuts = sorted(c for c in _Cuts(self.plan, loop.stage).of_all(roots) if c > 0)
        bounds = ["0", *map(str, cuts), end]
        for low, high in zip(bounds, bounds[1:], strict=False):
            self._open(f"columns({low}, {high}, [&](std::int64_t j, auto span) {{")
            self._step(loop, int(low), int(high) if high.isdigit() else None)
            self._close("});")
        for i in loop.reductions:
            if exprs[i].op == "sum":
                self._line(f"const V r{i} = splat(sum(a{i}));")
            else:
                self._line(f"const V r{i} = splat({exprs[i].op}_of(a{i}));")

    def _step(self, loop: Loop, low: int, high: int | None) -> None:
        """One group of columns: everything is read and computed before anything is written."""
        step = _Step(self, loop, low, high)
        exprs, writes = self.region.exprs, []
        for i in loop.reductions:
            value = step.value(exprs[i].args[0], 0)
            if exprs[i].op == "sum":
                writes.append(f"a{i} += keep({value}, span);")
            else:
                name = "larger" if exprs[i].op == "peak" else f"{exprs[i].op}imum"
                writes.append(f"a{i} = {name}(a{i}, {exprs[i].op}_outside({value}, span));")
        for i in loop.results:
            result = self.region.results[i]
            value = step.value(result.expr, 0)
            if result.column:
                at = f"sums + {self._columns.index(i)} * w0 + j"
                writes.append(f"put({at}, get({at}, span) + {value}, span);")
            else:
                writes.append(f"put(y{i} + j, {value}, span);")
        for e in loop.kept:
            writes.append(f"put(k{e} + j, {step.value(e, 0)}, span);")
        self._line(*step.lines, *writes)


class _Step:
    """Values of one group of columns, by expression and shift of columns."""

    def __init__(self, writer: Writer, loop: Loop, low: int, high: int | None) -> None:
        self.writer, self.loop, self.low = writer, loop, low
        self.lines: list[str] = []
        self._known: dict[tuple[int, int], str] = {}

    def value(self, e: int, shift: int) -> str:
        region, plan = self.writer.region, self.writer.plan
        expr = region.exprs[e]
        if expr.width == ROW:
            return self.writer._name(e)
        if (e, shift) in self._known:
            return self._known[e, shift]
        at = f"j + {shift}" if shift > 0 else f"j - {-shift}" if shift else "j"
        later = plan.stage[e] < self.loop.stage
        if later and e in plan.kept:
            text = f"get(k{e} + {at}, span)"
        elif later and e in plan.reread:
            text = f"get(y{plan.reread[e]} + {at}, span)"
        elif expr.op == "load":
            text = f"get(x{e} + {at}, span)"
        elif expr.op == "slice":
            return self.value(expr.args[0], shift + expr.data)
        elif expr.op == "concat":
            return self._part(e, shift)
        elif expr.op == "draw":
            text = f"kept(get(d{e} + {at}, span), h{e})"
        elif expr.op == "uniform":
            text = f"uniform(get(d{e} + {at}, span))"
        else:
            text = FUNCTIONS[expr.op].format(*(self.value(a, shift) for a in expr.args))
        name = f"t{e}" + (f"_{shift}" if shift > 0 else f"_m{-shift}" if shift else "")
        self.lines.append(f"const {'Mask' if expr.kind == CHOICE else 'V'} {name} = {text};")
        self._known[e, shift] = name
        return name

    def _part(self, e: int, shift: int) -> str:
        """The part of a concatenation that these columns lie in."""
        expr = self.writer.region.exprs[e]
        begin = 0
        for arg, width in zip(expr.args, expr.data, strict=True):
            if begin <= self.low + shift < begin + width:
                return self.value(arg, shift - begin)
            begin += width
        raise AssertionError("columns beyond a concatenation")


class _Cuts:
    """Columns at which a row's expressions change form."""

    def __init__(self, plan: Schedule, stage: int) -> None:
        self.plan, self.stage = plan, stage
        self._known: dict[int, frozenset[int]] = {}

    def of_all(self, roots: Sequence[int]) -> frozenset[int]:
        return frozenset().union(*(self.of(r) for r in roots))

    def of(self, e: int) -> frozenset[int]:
        if e not in self._known:
            self._known[e] = self._find(e)
        return self._known[e]

    def _find(self, e: int) -> frozenset[int]:
        expr = self.plan.region.exprs[e]
        held = self.plan.stage[e] < self.stage and (e in self.plan.kept or e in self.plan.reread)
        if expr.width == ROW or held:
            return frozenset()
        if expr.op == "slice":
            start, width = expr.data, expr.width
            return frozenset(c - start for c in self.of(expr.args[0]) if 0 < c - start < width)
        if expr.op != "concat":
            return self.of_all(expr.args)
        found, begin = set(), 0
        for arg, width in zip(expr.args, expr.data, strict=True):
            if width:
                found |= {begin} | {begin + c for c in self.of(arg)}
            begin += width
        return frozenset(found)


def _literal(value: object) -> str:
    number = np.float32(value)  # type: ignore[arg-type]
    if np.isnan(number):
        return "std::numeric_limits<float>::quiet_NaN()"
    if np.isinf(number):
        return ("-" if number < 0 else "") + "std::numeric_limits<float>::infinity()"
    return f"{float(number).hex()}f"
