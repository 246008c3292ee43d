"""Who started this process, from the environment alone, and what is said when Horovod does not know of it."""

from __future__ import annotations

import pytest

from gba_hvd.comm.collectives import current_world
from gba_hvd.comm.other_launchers import launched_as_one_of_many
from gba_hvd.errors import HorovodMissing

SRUN = {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environ", "by", "size"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"}, "mpirun (Open MPI)", 3),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "mpiexec (PMI)", 2),
        ({"MPI_LOCALNRANKS": "2"}, "mpiexec (Hydra)", 2),
        ({"PMIX_RANK": "1"}, "a PMIx launcher", 2),
        (SRUN, "srun", 4),
        ({k: v for k, v in SRUN.items() if k != "SLURM_STEP_NUM_TASKS"}, "srun", 4),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "torchrun", 2),
    ],
)
def test_a_process_that_another_launcher_started_is_refused(
    environ: dict[str, str], by: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = launched_as_one_of_many(environ)
    assert found is not None and (found.by, found.size) == (by, size)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        HorovodMissing, match=rf"{size} processes .*has 1 worker.*gba-hvd run -np {size} .*GBA_HVD_ALONE"
    ):
        current_world()
    monkeypatch.setenv("GBA_HVD_ALONE", "1")
    assert current_world().size == 1


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},  # salloc, a shell on the login node
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # sbatch
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},  # salloc on a node
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},  # srun --ntasks=1 in an allocation of four
        {**SRUN, "HOROVOD_RANK": "0"},  # Horovod's launcher in such a step
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"WORLD_SIZE": "2"},
        {"PMI_SIZE": "many"},
    ],
)
def test_a_shell_within_an_allocation_is_not(environ: dict[str, str]) -> None:
    assert launched_as_one_of_many(environ) is None
