"""Charts as inline SVG: no script, no external resource, readable without colour."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 16, 30, 40
_COLOURS = ("#1f6f8b", "#c8553d", "#5b8c5a", "#7b5ea7")
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
        parts.append(_text(_x(x, x0, x1), bottom + 15, f"{x:.4g}", "middle"))
        if y_ticks:
            parts.append(_text(_LEFT - 6, _y(y, y0, y1) + 4, f"{y:.3g}", "end"))
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
