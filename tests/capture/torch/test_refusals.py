"""Every refusal is one sentence with its place and what to try."""

from __future__ import annotations

import json
import re
import warnings

import pytest
import torch
import typer.testing
from torch import nn

import ortgraph
from ortgraph.capture import torch_capture
from ortgraph.capture.torch_obstacles import find_obstacles
from ortgraph.capture.torch_step import EvaluationModeWarning
from ortgraph.errors import CaptureError, InputError, RuntimeSetupError, UnsupportedError

# --- errors ------------------------------------------------------------------------------------------------------


def test_operator_without_rule_is_named_with_its_place():
    class Sub(nn.Module):
        def forward(self, x):
            return torch.linalg.qr(x).R

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.inner = nn.Parameter(torch.ones(3, 3)), Sub()

        def forward(self, x):
            return (self.inner(x) * self.w).sum()

    with pytest.raises(UnsupportedError, match=r"linalg_qr.*module inner.*test_refusals\.py:\d+"):
        ortgraph.capture(Outer(), torch.eye(3))


def test_random_operator_of_the_library_is_refused():
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (torch.poisson(x).sum() * self.w).sum()

    with pytest.raises(UnsupportedError, match="random operator aten.poisson"):
        ortgraph.capture(Draws(), torch.ones(5))


def test_data_dependent_control_flow_is_one_sentence():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            if x.sum() > 0:
                return (self.w * x).sum()
            return self.w.sum()

    with pytest.raises(CaptureError, match=r"torch.export cannot trace.*test_refusals\.py") as caught:
        ortgraph.capture(Branches(), torch.ones(3))
    assert "torch.where" in caught.value.hint and len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("batch", "options", "error", "words"),
    [
        (torch.ones(4, 5), {}, CaptureError, "shape (4, 3)"),
        (torch.ones(4, 5), {"loss": "nothing"}, InputError, "'nothing' is not an output"),
        (torch.ones(4, 5), {"loss": 3}, InputError, "loss=3"),
        (torch.ones(4, 5), {"loss": lambda o: o.detach().sum()}, CaptureError, "does not depend"),
        (torch.ones(4, 5), {"loss": lambda o: o.argmax()}, CaptureError, "int64"),
        (torch.ones(4, 5), {"loss": lambda o: 1.0}, CaptureError, "float, not a tensor"),
        (torch.ones(4, 5), {"loss": nn.MSELoss()}, InputError, "needs a target"),
        ((torch.ones(4, 5), None, torch.ones(1)), {}, InputError, "takes 2 positional"),
        ({"x": torch.ones(4, 5), "z": torch.ones(1)}, {}, InputError, "takes no z"),
        ({"x": None}, {"loss": lambda o: o.sum()}, InputError, "no tensor"),
        ("text", {}, InputError, "example_batch is str"),
        (torch.ones(4, 5), {"loss": lambda o: o.sum(), "dynamic": {"y": {0: "b"}}}, InputError, "dynamic names 'y'"),
        (torch.ones(4, 5), {"loss": lambda o: o.sum(), "dynamic": {"x": {2: "b"}}}, InputError, "dimension 2"),
        (torch.ones(4, 5), {"loss": lambda o: o.sum(), "dynamic": {"x": {0: "a b"}}}, InputError, "'a b'"),
        (torch.ones(1, 5), {"loss": lambda o: o.sum(), "dynamic": {"x": {0: "b"}}}, InputError, "size 1"),
        (torch.ones(4, 5), {"loss": lambda o: o.sum(), "dynamic": {"x": {1: "w"}}}, CaptureError, "dimension 1 of 'x'"),
        (torch.ones(4, 5), {"loss": lambda o: o.sum(), "opset": 17}, UnsupportedError, "opset 17"),
        (torch.ones(4, 5), {"loss": lambda o: o.sum(), "tangents": ["q"]}, InputError, "tangents names"),
        (torch.ones(4, 5), {"loss": lambda o: o.sum(), "input_gradients": ["q"]}, InputError, "input_gradients names"),
        (torch.ones(4, 5), {"loss": lambda o: o.sum(), "after": [3]}, InputError, "after="),
    ],
)  # fmt: skip
def test_refusals(batch, options, error, words, plain):
    with pytest.raises(error) as caught:
        ortgraph.capture(plain, batch, **options)
    assert words in str(caught.value) and caught.value.hint


