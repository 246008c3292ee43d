"""Records on their way to MLflow: one append-only file of JSON lines per process, and how far it was sent.

    NAME.jsonl        the records; appended by the worker, and by its sender for what the sender measures
    NAME.status.json  written by the sender only: the offset delivered so far, the run, the last problem
    NAME.log          what the sender had to say
    NAME.model/       a model that is to be logged (`mlflow_model`); written by the worker before its last record

The first two have the tracking URI as MLflow needs it, with a password if there is one: they are of mode 0600.
A line counts once its newline is there, so a writer killed half-way leaves nothing that could be misread. The status
is replaced atomically *after* MLflow has taken a batch: a sender killed between the two sends that batch again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gba_hvd.tracking.records import Record, SpoolLine

_CHUNK_BYTES = 1 << 18
_OPEN_TRIES = 10


@dataclass(frozen=True)
class SpoolStatus:
    """How far a spool has been delivered, as the sender last wrote it down."""

    offset: int = 0
    run_id: str | None = None
    experiment_id: str | None = None
    tracking_uri: str | None = None
    sent: int = 0
    dropped: int = 0
    problem: str | None = None  # why nothing is getting through, None while it is
    stopped: bool = False  # waiting will not help
    recorded: bool = False  # every record and the run's final status are there; pictures, or a model, may be missing
    model_uri: str | None = None  # of the logged model, which is then to be registered
    served_as: str | None = None  # the URI of its version in the registry; without a registry, that of the logged model
    model_step: int | None = None  # that the logged model is of
    alias_move: str | None = None  # what was done to the alias of its version: "champion: version 1 -> 4"
    model_problem: str | None = None  # why it was not logged or not registered, and what to do
    keeps_model: bool = False  # it was not taken, and its folder stays
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
    except (FileNotFoundError, msgspec.MsgspecError):
        return SpoolStatus()


def write_status(spool: Path, status: SpoolStatus) -> None:
    path = status_path(spool)
    fresh = path.with_suffix(".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(status))
    os.replace(fresh, path)


class SpoolWriter:
    """Appends records. Never raises, waits for nothing but the page cache; what cannot be written is counted."""

    def __init__(self, path: Path, limit_bytes: int = 1 << 30) -> None:
        self.path = path
        self.lost = 0
        self.problem: str | None = None
        self._limit_bytes = limit_bytes
        self._torn = False
        self._fd = _opened(path)

    def append(self, record: Mapping[str, Any]) -> None:
        if self._fd < 0:
            return
        try:
            line = (json.dumps(record, default=str, separators=(",", ":")) + "\n").encode()
            if self._torn:
                line = b"\n" + line
            if record["kind"] not in ("end", "model") and os.fstat(self._fd).st_size + len(line) > self._limit_bytes:
                raise OSError(f"{self.path} has reached its limit of {self._limit_bytes >> 20} MiB")
            self._torn = os.write(self._fd, line) != len(line)
            if self._torn:
                raise OSError(f"{self.path}: the disk is full")
        except (OSError, TypeError, ValueError) as error:  # the latter two: no JSON, such as a tuple as a key
            self.lost += 1
            self.problem = str(error)

    @property
    def n_bytes(self) -> int:
        """Of the spool; 0 where it is closed."""
        return os.fstat(self._fd).st_size if self._fd >= 0 else 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _opened(path: Path) -> int:
    for _ in range(_OPEN_TRIES):
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_APPEND: the worker and its sender write complete lines to one file.
        with contextlib.suppress(FileNotFoundError):  # the sender of another spool, the last one there, has removed it
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
    if not raw.strip():
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
    for path in (spool, status_path(spool), status_path(spool).with_suffix(".new"), log_path(spool)):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other spools are in there
        spool.parent.rmdir()
