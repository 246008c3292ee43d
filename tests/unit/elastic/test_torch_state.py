"""State survives, the end is reported, and what cannot travel is named."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gba_hvd
import recovery
from gba_hvd import BadInput
from gba_hvd.comm.collectives import SoloWorld, worker_lost
from gba_hvd.elastic import training_state
from gba_hvd.errors import StateMismatch
from gba_hvd.membership import JoinResult
from gba_hvd.membership.agreement import RankState
from gba_hvd.membership.join import _rank_state
from gba_hvd.mode_names import MODE_NUMBERS
from gba_hvd.ps.client import ServerLost, ServerRefused
from gba_hvd.ps.messages import JobPosition
from gba_hvd.ps.worker.host_server import HostServer
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.switching import leave_ps
from gba_hvd.switching.requests import ModeRequests, switching_of
from gba_hvd.training.job_state import Progress
from gba_hvd.training.step_hooks import StepHooks
from recovery import CheckpointCallback, state_codec
from recovery.catalog import claims
from recovery.catalog.chains import Chain, chains
from recovery.catalog.epoch_position import position_of
from recovery.catalog.rollback import plan_rollback, roll_back
from recovery.format.manifest import from_json, to_json
from recovery.storage.open import open_store
from recovery.storage.store import manifest_names


class Diary(gba_hvd.Callback):
    """Records all calls."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.jobs: list[gba_hvd.Job] = []
        self.count = 0

    def on_job(self, job: gba_hvd.Job) -> None:
        self.received.append("job")
        self.jobs.append(job)

    def on_step(self, record: gba_hvd.StepRecord) -> None:
        self.count += 1
        self.received.append(f"step {record.step}")

    def on_epoch(self, epoch: int) -> None:
        self.received.append(f"epoch {epoch}")

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.received.append(f"metrics {step} {dict(metrics)}")

    def on_event(self, event: gba_hvd.Event) -> None:
        self.received.append(event.kind)

    def on_end(self, status: str, error: BaseException | None) -> None:
        self.received.append(f"end {status} {error!r}")

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]
        self.received.append("state")


def with_diary(job: Any) -> Diary:
    diary = Diary()
    job.state.register_callbacks([diary])
    return diary


def test_callbacks_follow_a_run_from_beginning_to_end(training: Any, clicks: Any) -> None:
    job = training(epoch=0)
    diary = with_diary(job)

    @gba_hvd.elastic.run
    def train(state: Any) -> str:
        job.epoch(clicks(20))
        state.report(auc=0.5)
        return "done"

    assert train(job.state) == "done"
    assert diary.received == [
        "job",
        "started",
        "step 1",
        "step 2",
        "epoch 0",
        "metrics 2 {'auc': 0.5}",
        "finished",
        "end FINISHED None",
    ]
    (reported,) = diary.jobs
    assert (reported.rank, reported.size, reported.is_host_leader, reported.is_chief) == (0, 1, True, True)
    assert reported.job_id == job.state.job_id
    assert reported.settings["tables"] == {"user": [20, 4], "item": [7, 3]}
    assert (reported.settings["global_batch"], reported.settings["optimizer"]) == (16, "SGD")
    assert not job.tables.memory.folder.exists()


def test_metrics_are_of_the_epoch_of_the_state(training: Any, clicks: Any) -> None:
    """At its start it has no batches yet; a state without an epoch counts its runs of `batches`."""
    job, counting = training(epoch=0), training()
    diary, other = with_diary(job), with_diary(counting)
    job.state.epoch = 3
    job.state.report(auc=0.5)
    counting.state.report(auc=0.5)
    for _ in range(2):
        counting.epoch(clicks(20))
    counting.state.report(auc=0.6)
    assert diary.received == ["epoch 3", "metrics 0 {'auc': 0.5}"]
    assert [one for one in other.received if one[:5] in ("epoch", "metri")] == [
        "metrics 0 {'auc': 0.5}", "epoch 1", "metrics 4 {'auc': 0.6}"
    ]  # fmt: skip


