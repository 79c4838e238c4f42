"""Plugin files as people write them, and broken ones."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir
import pytest

from ortgraph.errors import InputError, PassError
from ortgraph.manager import GraphPass, PassManager, load_plugin, registry
from ortgraph.manager.base import Changes

PLUGIN = '''
from __future__ import annotations

import dataclasses
from typing import ClassVar

from ortgraph.manager import GraphPass
from ortgraph.manager.base import Changes


@dataclasses.dataclass(frozen=True)
class Nothing(GraphPass):
    """Does nothing."""

    name: ClassVar[str] = "NAME"
    after: ClassVar[str] = "captured"
    often: int = 1

    def run(self, graph) -> Changes:
        return Changes()
'''


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(registry, "_plugins", {})


@pytest.mark.parametrize("file", ["plain.py", "no_suffix", "text.txt", "two.dots.py"])
def test_postponed_annotations_and_any_file_name(file, tmp_path):
    path = tmp_path / file
    path.write_text(PLUGIN.replace("NAME", "does-nothing"))
    for _ in range(2):  # again is no conflict
        (cls,) = load_plugin(path)
        assert registry.get("does-nothing") is cls and dataclasses.fields(cls)[0].name == "often"


def test_two_files_of_one_name_do_not_replace_each_other(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "plugin.py").write_text(PLUGIN.replace("NAME", "does-nothing"))
    load_plugin(tmp_path / "a" / "plugin.py")
    with pytest.raises(PassError, match="exists already"):
        load_plugin(tmp_path / "b" / "plugin.py")


@pytest.mark.parametrize("text", ["raise SystemExit(0)", "import sys; sys.exit()", "1 +", "import nowhere", "x = 1"])
def test_broken_files_are_one_error(text, tmp_path):
    (tmp_path / "plugin.py").write_text(text)
    with pytest.raises(InputError, match="plugin.py"):
        load_plugin(tmp_path / "plugin.py")


def test_a_pass_that_exits_is_an_error_and_not_the_end():
    class Exits(ir.passes.InPlacePass):
        def call(self, model):
            raise SystemExit(0)

    class Own(GraphPass):
        name = "exits"

        def run(self, graph) -> Changes:
            raise SystemExit(0)

    from ortgraph.graph import Signature, TrainingGraph

    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=[2])
    node = ir.node("ReduceSum", [x], attributes={"keepdims": 0}, name="sum")
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "loss", ir.TensorType(x.dtype), ir.Shape([])
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 18}, name="g")
    training = TrainingGraph(ir.Model(graph, ir_version=10), Signature(inputs=("x",), outputs=("loss",), loss="loss"))
    for made in (Exits(), Own()):
        with pytest.raises(PassError, match="SystemExit"):
            PassManager((made,)).run(training)


def test_a_pass_that_returns_nothing_is_named(tmp_path):
    path = tmp_path / "plugin.py"
    path.write_text(PLUGIN.replace("NAME", "forgets").replace("return Changes()", "pass"))
    (cls,) = load_plugin(path)
    with pytest.raises(PassError, match="run of pass 'forgets' returned NoneType"):
        cls().call(ir.Model(ir.Graph([], [], nodes=[]), ir_version=10))
