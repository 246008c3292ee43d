"""Copies of rows are never torn, however hard somebody writes to them; a naive copy is."""

from __future__ import annotations

import mmap
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from recovery.rows import Column, RowView, Schema, Table, copy_rows
from recovery.testing import two_tables, values
from recovery.write.consistent_read import PIECE_BYTES, Busy, read

WIDTH = 16


class SharedRows:
    """A holder in a file that processes share, like shard memory: marks, then [weight | slot | counter] records.

    Every step gives the rows it changes one and the same number in all places.
    """

    def __init__(self, path: Path, n_rows: int) -> None:
        self.schema = Schema((Table("user", n_rows, (Column("weight", WIDTH), Column("slot", WIDTH))),), 1)
        with open(path, "a+b") as file:
            file.truncate(4096 + n_rows * 4 * (2 * WIDTH + 1))
            mapped = mmap.mmap(file.fileno(), 0)
        self.begun, self.finished = (np.frombuffer(mapped, np.int64, 1, 8 * i) for i in (0, 1))
        words = np.frombuffer(mapped, np.float32, offset=4096).reshape(n_rows, -1)
        self.weight, self.slot = words[:, :WIDTH], words[:, WIDTH:-1]
        self.counts = words.view(np.uint32)[:, -1]
        self.both = words[:, :-1]

    def shards(self) -> list[int]:
        return [0]

    def slab(self, table: int, shard: int) -> RowView:
        return RowView((self.both,), self.counts)

    def step_marks(self, shard: int) -> tuple[int, int]:
        finished = int(self.finished[0])
        return finished, int(self.begun[0])

    def step(self, k: int, rows: slice | np.ndarray) -> None:
        self.begun[0] = k
        self.weight[rows] = k
        self.slot[rows] = k
        self.counts[rows] = k
        self.finished[0] = k


def hammer(path: Path, n_rows: int, pause_s: float) -> None:
    """Runs in a process of its own until it is killed."""
    rows, k = SharedRows(path, n_rows), 0
    while True:
        k += 1
        rows.step(k, slice(0, n_rows))
        until = time.perf_counter() + pause_s
        while time.perf_counter() < until:
            pass


@contextmanager
def hammered(tmp_path: Path, n_rows: int, pause_s: float) -> Iterator[SharedRows]:
    rows = SharedRows(tmp_path / "rows", n_rows)
    process = multiprocessing.get_context("spawn").Process(
        target=hammer, args=(tmp_path / "rows", n_rows, pause_s), daemon=True
    )
    process.start()
    try:
        while rows.step_marks(0)[0] < 3:
            assert process.is_alive()
            time.sleep(0.001)
        yield rows
    finally:
        process.kill()
        process.join()
        process.close()


def is_torn(records: np.ndarray, counts: np.ndarray) -> bool:
    return bool((records != counts[:, None]).any())