def test_time_before_the_first_step_is_not_of_it(training: Any, clicks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later pause is: the step before and after it are of one run."""
    job, seconds, now = training(epoch=0), [], [0.0]

    class Records(gba_hvd.Callback):
        def on_step(self, record: gba_hvd.StepRecord) -> None:
            seconds.append(record.seconds)

    job.state.register_callbacks([Records()])
    job.state.sync()
    monkeypatch.setattr("gba_hvd.training.reports.time.perf_counter", lambda: now[0])
    for epoch in range(2):
        job.state.epoch, now[0] = epoch, now[0] + 1000.0  # an evaluation
        job.epoch(clicks(20))
    assert seconds == [0.0, 0.0, 1000.0, 0.0]


@pytest.mark.slow
def test_a_launch_that_trains_nothing_is_reported(training: Any, clicks: Any, tmp_path: Path) -> None:
    found = []
    for epochs in ([0], [0], [0, 1]):
        job = training(epoch=0)
        job.state.register_callbacks([CheckpointCallback(str(tmp_path / "saved"))])
        diary = with_diary(job)

        @gba_hvd.elastic.run
        def train(state: Any, job: Any = job, epochs: list[int] = epochs) -> None:
            for state.epoch in epochs:
                job.epoch(clicks(20))

        train(job.state)
        found.append((job.state.step, diary.received.count("nothing_trained")))
    assert found == [(2, 0), (2, 1), (4, 0)]


@pytest.mark.slow
def test_a_launch_that_asks_for_no_epoch_is_reported_with_where_the_job_stands(
    training: Any, clicks: Any, tmp_path: Path
) -> None:
    """A script whose range is empty, or that only evaluates; not one that fails."""

    def launch(epochs: list[int], does: str = "") -> list[str]:
        job, found = training(epoch=0), list[str]()

        class Reads(gba_hvd.Callback):
            def on_event(self, event: gba_hvd.Event) -> None:
                found.extend([event.message] * (event.kind == "nothing_trained"))

        job.state.register_callbacks([CheckpointCallback(str(tmp_path / "saved")), Reads()])

        @gba_hvd.elastic.run
        def train(state: Any) -> None:
            for state.epoch in epochs:
                job.epoch(clicks(20))
            if does == "evaluate":
                gba_hvd.evaluate(job.model, clicks(20), state)
            elif does == "fail":
                raise OSError("the disk")

        with contextlib.suppress(OSError):
            train(job.state)
        return found

    (never,) = launch([])
    assert "batches() for no epoch, and no launch before has trained one" in never
    assert launch([3]) == []
    for does in ("", "evaluate"):
        (found,) = launch([], does)
        assert "batches() for no epoch. The job stands at step 2 (epoch 3, complete). If it was to eval" in found
        assert "`for state.epoch in range(4, ...)`" in found
    assert launch([], "fail") == []


@pytest.mark.parametrize(
    ("epochs", "skipped"),
    [
        ([0, 1, 2], []),
        ([3, 4], []),
        ([0, 2, 5], ["epoch 1 was never trained: epoch 2 begins after epoch 0. From now on its data"]),
        ([0, 4], ["epochs 1 to 3 were never trained: epoch 4 begins after epoch 0. From now on their data"]),
    ],
)
def test_epochs_that_are_passed_over_are_reported_once(
    training: Any, clicks: Any, epochs: list[int], skipped: list[str]
) -> None:
    job, found = training(epoch=0), list[str]()

    class Reads(gba_hvd.Callback):
        def on_event(self, event: gba_hvd.Event) -> None:
            found.extend([event.message] * (event.kind == "epoch_skipped"))

    job.state.register_callbacks([Reads()])
    for job.state.epoch in epochs:
        job.epoch(clicks(20))
    assert [text.partition(" can be")[0] for text in found] == skipped


@pytest.mark.slow
def test_an_epoch_that_is_passed_over_between_two_launches_is_reported(
    training: Any, clicks: Any, tmp_path: Path
) -> None:
    found = list[Mapping[str, Any]]()
    for epoch in (3, 5):
        job = training(epoch=0)

        class Reads(gba_hvd.Callback):
            def on_event(self, event: gba_hvd.Event) -> None:
                found.extend([event.data] * (event.kind == "epoch_skipped"))

        job.state.register_callbacks([CheckpointCallback(str(tmp_path / "saved")), Reads()])

        @gba_hvd.elastic.run
        def train(state: Any, job: Any = job, epoch: int = epoch) -> None:
            state.epoch = epoch
            job.epoch(clicks(20))

        train(job.state)
    assert found == [{"before": 3, "first": 4, "last": 4, "epoch": 5}]


@pytest.mark.slow
def test_the_rest_of_an_epoch_that_a_later_launch_leaves_out_is_reported(
    training: Any, clicks: Any, tmp_path: Path
) -> None:
    """Also where a launch asks for no epoch: it is to be finished first."""

    def launch(epochs: list[int], n_steps: int = 9) -> list[str]:
        job, found = training(epoch=0), list[str]()

        class Reads(gba_hvd.Callback):
            def on_event(self, event: gba_hvd.Event) -> None:
                found.extend([event.message] * (event.kind in ("epoch_unfinished", "nothing_trained")))

        job.state.register_callbacks([CheckpointCallback(str(tmp_path / "saved")), Reads()])

        @gba_hvd.elastic.run
        def train(state: Any) -> None:
            end = state.step + n_steps
            for state.epoch in epochs:
                for batch in gba_hvd.batches(clicks(50), state):
                    job.micro_step(batch)
                    if state.step == end:
                        break

        train(job.state)
        return found

    assert launch([4], n_steps=2) == []
    (left,) = launch([])
    assert "(epoch 4, 2 of 4 steps). What is left of epoch 4 is trained by a launch that asks for this epoch" in left
    (left,) = launch([5])
    assert "epoch 5 begins, and the launches before left epoch 4, 2 of 4 steps" in left
    assert launch([6, 7]) == []


def launch_that_leaves_early(training: Any, clicks: Any, n_batches: int, *, epochs: int = 1) -> tuple[list[str], str]:
    """What is warned of, and the account's line, when the loop is left after so many batches of each epoch."""
    job, found, out = training(global_batch=12, micro_batch=4, epoch=0), list[str](), io.StringIO()

    class Reads(gba_hvd.Callback):
        def on_event(self, event: gba_hvd.Event) -> None:
            found.extend([event.message] * (event.kind == "epoch_unfinished"))

    job.state.register_callbacks([Reads(), gba_hvd.ProgressLine(stream=out)])

    @gba_hvd.elastic.run
    def train(state: Any) -> None:
        for state.epoch in range(epochs):
            for number, batch in enumerate(gba_hvd.batches(clicks(40), state), 1):
                job.micro_step(batch)
                if number == n_batches:
                    break

    train(job.state)
    return found, next((line for line in out.getvalue().splitlines() if line.startswith("left early")), "")


@pytest.mark.slow
def test_samples_of_a_step_that_the_loop_is_left_within_are_named(training: Any, clicks: Any) -> None:
    found, line = launch_that_leaves_early(training, clicks, 5, epochs=2)
    (text,) = found  # once, of the first of two epochs
    assert text.startswith("epoch 0 was left after 1 of 4 steps: 12 of 40 samples were trained, and 8 were computed ")
    assert "for step 2, which was not applied: they are in no count. A `break` belongs where" in text
    assert text.endswith("The rest of the epoch is not trained")
    assert line == (
        "left early: epoch 0 (12 of 40 samples trained), epoch 1 (12 of 40 samples trained); 16 samples were computed "
        "for steps that were not applied, and are in no count"
    )
    (text,), line = launch_that_leaves_early(training, clicks, 2)  # before the first step, and in the last epoch
    assert text.startswith("epoch 0 was left after 0 of 4 steps: 0 of 40 samples were trained, and 8 were computed ")
    assert text.endswith("is trained by a launch that asks for this epoch")


@pytest.mark.slow
def test_an_epoch_that_is_left_between_two_steps_is_warned_of_where_the_next_one_begins(
    training: Any, clicks: Any
) -> None:
    found, line = launch_that_leaves_early(training, clicks, 6)  # as a job that makes so many steps
    assert (found, line) == ([], "left early: epoch 0 (24 of 40 samples trained)")
    (text,), _ = launch_that_leaves_early(training, clicks, 6, epochs=2)
    assert (
        text
        == "epoch 0 was left after 2 of 4 steps: 24 of 40 samples were trained. The rest of the epoch is not trained"
    )
    assert launch_that_leaves_early(training, clicks, 10, epochs=2) == ([], "")  # that was the last batch


@pytest.mark.slow
def test_a_job_in_auto_says_at_its_end_why_it_never_switched(training: Any, clicks: Any) -> None:
    job, said = training(epoch=0), []

    class Ends(gba_hvd.Callback):
        def on_event(self, event: gba_hvd.Event) -> None:
            said.extend([event.message] * (event.kind == "auto_stayed"))

    job.state.register_callbacks([gba_hvd.GBACallback(mode="auto", enter_gain=100.0, trial_budget=0.0), Ends()])

    @gba_hvd.elastic.run
    def train(state: Any) -> None:
        job.epoch(clicks(5000))  # some readings of a tenth of a second

    train(job.state)
    assert len(said) == 1 and said[0].startswith('mode "auto" never left allreduce: ') and "predicted" in said[0], said


@pytest.mark.slow
def test_a_refused_launch_promises_nothing_of_the_same_command(
    training: Any, clicks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch() -> list[gba_hvd.Event]:
        job, events = training(epoch=0), []

        class Ends(gba_hvd.Callback):
            def on_event(self, event: gba_hvd.Event) -> None:
                events.append(event)

        checkpoints = CheckpointCallback(str(tmp_path / "saved"))
        job.state.register_callbacks([gba_hvd.GBACallback(mode="auto"), checkpoints, Ends()])
        with contextlib.suppress(BadInput):
            gba_hvd.elastic.run(lambda state: job.epoch(clicks(20)))(job.state)
        return events

    launch()

    def refuse(*_: Any) -> None:
        raise BadInput("it is of a job with another optimizer")

    monkeypatch.setattr(training_state, "refuse_other_optimizer", refuse)
    events = launch()
    assert [event.kind for event in events] == ["failed"]
    assert "goes_on" not in events[0].data


def test_a_callback_that_cannot_start_on_one_worker_refuses_the_job_on_all(workers: Any, on_host: Any) -> None:
    class Refuses(gba_hvd.Callback):
        def on_start(self, is_chief: bool, is_host_leader: bool) -> None:
            if is_host_leader and not is_chief:
                raise BadInput("no folder on b")

        def on_job(self, job: gba_hvd.Job) -> None:
            raise AssertionError("the job was not refused")

    jobs = [on_host(host) for host in "aab"]
    for job in jobs:
        job.state.register_callbacks([Refuses()])
    first, second, refused = workers.outcomes(jobs, lambda job: job.state.sync())
    assert str(refused) == "no folder on b" and isinstance(refused, BadInput)
    assert [type(one).__name__ for one in (first, second)] == ["WorldLost", "WorldLost"]
    assert "the worker of rank 2 could not start its callbacks; its log says why" in str(first)


@pytest.mark.slow
@pytest.mark.parametrize("keep_best", [None, "auc"])
def test_the_checkpoint_of_the_best_night_stays(
    training: Any, clicks: Any, tmp_path: Path, keep_best: str | None
) -> None:
    url = tmp_path / "saved"
    for night, auc in enumerate((0.9, 0.5, 0.6)):
        job = training(epoch=0)
        job.state.register_callbacks([CheckpointCallback(str(url), keep_last=1, policy="full", keep_best=keep_best)])

        @gba_hvd.elastic.run
        def train(state: Any, job: Any = job, night: int = night, auc: float = auc) -> None:
            state.epoch = night
            job.epoch(clicks(20))
            state.report(auc=auc)

        train(job.state)
    steps = sorted(
        from_json(path.read_bytes(), f"manifests/{path.name}").step for path in (url / "manifests").iterdir()
    )
    assert steps == ([6] if keep_best is None else [2, 6])


@pytest.mark.slow
@pytest.mark.parametrize(("keep_epochs", "steps"), [(None, [6]), (2, [4, 6]), (9, [2, 4, 6])])
def test_the_last_checkpoints_of_the_newest_nights_stay(
    training: Any, clicks: Any, tmp_path: Path, keep_epochs: int | None, steps: list[int]
) -> None:
    url = tmp_path / "saved"
    for night in range(3):
        job = training(epoch=0)
        settings: dict[str, Any] = {"every_steps": 1, "keep_last": 1, "policy": "full", "keep_epochs": keep_epochs}
        job.state.register_callbacks([CheckpointCallback(str(url), **settings)])

        @gba_hvd.elastic.run
        def train(state: Any, job: Any = job, night: int = night) -> None:
            state.epoch = night
            job.epoch(clicks(20))

        train(job.state)
    left = [from_json(path.read_bytes(), f"manifests/{path.name}") for path in (url / "manifests").iterdir()]
    assert sorted(one.step for one in left) == steps
    assert all(one.about["position"]["epoch"] == one.step / 2 - 1 for one in left)


@pytest.mark.slow
@pytest.mark.parametrize("is_up", [True, False])
def test_a_best_model_waits_for_the_server_for_a_limited_time_and_is_named_where_it_was_not_saved(
    training: Any, clicks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_up: bool
) -> None:
    """Of three epochs the first is the best; the server is up at once, or from the second evaluation on."""
    job, url, events = training(epoch=0), tmp_path / "saved", list[gba_hvd.Event]()
    job.state.register_callbacks([CheckpointCallback(str(url), every_s=600.0, policy="full", keep_best="auc")])

    class Listens(gba_hvd.Callback):
        def on_event(self, event: gba_hvd.Event) -> None:
            events.append(event)

    job.state.register_callbacks([Listens()])
    ready, allowed = HostServer.is_ready, [is_up]
    monkeypatch.setattr(HostServer, "is_ready", lambda self, *how, **more: allowed[0] and ready(self, *how, **more))
    monkeypatch.setattr(HostServer, "why_not_ready", lambda self, *how, **more: "it is held")
    job.state.saving._best_patience_s = 60.0 if is_up else 0.0

    @gba_hvd.elastic.run
    def train(state: Any) -> None:
        for state.epoch, auc in enumerate((0.9, 0.7, 0.6)):
            job.epoch(clicks(20))
            state.report(auc=auc)
            if state.epoch == 1:
                allowed[0] = True
                job.state.saving._best_patience_s = 60.0

    train(job.state)
    opened = recovery.open_checkpoint(url, "best")
    assert opened.best is not None
    warned = [event.message for event in events if event.kind == "best_not_saved"]
    if is_up:
        assert (opened.step, opened.best.words, opened.best.unsaved, warned) == (2, "auc 0.9000 of step 2", None, [])
        return
    assert (opened.step, opened.best.words) == (4, "auc 0.7000 of step 4")
    assert opened.best.unsaved is not None
    assert opened.best.unsaved.words == "the best model, auc 0.9000 of step 2, was not saved: it is held"
    (text,) = warned
    assert text.startswith(opened.best.unsaved.words) and "train again up to there" in text


class LogsTheModel(gba_hvd.Callback):
    """As `MLflowCallback(log_model=)`."""

    uses_last_checkpoint = True


@pytest.mark.slow
def test_a_launch_that_changes_nothing_saves_nothing(training: Any, clicks: Any, tmp_path: Path) -> None:
    def launch(url: Path, change: str) -> list[str]:
        job = training(epoch=0, evaluated=-1, n_shards=4 if change == "shards" else 3)
        job.state.register_callbacks([CheckpointCallback(str(url)), gba_hvd.GBACallback(mode="allreduce")])
        if change == "a logged model":
            job.state.register_callbacks([LogsTheModel()])
        diary = with_diary(job)

        @gba_hvd.elastic.run
        def train(state: Any) -> None:
            job.epoch(clicks(20))
            if change == "an evaluation":
                gba_hvd.evaluate(job.model, clicks(20), state)
            elif change == "a value":
                state.evaluated = 0
            elif change == "a row":
                job.tables.assign("user", [3], np.ones((1, 4), np.float32))
            elif change == "damage":
                next((url / "blobs").glob("*/state")).unlink()

        train(job.state)
        return [kind for kind in diary.received if kind in ("checkpoint", "checkpoint_unchanged", "nothing_trained")]

    assert launch(tmp_path / "first", "") == ["checkpoint"]
    for change in ("an evaluation", "a value", "a row", "shards", "a logged model", "damage"):
        url = shutil.copytree(tmp_path / "first", tmp_path / change)
        is_unchanged = change == "an evaluation"
        assert launch(url, change) == ["checkpoint_unchanged" if is_unchanged else "checkpoint", "nothing_trained"]
        assert len(manifest_names(open_store(str(url)))) == (1 if is_unchanged else 2), change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "begins"),
    [
        (BadInput("row 7: inf"), "when that is repaired and all workers have ended, the same command "),
        (OSError("the disk"), "when all workers have ended, the same command "),
    ],
    ids=repr,
)
def test_a_job_that_fails_names_what_comes_before_the_same_command(
    training: Any, clicks: Any, error: Exception, begins: str
) -> None:
    job, ends = training(epoch=0), list[gba_hvd.Event]()

    class Ends(gba_hvd.Callback):
        def on_event(self, event: gba_hvd.Event) -> None:
            ends.extend([event] * (event.kind == "failed"))

    job.state.register_callbacks([Ends()])

    def train(state: Any) -> None:
        job.epoch(clicks(20))
        raise error

    with contextlib.suppress(BadInput, OSError):
        gba_hvd.elastic.run(train)(job.state)
    (failed,) = ends
    assert failed.data["goes_on"].startswith(begins)
    assert failed.data.get("to_repair", False) == isinstance(error, BadInput)


