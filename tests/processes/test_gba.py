"""Asynchronous modes in static jobs: what they compute, and what faults cost them.

In lock-step (`lookahead=0`) a step of gba mode is the step of allreduce mode, bit for bit. So a job that ends with the
parameters of the reference has applied every micro-batch once, whatever happened to it on the way.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gba_hvd
from gba_hvd.errors import GbaError
from gba_hvd.faults import FaultSchedule
from gba_hvd.ps import launch
from gba_hvd.ps.messages import WIRES, PushDone
from gba_hvd.ps.partition.dense_part import DensePart
from gba_hvd.ps.state_files import StateFiles, path_of
from gba_hvd.ps.worker.lease_prefetch import LeasePrefetcher
from gba_hvd.ps.worker.push_window import PushOnTheWay, PushWindow
from gba_hvd.ps.worker.worker import PsWorker

from .alone import job_alone, outcome_of, train_alone
from .cluster import NAMES, PATIENCE_S, Cluster, assert_identical, cluster, wait_for
from .workload import digest_of_dense

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
LOCK_STEP = {"mode": "gba", "lookahead": 0}
FREE = {"mode": "gba"}
NEVER_SILENT = {"GBA_HVD_ALIVE_S": "120", "GBA_HVD_LEASE_S": "300"}  # whoever gets no core keeps its leases
FIFTY_STEPS = {"samples": 2392, "epochs": 2}  # twice 25 steps, the last one short and with half a micro-batch
OPTIMIZERS = [("SGD", "SGD"), ("momentum", "RowAdagrad"), ("Adagrad", "Adagrad"), ("Adam", "Adam")]


def plan_of(faults: FaultSchedule) -> list[dict[str, Any]]:
    return [fault.entry() for fault in faults.faults]


def finish(job: Cluster, workers: int) -> None:
    job.run(lambda: job.start_static(workers))


def waits(rank: int, file: str, *, epoch: int | None = None, step: int | None = None) -> dict[str, Any]:
    """A worker, about to make its first push of an epoch, or of a step, waits for a file. Nobody else has its lease."""
    if epoch is not None:
        return {"point": "before push", "step": epoch, "rank": rank, "do": "wait for", "file": file}
    return {"point": "before push of step", "step": step, "rank": rank, "do": "wait for", "file": file}


def all_at_their_first_push(workers: int) -> list[dict[str, Any]]:
    """Nobody makes one before all have something to push: each worker waits for that of the next one."""
    return [waits(rank, f"fault-{(rank + 1) % workers}", epoch=0) for rank in range(workers)]


def wait_for_others_to_push(job: Cluster, pid: str) -> None:
    """What this worker, which has stopped, has in its hands."""
    given = {line["given"] for line in job.notes("given") if line["pid"] == pid and line["of"] == 0}
    held = given - {None} - {line["push"] for line in job.pushes(0) if line["pid"] == pid}
    assert held
    pushed_by_others = lambda: {line["push"] for line in job.pushes(0) if line["pid"] != pid}  # noqa: E731
    wait_for(lambda: job.ended or held & pushed_by_others(), f"one of the micro-batches {held} from another worker")
    assert not job.ended, job.log()


def staleness(job: Cluster) -> dict[int, int]:
    return {int(steps): count for steps, count in job.result()["staleness"].items()}


def workers_of(job: Cluster) -> set[int]:
    return {line["rank"] for line in job.pushes()}


# --- what a step is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dense", "rows"), OPTIMIZERS)
def test_one_worker_in_lock_step_equals_allreduce(tmp_path: Path, dense: str, rows: str) -> None:
    plan = {**FIFTY_STEPS, "dense_optimizer": dense, "row_optimizer": rows}
    reference = train_alone(tmp_path / "allreduce", plan)
    result = train_alone(tmp_path / "gba", plan, **LOCK_STEP)
    assert (result.step, result.modes) == (50, {"gba"})
    assert_identical(result.arrays, reference.arrays)
    assert_identical(result.optimizer_arrays, reference.optimizer_arrays)
    assert result.samples == reference.samples


@pytest.mark.parametrize(
    "moves", [{"one_cycle": 60}, {"settings_at": {10: {"weight_decay": 0.5, "eps": 1e-3}, 30: {"weight_decay": 0}}}]
)
def test_servers_follow_the_settings_of_the_dense_groups_that_are_changed(
    tmp_path: Path, moves: dict[str, Any]
) -> None:
    plan = {**FIFTY_STEPS, **moves, "micro_batch": 96}
    reference = train_alone(tmp_path / "allreduce", plan)
    result = train_alone(tmp_path / "gba", plan, **LOCK_STEP)
    assert (result.step, result.modes) == (50, {"gba"})
    assert_identical(result.arrays, reference.arrays)
    assert_identical(result.optimizer_arrays, reference.optimizer_arrays)


def test_three_workers_in_lock_step_equal_allreduce(tmp_path: Path) -> None:
    """With a learning rate that falls at every step, on workers and servers alike."""
    plan = {**FIFTY_STEPS, "dense_optimizer": "momentum", "row_optimizer": "RowAdagrad", "lr_decay": 0.9}
    reference = train_alone(tmp_path / "alone", plan)
    with cluster(tmp_path / "job", gba=LOCK_STEP, **plan, faults=all_at_their_first_push(3)) as job:
        finish(job, 3)
        assert_identical(job.arrays(), reference.arrays)
        assert_identical(job.optimizer_arrays(), reference.optimizer_arrays)
        job.assert_every_sample_once(epochs=2, samples=2392)
        assert workers_of(job) == {0, 1, 2}
        assert staleness(job) == {0: 300}


def test_two_hosts_in_lock_step_compute_the_same_with_any_wire(tmp_path: Path) -> None:
    plan = {"samples": 1000, "epochs": 1, "dense_optimizer": "Adam", "own_memory_per_name": True}
    found = {}
    for wire in WIRES:
        faults = all_at_their_first_push(2)  # each has rows of the other's host to pull and to push
        with cluster(tmp_path / wire, gba={**LOCK_STEP, "wire": wire}, **plan, faults=faults) as job:
            job.run(lambda job=job: job.start_static(2, NAMES[:2]))  # type: ignore[misc]
            job.assert_every_sample_once(epochs=1)
            assert workers_of(job) == {0, 1}
            found[wire] = job.arrays(), job.optimizer_arrays()
            started = next(e["message"] for e in job.notes("event") if e["event"] == "started")
            assert ("wire 'plain': what hosts send each other" in started) is (wire == "plain")
            assert "mode allreduce (gba was asked for: it begins after a step, when the companion" in started
            sent = [line["bytes"] for line in job.notes("event") if line["event"] == "traffic"]
            assert sum(n for one in sent for key, n in one.items() if key.endswith("_gba_rows")) > 0
    for wire in ("plain", "tls"):
        for one, other in zip(found[wire], found["curve"], strict=True):
            assert_identical(one, other)


def test_probabilities_are_not_taken_for_logits(tmp_path: Path) -> None:
    with pytest.raises(gba_hvd.BadInput, match='activation="none" for probabilities'):
        train_alone(tmp_path / "job", {"samples": 200, "epochs": 1, "evaluate": "probabilities"}, **LOCK_STEP)


def test_a_slow_worker_holds_nobody_up_and_still_contributes(tmp_path: Path) -> None:
    """It has a micro-batch of the first step in its hands while the others make five steps; then that counts, too."""
    slow = plan_of(FaultSchedule().serve(seconds=0.02).slow(worker=2, factor=5))
    faults = [waits(0, "fault-2", epoch=0), waits(1, "fault-2", epoch=0), waits(2, "go", epoch=0)]
    plan = {"gba": {**FREE, "tolerance": 100}, "fault_schedule": slow, "faults": faults, "epochs": 3}
    with cluster(tmp_path, NEVER_SILENT, **plan) as job:
        job.start_static(3)
        wait_for(lambda: job.ended or job.last_step() >= 5, "five steps without the slow worker", PATIENCE_S)
        assert not job.ended, job.log()
        assert {line["rank"] for line in job.pushes()} == {0, 1}
        (job.out / "go").touch()
        assert job.wait() == 0, job.log()
        job.assert_nothing_left()
        job.assert_every_sample_once(epochs=3)
        assert job.result()["step"] == 33
        assert sum(staleness(job).values()) == 3 * 63
        assert max(staleness(job)) >= 5
        assert job.result()["applied"] == 3000
        times = [line["time"] for line in job.pushes() if line["rank"] == 2]
        assert times and all(b - a > 0.09 for a, b in pairwise(times)), "it was to take five times 0.02 s for each"
        assert min(job.result()["aucs"]) > 0.5


@pytest.mark.parametrize(
    "mode", ["async", "hop_bw", *(pytest.param(mode, marks=pytest.mark.variant) for mode in ("bsp", "hop_bs"))]
)
def test_the_baselines_account_for_every_sample(tmp_path: Path, mode: str) -> None:
    with cluster(tmp_path, gba={"mode": mode}, epochs=1) as job:
        finish(job, 3)
        job.assert_every_sample_once(epochs=1)
        result = job.result()
        assert result["mode"] == mode
        assert sum(staleness(job).values()) == 63
        if mode == "bsp":
            assert result["step"] == 11
        elif mode != "hop_bw":
            assert result["step"] == 63
        if mode != "hop_bw":
            assert result["dropped"] == 0


# --- the server dies or stalls ---------------------------------------------------------------------------------------


def test_pushes_that_wait_in_a_killed_server_are_computed_again(
    reference: dict[str, np.ndarray], tmp_path: Path
) -> None:
    kills = [[0, 1, 3], [0, 2, 4], [1, 5, 4]]  # after the third of six pushes of a step, the fourth, the fourth
    with cluster(tmp_path, gba=LOCK_STEP, kill_server_after_push=kills) as job:
        finish(job, 2)
        assert job.fired() == 3
        job.assert_every_sample_once(epochs=2)
        assert job.result()["reissued"] >= 3
        assert (job.result()["applied"], job.result()["lost"]) == (2000, 0)
        assert_identical(job.arrays(), reference)


class Interruption:
    """Ctrl-C once in each place, as the 30th micro-batch of a job is trained."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
        self._place, self._n, self.kept = place, 0, list[Any]()
        if place == "in a push":
            write = os.eventfd_write

            def interrupted_write(fd: int, value: int) -> None:
                if sys._getframe(2).f_code is PsWorker._send_push.__code__:
                    self._count()
                write(fd, value)

            monkeypatch.setattr(os, "eventfd_write", interrupted_write)
        elif place == "while a lease is awaited":
            await_item = LeasePrefetcher.next

            def interrupted_next(self_: LeasePrefetcher[Any]) -> Any:
                self._count()
                return await_item(self_)

            monkeypatch.setattr(LeasePrefetcher, "next", interrupted_next)

    def _count(self) -> None:
        self._n += 1
        if self._n == 30:
            raise KeyboardInterrupt

    def before_step(self, loop: Any) -> None:
        if self._place == "in the loop, which a traceback keeps" and not self.kept and self._n == 29:
            self.kept.append(loop)
        if self._place.startswith("in the loop"):
            self._count()


