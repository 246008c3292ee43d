"""What the log has beside callbacks, and what is reported of tables that nobody looks up."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gba_hvd
from gba_hvd.compression.bypass import BypassDecision
from gba_hvd.training import reports
from gba_hvd.training.job_state import LocalHost
from tests.unit.thread_world import EventLog, Workers

TABLES = {"user": (20, 4), "item": (7, 3), "shop": (50, 4), "word": gba_hvd.Table(dim=4, keys="hash64", capacity=64)}


@pytest.mark.parametrize("shows_progress", [False, True])
def test_the_start_and_notes_are_one_line_of_the_log_or_of_the_progress_and_its_summary(
    training: Any, caplog: pytest.LogCaptureFixture, shows_progress: bool
) -> None:
    job, shown = training(), io.StringIO()
    job.state.register_callbacks([gba_hvd.ProgressLine(stream=shown)] if shows_progress else [])
    with caplog.at_level("INFO", "gba_hvd"):
        job.state.sync()
        job.state.engine.emit(gba_hvd.Event("memory_not_kept", 21, "it takes 0.4 ms"))
        job.state.engine.emit(gba_hvd.Event("decision", 21, "xyzzy"))
        for callback in job.state.engine.callbacks:
            callback.on_end("KILLED", None)
    said = f"{caplog.text}{shown.getvalue()}"
    assert said.count("[started] step 0: 1 worker on 1 host") == 1
    assert said.count("[memory not kept] step 21: it takes 0.4 ms") == 1
    assert "xyzzy" not in said
    assert ("[started]" in shown.getvalue()) == shows_progress


def test_faults_that_last_are_said_once_at_the_start(training: Any, clicks: Any, caplog: Any) -> None:
    job, log = training(), EventLog()
    job.state.register_callbacks([log, gba_hvd.FaultSchedule().slow(worker=0, factor=2, to_step=1)])
    with caplog.at_level("INFO", "gba_hvd"):
        job.epoch(clicks())
    (event,) = log.of("faults_lasting")
    assert event.level == "info" and event.data["faults"] == [{"kind": "slow", "worker": 0, "factor": 2, "to_step": 1}]
    assert caplog.text.count("the FaultSchedule says: worker 0 takes 2 times as long from step 0 until 1") == 1


def test_a_state_dict_that_is_loaded_after_the_first_step_is_a_warning_once(
    training: Any, clicks: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, log = training(epoch=0), EventLog()
    job.state.register_callbacks([log])
    best = copy.deepcopy(job.model.state_dict())
    job.model.load_state_dict(best)
    job.state.sync()
    job.model.load_state_dict(best)
    job.epoch(clicks())
    job.model.mlp.load_state_dict(job.model.mlp.state_dict())
    state = job.state.training_state
    monkeypatch.setattr(state, "share", lambda source: state.load_state_dict(state.state_dict()))  # as of another rank
    job.state.on_reset()
    job.state.sync()
    assert not log.of("rows_not_loaded")
    for _ in range(2):
        job.model.load_state_dict(best)
    (event,) = log.of("rows_not_loaded")
    assert "stay those of step 4" in event.message and "keep_best" in event.message
    assert caplog.text.count("[rows not loaded]") == 1


def test_a_state_dict_that_is_loaded_after_the_end_is_a_warning_in_the_log(
    training: Any, clicks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    job, log = training(epoch=0), EventLog()
    job.state.register_callbacks([log])
    gba_hvd.elastic.run(lambda state: job.epoch(clicks(20)))(job.state)
    job.model.load_state_dict(job.model.state_dict())
    assert caplog.text.count("[rows not loaded] step 2") == 1 and not log.of("rows_not_loaded")


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_that_the_script_clips_are_a_warning_once(training: Any, clicks: Any, frozen: bool) -> None:
    job, log = training(epoch=0), EventLog()
    job.state.register_callbacks([log])
    job.tables.requires_grad_(not frozen)
    for number, batch in enumerate(gba_hvd.batches(clicks(), job.state)):
        job.optimizer.zero_grad()
        job.loss(batch).backward()
        if number:
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1e-3)
        job.optimizer.step()
    assert len(log.of("gradients_changed")) == (not frozen)
    assert all("max_norm=" in event.message for event in log.of("gradients_changed"))


def test_a_loop_as_documented_has_no_warning_of_gradients_or_rates(training: Any, clicks: Any) -> None:
    job, log = training(epoch=0, more={"max_norm": 0.1}), EventLog()
    job.state.register_callbacks([log])
    for job.state.epoch, job.optimizer.param_groups[0]["lr"] in enumerate((0.5, 0.25)):
        job.epoch(clicks())
    assert not log.of("gradients_changed") and not log.of("rate_changed_within_step")


def test_a_rate_that_changes_within_a_step_is_a_warning_once(training: Any, clicks: Any) -> None:
    job, log = training(epoch=0), EventLog()
    job.state.register_callbacks([log])
    for batch in gba_hvd.batches(clicks(), job.state):
        job.micro_step(batch)
        job.optimizer.param_groups[0]["lr"] *= 0.9
    (event,) = log.of("rate_changed_within_step")
    assert event.step == 0 and "state.on_step()" in event.message


def unused(log: EventLog) -> list[Any]:
    return [event.data["tables"] for event in log.of("table_unused")]


def test_tables_that_nobody_looks_up_are_a_warning_after_the_first_epoch(
    training: Any, clicks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    job, log = training(tables=TABLES, epoch=0), EventLog()
    job.state.register_callbacks([log])
    job.epoch(clicks())
    assert unused(log) == [["shop", "word"]]
    (event,) = log.of("table_unused")
    assert event.level == "warning" and event.message.startswith("'shop' (50 rows of 4), 'word' (")
    assert caplog.text.count("the first epoch has looked up no row here") == 1
    job.state.epoch = 1
    job.epoch(clicks())
    assert len(log.of("table_unused")) == 1


def test_a_table_that_is_looked_up_without_a_gradient_is_used(training: Any, clicks: Any) -> None:
    job, log = training(tables={**TABLES, "shop": (50, 4)}, epoch=0), EventLog()
    job.state.register_callbacks([log])
    job.state.sync()
    job.tables({"shop": ids_of([3, 4]), "word": ids_of([2**60])})
    job.epoch(clicks())
    assert unused(log) == []


def test_what_another_worker_looks_up_is_used(on_host: Any, workers: Workers, clicks: Any) -> None:
    """Its gradients have changed rows."""
    jobs = [on_host("a", tables={"user": (20, 4), "item": (7, 3), "shop": (50, 4)}) for _ in range(2)]
    log = EventLog()

    def run(job: Any) -> None:
        job.state.register_callbacks([log] if job is jobs[0] else [])
        job.state.sync()
        own = job.loss
        if job.state.world.rank == 1:
            shop = ids_of([3])
            job.loss = lambda batch: own(batch) + job.tables({"shop": shop})["shop"].sum()
        job.epoch(clicks())

    workers.together(jobs, run)
    assert unused(log) == []


def ids_of(ids: list[int]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def test_a_decision_about_compressing_names_its_compressor(training: Any) -> None:
    job, log = training(compression=gba_hvd.Compression.int8, row_compression=gba_hvd.Compression.fp16), EventLog()
    job.state.register_callbacks([log])
    job.state.sync()
    model = job.state.engine.model
    for compressor in (model.compression, model.row_coder):
        compressor.decisions[:] = [BypassDecision(False, "why", True)]
    job.state.engine.reports.compression()
    said = [(event.data["compressor"], event.data["compress"]) for event in log.of("compression")]
    assert said == [("int8", False), ("fp16", False)]


@pytest.mark.parametrize(("is_lost", "before", "cause"), [(False, 1, "joined"), (False, 2, "left"), (True, 2, "loss")])
def test_a_pause_is_an_event_with_its_cause_and_no_part_of_a_step_s_time(
    training: Any, clicks: Any, is_lost: bool, before: int, cause: str
) -> None:
    job, log, steps = training(epoch=0), EventLog(), StepLog()
    job.state.register_callbacks([log, steps])
    reports = job.state.engine.reports
    job.epoch(clicks())
    assert log.of("training_continues") == [], "the start is no pause"
    reports._ended_s -= 1000.0  # the newest step ended so long ago
    reports.pauses._worked_unix_s -= 1000.0
    if is_lost:
        reports.worker_lost()
    reports.world_forms(before)
    reports.after_world_forms(before)
    job.state.epoch, steps.seconds = 1, []
    job.epoch(clicks())
    (event,) = log.of("training_continues")
    assert event.data["cause"] == cause and 1000.0 <= event.data["seconds"] < 2000.0
    assert event.data["so_far_s"] == event.data["seconds"]
    assert len(steps.seconds) > 1 and max(steps.seconds) < 1000.0


@pytest.mark.parametrize(("n", "counts"), [((1, 0), [1, 0]), ((0, 1), [0, 1]), ((2, 1), None), ((0, 0), None)])
def test_scores_that_only_some_workers_report_are_a_warning(
    on_host: Any, workers: Workers, clicks: Any, n: tuple[int, int], counts: list[int] | None
) -> None:
    jobs = [on_host("a", epoch=0) for _ in range(2)]
    log = EventLog()
    jobs[0].state.register_callbacks([log])

    def run(job: Any) -> None:
        job.epoch(clicks())
        for _ in range(3):
            gba_hvd.evaluate(job.model, clicks(), job.state, batch=8, activation="sigmoid")
            for _ in range(n[job.state.world.rank]):
                job.state.report(valid_auc=0.7)
            if job.state.world.rank == 0:
                job.state.report(seconds=3.0)

    workers.together(jobs, run)
    assert [event.data["reports"] for event in log.of("reported_by_some")] == ([] if counts is None else [counts])


class StepLog(gba_hvd.Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step(self, record: gba_hvd.StepRecord) -> None:
        self.seconds.append(record.seconds)


@pytest.mark.parametrize(("why", "at_s"), [("", 20.0), ("its port is taken", 5.0)])
def test_servers_are_missing_where_they_are_late_or_cannot_start(
    training: Any, monkeypatch: pytest.MonkeyPatch, why: str, at_s: float
) -> None:
    job, log, now = training(), EventLog(), [100.0]
    job.state.register_callbacks([log])
    job.state.sync()
    own = reports.Reports(
        job.state.engine.model, job.state.engine.progress,
        LocalHost(server=SimpleNamespace(why_not_started=lambda: why, why_not_ready=lambda to_enter: "it is not up")),
        lambda: job.state.engine.world, [SimpleNamespace(waiting=["mode gba"], waits_to_enter=True)], None,
    )  # type: ignore[arg-type]  # fmt: skip
    own.callbacks = [log]
    monkeypatch.setattr(reports.time, "monotonic", lambda: now[0])
    for _ in range(22):
        own.missing_servers()
        now[0] += 1.0
    assert [event.data["seconds"] for event in log.of("server_missing")][:1] == [at_s]
