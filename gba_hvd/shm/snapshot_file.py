"""A small record that outlives its process: written and read atomically, whenever the writer is killed.

One file, two halves, in memory that the kernel keeps when the process dies. A write fills the half that does not count
and then makes it count by one aligned store.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import xxhash

from gba_hvd.errors import ShardMemoryError

_HEAD = struct.Struct("<QQ")  # of a half: length, checksum
_FIRST = 64  # the halves start behind the number of the newest write


class SnapshotFile:
    """Not thread-safe; one writer. Reading raises ShardMemoryError when the file is damaged."""

    def __init__(self, path: Path, half_bytes: int = 1 << 18) -> None:
        self._path = path
        if path.exists():
            half_bytes = (path.stat().st_size - _FIRST) // 2
            self._open(half_bytes)
        else:
            self._create(half_bytes)

    def write(self, *pieces: bytes) -> None:
        """Raises OSError when the file system has no room for it; what was there stays."""
        length = sum(map(len, pieces))
        if length + _HEAD.size > self._half:
            self._create(2 * length + _HEAD.size, carry=self.read())
        newest = self._newest()
        start = _FIRST + (newest + 1) % 2 * self._half
        at, checksum = start + _HEAD.size, xxhash.xxh3_64()
        for piece in pieces:
            self._map[at : at + len(piece)] = piece
            checksum.update(piece)
            at += len(piece)
        _HEAD.pack_into(self._map, start, length, checksum.intdigest())
        self._numbers[0] = newest + 1  # last: now it counts

    def read(self) -> bytes | None:
        """The newest write, or None when there was none."""
        newest = self._newest()
        if newest == 0:
            return None
        at = _FIRST + newest % 2 * self._half
        length, checksum = _HEAD.unpack_from(self._map, at)
        data = self._map[at + _HEAD.size : at + _HEAD.size + length]
        if len(data) != length or xxhash.xxh3_64_intdigest(data) != checksum:
            raise ShardMemoryError(f"{self._path} is damaged; a checkpoint may have what it held")
        return data

    def _newest(self) -> int:
        number: int = self._numbers[0]
        return number

    def _create(self, half_bytes: int, carry: bytes | None = None) -> None:
        fresh = self._path.with_name(f"{self._path.name}.new")
        with open(fresh, "wb") as file:
            # Space is taken now: in a file system that is full, a write to a hole would kill the process.
            os.posix_fallocate(file.fileno(), 0, _FIRST + 2 * (-(-half_bytes // 64) * 64))
        path, self._path = self._path, fresh
        self._open(-(-half_bytes // 64) * 64)
        self._path = path
        if carry is not None:
            self.write(carry)
        os.rename(fresh, path)

    def _open(self, half_bytes: int) -> None:
        self._half = half_bytes
        with open(self._path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FIRST + 2 * half_bytes)
        self._numbers = memoryview(self._map)[:8].cast("q")