@pytest.mark.processes
def test_of_millions_of_rows_read_under_a_real_writer_none_is_torn(tmp_path: Path) -> None:
    n_rows, wanted = 20_000, 3_000_000
    records, counts = np.empty((n_rows, 2 * WIDTH), np.float32), np.empty(n_rows, np.uint32)
    some = np.sort(np.random.default_rng(0).choice(n_rows, n_rows // 4, replace=False))
    n_read, n_torn, turn = 0, 0, 0
    with hammered(tmp_path, n_rows, pause_s=0.002) as rows:
        while n_read < wanted or n_torn == 0:
            turn += 1
            places = some if turn % 8 == 0 else slice(0, n_rows)
            got = read(rows, 0, 0, places, records, counts)
            assert not is_torn(records[: got.n_rows], counts[: got.n_rows])
            assert (counts[: got.n_rows] == got.step).all()
            n_read += got.n_rows
            n_torn += got.n_torn
    assert n_torn > 0  # the writer did come between


@pytest.mark.processes
def test_under_the_same_writer_a_naive_copy_is_torn(tmp_path: Path) -> None:
    # The checkpoint of a live server whose weights and slots were captured at different moments.
    n_rows = 20_000
    records, counts = np.empty((n_rows, 2 * WIDTH), np.float32), np.empty(n_rows, np.uint32)
    with hammered(tmp_path, n_rows, pause_s=0.002) as rows:
        torn = False
        while not torn:  # the test's time limit is the end of this
            copy_rows(rows.slab(0, 0), slice(0, n_rows), records, counts)
            torn = is_torn(records, counts)


class Interrupted(SharedRows):
    """Calls `between` at every look at the marks: the only moments that a reader can distinguish."""

    def __init__(self, path: Path, n_rows: int, between: Callable[[SharedRows, int], None]) -> None:
        super().__init__(path, n_rows)
        self.between, self.looks = between, 0

    def step_marks(self, shard: int) -> tuple[int, int]:
        found = super().step_marks(shard)
        self.looks += 1
        self.between(self, self.looks)
        return found


def buffers(n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((n_rows, 2 * WIDTH), np.float32), np.zeros(n_rows, np.uint32)


def test_half_a_step_between_the_first_look_and_the_copy_is_noticed(tmp_path: Path) -> None:
    def half_a_step(rows: SharedRows, look: int) -> None:
        if look == 1:
            rows.begun[0] = 1
            rows.weight[:] = 1  # and the slots not yet
        if look == 3:
            rows.slot[:], rows.counts[:], rows.finished[0] = 1, 1, 1

    rows = Interrupted(tmp_path / "rows", 10, half_a_step)
    records, counts = buffers(10)
    got = read(rows, 0, 0, slice(0, 10), records, counts)
    assert (got.n_rows, got.step, got.n_torn) == (10, 1, 1)
    assert not is_torn(records, counts)


@pytest.mark.parametrize("look", [4, 5])  # between two pieces, and in the middle of one
def test_what_was_copied_before_a_step_began_counts(tmp_path: Path, look: int) -> None:
    n_rows = 4 * PIECE_BYTES // (8 * WIDTH)

    def a_step_after_the_second_piece(rows: SharedRows, this_look: int) -> None:
        if this_look == look:
            rows.step(1, slice(0, n_rows))

    rows = Interrupted(tmp_path / "rows", n_rows, a_step_after_the_second_piece)
    records, counts = buffers(n_rows)
    got = read(rows, 0, 0, slice(0, n_rows), records, counts)
    assert (got.n_rows, got.step) == (n_rows // 2, 0)
    assert not is_torn(records[: got.n_rows], counts[: got.n_rows])


def test_a_shard_with_short_pauses_is_read_in_smaller_pieces(tmp_path: Path) -> None:
    steps = iter(range(1, 1000))

    def a_step_at_every_copy_of_more_than_ten_rows(rows: SharedRows, look: int) -> None:
        if look % 2 == 1 and read_rows[0] > 10:
            rows.step(next(steps), slice(0, n_rows))
            read_rows[0] //= 2

    n_rows = 1000
    read_rows = [n_rows]
    rows = Interrupted(tmp_path / "rows", n_rows, a_step_at_every_copy_of_more_than_ten_rows)
    records, counts = buffers(n_rows)
    got = read(rows, 0, 0, slice(0, n_rows), records, counts)
    assert got.n_torn == 7
    assert 1 <= got.n_rows <= n_rows
    assert not is_torn(records[: got.n_rows], counts[: got.n_rows])


def test_a_shard_that_is_never_at_rest_is_given_up_on_with_a_sentence(tmp_path: Path) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    rows = SharedRows(tmp_path / "rows", 10)
    rows.begun[0] = 8
    rows.finished[0] = 7
    with pytest.raises(
        Busy, match=r"shard 0: no 10 rows of 'user'.*step 8 has begun, 7 was .* its writer died"
    ) as died:
        read(rows, 0, 0, slice(0, 10), *buffers(10), timeout_s=1.5, clock=lambda: now[0], pause=sleep)
    assert "1.5 s" in str(died.value)
    assert now[0] == pytest.approx(1.5, abs=0.01)


def test_time_in_which_nobody_looked_does_not_count(tmp_path: Path) -> None:
    """The save waits for its store meanwhile, longer than for a step."""
    now, rows = [0.0], SharedRows(tmp_path / "rows", 10)
    rows.begun[0] = 8
    rows.finished[0] = 7
    n_pauses = 0

    def pause(seconds: float) -> bool:
        nonlocal n_pauses
        n_pauses += 1
        now[0] += 31.0
        rows.finished[0] = 8 if n_pauses == 3 else 7
        return True

    assert read(rows, 0, 0, slice(0, 10), *buffers(10), timeout_s=30.0, clock=lambda: now[0], pause=pause).n_rows == 10
    assert n_pauses == 3


def test_rows_with_several_columns_are_copied_into_one_record() -> None:
    rows = two_tables(n_shards=2, n_rows=9)
    places = np.array([0, 2, 3])
    records, counts = np.empty((3, 9), np.float32), np.empty(3, np.uint32)
    assert read(rows, 0, 1, places, records, counts).n_rows == 3
    wanted = values(rows)["user"][[1, 5, 7]]
    assert records.tobytes() == wanted.tobytes()
