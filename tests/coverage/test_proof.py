"""The proof of a small family holds; it fails where a graph is wrong, and says so where a family is refused."""

from __future__ import annotations

import importlib
import json
import sys

import numpy as np
import pytest
import torch
from torch import nn

import ortgraph
from bench.coverage import proof
from bench.coverage.proof import prove
from bench.coverage.registry import Built, Case, Family, cases
from bench.coverage.replay import Draws, Replay
from bench.coverage.table import markdown
from ortgraph.errors import InputError, UnsupportedError


def _case(build, **options) -> Case:
    return Case(Family("made-up", build, "tests", **options))


def test_an_mlp_with_dropout_is_proven_in_a_fresh_process_too():
    (case,) = cases(["mlp"])
    row = prove(case, ["O2"])
    assert (row.status, row.message) == ("proven", "")
    assert (row.trainable, row.draws) == (8, 1)
    assert 0 < row.error < 1e-5
    assert set(row.nodes) == {"captured", "O2"}
    assert row.moved["share"] <= 1
    assert "| mlp |" in markdown([row.__dict__])


def test_a_gradient_that_is_slightly_wrong_is_found(monkeypatch):
    (case,) = cases(["mlp"])
    whole = proof.run

    def wrong(graph, batch, threads):
        found = whole(graph, batch, threads)
        found["gradient/up.weight"] = found["gradient/up.weight"] * np.float32(1 + 1e-4)
        return found

    monkeypatch.setattr(proof, "run", wrong)
    row = prove(case, [], fresh=False)
    assert row.status == "failed"
    assert "gradient up.weight" in row.message


def test_masks_that_pytorch_does_not_draw_are_found(monkeypatch):
    (case,) = cases(["mlp"])
    of = Draws.of
    monkeypatch.setattr(Draws, "of", lambda graph: Draws(of(graph).nodes, of(graph).key + 1, 0))
    row = prove(case, [], fresh=False)
    assert row.status == "failed"
    assert "loss" in row.message


class Picks(nn.Module):
    """Picks as many rows as a mask has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * self.weight)[mask].sum()


def _picks() -> Built:
    return Built(Picks(), {"x": torch.randn(4, 3), "mask": torch.tensor([True, False, True, True])})


def test_refusals_have_to_say_what_the_family_says():
    assert prove(_case(_picks, refused="boolean mask")).status == "refused"
    row = prove(_case(_picks, refused="another reason"))
    assert row.status == "failed"
    assert "boolean mask" in row.message
    assert prove(_case(_picks)).status == "failed"
    (mlp,) = cases(["mlp"])
    row = prove(_case(mlp.family.build, refused="boolean mask"), [])
    assert (row.status, row.message) == ("failed", "captured, though it should be refused: boolean mask")


def test_a_family_that_breaks_is_a_row_and_one_without_its_package_is_skipped():
    def broken() -> Built:
        raise RuntimeError("no such model")

    assert prove(_case(broken)).message == "RuntimeError: no such model"
    row = prove(_case(broken, requires=("no_such_package",)))
    assert (row.status, row.message) == ("skipped", "needs no_such_package")


class Draw(nn.Module):
    """Draws twice, and compares with a third draw."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(x, 0.5) + torch.rand(3, 4)
        return y * torch.bernoulli(torch.full((3, 1), 0.5))


def test_replayed_numbers_are_those_of_the_graph():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), Draw())
    x = torch.randn(3, 4)
    graph = ortgraph.capture(module, (x,), loss=lambda y: y.sum())
    draws = Draws.of(graph)
    got = ortgraph.TrainingSession(graph).results((x.numpy(),))["output"]
    with Replay(draws):
        want = module(x).detach().numpy()
    np.testing.assert_allclose(got, want, atol=1e-6)
    with Replay(draws, 1):
        assert not np.allclose(module(x).detach().numpy(), want)


def test_draws_in_another_order_than_the_graph_are_refused():
    graph = ortgraph.capture(nn.Sequential(nn.Linear(4, 4), Draw()), (torch.randn(3, 4),), loss=lambda y: y.sum())
    with Replay(Draws.of(graph)), pytest.raises(UnsupportedError, match="draws"):
        torch.rand(3, 4)
    with Replay(Draws.of(graph)), pytest.raises(UnsupportedError, match="no replay"):
        torch.randperm(3)


def test_float64_stays_float64_where_a_model_asks_for_float32():
    x = torch.randn(5, dtype=torch.float64)
    assert torch.softmax(x, 0, dtype=torch.float32).dtype == torch.float32
    with Replay(Draws({}, 0, 0), double=True):
        assert x.float().dtype == torch.float64
        assert torch.softmax(x, 0, dtype=torch.float32).dtype == torch.float64


def test_the_command_writes_rows_and_the_page(tmp_path, monkeypatch, capsys):
    command = importlib.import_module("bench.coverage.__main__")
    rows, page = tmp_path / "rows.json", tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["x", "--only", "mlp", "--pipelines", "O0", "--no-fresh", "--json", str(rows)])
    assert command.main() == 0
    assert "proven" in capsys.readouterr().out
    assert [r["case"] for r in json.loads(rows.read_text())["rows"]] == ["mlp"]
    page.write_text(f"# Page\n{command.BEGIN}\nstale\n{command.END}\nrest\n")
    monkeypatch.setattr(sys, "argv", ["x", "--json", str(rows), "--markdown", str(page)])
    assert command.main() == 0
    text = page.read_text()
    assert "| mlp |" in text
    assert "stale" not in text
    assert text.endswith("rest\n")


def test_the_rotating_part_proves_proven_cases_again_and_leaves_the_rows(tmp_path, monkeypatch):
    command = importlib.import_module("bench.coverage.__main__")
    rows, tried = tmp_path / "rows.json", []
    stored = [{"case": "mlp", "status": "proven"}, {"case": "two-towers", "status": "failed"}]
    rows.write_text(json.dumps({"rows": stored}))
    before = rows.read_bytes()

    def fails(case, pipelines, fresh):
        tried.append(case.name)
        return proof.Row(case.name, case.family.name, case.family.kind, "failed", "made up")

    monkeypatch.setattr(command, "prove", fails)
    monkeypatch.setattr(sys, "argv", ["x", "--json", str(rows), "--rotate", "a commit"])
    assert command.main() == 1
    assert tried == ["mlp"]
    assert rows.read_bytes() == before
    monkeypatch.setattr(sys, "argv", ["x", "--json", str(tmp_path / "none.json"), "--rotate", "a commit"])
    with pytest.raises(InputError, match="no proven case"):
        command.main()
