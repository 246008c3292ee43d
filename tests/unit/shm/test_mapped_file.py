"""Files in memory at multiples of 2 MiB, and their space in huge pages."""

from __future__ import annotations

import errno
import gc
import os
import platform
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gba_hvd.shm import mapped_file
from gba_hvd.shm.mapped_file import HUGE, MappedFile, has_huge_pages

SHM = Path("/dev/shm")
MAKES_HUGE_PAGES = tuple(int(part) for part in platform.release().split(".")[:2]) >= (6, 1)


@pytest.fixture
def fd() -> Iterator[int]:
    """Of an empty file of a tmpfs, without a name."""
    opened = os.open(SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    os.ftruncate(opened, 6 * HUGE + 4096)
    yield opened
    os.close(opened)


def blocks(fd: int) -> int:
    """Bytes that the file takes."""
    return 512 * os.fstat(fd).st_blocks


def mapped_huge(address: int) -> int:
    """Bytes of the mapping at this address that are in huge pages."""
    _, _, ours = Path("/proc/self/smaps").read_text().partition(f"\n{address:x}-")
    found = re.search(r"ShmemPmdMapped: *([0-9]+) kB", ours)
    assert found is not None
    return 1024 * int(found[1])


def test_a_file_begins_at_a_huge_page_and_shows_what_others_write(fd: int) -> None:
    mine, other = MappedFile(fd, 6 * HUGE + 4096), MappedFile(fd, 6 * HUGE + 4096)
    assert [one.bytes.ctypes.data % HUGE for one in (mine, other)] == [0, 0]
    mine.bytes[-1] = 7
    assert other.bytes[-1] == 7 and os.pread(fd, 1, 6 * HUGE + 4095) == b"\7"
    os.ftruncate(fd, HUGE)
    assert mine.file_size() == HUGE


@pytest.mark.skipif(not MAKES_HUGE_PAGES, reason="needs Linux 6.1")
def test_space_is_taken_in_huge_pages_within_the_part_that_is_asked_for(fd: int) -> None:
    mine, other = MappedFile(fd, 6 * HUGE + 4096), MappedFile(fd, 6 * HUGE + 4096)
    mine.bytes[2 * HUGE : 2 * HUGE + 8192] = 5  # before, by another
    mine.take_huge(HUGE // 2, 4 * HUGE + 100)
    assert blocks(fd) == 3 * HUGE
    assert mapped_huge(mine.bytes.ctypes.data) == 3 * HUGE
    assert other.bytes[HUGE : 4 * HUGE].sum() == 5 * 8192
    assert mapped_huge(other.bytes.ctypes.data) == 3 * HUGE
    mine.free(HUGE + 4096, HUGE)
    assert blocks(fd) == 2 * HUGE
    assert other.bytes[HUGE : 4 * HUGE].sum() == 5 * 4096


@pytest.mark.parametrize(("error", "n_asked"), [(errno.EAGAIN, 3), (errno.EINVAL, 1)])
def test_pages_that_cannot_be_made_now_do_not_keep_the_others_small(
    fd: int, monkeypatch: pytest.MonkeyPatch, error: int, n_asked: int
) -> None:
    asked = []

    def advise(address: int, n_bytes: int, advice: int) -> None:
        asked.append(n_bytes)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(mapped_file, "_advise", advise)
    monkeypatch.setattr(mapped_file, "_AT_ONCE", 2 * HUGE)
    MappedFile(fd, 6 * HUGE + 4096).take_huge(0, 6 * HUGE)
    assert asked == n_asked * [2 * HUGE]


def test_a_folder_says_which_pages_its_files_have() -> None:
    assert has_huge_pages(SHM) == MAKES_HUGE_PAGES
    with pytest.raises(OSError, match="supported"):
        has_huge_pages(Path("/proc"))


def test_a_file_system_without_huge_pages_leaves_the_space_to_the_caller(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(3 * HUGE)
        mapped = MappedFile(file.fileno(), 3 * HUGE)
        mapped.take_huge(0, 3 * HUGE)
        os.posix_fallocate(file.fileno(), 0, 3 * HUGE)
        mapped.bytes[:] = 1
        assert mapped.bytes.sum() == 3 * HUGE


def test_arrays_keep_a_file_mapped_and_the_last_one_lets_go_of_it(fd: int) -> None:
    mapped = MappedFile(fd, 6 * HUGE + 4096)
    mapped.bytes[-1] = 3
    part: np.ndarray = mapped.bytes[4096:].view(np.int8)
    at, open_before = f"\n{mapped.bytes.ctypes.data:x}-", len(os.listdir("/proc/self/fd"))
    del mapped
    gc.collect()
    assert part[-1] == 3 and at in Path("/proc/self/maps").read_text()
    del part
    gc.collect()
    assert at not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == open_before - 1


def test_what_cannot_be_mapped_raises_and_leaves_no_address_taken(fd: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(re.search(r"VmSize:\s+([0-9]+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_AS, (size + 3 * HUGE, before[1]))
    try:
        with pytest.raises(OSError, match="Cannot allocate memory"):
            MappedFile(fd, 6 * HUGE)
        for _ in range(3):
            with open(os.devnull, "rb") as file, pytest.raises(OSError, match=r"denied|No such device|Invalid"):
                MappedFile(file.fileno(), HUGE)
        assert MappedFile(fd, HUGE).bytes[0] == 0
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
