"""Whether this process was started as one of several by a launcher that Horovod knows nothing of.

Decided here, from the environment alone: srun, mpirun, an MPI operator or torchrun start n processes, and without
`horovodrun` each of them would train a job of its own. What the variables say is in `_SIZES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ALONE = "GBA_HVD_ALONE"
_FIRST_RESERVED_STEP = 2**32 - 16  # Slurm's numbers for batch scripts and interactive shells: one process each


@dataclass(frozen=True)
class Launched:
    """By whom, how many processes, and the variable that says so."""

    by: str
    size: int
    variable: str


# Variables that a launcher sets for the processes it starts, and that a shell within an allocation does not have.
_SIZES = (
    ("OMPI_COMM_WORLD_SIZE", "mpirun (Open MPI)"),
    ("MV2_COMM_WORLD_SIZE", "mpirun (MVAPICH2)"),
    ("PMI_SIZE", "mpiexec (PMI)"),
    ("PMIX_SIZE", "a PMIx launcher"),
    ("MPI_LOCALNRANKS", "mpiexec (Hydra)"),
)


def launched_as_one_of_many(environ: Mapping[str, str]) -> Launched | None:
    """The launcher that started several processes like this one; None where there is none, or Horovod's did.

    A shell within an allocation (salloc, sbatch: SLURM_NTASKS without a step of several tasks) is not such a process.
    """
    if "HOROVOD_RANK" in environ or environ.get(ALONE) == "1":
        return None
    for variable, by in _SIZES:
        if (size := _number(environ, variable)) > 1:
            return Launched(by, size, variable)
    if _number(environ, "PMIX_RANK") > 0:  # PMIx gives no size
        return Launched("a PMIx launcher", _number(environ, "PMIX_RANK") + 1, "PMIX_RANK")
    if {"SLURM_PROCID", "SLURM_STEP_ID"} <= environ.keys() and _number(environ, "SLURM_STEP_ID") < _FIRST_RESERVED_STEP:
        variable = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        if (size := _number(environ, variable)) > 1:
            return Launched("srun", size, variable)
    if {"RANK", "LOCAL_RANK"} <= environ.keys() and (size := _number(environ, "WORLD_SIZE")) > 1:
        return Launched("torchrun", size, "WORLD_SIZE")
    return None


def refusal(found: Launched) -> str:
    """What is wrong, and what to do."""
    at_least = "at least " if found.variable == "PMIX_RANK" else ""
    return (
        f"{found.by} started {at_least}{found.size} processes ({found.variable}), but Horovod's world has 1 worker: "
        "each process would train a job of its own. Start the workers with Horovod's launcher, from one process: "
        f"`gba-hvd run -np {found.size} [--hosts h1:4,h2:4] train.py` (within Slurm: in the batch script, or by "
        f"`srun --ntasks=1`). If {found.size} jobs of one worker each are what you want, set {ALONE}=1"
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    """0 where the variable is missing or no number."""
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0