def test_samples_that_wait_for_a_step_when_the_job_ends_are_reported(tmp_path: Path) -> None:
    """The loop is left two micro-batches after a step, of six."""
    found = []
    with job_alone(tmp_path / "gba", {}, **LOCK_STEP) as (training, _):

        class Reads(gba_hvd.Callback):
            def on_event(self, event: gba_hvd.Event) -> None:
                found.extend([event] * (event.kind in ("epoch_unfinished", "finished")))

        training.state.register_callbacks([Reads()])

        @gba_hvd.elastic.run
        def train(state: gba_hvd.elastic.TorchState) -> None:
            for state.epoch in range(1):
                for number, batch in enumerate(gba_hvd.batches(training.dataset, state, seed=1), 1):
                    training.optimizer.zero_grad()
                    loss = training.loss(batch)
                    training.backward(loss)
                    training.step(loss)
                    if number == 3 * 6 + 2:
                        break

        train(training.state)
        samples = training.state.samples
    unfinished, finished = found
    assert samples.total == samples.applied == 3 * 96 == finished.data["samples_applied"]
    assert unfinished.level == "info" and unfinished.data["samples_computed"] == 2 * 16
    assert unfinished.message.startswith(
        "epoch 0 was left after 3 of 11 steps: 288 of 1,000 samples were trained, and 32 samples that were computed "
        "wait for step 4, which is not complete: "
    )
    assert (
        "; 32 samples were computed for steps that were not applied, and are in no count" in finished.data["left_early"]
    )


