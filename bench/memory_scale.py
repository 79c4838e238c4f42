"""A 48-layer GPT's training step, ordered, recomputed at half its peak and laid out, in a fresh process.

python -m bench.memory_scale capture FILE | python -m bench.memory_scale plan FILE

Capture runs in a process of its own, so that the planner's time and memory are the planner's alone.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import pickle
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.memory_rows import Row, row, stopwatch
from ortgraph.errors import PlanError
from ortgraph.plan.operations import OperationGraph
from ortgraph.plan.recompute import RecomputeProblem, RecomputeSolution, memory_floor, solve
from ortgraph.plan.recompute import validate as validate_sequence
from ortgraph.plan.simulate import simulate

if TYPE_CHECKING:
    from bench.memory import Setup

logger = logging.getLogger(__name__)
SUITE = "scale"
LAYERS = 48
LEVEL = "O0"  # nothing fused: the most operators
BUDGET = 50  # percent
ORDER_SECONDS, RECOMPUTE_SECONDS, LAYOUT_SECONDS = 5.0, 15.0, 5.0
SECONDS, MEBIBYTES = 30.0, 1024.0


def run(setup: Setup) -> Iterator[Row]:
    name = f"GPT {LAYERS} layers"
    if not setup.wants(name):
        return
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "problem.pickle")
        with stopwatch() as watch:
            _child("capture", file)
        found = json.loads(_child("plan", file))
    yield row(SUITE, name, "operators", found["operations"], seconds=watch.wall)
    yield row(
        SUITE, name, "order: peak bytes", found["order_peak"], bound=found["order_bound"], seconds=found["order_s"]
    )
    fits = found["peak"] is not None
    yield row(
        SUITE, name, f"recompute at {BUDGET} %: peak bytes", found["peak"],
        bound=found["floor"], at_most=found["budget"], seconds=found["recompute_s"],
    )  # fmt: skip
    yield row(
        SUITE,
        name,
        f"recompute at {BUDGET} %: overhead %",
        found["overhead"],
        bound=found["overhead_bound"],
    )
    yield row(SUITE, name, "layout: arena bytes", found["arena"], bound=found["max_load"], seconds=found["layout_s"])
    yield row(
        SUITE, name, "planning: wall seconds", found["wall_s"], at_most=SECONDS, also=fits, seconds=found["wall_s"]
    )
    yield row(SUITE, name, "planning: processor seconds", found["cpu_s"], seconds=found["wall_s"])
    yield row(SUITE, name, "planning: resident MiB, high-water", found["mebibytes"], at_most=MEBIBYTES, also=fits)


def _child(what: str, file: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "bench.memory_scale", what, file], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def _capture(file: str) -> None:
    from bench.memory_captured import gpt

    pathlib.Path(file).write_bytes(pickle.dumps(gpt(LAYERS, LEVEL)))


def _recompute(graph: OperationGraph, budget: int) -> RecomputeSolution | None:
    """None where no sequence within the budget was found."""
    problem = RecomputeProblem(graph, budget)
    try:
        found = solve(problem, RECOMPUTE_SECONDS)
    except PlanError as error:
        logger.warning("recompute at %d %%: %s", BUDGET, error)
        return None
    if not found.met:
        return None
    validate_sequence(problem, found)
    return found


def _plan(file: str) -> dict[str, float | None]:
    from ortgraph.plan.buffers import sequence_buffers
    from ortgraph.plan.memory import solve as solve_layout
    from ortgraph.plan.memory import validate
    from ortgraph.plan.schedule import solve_order

    with stopwatch() as whole:
        graph = pickle.loads(pathlib.Path(file).read_bytes())
        with stopwatch() as ordering:
            order = solve_order(graph, ORDER_SECONDS)
        budget = simulate(graph, graph.given_order()).peak * BUDGET // 100
        with stopwatch() as recomputing:
            found = _recompute(graph, budget)
        problem = sequence_buffers(graph, found.sequence if found else order.sequence)
        with stopwatch() as placing:
            layout = solve_layout(problem, LAYOUT_SECONDS)
        validate(problem, layout)
    return {
        "operations": len(graph.operations),
        "order_peak": order.peak,
        "order_bound": order.bound,
        "order_s": ordering.wall,
        "budget": budget,
        "peak": simulate(graph, found.sequence).peak if found else None,
        "floor": memory_floor(graph).bytes,
        "overhead": 100 * found.overhead if found else None,
        "overhead_bound": 100 * found.bound_overhead if found else 0.0,
        "recompute_s": recomputing.wall,
        "arena": layout.arena_bytes,
        "max_load": layout.bound,
        "layout_s": placing.wall,
        "wall_s": whole.wall,
        "cpu_s": whole.cpu,
        "mebibytes": high_water() / 2**20,
    }


def high_water() -> int:
    """Bytes of the resident set's high-water mark of this process, without what its parent had before it started."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        line = next(r for r in status.read_text(encoding="ascii").splitlines() if r.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    what, file = sys.argv[1:]
    if what == "capture":
        _capture(file)
    else:
        print(json.dumps(_plan(file)))


if __name__ == "__main__":
    main()
