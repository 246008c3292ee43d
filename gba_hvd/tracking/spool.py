"""Records on their way to MLflow: one append-only file of JSON lines per process, and how far it was sent.

    NAME.jsonl        the records; appended by the worker, and by its sender for what the sender measures
    NAME.status.json  written by the sender, once it runs: the offset delivered so far, the run, the last problem
    NAME.log          what the sender had to say
    NAME.model/       a model that is to be logged (`mlflow_model`); written by the worker before its last record
    NAME.room         nothing: the worker removes it where the disk is full, and writes the end of the job in its place

The first two have the tracking URI as MLflow needs it, with a password if there is one: they are of mode 0600.
A line counts once its newline is there, so a writer killed half-way leaves nothing that could be misread. What a full
disk took of a line is ended with `_VOID`, and the line comes again. The status is replaced atomically *after* MLflow
has taken a batch: a sender killed between the two sends that batch again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gba_hvd.tracking.records import Record, SpoolLine

_CHUNK_BYTES = 1 << 18
_OPEN_TRIES = 10
_ROOM_BYTES = 1 << 16
_WAITING_BYTES = 1 << 24
_VOID = b"\x18\n"  # CAN, which JSON has in no line


@dataclass(frozen=True)
class SpoolStatus:
    """How far a spool has been delivered, as the sender last wrote it down."""

    offset: int = 0
    run_id: str | None = None
    experiment_id: str | None = None
    tracking_uri: str | None = None
    sent: int = 0
    dropped: int = 0
    lost: int = 0  # records that the worker could not write
    problem: str | None = None  # why nothing is getting through, None while it is
    stopped: bool = False  # waiting will not help
    recorded: bool = False  # every record and the run's final status are there; pictures, or a model, may be missing
    model_uri: str | None = None  # of the logged model, which is then to be registered
    served_as: str | None = None  # the URI of its version in the registry; without a registry, that of the logged model
    model_step: int | None = None  # that the logged model is of
    alias_move: str | None = None  # what was done to the alias of its version: "champion: version 1 -> 4"
    model_problem: str | None = None  # why it was not logged or not registered, and what to do
    keeps_model: bool = False  # it was not taken, and its folder stays
    report_problem: str | None = None  # why the run has no report and pictures
    note: str | None = None  # what is recorded otherwise than the script asked for
    done: bool = False


def status_path(spool: Path) -> Path:
    return spool.with_suffix(".status.json")


def model_path(spool: Path) -> Path:
    return spool.with_suffix(".model")


def log_path(spool: Path) -> Path:
    return spool.with_suffix(".log")


def read_status(spool: Path) -> SpoolStatus:
    try:
        return msgspec.json.decode(status_path(spool).read_bytes(), type=SpoolStatus)
    except (OSError, msgspec.MsgspecError):
        return SpoolStatus()


def write_status(spool: Path, status: SpoolStatus) -> None:
    """Replace it; on a full disk, which has no room for two, write it over the one before."""
    path, text = status_path(spool), msgspec.json.encode(status)
    fresh = path.with_suffix(".new")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(text)
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CLOEXEC), "wb") as file:
            file.write(text.ljust(path.stat().st_size))


class SpoolWriter:
    """Appends records. Never raises, waits for nothing but the page cache.

    What the disk does not take waits in memory, and is written with the next record that it takes; where too much
    waits, the oldest points are lost. What is lost is counted, and the end of the job has the count.
    reserves: keep room for the end of the job
    lost: records; problem: why they are. obstacle: why records wait in memory; None: none do
    """

    def __init__(self, path: Path, limit_bytes: int = 1 << 30, reserves: bool = False) -> None:
        self.path = path
        self.lost = 0
        self.problem: str | None = None
        self.obstacle: str | None = None
        self._limit_bytes, self._reserves = limit_bytes, reserves
        self._waiting: deque[tuple[str, bytes]] = deque()  # kind, line
        self._waiting_bytes = 0
        self._torn = self._closed = False
        self._fd = -1
        self._flush()

    def append(self, record: Mapping[str, Any]) -> None:
        if self._closed:
            return
        try:
            if record["kind"] == "end":
                record = self._make_room_for(record)
            line = (json.dumps(record, default=str, separators=(",", ":")) + "\n").encode()
        except (TypeError, ValueError) as error:  # no JSON, such as a tuple as a key
            self._lose(str(error))
            return
        if record["kind"] not in ("end", "model") and self.n_bytes + len(line) > self._limit_bytes:
            self._lose(f"{self.path} has reached its limit of {self._limit_bytes >> 20} MiB")
            return
        self._waiting.append((record["kind"], line))
        self._waiting_bytes += len(line)
        self._flush()
        self._shed(_WAITING_BYTES)

    @property
    def is_removed(self) -> bool:
        return self._fd >= 0 and not os.path.exists(self.path)

    def put_back(self) -> bool:
        """Write the file again where it was removed, from what is open here; whether that was done."""
        if not self.is_removed:
            return False
        removed, self._fd, at = self._fd, -1, 0
        try:
            self._open()
            while data := os.pread(removed, 1 << 20, at):
                at += os.write(self._fd, data)
        except OSError as error:  # tried again later
            if self._fd >= 0:
                os.close(self._fd)
                with contextlib.suppress(OSError):
                    self.path.unlink()
            self._fd, self.obstacle = removed, str(error)
            return False
        os.close(removed)
        return True

    @property
    def n_bytes(self) -> int:
        """Of the spool; 0 where it is closed."""
        return os.fstat(self._fd).st_size if self._fd >= 0 else 0

    def close(self) -> None:
        self._flush()
        self._shed(0)
        self._free_room()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._closed = -1, True

    def _open(self) -> None:
        self._fd = _opened(self.path)
        if self._reserves:
            with contextlib.suppress(OSError):  # then records wait in memory all the same
                _reserve(room_path(self.path))
                if not status_path(self.path).exists():  # the sender writes in its place where the disk is full
                    write_status(self.path, SpoolStatus())

    def _free_room(self) -> None:
        if self._reserves:
            with contextlib.suppress(OSError):
                room_path(self.path).unlink()

    def _flush(self) -> None:
        """Write what waits."""
        try:
            if self._fd < 0 and not self._closed:
                self._open()
            while self._waiting:
                line = self._waiting[0][1]
                written = _VOID + line if self._torn else line
                self._torn = os.write(self._fd, written) != len(written)
                if self._torn:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._waiting.popleft()
                self._waiting_bytes -= len(line)
            self.obstacle = None
        except OSError as error:
            self.obstacle = str(error)

    def _make_room_for(self, end: Mapping[str, Any]) -> Mapping[str, Any]:
        """Of the end of the job on a full disk, and of the newest records. Returns the end with the count of others."""
        self._flush()
        if self._waiting:
            self._free_room()
            self._shed(_ROOM_BYTES // 2)
            self._flush()
            self._shed(0)
        return {**end, "lost": self.lost, "why_lost": self.problem} if self.lost else end

    def _shed(self, at_most: int) -> None:
        """Lose what waits beyond so many bytes: points before other records, and the oldest first."""
        while self._waiting_bytes > at_most:
            at = next((at for at, (kind, _) in enumerate(self._waiting) if kind == "metrics"), 0)
            self._waiting_bytes -= len(self._waiting[at][1])
            del self._waiting[at]
            self._lose(str(self.obstacle))

    def _lose(self, why: str) -> None:
        self.lost += 1
        self.problem = why


def check_folder(folder: Path) -> None:
    """Make the folder. Raises OSError where no spool can be written there."""
    probe = folder / f".{os.getpid()}.probe"
    try:
        os.close(_opened(probe))
        _reserve(probe)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def room_path(spool: Path) -> Path:
    return spool.with_suffix(".room")


def _reserve(path: Path) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as file:
        os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)


def _opened(path: Path) -> int:
    for _ in range(_OPEN_TRIES):
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_APPEND: the worker and its sender write complete lines to one file.
        with contextlib.suppress(FileNotFoundError):  # the sender of another spool, the last one there, has removed it
            return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    raise FileNotFoundError(f"{path.parent} disappeared {_OPEN_TRIES} times while {path.name} was being made there")


def read_lines(path: Path, offset: int) -> list[SpoolLine]:
    """The next complete records from `offset`, about 256 KiB of them; what is no JSON object is a `broken` record."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(_CHUNK_BYTES)
        while b"\n" not in data and (more := file.read(_CHUNK_BYTES)):
            data += more
    lines: list[SpoolLine] = []
    for raw in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
        offset += len(raw)
        lines.append(SpoolLine(offset, _parse(raw)))
    return lines


