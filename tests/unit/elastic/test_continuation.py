"""A job that has ended in a process is trained on there: nothing is lost, and nothing counts as a failure."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gba_hvd
from gba_hvd import BadInput
from gba_hvd.errors import ShardMemoryError
from recovery import CheckpointCallback

Train = Callable[[Any, Any, int], None]


class Events(gba_hvd.Callback):
    def __init__(self) -> None:
        self.of: list[gba_hvd.Event] = []

    def on_event(self, event: gba_hvd.Event) -> None:
        self.of.append(event)

    def on_end(self, status: str, error: BaseException | None) -> None:
        self.of.append(gba_hvd.Event("end", 0, status))

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.of]


def by_call(job: Any, dataset: Any, epochs: int) -> None:
    @gba_hvd.elastic.run
    def train(state: Any) -> None:
        by_loop(job, dataset, epochs)

    train(job.state)


def by_loop(job: Any, dataset: Any, epochs: int) -> None:
    first = job.state.epoch + (job.state.finished_epoch == job.state.epoch)
    for job.state.epoch in range(first, epochs):
        job.epoch(dataset, seed=4)


def a_job(training: Any, **settings: Any) -> tuple[Any, Events]:
    job = training(epoch=0, rows=gba_hvd.Adagrad(lr=0.1), dense=lambda p: torch.optim.Adam(p, lr=0.1), **settings)
    events = Events()
    job.state.register_callbacks([events])
    return job, events


def everything(job: Any) -> dict[str, np.ndarray]:
    return {**job.all_rows(), **job.all_dense()}


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    for name, values in a.items():
        np.testing.assert_array_equal(values, b[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("again", [by_call, by_loop])
def test_training_continues_as_if_it_had_not_ended(training: Any, clicks: Any, again: Train) -> None:
    (whole, _), (job, events) = a_job(training), a_job(training)
    by_call(whole, clicks(40), 3)
    by_call(job, clicks(40), 1)
    assert not job.tables.memory.folder.exists()
    again(job, clicks(40), 2)
    assert job.tables.memory.folder.exists() == (again is by_loop)
    again(job, clicks(40), 3)
    job.state.close()
    assert_same(everything(whole), everything(job))
    assert (job.state.step, job.state.samples) == (whole.state.step, whole.state.samples)
    assert events.kinds.count("end") == (3 if again is by_call else 2)
    assert {"started", "continued", "finished", "end"} == set(events.kinds)
    assert job.state.engine.progress.restarts == 0
    assert not job.tables.memory.folder.exists()


@pytest.mark.slow
def test_an_interrupted_call_continues_at_its_step(training: Any, clicks: Any) -> None:
    class Interrupted(type(clicks())):  # type: ignore[misc]
        def take(self, rows: np.ndarray) -> Any:
            if len(self.taken) == 9:  # in the third step, whose first micro-batch was computed
                self.taken.append(rows)
                raise KeyboardInterrupt
            return super().take(rows)

    (whole, _), (job, events) = a_job(training), a_job(training)
    by_call(whole, clicks(40), 2)
    with pytest.raises(KeyboardInterrupt):
        gba_hvd.elastic.run(lambda state: job.epoch(Interrupted(40), seed=4, prefetch=0))(job.state)
    assert (job.state.step, job.state.epoch) == (2, 0)
    by_call(job, clicks(40), 2)
    assert_same(everything(whole), everything(job))
    assert job.state.samples == whole.state.samples
    assert events.kinds == ["started", "interrupted", "end", "continued", "finished", "end"]


@pytest.mark.slow
def test_what_was_assigned_after_the_end_is_trained_on(training: Any, clicks: Any) -> None:
    job, _ = a_job(training)
    by_call(job, clicks(40), 1)
    job.tables.assign("item", [0], np.full((1, 3), 5.0, np.float32))
    gba_hvd.elastic.run(lambda state: None)(job.state)
    np.testing.assert_array_equal(job.tables.rows("item", [0]), np.full((1, 3), 5.0))


@pytest.mark.slow
def test_hashed_tables_keep_their_ids(training: Any, clicks: Any) -> None:
    tables = {"user": gba_hvd.Table(dim=4, capacity=64, keys="hash64"), "item": (7, 3)}
    (whole, _), (job, _) = a_job(training, tables=tables), a_job(training, tables=tables)
    by_call(whole, clicks(40), 2)
    for epochs in (1, 2):
        by_call(job, clicks(40), epochs)
    users = np.arange(20)
    np.testing.assert_array_equal(whole.tables.rows("user", users), job.tables.rows("user", users))
    assert_same(whole.all_dense(), job.all_dense())


@pytest.mark.slow
def test_no_failure_counts_where_checkpoints_are_made(training: Any, clicks: Any, tmp_path: Path) -> None:
    job, events = a_job(training)
    callback = CheckpointCallback(str(tmp_path / "store"), every_s=1000.0, final_checkpoint_s=0)
    job.state.register_callbacks([callback])
    job.state.sync()
    before = everything(job)
    with pytest.raises(KeyboardInterrupt):
        gba_hvd.elastic.run(lambda state: interrupt())(job.state)
    with pytest.raises(KeyboardInterrupt):
        gba_hvd.elastic.run(lambda state: interrupt())(job.state)
    assert_same(before, everything(job))
    assert "continued" in events.kinds and not {"resumed", "rows_lost", "rows_restored"} & set(events.kinds)
    job.tables.memory.close(remove=True)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_an_elastic_job_is_refused_before_anything_is_lost(
    training: Any, clicks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, events = a_job(training)
    by_call(job, clicks(40), 1)
    before = everything(job)
    with monkeypatch.context() as patch:
        patch.setenv("HOROVOD_ELASTIC", "1")
        for again in (by_call, by_loop):
            with pytest.raises(BadInput, match=r"runs the script from its top.*Put both in one function"):
                again(job, clicks(40), 3)
    assert_same(before, everything(job))
    assert events.kinds == ["started", "finished", "end"]
    by_call(job, clicks(40), 2)
    assert events.kinds[3] == "continued"


@pytest.mark.slow
def test_without_room_for_the_rows_it_is_refused_and_they_stay(
    training: Any, clicks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = a_job(training)
    by_call(job, clicks(40), 1)
    before, folder = everything(job), job.tables.memory.folder
    with monkeypatch.context() as patch:

        def no_room(self: Any, shards: list[int]) -> None:
            raise ShardMemoryError("no room")

        patch.setattr("gba_hvd.shm.shard_memory.ShardMemory.reserve", no_room)
        with pytest.raises(ShardMemoryError, match="no room"):
            by_call(job, clicks(40), 2)
    assert_same(before, everything(job))
    assert not folder.exists()
    by_call(job, clicks(40), 2)
    assert job.state.step == 6


@pytest.mark.slow
def test_rows_of_another_job_that_came_under_the_name_are_not_taken_for_its_own(
    training: Any, clicks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GBA_HVD_JOB_ID", "fixed")
    job, _ = a_job(training)
    by_call(job, clicks(40), 1)
    before = everything(job)
    other, _ = a_job(training)
    object.__setattr__(other.tables.config, "shard_dir", job.tables.config.shard_dir)
    by_loop(other, clicks(40), 1)
    other.tables.memory.close(remove=False)
    with pytest.raises(ShardMemoryError, match=r"has rows of another job of this name.*rm -r"):
        by_call(job, clicks(40), 2)
    assert_same(before, everything(job))


def test_a_folder_that_the_end_removed_is_no_trouble(training: Any) -> None:
    job, events = a_job(training)
    job.state.sync()
    job.state.close()
    job.state.check_memory()
    assert job.tables.memory.trouble() == ""
    assert not job.tables.memory.folder.exists() and "memory_removed" not in events.kinds


def test_an_interruption_says_what_a_notebook_does_next(training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job, events = a_job(training)
    job.state.sync()
    job.state.engine.progress.step = 7
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    job.state.close("KILLED", KeyboardInterrupt())
    (ended,) = (event for event in events.of if event.kind == "interrupted")
    assert ended.data["goes_on"] == "a further call in this process continues at step 7, with the rows that it has"
