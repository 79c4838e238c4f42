"""Recompute selection as a small integer program over the few moments at which memory is tight.

Checkmate (Jain et al., 2020) has a stage for every operation. Here only some first evaluations, the *moments* v_1 < v_2 <
..., cut an order into stages; memory is limited at the moments alone. With e_i^s: operation i is evaluated in stage s, and
m_u^k: value u lies in memory at moment k:

    minimize   sum of c_i e_i^s over s >= 1 beyond first evaluations
    such that  e_j^s <= m_u^s + e_i^s       j reads u, made by i: in memory when the stage began, or made in it
               m_u^k <= m_u^(k-1) + e_i^(k-1)
               sum size_u m_u^k + scratch(v_k) <= budget,  m_u^k = 1 for what v_k reads and makes

which is a bound for the given order whatever the moments. A sequence follows from m: what is not in m at a moment is
dropped there, and evaluated again right before its next reader. Where the sequence exceeds the budget, the next first
evaluation becomes a moment too, and the program is solved again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from ortgraph.plan.operations import OperationGraph
from ortgraph.plan.recompute.floor import check_floor
from ortgraph.plan.recompute.greedy import relieve_peak
from ortgraph.plan.recompute.problem import RecomputeProblem
from ortgraph.plan.recompute.program import solve_program
from ortgraph.plan.recompute.solution import RecomputeSolution, make_solution
from ortgraph.plan.simulate import simulate

_MOMENTS = 40
_ROUNDS = 100
_PROGRAM = 0.7  # share of the time; the rest is for greedy drops where the program's sequence is over the budget
_ONE = 0.5  # share of what is left, for one program
_GAP = 1e-5  # share of the cost: 0.001 % of overhead


def solve_stages(
    problem: RecomputeProblem, seconds: float = 5.0, order: Sequence[int] | None = None
) -> RecomputeSolution:
    """The cheapest sequence found whose first evaluations keep an order; over the budget where none was found.

    Args:
        problem: Graph and budget.
        seconds: Wall time.
        order: Valid order of first evaluations; the given order by default.

    Raises:
        PlanError: The budget is below the memory floor.
        RuntimeSetupError: SciPy is not installed.
    """
    start = time.perf_counter()
    check_floor(problem)
    graph = problem.graph
    order = list(graph.given_order() if order is None else order)
    first = simulate(graph, order)
    best: _Best = (max(first.peak - problem.budget, 0), first.cost, order)
    bound = graph.cost
    program = _Program(graph, order)
    moments = [int(np.argmax(first.live))] if order else []
    room = 0
    tried: list[tuple[float, list[int]]] = []
    for _ in range(_ROUNDS if best[0] else 0):
        left = seconds * _PROGRAM - (time.perf_counter() - start)
        if left <= 0:
            break
        found = program.solve(sorted(moments), problem.budget - room, left * _ONE)
        if not room and not program.strict:
            bound = max(bound, graph.cost + found.bound)
        if found.memory is None or found.evaluated is None:
            break
        sequence = program.sequence(sorted(moments), found)
        if sequence is None:  # something would be evaluated after what it reads is overwritten
            program.strict = True
            continue
        profile = simulate(graph, sequence)
        best = _better(problem, best, sequence)
        over = profile.peak - problem.budget
        if over <= 0:
            break
        tried.append((profile.cost, sequence))
        where = _next_first(sequence, program.at, int(np.argmax(profile.live)))
        if where not in moments and len(moments) < _MOMENTS:
            moments.append(where)
            continue
        # The peak lies at an evaluation between moments: leave room for such.
        room += max(over // 4, problem.budget // 1000)
    for cost, sequence in sorted(tried):
        if time.perf_counter() - start > seconds or (not best[0] and cost >= best[1]):
            break
        best = _better(problem, best, relieve(problem, sequence, start + seconds))
    return make_solution(problem, best[2], "stages", time.perf_counter() - start, bound)


_Best = tuple[int, float, list[int]]  # bytes over the budget, cost, sequence


def _better(problem: RecomputeProblem, best: _Best, sequence: list[int]) -> _Best:
    profile = simulate(problem.graph, sequence)
    return min(best, (max(profile.peak - problem.budget, 0), profile.cost, sequence), key=lambda b: b[:2])


def relieve(problem: RecomputeProblem, sequence: Sequence[int], until: float) -> list[int]:
    """A sequence after greedy drops at its peaks, until it is within the budget, nothing helps, or time is over."""
    changed = list(sequence)
    live = simulate(problem.graph, changed).live
    while live.max(initial=0) > problem.budget and time.perf_counter() < until:
        step = relieve_peak(problem.graph, changed, live, problem.budget)
        if step is None:
            break
        changed, live = step
    return changed


def _next_first(sequence: Sequence[int], at: dict[int, int], step: int) -> int:
    """Position in the order of the first evaluation at or after a step (the last one if there is none)."""
    done = set(sequence[:step])
    return next((at[i] for i in sequence[step:] if i not in done), len(at) - 1)


@dataclasses.dataclass(frozen=True)
class _Found:
    """Values in memory by moment and positions evaluated by stage (None without a solution), and a bound on added cost."""

    memory: list[np.ndarray] | None
    evaluated: list[np.ndarray] | None
    bound: float


class _Program:
    """The integer program for one order; positions of the order stand for operations."""

    strict = False  # no evaluation in a stage in which something that it reads is overwritten: no bound then

    def __init__(self, graph: OperationGraph, order: Sequence[int]) -> None:
        self.graph, self.order = graph, list(order)
        self.at = {i: p for p, i in enumerate(self.order)}
        self.made_at = np.array([self.at[i] for i in graph.producer], dtype=np.int64)
        self.cost = graph.cost or 1.0
        self.unit = max((v.size for v in graph.values), default=1) or 1
        self.sizes = np.array([v.size / self.unit for v in graph.values])
        self.kept = np.array([u for u, v in enumerate(graph.values) if v.kept], dtype=np.int64)
        pairs = [(self.at[j], u) for j, o in enumerate(graph.operations) for u in o.inputs]
        self.reader = np.array([p for p, _ in pairs], dtype=np.int64)
        self.read = np.array([u for _, u in pairs], dtype=np.int64)
        self.costs = np.array([graph.operations[i].cost / self.cost for i in self.order])
        self.closed = np.full(len(self.order), len(self.order), dtype=np.int64)  # no evaluation after this position
        for j, o in enumerate(graph.operations):
            for i in o.after:
                self.closed[self.at[i]] = min(self.closed[self.at[i]], self.at[j])
        self.once = np.array([not graph.operations[i].recompute for i in self.order])

    def solve(self, moments: Sequence[int], budget: int, seconds: float) -> _Found:
        """Solve for moments (positions, ascending)."""
        n, k, count = len(self.order), len(self.graph.values), len(moments)
        rows, low, high, least, most, cost = self._rows(moments, budget)
        where = np.concatenate([r for r, _, _ in rows])
        columns = np.concatenate([c for _, c, _ in rows])
        factors = np.concatenate([f for _, _, f in rows])
        integral = np.tile(np.concatenate([np.ones(n), np.zeros(k)]), count)
        result = solve_program(
            cost, (where, columns, factors), (low, high), (least, most), integral, max(seconds, 0.05), _GAP
        )
        if result.x is None:
            return _Found(None, None, 0.0)
        proven = result.mip_dual_bound if result.mip_dual_bound is not None else 0.0
        first = float(cost @ least)  # first evaluations after the first moment
        stages = result.x.reshape(count, n + k) > 0.5
        return _Found(list(stages[:, n:]), list(stages[:, :n]), max(0.0, proven - first - 1e-6) * self.cost)

    def _rows(self, moments: Sequence[int], budget: int):
        """Rows as (row, column, factor) triples, their limits, limits of the variables, and costs.

        Variables of stage s: evaluations by position, then values in memory at the moment that begins it.
        """
        graph, n, k = self.graph, len(self.order), len(self.graph.values)
        width, position = n + k, np.arange(n)
        rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        low: list[np.ndarray] = []
        high: list[np.ndarray] = []
        least, most = np.zeros(width * len(moments)), np.ones(width * len(moments))
        total = 0

        def add(
            columns: Sequence[np.ndarray], factors: Sequence[float], lower: float, upper: float | np.ndarray
        ) -> None:
            """One row per entry of the columns, with the same factors."""
            nonlocal total
            size = len(columns[0])
            for c, f in zip(columns, factors, strict=True):
                rows.append((total + np.arange(size), c, np.full(size, f)))
            low.append(np.full(size, lower))
            high.append(np.broadcast_to(np.asarray(upper, dtype=np.float64), size))
            total += size

        for s, v in enumerate(moments):
            e, m = s * width, s * width + n
            end = moments[s + 1] if s + 1 < len(moments) else n
            operation = graph.operations[self.order[v]]
            fresh = (position > v) & (position < end)
            least[e : e + n][fresh] = 1
            most[e : e + n][position >= end] = 0
            most[e : e + n][(position <= v) & self.once] = 0
            most[e : e + n][(position <= v) & (self.closed < (end if self.strict else v + 1))] = 0
            add([e + self.reader, m + self.read, e + self.made_at[self.read]], [1, -1, -1], -np.inf, 0)
            must = np.array(sorted({*operation.inputs, *operation.outputs}), dtype=np.int64)
            least[m + must] = 1
            others = np.setdiff1d(np.arange(k), must[self.made_at[must] == v])
            if s == 0:
                most[m + others[self.made_at[others] >= v]] = 0
            else:
                before_e, before_m = e - width, m - width
                add([m + others, before_m + others, before_e + self.made_at[others]], [1, -1, -1], -np.inf, 0)
            inplace = sum({r: graph.values[r].size for _, r in operation.inplace}.values())
            rows.append((np.full(k, total), m + np.arange(k), self.sizes))
            low.append(np.array([-np.inf]))
            high.append(np.array([(budget - operation.scratch + inplace) / self.unit]))
            total += 1
        if self.kept.size:
            add([m + self.kept, e + self.made_at[self.kept]], [1, 1], 1, np.inf)
        cost = np.tile(np.concatenate([self.costs, np.zeros(k)]), len(moments))
        return rows, np.concatenate(low), np.concatenate(high), least, most, cost

    def sequence(self, moments: Sequence[int], found: _Found) -> list[int] | None:
        """First evaluations in order; what is not in memory at a moment is evaluated again when it is next read, or
        before the next moment if it is in memory there, or before what it reads is overwritten. None if that is too late.
        """
        assert found.memory is not None and found.evaluated is not None
        operations, producer = self.graph.operations, self.graph.producer
        dropped = np.zeros(len(self.graph.values), dtype=bool)
        held, planned = dict(zip(moments, found.memory, strict=True)), dict(zip(moments, found.evaluated, strict=True))
        stage = np.zeros(len(self.order), dtype=bool)
        sequence: list[int] = []
        p, late = 0, False

        def evaluate(i: int) -> None:
            nonlocal late
            late |= self.closed[self.at[i]] < p
            for u in operations[i].inputs:
                if dropped[u]:
                    evaluate(producer[u])
            sequence.append(i)
            dropped[list(operations[i].outputs)] = False

        for p, i in enumerate(self.order):
            wanted = np.flatnonzero(held[p] & dropped & (self.made_at < p)) if p in held else ()
            closing = [u for j in operations[i].after if stage[self.at[j]] for u in operations[j].outputs]
            for u in (*wanted, *closing):
                if dropped[u]:
                    evaluate(producer[u])
            evaluate(i)
            if p in held:
                dropped |= (self.made_at <= p) & ~held[p]
                stage = planned[p]
        return None if late else sequence
