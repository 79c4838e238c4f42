"""Text pipelines: ``eliminate-dead-code,fuse-gelu{approximate=tanh}`` to passes and back."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterable

import onnx_ir as ir

from ortgraph.errors import PipelineSyntaxError
from ortgraph.manager import registry
from ortgraph.manager.base import GraphPass

_PASS = re.compile(r"\s*(?P<name>[A-Za-z][\w-]*)\s*(?:\{(?P<options>[^{}]*)\})?\s*(?P<end>,|$)")


def parse_pipeline(text: str) -> tuple[GraphPass, ...]:
    """Passes of a text pipeline; options stand in braces, separated by spaces.

    Raises:
        PipelineSyntaxError: With the position, for anything that does not parse or is unknown.
    """
    passes, at = [], 0
    if not text.strip():
        return ()
    while at < len(text):
        found = _PASS.match(text, at)
        if found is None:
            raise PipelineSyntaxError(
                f"pipeline does not parse at column {at + 1}: ...{text[at : at + 30]!r}",
                "name{option=value other=value},name",
            )
        passes.append(_make(found["name"], found["options"] or ""))
        at = found.end()
        if found["end"] == "," and at >= len(text.rstrip()):
            raise PipelineSyntaxError("the pipeline ends with a comma", "remove it")
    return tuple(passes)


def pipeline_text(passes: Iterable[ir.passes.PassBase]) -> str:
    """The text that parses back to equal passes. A foreign pass shows as its class name."""
    return ",".join(str(p) if isinstance(p, GraphPass) else type(p).__name__ for p in passes)


def _make(name: str, options: str) -> GraphPass:
    cls = registry.get(name)
    hints = typing.get_type_hints(cls)
    fields = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    values = {}
    for item in options.split():
        key, equals, value = item.partition("=")
        key = key.replace("-", "_")
        if not equals or key not in fields:
            known = ", ".join(sorted(fields)) or "none"
            raise PipelineSyntaxError(f"pass {name!r} has no option {item!r}", f"its options: {known}")
        values[key] = _parse(name, key, value, fields[key])
    try:
        return cls(**values)
    except TypeError as error:
        raise PipelineSyntaxError(f"pass {name!r}: {error}", "give the missing option") from error


def _parse(name: str, key: str, text: str, hint: object) -> object:
    """One option value by the field's type: bool, int, float, str, tuple of these, or any of them with None."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if text == "none":
            return None
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
        origin = typing.get_origin(hint)
    if origin is tuple:
        inner = typing.get_args(hint)[0]
        return tuple(_parse(name, key, part, inner) for part in text.split("|") if part)
    if hint is bool and text in ("true", "false"):
        return text == "true"
    if hint in (int, float, str):
        try:
            return hint(text)
        except ValueError:
            pass
    expected = getattr(hint, "__name__", str(hint))
    raise PipelineSyntaxError(f"option {key} of pass {name!r} is {expected}, not {text!r}", f"{name}{{{key}=...}}")
