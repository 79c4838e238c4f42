"""``ortgraph export`` and ``ortgraph train``."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

from ortgraph.capture.build_spec import load_build
from ortgraph.graph import load


def torch_losses(build_file, steps: int) -> list[float]:
    """The same training in PyTorch."""
    spec = load_build(f"{build_file}:build")
    optimizer = torch.optim.AdamW(spec.module.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = spec.module(**spec.data[step % len(spec.data)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def edit(build_file, old: str, new: str) -> str:
    text = build_file.read_text()
    assert old in text
    build_file.write_text(text.replace(old, new))
    return f"{build_file}:build"


def test_export(cli, build_file, tmp_path):
    out = tmp_path / "train.onnx"
    ran = cli(
        "export",
        f"{build_file}:build",
        "-o",
        out,
        "--dynamic",
        "x:0=batch",
        "--dynamic",
        "y:0=batch",
        "--opset",
        20,
        "--json",
    )
    assert ran.code == 0, ran.err
    assert ran.json["inputs"] == {"x": "f32[batch,8]", "y": "i64[batch]"} and ran.json["trainable"] == 4
    graph = load(out)
    assert (
        graph.stage == "captured" and graph.graph.opset_imports[""] == 20 and out.with_suffix(".safetensors").exists()
    )


def test_export_mistakes(cli, build_file, tmp_path):
    out = tmp_path / "train.onnx"
    for words, message in (
        (("--dynamic", "z:0=batch"), "'z'"),
        (("--dynamic", "x=batch"), "--dynamic"),
        (("--loss", "mse"), "MODEL.onnx"),
    ):
        ran = cli("export", f"{build_file}:build", "-o", out, *words)
        assert ran.code == 2 and message in ran.err and "Traceback" not in ran.err, words
    assert cli("export", f"{build_file}:build", "-o", out, "--opset", 12).code == 2
    assert not out.exists()


def test_a_model_without_loss(cli, build_file, tmp_path):
    target = edit(
        build_file,
        "return nn.functional.cross_entropy(self.down(nn.functional.gelu(self.up(x))), y)",
        "return self.down(self.up(x))",
    )
    ran = cli("export", target, "-o", tmp_path / "o.onnx")
    assert ran.code == 2 and "loss" in ran.err and "Traceback" not in ran.err


def test_export_of_an_onnx_model(cli, tmp_path):
    h = onnx.helper
    weight = onnx.numpy_helper.from_array(np.ones((8, 4), np.float32), "w")
    x, y = (h.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in (("x", [2, 8]), ("logits", [2, 4])))
    graph = h.make_graph([h.make_node("MatMul", ["x", "w"], ["logits"])], "g", [x], [y], [weight])
    path, out = tmp_path / "forward.onnx", tmp_path / "train.onnx"
    onnx.save_model(h.make_model(graph, opset_imports=[h.make_opsetid("", 18)], ir_version=9), path)
    ran = cli("export", path, "-o", out, "--loss", "cross_entropy", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["trainable"] == 1 and "labels" in ran.json["inputs"] and load(out).signature.outputs == ("logits",)
    ran = cli("export", path, "-o", tmp_path / "o.onnx", "--loss", "crossentropy")
    assert ran.code == 2 and "Traceback" not in ran.err
    ran = cli("export", path, "-o", path, "--loss", "cross_entropy")
    assert ran.code == 2 and "never overwritten" in ran.err


def test_losses_are_pytorchs(cli, build_file):
    ran = cli("train", f"{build_file}:build", "--steps", 10, "--json")
    assert ran.code == 0, ran.err
    np.testing.assert_allclose(ran.json["losses"], torch_losses(build_file, 10), rtol=1e-5)
    assert ran.json["steps"] == 10 and ran.json["evaluation"]["loss"] > 0


def test_one_pass_over_the_data_by_default(cli, build_file):
    assert cli("train", f"{build_file}:build", "--json").json["steps"] == 4
    assert cli("train", f"{build_file}:build", "--batches", 2, "--no-optimize", "--json").json["steps"] == 2


def test_resume_goes_on_as_if_never_stopped(cli, build_file, tmp_path):
    target, folder = f"{build_file}:build", tmp_path / "checkpoint"
    whole = cli("train", target, "--steps", 7, "--json").json["losses"]
    first = cli("train", target, "--steps", 3, "--checkpoint", folder, "--json").json["losses"]
    second = cli("train", target, "--steps", 7, "--checkpoint", folder, "--resume", "--json")
    assert second.code == 0, second.err
    assert first + second.json["losses"] == whole, "bit for bit"
    again = cli("train", target, "--steps", 7, "--checkpoint", folder, "--resume")
    assert again.code == 0 and "7 steps are done" in again.err


def test_checkpoint_mistakes(cli, build_file, tmp_path):
    target = f"{build_file}:build"
    assert "--checkpoint" in cli("train", target, "--resume").err
    assert "no such checkpoint" in cli("train", target, "--resume", "--checkpoint", tmp_path / "absent").err
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    ran = cli("train", target, "--steps", 1, "--checkpoint", other)
    assert ran.code == 2 and "no checkpoint" in ran.err and (other / "mine.txt").read_text() == "mine"


def test_a_loss_that_is_not_finite(cli, build_file, tmp_path):
    folder = tmp_path / "checkpoint"
    target = edit(build_file, "return {", "data[2]['x'][0, 0] = float('nan')\n    return {")
    ran = cli("train", target, "--checkpoint", folder)
    assert ran.code == 4 and "nan" in ran.err and "step 3" in ran.err and "Traceback" not in ran.err
    assert not folder.exists(), "no checkpoint of spoiled weights"


def test_an_evaluation_whose_loss_is_not_finite(cli, build_file, tmp_path):
    folder = tmp_path / "checkpoint"
    spoiled = "data[1] = {**data[1], 'x': data[1]['x'] * float('nan')}\n    return {"
    target = edit(build_file, "return {", spoiled)
    ran = cli("train", target, "--steps", 1, "--checkpoint", folder)
    assert ran.code == 4 and "evaluation after step 1 is nan" in ran.err and "Traceback" not in ran.err
    assert not folder.exists(), "no checkpoint of spoiled weights"
    target = edit(build_file, '"evaluate": data[:2]', '"evaluate": lambda session: 1 / 0')
    assert cli("train", target, "--steps", 1, "--checkpoint", folder).code == 2
    assert folder.exists(), "a mistake in the evaluation does not lose the training"


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        ("data[1]['x'] = data[1]['x'].double()", "float64"),
        ("data[1]['x'] = torch.randn(6, 9)", "x"),
        ("data[1]['y'] = data[1]['y'].float()", "float32"),
        ("data[1]['z'] = data[1].pop('y')", "z"),
    ],
)
def test_a_batch_that_does_not_fit(cli, build_file, spoiled, message):
    ran = cli("train", edit(build_file, "return {", f"{spoiled}\n    return {{"))
    assert ran.code == 2 and message in ran.err and "Traceback" not in ran.err


def test_data_that_can_be_read_once(cli, build_file):
    target = edit(build_file, '"data": data', '"data": iter(data)')
    assert cli("train", target).code == 0
    ran = cli("train", target, "--steps", 9)
    assert ran.code == 2 and "no batch" in ran.err


def test_own_evaluation_and_inference_model(cli, build_file, tmp_path):
    model = tmp_path / "model.onnx"
    target = edit(build_file, '"evaluate": data[:2]', '"evaluate": lambda session: {"steps": session.steps}')
    ran = cli("train", target, "--export-inference", model, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["evaluation"] == {"steps": 4.0} and model.exists()
    target = edit(build_file, '{"steps": session.steps}', "1 / 0")
    ran = cli("train", target)
    assert ran.code == 2 and "evaluate: ZeroDivisionError" in ran.err and "Traceback" not in ran.err


def test_a_torch_optimizer_is_refused(cli, build_file):
    target = edit(build_file, "AdamW(lr=1e-2)", "torch.optim.SGD(Net().parameters(), lr=1.0)")
    ran = cli("train", target)
    assert ran.code == 2 and "'optimizer' is SGD" in ran.err


def test_a_training_graph_is_not_exported_again(cli, graph_file, tmp_path):
    ran = cli("export", graph_file, "-o", tmp_path / "o.onnx", "--loss", "loss")
    assert ran.code == 2 and "training graph already" in ran.err


def test_evaluation_mode_is_one_line_of_warning(cli, build_file):
    edit(build_file, "self.up(x)", "self.drop(self.up(x))")
    edit(build_file, "        self.up, self", "        self.drop = nn.Dropout(0.1)\n        self.up, self")
    target = edit(build_file, '"module": Net()', '"module": Net().eval()')
    ran = cli("train", target, "--steps", 1)
    assert ran.code == 0 and ran.err.splitlines() == [
        "warning: Net is in evaluation mode, and so is its Dropout: call module.train() before capture, "
        "unless that is meant"
    ]


def test_a_graph_is_no_build_file(cli):
    ran = cli("train", "train.onnx")
    assert ran.code == 2 and "ortgraph.TrainingSession(ortgraph.load(path))" in ran.err


def test_a_target_that_cannot_train_is_refused_before_any_work(cli, build_file):
    ran = cli("train", f"{build_file}:build", "--target", "moon")
    assert ran.code == 2 and "--target: unknown target 'moon'" in ran.err
    ran = cli("train", f"{build_file}:build", "--target", "onnxruntime:migraphx")
    assert ran.code != 0 and "MIGraphXExecutionProvider" in ran.err and "Traceback" not in ran.err


def test_optimize_takes_a_target_on_a_device(cli, graph_file, tmp_path):
    out = tmp_path / "o.onnx"
    assert cli("optimize", graph_file, "-o", out, "--target", "onnxruntime-training:cuda").code == 0
    made = load(out)
    assert made.stage == "planned" and {n.domain for n in made.graph} <= {"", "ai.onnx", "com.microsoft"}
