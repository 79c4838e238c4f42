from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest

from ortgraph.errors import PassError, PipelineSyntaxError
from ortgraph.manager import GraphPass, load_plugin, parse_pipeline, pipeline_text, registry


@dataclasses.dataclass(frozen=True)
class Options(GraphPass):
    name: ClassVar[str] = "test-options"
    flag: bool = False
    count: int = 3
    ratio: float = 0.5
    mode: str = "none"
    axes: tuple[int, ...] = ()
    limit: int | None = None


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(registry, "_plugins", {"test-options": Options})


@pytest.mark.parametrize(
    "p",
    [Options(), Options(flag=True, count=-4), Options(ratio=1e-3, mode="tanh"), Options(axes=(1, 2)), Options(limit=7)],
)
def test_round_trip(p):
    assert parse_pipeline(str(p)) == (p,)
    assert parse_pipeline(pipeline_text([p, Options(), p])) == (p, Options(), p)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("test-option", "did you mean test-options"),
        ("test-options{speed=1}", "no option 'speed=1'"),
        ("test-options{flag=maybe}", "is bool"),
        ("test-options{count=1.5}", "is int"),
        ("test-options{count=1", "column 1"),
        ("test-options,,test-options", "column 14"),
        ("test-options,", "ends with a comma"),
        ("9lives", "column 1"),
    ],
)
def test_errors(text, words):
    with pytest.raises(PipelineSyntaxError, match=words):
        parse_pipeline(text)


def test_empty_pipeline():
    assert parse_pipeline("  ") == ()


def test_register_refuses_a_second_pass_of_a_name():
    @dataclasses.dataclass(frozen=True)
    class Other(GraphPass):
        name: ClassVar[str] = "test-options"

    with pytest.raises(PassError, match="exists already"):
        registry.register(Other)


def test_plugin_file(tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from ortgraph.manager import fusion\n"
        "def pattern(op, x):\n    return op.Neg(op.Neg(x))\n"
        "@fusion('cancel-neg', pattern)\n"
        "def CancelNeg(op, x):\n    return x\n"
    )
    assert [c.name for c in load_plugin(plugin)] == ["cancel-neg"]
    assert parse_pipeline("cancel-neg")[0].name == "cancel-neg"