@pytest.mark.slow
def test_an_epoch_of_other_data_is_refused_with_the_way_to_train_it_from_its_first_batch(
    training: Any, clicks: Any, tmp_path: Path
) -> None:
    """In the middle, and where it is complete."""
    place = tmp_path / "saved"

    def launch(epoch: int, n: int, n_steps: int = 9) -> int:
        job = training(epoch=0)
        job.state.register_callbacks([CheckpointCallback(str(place))])

        @gba_hvd.elastic.run
        def train(state: Any) -> None:
            state.epoch = epoch
            end = state.step + n_steps
            for batch in gba_hvd.batches(clicks(n), state):
                job.micro_step(batch)
                if state.step == end:
                    break

        train(job.state)
        return int(job.state.step)

    def stands() -> list[str]:
        found = [one for one in chains(open_store(str(place))) if isinstance(one, Chain)]
        return [position.words for one in found if (position := position_of(one.newest))]

    def roll_back_as(error: StateMismatch) -> None:
        found = re.search(
            r"`gba-hvd checkpoint rollback (\S+) (\S+) --yes`\. Then give the same command again", str(error)
        )
        assert found is not None and found[1] == str(place), error
        store = open_store(str(place))
        roll_back(store, plan_rollback(store, f"manifests/{found[2]}.json"))

    assert launch(0, 20) == 2 and launch(1, 50, n_steps=1) == 3
    assert stands() == ["epoch 1, 1 of 4 steps", "epoch 0, complete"]
    with pytest.raises(
        StateMismatch, match=r"To train epoch 1 from its first batch.*it \(epoch 0, complete\): "
    ) as raised:
        launch(1, 60)
    assert "resume=False would start over, which discards all that was trained (3 steps)" in str(raised.value)
    roll_back_as(raised.value)
    assert launch(1, 60) == 6
    with pytest.raises(StateMismatch, match=r"set state.epoch = 2 before.*Corrected data of epoch 1 ") as raised:
        launch(1, 40)
    roll_back_as(raised.value)
    assert launch(1, 40) == 5