def is_moved(engine: Any) -> bool:
    return engine.model.tables.memory.step_span()[1] > engine.mode.servers.model_step


@pytest.mark.parametrize("mode", ["gba", "shadow"])
def test_code_between_two_epochs_sees_parts_of_one_step_and_code_within_one_does_not(tmp_path: Path, mode: str) -> None:
    """Rows and the dense part are of the step that the coordinator is at."""
    found: list[str] = []
    with job_alone(tmp_path / mode, {}, mode=mode) as (training, _):

        class Reads(gba_hvd.Callback):
            def on_event(self, event: gba_hvd.Event) -> None:
                found.extend([event.kind] * (event.kind == "others_trained"))

        training.state.register_callbacks([Reads()])

        @gba_hvd.elastic.run
        def train(state: gba_hvd.elastic.TorchState) -> None:
            for state.epoch in range(2):
                for number, batch in enumerate(gba_hvd.batches(training.dataset, state, seed=1)):
                    training.optimizer.zero_grad()
                    loss = training.loss(batch)
                    training.backward(loss)
                    training.step(loss)
                    if state.epoch and number == 4 * 6 - 1:
                        with gba_hvd.others_wait(state):
                            wait_for(lambda: is_moved(state.engine), "the step of this micro-batch", PATIENCE_S)
                with gba_hvd.others_wait(state):
                    found.append(f"epoch {state.epoch}")

        train(training.state)
    assert found == ["epoch 0", "others_trained", "epoch 1"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "place", ["in the loop", "in the loop, which a traceback keeps", "in a push", "while a lease is awaited"]
)
def test_training_continues_at_once_after_ctrl_c_and_every_sample_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """In lock-step no step could be made without the lease that was held, which nobody takes away here."""
    plan: dict[str, Any] = {}
    reference = train_alone(tmp_path / "allreduce", plan)
    monkeypatch.setenv("GBA_HVD_LEASE_S", "1000")
    with job_alone(tmp_path / "gba", plan, **LOCK_STEP) as (training, watch):
        state, interruption, interrupted = training.state, Interruption(monkeypatch, place), []
        for state.epoch in range(2):
            while state.finished_epoch != state.epoch:
                loop = gba_hvd.batches(training.dataset, state, seed=1)
                try:
                    for batch in loop:
                        training.optimizer.zero_grad()
                        loss = training.loss(batch)
                        training.backward(loss)
                        interruption.before_step(loop)
                        training.step(loss)
                except KeyboardInterrupt:
                    interrupted.append(state.step)
                del loop
        if interruption.kept:
            with pytest.raises(GbaError, match="this loop over batches"):
                next(interruption.kept[0])
        result = outcome_of(training, watch)
        state.close()
    assert len(interrupted) == 1 and 0 < interrupted[0] < result.step
    assert result.samples == reference.samples and result.modes == {"gba"}
    assert_identical(result.arrays, reference.arrays)
    assert_identical(result.optimizer_arrays, reference.optimizer_arrays)


