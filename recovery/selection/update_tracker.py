"""Knows which rows changed since they were last saved, and how often: 4 bytes a row.

Per row, the access counter's value when the row was last saved. The counter itself belongs to the row source, counts
modulo 2^32, and was copied in the same consistent read as the row; so an update that comes during a save is never lost.

A row counts as saved only when the manifest that has it is there:

 - a partial save keeps what it read until `commit`, 8 bytes for each row; if it fails, nothing has changed;
 - a full save would have to keep 4 bytes for every row, so it writes through, and the tracker is worth nothing from
   `begin` until `commit`; if it fails, the next save is a full one again;
 - the saver asks `is_valid_for(newest manifest)`: a tracker that was valid for another one missed a save.

In a file, the tracker survives its process, as the rows in shard memory do. The file says to which manifest, to which
counters and to which boot of the machine it belongs (after a crash of the machine, pages of the file may be missing);
its header has a checksum, so a header that was half written is no header.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Collection
from pathlib import Path

import numpy as np
import xxhash

from recovery.errors import RecoveryError
from recovery.rows import RowIndices, RowSource

BYTES_PER_ROW = 4
_HEADER_BYTES = 4096
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class NoRoom(RecoveryError, OSError):
    """The file system of a tracker is full."""


class Tracker:
    """Tracks shards; those that the row source has not take no memory. Not thread-safe: the writer's thread owns it.

    path: a file that survives this process; None: ordinary memory.
    counters: names the memory whose counters are meant; another name, and a tracker found in the file is worth nothing.
    """

    def __init__(self, source: RowSource, path: Path | None = None, counters: str = "") -> None:
        self._source, schema = source, source.schema
        parts = [(t, s) for s in range(schema.n_shards) for t in range(len(schema.tables))]
        sizes = [schema.tables[t].rows_in(s, schema.n_shards) for t, s in parts]
        boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
        self._about = xxhash.xxh3_128_hexdigest(json.dumps([counters, boot, repr(schema)]).encode())
        self._map = _open(path, _HEADER_BYTES + 4 * sum(sizes)) if path else None
        whole = (
            np.zeros(sum(sizes), np.uint32)
            if self._map is None
            else np.frombuffer(self._map, np.uint32, offset=_HEADER_BYTES)
        )
        starts = np.cumsum([0, *sizes])
        self._path, self._starts = path, dict(zip(parts, starts[:-1].tolist(), strict=True))
        self._saved = {part: whole[a:b] for part, a, b in zip(parts, starts[:-1], starts[1:], strict=True)}
        self._valid_for = self._read_header()
        self._pending: list[tuple[int, int, RowIndices, np.ndarray]] = []
        self._writes_through = False

    def updates_since_save(self, table: int, shard: int, indices: slice = slice(None)) -> np.ndarray:
        """uint32 [n]: how often each row was accessed since it was last saved. 0: the newest checkpoint has it."""
        now: np.ndarray = self._source.slab(table, shard).counts[indices]
        return now - self._saved[table, shard][indices]

    def is_valid_for(self, manifest: str | None) -> bool:
        """Whether this manifest, with its chain, has every row whose `since` is 0."""
        return manifest is not None and manifest == self._valid_for

    def begin(self, full: bool) -> None:
        self._take_space()
        self._pending.clear()
        self._writes_through = full
        if full:
            self._write_header(None)

    def _take_space(self, shards: Collection[int] | None = None) -> None:
        """Reserve space in the file system for shards: a write to a page without space would kill the process."""
        if self._path is None:
            return
        with open(self._path, "r+b") as file:
            for shard in self._source.shards() if shards is None else shards:
                for table in range(len(self._source.schema.tables)):
                    n = len(self._saved[table, shard])
                    if n:
                        _reserve(self._path, file.fileno(), _HEADER_BYTES + 4 * self._starts[table, shard], 4 * n)

    def record(self, table: int, shard: int, indices: RowIndices, counts: np.ndarray) -> None:
        """These rows were read with these counters. `counts` is copied."""
        if self._writes_through:
            self._saved[table, shard][indices] = counts
        else:
            kept = indices if isinstance(indices, slice) else _narrow(indices)
            self._pending.append((table, shard, kept, counts.copy()))

    def commit(self, manifest: str) -> None:
        """The manifest is in the store."""
        self._write_header(None)  # half of this is neither the state before nor the one after
        for table, shard, indices, counts in self._pending:
            self._saved[table, shard][indices] = counts
        self._pending.clear()
        self._write_header(manifest)

    def rollback(self) -> None:
        """The save has failed."""
        self._pending.clear()
        self._writes_through = False

    def restored(self, manifest: str, shards: Collection[int] | None = None) -> None:
        """The rows of these shards (None: of all that are here) have just come out of this manifest's chain."""
        try:
            self._take_space(shards)
        except NoRoom:  # the rows are there all the same; the next save is a full one, and says what is missing
            self._write_header(None)
            return
        for shard in self._source.shards() if shards is None else shards:
            for table in range(len(self._source.schema.tables)):
                self._saved[table, shard][:] = self._source.slab(table, shard).counts
        if shards is None:
            self._write_header(manifest)
        elif manifest != self._valid_for:
            self._write_header(None)  # the other shards are as of another one

    def close(self) -> None:
        self._saved = {}
        if self._map is not None:
            self._map.flush()
            self._map = None

    def _read_header(self) -> str | None:
        if self._map is None:
            return None
        n, found = int.from_bytes(self._map[:4], "little"), self._map[4:_HEADER_BYTES]
        if n > len(found) - 16 or found[n : n + 16] != xxhash.xxh3_128_digest(found[:n]):
            return None
        about, manifest = json.loads(found[:n])
        return manifest if about == self._about else None

    def _write_header(self, manifest: str | None) -> None:
        self._valid_for = manifest
        if self._map is not None:
            header = json.dumps([self._about, manifest]).encode()
            whole = len(header).to_bytes(4, "little") + header + xxhash.xxh3_128_digest(header)
            self._map[: len(whole)] = whole


def _narrow(indices: np.ndarray) -> np.ndarray:
    """A copy; in 4 bytes each if they fit, as there may be very many."""
    return indices.astype(np.uint32 if len(indices) == 0 or indices[-1] < 2**32 else np.int64)


def _open(path: Path, n_bytes: int) -> mmap.mmap:
    with open(path, "a+b") as file:
        file.truncate(n_bytes)
        _reserve(path, file.fileno(), 0, _HEADER_BYTES)  # it is read next
        return mmap.mmap(file.fileno(), n_bytes)


def _reserve(path: Path, fd: int, at: int, n_bytes: int) -> None:
    """Raises NoRoom, a sentence in place of the signal that a write to a page without space would be."""
    try:
        os.posix_fallocate(fd, at, n_bytes)
    except OSError as error:
        found = os.statvfs(path.parent)
        raise NoRoom(
            f"what was saved of the rows (4 bytes each) has no room in {path.parent}: {n_bytes:,} bytes are "
            f"needed, {found.f_bavail * found.f_frsize:,} are free there (not: at the checkpoints), {error.strerror}; "
            "enlarge it (/dev/shm: docker run --shm-size=..., mount -o remount,size=...), or save with policy='full', "
            "which keeps no such account"
        ) from error
