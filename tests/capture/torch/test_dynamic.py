"""Symbolic dimensions: one captured graph runs and differentiates at other sizes."""

from __future__ import annotations

import importlib.util
import pathlib

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ortgraph
from ortgraph.errors import BatchError, CaptureError

transformers = pytest.importorskip("transformers")
_spec = importlib.util.spec_from_file_location("capture_models", pathlib.Path(__file__).with_name("test_models.py"))
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

ROWS_AND_COLUMNS = {0: "batch", 1: "sequence"}


def text_batch(batch: int, sequence: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 60, (batch, sequence))
    mask = torch.ones_like(ids)
    mask[0, sequence // 2 :] = 0
    mask[0, 0] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def gpt2(attention: str) -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=2, vocab_size=60, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).train()


@pytest.mark.parametrize("name", ["bert-eager", "bert-sdpa", "gpt2-eager", "gpt2-sdpa"])
def test_text_models_at_other_sizes(check_capture, name):
    kind, attention = name.split("-")
    module = models._bert("BertForMaskedLM", attention) if kind == "bert" else gpt2(attention)
    batch = text_batch(3, 8)
    others = [text_batch(*sizes) for sizes in ((4, 16), (1, 3))]
    dynamic = {k: ROWS_AND_COLUMNS for k in batch}
    graph = check_capture(module, batch, dynamic=dynamic, run_batches=others, repeats=2)
    inputs = {v.name: v for v in graph.graph.inputs}
    assert [d.value for d in inputs["input_ids"].shape] == ["batch", "sequence"]
    if kind == "bert":  # its positions are a slice of a table
        assert graph.signature.metadata["limits"] == '{"sequence": 32}'


def test_every_shape_is_recorded_in_named_dimensions():
    module = models._bert("BertForMaskedLM", "eager")
    batch = text_batch(3, 8)
    graph = ortgraph.capture(module, batch, dynamic={k: ROWS_AND_COLUMNS for k in batch})
    found = set()
    for node in graph.graph:
        for value in node.outputs:
            assert value.shape is not None and value.dtype is not None
            for dim in value.shape:
                if isinstance(dim, ir.SymbolicDim):
                    assert dim.value is not None
                    found |= {str(s) for s in dim.free_symbols()}
    assert found == {"batch", "sequence"}
    assert sum(n.op_type == "Shape" for n in graph.graph) == 2


def test_convolutions_over_a_symbolic_batch(check_capture):
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 3, 16, 16), "y": torch.randint(0, 4, (4,))}
    other = {"x": torch.randn(7, 3, 16, 16), "y": torch.randint(0, 4, (7,))}
    check_capture(models.Cnn().train(), batch, dynamic={"x": {0: "n"}, "y": {0: "n"}}, run_batches=[other], repeats=2)


class Movement(nn.Module):
    """Slices, splits, sums, broadcasts and indexing along symbolic dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6))
        self.position = nn.Embedding(20, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        h = x * self.w + self.position(torch.arange(n))
        h = torch.cat([h[:, 1:], h[:, :1]], 1) + h[:, -1:] + h[:, 0].unsqueeze(1)
        flat = h.reshape(b * n, d)[: b * n - 1]
        weights = (h.sum(2) / n).softmax(1)
        pooled = (weights[:, :, None].expand(b, n, d) * h).mean(1)
        padded = F.pad(h, (0, 0, 1, n))
        mask = torch.ones(n, n, dtype=x.dtype).tril()
        return flat.square().mean() + pooled.square().sum() + F.mse_loss(padded, padded * 2) + (mask @ h).sum() / b


def test_movement_along_symbolic_dimensions(check_capture):
    torch.manual_seed(0)
    others = [{"x": torch.randn(*sizes, 6)} for sizes in ((3, 5), (2, 9), (5, 1))]
    batch = {"x": torch.randn(4, 7, 6)}
    check_capture(Movement(), batch, dynamic={"x": ROWS_AND_COLUMNS}, run_batches=others, repeats=2)
    # names that mean something else to sympy
    check_capture(Movement(), batch, dynamic={"x": {0: "N", 1: "S"}}, run_batches=others[:1], repeats=1)


def test_dropout_over_a_symbolic_batch(run_captured):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return F.dropout(self.linear(x), 0.5).square().mean()

    graph = ortgraph.capture(Net(), torch.ones(4, 6), dynamic={"x": {0: "batch"}})
    small, large = (run_captured(graph, {"x": torch.ones(n, 6)})[0] for n in (3, 9))
    assert small["loss"] > 0 and large["loss"] > 0


class Sums(nn.Module):
    """Two inputs that have to be equally long."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x + y) * self.w).sum()


