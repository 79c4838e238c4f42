"""One HTML file without scripts and external resources: sections of text, tables and charts."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_STYLE = """
body { font: 15px/1.5 sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; margin: .6rem 0; } caption { text-align: left; font-weight: bold; }
th, td { padding: .15rem .7rem; text-align: left; border-bottom: 1px solid #e4e4e4; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; } .figures div { background: #f3f5f6; padding: .6rem 1rem; }
.figures b { display: block; font-size: 1.3rem; }
svg { max-width: 100%; height: auto; display: block; margin: .8rem 0; }
code, td.c { font-family: monospace; font-size: .92em; overflow-wrap: anywhere; } p.note { color: #555; }
"""


class Page:
    """A page under construction. Every text is escaped; only ``add_chart`` takes markup."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts: list[str] = []

    def section(self, title: str) -> None:
        """Start a section."""
        self._parts.append(f"<h2>{html.escape(title)}</h2>")

    def text(self, text: str, note: bool = False) -> None:
        """A paragraph; a note is less prominent."""
        self._parts.append(f"<p{' class=note' if note else ''}>{html.escape(text)}</p>")

    def figures(self, pairs: Iterable[tuple[str, str]]) -> None:
        """(name, value) pairs in large type."""
        cells = "".join(f"<div><b>{html.escape(v)}</b>{html.escape(n)}</div>" for n, v in pairs)
        self._parts.append(f'<div class="figures">{cells}</div>')

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> None:
        """A table; ``right`` holds the positions of number columns. Without rows it says so."""
        body = [_row("td", row, right) for row in rows]
        if not body:
            self.text("none", note=True)
            return
        self._parts.append(f"<table>{_row('th', columns, right)}{''.join(body)}</table>")

    def add_chart(self, svg: str) -> None:
        """A chart of ``ortgraph.report.svg``."""
        self._parts.append(svg)

    def render(self) -> str:
        """The whole file."""
        title = html.escape(self.title)
        head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        body = f"<h1>{title}</h1>{''.join(self._parts)}"
        return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _row(tag: str, cells: Sequence[object], right: Sequence[int]) -> str:
    marked = (f"<{tag}{' class=n' if i in right else ''}>{html.escape(str(c))}</{tag}>" for i, c in enumerate(cells))
    return f"<tr>{''.join(marked)}</tr>"
