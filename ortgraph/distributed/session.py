"""DistributedSession: a step of several processes, each with a part of the batch, with one update."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import pathlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ortgraph.distributed.buckets import Buckets
from ortgraph.distributed.group import Group
from ortgraph.distributed.parted_program import PartedProgram
from ortgraph.distributed.rank_report import RankReport, RankRow
from ortgraph.errors import DistributedError, InputError, NonFiniteLossError
from ortgraph.graph import TrainingGraph, static_shape
from ortgraph.manager.graph_cache import key_of
from ortgraph.runtime.batch import Batch
from ortgraph.runtime.options import default_threads
from ortgraph.runtime.process_memory import peak
from ortgraph.runtime.program import Program
from ortgraph.runtime.session import TrainingSession

logger = logging.getLogger(__name__)
_MIX = 0x5851F42D4C957F2D  # odd: ranks times it, modulo 2**63, are all different
_TIMED = 100  # latest steps that a report speaks of


class DistributedSession(TrainingSession):
    """Trains on the joint batch of all processes: each gives its part, gradients are summed, all make the same update.

    All processes start from rank 0's values and draw random numbers of their own. A call that fails in one process fails
    in all (``step``, ``save_checkpoint``, ``load_checkpoint``); what runs one program alone (``gradients``, ``evaluate``,
    ``loss``, ``accumulate``) is this process's own business.

    Args:
        graph: Optimized with ``distributed=True`` and an optimizer, the same in all processes.
        group: From ``ortgraph.distributed.init``.
        threads: Threads of one operator; None: the processors of this machine, shared by the processes on it.
        bucket_bytes: Gradients are sent in arrays of about this size; None: 8 MiB, or a sixteenth of all gradients.
        overlap: Send each array as soon as its gradients are there, while others are computed. Results are the same.
        options: As for ``TrainingSession``.

    Raises:
        InputError: The graph was not optimized for several processes.
        DistributedError: Processes have different graphs, or one of them failed.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        group: Group,
        threads: int | None = None,
        bucket_bytes: int | None = None,
        overlap: bool = True,
        **options: Any,
    ) -> None:
        self.group = group
        with group.together("making a session"):
            if isinstance(graph, TrainingGraph) and not graph.signature.reduces:
                raise InputError(
                    "the graph has no place for gradients of other processes",
                    "ortgraph.distributed.optimize, or ortgraph.optimize(..., optimizer=..., distributed=True)",
                )
            share = max(1, default_threads() // group.place.local_size)
            super().__init__(graph, threads=threads or share, **options)
            if not self._memory.device.on_host:
                raise InputError(f"gradients are summed on the host, not on {self.target}", "a target of the CPU")
        group.same("graph", key_of(graph, ()))
        self._overlap = overlap and group.size > 1
        reduced = [self._inputs[name] for name in _in_order_of_making(graph)]
        types = {v.name or "": (v.dtype.numpy(), static_shape(v) or ()) for v in reduced}  # type: ignore[union-attr]
        self.gradient_buckets = Buckets(types, bucket_bytes)
        self._memory.persistent.update(self.gradient_buckets.views)
        others = [a for n, a in self._memory.persistent.items() if n not in self.gradient_buckets.views]
        group.take_first(others, "values of rank 0")
        self._mix_keys(self._memory.persistent)
        self._loaded = False
        self._micro_batches: list[float | None] = []  # items of those that wait for an update
        self._seconds: deque[tuple[float, float]] = deque(maxlen=_TIMED)

    # -- running ------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, learning_rate: float | None = None, items: float | None = None) -> float:
        """Forward and backward on this process's part of the batch, the sum of gradients, and the update.

        Where the loss is a mean, the update is that of the joint batch when all parts have equally many items. Otherwise
        say how many this part has (labels that count): gradients are then weighted by them.

        Args:
            batch: This process's part.
            learning_rate: As for ``TrainingSession.step``; the same in all processes.
            items: How many things the loss is a mean of; given in all processes or in none.

        Returns:
            The loss of the joint batch before the update.

        Raises:
            BatchError, InputError: As for ``TrainingSession.step``.
            DistributedError: Another process failed, or processes disagree. No process has updated anything then.
            NonFiniteLossError: The joint loss is NaN or infinite; without a loss scale nothing was updated.
        """
        start = time.perf_counter()
        failure, loss = None, math.nan
        sums = _Sums(self.group, self.gradient_buckets.flat)
        try:
            self._require_optimizer("step")
            if learning_rate is not None:
                self.learning_rate = learning_rate
            loss = self._backward(batch, items, sums.start)
        except Exception as error:  # noqa: BLE001 - raised again as soon as the others know
            failure = error
        sent = time.perf_counter()
        try:
            sums.start_all()  # why after a failure, too: the others have sent theirs, and wait
            total, counted = self._agree(failure, loss)
            sums.finish()
        except Exception:
            sums.abandon()
            self._start_over()
            raise
        scaled = any(s.kind == "loss_scale" for s in self.signature.states)
        if self._check_finite and not scaled and not math.isfinite(total):
            self._start_over()
            raise NonFiniteLossError(f"the loss is {total} at step {self.steps + 1}; nothing was updated")
        if counted is not None:
            self.gradient_buckets.scale(1.0 / counted)
        arrived = time.perf_counter()
        skipped = self.skipped_steps
        self._program("update", next(reversed(self._programs))[1]).run()
        self._start_over()
        self.steps += 1
        self._seconds.append((time.perf_counter() - start, arrived - sent))
        if self.skipped_steps != skipped:
            logger.info("step %d: gradients overflow, nothing is updated; loss scale %g", self.steps, self.loss_scale)
        elif self._check_finite and not math.isfinite(total):
            raise NonFiniteLossError(
                f"the loss is {total} at step {self.steps}; parameters were updated with it", "load the last checkpoint"
            )
        return total

    def accumulate(self, batch: Batch, items: float | None = None) -> float:
        """Forward and backward of one micro-batch of this process; nothing is sent until ``step``. Returns its loss.

        Raises:
            InputError: The optimizer was attached without accumulation.
        """
        self._require_optimizer("accumulate")
        if self.accumulation_steps == 1:
            raise InputError("this graph cannot accumulate gradients", "optimize with accumulation_steps=N")
        return self._backward(batch, items)

    def _backward(self, batch: Batch, items: float | None, finished: Callable[[int], None] | None = None) -> float:
        """Add this part's gradients to the buckets, or put them there; told is which bucket is finished."""
        if items is not None and not 0 <= items < math.inf:
            raise InputError(f"items={items}", "how many labels of this part count")
        self._set_seed(1.0 / (self.group.size * self.accumulation_steps) if items is None else float(items))
        program = self._ready("backward", batch)
        self._micro_batches.append(items)
        if items == 0:  # why: a mean of nothing is no number
            if self.accumulation_steps == 1:
                self.gradient_buckets.clear()
            return 0.0
        if isinstance(program, PartedProgram):
            program.run(finished)
        else:
            program.run()
        return float(program.value(self.signature.loss))

    def _new_program(self, kind: str, graph: TrainingGraph, *arguments: Any) -> Program:
        if kind != "backward" or not self._overlap:
            return super()._new_program(kind, graph, *arguments)
        groups = self.gradient_buckets.names
        return PartedProgram(kind, graph, *arguments, self._memory, self.threads, self._poison, groups=groups)

    def _agree(self, failure: Exception | None, loss: float) -> tuple[float, float | None]:
        """The joint loss, and the number of items of all parts where it was given."""
        parts = self._micro_batches
        given = [n for n in parts if n is not None]
        weight = 1.0 if not parts or parts[-1] is None else parts[-1]
        weighted = 0.0 if weight == 0 else weight * loss
        rate = self.learning_rate if self.has_optimizer else 0.0
        numbers = (weighted, weight, len(parts), len(given), float(sum(given)), rate, self.steps, self._loaded)
        told = self.group.meet("a step", failure, *map(float, numbers))
        if any(row[7] for row in told):
            self.group.same("parameters and states (loaded before this step)", self._fingerprint())
            self._loaded = False
        for i, what in ((2, "micro-batches"), (5, "the learning rate"), (6, "the number of steps")):
            values = [row[i] for row in told]
            if len(set(values)) > 1:
                raise DistributedError(f"processes disagree on {what}: {values}", "call step alike in all of them")
        counts, named = sum(row[2] for row in told), sum(row[3] for row in told)
        if named not in (0, counts):
            raise DistributedError("items were given for some parts only", "give them in all processes, or in none")
        items = sum(row[4] for row in told) if named else None
        if items == 0:
            raise InputError("no part of the batch has any items", "leave such a batch out")
        return sum(row[0] for row in told) / max(sum(row[1] for row in told), 1e-30), items

    def _start_over(self) -> None:
        self._micro_batches = []
        if self.accumulation_steps > 1:
            self.gradient_buckets.clear()

    # -- random numbers and checkpoints -------------------------------------------------------------------------

    def _mix_keys(self, values: Mapping[str, np.ndarray], by_name: bool = False) -> None:
        """From rank 0's random key to this process's, or back."""
        mix = np.int64(self.group.rank * _MIX % 2**63)
        for state in self.signature.states:
            if state.kind == "random_key":
                values[state.name if by_name else state.input][...] ^= mix

    def optimizer_state_dict(self) -> dict[str, np.ndarray]:
        """As of ``TrainingSession``, with rank 0's random key."""
        found = super().optimizer_state_dict()
        self._mix_keys(found, by_name=True)
        return found

    def load_optimizer_state_dict(self, state: Mapping[str, object]) -> None:
        super().load_optimizer_state_dict(state)
        self._mix_keys(self._memory.persistent)
        self._loaded = True

    def load_state_dict(self, *args: Any, **options: Any) -> None:
        """As of ``TrainingSession``, the same values in all processes: the next step compares them."""
        super().load_state_dict(*args, **options)
        self._loaded = True

    def load_torch_state_dict(self, *args: Any, **options: Any) -> None:
        """As of ``TrainingSession``, the same values in all processes: the next step compares them."""
        super().load_torch_state_dict(*args, **options)
        self._loaded = True

    def load_hugging_face(self, *args: Any, **options: Any) -> dict[str, Any]:
        """As of ``TrainingSession``, the same folder in all processes: the next step compares values.

        Each draws random numbers of its own afterwards: from the saved key, if there is one, and its rank.
        """
        self._mix_keys(self._memory.persistent)
        try:
            found = super().load_hugging_face(*args, **options)
        finally:
            self._mix_keys(self._memory.persistent)
        self._loaded = True
        return found

    def save_hugging_face(self, folder: str | os.PathLike[str], *args: Any, **options: Any) -> pathlib.Path:
        """Written by rank 0, as of ``TrainingSession``; all return when it is there."""
        with self.group.together("saving a checkpoint"):
            if self.group.rank == 0:
                super().save_hugging_face(folder, *args, **options)
        return pathlib.Path(folder)

    def _fingerprint(self) -> str:
        """A hash of what has to be the same in all processes: parameters and states of the optimizer."""
        own = ("random_key", "random_step")
        names = [p.name for p in self.signature.parameters]
        names += [s.input for s in self.signature.states if s.kind not in own]
        digest = hashlib.sha256()
        for name in names:
            digest.update(self._memory.persistent[name].tobytes())
        return digest.hexdigest()

    def save_checkpoint(self, folder: str | os.PathLike[str], position: Any = None) -> pathlib.Path:
        """Written by rank 0; all return when it is there. Between ``accumulate`` and ``step`` there is none."""
        with self.group.together("saving a checkpoint"):
            if self._micro_batches:
                raise InputError("micro-batches wait for their step: each process has its own sum", "save after step")
            if self.group.rank == 0:
                super().save_checkpoint(folder, position)
        return pathlib.Path(folder)

    def load_checkpoint(self, folder: str | os.PathLike[str], strict: bool = True) -> Any:
        """As of ``TrainingSession``, by all processes; it may be one of another number of processes, or of one."""
        with self.group.together("loading a checkpoint"):
            position = super().load_checkpoint(folder, strict)
        self._mix_keys(self._memory.persistent)
        self._start_over()
        self._loaded = True
        return position

    # -- figures ------------------------------------------------------------------------------------------------

    def report(self) -> RankReport:
        """Time and memory of each process, the same in all; ``print(session.report())``."""
        seconds = np.array(self._seconds or [(math.nan, math.nan)])
        step, sums = np.median(seconds, axis=0)
        row = RankRow(
            self.group.rank, float(step), float(sums), self.arena_bytes, self.parameter_bytes, self.state_bytes,
            self.gradient_buckets.nbytes, peak(),
        )  # fmt: skip
        return RankReport(tuple(self.group.gather_rows(row)))


class _Sums:
    """The sums of one step, started in order."""

    def __init__(self, group: Group, arrays: Sequence[np.ndarray]) -> None:
        self._group, self._arrays = group, arrays
        self._started: list[Any] = []

    def start(self, number: int) -> None:
        assert number == len(self._started), "buckets are sent in order"
        self._started.append(self._group.start_sum(self._arrays[number]))

    def start_all(self) -> None:
        """Start those that have not been."""
        for number in range(len(self._started), len(self._arrays)):
            self.start(number)

    def finish(self) -> None:
        started, self._started = self._started, []
        self._group.finish(started)

    def abandon(self) -> None:
        """Wait until nothing writes the arrays; how it ends does not matter any more."""
        with contextlib.suppress(DistributedError):
            self.finish()


def _in_order_of_making(graph: TrainingGraph) -> list[str]:
    """Inputs for sums of gradients, that of the gradient which is there first in front: the same in all processes."""
    position = {node: i for i, node in enumerate(graph.graph)}
    makers = {v.name: v.producer() for v in graph.graph.outputs}
    made = {
        p.reduced: position.get(makers.get(p.contribution), -1)  # type: ignore[arg-type]
        for p in reversed(graph.signature.parameters)
        if p.reduced is not None
    }
    return sorted(made, key=made.__getitem__)
