"""``ortgraph passes``: the passes and presets, or one of them in full."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import typing
from typing import Annotated, Any

import typer

from ortgraph.cli import options, passes_page
from ortgraph.cli.output import Output, verb


@verb
def run(
    name: Annotated[str | None, typer.Argument(help="Show this pass in full.")] = None,
    plugin: Annotated[
        list[pathlib.Path], typer.Option("--plugin", metavar="FILE", help="Load passes of a Python file first.")
    ] = [],  # noqa: B006
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/passes.md.")] = False,
    as_json: bool = options.JSON,
) -> None:
    """List the passes with their stages, or show one: what it does, when it refuses, its options."""
    from ortgraph.manager import registry

    out = Output(as_json)
    for path in plugin:
        registry.load_plugin(path)
    if name is not None:
        _show(out, _describe(registry.get(name)))
        return
    known = [_try_describe(n) for n in registry.names()]
    presets = {n: _preset_text(n) for n in registry.preset_names()}
    if markdown:
        out.say(passes_page.markdown(known, presets).rstrip())
    else:
        rows = [(p["name"], p["summary"], " ".join(p["stages"])) for p in known]
        out.table("Passes", ("name", "what it does", "stages"), rows)
        out.table("Presets (-O0 ... -O3)", ("name", "pipeline"), presets.items())
    out.result({"passes": known, "presets": presets})


def _try_describe(name: str) -> dict[str, Any]:
    """A pass of a plugin that does not import is listed with the reason, so that it does not hide the others."""
    from ortgraph.manager import registry

    try:
        return _describe(registry.get(name))
    except Exception as error:  # noqa: BLE001 - an installed plugin may raise anything at import
        return {
            "name": name,
            "summary": f"cannot be loaded: {error}",
            "stages": [],
            "options": [],
            "doc": "",
            "module": "",
        }


def _describe(cls: type) -> dict[str, Any]:
    doc = inspect.getdoc(cls) or ""
    hints = typing.get_type_hints(cls)
    fields = [
        {"name": f.name, "type": _type_text(hints[f.name]), "default": _default(f)} for f in dataclasses.fields(cls)
    ]
    return {
        "name": cls.name,  # type: ignore[attr-defined]
        "summary": doc.split("\n\n")[0].replace("\n", " "),
        "stages": list(cls.stages),  # type: ignore[attr-defined]
        "sets_stage": cls.sets_stage,  # type: ignore[attr-defined]
        "options": fields,
        "doc": doc,
        "module": cls.__module__,
    }


def _type_text(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _preset_text(name: str) -> str:
    from ortgraph.manager import registry
    from ortgraph.manager.pipeline_text import pipeline_text

    passes = registry.preset(name, optimizer=None, target="onnxruntime-training", shapes={}, accumulation_steps=1)
    return pipeline_text(passes)


def _show(out: Output, described: dict[str, Any]) -> None:
    out.say(f"{described['name']}  ({described['module']})\n")
    out.say(described["doc"] + "\n")
    moves = f", the graph is {described['sets_stage']} afterwards" if described["sets_stage"] else ""
    out.say(f"runs at stage {', '.join(described['stages'])}{moves}")
    if described["options"]:
        out.table(
            "Options",
            ("option", "type", "default"),
            [(o["name"], o["type"], o["default"]) for o in described["options"]],
        )
    out.result(described)
