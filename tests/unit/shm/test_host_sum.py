"""Sums through the memory of a host, by processes: what each has, and what it learns of those that are gone."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from gba_hvd.errors import ShardMemoryError
from gba_hvd.shm import host_sum
from gba_hvd.shm.host_sum import HostSum, WorkerGone
from gba_hvd.shm.outbox import Outbox
from gba_hvd.shm.process_state import is_alive

TIMEOUT_S = 60


@contextmanager
def ranks(folder: Path, work: Callable[[int, HostSum], object], n: int, n_words: int = 64) -> Iterator[list[int]]:
    """A process for each rank, which ends with status 0 when `work(rank, sum)` returns. Yields their numbers."""
    pids = []
    for rank in range(n):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                signal.alarm(TIMEOUT_S)
                work(rank, meet(folder, rank, n, n_words))
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    try:
        yield pids
    finally:
        for pid in pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def meet(folder: Path, rank: int, n: int, n_words: int) -> HostSum:
    """As a world does it, by files in place of a collective."""
    own, number = Outbox.create(folder, n_words)
    fresh = folder / f"{rank}.new"
    fresh.write_text(f"{os.getpid()} {number}")
    fresh.rename(folder / f"rank{rank}")
    boxes = {rank: own}
    for other in range(n):
        while other != rank and not (folder / f"rank{other}").exists():
            time.sleep(0.001)
        if other != rank:
            pid, its = map(int, (folder / f"rank{other}").read_text().split())
            boxes[other] = Outbox.open(folder, pid, its, n_words)
    return HostSum(rank, boxes)


def status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def vector(rank: int, number: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(31 * number + rank), dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [2, 3])
def test_every_rank_has_the_sum_in_the_order_of_the_ranks(tmp_path: Path, n: int, dtype: torch.dtype) -> None:
    sizes = [0, 1, 7, 1000, 12, 0, 333]

    def work(rank: int, summed: HostSum) -> None:
        for number, size in enumerate(sizes * 100):
            values = vector(rank, number, size, dtype)
            summed.sum_(values)
            expected = vector(0, number, size, dtype)
            for other in range(1, n):
                expected += vector(other, number, size, dtype)
            assert torch.equal(values, expected)

    with ranks(tmp_path, work, n, n_words=2000) as pids:
        assert [status(pid) for pid in pids] == [0] * n


@pytest.mark.slow
def test_a_message_is_not_written_over_while_another_rank_reads_it(tmp_path: Path) -> None:
    """One rank is always late: the other is at most one sum ahead of it."""

    def work(rank: int, summed: HostSum) -> None:
        for number in range(50):
            values = torch.full((50_000,), float(number + rank))
            if rank:
                time.sleep(0.002)
            summed.sum_(values)
            assert torch.equal(values, torch.full((50_000,), 2.0 * number + 1))

    with ranks(tmp_path, work, 2, n_words=50_000) as pids:
        assert [status(pid) for pid in pids] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["before", "while it posts"])
def test_who_waits_for_a_worker_that_died_learns_that_there_will_be_no_sum(
    tmp_path: Path, dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(rank: int, summed: HostSum) -> None:
        summed.sum_(torch.ones(8))
        if rank == 1:
            if dies == "while it posts":
                monkeypatch.setattr(np, "copyto", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                summed.sum_(torch.ones(8))
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(WorkerGone, match=r"rank 1 \(process \d+\) has died before its gradients were complete"):
            summed.sum_(torch.ones(8))

    with ranks(tmp_path, work, 3) as pids:
        assert status(pids[1]) == -signal.SIGKILL
        assert [status(pids[0]), status(pids[2])] == [0, 0]


@pytest.mark.slow
def test_a_worker_that_dies_after_it_posted_leaves_the_sum_to_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(rank: int, summed: HostSum) -> None:
        summed.sum_(torch.ones(8))
        if rank == 1:
            monkeypatch.setattr(HostSum, "_await", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        elif rank == 2:
            until((tmp_path / "dead").exists)
        values = torch.full((8,), float(rank + 1))
        summed.sum_(values)
        assert torch.equal(values, torch.full((8,), 6.0))
        with pytest.raises(WorkerGone, match="has died"):
            summed.sum_(values)

    with ranks(tmp_path, work, 3) as pids:
        assert status(pids[1]) == -signal.SIGKILL
        (tmp_path / "dead").touch()
        assert [status(pids[0]), status(pids[2])] == [0, 0]


@pytest.mark.slow
def test_a_worker_that_lives_and_leaves_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had posted before counts."""

    def work(rank: int, summed: HostSum) -> None:
        values = torch.ones(8)
        summed.sum_(values)
        if rank == 1:
            monkeypatch.setattr(HostSum, "_await", interrupt)
            with pytest.raises(KeyboardInterrupt):
                summed.sum_(values)
            until((tmp_path / "seen").exists)
            return
        until(lambda: summed._outboxes[1].has_left)
        summed.sum_(values)
        assert torch.equal(values, torch.full((8,), 4.0))
        with pytest.raises(WorkerGone, match=r"rank 1 \(process \d+\) left the world"):
            summed.sum_(values)
        (tmp_path / "seen").touch()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with ranks(tmp_path, work, 2) as pids:
        assert [status(pid) for pid in pids] == [0, 0]


