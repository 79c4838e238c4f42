"""Which process of how many this is, from the variables that launchers set."""

from __future__ import annotations

import dataclasses
import os
import re
import zlib
from collections.abc import Mapping

from ortgraph.errors import InputError

_FIRST_PORT, _PORTS = 20000, 10000  # below the range from which systems give out ports by themselves
# (rank, number of ranks, rank on this machine, ranks on this machine) of each launcher, the innermost first. SLURM: those of
# a step, which srun sets; the script of a batch job has SLURM_PROCID and SLURM_NTASKS, too, and is one process.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}  # fmt: skip
_JOBS = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")


@dataclasses.dataclass(frozen=True)
class Place:
    """A process among those of one job.

    Attributes:
        rank: Its number, from 0.
        size: How many there are.
        local_rank: Its number among those of its machine.
        local_size: How many are on its machine.
        meeting: Where they find each other, as PyTorch's ``init_method``; empty where nothing says it.
        launcher: Who set the variables; empty for a process by itself.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    meeting: str = ""
    launcher: str = ""


def place_of(environment: Mapping[str, str] | None = None) -> Place:
    """Read the variables of torchrun, MPI or SLURM; a process without any is the only one.

    Args:
        environment: ``os.environ`` by default.

    Raises:
        InputError: Variables are incomplete or contradict each other.
    """
    given = os.environ if environment is None else environment
    for launcher, names in _LAUNCHERS.items():
        if names[0] in given and names[1] in given:
            return _read(launcher, names, given)
    if "RANK" in given:
        raise InputError("RANK is set and WORLD_SIZE is not", "start with torchrun, mpirun or srun, or set both")
    return Place()


def _read(launcher: str, names: tuple[str, str, str, str], given: Mapping[str, str]) -> Place:
    rank, size = _number(given, names[0]), _number(given, names[1])
    local_rank = _number(given, names[2], 0)
    local_size = _number(given, names[3], 1 if size == 1 else 0)  # of SLURM "2(x3)": the first number
    if not 0 <= rank < size or (local_size and local_rank >= local_size):
        raise InputError(
            f"{launcher}: rank {rank} of {size}, {local_rank} of {local_size} on this machine",
            f"look at {', '.join(names)}",
        )
    place = Place(rank, size, local_rank, local_size or 1, "", launcher)
    return dataclasses.replace(place, meeting=_meeting(place, given)) if size > 1 else place


def _number(given: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = given.get(name)
    if text is None and default is not None:
        return default
    found = re.match(r"\d+", (text or "").strip())
    if found is None:
        raise InputError(f"{name}={text!r} is no number", "start with torchrun, mpirun or srun")
    return int(found[0])


def _meeting(place: Place, given: Mapping[str, str]) -> str:
    """An address that all processes work out alike."""
    host, port = given.get("MASTER_ADDR"), given.get("MASTER_PORT")
    if host is None and place.launcher == "SLURM":
        host = _first_host(given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST") or "")
    if host is None and place.local_size == place.size:
        host = "127.0.0.1"
    job = next((given[name] for name in _JOBS if name in given), None)
    if port is None and job is not None:  # why of the job: two jobs of one machine should not meet
        step = given.get("SLURM_STEP_ID", "")
        port = str(_FIRST_PORT + zlib.crc32(f"{job} {step}".encode()) % _PORTS)
    return f"tcp://{host}:{port}" if host and port else ""


def _first_host(nodes: str) -> str | None:
    """The first name of a list like ``a[01-03,7]-x,b2``."""
    found = re.match(r"([^\[,]*)(?:\[([^\]]*)\])?([^,]*)", nodes)
    if found is None or not found[0]:
        return None
    before, numbers, after = found[1], found[2], found[3]
    return before + (re.split(r"[-,]", numbers)[0] if numbers else "") + after
