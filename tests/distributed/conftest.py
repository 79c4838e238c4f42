"""Two processes on this machine: started together, stopped together, bounded in time."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

LIMIT = 240.0  # seconds for everything a launch does, on a busy machine; a few on a quiet one
HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent


def finish(processes: Sequence[subprocess.Popen], logs: Sequence[pathlib.Path], limit: float) -> list[str]:
    """Wait for all; when one fails or time is up the others are stopped. Returns what each has printed."""
    end = time.monotonic() + limit
    try:
        while any(p.poll() is None for p in processes):
            if time.monotonic() > end or any(p.poll() not in (None, 0) for p in processes):
                break
            time.sleep(0.02)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the others see that one is gone
            for p in processes:
                p.wait(max(min(20.0, end - time.monotonic()), 0.1))
    finally:
        for p in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
            p.wait()
    return [log.read_text(errors="replace") for log in logs]


class Launch:
    """Starts scripts of this folder in two processes.

    Attributes:
        folder: For what the processes write.
        codes: Exit codes of the last launch.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.codes: list[int] = []

    def ranks(self, script: str, *arguments: str, limit: float = LIMIT) -> list[str]:
        """A process per rank, with the variables that torchrun sets; they meet in a file, so that no port is needed."""
        meeting = self.folder / f"meeting-{time.monotonic_ns()}"
        commands = [[sys.executable, str(HERE / script), str(self.folder), *arguments]] * 2
        return self._run(
            commands,
            [{"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": "2", "MEETING": f"file://{meeting}"} for r in (0, 1)],
            limit,
        )

    def command(self, *command: str, limit: float = LIMIT) -> str:
        """A launcher that starts the ranks itself."""
        return self._run([list(command)], [{}], limit)[0]

    def _run(self, commands: list[list[str]], variables: list[dict[str, str]], limit: float) -> list[str]:
        logs = [self.folder / f"log-{i}" for i in range(len(commands))]
        common = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        processes = []
        for command, own, log in zip(commands, variables, logs, strict=True):
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen(command, env={**common, **own}, stdout=file, stderr=file, start_new_session=True)
                )
        printed = finish(processes, logs, limit)
        self.codes = [p.returncode for p in processes]
        return printed

    def results(self) -> list[dict[str, Any]]:
        """What each rank saved as ``rank-<n>.pt``."""
        return [torch.load(self.folder / f"rank-{r}.pt", weights_only=False) for r in (0, 1)]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """A launcher with a folder of its own."""
    return Launch(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def saved(launch: Launch) -> Callable[..., list[dict[str, Any]]]:
    """Runs a script in two ranks and returns what each saved."""

    def run(script: str, *arguments: str) -> list[dict[str, Any]]:
        printed = launch.ranks(script, *arguments)
        assert launch.codes == [0, 0], "\n".join(printed)[-6000:]
        return launch.results()

    return run