@pytest.mark.slow
def test_the_way_back_is_to_a_checkpoint_of_the_same_training(training: Any, clicks: Any, tmp_path: Path) -> None:
    """Not to one from before it started over, nor is that proposed where checkpoints have no position."""
    place = tmp_path / "saved"

    def launch(epochs: list[int], n: int, **how: Any) -> None:
        job = training(epoch=0)
        job.state.register_callbacks([CheckpointCallback(str(place), policy="full", **how)])

        @gba_hvd.elastic.run
        def train(state: Any) -> None:
            for state.epoch in epochs:
                job.epoch(clicks(n))

        train(job.state)

    launch([0], 20)
    launch([0, 1], 20, resume=False, keep_last=1)
    with pytest.raises(StateMismatch, match=r"start over .* has no checkpoint from before epoch 1"):
        launch([1], 30)
    for path in (place / "manifests").iterdir():
        manifest = from_json(path.read_bytes(), f"manifests/{path.name}")
        about = {name: value for name, value in manifest.about.items() if name != "position"}
        path.write_bytes(to_json(replace(manifest, about=about)))
    with pytest.raises(StateMismatch, match=r"checkpoint ls \S+` names it\): `gba-hvd checkpoint rollback \S+ NAME"):
        launch([1], 30)


@pytest.mark.slow
def test_the_first_epoch_can_only_be_trained_again_from_the_start(training: Any, clicks: Any, tmp_path: Path) -> None:
    for n in (20, 30):
        job = training(epoch=0)
        job.state.register_callbacks([CheckpointCallback(str(tmp_path / "saved"))])
        train = gba_hvd.elastic.run(lambda state, job=job, n=n: job.epoch(clicks(n)))
        if n == 20:
            train(job.state)
            continue
        with pytest.raises(StateMismatch, match=r"start over.* discards all.*\(2 steps\): .* before epoch 0") as raised:
            train(job.state)
        assert "rollback" not in str(raised.value)


