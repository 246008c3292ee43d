"""What is written past the page cache is what was given, wherever it is written and however it lies in memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from recovery.storage import direct_io
from recovery.storage.direct_io import BLOCK_BYTES, aligned, read_blocks, whole_blocks, write_blocks
from recovery.storage.local_store import LocalStore

MIB = 1 << 20


def noise(n_bytes: int) -> np.ndarray:
    found = aligned(n_bytes)
    found[:] = np.random.default_rng(n_bytes).integers(0, 256, n_bytes, np.uint8)
    return found


def written(path: Path, data: memoryview) -> int:
    """Past the cache as far as that goes, then as usual; returns how far."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        done = write_blocks(file, data)
        os.write(file, data[done:])
    finally:
        os.close(file)
    return done


@pytest.mark.parametrize("n_bytes", [0, 1, MIB - 1, MIB, MIB + 1, MIB + BLOCK_BYTES - 1, 5 * MIB + 17])
def test_a_file_has_every_byte(tmp_path, n_bytes):
    data = noise(n_bytes)
    done = written(tmp_path / "file", data.data)
    assert done in (0, n_bytes // BLOCK_BYTES * BLOCK_BYTES)
    assert (tmp_path / "file").read_bytes() == data.tobytes()


def test_memory_that_starts_elsewhere_is_written_as_usual(tmp_path):
    data = noise(2 * MIB)[1:]
    assert whole_blocks(data.data) == 0
    assert written(tmp_path / "file", data.data) == 0
    assert (tmp_path / "file").read_bytes() == data.tobytes()


def test_aligned_memory_can_be_written_in_whole_blocks():
    assert all(whole_blocks(aligned(MIB + n).data) == MIB for n in (0, 1, BLOCK_BYTES - 1))


@pytest.mark.parametrize("refused", ["fcntl", "write"])
def test_a_file_system_that_refuses_gets_it_as_usual(tmp_path, monkeypatch, refused):
    usual, data = os.write, noise(MIB)

    def no(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    def write(file: int, view: memoryview) -> int:
        import fcntl

        return no() if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT else usual(file, view)

    if refused == "write":
        monkeypatch.setattr(os, "write", write)
    else:
        monkeypatch.setattr(direct_io, "fcntl", None)
    assert written(tmp_path / "file", data.data) == 0
    assert (tmp_path / "file").read_bytes() == data.tobytes()


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    file = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        with pytest.raises(OSError, match="No space left"):
            write_blocks(file, noise(MIB).data)
    finally:
        os.close(file)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    ("start", "n_bytes"), [(0, MIB), (1, MIB), (BLOCK_BYTES + 17, 2 * MIB), (MIB, 5 * MIB), (5 * MIB, MIB), (0, 17)]
)
def test_what_is_read_is_what_is_in_the_file(tmp_path, start, n_bytes, cached):
    data, path = noise(3 * MIB + 5), tmp_path / "file"
    path.write_bytes(data)
    file = os.open(path, os.O_RDONLY)
    try:
        if not cached:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        found = read_blocks(file, start, n_bytes)
    finally:
        os.close(file)
    assert found is None or found.tobytes() == data[start : start + n_bytes].tobytes()
    (tmp_path / "blobs").mkdir()
    path.rename(tmp_path / "blobs" / "x")
    assert LocalStore(tmp_path).read("blobs/x", start, n_bytes) == data[start : start + n_bytes].tobytes()


def test_a_file_system_that_refuses_is_read_as_usual(tmp_path, monkeypatch):
    def no(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "x").write_bytes(data := noise(MIB).tobytes())
    monkeypatch.setattr(os, "preadv", no)
    assert LocalStore(tmp_path).read("blobs/x", 0, MIB) == data
