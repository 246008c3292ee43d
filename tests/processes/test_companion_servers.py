"""Companion servers that are not up, hang, or wake too late: training goes on meanwhile, and says what waits for them.

One worker without Horovod, in the process of the test, with a real server, which is stopped, killed or held back.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gba_hvd
from gba_hvd.errors import LastCheckpointFailed
from gba_hvd.ps import launch
from gba_hvd.ps.worker.heartbeat import Heartbeat
from gba_hvd.shm import retained_state
from gba_hvd.shm.process_state import is_alive
from gba_hvd.switching import enter_ps
from recovery import CheckpointCallback, state_codec
from recovery.catalog.chains import Chain, chains
from recovery.storage.open import open_store

from .alone import alone_in
from .cluster import PATIENCE_S, wait_for
from .workload import Training

pytestmark = [pytest.mark.processes]
_START = launch.ensure_running


class Diary(gba_hvd.Callback):
    """All events."""

    def __init__(self) -> None:
        self.events: list[gba_hvd.Event] = []
        self.modes: list[str] = []

    def on_event(self, event: gba_hvd.Event) -> None:
        self.events.append(event)

    def on_step(self, record: gba_hvd.StepRecord) -> None:
        self.modes.append(record.mode)

    def of(self, kind: str) -> list[gba_hvd.Event]:
        return [event for event in self.events if event.kind == kind]


class Job:
    """`train(at_step)` calls back before each micro-batch until that says "end", then ends the epoch."""

    def __init__(self, training: Training) -> None:
        self.training, self.diary = training, Diary()
        training.state.register_callbacks([self.diary])
        self.deadline_s = time.monotonic() + PATIENCE_S

    @property
    def engine(self) -> Any:
        return self.training.state.engine

    def server(self) -> int:
        pid = launch.pid_of(self.engine.folder, 0)
        assert pid is not None
        return pid

    def train(self, is_done: Callable[[], bool]) -> None:
        optimizer = self.training.optimizer

        @gba_hvd.elastic.run
        def train(state: gba_hvd.elastic.TorchState) -> None:
            while not is_done():
                for batch in gba_hvd.batches(self.training.dataset, state, seed=1):
                    assert time.monotonic() < self.deadline_s, [e.message for e in self.diary.events[-9:]]
                    optimizer.zero_grad()
                    loss = self.training.loss(batch)
                    loss.backward()
                    optimizer.step(loss=loss)
                    is_done()
                    time.sleep(0.005)
                state.epoch += 1

        train(self.training.state)


@contextlib.contextmanager
def a_job(folder: Path, plan: dict[str, Any], *callbacks: Any, server_s: float = 60.0) -> Iterator[Job]:
    """Everything of it is gone at the end."""
    with alone_in(folder, server_s):
        training = Training.of(plan, epoch=0)
        training.state.register_callbacks(list(callbacks))
        job = Job(training)
        try:
            yield job
        finally:
            training.state.close()


def saved_steps(place: Path) -> list[int]:
    return sorted(one.newest.step for one in chains(open_store(place)) if isinstance(one, Chain))


# --- servers that are not up -----------------------------------------------------------------------------------------


def test_training_goes_on_in_allreduce_while_a_server_starts_and_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No wait, no checkpoint in silence; the mode that was asked for and the checkpoint come when the server does."""
    place = tmp_path / "checkpoints"
    callbacks = gba_hvd.GBACallback(mode="gba"), CheckpointCallback(place, every_steps=2)
    monkeypatch.setattr(launch, "ensure_running", lambda folder, index: False)
    with a_job(tmp_path, {}, *callbacks) as job:

        def is_done() -> bool:
            if job.diary.of("server_missing") and job.diary.of("checkpoint_late"):
                monkeypatch.setattr(launch, "ensure_running", _START)  # from here on it may start
            return bool(job.diary.of("checkpoint")) and "gba" in job.diary.modes

        job.train(is_done)
        assert not job.diary.of("switch_failed"), "nothing was tried that could not be done"
    (missing, *_), (late, *_) = job.diary.of("server_missing"), job.diary.of("checkpoint_late")
    assert missing.level == late.level == "warning"
    assert missing.data["waiting"] == ["mode gba", "the checkpoint that is due"]
    assert "training continues in allreduce; server 0 of this host has not answered yet" in missing.message
    assert missing.step > 10, "training stood still"
    seconds = re.search(rf"no checkpoint for (\d+) s and {late.step} steps", late.message)
    assert seconds is not None and abs(int(seconds[1]) - late.data["seconds"]) < 0.6  # (both are rounded)
    (switch,) = job.diary.of("switch")
    assert switch.step >= missing.step and job.diary.modes[: missing.step] == ["allreduce"] * missing.step
    assert [r.levelname for r in caplog.records if "[server missing]" in r.message][:1] == ["WARNING"]
    ages = [(e.data["checkpoint_age_steps"], e.step) for e in job.diary.of("rates") if "checkpoint_age_steps" in e.data]
    before = [(age, step) for age, step in ages if step <= late.step]  # the first one is late: none was made until then
    assert len(before) > 1 and before[-1][0] > 0 and all(age == step for age, step in before)
    assert job.training.state.step in saved_steps(place), "the last checkpoint was not made"


