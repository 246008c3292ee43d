"""What this user's commands see of a job on this host without asking anybody: `gba-hvd ps`, `gba-hvd status`.

Two files in the job's folder, written by the host's leader, in every mode and with any callbacks:

    job.json   what the job is; replaced completely when a world has formed
    progress   where it stands; pages that are mapped, so a step costs one small copy and no call of the system.
               Its second half has, as JSON, what is known of the vocabularies of hashed tables; the next two
               pages, as JSON too, where the time of allreduce steps goes, or why training stands still; the last two
               the job's troubles

They are for people. A reader may meet a page that is being written; nothing is decided by it.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recovery.redaction import redacted_command
from recovery.storage.rename import replace_file

_PAGE = 4096
_TIMES_AT, _HEALTH_AT, _SIZE = _PAGE, 3 * _PAGE, 5 * _PAGE
_VOCABULARY_AT = 512
_OF_JSON = (
    ("vocabulary", _VOCABULARY_AT, _PAGE),
    ("step_times", _TIMES_AT, _HEALTH_AT),
    ("health", _HEALTH_AT, _SIZE),
)
_PROGRESS = struct.Struct("<4sqqqqqdd16s16s?")
_MAGIC = b"gba2"
ENDING = "ending"  # in place of the mode


@dataclass(frozen=True)
class Notice:
    """job.json. switchable: it has a GBACallback; started_unix_s: when its memory was made on this host."""

    name: str
    job: str
    workers: int
    hosts: int
    switchable: bool
    checkpoints: str
    command: str
    started_unix_s: float


class Board:
    """The host leader's. Belongs to the training thread.

    found_health: what a leader before it has shown by `show_health`; None: nothing
    """

    def __init__(self, folder: Path, mode: str, step: int, **facts: Any) -> None:
        """facts: of the `Notice`. Raises OSError when there is no room for it."""
        before = _notice(folder)
        started_s = time.time() if before is None else before.started_unix_s
        notice = Notice(command=" ".join(redacted_command(sys.argv)), started_unix_s=started_s, **facts)
        replace_file(folder / "job.json", json.dumps(asdict(notice)))
        with open(folder / "progress", "a+b") as file:
            os.posix_fallocate(file.fileno(), 0, _SIZE)
            self._page = mmap.mmap(file.fileno(), _SIZE)
        self.found_health: dict[str, Any] | None = _json_of(self._page[_HEALTH_AT:])
        if before is None:
            self.show(step, -1, 0, 0, 0, None, mode)
        self._page[_TIMES_AT:_HEALTH_AT] = bytes(_HEALTH_AT - _TIMES_AT)  # of the world before

    def show(
        self,
        step: int,
        epoch: int,
        steps_done: int,
        steps_of_epoch: int,
        samples: int,
        loss: float | None,
        mode: str,
        asked: str = "",
        waits: bool = False,
    ) -> None:
        """A step was applied. epoch: -1 before the first; samples: applied so far.

        asked: a mode that is asked for while the job is in another; waits: for companion servers that are not up
        """
        numbers = (step, epoch, steps_done, steps_of_epoch, samples)
        value = math.nan if loss is None else loss
        words = (mode.encode(), asked.encode(), waits)
        self._page[: _PROGRESS.size] = _PROGRESS.pack(_MAGIC, *numbers, value, time.time(), *words)

    def show_vocabulary(self, found: dict[str, Any]) -> None:
        """By hashed table, numbers; nothing is shown of more tables than there is room for."""
        self._show(found, _VOCABULARY_AT, _PAGE)

    def show_times(self, found: dict[str, Any]) -> None:
        """What `StepTimes` has found, with "workers", of how many it is, and "unix_s"."""
        self._show(found, _TIMES_AT, _HEALTH_AT)

    def show_pause(self, why: str) -> None:
        """Training stands still until the next world has formed."""
        self._show({"stands_still": why}, _TIMES_AT, _HEALTH_AT)

    def show_health(self, found: dict[str, Any]) -> bool:
        """What `JobHealth` has found. Whether there is room for it."""
        return self._show(found, _HEALTH_AT, _SIZE)

    def _show(self, found: dict[str, Any], start: int, end: int) -> bool:
        text = json.dumps(found, default=str).encode()
        if has_room := len(text) <= end - start:
            self._page[start:end] = text.ljust(end - start, b"\0")
        return has_room

    def ends(self) -> None:
        """The training is over; what remains is to report it and to save."""
        fields = list(_PROGRESS.unpack_from(self._page))
        fields[8], fields[9], fields[10] = ENDING.encode(), b"", False
        self._page[: _PROGRESS.size] = _PROGRESS.pack(*fields)


def read(folder: Path) -> dict[str, Any] | None:
    """What the board of a job says, in the format of a server's report; None while the job is beginning."""
    notice = _notice(folder)
    if notice is None:
        return None
    report: dict[str, Any] = asdict(notice)
    with contextlib.suppress(OSError, struct.error, UnicodeDecodeError):
        page = (folder / "progress").read_bytes()
        magic, step, epoch, done, of_epoch, samples, loss, seen_s, mode, asked, waits = _PROGRESS.unpack_from(page)
        if magic == _MAGIC:
            report |= {"mode": mode.rstrip(b"\0").decode(), "step": step, "step_unix_s": seen_s}
            if asked := asked.rstrip(b"\0").decode():
                report |= {"asked": asked, "waits_for_servers": waits}
            if epoch >= 0:
                report |= {"epoch": epoch, "steps_done": done, "steps_of_epoch": of_epoch, "samples_applied": samples}
            if not math.isnan(loss):
                report["loss"] = loss
            for name, start, end in _OF_JSON:
                if (found := _json_of(page[start:end])) is not None:
                    report[name] = found
    times = report.pop("step_times", {})
    if "stands_still" in times:
        report["stands_still"] = times["stands_still"]
    elif report.get("mode") == "allreduce" and times.get("workers") == notice.workers:
        report["step_times"] = times  # else they are of another mode or of other workers
    return report


def _json_of(part: bytes) -> Any:
    """None: there is none, or it is being written."""
    with contextlib.suppress(ValueError):
        return json.loads(text) if (text := part.rstrip(b"\0")) else None
    return None


def bases_in_use() -> Iterator[Path]:
    """Folders for shard memory that processes of this user have mapped now, wherever they are."""
    found: set[Path] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if entry.stat().st_uid != os.geteuid():
                continue
            for line in (entry / "maps").read_text(errors="replace").splitlines():
                path = Path(line.partition("/")[1] + line.partition("/")[2])
                if path.name == "shards" and path.parent.name.startswith("gba-hvd-"):
                    found.add(path.parent.parent)
    yield from sorted(found)


def _notice(folder: Path) -> Notice | None:
    try:
        return Notice(**json.loads((folder / "job.json").read_text()))
    except (OSError, ValueError, TypeError):  # not there yet, or of another version
        return None