@pytest.mark.slow
def test_a_long_wait_for_a_worker_that_lives_is_reported_and_ends_when_it_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(rank: int, summed: HostSum) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            summed.sum_(torch.ones(8))
            return
        monkeypatch.setattr(host_sum, "_NOTICE_S", 0.05)
        monkeypatch.setattr(host_sum.log, "warning", lambda text, *values: notice(text % values))
        values = torch.ones(8)
        summed.sum_(values)
        assert torch.equal(values, torch.full((8,), 2.0))
        assert "rank 0 has waited 0 s for the gradients of rank 1 (process" in (tmp_path / "notice").read_text()

    def notice(text: str) -> None:
        (tmp_path / "notice.new").write_text(text)
        (tmp_path / "notice.new").rename(tmp_path / "notice")

    with ranks(tmp_path, work, 2) as pids:
        until((tmp_path / "notice").exists)
        os.kill(pids[1], signal.SIGCONT)
        assert [status(pid) for pid in pids] == [0, 0]


@pytest.mark.slow
def test_a_worker_that_stays_stopped_counts_as_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "0.1")

    def work(rank: int, summed: HostSum) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(WorkerGone, match=r"rank 1 \(process \d+\) has been stopped for 0 s"):
            summed.sum_(torch.ones(8))

    with ranks(tmp_path, work, 2) as pids:
        assert status(pids[0]) == 0
        os.kill(pids[1], signal.SIGKILL)
        assert status(pids[1]) == -signal.SIGKILL


@pytest.mark.slow
def test_the_dead_are_seen_while_another_rank_is_slow(tmp_path: Path) -> None:
    def work(rank: int, summed: HostSum) -> None:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            until((tmp_path / "seen").exists)
            return
        with pytest.raises(WorkerGone, match=r"rank 2 .* has died"):
            summed.sum_(torch.ones(8))
        (tmp_path / "seen").touch()

    with ranks(tmp_path, work, 3) as pids:
        assert [status(pid) for pid in pids] == [0, 0, -signal.SIGKILL]


@pytest.mark.slow
def test_a_sum_that_was_interrupted_is_not_taken_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(rank: int, summed: HostSum) -> None:
        if rank == 1:
            with monkeypatch.context() as patch:
                patch.setattr(HostSum, "_post", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    summed.sum_(torch.ones(8))
        with pytest.raises(WorkerGone, match=r"rank 1.* left the world"):
            summed.sum_(torch.ones(8))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with ranks(tmp_path, work, 2) as pids:
        assert [status(pid) for pid in pids] == [0, 0]


def test_headers_have_room_before_there_is_a_message(tmp_path: Path) -> None:
    """To read one in a file system that is full would kill the process."""
    outbox, _ = Outbox.create(tmp_path, 1 << 20)
    assert 2 * 8192 <= 512 * outbox.path.stat().st_blocks < 1 << 20
    assert not outbox.wait_posted(1, 0.0)


def test_messages_without_room_are_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(file: int, at: int, n_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (folder := tmp_path / "gba-hvd-job").mkdir()
    monkeypatch.setattr(os, "posix_fallocate", is_full)
    words = rf"no room for \d+ bytes of gradients in {tmp_path}: No space left.*GBA_HVD_SHARD_DIR.*--shm-size"
    with pytest.raises(ShardMemoryError, match=words):
        Outbox.create(folder, 64)