def test_a_push_whose_server_dies_before_it_is_reported_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server said it has the push; its successor learns that the push is done, but has it no more."""
    report, killed = PushWindow.report, []

    def kill_then_report(self: PushWindow, push: PushOnTheWay, done: PushDone) -> None:
        if done.micro == 8 and not killed:
            pid = launch.pid_of(self._client._folder, 0)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        report(self, push, done)

    monkeypatch.setattr(PushWindow, "report", kill_then_report)
    plan = {"epochs": 1}
    reference = train_alone(tmp_path / "allreduce", plan)
    result = train_alone(tmp_path / "gba", plan, **LOCK_STEP)
    assert len(killed) == 1
    assert result.samples == reference.samples
    assert_identical(result.arrays, reference.arrays)


def test_training_goes_on_when_the_server_is_killed_and_stopped(tmp_path: Path) -> None:
    faults = FaultSchedule().kill_server(host=0, at_step=5).stop_server(host=0, at_step=12, seconds=3)
    faults = faults.kill_server(host=0, at_step=19)
    with cluster(tmp_path, gba=FREE, fault_schedule=plan_of(faults), epochs=3) as job:
        finish(job, 3)
        assert job.schedule_fired() == ["kill_server", "stop_server", "kill_server"]
        job.assert_every_sample_once(epochs=3)
        assert job.result()["lost"] <= 2 * 96  # at most the step that each kill tore


@pytest.mark.parametrize("dense_optimizer", ["Adam", pytest.param("momentum", marks=pytest.mark.variant)])
def test_workers_go_on_with_what_a_server_that_hangs_has_published(tmp_path: Path, dense_optimizer: str) -> None:
    """The world that they form has dense values and the optimizer's state bit for bit: no step of theirs is lost."""
    # A step whose gradients were all dropped has no step of the optimizer.
    plan = {"gba": {**FREE, "tolerance": 100}, "dense_optimizer": dense_optimizer, "epochs": 3}
    with cluster(tmp_path, {"GBA_HVD_SERVER_S": "20"}, **plan, holds={14: "stopped"}) as job:
        job.start_static(2)
        wait_for(lambda: job.ended or len(list(job.out.glob("held-by-stopped-*"))) == 2, "both workers to be held", 300)
        assert not job.ended, job.log()
        (folder,) = job.shard_dir.glob("gba-hvd-*")
        step, published = stop_the_server(folder)
        (job.out / "stopped").touch()
        assert job.wait(300) == 0, job.log()
        job.assert_nothing_left()
        worlds = [line["dense"] for line in job.notes("job")]
        assert len(worlds) == 4 and set(worlds[2:]) == {published} and published not in worlds[:2]
        assert step >= 14
        result = job.result()
        assert (result["total"], result["lost"]) == (3000, 0)
        assert result["total"] == result["applied"]
        assert not [line for line in job.notes("event") if line["event"] == "dense_state_old"]
        counts = [count for name, count in job.optimizer_arrays().items() if name.endswith(".step")]
        assert all(count == result["step"] for count in counts), (counts, result)


