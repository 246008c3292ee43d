"""Training is done in an asynchronous mode: the others wait for the chief's last save, or for the next chief."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gba_hvd.callbacks import Event
from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.elastic import worker_saves
from gba_hvd.elastic.worker_saves import WorkerSaves
from gba_hvd.errors import LastCheckpointFailed
from gba_hvd.ps.messages import SaveFacts, SaveStatus
from gba_hvd.shm import host_identity, retained_state
from gba_hvd.shm.retained_state import Absence, RetentionDecision, StateRetainer
from recovery import CheckpointCallback
from tests.unit.thread_world import EventLog

MAY_YET = ", unless its servers save a last one when all workers have ended"
DONE = SaveStatus(1, 22, "done", SaveFacts(kind="delta", saved_step=22))


class Worker:
    """Rank 1, at step 22. `looks`: what happens at each look at the job; membership 3 is what its world stands for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: Callable[[Worker], None], elastic: bool = True) -> None:
        monkeypatch.setenv("HOROVOD_ELASTIC", "1" if elastic else "0")
        monkeypatch.setattr(worker_saves, "_LOOK_S", 0.0)
        self.looks, self.n_looks = list(looks), 0
        self.rejoin, self.world = SimpleNamespace(number=3), SimpleNamespace(rank=1)
        self.contact, self.position = SimpleNamespace(saved=None), SimpleNamespace(membership_epoch=3)
        self.servers: Any = SimpleNamespace(contact=self.contact, position=self.position)
        checkpoints = SimpleNamespace(schedule=SimpleNamespace(in_force=lambda saved: saved))
        self.engine: Any = SimpleNamespace(
            world=self.world, progress=SimpleNamespace(step=22), mode=SimpleNamespace(rejoin=self.rejoin),
            participant=lambda kind: checkpoints,
        )  # fmt: skip

    def look(self) -> None:
        self.n_looks += 1
        if self.looks:
            self.looks.pop(0)(self)

    def waits(self, timeout_s: float = 60.0) -> str:
        saves = WorkerSaves(self.engine, None)  # type: ignore[arg-type]
        saves.report_worlds = self.look
        return saves._await_the_chief(self.servers, timeout_s)


def saved(status: SaveStatus) -> Callable[[Worker], None]:
    return lambda worker: setattr(worker.contact, "saved", status)


def nothing(worker: Worker) -> None:
    pass


def somebody_died(worker: Worker) -> None:
    worker.position.membership_epoch = 4


def is_chief_now(worker: Worker) -> None:
    worker.rejoin.number, worker.world.rank = 4, 0


@pytest.mark.parametrize("status", [DONE, SaveStatus(1, 23, "failed")])
def test_it_waits_until_the_last_save_is_complete_or_has_failed(
    monkeypatch: pytest.MonkeyPatch, status: SaveStatus
) -> None:
    partial = SaveStatus(1, 22, "done", SaveFacts(kind="mfu", saved_step=22))
    worker = Worker(monkeypatch, nothing, saved(SaveStatus(1, 20, "done", DONE.facts)), saved(partial), saved(status))
    assert worker.waits() == "" and worker.n_looks == 4


def test_it_is_the_next_chief_where_the_chief_died(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, nothing, somebody_died, nothing, is_chief_now)
    assert worker.waits() == "" and worker.world.rank == 0


def test_where_no_world_forms_any_more_it_says_that_nobody_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_saves, "_NEXT_CHIEF_S", 0.0)
    why = Worker(monkeypatch, nothing, somebody_died).waits()
    assert "no world has formed without it" in why and "no chief that could save" in why


def test_a_chief_that_has_other_work_to_do_holds_up_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Worker(monkeypatch).waits(timeout_s=0.01) == ""


def test_without_an_elastic_launcher_there_is_no_next_chief(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, elastic=False)
    assert worker.waits() == "" and worker.n_looks == 0


@pytest.mark.parametrize(
    ("has_step", "values_saved", "several_hosts", "asked"),
    [
        (False, None, False, [b"of the end"]), (True, b"2", False, []), (True, b"1", False, [b"of the end"]),
        (True, b"1", True, []), (True, None, False, []),
    ],
    ids=["none yet", "same values", "older values", "older values, whose other hosts have left", "of a chief before"],
)  # fmt: skip
def test_the_last_checkpoint_that_servers_save_has_the_values_of_the_end(
    monkeypatch: pytest.MonkeyPatch, has_step: bool, values_saved: bytes | None, several_hosts: bool, asked: list[bytes]
) -> None:
    worker, states = Worker(monkeypatch), list[bytes]()
    worker.world.rank, worker.engine.mode.servers = 0, worker.servers
    worker.servers.several_hosts = several_hosts
    schedule = SimpleNamespace(
        await_quiet=lambda *_: None, has=lambda step: has_step, await_saved=lambda *_: None, why_not_saved=lambda _: ""
    )  # fmt: skip
    worker.engine.participant = lambda kind: SimpleNamespace(schedule=schedule)
    state: Any = SimpleNamespace(encoded=lambda: b"of the end", digest_of_values=lambda: b"2")
    saves = WorkerSaves(worker.engine, state)
    saves._values_saved = values_saved
    monkeypatch.setattr(saves, "_save_asynchronously", lambda servers, state, is_last: states.append(state))
    assert saves._save_last(60.0) == "" and states == asked