@pytest.mark.slow
def test_a_launch_after_a_rollback_trains_the_later_epoch_again(training: Any, clicks: Any, tmp_path: Path) -> None:
    place, steps, dense = tmp_path / "saved", [], []
    for epochs in ([0], [0, 1], [0, 1]):
        job = training(epoch=0)
        job.state.register_callbacks([CheckpointCallback(str(place))])
        diary = with_diary(job)

        @gba_hvd.elastic.run
        def train(state: Any, job: Any = job, epochs: list[int] = epochs) -> None:
            for state.epoch in epochs:
                job.epoch(clicks(20))

        train(job.state)
        steps.append([line for line in diary.received if line.startswith("step")])
        dense.append(torch.cat([parameter.detach().flatten() for parameter in job.model.parameters()]))
        if len(steps) == 2:
            store = open_store(str(place))
            roll_back(store, plan_rollback(store, manifest_names(store)[0]))
    assert steps == [["step 1", "step 2"], ["step 3", "step 4"], ["step 3", "step 4"]]
    assert torch.equal(dense[1], dense[2])


def test_step_records_count_samples(training: Any, clicks: Any) -> None:
    job, records = training(), []

    class Records(gba_hvd.Callback):
        def on_step(self, record: gba_hvd.StepRecord) -> None:
            records.append(record)

    job.state.register_callbacks([Records()])
    job.epoch(clicks(20))
    assert [(r.step, r.epoch, r.samples, r.samples_applied, r.workers) for r in records] == [
        (1, 0, 16, 16, 1),
        (2, 0, 4, 20, 1),
    ]
    assert all(r.loss is not None and r.seconds > 0 and r.mode == "allreduce" for r in records)


@pytest.mark.parametrize("by_servers", [False, True])
def test_a_step_whose_function_raises_is_reported_as_it_is_counted(
    training: Any, clicks: Any, by_servers: bool
) -> None:
    job, records = training(), list[gba_hvd.StepRecord]()
    callback = gba_hvd.Callback()
    callback.on_step = records.append  # type: ignore[method-assign]
    job.state.register_callbacks([callback])
    job.state.on_step(lambda: 1 // 0)
    job.state.sync()
    learned = JobPosition(step=1, epoch=4, account={"total": 16, "applied": 16})
    with pytest.raises(ZeroDivisionError):
        job.state.engine.observe(learned) if by_servers else job.epoch(clicks(20))
    assert [(one.step, one.samples_applied) for one in records] == [(1, 16)]
    assert (job.state.step, job.state.samples.applied) == (1, 16)
    assert job.state.engine.progress.cursor.epoch == (4 if by_servers else 0)


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError("broken"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (SystemExit(3), "FAILED")],
)
def test_how_it_ended_is_reported_and_the_error_goes_on(training: Any, error: BaseException, status: str) -> None:
    job = training()
    diary = with_diary(job)

    @gba_hvd.elastic.run
    def train(state: Any) -> None:
        raise error

    with pytest.raises(type(error)):
        train(job.state)
    assert diary.received[-1] == f"end {status} {error!r}"
    assert not job.tables.memory.folder.exists()


def test_a_script_that_ends_its_training_by_sys_exit_saves_as_one_that_returns(
    training: Any, clicks: Any, tmp_path: Path
) -> None:
    job = training()
    diary = with_diary(job)
    job.state.register_callbacks([CheckpointCallback(str(tmp_path / "saved"), every_s=3600.0)])

    @gba_hvd.elastic.run
    def train(state: Any) -> None:
        job.epoch(clicks(20))
        sys.exit(0)

    with pytest.raises(SystemExit, match="0"):
        train(job.state)
    assert diary.received[-1] == "end FINISHED None"
    assert recovery.open_checkpoint(str(tmp_path / "saved")).step == job.state.step > 0


