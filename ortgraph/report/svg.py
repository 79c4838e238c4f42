"""Charts as inline SVG: no script, no external resource, readable without colour."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 16, 30, 40
_COLOURS = ("#1f6f8b", "#c8553d", "#5b8c5a", "#7b5ea7")
_BANDS = ("#8a8a8a", "#c8553d", "#1f6f8b", "#8fc3d3", "#e0b04c", "#5b8c5a")  # told apart by brightness too
_HALO = 'stroke="#fff" stroke-width="3" paint-order="stroke"'
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
_LINE_POINTS = 400  # more points than pixels only make the file larger


def line_chart(title: str, series: Mapping[str, Sequence[float]], x_label: str, y_label: str) -> str:
    """Lines over their positions (0, 1, ...). Values that are not finite leave gaps."""
    finite = [v for values in series.values() for v in values if math.isfinite(v)]
    longest = max((len(v) for v in series.values()), default=0)
    if not finite or longest == 0:
        return _frame(title, _text(_WIDTH / 2, _HEIGHT / 2, "no values", "middle"))
    low, high = _padded(min(finite), max(finite))
    parts = [_axes(0, max(longest - 1, 1), low, high, x_label, y_label)]
    for i, (name, values) in enumerate(series.items()):
        points = _path(
            [(_x(k, 0, max(longest - 1, 1)), _y(v, low, high) if math.isfinite(v) else None) for k, v in _thin(values)]
        )
        style = f'fill="none" stroke="{_COLOURS[i % 4]}" stroke-width="1.6" stroke-dasharray="{_DASHES[i % 4]}"'
        parts.append(f'<path d="{points}" {style}/>')
        parts.append(_legend(i, name))
    return _frame(title, "".join(parts))


def histogram(title: str, series: Mapping[str, Sequence[float]], x_label: str, bins: int = 40) -> str:
    """How often values occur, one row of bars per series over the same axis; a line marks each median."""
    ordered = {name: sorted(v for v in values if math.isfinite(v)) for name, values in series.items()}
    everything = sorted(v for values in ordered.values() for v in values)
    if not everything:
        return _frame(title, _text(_WIDTH / 2, _HEIGHT / 2, "no values", "middle"))
    # The slowest twentieth (a busy machine) would squeeze all else into one bar; it is counted in the last one.
    low, high = _padded(everything[0], everything[min(len(everything) - 1, math.ceil(len(everything) * 0.95))])
    parts = [_axes(low, high, 0, 1, x_label, "share of steps", y_ticks=False)]
    for i, (name, values) in enumerate(ordered.items()):
        parts.append(_bars(values, low, high, bins, _COLOURS[i % 4]))
        if values:
            x = _x(min(values[len(values) // 2], high), low, high)
            line = f'x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"'
            parts.append(f'<line {line} stroke="{_COLOURS[i % 4]}" stroke-dasharray="4 2"/>')
        parts.append(_legend(i, name))
    return _frame(title, "".join(parts))


def bar_chart(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars from (label, value, text at the end of the bar)."""
    height = _TOP + 24 * len(rows) + 10
    largest = max((v for _, v, _ in rows), default=0.0) or 1.0
    parts = []
    for i, (label, value, text) in enumerate(rows):
        y, width = _TOP + 24 * i, 320 * value / largest
        parts.append(_text(190, y + 13, label, "end"))
        parts.append(f'<rect x="200" y="{y}" width="{width:.1f}" height="17" fill="{_COLOURS[0]}"/>')
        parts.append(_text(206 + width, y + 13, text, "start"))
    return _frame(title, "".join(parts), height)