MODULE = """
import dataclasses
import gba_hvd

@dataclasses.dataclass(frozen=True)
class Mine(gba_hvd.SGD):
    pass
"""


def test_a_required_mode_fails_the_job_with_the_servers_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("nowhere")  # where no other process finds it
    monkeypatch.setitem(sys.modules, "nowhere", module)
    exec(MODULE, module.__dict__)
    monkeypatch.setattr(gba_hvd, "Stray", module.Mine, raising=False)
    with (
        a_job(tmp_path, {"row_optimizer": "Stray"}, gba_hvd.GBACallback(mode="gba", required=True)) as job,
        pytest.raises(gba_hvd.GbaError, match=r"mode gba is required.*No module named 'nowhere'"),
    ):
        job.train(lambda: False)


def test_a_mode_is_not_entered_with_servers_that_have_another_wire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a job of the same name before this one may have started them."""
    write = launch.write_settings
    monkeypatch.setattr(launch, "write_settings", lambda *args, **more: write(*args, **{**more, "wire": "plain"}))
    why = r"mode gba is required.*has GBACallback\(wire='curve'\), but server 0 of this host has wire='plain'"
    with (
        a_job(tmp_path, {}, gba_hvd.GBACallback(mode="gba", required=True)) as job,
        pytest.raises(gba_hvd.GbaError, match=why),
    ):
        job.train(lambda: False)


def test_a_row_optimizer_in_a_module_beside_the_script_is_found_by_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "my_row_optimizers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "scripts"))
    mine = __import__("my_row_optimizers").Mine
    monkeypatch.setattr(gba_hvd, "Mine", mine, raising=False)
    place = tmp_path / "checkpoints"
    with a_job(tmp_path, {"row_optimizer": "Mine"}, CheckpointCallback(place, every_steps=5)) as job:
        job.train(lambda: bool(job.diary.of("checkpoint")))
    assert job.training.state.step in saved_steps(place)
    del sys.modules["my_row_optimizers"]


def test_a_job_folder_that_was_removed_is_reported_and_so_is_every_checkpoint_that_is_missing(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    with a_job(tmp_path, {}, CheckpointCallback(place, every_steps=2)) as job:

        def is_done() -> bool:
            folder = job.engine.folder
            if job.diary.of("checkpoint") and folder.exists():
                server = job.server()
                folder.rename(tmp_path / "removed")
                wait_for(lambda: not is_alive(server), "the end of the server, whose folder is gone")
            return bool(job.diary.of("folder_lost"))

        with pytest.raises(gba_hvd.ShardMemoryError, match="was removed while the job was using it") as ended:
            job.train(is_done)
        (lost,) = job.diary.of("folder_lost")
        assert lost.level == "warning"
        assert "was removed, so no companion server can start" in lost.message
        assert "loginctl enable-linger" in lost.message
        assert isinstance(ended.value.__cause__, LastCheckpointFailed)
        assert "was removed" in str(ended.value.__cause__)


# --- a switch that was given up --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["Enter comes too late", "its answer comes too late"])
def test_checkpoints_go_on_after_a_server_entered_a_mode_that_its_workers_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    place, enter = tmp_path / "checkpoints", enter_ps._enter
    stopped: list[int] = []
    servers: set[int] = set()

    def enter_in_vain(engine: Any, *args: Any) -> None:
        server = launch.pid_of(engine.folder, 0)
        assert server is not None
        if what == "Enter comes too late" and not stopped:
            os.kill(server, signal.SIGSTOP)
            stopped.append(server)
        enter(engine, *args)
        if not stopped:
            stopped.append(server)
            raise gba_hvd.GbaError("planned: the answer is lost")

    monkeypatch.setattr(enter_ps, "_enter", enter_in_vain)
    switching = gba_hvd.GBACallback(mode="allreduce", switch_at={6: "gba"})
    # Of a save that began before, nothing may be reported any more: those that count are asked for after the switch.
    with a_job(tmp_path, {}, switching, CheckpointCallback(place, every_steps=4), server_s=8.0) as job:

        def is_done() -> bool:
            if failed := job.diary.of("switch_failed"):
                switching.pin("allreduce")
                os.kill(stopped[0], signal.SIGCONT)
                servers.add(job.server())
            later = [e for e in job.diary.of("checkpoint") if failed and e.data["saved_step"] > failed[0].step]
            return len(later) >= 2

        job.train(is_done)
        (failed,) = job.diary.of("switch_failed")
        assert failed.level == "warning" and "mode gba was not entered, allreduce continues" in failed.message
        assert servers == {stopped[0]}, "it is the server that was in the mode"
        if what == "Enter comes too late":
            (waits,) = [event for event in job.diary.of("server_missing") if event.step == failed.step]
            assert waits.data["seconds"] < failed.data["seconds"] / 2, "it was reported too late"
            assert "training stands, on all workers, and waits for server 0 of this host" in waits.message
        assert set(job.diary.modes) == {"allreduce"}
    assert not job.diary.of("checkpoint_failed")
    assert job.training.state.step in saved_steps(place), "the last checkpoint was not made"


# --- a server that hangs ---------------------------------------------------------------------------------------------


def test_what_a_silent_server_of_this_host_has_published_is_taken_from_its_file(tmp_path: Path) -> None:
    """Bit for bit: values, optimizer state, and where training stands."""
    with a_job(tmp_path, {}, gba_hvd.GBACallback(mode="gba", wait_s=PATIENCE_S)) as job:
        found: dict[str, Any] = {}

        def is_done() -> bool:
            mode, servers = job.engine.mode, job.engine.mode.servers
            if found or servers is None or job.engine.progress.step < 8:
                return bool(found)
            servers.flush()
            expected = servers.export(leaving=False)
            server = job.server()
            os.kill(server, signal.SIGSTOP)
            try:
                mode._rescue_dense_state()
                found.update(got=servers.rescue(0.5), expected=expected, position=servers.position)
            finally:
                os.kill(server, signal.SIGCONT)
            return True

        job.train(is_done)
        assert not job.diary.of("dense_state_old"), "nothing was old"
        assert set(found["got"]) == set(found["expected"]) == set(range(4))
        for number, expected in found["expected"].items():
            got = found["got"][number]
            np.testing.assert_array_equal(got.values, expected.values)
            assert set(got.state) == {"step", "exp_avg", "exp_avg_sq"}
            for name, value in expected.state.items():
                np.testing.assert_array_equal(np.asarray(got.state[name]), np.asarray(value))
        assert float(found["got"][0].state["step"]) == found["position"].step


def test_a_save_whose_server_dies_in_gba_mode_is_reported_and_the_next_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed as soon as it has taken the request; its successor knows nothing of it."""
    place, answered = tmp_path / "checkpoints", Heartbeat.save_answered
    killed: list[int] = []
    with a_job(
        tmp_path, {}, gba_hvd.GBACallback(mode="gba", wait_s=PATIENCE_S), CheckpointCallback(place, every_steps=10)
    ) as job:

        def kill_the_server(contact: Heartbeat, future: Any) -> None:
            if not killed:
                killed.append(job.server())
                os.kill(killed[0], signal.SIGKILL)
            answered(contact, future)

        monkeypatch.setattr(Heartbeat, "save_answered", kill_the_server)

        def is_done() -> bool:
            failed = job.diary.of("checkpoint_failed")
            return bool(failed) and any(e.step > failed[0].step for e in job.diary.of("checkpoint"))

        job.train(is_done)
        failed, *more = job.diary.of("checkpoint_failed")
        assert killed and not more and failed.level == "warning"
        assert "the server that was to save has died; another one has taken over" in failed.message
        assert set(job.diary.modes) == {"gba"}
    assert job.training.state.step in saved_steps(place)