def test_sigterm_is_an_interruption(training: Any) -> None:
    job = training()
    diary = with_diary(job)
    before = signal.getsignal(signal.SIGTERM)

    @gba_hvd.elastic.run
    def train(state: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], 10)  # the handler runs at once

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        train(job.state)
    assert diary.received[-1] == "end KILLED KeyboardInterrupt('SIGTERM')"
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_end_is_reported_though_the_launcher_signals_a_worker_that_ends_with_another_one(training: Any) -> None:
    class Slow(gba_hvd.Callback):
        def __init__(self, n_signals: int) -> None:
            self.n_signals = n_signals

        def on_end(self, status: str, error: BaseException | None) -> None:
            for _ in range(self.n_signals):
                os.kill(os.getpid(), signal.SIGTERM)
                signal.sigtimedwait([], 0.01)
            reported.append(status)

    @gba_hvd.elastic.run
    def train(state: Any) -> None:
        raise RuntimeError("another worker has left")

    reported: list[str] = []
    for n_signals, expected in ((1, ["FAILED"]), (2, [])):  # a second signal is meant for what it does now
        reported.clear()
        job = training()
        job.state.register_callbacks([Slow(n_signals)])
        with pytest.raises(RuntimeError, match="another worker"):
            train(job.state)
        assert reported == expected


@pytest.mark.parametrize("at", ["report", "close"])
def test_one_sigterm_does_not_cut_short_how_a_finished_worker_ends(training: Any, at: str) -> None:
    class Slow(gba_hvd.Callback):
        def on_end(self, status: str, error: BaseException | None) -> None:
            if at == "report":
                sigterm()
            reported.append(status)

    def sigterm() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], 0.01)
        signals.append(at)

    reported: list[str] = []
    signals: list[str] = []
    job = training()
    job.state.register_callbacks([Slow()])
    if at == "close":
        job.state.saving.close = sigterm
    assert gba_hvd.elastic.run(lambda state: "done")(job.state) == "done"
    assert reported == ["FINISHED"] and signals == [at] and not job.tables.memory.folder.exists()


def test_a_second_sigterm_ends_a_finished_worker_that_closes(training: Any) -> None:
    def sigterm() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 0.01)

    job = training()
    job.state.saving.close = sigterm
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        gba_hvd.elastic.run(lambda state: "done")(job.state)
    job.tables.memory.close(remove=True)


def test_what_fails_after_training_fails_in_spite_of_a_sigterm(training: Any) -> None:
    class Fails(gba_hvd.Callback):
        def on_end(self, status: str, error: BaseException | None) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            raise OSError("tracking is away")

    job = training()
    job.state.register_callbacks([Fails()])
    with pytest.raises(OSError, match="tracking is away"):
        gba_hvd.elastic.run(lambda state: None)(job.state)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_job_is_interrupted_while_it_waits_for_the_claim_of_another(
    training: Any, tmp_path: Path, number: signal.Signals
) -> None:
    claims.claim(open_store(str(tmp_path / "store")), "killed", lease_s=120.0)
    job = training()
    job.state.register_callbacks([CheckpointCallback(str(tmp_path / "store"), policy="full", lease_s=0.1)])
    diary = with_diary(job)

    class SignalWhenItWaits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("waiting for up to 120 s for a renewal by job 'killed'"):
                os.kill(os.getpid(), number)

    log, handler = logging.getLogger("recovery"), SignalWhenItWaits()
    log.addHandler(handler)
    try:
        with pytest.raises(KeyboardInterrupt) as ended:
            gba_hvd.elastic.run(lambda state: None)(job.state)
    finally:
        log.removeHandler(handler)
    assert ended.value.__context__ is None, "nothing else went wrong"
    text = "SIGTERM" if number == signal.SIGTERM else ""
    assert str(ended.value) == text and diary.received == ["interrupted", f"end KILLED {ended.value!r}"]


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt("SIGTERM"), None])
def test_the_claim_is_released_before_the_end_is_reported(
    training: Any, tmp_path: Path, error: BaseException | None
) -> None:
    seen = []

    class Looks(gba_hvd.Callback):
        def on_end(self, status: str, error: BaseException | None) -> None:
            seen.extend(claims.claims_of(open_store(str(tmp_path / "store")).names("claims/")))

    job = training()
    job.state.register_callbacks([CheckpointCallback(str(tmp_path / "store"), policy="full"), Looks()])
    job.state.sync()
    job.state.close("FINISHED" if error is None else "KILLED", error)
    assert [one.is_closed for one in seen] == [True]
    job.tables.memory.close(remove=True)


def test_closing_twice_reports_the_end_once(training: Any) -> None:
    job = training()
    diary = with_diary(job)
    job.state.sync()
    job.state.close()
    job.state.close("FAILED")
    assert diary.received == ["job", "started", "nothing_trained", "finished", "end FINISHED None"]


def test_the_memory_is_freed_even_when_a_callback_fails_at_the_end(training: Any) -> None:
    job = training()

    class Fails(gba_hvd.Callback):
        def on_end(self, status: str, error: BaseException | None) -> None:
            raise OSError("tracking is away")

    job.state.register_callbacks([Fails()])
    job.state.sync()
    with pytest.raises(OSError, match="tracking is away"):
        job.state.close()
    assert not job.tables.memory.folder.exists()