def stacked_chart(
    title: str,
    bands: Mapping[str, Sequence[float]],
    x_label: str,
    y_label: str,
    *,
    top: float = 0.0,
    peak: tuple[int, str] | None = None,
    border: tuple[int, str, str] | None = None,
    limit: tuple[float, str] | None = None,
    base: str = "",
) -> str:
    """Areas on top of each other, in steps. Where several steps share a column, it shows the largest of them.

    Args:
        title: Heading.
        bands: Heights by name, from the bottom up, all of one length and not negative.
        x_label: What the positions are.
        y_label: What the heights are.
        top: Upper end of the axis, so that two charts can share a scale; raised where the data needs more.
        peak: Position to mark, and its label.
        border: Position of a vertical line, and labels on its left and right.
        limit: Height of a horizontal line, and its label.
        base: Text of a strip below zero that stands for what is constant; its height means nothing.
    """
    longest = max((len(v) for v in bands.values()), default=0)
    total = [sum(column) for column in zip(*bands.values(), strict=True)]
    if not longest:
        return _frame(title, _text(_WIDTH / 2, _HEIGHT / 2, "no values", "middle"))
    columns = _columns(total)
    high = _round_top(max(*total, top, limit[0] if limit else 0.0))
    x = [_x(c, 0, longest) for c in (*(c for c, _ in columns), longest)]
    parts, below = [], [0.0] * len(columns)
    left = float(_LEFT)
    for (name, values), colour in zip(bands.items(), _BANDS, strict=False):
        above = [b + values[t] for b, (_, t) in zip(below, columns, strict=True)]
        if above != below:
            path = _steps(x, above, below, high)
            parts.append(f'<path d="{path}" fill="{colour}" stroke="#fff" stroke-width="0.4"/>')
            parts.append(f'<rect x="{left:.0f}" y="18" width="10" height="9" fill="{colour}"/>')
            parts.append(_text(left + 14, 26, name, "start"))
            left += 34 + 6.2 * len(name)
        below = above
    parts.append(_axes(0, longest, 0, high, x_label, y_label))
    if border is not None:
        at = _x(border[0], 0, longest)
        parts.append(f'<path d="M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#333" stroke-dasharray="5 3"/>')
        parts.append(_text(at - 5, _TOP + 12, border[1], "end", _HALO))
        parts.append(_text(at + 5, _TOP + 12, border[2], "start", _HALO))
    if limit is not None:
        y = _y(limit[0], 0, high)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#a00" stroke-dasharray="2 2"/>')
        parts.append(_text(_WIDTH - _RIGHT, y - 4, limit[1], "end", _HALO))
    if peak is not None:
        at, y = _x(peak[0] + 0.5, 0, longest), _y(total[peak[0]], 0, high)
        parts.append(f'<circle cx="{at:.1f}" cy="{y:.1f}" r="3.5" fill="#000"/>')
        side = "start" if at < _WIDTH / 2 else "end"
        parts.append(_text(at + (7 if side == "start" else -7), y - 5, peak[1], side, _HALO))
    if base:
        parts.append(_base_strip(base))
    return _frame(title, "".join(parts), _HEIGHT + (24 if base else 0))


def _base_strip(text: str) -> str:
    y, width = _HEIGHT + 2, _WIDTH - _LEFT - _RIGHT
    return (
        f'<rect x="{_LEFT}" y="{y}" width="{width}" height="17" fill="#e6e3dc" stroke="#888" stroke-dasharray="3 2"/>'
        + _text(_LEFT + width / 2, y + 12, text, "middle")
    )


def _round_top(largest: float, room: float = 1.1) -> float:
    """The upper end of an axis from zero whose quarters are round numbers, with room for a label above ``largest``."""
    if largest <= 0:
        return 1.0
    step = room * largest / 4
    scale = 10.0 ** math.floor(math.log10(step))
    return 4 * scale * next(m for m in (1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12) if m * scale >= step)


def _columns(total: Sequence[float]) -> list[tuple[int, int]]:
    """(first position, position of the largest sum) of each column."""
    stride = max(1, math.ceil(len(total) / _LINE_POINTS))
    starts = range(0, len(total), stride)
    return [(s, max(range(s, min(s + stride, len(total))), key=lambda t: (total[t], -t))) for s in starts]


def _steps(x: Sequence[float], above: Sequence[float], below: Sequence[float], high: float) -> str:
    """The outline between two step functions; a run of equal heights is one line."""
    parts: list[str] = []
    for heights, positions in ((above, range(len(above))), (below, range(len(below) - 1, -1, -1))):
        last = None
        forward = heights is above
        for k in positions:
            y = f"{_y(heights[k], 0, high):.1f}"
            start, end = (x[k], x[k + 1]) if forward else (x[k + 1], x[k])
            if y != last:
                parts.append(f"{'L' if parts else 'M'}{start:.1f} {y}")
            elif parts[-1].startswith("H"):
                parts.pop()
            parts.append(f"H{end:.1f}")
            last = y
    return "".join(parts) + "Z"


