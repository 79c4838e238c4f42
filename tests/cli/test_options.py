"""The little languages of option values."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest

from ortgraph.cli import options
from ortgraph.cli.optional_values import join_optional_values
from ortgraph.errors import InputError, PipelineSyntaxError


def test_sizes():
    assert options.parse_sizes("batch=8, sequence=128") == {"batch": 8, "sequence": 128}
    assert options.parse_sizes(None) == options.parse_sizes("") == {}


@pytest.mark.parametrize(
    "text", ["batch", "batch=", "batch=x", "batch=0", "batch=-1", "=8", "batch=8,", "a=1,a=2", "a b=1", "b=1.5"]
)
def test_bad_sizes_name_the_form(text):
    with pytest.raises(InputError, match="--shapes") as caught:
        options.parse_sizes(text)
    assert caught.value.hint


def test_dynamic():
    assert options.parse_dynamic(["x:0=batch,1=sequence", "y:0=batch"]) == {
        "x": {0: "batch", 1: "sequence"},
        "y": {0: "batch"},
    }


@pytest.mark.parametrize(
    "texts", [["x"], ["x:"], ["x:0"], ["x:a=batch"], ["x:0=1b"], ["x:0=a,0=b"], ["x:0=a", "x:1=b"], [":0=a"]]
)
def test_bad_dynamic(texts):
    if texts == ["x:"]:
        assert options.parse_dynamic(texts) == {"x": {}}
        return
    with pytest.raises(InputError, match="--dynamic"):
        options.parse_dynamic(texts)


def test_optimizer():
    from ortgraph.optim import AdamW

    assert options.parse_optimizer(None) is None
    assert options.parse_optimizer("AdamW") == AdamW()
    want = AdamW(lr=1e-3, betas=(0.8, 0.95), no_decay=("*.bias", "*norm*"))
    assert options.parse_optimizer("adamw{lr=1e-3 betas=0.8|0.95 no_decay=*.bias|*norm*}") == want
    assert options.parse_optimizer(str(want)) == want


@pytest.mark.parametrize(
    "text", ["adam", "adamw{", "adamw{lr}", "adamw{lr=x}", "adamw{rate=1}", "sgd{betas=0.9|0.9}", "adamw lr=1", ""]
)
def test_bad_optimizer(text):
    with pytest.raises(InputError):
        options.parse_optimizer(text)


def test_unknown_optimizer_names_the_near_one():
    with pytest.raises(InputError) as caught:
        options.parse_optimizer("adam")
    assert "adamw" in caught.value.hint


def test_preset():
    assert options.pipeline_of(2, None) == "O2"
    assert options.pipeline_of(2, "a,b") == "a,b"
    with pytest.raises(PipelineSyntaxError, match="O7"):
        options.pipeline_of(7, None)


def test_print_after_may_stand_alone():
    known = "eliminate-dead-code"
    assert join_optional_values(["--print-after", "in.onnx"]) == ["--print-after=every", "in.onnx"]
    assert join_optional_values(["--print-after", known, "in.onnx"]) == [f"--print-after={known}", "in.onnx"]
    assert join_optional_values([f"--print-after={known}"]) == [f"--print-after={known}"]
    assert join_optional_values(["--", "--print-after"]) == ["--", "--print-after"]


class TestOutputPath:
    def test_the_input_is_refused_under_any_name(self, tmp_path):
        source = tmp_path / "a.onnx"
        source.write_text("x")
        link = tmp_path / "b.onnx"
        link.symlink_to(source)
        hard = tmp_path / "c.onnx"
        os.link(source, hard)
        for name in (source, link, hard, tmp_path / "." / "a.onnx"):
            with pytest.raises(InputError, match="never overwritten"):
                options.check_output(name, [source], suffix=".onnx")
        assert options.check_output(source, [source], suffix=".onnx", force=True) == source

    @pytest.mark.parametrize(
        ("name", "reason"), [("a.txt", "is a .onnx file"), ("no/a.onnx", "no such folder"), ("d.onnx", "is a folder")]
    )
    def test_what_cannot_be_written(self, tmp_path, name, reason):
        (tmp_path / "d.onnx").mkdir()
        with pytest.raises(InputError, match=reason):
            options.check_output(tmp_path / name, [], suffix=".onnx")

    def test_an_empty_name(self):
        with pytest.raises(InputError, match="has no name"):
            options.check_output(pathlib.Path(""), [], suffix=".onnx")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_folder_without_permission(self, tmp_path):
        tmp_path.chmod(0o500)
        with pytest.raises(InputError, match="permission"):
            options.check_output(tmp_path / "a.onnx", [], suffix=".onnx")


def test_batch_file(tmp_path, linear_graph):
    path = tmp_path / "batch.npz"
    x = np.ones((4, 3), np.float32)
    np.savez(path, x=x)
    np.testing.assert_array_equal(options.batch_of(linear_graph, {}, path)["x"], x)
    np.savez(path, z=x)
    with pytest.raises(InputError, match="no array 'x'"):
        options.batch_of(linear_graph, {}, path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(InputError, match="not a readable"):
        options.batch_of(linear_graph, {}, path)
    path.write_text("no zip")
    with pytest.raises(InputError, match="not a readable"):
        options.batch_of(linear_graph, {}, path)
    with pytest.raises(InputError, match="no such file"):
        options.batch_of(linear_graph, {}, tmp_path / "absent.npz")