@pytest.mark.parametrize("mode", ["gba", "shadow"])
def test_a_server_that_was_killed_in_an_asynchronous_mode_is_reported_with_its_successor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    caplog.set_level("INFO", "gba_hvd")
    switching = gba_hvd.GBACallback(mode=mode, wait_s=PATIENCE_S)
    with a_job(tmp_path, {}, switching, CheckpointCallback(tmp_path / "checkpoints", every_steps=4)) as job:
        killed: list[int] = []
        successors: list[int] = []

        def is_done() -> bool:
            if not killed and job.diary.of("checkpoint") and job.diary.modes[-1] == mode:
                killed.append(job.server())
                os.kill(killed[0], signal.SIGKILL)
            if job.diary.of("server_restarted"):
                successors.append(job.server())
            return bool(successors)

        job.train(is_done)
        (restart,) = job.diary.of("server_restarted")
        assert restart.data == {"server": 0, "before": killed[0], "now": successors[0]} and restart.level == "info"
        assert "micro-batches whose gradients it held are computed again" in restart.message
    (line,) = [record.message for record in caplog.records if "[server restarted]" in record.message]
    assert f"(process {killed[0]}) has died, and was started again" in line


@pytest.mark.parametrize("mode", ["allreduce", "gba"])
def test_a_pause_that_a_job_is_interrupted_in_is_in_the_state_that_it_leaves_in_memory(
    tmp_path: Path, mode: str
) -> None:
    switching = gba_hvd.GBACallback(mode=mode, wait_s=PATIENCE_S)
    keeping = CheckpointCallback(tmp_path / "checkpoints", every_steps=1000, retain_state_share=1.0)
    with a_job(tmp_path, {}, switching, keeping) as job:

        def is_done() -> bool:
            if len(job.diary.modes) > 3 and job.diary.modes[-1] == mode:
                job.engine.reports.worker_lost()
                raise KeyboardInterrupt
            return False

        with pytest.raises(KeyboardInterrupt):
            job.train(is_done)
        left = retained_state.read(job.engine.folder)
        assert left is not None
        (pause,) = state_codec.decode(left.state)["pauses"]["over"]
        (reported,) = job.diary.of("ended_in_pause")
        assert (pause["cause"], pause["seconds"]) == ("loss", reported.data["seconds"])
