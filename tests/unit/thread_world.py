"""Several workers as threads of one process: collectives are barriers, so every rank of the real code runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gba_hvd
from gba_hvd.elastic import torch_state
from gba_hvd.shm.host_sum import HostSum

TIMEOUT_S = 50.0


class Meeting:
    """Where the threads of one world exchange what they bring."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.brought: list[Any] = [None] * size

    def exchange(self, rank: int, name: str, value: Any) -> list[Any]:
        self.brought[rank] = (name, value)
        self.barrier.wait()
        everyone = list(self.brought)
        self.barrier.wait()
        assert {n for n, _ in everyone} == {name}, f"different collectives at once: {[n for n, _ in everyone]}"
        return [v for _, v in everyone]


class ThreadWorld:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.before_result: Callable[[], None] = lambda: None  # a place for faults: a commit is decided, not yet known
        self.meeting, self.rank, self.size, self.local_rank, self.host = meeting, rank, meeting.size, rank, "here"

    def gather(self, name: str, row: np.ndarray) -> np.ndarray:
        return np.stack(self.meeting.exchange(self.rank, name, row.copy()))

    def broadcast(self, name: str, data: bytes | None, root: int) -> bytes:
        result = self.meeting.exchange(self.rank, name, data)[root]
        assert isinstance(result, bytes)
        return result

    def alltoall(
        self, name: str, words: np.ndarray, splits: np.ndarray, expected: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        assert splits.sum() == len(words)
        parts = np.split(words.copy(), np.cumsum(splits)[:-1])
        mine = [sent[self.rank] for sent in self.meeting.exchange(self.rank, name, parts)]
        return np.concatenate(mine), np.array([len(part) for part in mine])

    def gather_bytes(self, name: str, data: bytes) -> list[np.ndarray]:
        return [np.frombuffer(each, np.uint8) for each in self.meeting.exchange(self.rank, name, data)]

    def sum_(self, name: str, values: Tensor) -> None:
        total = torch.stack(self.meeting.exchange(self.rank, name, values.clone())).sum(0)
        self.before_result()
        values.copy_(total)

    def wait_until(
        self, name: str, is_done: Callable[[], bool], doze: Callable[[float], None], ranks: Sequence[int]
    ) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_done():
            if self.meeting.barrier.broken or time.monotonic() > deadline:
                raise threading.BrokenBarrierError
            doze(0.01)


class EventLog(gba_hvd.Callback):
    def __init__(self) -> None:
        self.events: list[gba_hvd.Event] = []

    def on_event(self, event: gba_hvd.Event) -> None:
        self.events.append(event)

    def of(self, kind: str) -> list[gba_hvd.Event]:
        return [event for event in self.events if event.kind == kind]


class Workers:
    """`together(jobs, act)` runs `act(job)` for every worker of a world at once; worlds may change in between."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # worlds form again
        self._here = threading.local()
        monkeypatch.setattr(torch_state, "current_world", lambda: self._here.world)
        sum_ = HostSum.sum_

        def sum_before_result(host_sum: HostSum, values: Tensor) -> None:
            sum_(host_sum, values)
            if len(values):  # else it is a barrier
                self._here.world.before_result()

        monkeypatch.setattr(HostSum, "sum_", sum_before_result)

    @property
    def rank(self) -> int:
        """Of the thread that asks."""
        rank: int = self._here.world.rank
        return rank

    def together(self, jobs: list[Any], act: Callable[[Any], Any]) -> list[Any]:
        """What `act` returned on each rank; every rank must succeed."""
        results = self.outcomes(jobs, act)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def outcomes(self, jobs: list[Any], act: Callable[[Any], Any]) -> list[Any]:
        """What `act` returned or raised on each rank."""
        meeting = Meeting(len(jobs))
        results: list[Any] = [None] * len(jobs)

        def work(rank: int, job: Any) -> None:
            self._here.world = ThreadWorld(meeting, rank)
            try:
                results[rank] = act(job)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank, job), daemon=True) for rank, job in enumerate(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT_S)
            assert not thread.is_alive()
        return results


def miss_a_result(
    workers: Workers, jobs: list[Any], misses: int, step: int, train: Callable[[Any], Any]
) -> list[Exception]:
    """All train; one worker does not learn that this step was decided, which the others apply. What they raised.

    Afterwards they may form a world again.
    """
    others, fired = [job for job in jobs if job is not jobs[misses]], []

    def miss() -> None:
        if jobs[misses].state.step == step - 1 and not fired:
            fired.append(misses)
            deadline = time.monotonic() + TIMEOUT_S
            while any(job.state.step < step for job in others) and time.monotonic() < deadline:
                time.sleep(0.001)
            jobs[misses].state.world.meeting.barrier.abort()
            raise ConnectionError("the network went away")

    def run_into_it(job: Any) -> None:
        job.state.sync()

        def do_not_wait_long_for_rows() -> None:
            object.__setattr__(job.tables.config, "timeout_s", TIMEOUT_S if job.state.step != step - 1 else 0.01)

        job.state.world.before_result = miss if job is jobs[misses] else do_not_wait_long_for_rows
        train(job)

    raised = workers.outcomes(jobs, run_into_it)
    assert fired and all(isinstance(outcome, Exception) for outcome in raised), raised
    form_again(jobs)
    return raised


def rows_of(jobs: list[Any]) -> dict[str, np.ndarray]:
    """All rows of the job, each from a worker of the host where it lives; all other copies are gone."""
    found: dict[str, np.ndarray] = {}
    for job in jobs:
        ready = job.tables.memory.marks().ready
        for name, rows in job.all_rows().items():
            here = ready[np.arange(len(rows)) % len(ready)] == 1
            found.setdefault(name, np.full_like(rows, np.nan))[here] = rows[here]
    return found


def form_again(jobs: list[Any]) -> None:
    """After a failure, as Horovod's loop does it."""
    for job in jobs:
        object.__setattr__(job.tables.config, "timeout_s", TIMEOUT_S)
        job.state.restore()
        job.state.on_reset()
