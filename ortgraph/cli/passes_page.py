"""docs/passes.md, made from the registry and the passes' docstrings: ``ortgraph passes --markdown``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ortgraph.graph import STAGES

_GROUPS = {
    "canonical": "Clean-up and folding",
    "fusion": "Fusion",
    "lowering": "Optimizer, lowering, fused kernels",
    "memory": "Memory",
}
_HEAD = """# Passes

Made from the passes themselves: `ortgraph passes --markdown > docs/passes.md`. `ortgraph passes NAME` shows one of them.
Names and options as written here go into `-p` and `parse_pipeline`; the presets stand at the end, the contract in
[writing-a-pass.md](writing-a-pass.md)."""


def markdown(passes: Sequence[Mapping[str, Any]], presets: Mapping[str, str]) -> str:
    """The page.

    Args:
        passes: Descriptions as ``ortgraph passes --json`` lists them; those of plugins are left out.
        presets: Text pipelines by name.
    """
    lines = [_HEAD]
    for group, title in _GROUPS.items():
        lines += ["", f"## {title}"]
        for described in passes:
            if described["module"].startswith(f"ortgraph.passes.{group}."):
                lines += _section(described)
    lines += ["", "## Presets", "", "With no optimizer and no sizes given; both add passes of their own."]
    seen: dict[str, str] = {}
    for name, pipeline in presets.items():
        same = seen.setdefault(pipeline, name)
        text = [f"The same as -{same}."] if same != name else ["```text", *_wrapped(pipeline), "```"]
        lines += ["", f"**-{name}**", "", *text]
    return "\n".join(lines) + "\n"


def _section(described: Mapping[str, Any]) -> Iterator[str]:
    path = described["module"].removeprefix("ortgraph.").replace(".", "/") + ".py"
    moves = f"; the graph is {described['sets_stage']} afterwards" if described["sets_stage"] else ""
    yield from ("", f"### {described['name']}", "")
    yield f"[{path}](../{path}). Runs at {_stages(described['stages'])}{moves}."
    meaning: dict[str, str] = {}
    for paragraph in described["doc"].replace("``", "`").split("\n\n"):
        head, _, rest = paragraph.partition("\n")
        if head == "Attributes:":
            meaning = dict(item.split(": ", 1) for item in _items(rest, r"\w+: "))
        elif head.endswith(":") and rest.startswith((" ", "- ")):
            yield from ("", head, "")
            yield from (f"- {item}" for item in _items(rest, "- " if "- " in rest[:8] else ""))
        else:
            yield from ("", paragraph)
    if described["options"]:
        yield from ("", "| option | type | default | meaning |", "|---|---|---|---|")
    for option in described["options"]:
        cells = (f"`{option['name']}`", option["type"], _value(option["default"]), meaning.get(option["name"], ""))
        yield f"| {' | '.join(c.replace('|', chr(92) + '|') for c in cells)} |"


def _stages(stages: Sequence[str]) -> str:
    if len(stages) == len(STAGES):
        return "any stage"
    return f"stage {stages[0]} to {stages[-1]}" if len(stages) > 2 else f"stage {' or '.join(stages)}"


def _items(block: str, start: str) -> list[str]:
    """Items of an indented block: each begins with ``start``, or after a line that ends in a full stop or semicolon."""
    items: list[str] = []
    for line in (raw.strip() for raw in block.splitlines()):
        begins = re.match(start, line) is not None if start else not items or items[-1].endswith((".", ";"))
        text = line.removeprefix("- ")
        if begins or not items:
            items.append(text)
        else:
            items[-1] += f" {text}"
    return items


def _value(default: Any) -> str:
    if default in ("", ()):
        return ""
    return f"`{'|'.join(map(str, default)) if isinstance(default, tuple) else default}`"


def _wrapped(pipeline: str) -> list[str]:
    """The text pipeline, four passes a line."""
    passes = re.split(r",(?![^{]*\})", pipeline)
    return [",".join(passes[i : i + 4]) + ("," if i + 4 < len(passes) else "") for i in range(0, len(passes), 4)]
