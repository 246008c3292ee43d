"""The exceptions users may want to catch.

`GbaError` is the base of all that both packages raise on purpose, checkpoints included. `RecoveryError` covers the
errors of checkpoints only.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from recovery.errors import BadInput
from recovery.errors import ProjectError as GbaError

__all__ = [
    "BadInput",
    "GbaError",
    "HorovodMissing",
    "LastCheckpointFailed",
    "LauncherUnreachable",
    "MissingPackage",
    "NonFiniteGradient",
    "ShardMemoryError",
    "StateMismatch",
    "WorkerEvicted",
    "WorldLost",
]  # fmt: skip


class HorovodMissing(GbaError, RuntimeError):
    """Horovod is not installed, or `hvd.init()` was not called."""


class MissingPackage(GbaError, ModuleNotFoundError):
    """A feature needs a package that is not installed; the message has the command that installs it."""


class NonFiniteGradient(GbaError, ArithmeticError):
    """A loss or gradient was NaN or infinite; the step was not applied."""


class ShardMemoryError(GbaError, OSError):
    """Shard memory cannot be created, opened or written."""


class StateMismatch(GbaError, RuntimeError):
    """Workers of one job disagree about what they train."""


class WorkerEvicted(GbaError):
    """The others of the job continued without this worker. It must not come back with its state, so it ends."""


class LauncherUnreachable(GbaError):
    """The launcher of an elastic job cannot be reached: this host is cut off, or the launcher has ended."""


class WorldLost(GbaError):
    """Another worker has ended, and no launcher replaces it. status: of the job, "FAILED" or "KILLED"."""

    def __init__(self, text: str, status: str = "FAILED") -> None:
        super().__init__(text)
        self.status = status


class LastCheckpointFailed(GbaError):
    """The training is done, and the checkpoint of its last step was not saved."""


def refuse_unknown(what: str, name: object, among: Sequence[str]) -> None:
    """Raises BadInput that suggests the nearest name, unless `name` is one of `among`. what: the setting"""
    if name in among:
        return
    near = get_close_matches(str(name).lower().replace("-", "_"), among, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(among)}"
    raise BadInput(f"{what} {name!r} is not known: {hint}")