# --- what travels ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_late_joiner_goes_on_like_those_it_joins(training: Any, clicks: Any) -> None:
    def a_job() -> Any:
        job = training(dense=lambda p: torch.optim.Adam(p, lr=0.1), epoch=0, best=0.0, history=[], mean=torch.zeros(2))
        job.scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, gamma=0.5)
        job.state.training_state.names.append("scheduler")
        job.state.scheduler = job.scheduler
        return job

    old, new, dataset = a_job(), a_job(), clicks(50)
    diaries = with_diary(old), with_diary(new)
    old.epoch(dataset)
    old.scheduler.step()
    old.state.epoch, old.state.best, old.state.history, old.state.mean = 1, 0.75, [0.5, (1, None)], torch.ones(2)
    new.state.sync()
    new.state.training_state.load_state_dict(
        state_codec.decode(state_codec.encode(old.state.training_state.state_dict()))
    )
    assert (new.state.step, new.state.epoch, new.state.best, new.state.history) == (4, 1, 0.75, [0.5, (1, None)])
    assert torch.equal(new.state.mean, torch.ones(2))
    assert new.state.samples == old.state.samples
    assert diaries[1].count == 4
    assert new.optimizer.param_groups[-1]["lr"] == old.optimizer.param_groups[-1]["lr"] == 0.25
    new.tables.memory.flat[:] = old.tables.memory.flat
    for job in (old, new):
        job.epoch(dataset)
        job.scheduler.step()
    assert new.optimizer.param_groups[-1]["lr"] == 0.125
    for name, value in {**old.all_dense(), **old.all_rows()}.items():
        assert np.array_equal(value, {**new.all_dense(), **new.all_rows()}[name]), name


def test_a_value_that_cannot_travel_is_named(training: Any) -> None:
    job = training(sampler=object())
    with pytest.raises(BadInput, match=r"state\['values'\]\['sampler'\] is a object, which cannot travel"):
        job.state.sync()


@pytest.mark.parametrize("name", ["step", "samples", "world", "sync", "report", "engine", "saving", "finished_epoch"])
def test_names_the_state_needs_itself_are_refused(training: Any, name: str) -> None:
    with pytest.raises(BadInput, match=f"TorchState has a '{name}' of its own"):
        training(**{name: 1})


def test_an_optimizer_that_is_not_distributed_is_refused() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(BadInput, match=r"needs an optimizer made by gba_hvd\.DistributedOptimizer"):
        gba_hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1))


# --- failures and changes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", [0, 2, 3, 5])
def test_a_failed_step_is_computed_again_and_nothing_else(training: Any, clicks: Any, fails_at: int) -> None:
    job, whole, dataset = training(epoch=0), training(epoch=0), clicks(40)
    for batch in gba_hvd.batches(dataset, job.state):
        job.optimizer.zero_grad()
        job.loss(batch).backward()
        if batch.index == fails_at:
            break
        job.optimizer.step()
    job.state.restore()
    job.state.on_reset()
    job.epoch(dataset)
    whole.epoch(dataset)
    assert (job.state.step, job.state.samples.applied) == (3, 40)
    for name, value in {**whole.all_dense(), **whole.all_rows()}.items():
        assert np.array_equal(value, {**job.all_dense(), **job.all_rows()}[name]), name


