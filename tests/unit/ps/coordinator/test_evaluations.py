"""Evaluations by leases: which of two workers' evaluations are one, and which are kept."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import nn

from gba_hvd.metrics.accumulators import Part
from gba_hvd.modes.parameter_server import ParameterServerMode
from gba_hvd.ps.coordinator.evaluations import Evaluations
from gba_hvd.ps.messages import Evaluate, Score
from gba_hvd.training.job_state import Cursor, Progress
from gba_hvd.training.mode import CountRun, EvaluationRun, SampleReader
from gba_hvd.training.step_hooks import StepHooks

PARTS = (Part("sums", "counts", n_sums=1),)


class Servers:
    """The evaluations of one server, as a worker reaches them."""

    name, several_hosts, session = "gba", False, SimpleNamespace(rule="none")

    def __init__(self, evaluations: Evaluations, worker: int) -> None:
        self._evaluations, self._worker, self._n = evaluations, worker, 0

    def request_evaluation(self, phase: int, ordinal: int, n: int, batch: int, parts: Any, buffers: bytes) -> Any:
        self._n += 1
        assert self._n < 100, "the evaluation comes to no end"
        request = Evaluate(self._worker, 1, self._n, phase, ordinal, n, batch, list(parts))
        return self._evaluations.ask(request, [buffers])

    def send_scores(self, phase: int, ordinal: int, lease: Any, measured: Any) -> None:
        score = Score(self._worker, 1, phase, ordinal, lease.micro, lease.serial)
        self._evaluations.score(score, [frame.tobytes() for frames in measured for frame in frames])

    def evaluation_values(self) -> Any:
        return contextlib.nullcontext()

    def pull(self, keys: Any) -> None:
        pass


class Worker:
    """One of several that evaluate two batches; `value` is what it measures on each."""

    def __init__(self, evaluations: Evaluations, number: int, value: float, cursor: Cursor) -> None:
        self.progress, self.value = Progress(None, StepHooks()), value
        self.progress.epoch, self.progress.cursor = 3, cursor
        model = SimpleNamespace(tables=SimpleNamespace(layout=SimpleNamespace(groups=())))
        engine: Any = SimpleNamespace(progress=self.progress, model=model, participants=[])
        servers: Any = Servers(evaluations, number)
        self.mode = ParameterServerMode(engine, servers)
        self.n_counted = 0

    def evaluate(self) -> Any:
        reader = SampleReader(lambda numbers: numbers, 2, 1, lambda batches: [])
        job = EvaluationRun(nn.Identity(), reader, PARTS, lambda batch: [[np.array([self.value])]])
        return self.mode.evaluate(job)[0]["sums"]

    def count(self) -> list[int]:
        def one(number: int) -> int:
            self.n_counted += 1
            return 10 + number

        return self.mode.count(CountRun(3, 0, 2, one, lambda at, size: 0))


def test_workers_in_other_segments_or_epochs_share_an_evaluation() -> None:
    """The cursor follows the fastest worker, so it is not the same on all at the same call."""
    evaluations = Evaluations(60.0)
    cursors = [Cursor(3, 5, segment=0), Cursor(3, 1, segment=1), Cursor(4, 0, segment=0)]
    workers = [Worker(evaluations, number, 2.0 + number, cursor) for number, cursor in enumerate(cursors)]
    assert [worker.evaluate() for worker in workers] == [[4.0]] * 3
    assert [worker.evaluate() for worker in reversed(workers)] == [[8.0]] * 3  # the next one


def test_an_evaluation_after_the_epoch_is_another_one_than_within_it() -> None:
    evaluations = Evaluations(60.0)
    first, second = (Worker(evaluations, number, 2.0 + number, Cursor(3, 5)) for number in range(2))
    second.progress.epoch_over = True
    assert (first.evaluate(), second.evaluate()) == ([4.0], [6.0])


def test_a_late_joiner_counts_a_segment_with_many_evaluations_behind() -> None:
    evaluations = Evaluations(60.0)
    worker = Worker(evaluations, 0, 2.0, Cursor(3, 5))
    assert worker.count() == [10, 11]
    for _ in range(20):
        worker.evaluate()
    late = Worker(evaluations, 1, 2.0, Cursor(3, 5))
    assert late.count() == [10, 11]
    assert late.n_counted == 2
    assert worker.count() == [10, 11]
    assert worker.n_counted == 2  # that of the late joiner is kept


def test_few_evaluations_are_kept() -> None:
    evaluations = Evaluations(60.0)
    worker = Worker(evaluations, 0, 2.0, Cursor(3, 5))
    for _ in range(20):
        worker.evaluate()
    assert len(evaluations._evaluations) == 8


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_batch_of_a_worker_that_hangs_is_given_to_another_one() -> None:
    clock = Clock()
    evaluations = Evaluations(60.0, clock)
    hangs, other = Servers(evaluations, 0), Servers(evaluations, 1)
    taken, _ = hangs.request_evaluation(3, 0, 2, 1, PARTS, b"")
    clock.now_s = 59.0
    evaluations.take_back_late()
    second, _ = other.request_evaluation(3, 0, 2, 1, PARTS, b"")
    assert (taken.lease.micro, second.lease.micro) == (0, 1)
    other.send_scores(3, 0, second.lease, [[np.array([2.0])]])
    assert other.request_evaluation(3, 0, 2, 1, PARTS, b"")[0].lease is None
    clock.now_s = 61.0
    evaluations.take_back_late()
    again, _ = other.request_evaluation(3, 0, 2, 1, PARTS, b"")
    assert again.lease.micro == 0
    hangs.send_scores(3, 0, taken.lease, [[np.array([100.0])]])  # too late: it does not count twice
    other.send_scores(3, 0, again.lease, [[np.array([2.0])]])
    assert other.request_evaluation(3, 0, 2, 1, PARTS, b"")[0].result[0]["sums"] == [4.0]


def test_batches_that_take_longer_than_a_lease_come_to_an_end() -> None:
    """One that comes too late shows how long the next one may take."""
    clock = Clock()
    evaluations = Evaluations(60.0, clock)
    servers = Servers(evaluations, 0)
    for batch in range(3):
        lease = servers.request_evaluation(3, 0, 2, 1, PARTS, b"")[0].lease
        assert lease.micro == max(0, batch - 1)
        for _ in range(100):  # seconds
            clock.now_s += 1.0
            evaluations.take_back_late()
        servers.send_scores(3, 0, lease, [[np.array([2.0])]])
    assert servers.request_evaluation(3, 0, 2, 1, PARTS, b"")[0].result[0]["sums"] == [4.0]