def test_refusals_of_modules(plain):
    with pytest.raises(InputError, match="not function"):
        ortgraph.capture(lambda x: x, torch.ones(2))
    module = plain.requires_grad_(False)
    with pytest.raises(CaptureError, match="no trainable parameter"):
        ortgraph.capture(module, torch.ones(2, 5), loss=lambda o: o.sum())


def test_input_written_in_place_is_refused():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            x.add_(1)
            return (x * self.w).sum()

    with pytest.raises(CaptureError, match="in place"):
        ortgraph.capture(Writes(), torch.ones(3))


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0+cpu", "3.0"])
def test_untested_torch(monkeypatch, version, scores):
    module, x, y = scores
    monkeypatch.setattr(torch_capture.importlib.metadata, "version", lambda name: version)
    with pytest.raises(RuntimeSetupError, match=f"PyTorch {version[:4]}.*outside the tested range"):
        ortgraph.capture(module, (x, y), loss=nn.CrossEntropyLoss())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ortgraph.capture(module, (x, y), loss=nn.CrossEntropyLoss(), allow_untested_torch=True)


def test_missing_torch(monkeypatch):
    def missing(name):
        raise torch_capture.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(torch_capture.importlib.metadata, "version", missing)
    with pytest.raises(RuntimeSetupError, match="not installed"):
        ortgraph.capture(None, None)


def test_custom_operator_is_named(plain):
    @torch.library.custom_op("ortgraph_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.register_fake(lambda x: torch.empty_like(x))
    double.register_autograd(lambda ctx, grad: grad * 2)
    with pytest.raises(UnsupportedError, match=r"ortgraph_test\.double.*near .*conftest\.py:\d+"):
        ortgraph.capture(plain, torch.ones(4, 5), loss=lambda o: double(o).sum())


class Own(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.first, self.call = nn.Linear(5, 8), call

    def forward(self, x):
        return self.call(self.first, x).sum()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda first, x: first.absent(x), r"cannot trace the module first at torch/test_refusals\.py:\d+: .*'absent'"),
        (lambda first, x: first(x[:, :3]), r"cannot trace the module first at torch/test_refusals\.py:\d+: .*\[4, 3\]"),
        (lambda first, x: first(x) * first(x).max().item(), r"(?s)test_refusals\.py:\d+.*without \.item\(\)"),
        (lambda first, x: torch.fft.rfft(first(x)).abs(), r"fft_r2c.*complex64.*test_refusals\.py:\d+"),
    ],
)
def test_what_fails_in_forward_has_its_place(call, message, capfd):
    with pytest.raises(CaptureError, match=message):
        ortgraph.capture(Own(call), torch.ones(4, 5))
    assert "Traceback" not in capfd.readouterr().err  # PyTorch's own log


class Around(nn.Module):
    """The obstacle is two modules down."""

    def __init__(self, call):
        super().__init__()
        self.block = nn.ModuleDict({"inner": Own(call)})

    def forward(self, x):
        return self.block["inner"](x)


