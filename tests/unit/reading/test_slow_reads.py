"""Reads of training data that take long are logged with what is read, and when they are over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gba_hvd.data.parquet_stream import ParquetStream
from gba_hvd.data.sharded_stream import ShardedStream
from gba_hvd.reading import slow_reads
from gba_hvd.reading.datasets import reads
from gba_hvd.reading.reader_processes import ReaderProcesses

FIRST_S = 0.05


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(slow_reads, "FIRST_S", FIRST_S)
    monkeypatch.setattr(slow_reads, "LOOK_S", FIRST_S / 5)
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "gba-hvd reads"]


class Hangs(logging.Handler):
    """Storage that hangs until it is reported to."""

    def __init__(self) -> None:
        super().__init__()
        self._reported = threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self._reported.set()

    def wait(self) -> None:
        assert self._reported.wait(60)


@pytest.fixture
def storage() -> Iterator[Hangs]:
    hangs, log = Hangs(), logging.getLogger("gba_hvd")
    log.addHandler(hangs)
    yield hangs
    log.removeHandler(hangs)


class Samples:
    def __init__(self, storage: Hangs | None = None) -> None:
        self._storage = storage

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> int:
        if self._storage is not None and number == 7:
            self._storage.wait()
        return number


def test_a_read_that_hangs_is_logged_once_it_is_long_and_when_it_is_over(storage: Hangs) -> None:
    take = reads(Samples(storage), collate_fn=list)
    assert take(np.array([3, 4])) == [3, 4] and storage.lines == []
    assert take(np.array([7, 8])) == [7, 8]
    assert len(storage.lines) == 2
    begun, over = storage.lines
    assert begun.startswith("reading 2 samples, from [7], of Samples has taken 0 s and is not over: its storage hangs")
    assert over == "reading 2 samples, from [7], of Samples is over, after 0 s"


def test_what_fails_after_it_hung_is_over_too(storage: Hangs) -> None:
    class Fails(Samples):
        def __getitem__(self, number: int) -> int:
            storage.wait()
            raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        reads(Fails())(np.array([7]))
    assert storage.lines[-1].startswith("reading 1 samples, from [7], of Fails is over")


def test_a_dataset_that_cannot_name_its_files_is_read_all_the_same(storage: Hangs) -> None:
    class Nameless(Samples):
        def files_of(self, rows: np.ndarray) -> str:
            raise KeyError("parts")

    assert reads(Nameless(storage), collate_fn=list)(np.array([7, 8])) == [7, 8]
    assert len(storage.lines) == 2 and all("naming it raised KeyError: 'parts'" in line for line in storage.lines)


def test_the_thread_stays_from_read_to_read_and_ends_with_the_last_user() -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "gba-hvd reads"}

    with slow_reads.logging_slow_reads():
        before = threads()
        with slow_reads.reading(lambda: "one"), slow_reads.logging_slow_reads():
            assert threads() == before
        assert threads() == before and len(before) == 1
    assert not threads()


def test_a_shard_that_hangs_is_named(storage: Hangs) -> None:
    def read(shard: str) -> Iterator[int]:
        storage.wait()
        yield from range(3)

    stream = ShardedStream(["s3://me:word@bucket/part-0.gz"], read, segment=1)
    assert stream.segment(0, 0, 0, 1, shuffle=False).count(0) == 3
    assert storage.lines[0].startswith("reading shard s3://***@bucket/part-0.gz has taken")
    assert storage.lines[-1].startswith("reading shard s3://***@bucket/part-0.gz is over")


def test_a_row_group_that_hangs_is_named_with_its_file(
    storage: Hangs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from gba_hvd.data import parquet_files

    file = str(tmp_path / "part.parquet")
    pq.write_table(pa.table({"user": [1, 2], "label": [0, 1]}), file)
    stream = ParquetStream(file, ids=["user"], label="label")
    refuse_change = parquet_files.refuse_change

    def hangs(*of: Any) -> None:
        storage.wait()
        refuse_change(*of)

    monkeypatch.setattr(parquet_files, "refuse_change", hangs)
    assert len(reads(stream)(np.array([0, 1])).label) == 2
    assert storage.lines[0].startswith(f"reading {file}, row group 0 has taken")
    assert storage.lines[1] == f"reading {file}, row group 0 is over, after 0 s" and len(storage.lines) == 2


class HangsInAnotherProcess(Samples):
    def __init__(self, until: Path) -> None:
        super().__init__()
        self._until = until

    def __getitem__(self, number: int) -> int:
        deadline = time.monotonic() + 60
        while not self._until.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return number


@pytest.mark.processes
def test_a_reader_process_logs_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def init(number: int) -> None:
        slow_reads.FIRST_S = FIRST_S

    dataset, shown = HangsInAnotherProcess(tmp_path / "go"), ""
    with ReaderProcesses(dataset, list, n=1, init=init) as readers:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(readers.take(0, np.array([5]), seed=1)))
        thread.start()
        deadline = time.monotonic() + 60
        while "is over" not in shown:
            assert time.monotonic() < deadline, shown
            if "has taken" in shown:
                (tmp_path / "go").touch()
            time.sleep(0.01)
            shown += capfd.readouterr().err
        thread.join()
    assert found == [[5]]
    assert "reading 1 samples, from [5], of HangsInAnotherProcess has taken" in shown
