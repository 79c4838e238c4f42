"""A lower bound on the cost of every sequence within a budget, in any order: what one moment of it must look like.

Take the first evaluation of an operation v. Write x for what was evaluated before it, r for what is evaluated after it,
and m for values that lie in memory then to be read later. Every operation is in x or r, x holds what its members read,
what is evaluated later finds each input in memory or evaluated later too, and memory holds m and the results of v:

    minimize   sum c_i (x_i + r_i - 1)                              cost beyond evaluating everything once
    such that  x_i + r_i >= 1                                       (= 1 where an operation must not be repeated)
               x_j <= x_i,  r_j <= m_u + r_i,  m_u <= x_i           for u, made by i and read by j
               sum size_u m_u + size of v's results + scratch <= budget,  m_u = 1 for what v reads

The largest minimum over all v bounds the cost. Any set of v gives a bound, as does the linear relaxation. With c infinite
this is the min-cut bound on orders.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence

import numpy as np

from ortgraph.errors import RuntimeSetupError
from ortgraph.plan.operations import OperationGraph
from ortgraph.plan.recompute.program import solve_program
from ortgraph.plan.simulate import simulate

logger = logging.getLogger(__name__)
_INFEASIBLE = 2  # status of scipy.optimize.milp
_TOLERANCE = 1e-6  # share of the cost: HiGHS takes constraints as met within 1e-7 or so
_FIRST = 0.25  # share of the time for the largest budget
_SOLVING = 0.4  # share of a budget's time for programs in integers
_SOLVED = 3  # moments solved in integers


@dataclasses.dataclass
class MomentBound:
    """The bound's linear program for one graph; moments and budgets only change limits of rows and variables.

    Variables: x and r of all operations, then m of all values. SciPy's HiGHS solves it.
    """

    graph: OperationGraph

    def __post_init__(self) -> None:
        graph, n, k = self.graph, len(self.graph.operations), len(self.graph.values)
        self.unit = max(1, max((v.size for v in graph.values), default=1))
        self.cost = graph.cost or 1.0
        rows: list[tuple[list[int], list[float]]] = []
        low: list[float] = []
        high: list[float] = []

        def add(columns: list[int], factors: list[float], lower: float, upper: float) -> int:
            rows.append((columns, factors))
            low.append(lower)
            high.append(upper)
            return len(rows) - 1

        self.both = [add([i, n + i], [1, 1], 1, 2 if o.recompute else 1) for i, o in enumerate(graph.operations)]
        self.made: dict[int, int] = {}
        for u, value in enumerate(graph.values):
            i = graph.producer[u]
            self.made[u] = add([2 * n + u, i], [1, -1], -np.inf, 0)
            if value.kept:
                add([2 * n + u, n + i], [1, 1], 1, np.inf)
            for j in graph.readers[u]:
                add([j, i], [1, -1], -np.inf, 0)
                add([n + j, 2 * n + u, n + i], [1, -1, -1], -np.inf, 0)
        for j, operation in enumerate(graph.operations):
            for i in operation.after:
                add([j, i], [1, -1], -np.inf, 0)
                add([j, n + i], [1, 1], -np.inf, 1)
        sizes = [v.size / self.unit for v in graph.values]
        self.load = add([2 * n + u for u in range(k)], sizes, -np.inf, 0)
        where = np.repeat(np.arange(len(rows)), [len(c) for c, _ in rows])
        columns = np.concatenate([np.array(c, dtype=np.int64) for c, _ in rows])
        factors = np.concatenate([np.array(f, dtype=np.float64) for _, f in rows])
        self.entries = (where, columns, factors)
        self.low, self.high = np.array(low, dtype=np.float64), np.array(high, dtype=np.float64)
        share = np.array([o.cost / self.cost for o in graph.operations])
        self.objective = np.concatenate([share, share, np.zeros(k)])
        self.integral = np.concatenate([np.ones(2 * n), np.zeros(k)])

    def at(self, v: int, budget: int, fixed: bool = False, integral: bool = False, seconds: float = 10.0) -> float:
        """Overhead (0.05 is 5 %) that every sequence within the budget has, by the first evaluation of operation v.

        Infinite when no sequence is within the budget.

        Args:
            v: Operation.
            budget: Bytes.
            fixed: Only sequences whose first evaluations keep the given order: x is known.
            integral: Solve in integers; what is proven when the time is over counts.
            seconds: Wall time.
        """
        graph, n, k = self.graph, len(self.graph.operations), len(self.graph.values)
        operation = graph.operations[v]
        low, high = self.low.copy(), self.high.copy()
        least, most = np.zeros(2 * n + k), np.ones(2 * n + k)
        most[v] = 0
        low[self.both[v]] = 0
        if fixed:
            least[:v], most[v:n] = 1, 0
        if not operation.recompute:
            most[n + v] = 0
        least[[2 * n + u for u in operation.inputs]] = 1
        for u in operation.outputs:
            least[2 * n + u] = 1
            high[self.made[u]] = 1
        inplace = sum({r: graph.values[r].size for _, r in operation.inplace}.values())
        high[self.load] = (budget - operation.scratch + inplace) / self.unit
        integers = self.integral if integral else None
        result = solve_program(self.objective, self.entries, (low, high), (least, most), integers, seconds)
        if result.status == _INFEASIBLE:
            return float("inf")
        # Only an optimal linear program bounds anything; one in integers has a bound of its own when it is cut short.
        found = result.mip_dual_bound if integral else result.fun if result.status == 0 else None
        if found is None or not np.isfinite(found):
            return 0.0
        once = 1.0 - operation.cost / self.cost  # everything but v is in x or r at least once
        return max(0.0, float(found) - once - _TOLERANCE)


def overhead_bounds(graph: OperationGraph, budgets: Sequence[int], seconds: float, fixed: bool = False) -> list[float]:
    """Lower bounds on the overhead within each budget; zeros, with a warning, where SciPy is absent.

    Moments are ranked by their linear bounds; the best are then solved in integers.

    Args:
        graph: Operations and values.
        budgets: Bytes; infinite bounds show that nothing is within one.
        seconds: Wall time for all of them together, about.
        fixed: First evaluations keep the given order; by default the bounds hold for every order.
    """
    start = time.perf_counter()
    bound = MomentBound(graph)
    try:
        bound.at(0, max(budgets), fixed)
    except RuntimeSetupError as error:
        logger.warning("no bounds on the overhead: %s", error)
        return [0.0] * len(budgets)
    # Moments that are busy in the given order come first, then those that bounded the budget before: a deadline may end
    # the ranking. The largest budget has time for all of them.
    live = simulate(graph, graph.given_order()).live
    ranked = np.argsort(-live, kind="stable").tolist()
    found: dict[int, float] = {}
    descending = sorted(set(budgets), reverse=True)
    for done, budget in enumerate(descending):
        until = start + seconds * (_FIRST + (1 - _FIRST) * done / max(1, len(descending) - 1))
        slot = until - time.perf_counter()
        linear: dict[int, float] = {}
        for v in ranked:
            left = until - _SOLVING * slot - time.perf_counter()
            if left <= 0:
                break
            linear[v] = bound.at(v, budget, fixed, seconds=left)
        position = {v: at for at, v in enumerate(ranked)}
        ranked.sort(key=lambda v, linear=linear, position=position: (-min(linear.get(v, -1.0), 1e9), position[v]))
        top = max(linear.values(), default=0.0)
        for v in ranked[:_SOLVED]:
            left = until - time.perf_counter()
            if left > 0 and 0 < top < float("inf"):
                top = max(top, bound.at(v, budget, fixed, True, left))
        found[budget] = top
    # What a larger budget costs, a smaller one costs as well.
    return [max(f for b, f in found.items() if b >= budget) for budget in budgets]
