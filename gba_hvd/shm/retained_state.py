"""The training state beside the rows, in the job's folder: what a job whose workers are all gone resumes from.

The chief writes it, in allreduce mode between two steps, in an asynchronous mode when the mode starts (its servers hold
what changes from there on). It is not read while a worker lives. A write becomes visible completely or not at all, see
`snapshot_file`. It comes after the rows of its step are applied and before those of the next are touched, so wherever
all processes are killed, the rows are as of the retained step, or one step further, wholly or partly: that step is then
computed again, and shards that have had it skip it (`AllreduceExchange.apply_held`).

Writing costs a copy of the dense parameters and of their optimizer's state in each step. `decide_retention` decides
from measurements whether that is little; if not, the file is removed, and a restart resumes from the newest checkpoint.
In an asynchronous mode it is written once an epoch, at any cost. Where there is no file, a note says why, for the job
that finds the rows without it.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from statistics import median

from gba_hvd.errors import ShardMemoryError
from gba_hvd.shm.snapshot_file import SnapshotFile

_NAME, _NOTE = "kept", "not-kept"
_HEAD = struct.Struct("<8sqqq")
_MAGIC = b"gba-kept"
_N_RECENT = 20
_NOTABLE_BYTES = 15 * 10**6


@dataclass(frozen=True)
class RetainedState:
    """state: `recovery.state_codec`, as late joiners receive it. generation: of the asynchronous mode whose servers
    have the dense part and the position; 0: all is here, as of `step`. settings: fingerprint of the model
    (`membership`)."""

    step: int
    generation: int
    settings: int
    state: bytes


class Absence(IntEnum):
    """Why a job's folder has no training state. NO_STEP: nothing is noted, as before the first write."""

    NO_STEP = 0
    COST = 1
    NO_ROOM = 2
    SHARE_IS_0 = 3
    COMPRESSION = 4


@dataclass(frozen=True)
class RetentionDecision:
    """Whether to continue retaining, and why. is_notable: a person should know of it, and may mend it."""

    keep: bool
    reason: str
    is_notable: bool = False


def decide_retention(
    write_s: Sequence[float], step_s: Sequence[float], share: float, n_bytes: int
) -> RetentionDecision:
    """Seconds of the newest writes, and from one to the next. share: what writing may take of them. n_bytes: of one

    Stopping is notable where the state is large, of a million parameters with Adam, which takes about 5 ms to write:
    so is the work between two checkpoints. A smaller one is above the share because steps are short, at the default
    of 2 % below 250 ms: then no state is small enough, and checkpoints are many steps apart at little cost. By size,
    as the time of a write varies with the load of the host.
    """
    took_s, of_s = median(write_s), median(step_s)
    reported = f"keeping the training state in memory takes {1000 * took_s:.1f} ms of a step's {1000 * of_s:.1f} ms"
    if took_s <= share * of_s:
        return RetentionDecision(True, f"{reported}, at most {share:.0%} are allowed")
    why = f"{reported}, more than the {share:.0%} allowed (CheckpointCallback(retain_state_share={share:g}))"
    why += "; a larger share keeps it, and costs that"
    return RetentionDecision(False, why, n_bytes >= _NOTABLE_BYTES)


class StateRetainer:
    """The chief's. Belongs to the training thread; `stop()` may be called twice.

    is_compressed: gradients are, so nothing is retained: what is not sent yet is in every worker
    """

    def __init__(
        self, folder: Path, settings: int, share: float, clock: Callable[[], float] = time.perf_counter,
        *, is_compressed: bool = False,
    ):  # fmt: skip
        self._folder, self._settings, self._share, self._clock = folder, settings, share, clock
        self._file: SnapshotFile | None = None
        self._step = -1
        self._write_s: deque[float] = deque(maxlen=_N_RECENT)
        self._step_s: deque[float] = deque(maxlen=_N_RECENT)
        self._last_s: float | None = None
        self._never = Absence.COMPRESSION if is_compressed else Absence.SHARE_IS_0 if share <= 0 else None
        self._stopped, self._is_dear = False, False

    def keep(self, step: int, generation: int, state: Callable[[], bytes]) -> RetentionDecision | None:
        """Write the state of this step, once; returns why it stops here, if so. state: asked if it is needed."""
        if self._stopped:
            return None
        if self._never is not None:
            self.stop(self._never)
            return None
        if not generation and self._is_dear:
            if self._file is not None:
                self._remove(Absence.COST)  # it is of an asynchronous mode that is over
            return None
        if not generation and step == self._step:
            return None
        started = self._clock()
        try:
            if self._file is None:
                self._file = SnapshotFile(self._folder / _NAME)
            encoded = state()
            self._file.write(_HEAD.pack(_MAGIC, step, generation, self._settings), encoded)
        except OSError as error:
            self.stop(Absence.NO_ROOM)
            why = f"the training state has no room in {self._folder.parent}: {error.strerror}"
            return RetentionDecision(False, why, is_notable=True)
        ended, self._step = self._clock(), step
        if generation:
            self._last_s = None
            return None
        if self._last_s is not None:
            self._write_s.append(ended - started)
            self._step_s.append(ended - self._last_s)
        self._last_s = ended
        if len(self._write_s) == _N_RECENT:
            worth = decide_retention(self._write_s, self._step_s, self._share, len(encoded))
            if not worth.keep:
                self._is_dear = True
                self._remove(Absence.COST)
                return worth
        return None

    def stop(self, why: Absence) -> None:
        self._stopped = True
        self._remove(why)

    def _remove(self, why: Absence) -> None:
        self._file = None
        remove(self._folder)
        with contextlib.suppress(OSError):  # without a note, a restart says less
            (self._folder / _NOTE).write_text(why.name)


def remove(folder: Path) -> None:
    """Remove the training state retained in a job's folder: no job may resume from it any more."""
    with contextlib.suppress(FileNotFoundError):
        (folder / _NAME).unlink()


def amend(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """Write the state retained in a job's folder again, as changed; nothing where there is none. Raises OSError."""
    data = SnapshotFile(folder / _NAME).read() if is_there(folder) else None
    if data is not None and data[: len(_MAGIC)] == _MAGIC:
        SnapshotFile(folder / _NAME).write(data[: _HEAD.size], change(data[_HEAD.size :]))


def absence(folder: Path) -> Absence:
    """Why no state is retained in a job's folder, where there is none."""
    try:
        return Absence[(folder / _NOTE).read_text()]
    except (OSError, KeyError):
        return Absence.NO_STEP


def is_there(folder: Path) -> bool:
    """Whether a state is retained in a job's folder."""
    return (folder / _NAME).exists()


def read(folder: Path) -> RetainedState | None:
    """The state retained in a job's folder; None when there is none. Raises ShardMemoryError when it is damaged."""
    if not is_there(folder):
        return None
    data = SnapshotFile(folder / _NAME).read()
    if data is None:
        return None
    if data[: len(_MAGIC)] != _MAGIC:
        raise ShardMemoryError(f"{folder / _NAME} is of another version of gba-hvd")
    _, step, generation, settings = _HEAD.unpack_from(data)
    return RetainedState(step, generation, settings, data[_HEAD.size :])
