"""A record that outlives its process: always the last whole write, whenever the writer was killed."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gba_hvd.errors import ShardMemoryError
from gba_hvd.shm.snapshot_file import SnapshotFile


def test_nothing_was_written_yet(tmp_path: Path) -> None:
    assert SnapshotFile(tmp_path / "s").read() is None


@pytest.mark.slow
@given(st.lists(st.binary(max_size=700), min_size=1, max_size=8))
def test_the_newest_write_is_read_here_and_by_a_successor(writes: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        snapshot = SnapshotFile(path, half_bytes=128)  # small: it has to grow
        for data in writes:
            snapshot.write(data)
            assert snapshot.read() == data
            assert SnapshotFile(path).read() == data
        successor = SnapshotFile(path)
        successor.write(b"next")
        assert SnapshotFile(path).read() == b"next"


class Crash(BaseException):
    pass


def write_until(snapshot: SnapshotFile, data: bytes, line: int) -> bool:
    """Write, and stop dead before the given line of the file's code; True if the write came to its end."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.endswith("snapshot_file.py"):
            return None
        lines += event == "line"
        if lines == line:
            raise Crash
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        snapshot.write(data)
    except Crash:
        return False
    finally:
        sys.settrace(before)
    return True


@pytest.mark.filterwarnings("ignore:.*unclosed file:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("size", [70, 500])  # in place; in a larger file
def test_a_death_at_any_line_leaves_a_whole_write(tmp_path: Path, size: int) -> None:
    found = []
    for line in range(1, 200):
        path = tmp_path / f"{line}"
        snapshot = SnapshotFile(path, half_bytes=128)
        snapshot.write(b"a" * 50)
        snapshot.write(b"b" * 60)
        ended = write_until(snapshot, b"c" * size, line)
        found.append(SnapshotFile(path).read())
        if ended:
            break
    new = found.index(b"c" * size)
    assert new > 3
    assert found == [b"b" * 60] * new + [b"c" * size] * (len(found) - new)


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    SnapshotFile(path).write(b"hello there")
    data = bytearray(path.read_bytes())
    at = data.index(b"hello")
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardMemoryError, match="damaged"):
        SnapshotFile(path).read()