class Answers(nn.Module):
    """Positions beyond the text are ignored: the ignored label is the length."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        scores = self.head(x).squeeze(-1)
        length = scores.size(1)
        inside = F.cross_entropy(scores, start.clamp(0, length), ignore_index=length)
        return inside + F.cross_entropy(2 * scores, start, ignore_index=length, reduction="sum")


def test_a_symbolic_label_is_ignored(check_capture):
    torch.manual_seed(0)
    dynamic = {"x": ROWS_AND_COLUMNS, "start": {0: "batch"}}
    batches = [
        {"x": torch.randn(rows, length, 6), "start": torch.tensor([0, length, length - 1, 1])[:rows]}
        for rows, length in ((4, 7), (3, 5), (2, 9))
    ]
    check_capture(Answers(), batches[0], dynamic=dynamic, run_batches=batches[1:], repeats=2)


def test_equal_sizes_share_one_name(caplog):
    batch = {"x": torch.ones(4, 3), "y": torch.ones(4, 3)}
    graph = ortgraph.capture(Sums(), batch, dynamic={"x": {0: "rows"}, "y": {-2: "lines"}})
    dims = {v.name: v.shape[0] for v in graph.graph.inputs if v.name in batch}
    assert {d.value for d in dims.values()} == {"rows"}
    assert "'lines', is bound to equal 'rows'" in caplog.text


def test_size_that_the_code_fixes_is_refused():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 1))

        def forward(self, x):
            return (x * self.w).sum()

    with pytest.raises(CaptureError, match="dimension 0 of 'x'"):
        ortgraph.capture(Fixed(), torch.ones(4, 3), dynamic={"x": {0: "rows"}})


class Sized(nn.Module):
    """Code that looks at sizes: the trace takes one side."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 4)

    def forward(self, x):
        h, length = self.layer(x), x.shape[1]
        if self.kind == "branch":
            h = h * 2 if length > 4 else h
        elif self.kind == "one":
            h = h * 7 if length == 1 else h
        elif self.kind == "both":
            h = h + 1 if x.shape[0] * length <= 10 else h
        elif self.kind == "parts":
            h = sum(part.sum() * i for i, part in enumerate(h.split(3, 1)))
        elif self.kind == "last":
            h = h[:, -3:]
        return h.square().mean()


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "words"),
    [
        ("branch", (1, 5), (3, 4), "length > 4, which length=4 is not.*test_dynamic.py:"),
        ("one", (1, 2), (3, 1), "length != 1, which length=1 is not"),
        ("both", (2, 6), (2, 5), "batch . length > 10, which batch=2, length=5 is not"),
        ("parts", (2, 4), (2, 7), "== 2, which length=7 is not"),
        ("last", (2, 3), (2, 2), "which length=2 is not"),
    ],
)
def test_sizes_at_which_the_code_goes_another_way_are_refused(kind, right, wrong, words, tmp_path):
    torch.manual_seed(0)
    module = Sized(kind)
    graph = ortgraph.capture(module, {"x": torch.randn(3, 6, 4)}, dynamic={"x": {0: "batch", 1: "length"}})
    graph = ortgraph.load(graph.save(tmp_path / "train.onnx"))
    session = ortgraph.TrainingSession(graph)
    fits, other = ({"x": torch.randn(*shape, 4)} for shape in (right, wrong))
    assert session.loss(fits) == pytest.approx(module(**fits).item(), rel=1e-5)
    for run in (session.loss, session.gradients, session.evaluate):
        with pytest.raises(BatchError, match=words):
            run(other)
    with pytest.raises(BatchError, match=words):
        ortgraph.optimize(graph, "O0", shapes={"batch": wrong[0], "length": wrong[1]})
