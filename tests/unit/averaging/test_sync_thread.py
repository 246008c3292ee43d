"""The thread of the rounds, with workers as threads of this process and a world that adds up or breaks on request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gba_hvd import GBACallback
from gba_hvd.averaging.algorithms import Averaging, interpolate_
from gba_hvd.averaging.replica import Replica, ReplicaSnapshot
from gba_hvd.averaging.sync_thread import SyncThread
from gba_hvd.callbacks import Event
from gba_hvd.comm.collectives import SoloWorld, WorldLeft
from gba_hvd.comm.traffic import Traffic
from gba_hvd.gradients.dense_gradients import DenseGradients
from gba_hvd.switching.requests import ModeRequests
from gba_hvd.tracking import gauges

PATIENCE_S = 60.0


@pytest.fixture
def nobody_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has no micro-batch takes part in no round because of that, however late it begins the next one."""
    monkeypatch.setattr("gba_hvd.averaging.schedule.PASSIVE_AFTER_S", 1e9)


class Meeting:
    """Where the threads of one world add up. `broken`: every sum fails."""

    def __init__(self, size: int) -> None:
        self.size, self.broken = size, False
        self._changed = threading.Condition()
        self._sum, self._n, self._round = torch.zeros(0), 0, 0
        self._result = torch.zeros(0)

    def add(self, values: Tensor, cancelled: Callable[[], bool]) -> None:
        with self._changed:
            mine = self._round
            self._sum = values.clone() if self._n == 0 else self._sum + values
            self._n += 1
            if self._n == self.size:
                self._result, self._n, self._round = self._sum, 0, self._round + 1
                self._changed.notify_all()
            while self._round == mine:
                if self.broken:
                    raise RuntimeError("a worker was lost")
                if cancelled():
                    raise WorldLeft("left")
                self._changed.wait(0.005)
            values.copy_(self._result)


class World(SoloWorld):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__()
        self._meeting, self.rank, self.size = meeting, rank, meeting.size

    def sum_(self, name: str, values: Tensor, cancelled: Callable[[], bool] | None = None) -> None:
        assert cancelled is not None
        self._meeting.add(values, cancelled)


class Servers:
    """The central copy, as the servers would hold it."""

    def __init__(self, n: int) -> None:
        self.values, self._lock = torch.zeros(n), threading.Lock()
        self.fails = False

    def blend(self, copy: ReplicaSnapshot, number: int) -> Tensor:
        if self.fails:
            raise RuntimeError("no server")
        with self._lock:
            return interpolate_(self.values, copy.values, 0.5).clone()

    def publish(self, copy: ReplicaSnapshot, values: Tensor) -> None:
        if self.fails:
            raise RuntimeError("no server")
        with self._lock:
            self.values = values.clone()


class Worker:
    """A parameter of two numbers, its replica and its rounds."""

    def __init__(
        self, values: list[float], servers: Servers, is_open: bool = True, began: list[float] | None = None,
        **settings: Any,
    ) -> None:  # fmt: skip
        self.parameter = nn.Parameter(torch.tensor(values))
        self.replica = Replica(DenseGradients([self.parameter], 0))
        self.broken: list[str] = []
        self.diverged = threading.Event()
        settings = {"algorithm": "ma", "elasticity": 1.0, "pause_s": 0.0, **settings}
        self.traffic = Traffic()
        self.rounds = SyncThread(
            Averaging(**settings), self.replica, servers, broken=self.broken.append, diverged=self.diverged.set,
            traffic=self.traffic,
        )  # fmt: skip
        if is_open:
            self.rounds.begin_with(torch.tensor(values if began is None else began))
            self.replica.open(0)

    @property
    def values(self) -> list[float]:
        return list(self.parameter.detach().tolist())

    def step(self, by: float) -> None:
        step = self.replica.step(lambda: self.parameter.data.add_(by))
        self.rounds.end_micro(step, PATIENCE_S)


def wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)


def started(values: list[list[float]], servers: Servers | None = None, **settings: Any) -> list[Worker]:
    servers, meeting = servers or Servers(2), Meeting(len(values))
    workers = [Worker(some, servers, **settings) for some in values]
    for rank, worker in enumerate(workers):
        worker.rounds.start(World(meeting, rank))
    return workers