@pytest.mark.parametrize(("policy", "beside"), [("delta", 4), ("full", 0)])
def test_a_start_asks_for_the_room_of_what_checkpoints_keep_of_rows(
    training: Any, tmp_path: Path, policy: str, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    reserve = ShardMemory.reserve

    def note(memory: ShardMemory, shards: list[int], bytes_per_row: int = 0) -> None:
        asked.append(bytes_per_row)
        reserve(memory, shards, bytes_per_row)

    monkeypatch.setattr(ShardMemory, "reserve", note)
    job = training(epoch=0)
    job.state.register_callbacks([CheckpointCallback(str(tmp_path), policy=policy)])
    job.state.sync()
    assert asked == [beside]
    job.state.close()


@pytest.mark.parametrize("cause", [ServerRefused("no room in /dev/shm: enlarge it"), ServerLost("no answer")])
def test_servers_that_refuse_are_tried_again_later_and_their_words_are_the_reason(
    training: Any, cause: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = training(epoch=0)
    callback, events = gba_hvd.GBACallback("gba"), list[gba_hvd.Event]()
    job.state.register_callbacks([callback])
    job.state.sync()
    monkeypatch.setattr(job.state.engine, "emit", lambda event, only_here=False: events.append(event))
    monkeypatch.setattr(job.state.engine.mode, "recover", lambda: None)
    monkeypatch.setattr(job.state.engine.mode, "name", "gba")
    try:
        raise worker_lost(str(cause)) from cause
    except Exception:
        job.state.restore()
    is_refusal = isinstance(cause, ServerRefused)
    assert callback.paused_until == (20 if is_refusal else 0)
    assert callback.asked.obstacle == (str(cause) if is_refusal else "")
    assert _rank_state(job.state.engine, True, 0).refused == (MODE_NUMBERS["gba"] if is_refusal else 0)
    told = [event.message for event in events if event.kind == "switch_failed"]
    text = f"mode gba was left, allreduce continues (tried again after 20 steps or more): {cause}"
    assert told == [text] * is_refusal


def test_a_mode_whose_servers_refused_another_worker_is_tried_again_later_by_all(
    training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, of_row, events = training(epoch=0), RankState.of_row, list[gba_hvd.Event]()
    callback = gba_hvd.GBACallback("gba")
    job.state.register_callbacks([callback])
    job.state.sync()
    requests = job.state.engine.participant(ModeRequests)
    monkeypatch.setattr(job.state.engine, "emit", lambda event, only_here=False: events.append(event))
    monkeypatch.setattr(RankState, "of_row", lambda row: replace(of_row(row), refused=MODE_NUMBERS["gba"]))
    for _ in range(2):  # formed again before the mode is entered: the same refusal
        job.state.sync()
        assert (callback.paused_until, requests.refused) == (20, MODE_NUMBERS["gba"])
    why = "servers refused a worker, which is rank 0 now: its log says why"
    (told,) = [event.message for event in events if event.kind == "switch_failed"]
    assert told == f"mode gba was left, allreduce continues (tried again after 20 steps or more): {why}"
    assert callback.asked.obstacle == why
    requests.mode_entered()
    assert requests.refused == 0
    n_events, until = len(events), callback.paused_until
    requests.refused_elsewhere({0: MODE_NUMBERS["gba"]}, is_new=True)  # a worker that came after it
    requests.refused_elsewhere({0: MODE_NUMBERS["gba"]})
    assert (requests.refused, len(events), callback.paused_until) == (MODE_NUMBERS["gba"], n_events, until)


@pytest.mark.parametrize(("change", "comes"), [(1, False), (2, True), (3, True)], ids=["removed", "added", "both"])
def test_a_pause_for_workers_that_come_is_announced_once_and_none_for_those_that_go(
    training: Any, clicks: Any, change: int, comes: bool
) -> None:
    job, dataset = training(epoch=0), clicks(40)
    diary = with_diary(job)
    job.epoch(dataset)
    job.state.on_hosts_updated(0, change)
    for _ in range(2):
        job.state.report_pause()
    assert diary.received.count("workers_awaited") == comes


def test_hosts_that_come_or_go_interrupt_between_two_steps(training: Any, clicks: Any) -> None:
    exceptions = pytest.importorskip("horovod.common.exceptions")
    job, whole, dataset = training(epoch=0), training(epoch=0), clicks(40)
    diary = with_diary(job)

    def train() -> None:
        for batch in gba_hvd.batches(dataset, job.state):
            if batch.index == 5:
                job.state.on_hosts_updated(0, 1)
            job.micro_step(batch)

    with pytest.raises(exceptions.HostsUpdatedInterrupt) as interrupt:
        train()
    assert not interrupt.value.skip_sync
    assert job.state.step == 2
    job.state.on_reset()
    job.epoch(dataset)
    assert diary.received == [
        *("job", "started", "step 1", "step 2", "job", "membership"), "training_continues", "step 3"
    ]  # fmt: skip
    assert job.optimizer.engine.progress.restarts == 1
    assert job.optimizer.engine.progress.changes == 0, "it has the same worker"
    whole.epoch(dataset)
    for name, value in {**whole.all_dense(), **whole.all_rows()}.items():
        assert np.array_equal(value, {**job.all_dense(), **job.all_rows()}[name]), name


def test_a_world_met_beside_an_asynchronous_mode_is_reported_before_the_next_one(training: Any, clicks: Any) -> None:
    """The mode may end before the training thread learns of it; the world after it is another."""
    job = training(epoch=0)
    diary = with_diary(job)
    state = job.state
    state.sync()
    met = SoloWorld()  # another one
    joined = JoinResult(state.job_id, 0, 1, True, True, 0, 0, host=1, asynchronous=True, membership=1)
    state.late_joiners._met.append((joined, met, None, None, {}))
    state.on_reset()
    state.sync()
    assert state.world is not met
    assert diary.received.count("job") == 3
    state.late_joiners.report()  # as within the next asynchronous mode
    assert state.world is not met
    assert diary.received.count("job") == 3


def test_servers_are_asked_to_leave_a_mode_before_old_writers_are_killed(
    training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = list[str]()
    monkeypatch.setattr(leave_ps, "retire_servers", lambda *job: order.append("asked"))
    monkeypatch.setattr(ShardMemory, "end_old_writers", lambda memory, members: order.append("killed"))
    training(epoch=0).state.sync()
    assert order == ["asked", "killed"]


def test_changes_of_workers_are_worlds_of_other_workers() -> None:
    progress, both = Progress(None, StepHooks()), frozenset({(1, 10), (1, 11)})
    progress.world_formed(both, is_restart=False)
    for workers in ({(1, 10)}, {(1, 10), (1, 12)}, {(1, 10), (1, 12)}):
        progress.world_formed(frozenset(workers), is_restart=True)
    assert (progress.restarts, progress.changes, progress.same_workers) == (3, 2, True)
    successor = Progress(None, StepHooks())
    successor.load_state_dict(progress.state_dict())
    assert successor.changes == 2
    state = progress.state_dict()
    del state["changes"]
    successor.load_state_dict(state)
    assert successor.changes == 3


def test_reset_callbacks_run_after_a_change(training: Any) -> None:
    job, ran = training(), []
    job.state.register_reset_callbacks([lambda: ran.append(1), lambda: ran.append(2)])
    job.state.on_reset()
    assert ran == [1, 2]


def test_horovod_verbs_of_other_scripts_do_no_harm(training: Any, clicks: Any) -> None:
    job = training()
    for batch in gba_hvd.batches(clicks(20), job.state):
        job.micro_step(batch)
        job.state.commit()
        job.state.check_host_updates()
        job.state.save()
    assert job.state.step == 2


@pytest.mark.parametrize(("saved", "asked"), [("auto", "gba"), ("gba", "allreduce")])
def test_a_job_that_goes_on_is_in_the_mode_that_its_script_asks_for(training: Any, saved: str, asked: str) -> None:
    first, job = training(), training()
    first.state.register_callbacks([gba_hvd.GBACallback(saved)])
    job.state.register_callbacks([gba_hvd.GBACallback(asked)])
    job.state.training_state.resume(state_codec.decode(state_codec.encode(first.state.training_state.state_dict())))
    assert switching_of(job.state.engine).mode == asked  # type: ignore[union-attr]


def test_rank_0_logs_warnings_beside_reporting_callbacks(training: Any, caplog: pytest.LogCaptureFixture) -> None:
    job = training(epoch=0)
    diary = with_diary(job)
    engine = job.state.engine
    engine.emit(gba_hvd.Event("membership", 3, "two workers"))
    engine.emit(gba_hvd.Event("switch_failed", 3, "still in allreduce: no server; see its log", level="warning"))
    assert diary.received[-2:] == ["membership", "switch_failed"]
    assert [r.getMessage() for r in caplog.records] == [
        "[switch failed] step 3: still in allreduce: no server; see its log"
    ]