def test_a_step_that_is_saved_stays_so_where_it_cannot_be_saved_with_the_values_of_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, events = Worker(monkeypatch), list[Event]()
    worker.world.rank, worker.engine.mode.servers, worker.servers.several_hosts = 0, worker.servers, False
    schedule = SimpleNamespace(
        await_quiet=lambda *_: None, has=lambda step: True, await_saved=lambda *_: None,
        why_not_saved=lambda _: "no space left",
    )  # fmt: skip
    worker.engine.participant = lambda kind: SimpleNamespace(schedule=schedule)
    worker.engine.emit = events.append
    state: Any = SimpleNamespace(encoded=lambda: b"of the end", digest_of_values=lambda: b"2")
    saves = WorkerSaves(worker.engine, state)
    saves._values_saved = b"1"
    monkeypatch.setattr(saves, "_save_asynchronously", lambda servers, state, is_last: None)
    assert saves._save_last(60.0) == ""
    (event,) = events
    assert event.kind == "checkpoint_failed" and event.message.endswith("was not saved: no space left")


@pytest.mark.slow
def test_that_the_state_is_not_kept_is_reported_once_in_a_process(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, log = training(), EventLog()
    job.state.register_callbacks([CheckpointCallback(str(tmp_path / "saved")), log])
    job.state.sync()
    saves, stopped = job.state.saving, RetentionDecision(False, "it takes 1.4 ms of a step's 60 ms")
    monkeypatch.setattr(StateRetainer, "keep", lambda self, *_: (self._remove(Absence.COST), stopped)[1])
    for _ in range(2):
        saves._keep(0, lambda: b"")
        saves._keeper = None  # a world has formed
    monkeypatch.setattr(StateRetainer, "keep", lambda self, *_: (self._remove(Absence.NO_ROOM), stopped)[1])
    saves._keep(0, lambda: b"")
    reported = log.of("memory_not_kept")
    assert len(reported) == 2, "once for each cause"
    assert {event.message for event in reported} == {
        f"{stopped.reason}. A restart will begin at the start until a checkpoint is complete, then at the newest one"
    }


@pytest.mark.slow
def test_a_restart_without_the_state_begins_at_the_newest_checkpoint_where_there_is_one(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, log = training(), EventLog()
    job.state.register_callbacks([CheckpointCallback(str(tmp_path / "saved")), log])
    job.state.sync()
    checkpoints = checkpoints_of(job.state.engine)
    assert checkpoints is not None
    checkpoints.schedule.saved_step = 0
    monkeypatch.setattr(StateRetainer, "keep", lambda *_: RetentionDecision(False, "it takes 1.4 ms"))
    job.state.saving._keep(0, lambda: b"")
    (reported,) = log.of("memory_not_kept")
    assert reported.message == "it takes 1.4 ms. A restart will begin at the newest checkpoint"


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.02])
def test_where_the_last_checkpoint_fails_the_state_is_kept_whatever_it_costs(
    training: Any, clicks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setenv("GBA_HVD_JOB_ID", "named")
    too_dear = RetentionDecision(False, "it takes 1.4 ms of a step's 60 ms")
    monkeypatch.setattr("gba_hvd.shm.retained_state.decide_retention", lambda *_: too_dear)
    monkeypatch.setattr("gba_hvd.shm.retained_state._N_RECENT", 1)
    job = training()
    job.state.register_callbacks([CheckpointCallback(str(tmp_path / "saved"), retain_state_share=share)])
    job.epoch(clicks(64))
    folder, step = job.tables.memory.folder, job.state.engine.progress.step
    assert step > 2 and not retained_state.is_there(folder)
    monkeypatch.setattr(job.state.saving, "_save_last", lambda *_, **__: "No space left on device")
    with pytest.raises(LastCheckpointFailed, match=rf"it resumes from step {step} if it comes within 20 s"):
        job.state.saving.end()
    kept = retained_state.read(folder)
    assert kept is not None and (kept.step, kept.generation) == (step, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_step", "is_kept", "then"),
    [
        (-1, False, f"again: it begins at step 0, since no checkpoint has been saved yet{MAY_YET}"),
        (-1, True, ": it resumes from step 0 if it comes within 20 s of the end, while that is kept in memory, and "
         f"saves it; else it begins at step 0, since no checkpoint has been saved yet{MAY_YET}"),
        (8, True, "and saves it; else it resumes from its newest checkpoint, of step 8"),
    ],
)  # fmt: skip
def test_a_last_checkpoint_that_fails_says_where_the_same_command_begins(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_step: int, is_kept: bool, then: str
) -> None:
    monkeypatch.setenv("GBA_HVD_JOB_ID", "named")
    job = training()
    job.state.register_callbacks([CheckpointCallback(str(tmp_path / "saved"))])
    job.state.sync()
    checkpoints = checkpoints_of(job.state.engine)
    assert checkpoints is not None
    checkpoints.schedule.saved_step = saved_step
    monkeypatch.setattr(retained_state, "is_there", lambda folder: is_kept)
    monkeypatch.setattr(host_identity, "is_of_a_container", lambda pid: False)
    monkeypatch.setattr(job.state.saving, "_save_last", lambda *_, **__: "No space left on device")
    with pytest.raises(LastCheckpointFailed) as failed:
        job.state.saving.end()
    assert str(failed.value).endswith(then) and f"not saved at {tmp_path / 'saved'}: No space" in str(failed.value)
