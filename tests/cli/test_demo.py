"""The demo's data and its measurement, on a model small enough for a test."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ortgraph
from ortgraph.cli.demo import _summary, _too_few
from ortgraph.cli.demo_data import CLASSES, LENGTH, PADDING, VOCABULARY, load_demo_data
from ortgraph.cli.demo_model import Size, make_model
from ortgraph.cli.demo_run import GRADIENTS, Curves, Plan, accuracies, gradient_errors, train_both
from ortgraph.errors import InputError
from ortgraph.report.comparison import comparison_page

SMALL = Size(width=32, heads=2, layers=1, inner=48)


@pytest.fixture(scope="module")
def data():
    return load_demo_data()


def test_data_is_large_enough_and_the_same_at_every_call(data):
    again = load_demo_data()
    np.testing.assert_array_equal(data.train.tokens, again.train.tokens)
    np.testing.assert_array_equal(data.held_out.labels, again.held_out.labels)
    assert len(data.train) > 1500 and len(data.held_out) > 300
    assert set(np.unique(data.train.labels)) == set(range(len(CLASSES))) == set(np.unique(data.held_out.labels))
    shares = np.bincount(data.train.labels) / len(data.train)
    assert shares.max() < 0.25, "always guessing one class must not look like learning"


def test_tokens(data):
    tokens = data.train.tokens
    assert tokens.shape[1] == LENGTH and tokens.min() == PADDING and tokens.max() < VOCABULARY
    assert (tokens[:, 0] != PADDING).all(), "a row of padding alone would divide by zero"


def test_no_document_is_on_both_sides(data):
    train = {row.tobytes() for row in data.train.tokens if (row != PADDING).sum() > 30}
    both = sum(row.tobytes() in train for row in data.held_out.tokens if (row != PADDING).sum() > 30)
    assert both <= 3, "texts that differ in case only"


def test_batches_are_shuffled_epochs(data):
    count = len(data.train) // 64
    seen = np.concatenate([b["tokens"] for b in data.batches(64, count)])
    assert len({r.tobytes() for r in seen}) > 0.9 * len(seen)
    first, second = (list(data.batches(8, 3))[2]["labels"] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_a_python_without_sources(tmp_path):
    with pytest.raises(InputError, match="docstrings"):
        load_demo_data(tmp_path)


def test_the_model_is_reproducible_and_leaves_the_random_state():
    state = torch.get_rng_state()
    a, b = make_model(SMALL), make_model(SMALL)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert 3e6 < sum(p.numel() for p in make_model().parameters()) < 6e6


def test_both_sides_train_alike(data):
    model = make_model(SMALL)
    batches = list(data.batches(4, 12))
    captured = ortgraph.capture(model, {k: torch.from_numpy(v) for k, v in batches[0].items()}, loss=0)
    before = ortgraph.optimize(captured, "O0", optimizer=ortgraph.optim.AdamW())
    optimized = ortgraph.optimize(captured, "O2", optimizer=ortgraph.optim.AdamW())
    session = ortgraph.TrainingSession(optimized.graph, threads=2)
    plan = Plan(steps=12, batch=4, held_out=10, seconds=None, lr=1e-3, threads=2)

    errors = gradient_errors(model, session, ortgraph.TrainingSession(captured, threads=2), batches[0])
    assert list(errors) == list(GRADIENTS)
    assert all(max(by_name.values()) < 1e-5 for by_name in errors.values())
    assert any(p.grad is not None for p in model.parameters()) is False

    curves = train_both(model, session, batches, plan, lambda *a, **k: None)
    assert len(curves.loss_pytorch) == len(curves.loss_ortgraph) == 12
    assert 0 < curves.loss_max_difference < 1e-3 and curves.speedup > 0
    assert len(curves.timed()[0]) == 9

    eager, ours = accuracies(model, session, data, plan)
    assert eager == ours and 0 <= eager <= 1 and eager * 10 == round(eager * 10), "of ten"

    figures = ("speedup ms_per_step_pytorch ms_per_step_ortgraph gradient_max_relative_error "
               "loss_max_difference accuracy_pytorch accuracy_ortgraph parameter_bytes state_bytes "
               "arena_bytes arena_bound_bytes")  # fmt: skip
    result = {**dict.fromkeys(figures.split(), 1), "steps": 12, "threads": 2}
    page = comparison_page(result, optimized, before.graph, errors, curves, ["A <remark>."])
    assert "A &lt;remark&gt;." in page and "head.weight" in page and page.count("<svg") == 5


def test_the_time_limit_ends_a_run(data):
    model = make_model(SMALL)

    class Session:
        def step(self, batch, learning_rate):
            return 1.0

    plan = Plan(steps=50, batch=2, held_out=1, seconds=0.0, lr=1e-3, threads=2)
    curves = train_both(model, Session(), list(data.batches(2, 50)), plan, lambda *a, **k: None)
    assert len(curves.loss_pytorch) == 4


def test_speedup_is_the_median_of_ratios():
    slow, fast = [9.0, 9.0, 9.0, 2.0, 4.0, 90.0, 3.0, 2.0], [1.0, 1.0, 1.0, 1.0, 4.0, 45.0, 1.0, 1.0]
    curves = Curves([1.0] * 8, [1.0] * 8, slow, fast)
    assert curves.speedup == 2.0, "of 2/1, 4/4, 90/45, 3/1 and 2/1, without the warm-up"


def test_too_few_steps_have_no_speedup():
    curves = Curves([1.0] * 7, [1.0] * 7, [2.0] * 7, [1.0] * 7)
    assert curves.speedup is None
    plan = Plan(steps=64, batch=8, held_out=1, seconds=18.0, lr=1e-3, threads=2)
    (remark,) = _too_few(plan, {"speedup": None, "steps": 4})
    assert "the 18 seconds of --quick were over" in remark and "too few steps to compare: use --steps" in remark
    assert not _too_few(plan, {"speedup": 1.5, "steps": 64})
    numbers = "nodes_before nodes_after gradient_max_relative_error ms_per_step_pytorch ms_per_step_ortgraph threads " \
              "loss_max_difference accuracy_pytorch accuracy_ortgraph accuracy_guessing arena_bytes arena_bound_bytes " \
              "parameter_bytes state_bytes"  # fmt: skip
    shown = dict(_summary({**dict.fromkeys(numbers.split(), 1), "speedup": None}, curves))
    assert shown["speed-up"] == "none: too few steps to compare"


def test_foreign_files_are_left_alone(cli, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    ran = cli("demo", "--quick", "--out", tmp_path)
    assert ran.code == 2 and "thesis.tex" in ran.err and sorted(p.name for p in tmp_path.iterdir()) == ["thesis.tex"]
    ran = cli("demo", "--quick", "--out", tmp_path / "thesis.tex")
    assert ran.code == 2 and "is a file" in ran.err


@pytest.mark.slow
def test_the_whole_demo(cli, tmp_path):
    """Run with: pytest -m slow tests/cli/test_demo.py"""
    ran = cli("demo", "--quick", "--steps", 6, "--out", tmp_path / "demo", "--json")
    assert ran.code == 0, ran.err
    wanted = ("nodes_before nodes_after gradient_max_relative_error loss_max_difference ms_per_step_pytorch "
              "ms_per_step_ortgraph speedup accuracy_pytorch accuracy_ortgraph arena_bytes")  # fmt: skip
    assert set(wanted.split()) <= set(ran.json) and ran.json["nodes_after"] < ran.json["nodes_before"]
    assert ran.json["gradient_max_relative_error"] < 1e-4 and ran.json["loss_max_difference"] < 1e-2
    assert {p.name for p in (tmp_path / "demo").iterdir()} >= {
        "captured.onnx",
        "step.onnx",
        "report.html",
        "result.json",
    }
    assert cli("demo", "--quick", "--steps", 4, "--out", tmp_path / "demo").code == 0, "over its own files"
