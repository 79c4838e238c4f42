"""Ranks from the variables of launchers."""

from __future__ import annotations

import pytest

from ortgraph.distributed import Place, place_of
from ortgraph.errors import InputError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a1", "MASTER_PORT": "29500",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-a1-77@1",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu-a[003-005,9]x,b7", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0",
}  # fmt: skip


def test_no_launcher() -> None:
    assert place_of({}) == Place()


def test_torchrun() -> None:
    assert place_of(TORCHRUN) == Place(3, 4, 1, 2, "tcp://a1:29500", "torchrun")


def test_mpi() -> None:
    place = place_of(OPEN_MPI)
    assert (place.rank, place.size, place.local_rank, place.local_size, place.launcher) == (1, 2, 1, 2, "Open MPI")
    host, port = place.meeting.removeprefix("tcp://").split(":")
    assert host == "127.0.0.1" and 20000 <= int(port) < 30000
    assert place_of({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-a1-78@1"}).meeting != place.meeting
    other = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    assert place_of({**other, "MASTER_PORT": "1234"}) == Place(0, 2, 0, 2, "tcp://127.0.0.1:1234", "MPI")
    assert place_of({**other, "MPI_LOCALNRANKS": "1"}).meeting == ""  # several machines, and no address


def test_slurm() -> None:
    place = place_of(SLURM)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (5, 6, 1, 2)
    assert place.meeting.startswith("tcp://gpu-a003x:")
    assert place_of({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).meeting == place.meeting
    assert place_of({**SLURM, "SLURM_STEP_NODELIST": "one,two"}).meeting.startswith("tcp://one:")


def test_the_script_of_a_batch_job_is_one_process() -> None:
    assert place_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"}) == Place()


def test_the_innermost_launcher_counts() -> None:
    assert place_of({**SLURM, **OPEN_MPI, **TORCHRUN}).launcher == "torchrun"
    assert place_of({**SLURM, **OPEN_MPI}).launcher == "Open MPI"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": "4"}, "rank 4 of 4"),
        ({"RANK": "x"}, "RANK='x' is no number"),
        ({"LOCAL_RANK": "2"}, "2 of 2 on this machine"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='' is no number"),
    ],
)
def test_variables_that_contradict(change: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        place_of({**TORCHRUN, **change})


def test_a_rank_without_a_size() -> None:
    with pytest.raises(InputError, match="WORLD_SIZE is not"):
        place_of({"RANK": "0"})