def all_records(path: Path) -> Iterator[Record]:
    """Every record of the spool, sent or not."""
    offset = 0
    while lines := read_lines(path, offset):
        yield from (line.record for line in lines)
        offset = lines[-1].end


def unsent(path: Path) -> int:
    """Records that have not been sent."""
    offset, n = read_status(path).offset, 0
    with contextlib.suppress(FileNotFoundError):  # the sender was faster
        while lines := read_lines(path, offset):
            n, offset = n + len(lines), lines[-1].end
    return n


def default_folder() -> Path:
    return Path(os.environ.get("GBA_HVD_SPOOL_DIR") or "gba-hvd-spool")


def waiting(folder: Path, name: str | None) -> list[Path]:
    """Spools in a folder with records that MLflow does not have: of the job or run with this name; None: of any."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        with contextlib.suppress(OSError):  # the sender was faster, or another user's
            job = next((line.record for line in read_lines(path, 0)), {})
            if job.get("kind") == "job" and name in (None, job.get("job_id"), job.get("run_name")) and unsent(path):
                found.append(path)
    return found


def left_behind(folder: Path, own: Path | None, quiet_s: float = 60.0) -> list[Path]:
    """Spools in a folder that no process is at work on: unsent, not locked by a sender, and not touched for a while."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            if path == own or read_status(path).done or time.time() - path.stat().st_mtime < quiet_s:
                continue
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError):
            continue
        found.append(path)
    return found


def _parse(raw: bytes) -> Record:
    if not raw.strip() or raw.endswith(_VOID):
        return {"kind": "blank"}
    try:
        record = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return {"kind": "broken"}
    return record if isinstance(record, dict) else {"kind": "broken"}


def remove(spool: Path) -> None:
    """Delete a spool and what belongs to it, and its folder when nothing else is in there.

    A model that MLflow did not take stays.
    """
    if not read_status(spool).keeps_model:
        shutil.rmtree(model_path(spool), ignore_errors=True)
    status = status_path(spool)
    for path in (spool, status, status.with_suffix(".new"), log_path(spool), room_path(spool)):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other spools are in there
        spool.parent.rmdir()