class Doubt(torch.autograd.Function):
    """Its backward looks at values."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient if gradient.sum() > 0 else -gradient


doubted = Doubt.apply  # under a name of its own, as libraries have it


@pytest.mark.parametrize(
    ("call", "met", "hint"),
    [
        (lambda first, x: first(x) if x.sum() > 0 else x, "data-dependent", "torch.where or masks"),
        (lambda first, x: first(x) * x.max().item(), "_local_scalar_dense", r"without \.item\(\)"),
        (lambda first, x: torch.special.i0(first(x)), r"aten\.i0", "replace the operator"),
        (lambda first, x: first(x).to_sparse() * 2, r"Tensor\.to_sparse makes a sparse tensor", "use dense tensors"),
        (lambda first, x: first(x).to_sparse_csr() @ x.T, r"Tensor\.to_sparse_csr makes a sparse", "use dense tensors"),
        (lambda first, x: torch.fft.rfft(first(x)).abs(), "complex64", "use real float"),
        (lambda first, x: doubted(first(x)), "autograd function Doubt", "write it with torch operators"),
    ],
    ids=["branch", "item", "operator", "sparse", "sparse_rows", "complex", "function"],
)
def test_every_refusal_says_what_where_and_what_to_try(call, met, hint):
    with pytest.raises(CaptureError, match=met) as caught:
        ortgraph.capture(Around(call), torch.ones(4, 5))
    said = caught.value
    assert re.search(r"module block\.inner\b", said.what) and re.search(r"torch/test_refusals\.py:\d+", said.what), said
    assert re.search(hint, said.hint)


def test_sparse_tensors_that_a_module_is_given_are_refused():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 4))
            self.register_buffer("neighbours", torch.eye(4).to_sparse_csr())

        def forward(self, x):
            return (self.neighbours @ (self.w * x)).sum()

    with pytest.raises(UnsupportedError, match=r"(?s)neighbours of the module is a sparse tensor.*to_dense"):
        ortgraph.capture(Graph(), torch.ones(4, 4))
    with pytest.raises(UnsupportedError, match=r"(?s)input 'input' is a sparse tensor.*to_dense"):
        ortgraph.capture(nn.Linear(4, 4), torch.eye(4).to_sparse(), loss=lambda y: y.sum())


def test_batch_statistics_in_half_precision_are_refused():
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)).bfloat16()
    with pytest.raises(UnsupportedError, match=r"(?s)BatchNorm in BFLOAT16.*module\.float\(\)"):
        ortgraph.capture(module, (torch.ones(4, 5).bfloat16(),), loss=lambda out: out.sum())


def test_a_named_loss_is_an_output(scores):
    module, x, y = scores
    with pytest.raises(InputError, match=r"(?s)2.*loss=torch\.nn\.CrossEntropyLoss\(\)"):
        ortgraph.capture(nn.Linear(5, 3), (x, y), loss="cross_entropy")
    with pytest.raises(InputError, match=r"(?s)has \['output'\].*loss=torch\.nn\.CrossEntropyLoss\(\)"):
        ortgraph.capture(module, (x,), loss="cross_entropy")
    with pytest.raises(InputError, match=r"(?s)class CrossEntropyLoss.*CrossEntropyLoss\(\)"):
        ortgraph.capture(module, (x, y), loss=nn.CrossEntropyLoss)
    with pytest.raises(InputError, match=r"(?s)dynamic is tuple.*'x': \{0: 'batch'\}"):
        ortgraph.capture(module, (x, y), loss=nn.CrossEntropyLoss(), dynamic=({0: "batch"},))


def test_evaluation_mode_is_noticed(scores, plain):
    _, x, y = scores
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))
    with pytest.warns(EvaluationModeWarning, match=r"its BatchNorm1d, Dropout: call module\.train\(\)"):
        ortgraph.capture(module.eval(), (x, y), loss=nn.CrossEntropyLoss())
    module.train()[1].eval()  # frozen statistics are a choice
    plain.eval()  # nothing depends on the mode
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ortgraph.capture(module, (x, y), loss=nn.CrossEntropyLoss())
        ortgraph.capture(plain, (x, y), loss=nn.CrossEntropyLoss())


def test_recurrent_layers_give_no_warning():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(5, 4)

        def forward(self, x):
            return self.layer(x)[0][-1].sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ortgraph.capture(Last(), torch.ones(3, 2, 5))


class Many(nn.Module):
    """Obstacles on lines of their own."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        chosen = self.w[x > 0].sum()
        angles = torch.fft.rfft(self.w).abs().sum()
        order = torch.special.i0(self.w).sum()
        unread = torch.linalg.svd(x).S  # noqa: F841 - nothing depends on it
        return chosen + angles + order + self.w.sum() * x.max().item()