def stop_the_server(folder: Path) -> tuple[int, str]:
    """Between two steps. Returns which one it published last, and a digest of that."""
    server = launch.pid_of(folder, 0)
    assert server is not None
    stat = Path(f"/proc/{server}/stat")

    def between_steps() -> tuple[int, str] | None:
        os.kill(server, signal.SIGSTOP)
        wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the server to stop")
        records, part = StateFiles(folder, 0), DensePart.open(path_of(folder, 0, "dense"))
        session = records.session()
        saved = None if session is None else records.ledger(session[0].generation)
        try:
            if saved is None or saved["ledger"]["decided"] or saved["ledger"]["step"] != part.step:
                os.kill(server, signal.SIGCONT)
                return None
            ends = np.cumsum([tensor.size for tensor in part.tensors])[:-1]
            return part.step, digest_of_dense(zip(np.split(part.values, ends), part.state(), strict=True))
        finally:
            part.close()

    found: tuple[int, str] = wait_for(between_steps, "the server to be between two steps")
    return found


# --- a worker stalls, a push is lost ---------------------------------------------------------------------------------


def test_leases_of_a_stopped_worker_go_to_others_and_it_goes_on(
    reference: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """In step 5 the others wait until it has stopped, with a lease; in the second epoch until it pushes again."""
    schedule = plan_of(FaultSchedule().stop(worker=1, at_step=5, seconds=PATIENCE_S))  # the test continues it
    stops, again = "schedule/fault-000-stop.json", "fault-4"
    faults = [waits(rank, stops, step=5) for rank in (0, 2)] + [waits(rank, again, epoch=1) for rank in (0, 2)]
    faults.append({"point": "before push", "step": 1, "rank": 1, "do": "mark"})
    with cluster(tmp_path, gba=LOCK_STEP, fault_schedule=schedule, faults=faults) as job:
        job.start_static(3)
        wait_for(lambda: job.ended or (job.out / stops).exists(), "the stop", PATIENCE_S)
        pid = next(line["pid"] for line in job.notes("rank") if line["rank"] == 1)
        stat = Path(f"/proc/{pid.rpartition('-')[2]}/stat")
        wait_for(lambda: job.ended or stat.read_text().rpartition(")")[2].split()[0] == "T", "worker 1 to stop")
        wait_for_others_to_push(job, pid)
        os.kill(int(pid.rpartition("-")[2]), signal.SIGCONT)
        assert job.wait() == 0, job.log()
        job.assert_nothing_left()
        job.assert_every_sample_once(epochs=2)
        assert job.result()["reissued"] >= 1
        assert_identical(job.arrays(), reference)
        assert job.schedule_fired() == ["stop"]
        assert (job.out / again).exists(), "it did not go on"


def test_lost_and_late_pushes_change_nothing(reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    """The third comes when its lease has gone to the other worker. Each waits where the other's push is to be hit."""
    schedule = FaultSchedule().drop_push(worker=1, at_step=4).delay_push(worker=0, at_step=6, seconds=1)
    faults = [waits(0, "schedule/fault-000-drop_push.json", step=4), waits(0, "fault-3", step=9)]
    faults += [waits(1, "schedule/fault-001-delay_push.json", step=6), waits(1, "it is late", step=9)]
    plan = {"gba": LOCK_STEP, "fault_schedule": plan_of(schedule), "faults": faults}
    with cluster(tmp_path, environ={"GBA_HVD_LEASE_S": "2"}, **plan) as job:
        job.start_static(2)
        wait_for(lambda: job.ended or (job.out / "fault-3").exists(), "worker 1 with a lease of step 9", PATIENCE_S)
        pid = next(line["pid"] for line in job.notes("rank") if line["rank"] == 1)
        wait_for_others_to_push(job, pid)
        (job.out / "it is late").touch()
        assert job.wait() == 0, job.log()
        job.assert_nothing_left()
        assert job.schedule_fired() == ["drop_push", "delay_push"]
        assert [line["drop"] for line in job.pushes()].count(True) == 1
        job.assert_every_sample_once(epochs=2)
        assert job.result()["reissued"] >= 2
        assert_identical(job.arrays(), reference)


# --- numbers that are not finite -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_bad_micro_batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A job, run to its end, in which the loss of micro-batch 20 of the first epoch was no number."""
    plan = {"gba": {**FREE, "staleness": "none"}, "nan_micros": [20]}  # nothing is dropped because it is stale
    with cluster(tmp_path_factory.mktemp("job") / "bad", **plan) as job:
        finish(job, 2)
        yield job


def test_a_micro_batch_that_is_not_finite_is_dropped_and_counted(one_bad_micro_batch: Cluster) -> None:
    job = one_bad_micro_batch
    job.assert_every_sample_once(epochs=2)
    result = job.result()
    assert (result["dropped"], result["refused"], result["applied"]) == (16, 1, 1984)
    assert all(np.isfinite(values).all() for values in job.arrays().values())
    assert {(line["epoch"], line["push"]) for line in job.pushes() if line["refused"]} == {(0, 20)}


def test_a_micro_batch_that_is_not_finite_is_named(one_bad_micro_batch: Cluster) -> None:
    reported = one_bad_micro_batch.said() + str(one_bad_micro_batch.notes("event"))
    assert re.search(r"micro-batch 20\b.*loss nan", reported)


def test_a_job_whose_every_loss_is_not_finite_ends_with_an_error(tmp_path: Path) -> None:
    plan = {"nan_micros": list(range(10, 10_000)), "samples": 20_000, "epochs": 1, "ends_last": 0}
    with cluster(tmp_path, gba=FREE, **plan) as job:
        job.start_static(2)
        assert job.wait(PATIENCE_S) != 0
        ends = job.notes("end")
        assert [end["end"] for end in ends] == ["FAILED", "FAILED"], ends
        assert any("loss nan" in end["error"] for end in ends), ends
        job.assert_nothing_left()


# --- however it ends, nothing remains --------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGINT, True), (signal.SIGKILL, False)])
def test_nothing_is_left_when_the_launcher_is_ended(tmp_path: Path, number: signal.Signals, to_group: bool) -> None:
    with cluster(tmp_path, gba=FREE, epochs=1000, sleep_s=0.01) as job:
        job.start_static(2)
        assert job.launcher is not None
        wait_for(lambda: len(job.pushes()) > 20, "training", PATIENCE_S)
        assert len(job.processes()) > len(job.processes(only_workers=True)), "no server to be left behind"
        if to_group:
            os.killpg(job.launcher.pid, number)  # what Ctrl-C in a terminal does
        else:
            job.launcher.send_signal(number)
        job.wait()  # what horovodrun returns then is its own affair
        assert "FINISHED" not in [end["end"] for end in job.notes("end")]
        job.assert_nothing_left()


def test_nothing_is_left_when_a_worker_fails_and_its_error_is_shown(tmp_path: Path) -> None:
    faults = plan_of(FaultSchedule().raise_(worker=1, at_step=5))
    with cluster(tmp_path, gba=FREE, fault_schedule=faults, epochs=1000) as job:
        job.start_static(2)
        assert job.wait(PATIENCE_S) != 0
        assert job.schedule_fired() == ["raise"]
        assert "worker 1 raises at step 5" in job.said()
        job.assert_nothing_left()
