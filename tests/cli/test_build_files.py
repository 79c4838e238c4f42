"""``file.py:build``: what is accepted, and that a user's mistake shows the user's own lines only."""

from __future__ import annotations

import pytest
import torch

from ortgraph.capture.build_spec import load_build, split_target
from ortgraph.errors import InputError

HEAD = "import torch\nmodule = torch.nn.Linear(2, 1)\nbatch = (torch.ones(3, 2),)\n"


def write(folder, text, name="model.py"):
    path = folder / name
    path.write_text(text)
    return path


def test_everything_is_read(build_file):
    spec = load_build(f"{build_file}:build")
    assert isinstance(spec.module, torch.nn.Module) and spec.optimizer.lr == 1e-2 and spec.loss is None
    assert len(list(spec.batches())) == 4 and len(list(spec.batches(limit=3))) == 3


def test_the_function_may_be_left_out(build_file):
    assert split_target(str(build_file)) == (build_file, "build")
    assert split_target(f"{build_file}:other") == (build_file, "other")


def test_without_data_the_example_batch_is_used(tmp_path):
    path = write(tmp_path, HEAD + "def build(): return dict(module=module, batch=batch)")
    assert len(list(load_build(str(path)).batches())) == 1


def test_neighbours_can_be_imported(tmp_path):
    write(tmp_path, "WIDTH = 2", "neighbour_of_build.py")
    path = write(
        tmp_path, HEAD + "from neighbour_of_build import WIDTH\ndef build(): return dict(module=module, batch=batch)"
    )
    load_build(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "no function called 'build'"),
        ("def biuld(): pass", "no function called 'build'"),
        ("build = 3", "no function called 'build'"),
        ("def build(): return 3", "returned int"),
        (HEAD + "def build(): return dict(module=module)", "no 'batch'"),
        (HEAD + "def build(): return dict(batch=batch)", "no 'module'"),
        (HEAD + "def build(): return dict(module=module, batch=batch, optimiser=1)", "unknown entry 'optimiser'"),
        (HEAD + "def build(): return dict(module='m', batch=batch)", "'module' is str"),
        (HEAD + "def build(): return dict(module=module, batch=batch, data=3)", "'data' is int"),
        (HEAD + "def build(x): return 1", "TypeError"),
    ],
)
def test_mistakes(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        load_build(str(write(tmp_path, text)))


def test_near_names_are_offered(tmp_path):
    with pytest.raises(InputError) as caught:
        load_build(str(write(tmp_path, "def biuld(): pass")))
    assert "biuld" in caught.value.hint
    with pytest.raises(InputError) as caught:
        load_build(str(write(tmp_path, HEAD + "def build(): return dict(module=module, batch=batch, optimiser=1)")))
    assert "'optimizer'" in caught.value.hint


@pytest.mark.parametrize("target", ["model", "model.txt:build", "model.py:", "model.py:not a name", "absent.py:build"])
def test_targets_that_name_no_function(target):
    with pytest.raises(InputError):
        load_build(target)


def test_what_raises_shows_the_users_lines(cli, tmp_path):
    path = write(tmp_path, "def helper():\n    return 1 / 0\n\n\ndef build():\n    return helper()\n")
    ran = cli("export", f"{path}:build", "-o", tmp_path / "o.onnx")
    assert ran.code == 2 and "Traceback" not in ran.err
    assert "ZeroDivisionError: division by zero" in ran.err
    assert f"{path}:6 in build" in ran.err and f"{path}:2 in helper" in ran.err and "return 1 / 0" in ran.err
    assert "build_spec.py" not in ran.err and "ortgraph/" not in ran.err.replace(str(tmp_path), "")


def test_a_syntax_error_shows_its_line(cli, tmp_path):
    path = write(tmp_path, "def build():\n    return (\n")
    ran = cli("export", str(path), "-o", tmp_path / "o.onnx")
    assert ran.code == 2 and f"{path}:2" in ran.err and "Traceback" not in ran.err


def test_a_missing_import_shows_its_line(cli, tmp_path):
    path = write(tmp_path, "import not_a_module_at_all\n")
    ran = cli("export", str(path), "-o", tmp_path / "o.onnx")
    assert ran.code == 2 and f"{path}:1" in ran.err and "Traceback" not in ran.err


def test_data_that_raises(tmp_path):
    data = "def data():\n    yield batch\n    raise RuntimeError('disk')\n"
    text = HEAD + data + "def build(): return dict(module=module, batch=batch, data=data())"
    spec = load_build(str(write(tmp_path, text)))
    with pytest.raises(InputError, match="data: RuntimeError: disk"):
        list(spec.batches())