def test_one_error_names_every_obstacle():
    with pytest.raises(UnsupportedError, match="the model has 4 obstacles") as caught:
        ortgraph.capture(Many(), torch.randn(4, 4))
    said = [what for what, _ in caught.value.obstacles]
    for words in ("boolean mask", "complex64", "aten.i0", "_local_scalar_dense"):
        assert sum(words in what for what in said) == 1, words
    assert all("test_refusals.py:" in what for what in said) and all(hint for _, hint in caught.value.obstacles)
    assert "svd" not in str(caught.value)


def test_a_refusal_harms_nothing(scores):
    module, x, y = scores
    want = ortgraph.capture(module, (x, y), loss=nn.CrossEntropyLoss()).text()
    for refused in (Many(), Own(lambda first, x: first(x) if x.sum() > 0 else x)):
        with pytest.raises(CaptureError):
            ortgraph.capture(refused, torch.ones(4, refused.w.shape[1] if isinstance(refused, Many) else 5))
    assert ortgraph.capture(module, (x, y), loss=nn.CrossEntropyLoss()).text() == want
    loss = nn.functional.cross_entropy(module(x), y)
    loss.backward()  # PyTorch works as before


def test_a_plain_run_finds_every_obstacle():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.layer = Many(), nn.Sequential(nn.LSTM(4, 4), nn.Identity())
            self.extra = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.Dropout(0.1))
            self.attention = nn.MultiheadAttention(4, 2)

        def forward(self, x):
            if x.sum() > 1000:
                x = x * 2
            h = self.extra(self.layer(x)[0].unsqueeze(2))[:, :, 0]
            return self.inner(x) + self.attention(h, h, h)[0].sum() + (h.to_sparse() * 2).to_dense().sum()

    module = Branches()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    found = find_obstacles(module, torch.randn(4, 4))
    said = [what for what, _ in found]
    for words in ("value is read", "depends on values", "complex64", "i0.default", "sparse", "linalg_svd"):
        assert any(words in what for what in said), words
    assert len(found) == 7 and all("test_refusals.py:" in what for what in said), said
    assert any("module inner" in what for what in said)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_an_unproven_function_of_the_library_is_refused():
    call = lambda first, x: first(x) * torch.linalg.det(x @ x.T)  # noqa: E731
    with pytest.raises(UnsupportedError, match=r"linalg_det.*test_refusals\.py"):
        ortgraph.capture(Own(call), torch.ones(4, 5))


_BUILD = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x):
        if x.sum() > 1000:
            x = x * 2
        y = torch.fft.rfft(self.w * x).abs().sum()
        return y + self.w.sum() * x.max().item()


def build():
    return {"module": Model(), "batch": torch.ones(3)}
"""


def test_doctor_lists_every_obstacle(tmp_path):
    from ortgraph.cli.app import build_app

    (tmp_path / "model.py").write_text(_BUILD)
    result = typer.testing.CliRunner().invoke(build_app(), ["doctor", f"{tmp_path / 'model.py'}:build", "--json"])
    findings = json.loads(result.stdout.splitlines()[-1])["findings"]
    said = [f["detail"] for f in findings if f["what"] == "build"]
    assert result.exit_code == 1 and len(said) == 3
    for words, line in (("cannot trace", 12), ("complex64", 14), ("value is read", 15)):
        assert sum(words in what and f"model.py:{line}" in what for what in said) == 1, said
