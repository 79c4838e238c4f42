"""Processes that measure, and the machine that they run on.

A process answers ``ready`` or ``{"error": ...}``, then every line that it is sent with a line of JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

SHIM = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"


class Worker:
    """A process that measures.

    Attributes:
        error: Why it cannot run; None while it can.
    """

    def __init__(
        self,
        argument: Any,
        threads: int,
        preload: str | None = None,
        *,
        module: str = "bench.worker",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start ``python -m module ARGUMENT``, the argument as JSON, perhaps with a preloaded library."""
        given = {**os.environ, "OMP_NUM_THREADS": str(threads), **(environment or {})}
        if preload:
            given["LD_PRELOAD"] = preload
        self.error: str | None = None
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(argument)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=given,
        )

    def wait_ready(self) -> None:
        """Wait for the first steps; ``error`` says why there are none."""
        line = self._line()
        if line == "ready" or self.error:
            return
        self.error = json.loads(line)["error"]
        self.close()

    def run(self, steps: int, form: str = "") -> float | None:
        """The median seconds of some steps; None when the process ended."""
        times = self.ask(f"run {steps} {form}".strip())
        return statistics.median(times) if times else None

    def ask(self, command: str) -> Any:
        """The answer to a command; None when the process ended, and then ``error`` says so."""
        self.send(command)
        return self.receive()

    def send(self, command: str) -> None:
        """A command whose answer is received later, so that another process can work at the same time."""
        if self.error:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer tells
            print(command, file=self._process.stdin, flush=True)

    def receive(self) -> Any:
        """The answer to the command that was sent."""
        line = "" if self.error else self._line()
        return json.loads(line) if line else None

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            last = ([x.strip() for x in self._log.readlines() if x.strip()] or ["no message"])[-1]
            self.error = f"the process ended with {code}: {last[:200]}"
        return line

    def close(self) -> None:
        if self._log.closed:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()


@contextlib.contextmanager
def alone(lock: str | None) -> Iterator[None]:
    """Hold the lock of a file, for machines where several people take turns at timing."""
    if lock is None:
        yield
        return
    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def needs_shim() -> bool:
    """Whether MKL takes a slow path on this processor unless it is told that it is an Intel one."""
    return platform.machine() in ("x86_64", "AMD64") and "Intel" not in processor()


def build_shim(folder: str) -> str | None:
    """The library to preload for PyTorch's best setting; None where it changes nothing or there is no compiler."""
    if not needs_shim():
        return None
    source, library = pathlib.Path(folder, "shim.c"), pathlib.Path(folder, "shim.so")
    source.write_text(SHIM)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(library)


def processor() -> str:
    """The processor's own name."""
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine() -> str:
    """Processor and cores, in words."""
    return f"{processor()}, {os.cpu_count()} cores"


def is_busy() -> bool:
    """Whether others take a good part of the machine: more than half a core over the last minute."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5
