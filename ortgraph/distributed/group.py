"""A group of processes that sum arrays, and that stop together when one of them fails."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed

from ortgraph.distributed.ranks import Place, place_of
from ortgraph.errors import DistributedError, InputError

logger = logging.getLogger(__name__)
SUM = "the sum of gradients"
TIMEOUT = 600.0  # seconds that a process waits for the others: they may compile


def init(timeout: float = TIMEOUT, meeting: str | None = None) -> Group:
    """Join the processes that torchrun, mpirun or srun started (gloo, on processors).

    Args:
        timeout: Seconds after which a process that waits for another gives up, with an error.
        meeting: PyTorch's ``init_method``, in place of the launcher's.

    Returns:
        The group of all; of the process group that PyTorch has already, if it has one.

    Raises:
        InputError: The launcher's variables make no sense, or nothing says where the processes meet.
        DistributedError: The processes do not find each other in time.
    """
    if torch.distributed.is_initialized():
        return Group(timeout=timeout)
    place = place_of()
    where = meeting or place.meeting
    if place.size > 1 and not where:
        raise InputError(
            f"{place.launcher} does not say where the processes meet", "set MASTER_ADDR and MASTER_PORT for all of them"
        )
    if place.size > 1:
        try:
            torch.distributed.init_process_group(
                "gloo", where, rank=place.rank, world_size=place.size, timeout=datetime.timedelta(seconds=timeout)
            )
        except (RuntimeError, ValueError) as error:
            raise DistributedError(
                f"rank {place.rank} of {place.size} does not find the others at {where}: {error}",
                "look whether all processes started; MASTER_ADDR and MASTER_PORT say where they meet",
            ) from error
    return Group(place=place, timeout=timeout)


class Group:
    """Processes that work on one training.

    Args:
        process_group: PyTorch's; None means its default group, or this process alone where there is none.
        place: From the launcher, for the number of processes on this machine.
        timeout: Seconds, for messages.

    Attributes:
        rank: Number of this process in the group.
        size: How many there are.
    """

    def __init__(self, process_group: Any = None, place: Place | None = None, timeout: float = TIMEOUT) -> None:
        self._group, self.place, self.timeout = process_group, place or place_of(), timeout
        alone = not torch.distributed.is_initialized()
        self.rank = 0 if alone else torch.distributed.get_rank(process_group)
        self.size = 1 if alone else torch.distributed.get_world_size(process_group)

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run the body in all processes; when it fails in one, all raise.

        Raises:
            DistributedError: Another process failed, or is gone. The process that failed raises its own error.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again as soon as the others know
            failure = error
        self.meet(what, failure)

    def meet(self, what: str, failure: Exception | None = None, *numbers: float) -> list[list[float]]:
        """Wait for all, and learn whether all are well.

        Args:
            what: What they did, for messages.
            failure: Why this process cannot go on.
            numbers: Told to all.

        Returns:
            The numbers of each process.
        """
        told = self.gather([float(failure is not None), *numbers], what)
        failed = [rank for rank, row in enumerate(told) if row[0]]
        if failed:
            self._stop(what, failed[0], failure)
        return [row[1:] for row in told]

    def _stop(self, what: str, first: int, failure: Exception | None) -> None:
        texts: list[Any] = [None] * self.size
        if self.size > 1:
            with _peers(what, self):
                text = None if failure is None else f"{type(failure).__name__}: {failure}"
                torch.distributed.all_gather_object(texts, text, self._group)
        if failure is not None:
            raise failure
        raise DistributedError(f"rank {first} stopped in {what}: {texts[first]}", f"see what rank {first} printed")

    def gather(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        """The numbers of every process."""
        if self.size == 1:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64)
        every = [torch.empty_like(own) for _ in range(self.size)]
        with _peers(what, self):
            torch.distributed.all_gather(every, own, self._group)
        return [t.tolist() for t in every]

    def gather_rows(self, row: Any) -> list[Any]:
        """An object of every process."""
        rows: list[Any] = [row]
        if self.size > 1:
            rows = [None] * self.size
            with _peers("a report", self):
                torch.distributed.all_gather_object(rows, row, self._group)
        return rows

    def start_sum(self, array: np.ndarray, what: str = SUM) -> Any:
        """Start to replace an array by its sum over all processes; it is neither read nor written before ``finish``.

        All processes start the same sums in the same order.

        Returns:
            What ``finish`` takes.
        """
        if self.size == 1:
            return None
        with _peers(what, self):
            return torch.distributed.all_reduce(as_tensor(array), group=self._group, async_op=True)

    def finish(self, started: Sequence[Any], what: str = SUM) -> None:
        """Wait for sums. Also when one fails none is on its way any more."""
        failure: Exception | None = None
        for work in started:
            try:
                with _peers(what, self):
                    if work is not None:
                        work.wait()
            except DistributedError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def take_first(self, arrays: Sequence[np.ndarray], what: str) -> None:
        """Replace each array by that of rank 0."""
        if self.size == 1:
            return
        with _peers(what, self):
            for array in arrays:
                torch.distributed.broadcast(as_tensor(array), group=self._group, group_src=0)

    def same(self, what: str, text: str) -> None:
        """Check that all processes have the same text.

        Raises:
            DistributedError: They differ.
        """
        digest = hashlib.sha256(text.encode()).digest()
        told = self.gather([float(int.from_bytes(digest[i : i + 6], "big")) for i in (0, 6, 12)], what)
        other = next((rank for rank, row in enumerate(told) if row != told[0]), None)
        if other is not None:
            raise DistributedError(
                f"rank {other} differs from rank 0 in its {what}",
                "give all ranks the same module, options, values and package",
            )


@contextlib.contextmanager
def _peers(what: str, group: Group) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # PyTorch's: the connection is closed, or time is up
        raise DistributedError(
            f"rank {group.rank}, {what}: another process is gone, or did not come within its time ({error})",
            "the first rank that stopped shows why; init(timeout=...) sets the time",
        ) from error


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """The same memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
