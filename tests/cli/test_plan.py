"""``ortgraph plan``: figures that agree with the planner, one page, one message per mistake."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

import ortgraph
from ortgraph.cli.plan_run import parse_share
from ortgraph.errors import InputError
from ortgraph.graph.verify import verify
from ortgraph.plan.program_plan import plan_program
from ortgraph.plan.rebuild import RECOMPUTE_KEY

BUILD_FILE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x):
        return self.blocks(x).square().mean()


def build():
    torch.manual_seed(0)
    return {"module": Net(), "batch": {"x": torch.randn(64, 16)}, "dynamic": {"x": {0: "batch"}}}
"""


@pytest.fixture(scope="module")
def free_file(tmp_path_factory):
    """A captured graph with a symbolic batch."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "blocks_net.py").write_text(BUILD_FILE)
    from ortgraph.capture.build_spec import load_build

    spec = load_build(str(folder / "blocks_net.py"))
    return ortgraph.capture(spec.module, spec.batch, dynamic=spec.dynamic).save(folder / "free.onnx")


@pytest.fixture(scope="module")
def step_file(free_file):
    """The same, optimized with an optimizer for a batch of 64."""
    graph = ortgraph.load(free_file)
    optimized = ortgraph.optimize(graph, "O2", optimizer=ortgraph.optim.AdamW(lr=1e-2), shapes={"batch": 64}).graph
    return optimized.save(free_file.with_name("step.onnx"))


def test_figures_are_those_of_the_planner(cli, step_file):
    plan = plan_program(ortgraph.load(step_file), "60%", seconds=2)
    ran = cli("plan", step_file, "--memory-budget", "60%", "--seconds", 2, "--bound", "--json")
    assert ran.code == 0, ran.err
    found = ran.json
    assert found["program"] == "step" and found["budget"] == plan.budget
    assert found["peak"]["given"] == plan.before.peak and found["peak"]["planned"] == plan.after.peak
    assert found["peak"]["floor"] == plan.floor.bytes <= found["peak"]["order_bound"] <= plan.before.peak
    assert found["arena"]["planned"] == plan.arena.arena_bytes < found["arena"]["given"]
    assert found["scratch"] == plan.scratch_bytes <= plan.budget - plan.arena.arena_bytes
    assert found["overhead"] == pytest.approx(plan.after.overhead)
    assert sum(found["recomputed"].values()) == plan.recomputed > 0
    assert found["microseconds"]["planned"] > found["microseconds"]["given"] > 0
    assert found["top"]["given"][0]["bytes"] >= found["top"]["given"][1]["bytes"] > 0
    assert any(o["module"].startswith("blocks.") for o in found["top"]["given"])


def test_a_captured_graph_is_optimized_first(cli, free_file, step_file):
    words = ("--optimizer", "adamw{lr=1e-2}", "--shapes", "batch=64", "--json")
    from_captured = cli("plan", free_file, *words).json
    from_planned = cli("plan", step_file, "--json").json
    for key in ("program", "operations", "peak", "arena", "fixed", "gradients", "recomputed"):
        assert from_captured[key] == from_planned[key], key
    assert from_captured["budget"] is None and from_captured["arena"]["given"] == from_captured["arena"]["planned"]
    gradients = cli("plan", free_file, "--shapes", "batch=64", "-O0", "--json").json
    assert gradients["program"] == "gradients" and gradients["peak"]["given"] > from_captured["peak"]["given"]


def test_tables_name_what_they_show(cli, step_file):
    ran = cli("plan", step_file, "--memory-budget", "60%", "--seconds", 2, "--bound", "--sweep", "--points", 3)
    assert ran.code == 0, ran.err
    for text in ("parameters", "states", "batch", "activation peak", "arena", "kernel scratch", "predicted time", "max-load",
                 "order bound", "floor", "Evaluated again", "blocks.0", "Largest values", "Budget against time"):  # fmt: skip
        assert text in ran.out, text
    plain = cli("plan", step_file)
    assert "planned" not in plain.out and "Evaluated again" not in plain.out


def test_the_planned_graph_is_written_and_keeps_every_bit(cli, step_file, tmp_path):
    out = tmp_path / "planned.onnx"
    found = cli("plan", step_file, "--memory-budget", "60%", "--seconds", 2, "-o", out, "--json").json
    assert found["output"] == str(out) and found["stage"] == "planned"
    planned, given = ortgraph.load(out), ortgraph.load(step_file)
    verify(planned, "types")
    assert sum(RECOMPUTE_KEY in n.metadata_props for n in planned.graph) == sum(found["recomputed"].values())
    sessions = [ortgraph.TrainingSession(g, threads=1) for g in (given, planned)]
    batch = {"x": np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)}
    losses = [[s.step(batch) for _ in range(3)] for s in sessions]
    assert losses[0] == losses[1]
    for name, value in sessions[0].state_dict().items():
        np.testing.assert_array_equal(value, sessions[1].state_dict()[name])
    assert sessions[1].arena_bytes <= found["arena"]["planned"] < sessions[0].arena_bytes
    again = cli("plan", out)
    assert "recomputations of an earlier plan" in again.out


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident sizes are read from /proc")
def test_measured_beside_planned(cli, step_file):
    words = ("plan", step_file, "--memory-budget", "60%", "--seconds", 2, "--measure", "--threads", 1)
    ran = cli(*words, "--json")
    assert ran.code == 0, ran.err
    found = ran.json
    for name in ("given", "planned"):
        measured = found["measured"][name]
        assert 0 < measured["arena"] <= found["arena"][name] and measured["milliseconds"] > 0
        # A step of this size is a few pages: no figure here, only that something rose.
        assert measured["peak"] >= 0 and measured["states"] == found["fixed"]["states"]


def test_sweep_as_json(cli, step_file):
    found = cli("plan", step_file, "--sweep", "--points", 4, "--seconds", 1, "--json").json
    points = found["sweep"]
    assert (
        len(points) == 4
        and points[0]["overhead"] == 0
        and points[-1]["budget"] == found["peak"]["floor"] + found["scratch"]
    )
    assert all((p["overhead"] is None) == bool(p["reason"]) for p in points)


@pytest.mark.slow
def test_largest_batch(cli, free_file):
    words = (
        "plan",
        free_file,
        "--optimizer",
        "adamw",
        "--max-batch",
        "--memory",
        "300kB",
        "--overhead",
        "5%",
        "--seconds",
        0.2,
    )
    ran = cli(*words)
    assert ran.code == 0, ran.err
    found = cli(*words, "--json").json["max_batch"]
    size = found["size"]
    assert f"batch={size} fits into 300.00 kB" in ran.out and f"batch={size + 1} does not fit: " in ran.out
    assert found["needed"] <= 300_000 and found["next"]["size"] == size + 1


def test_the_page_has_its_pictures(cli, step_file, tmp_path):
    page = tmp_path / "memory.html"
    ran = cli("plan", step_file, "--memory-budget", "60%", "--seconds", 1, "--sweep", "--points", 3, "--report", page)
    assert ran.code == 0, ran.err
    text = page.read_text()
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    titles = [ElementTree.fromstring(p).attrib["aria-label"] for p in pictures]
    assert titles[0] == "Given order" and titles[1].startswith("Planned: ") and titles[2] == "Budget against time"
    assert "forward" in pictures[0] and "peak " in pictures[0] and "budget " in pictures[1]
    assert "http" not in text and "<script" not in text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--memory-budget", "much"), 2, "memory budget 'much' is not understood"),
        (("--memory-budget", "0%"), 2, "memory budget '0%' is not understood"),
        (("--memory-budget", "2%"), 1, "is infeasible: "),
        (("--program", "steps"), 2, "the graph has no program 'steps'"),
        (("--program", "accumulate"), 2, "the graph has no program 'accumulate'"),
        (("--program", "loss", "-o", "OUT.onnx"), 2, "a plan of program loss is not stored"),
        (("--max-batch",), 2, "no memory is given"),
        (("--max-batch", "--memory", "50%"), 2, "memory '50%' is a share of nothing"),
        (("--max-batch", "--memory", "4GB", "--memory-budget", "50%"), 2, "finds the budget itself"),
        (("--max-batch", "--memory", "4GB"), 2, "no symbolic dimension 'batch'"),
        (("--max-batch", "--memory", "4GB", "--overhead", "much"), 2, "'much' is no percentage"),
        (("--memory", "4GB"), 2, "go with --max-batch"),
        (("--dim", "rows"), 2, "go with --max-batch"),
        (("--points", 3), 2, "goes with --sweep"),
        (("--sweep", "--points", 1), 2, "at least 2"),
        (("--threads", 2), 2, "goes with --measure"),
        (("--measure", "--program", "evaluate"), 2, "cannot measure 'evaluate'"),
        (("--seconds", 0), 2, "no time to search in"),
        (("--seconds", "nan"), 2, "no time to search in"),
        (("--optimizer", "adamw"), 2, "an optimizer goes with a graph that is not lowered yet"),
        (("-O1",), 2, "a preset goes with a graph that is not lowered yet"),
        (("-O7",), 2, "unknown preset O7"),
        (("--target", "moon"), 2, "unknown target 'moon'"),
        (("--shapes", "batch=3"), 2, "no input has a symbolic dimension called 'batch'"),
        (("--report", "page.txt"), 2, "the output is a .html file"),
        (("-o", "IN"), 2, "is the input, which is never overwritten"),
    ],
)
def test_mistakes_have_one_message(cli, step_file, tmp_path, words, code, message):
    named = {"IN": step_file, "OUT.onnx": tmp_path / "out.onnx"}
    ran = cli("plan", step_file, *(named.get(w, w) for w in words))
    assert ran.code == code, ran.out + ran.err
    errors = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0] and "Traceback" not in ran.err
    assert not list(tmp_path.iterdir())


def test_an_empty_name_is_no_file(cli):
    ran = cli("plan", "")
    assert ran.code == 2 and "is a folder, not an .onnx file" in ran.err


def test_symbolic_shapes_need_sizes(cli, free_file):
    ran = cli("plan", free_file)
    assert ran.code == 2 and "batch is symbolic" in ran.err and "--shapes" in ran.err


def test_an_infeasible_budget_names_what_sets_the_floor(cli, step_file):
    ran = cli("plan", step_file, "--memory-budget", "1kB")
    assert ran.code == 1 and "infeasible" in ran.err
    found = cli("plan", step_file, "--json").json
    ran = cli("plan", step_file, "--memory-budget", found["peak"]["floor"] + found["scratch"] - 64)
    assert (
        ran.code == 1 and re.search(r"infeasible: ('.+' need|the values kept)", ran.err) and "give at least" in ran.err
    )


def test_no_signature_and_no_file(cli, tmp_path):
    ran = cli("plan", tmp_path / "none.onnx")
    assert ran.code == 2 and "no such file" in ran.err


@pytest.mark.parametrize("text", ["", "5", "-5%", "%", "five%"])
def test_shares(text):
    assert parse_share(" 12.5 % ") == 0.125
    with pytest.raises(InputError):
        parse_share(text)
