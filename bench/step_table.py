"""Tables of the step benchmark, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.step_rows import PEAK_TARGETS, Result, Row, peaks, results


def dearest_first(rows: Sequence[Row]) -> str:
    """The rows of one workload, our figures in the title."""
    if not rows:
        return ""
    good = [r for r in rows if r.ms_ortgraph is not None]
    title = f"\n{rows[0].workload}, {rows[0].precision}"
    if good:
        title += f": ortgraph {good[0].ms_ortgraph:.1f} ms"
        if good[0].peak_fraction is not None:
            title += f", {good[0].peak_fraction:.0%} of the matrix peak"
    errors = {r.error for r in rows}
    if not good and len(errors) == 1:
        return f"{title}: failed, {errors.pop()}"
    lines = [title]
    for r in sorted(rows, key=lambda r: -(r.ratio_median or 0.0)):
        name = " ".join(w for w in (r.peer, r.form and f"({r.form} attention)", r.setting) if w)
        if r.ratio_median is None:
            lines.append(f"  {name:44} failed: {r.error}")
            continue
        spread = f"({r.ratio_low:.2f} to {r.ratio_high:.2f})"
        lines.append(f"  {name:44} {r.ms_peer:8.1f} ms  {r.ratio_median:5.2f} x ortgraph's time {spread}")
    return "\n".join(lines)


def targets_table(rows: Iterable[Row]) -> str:
    """What the rows come to, with the targets beside."""
    rows = list(rows)
    lines = [f"\n{'gain over':46} {'geometric mean':>22} {'worst workload':>34}"]
    lines += [_line(r) for r in results(rows)]
    for key, share in sorted(peaks(rows).items()):
        asked = f"(target {PEAK_TARGETS[key]:.0%})" if key in PEAK_TARGETS else ""
        lines.append(f"matrix peak, {key[0]}, {key[1]}: {share:.0%} {asked}".rstrip())
    return "\n".join(lines)


def _line(result: Result) -> str:
    target = result.target
    name = f"{target.against}, {target.precision}" if target.precision not in target.against else target.against
    mean = f"{result.mean:.2f} (target {target.mean:g})" if result.mean is not None else f"- (target {target.mean:g})"
    worst = ""
    if result.worst is not None and target.worst is not None:
        worst = f"{result.worst[1]:.2f} {result.worst[0]} (target {target.worst:g})"
    line = f"{name:46} {mean:>22} {worst:>34}  {'met' if result.met else 'short'}"
    return line + (f", missing: {', '.join(result.missing)}" if result.missing else "")
