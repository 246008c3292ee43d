"""The exceptions users may want to catch.

`GbaError` is the base of all that both packages raise on purpose, checkpoints included. `RecoveryError` covers the
errors of checkpoints only.
"""

from __future__ import annotations

from recovery.errors import BadInput, GbaError, refuse_unknown

__all__ = [
    "BadInput",
    "GbaError",
    "HorovodMissing",
    "LastCheckpointFailed",
    "LauncherUnreachable",
    "MissingPackage",
    "NonFiniteGradient",
    "RecoveryFailed",
    "ShardMemoryError",
    "StateMismatch",
    "WorkerEvicted",
    "WorldLost",
    "refuse_unknown",
]  # fmt: skip


class HorovodMissing(GbaError, RuntimeError):
    """Horovod is not installed, or `hvd.init()` was not called."""


class MissingPackage(GbaError, ModuleNotFoundError):
    """A feature needs a package that is not installed; the message has the command that installs it."""


class NonFiniteGradient(GbaError, ArithmeticError):
    """A loss or gradient was NaN or infinite; the step was not applied."""


class RecoveryFailed(GbaError):
    """A full recovery was begun and cannot be completed: the rows in memory are neither of one time nor of another."""


class ShardMemoryError(GbaError, OSError):
    """Shard memory cannot be created, opened or written."""


class StateMismatch(GbaError, RuntimeError):
    """Workers of one job disagree about what they train."""


class WorkerEvicted(GbaError):
    """The others of the job continued without this worker. It must not come back with its state, so it ends."""


class LauncherUnreachable(GbaError):
    """The launcher of an elastic job cannot be reached: this host is cut off, or the launcher has ended."""


class WorldLost(GbaError):
    """Another worker has ended, and no launcher replaces it.

    status: of the job, "FAILED" or "KILLED". pid: of the worker's process on this host, if it is known; rank: its rank.
    to_repair: it ended with an error that the same command meets again
    """

    def __init__(
        self,
        text: str,
        status: str = "FAILED",
        pid: int | None = None,
        rank: int | None = None,
        to_repair: bool = False,
    ) -> None:
        super().__init__(text)
        self.status, self.pid, self.rank, self.to_repair = status, pid, rank, to_repair


class LastCheckpointFailed(GbaError):
    """The training is done, and the checkpoint of its last step was not saved."""