def stop_together(workers: list[Worker]) -> list[bool]:
    ended: list[bool] = [False] * len(workers)

    def stop(number: int) -> None:
        ended[number] = workers[number].rounds.stop(together=True, timeout_s=PATIENCE_S)

    threads = [threading.Thread(target=stop, args=(number,)) for number in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def test_replicas_become_their_mean_and_the_servers_learn_it():
    servers = Servers(2)
    workers = started([[0.0, 3.0], [4.0, 1.0], [2.0, 2.0]], servers)
    wait_for(lambda: all(worker.values == [2.0, 2.0] for worker in workers), "the mean")
    wait_for(lambda: servers.values.tolist() == [2.0, 2.0], "the central copy")
    assert stop_together(workers) == [True] * 3


@pytest.mark.parametrize("mixing", ["interpolate", "difference"])
def test_all_workers_stop_after_the_same_round_whenever_they_come(mixing: str):
    workers = started([[0.0, 0.0], [1.0, 1.0]], mixing=mixing)
    wait_for(lambda: workers[0].rounds.n_done > 3, "some rounds")
    assert stop_together(workers) == [True, True]
    assert workers[0].rounds.n_done == workers[1].rounds.n_done


def test_a_closed_replica_takes_part_without_counting_and_is_left_alone():
    workers = started([[0.0, 0.0], [4.0, 4.0]])
    workers[1].replica.close()
    workers[1].parameter.data.fill_(100.0)
    for _ in range(5):
        workers[0].step(1.0)
    done = workers[0].rounds.n_done
    wait_for(lambda: workers[0].rounds.n_done > done + 2, "more rounds")
    assert workers[1].values == [100.0, 100.0]
    assert workers[0].values[0] < 20.0
    assert stop_together(workers) == [True, True]


@pytest.mark.parametrize("algorithm", ["ma", "bmuf"])
def test_the_servers_learn_of_rounds_without_the_replica_of_rank_0(algorithm: str):
    """Whoever begins an epoch later than the others, or joins, opens its replica with the servers' copy."""
    servers, meeting = Servers(2), Meeting(3)
    workers = [Worker([4.0 * n] * 2, servers, is_open=n > 0, algorithm=algorithm) for n in range(3)]
    for rank, worker in enumerate(workers):
        worker.rounds.start(World(meeting, rank))
    # bmuf: the global copy of rank 1 began with 4, and goes .9 of the way to the mean of 4 and 8
    target = 6.0 if algorithm == "ma" else 5.8
    wait_for(lambda: torch.allclose(servers.values, torch.tensor([target] * 2)), "the target at the servers")
    assert stop_together(workers) == [True, True, True]


def test_the_global_copy_of_bmuf_starts_from_the_initial_model_and_survives_a_change_of_membership():
    """w_glob is 0 at first, 0 + .5 (6 - 0) after a round, and 3 + .5 (6 - 3) after one of the next world."""
    settings: dict[str, Any] = {"algorithm": "bmuf", "block_rate": 0.5, "began": [0.0, 0.0]}
    servers, meeting = Servers(2), Meeting(2)
    workers = [Worker([4.0, 4.0], servers, **settings), Worker([8.0, 8.0], servers, **settings)]
    for rank, worker in enumerate(workers):
        worker.rounds.start(World(meeting, rank))
    wait_for(lambda: workers[0].values == workers[1].values == [3.0, 3.0], "half of the way to the mean")
    for worker in workers:
        worker.rounds.before_world_leaves(PATIENCE_S)
    late_joiner, again = Worker([12.0, 12.0], servers, **{**settings, "began": [100.0, 100.0]}), Meeting(3)
    late_joiner.rounds.start(World(again, 0))
    for rank, worker in enumerate(workers):
        worker.rounds.after_world_forms(World(again, 1 + rank))
    workers.append(late_joiner)
    wait_for(lambda: all(worker.values == [4.5, 4.5] for worker in workers), "the survivors' copy at all")
    assert stop_together(workers) == [True] * 3


def sgd_of(rank: int, parameter: nn.Parameter) -> Callable[[int], None]:
    """One step on this rank's t-th micro-batch of a least-squares problem."""
    data = np.random.default_rng(rank).normal(size=(30, 4, 3)).astype(np.float32)
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step(t: int) -> None:
        optimizer.zero_grad()
        x = torch.from_numpy(data[t])
        (x[:, :2] @ parameter - x[:, 2]).square().mean().backward()
        optimizer.step()

    return step


@pytest.mark.usefixtures("nobody_is_idle")
@pytest.mark.parametrize("n_workers", [2, 3])
def test_plain_averaging_after_every_step_of_sgd_is_synchronous_sgd(n_workers: int):
    """The foreground `ma` with an elasticity of 1: the mean of w - lr g_i is w - lr mean(g_i)."""
    workers = started([[0.5, -0.5]] * n_workers, every=1, elasticity=1.0)

    def train(rank: int) -> None:
        worker = workers[rank]
        step = sgd_of(rank, worker.parameter)
        for t in range(30):
            worker.rounds.begin_micro()
            number = worker.replica.step(lambda t=t: step(t))  # type: ignore[misc]
            worker.rounds.end_micro(number, PATIENCE_S)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(n_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    together = nn.Parameter(torch.tensor([0.5, -0.5]))
    for t in range(30):
        ends = []
        for rank in range(n_workers):
            one = nn.Parameter(together.detach().clone())
            sgd_of(rank, one)(t)
            ends.append(one.grad)
        together.data -= 0.1 * torch.stack([grad for grad in ends if grad is not None]).mean(0)
    for worker in workers:
        torch.testing.assert_close(worker.parameter.detach(), together.detach(), rtol=1e-5, atol=1e-6)
    assert [worker.rounds.n_done for worker in workers] == [30] * n_workers
    assert stop_together(workers) == [True] * n_workers


def test_rounds_of_others_say_nothing_of_a_replica_that_was_closed():
    servers, meeting = Servers(2), Meeting(2)
    workers = [Worker([4.0, 4.0], servers, is_open=n == 0) for n in range(2)]
    for rank, worker in enumerate(workers):
        worker.rounds.start(World(meeting, rank))
    wait_for(lambda: workers[1].rounds.n_done > 3, "rounds without it")
    assert workers[1].rounds.drain_metrics() is None and workers[0].rounds.drain_metrics() is not None
    assert stop_together(workers) == [True, True]


def test_updates_made_during_a_round_survive_it_under_the_difference_rule():
    servers = Servers(2)
    workers = started([[0.0, 0.0], [2.0, 2.0]], servers, mixing="difference")
    for _ in range(200):
        for worker in workers:
            worker.step(1.0)
    wait_for(lambda: workers[0].values == workers[1].values, "the same values")
    assert stop_together(workers) == [True, True]
    assert workers[0].values == [201.0, 201.0], "the sum of all replicas is what came in"


@pytest.mark.slow
def test_a_round_that_fails_is_dropped_and_the_next_world_goes_on():
    meeting = Meeting(2)
    workers = [Worker([float(rank)] * 2, Servers(2)) for rank in range(2)]
    workers[0].rounds.start(World(meeting, 0))
    meeting.broken = True  # before the other one comes
    wait_for(lambda: workers[0].rounds.n_failed == 1, "the failure")
    assert workers[0].values == [0.0, 0.0]
    again = Meeting(2)
    workers[0].rounds.before_world_leaves()
    workers[0].rounds.after_world_forms(World(again, 0))
    workers[1].rounds.start(World(again, 1))
    wait_for(lambda: workers[0].values == workers[1].values, "the mean")
    assert "a worker was lost" in workers[0].rounds.dropped()[0]
    assert stop_together(workers) == [True, True]


def test_a_world_that_ends_frees_the_round_that_waits_in_it():
    worker = Worker([1.0, 2.0], Servers(2))
    worker.rounds.start(World(Meeting(2), 0))  # the other one never comes
    wait_for(lambda: worker.rounds._in_horovod, "the round that waits")
    worker.rounds.before_world_leaves(PATIENCE_S)
    assert not worker.rounds._in_horovod, "it was waited for in vain"
    wait_for(lambda: worker.rounds.n_failed == 1, "the dropped round")
    assert worker.values == [1.0, 2.0]
    assert worker.rounds.stop(timeout_s=PATIENCE_S)


def test_whoever_ends_alone_waits_for_nobody():
    worker = Worker([1.0, 2.0], Servers(2))
    worker.rounds.start(World(Meeting(2), 0))
    assert worker.rounds.stop(timeout_s=PATIENCE_S)
    assert worker.rounds.n_failed == 0


def test_alone_there_is_nothing_to_mix_in_but_the_servers_learn_of_the_replica():
    servers = Servers(2)
    worker = Worker([1.0, 2.0], servers, elasticity=0.5, algorithm="easgd")
    worker.rounds.start(SoloWorld())
    wait_for(lambda: servers.values.tolist() == [1.0, 2.0], "the published replica")
    assert worker.values == [1.0, 2.0] and worker.rounds.single_worker
    assert worker.rounds.stop(timeout_s=PATIENCE_S)


def test_elastic_rounds_bring_replicas_and_central_copy_together():
    servers = Servers(2)
    workers = started([[0.0, 8.0], [8.0, 0.0]], servers, algorithm="easgd", elasticity=0.5)
    wait_for(lambda: all(abs(w.values[0] - servers.values[0]) < 1e-3 for w in workers), "agreement")
    assert stop_together(workers) == [True, True]


@pytest.mark.slow
def test_an_elastic_round_without_a_server_is_dropped_and_tried_again():
    servers = Servers(2)
    servers.fails = True
    (worker, other) = started([[2.0, 2.0], [2.0, 2.0]], servers, algorithm="easgd")
    wait_for(lambda: worker.rounds.n_failed, "a failure")
    servers.fails = False
    wait_for(lambda: worker.rounds.n_done, "a round")
    assert stop_together([worker, other]) == [True, True]


def test_a_result_that_the_servers_do_not_learn_of_is_a_result_all_the_same():
    servers = Servers(2)
    servers.fails = True
    workers = started([[0.0, 0.0], [2.0, 2.0]], servers)
    wait_for(lambda: workers[0].rounds.n_failed > 3, "failures")
    assert workers[0].values == workers[1].values == [1.0, 1.0]
    assert "did not reach the servers" in workers[0].rounds.dropped()[0]
    assert stop_together(workers) == [True, True], "no reason to form the world again"


def test_alone_no_step_waits_for_a_round():
    servers = Servers(2)
    worker = Worker([1.0, 2.0], servers, every=1)
    worker.rounds.start(SoloWorld())
    wait_for(lambda: worker.rounds.n_done, "a round")
    with servers._lock:  # no other one ends
        for _ in range(20):
            step = worker.replica.step(lambda: worker.parameter.data.add_(1.0))
            worker.rounds.end_micro(step, timeout_s=0.0)
        assert worker.rounds.dropped() == [], "no round was waited for"
    assert worker.rounds.stop(timeout_s=PATIENCE_S)


@pytest.mark.usefixtures("nobody_is_idle")
def test_in_the_foreground_there_is_a_round_every_k_steps_and_no_other():
    workers = started([[0.0, 0.0], [0.0, 0.0]], every=5)

    def train(worker: Worker, by: float) -> None:
        for _ in range(20):
            worker.rounds.begin_micro()
            worker.step(by)

    threads = [threading.Thread(target=train, args=(w, by)) for w, by in zip(workers, (1.0, 3.0), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [worker.rounds.n_done for worker in workers] == [4, 4]
    assert workers[0].values == workers[1].values == [40.0, 40.0]
    assert stop_together(workers) == [True, True]


@pytest.mark.slow
@pytest.mark.usefixtures("nobody_is_idle")
def test_threads_of_one_replica_wait_for_its_foreground_round_together(monkeypatch: pytest.MonkeyPatch):
    (worker, other) = started([[0.0, 0.0], [4.0, 4.0]], every=2)
    ended: list[int] = []

    def end(step: int) -> None:
        worker.rounds.end_micro(step, PATIENCE_S)
        ended.append(step)

    other.rounds.begin_micro()  # so that no round is made yet
    worker.rounds.begin_micro()
    worker.rounds.begin_micro()
    threads = [threading.Thread(target=end, args=(2,)), threading.Thread(target=end, args=(3,))]
    threads[0].start()
    wait_for(lambda: worker.rounds._n_waiting == 1, "the thread of the second step")
    threads[1].start()
    wait_for(lambda: worker.rounds._n_waiting == 2, "the other thread")
    assert ended == []
    monkeypatch.setattr("gba_hvd.averaging.schedule.PASSIVE_AFTER_S", 0.2)
    other.rounds.end_micro(None, PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(ended) == [2, 3] and worker.rounds.n_done >= 1
    assert stop_together([worker, other]) == [True, True]


def test_the_bytes_of_a_round_are_those_of_the_ring_that_carries_it():
    workers = started([[0.0, 0.0], [0.0, 0.0]], every=1)
    workers[1].rounds.begin_micro()
    workers[0].rounds.begin_micro()
    threads = [threading.Thread(target=worker.step, args=(1.0,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    n = workers[0].rounds.n_done
    assert n >= 1
    assert stop_together(workers) == [True, True]
    n = workers[0].rounds.n_done
    # Two float32, three numbers beside them and one for each worker; of two workers each sends as much as there is.
    for worker in workers:
        assert {key[::2]: count for key, count in worker.traffic.so_far().items()} == {
            ("sent", "dense"): 8 * n, ("received", "dense"): 8 * n,
            ("sent", "header"): 20 * n, ("received", "header"): 20 * n,
        }  # fmt: skip


@pytest.mark.slow
def test_a_worker_without_a_micro_batch_takes_part_in_the_rounds_of_the_others():
    workers = started([[0.0, 0.0], [4.0, 4.0]], every=1)
    workers[1].rounds.begin_micro()
    workers[1].replica.step(lambda: None)
    workers[1].rounds._idle_since_s = time.monotonic()  # it waits for a lease from here on
    workers[0].step(0.0)
    assert workers[0].values == [2.0, 2.0]
    workers[0].rounds._idle_since_s = time.monotonic()
    assert stop_together(workers) == [True, True]


@pytest.mark.slow
def test_a_worker_that_has_no_micro_batch_yet_takes_part_in_the_rounds_of_the_others():
    workers = started([[0.0, 0.0], [4.0, 4.0]], every=1)
    before = workers[0].rounds.n_done  # more than none, if this thread is late
    workers[0].step(0.0)
    assert workers[0].rounds.n_done > before
    assert workers[0].values == [2.0, 2.0]
    assert stop_together(workers) == [True, True]


@pytest.mark.slow
@pytest.mark.usefixtures("nobody_is_idle")
def test_a_foreground_round_that_is_late_is_reported_and_training_goes_on():
    workers = started([[0.0, 0.0], [4.0, 4.0]], every=1)
    workers[1].rounds.begin_micro()  # and computes for long
    workers[0].rounds.end_micro(workers[0].replica.step(lambda: None), timeout_s=0.3)
    reported = workers[0].rounds.drain_metrics()
    assert reported is not None and (reported.useless_waits, reported.rounds_dropped) == (1, 0)
    assert workers[0].rounds.dropped() == [], "the round is late, it may still come"
    assert workers[0].rounds.drain_metrics() is None, "a wait is reported once"
    workers[1].rounds.end_micro(workers[1].replica.step(lambda: None), timeout_s=PATIENCE_S)
    assert stop_together(workers) == [True, True]


def test_a_replica_that_is_not_finite_is_given_to_nobody():
    workers = started([[float("nan"), 0.0], [1.0, 1.0]])
    assert workers[0].diverged.wait(PATIENCE_S)
    done = workers[1].rounds.n_done
    wait_for(lambda: workers[1].rounds.n_done > done + 1, "more rounds")
    assert workers[1].values == [1.0, 1.0]
    assert stop_together(workers) == [True, True]


def test_what_is_reported_is_of_the_rounds_since_the_last_report():
    workers = started([[0.0, 0.0], [2.0, 2.0]], elasticity=0.5)
    for _ in range(10):
        workers[0].step(1.0)
    wait_for(lambda: workers[0].rounds.n_done > 5, "rounds")
    reported = workers[0].rounds.drain_metrics()
    assert reported is not None and reported.rounds_per_s > 0 and reported.rounds_dropped == 0
    assert np.isfinite(reported.spread)
    assert stop_together(workers) == [True, True]
    workers[0].rounds.drain_metrics()
    assert workers[0].rounds.drain_metrics() is None


@pytest.mark.slow
def test_a_worker_whose_rounds_all_fail_reports_how_many_were_dropped_and_no_pace():
    servers = Servers(2)
    servers.fails = True
    (worker, other) = started([[2.0, 2.0], [2.0, 2.0]], servers, algorithm="easgd")
    wait_for(lambda: worker.rounds.n_failed, "a failure")
    reported = worker.rounds.drain_metrics()
    assert reported is not None and reported.rounds_dropped >= 1 and worker.rounds.n_done == 0
    assert (reported.rounds_per_s, reported.seconds_per_round, reported.steps_per_round, reported.spread) == (None,) * 4
    servers.fails = False
    wait_for(lambda: worker.rounds.n_done, "a round")
    again = worker.rounds.drain_metrics()
    assert again is not None and again.rounds_per_s is not None and again.rounds_dropped >= reported.rounds_dropped
    assert stop_together([worker, other]) == [True, True]


class Watched(SyncThread):
    """Notes whether the lock was held whenever somebody looked at what was dropped."""

    @property
    def _dropped(self) -> list[str]:  # type: ignore[override]
        self.__dict__["held"].append(self._changed._is_owned())  # type: ignore[attr-defined]
        found: list[str] = self.__dict__["reasons"]
        return found

    @_dropped.setter
    def _dropped(self, reasons: list[str]) -> None:
        self.__dict__["held"].append(self._changed._is_owned())  # type: ignore[attr-defined]
        self.__dict__["reasons"] = reasons


@pytest.mark.parametrize(
    ("algorithm", "reason"), [("easgd", "RuntimeError: no server"), ("ma", "its result did not reach the servers")]
)
def test_why_rounds_were_dropped_is_noted_and_taken_under_the_lock(algorithm: str, reason: str):
    servers, meeting = Servers(2), Meeting(2)
    servers.fails = True
    workers = [Worker([0.0, 0.0], servers, algorithm=algorithm) for _ in range(2)]
    rounds = workers[0].rounds
    rounds.__dict__.update(held=[], reasons=rounds.__dict__.pop("_dropped"))
    rounds.__class__ = Watched
    for rank, worker in enumerate(workers):
        worker.rounds.start(World(meeting, rank))
    wait_for(lambda: rounds.n_failed, "a failure")
    assert reason in rounds.dropped()[0]
    assert stop_together(workers) == [True, True]
    held = rounds.__dict__["held"]
    assert len(held) >= 3 and all(held), "one note, and the two halves of taking it"


# --- what is reported of them -----------------------------------------------------------------------------------------


def emitted(pace: dict[str, Any], dropped: list[str], rank: int = 0) -> list[Event]:
    """The events for these metrics of a mode's rounds."""
    events: list[Event] = []
    engine: Any = SimpleNamespace(
        emit=lambda event, only_here=False: events.append(event), world=SimpleNamespace(rank=rank),
        progress=SimpleNamespace(step=7),
        model=SimpleNamespace(tables=SimpleNamespace(config=SimpleNamespace(lease_s=60.0))),
    )  # fmt: skip
    requests: Any = ModeRequests(engine, GBACallback())
    requests._rounds_s = -1e9
    requests._report_rounds(SimpleNamespace(drain_metrics=lambda: (pace, dropped)))
    return events


def pace(**more: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("rounds_per_s", "seconds_per_round", "steps_per_round", "spread"))
    return {**nothing, "rounds_dropped": 0, "useless_waits": 0, **more}


def test_the_pace_of_rounds_is_reported_by_the_chief():
    well = pace(rounds_per_s=4.0, seconds_per_round=0.1, steps_per_round=5.0, spread=0.02)
    (rates,) = emitted(well, [])
    assert (rates.kind, rates.message) == (
        "rates", "4.0 rounds/s, 5.0 local steps each, spread of the replicas 2.00e-02"
    )  # fmt: skip
    assert gauges.Readings().take(rates.data) == {
        "job/rounds_per_s": 4.0, "job/seconds_per_round": 0.1, "job/local_steps_per_round": 5.0,
        "job/spread_of_replicas": 0.02, "job/rounds_dropped": 0.0,
    }  # fmt: skip
    assert emitted(well, [], rank=1) == []


def test_rounds_that_all_fail_are_counted_where_others_report_their_pace():
    dropped, rates = emitted(pace(rounds_dropped=3), ["RuntimeError: no server"])
    assert (dropped.kind, dropped.data) == ("round_dropped", {"why": "RuntimeError: no server"})
    assert (rates.kind, rates.message) == ("rates", "no round of replicas ended well; dropped so far: 3")
    assert gauges.Readings().take(rates.data) == {"job/rounds_dropped": 3.0}


@pytest.mark.parametrize(("times", "often"), [(1, "once"), (2, "2 times")])
def test_a_wait_in_vain_is_reported_as_late_and_not_as_dropped(times: int, often: str):
    (late,) = emitted(pace(useless_waits=times), [], rank=1)
    assert (late.kind, late.data) == ("round_late", {"times": times})
    assert late.message == f"training waited {often} for a round of replicas that did not end in 60 s, and continues"


def test_a_mode_without_rounds_reports_none():
    assert emitted({}, []) == []


def test_what_rounds_report_has_the_names_of_the_gauges():
    workers = started([[0.0, 0.0], [2.0, 2.0]])
    wait_for(lambda: workers[0].rounds.n_done, "a round")
    reported = workers[0].rounds.drain_metrics()
    assert reported is not None and asdict(reported).keys() == {*gauges.ROUNDS, "useless_waits"}
    assert stop_together(workers) == [True, True]