def curve_chart(
    title: str,
    points: Sequence[tuple[float, float, str]],
    x_label: str,
    y_label: str,
    marks: Sequence[tuple[float, str]] = (),
    missing: Sequence[float] = (),
) -> str:
    """Dots joined by a line, over a number.

    Args:
        title: Heading.
        points: (x, y, label) in order of x.
        x_label: What x is.
        y_label: What y is; the axis begins at zero.
        marks: (x, label) of vertical lines.
        missing: x without a y: crosses on the axis.
    """
    xs = [*(p[0] for p in points), *(m[0] for m in marks), *missing]
    if not xs:
        return _frame(title, _text(_WIDTH / 2, _HEIGHT / 2, "no values", "middle"))
    low, high = min(0.0, *xs), _round_top(max(xs), room=1.0)
    top = _round_top(max((p[1] for p in points), default=0.0))
    parts = [_axes(low, high, 0, top, x_label, y_label)]
    for k, (x, label) in enumerate(sorted(marks)):
        at, y = _x(x, low, high), _TOP + 12 + 13 * (k % 3)
        parts.append(f'<path d="M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#666" stroke-dasharray="4 3"/>')
        side = "start" if at < _WIDTH * 0.7 else "end"
        parts.append(_text(at + (4 if side == "start" else -4), y, label, side, _HALO))
    places = [(_x(x, low, high), _y(y, 0, top)) for x, y, _ in points]
    parts.append(f'<path d="{_path(places)}" fill="none" stroke="{_COLOURS[0]}" stroke-width="1.6"/>')
    for (px, py), (_, _, label) in zip(places, points, strict=True):
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.2" fill="{_COLOURS[0]}"/>')
        parts.append(_text(px + 4, py - 6, label, "start", 'font-size="9"') if label else "")
    bottom = _HEIGHT - _BOTTOM
    for x in missing:
        parts.append(_text(_x(x, low, high), bottom - 2, "\u00d7", "middle", 'fill="#a00" font-size="14"'))
    return _frame(title, "".join(parts))


def _bars(values: Sequence[float], low: float, high: float, bins: int, colour: str) -> str:
    counts = [0] * bins
    for v in values:
        counts[min(bins - 1, int((min(v, high) - low) / (high - low) * bins))] += 1
    top = max(counts) or 1
    width = (_WIDTH - _LEFT - _RIGHT) / bins
    rects = []
    for k, count in enumerate(counts):
        if count:
            h = (_HEIGHT - _TOP - _BOTTOM) * 0.9 * count / top
            place = (
                f'x="{_LEFT + k * width:.1f}" y="{_HEIGHT - _BOTTOM - h:.1f}" width="{width - 1:.1f}" height="{h:.1f}"'
            )
            rects.append(f'<rect {place} fill="{colour}" fill-opacity="0.55"/>')
    return "".join(rects)


def _thin(values: Sequence[float]) -> list[tuple[int, float]]:
    stride = max(1, math.ceil(len(values) / _LINE_POINTS))
    kept = list(enumerate(values))[::stride]
    return kept if not values or kept[-1][0] == len(values) - 1 else [*kept, (len(values) - 1, values[-1])]


def _path(points: Sequence[tuple[float, float | None]]) -> str:
    parts, pen_up = [], True
    for x, y in points:
        if y is None:
            pen_up = True
            continue
        parts.append(f"{'M' if pen_up else 'L'}{x:.1f} {y:.1f}")
        pen_up = False
    return "".join(parts)


def _padded(low: float, high: float) -> tuple[float, float]:
    return (low - 0.5, high + 0.5) if high <= low else (low, high + 0.02 * (high - low))


def _x(value: float, low: float, high: float) -> float:
    return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, low: float, high: float) -> float:
    return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _axes(x0: float, x1: float, y0: float, y1: float, x_label: str, y_label: str, y_ticks: bool = True) -> str:
    bottom = _HEIGHT - _BOTTOM
    parts = [f'<path d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH - _RIGHT}" fill="none" stroke="#888"/>']
    for k in range(5):
        x, y = x0 + (x1 - x0) * k / 4, y0 + (y1 - y0) * k / 4
        parts.append(
            _text(_x(x, x0, x1), bottom + 15, f"{x:.0f}" if isinstance(x1, int) and x1 >= 8 else f"{x:.4g}", "middle")
        )
        if y_ticks:
            parts.append(_text(_LEFT - 6, _y(y, y0, y1) + 4, f"{y:.4g}", "end"))
    parts.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 6, x_label, "middle"))
    turned = f'transform="rotate(-90 14 {_HEIGHT / 2})"'
    return "".join(parts) + _text(14, _HEIGHT / 2, y_label, "middle", turned)


def _legend(position: int, name: str) -> str:
    x = _LEFT + 150 * position
    line = f'x1="{x}" x2="{x + 20}" y1="22" y2="22" stroke="{_COLOURS[position % 4]}"'
    dash = f'stroke-width="3" stroke-dasharray="{_DASHES[position % 4]}"'
    return f"<line {line} {dash}/>" + _text(x + 26, 26, name, "start")


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{html.escape(text)}</text>'


def _frame(title: str, inside: str, height: float = _HEIGHT) -> str:
    label = html.escape(title, quote=True)
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    head = f'<text x="{_WIDTH / 2}" y="13" text-anchor="middle" font-weight="bold">{html.escape(title)}</text>'
    return f'<svg role="img" aria-label="{label}" {size} font-family="sans-serif" font-size="11">{head}{inside}</svg>'
