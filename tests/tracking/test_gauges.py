"""Readings between events: worked out from counters, thinned to points, and read by a person."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest

from gba_hvd.callbacks import Event, StepRecord
from gba_hvd.tracking import MLflowCallback, ProgressLine
from gba_hvd.tracking import gauges as g
from gba_hvd.tracking.plots import MODE, THROUGHPUT, WORKERS
from gba_hvd.tracking.recovery_records import events_in_force, superseded_words
from gba_hvd.tracking.run_history import RunHistory, from_files
from gba_hvd.tracking.spool_delivery import SpoolDelivery
from tests.tracking.conftest import event, job, step
from tests.tracking.reported_job import report_job


def test_what_was_counted_before_a_resume_is_no_reading_of_now():
    before = {"staleness": {"0": 10, "1": 3}, "lags": {"2": 13}, "gaps": {"0": [13, 2.0, 6.5, 42]}}
    readings = g.Readings()
    readings.begin({"manifest": "m-3", **before})
    assert readings.take(before) == {}
    read = readings.take({"lags": {"2": 13, "4": 1}, "gaps": {"0": [14, 3.0, 7.5, 42]}})
    assert read == {g.DENSE_AGE_MEAN: 4, g.DENSE_AGE_MAX: 4, f"{g.GAP}0": 1.0, f"{g.GAP_IN_STEPS}0": 1.0}


def test_staleness_is_that_of_the_micro_batches_since_the_last_reading():
    readings = g.Readings()
    readings.take({"staleness": {"0": 10, "1": 3}})
    read = readings.take(
        {"staleness": {"0": 10, "1": 4, "3": 2}, "dropped": 64, "lost": 0, "refused": 1, "reissued": 2}
    )
    assert read == {
        g.STALENESS_MEAN: (1 * 1 + 3 * 2) / 3, g.STALENESS_MAX: 3,
        g.DROPPED: 64, g.LOST: 0, g.REFUSED: 1, g.REISSUED: 2,
    }  # fmt: skip


def test_ages_and_gaps_are_those_since_the_last_reading():
    readings = g.Readings()
    first = readings.take({"lags": {"1": 4}, "gaps": {"0": [4, 2.0, 8.0]}})
    assert first == {g.DENSE_AGE_MEAN: 1, g.DENSE_AGE_MAX: 1, "job/gap/rank_0": 0.5, "job/gap_in_steps/rank_0": 2.0}
    again = readings.take({"lags": {"1": 4, "5": 1}, "gaps": {"0": [6, 4.0, 9.0], "1": [1, 3.0, 6.0]}})
    assert again == {
        g.DENSE_AGE_MEAN: 5, g.DENSE_AGE_MAX: 5, "job/gap/rank_0": 1.0, "job/gap_in_steps/rank_0": 0.5,
        "job/gap/rank_1": 3.0, "job/gap_in_steps/rank_1": 6.0,
    }  # fmt: skip
    assert readings.take({"gaps": {"0": [2, 1.0, 1.0]}})["job/gap/rank_0"] == 0.5, "the server started again"
    assert readings.take({"gaps": {"0": [4, 0.8, 1.0]}})["job/gap/rank_0"] == 0.2, "again, and it had more pushes since"
    both = g.Readings()
    both.take({"gaps": {"0": [100, 10.0, 50.0, 7], "1": [200, 100.0, 900.0, 8]}})
    after = both.take({"gaps": {"0": [210, 110.0, 990.0, 8], "1": [10, 2.0, 5.0, 9]}})  # worker 7 died, 9 came
    assert after == {
        "job/gap/rank_0": 1.0, "job/gap_in_steps/rank_0": 9.0, "job/gap/rank_1": 0.2, "job/gap_in_steps/rank_1": 0.5,
    }  # fmt: skip
    assert g.rank_of("job/gap/rank_3", g.GAP) == 3 and g.rank_of("job/gap/rank_3") is None
    assert g.point_of("job/gap/rank_3", [1.0, 3.0]) == 2.0


def test_without_a_new_micro_batch_there_is_no_staleness_to_report():
    readings = g.Readings()
    assert readings.take({"staleness": {"0": 5}}) == {g.STALENESS_MEAN: 0, g.STALENESS_MAX: 0}
    assert readings.take({"staleness": {"0": 5}}) == {}


def test_the_pace_of_a_worker_is_named_by_its_rank():
    assert g.Readings().take({"seconds": {"0": 0.01, "2": 0.06, "3": 0.0}}) == {
        "job/ms_per_micro_batch/rank_0": 10.0,
        "job/ms_per_micro_batch/rank_2": 60.0,
    }
    assert g.rank_of(g.pace_of(17)) == 17
    assert g.rank_of("job/ms_per_micro_batch/rank_") is g.rank_of("train/loss") is None


def test_the_samples_computed_at_once_are_a_gauge():
    assert g.Readings().take({"elp": 1024}) == {g.ELP: 1024.0}


def test_bytes_of_all_workers_and_what_is_decided_by_are_gauges():
    data = {"bytes_sent": 10, "bytes_received": 20, "gain": 1.25}
    data |= {"allreduce_samples_per_s": 800, "gba_samples_per_s": 1000}
    assert g.Readings().take(data) == {
        g.BYTES_SENT: 10.0, g.BYTES_RECEIVED: 20.0, g.GAIN: 1.25, "job/allreduce_samples_per_s": 800.0,
        "job/gba_samples_per_s": 1000.0,
    }  # fmt: skip
    assert g.point_of(g.GAIN, [1.0, 1.5]) == 1.5


def test_several_readings_make_one_point():
    assert g.point_of(g.STALENESS_MEAN, [1.0, 2.0]) == 1.5
    assert g.point_of(g.pace_of(0), [10.0, 20.0]) == 15.0
    assert g.point_of(g.STALENESS_MAX, [4.0, 1.0]) == 4.0
    assert g.point_of(g.DROPPED, [64.0, 128.0]) == 128.0


def test_a_histogram_is_read_as_words():
    assert g.whole_numbers({"10": 1, "2": 0, "0": 3}) == {0: 3, 10: 1}
    assert g.staleness_words({0: 3, 10: 1}) == "mean 2.50, max 10 (0: 75%, 10: 25%)"
    assert g.staleness_words({0: 9999, 1: 1}) == "mean 0.00, max 1 (0: 100%, 1: <1%)"
    many = g.staleness_words(dict.fromkeys(range(20), 1))
    assert many.count("%") == 6


# --- the progress line -----------------------------------------------------------------------------------------------


def rates(k: int = 1, **data: Any) -> Event:
    return Event("rates", k, "seconds per micro-batch by worker: ...", data)


def lines_of(*history_of: StepRecord | Event) -> list[str]:
    stream = io.StringIO()
    progress = ProgressLine(stream=stream, clock=lambda: 0.0)
    progress.on_job(job("j"))
    for one in history_of:
        if isinstance(one, Event):
            progress.on_event(one)
        else:
            progress.on_step(one)
    progress.on_end("FINISHED", None)
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in stream.getvalue().splitlines()]


def test_in_asynchronous_modes_the_line_reports_staleness_and_drops():
    record = StepRecord(7, 0, 64, 448, 0.01, 3, "gba", 0.5)
    reading = rates(seconds={"0": 0.01}, staleness={"0": 3, "2": 1}, dropped=1280)
    assert lines_of(reading, record)[0].endswith("3 workers  gba, staleness 0.50, 1,280 samples dropped")
    assert lines_of(rates(dropped=0), record)[0].endswith("3 workers  gba")
    assert lines_of(reading, step(7))[0].endswith("1 worker  allreduce")


def test_readings_are_no_lines_of_their_own():
    assert [line.split()[0] for line in lines_of(rates(seconds={"0": 0.01}), step(7))] == [
        "step",
        "finished:",
        "samples:",
    ]


def test_the_summary_reports_switches_and_staleness():
    switch = Event("switch", 4, "allreduce -> gba: slow", {"from": "allreduce", "to": "gba"})
    finished = Event("finished", 7, "finished", {"staleness": {"0": 3, "1": 1}})
    lines = lines_of(step(7), switch, finished)
    assert lines[-2:] == ["switches: gba at step 4", "staleness: mean 0.25, max 1 (0: 75%, 1: 25%)"]


# --- points ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MLflowCallback:
    """Writes its spool; nothing sends it."""
    monkeypatch.setattr(SpoolDelivery, "look", lambda self, is_chief: None)
    return MLflowCallback(spool_dir=tmp_path / "spool", log_every_steps=10, system_metrics=False)


def history_of(callback: MLflowCallback) -> RunHistory:
    assert callback.spool is not None
    return from_files(callback.spool)


def steps_of(callback: MLflowCallback, key: str) -> list[int]:
    return [point.step for point in history_of(callback).history.get(key, ())]


def test_readings_come_with_the_points(quiet: MLflowCallback):
    quiet.on_job(job("j"))
    for k in range(1, 21):
        quiet.on_event(rates(k, seconds={"0": k / 1000}, dropped=k, staleness={str(s): 1 for s in range(k)}))
        quiet.on_step(step(k))
    story = history_of(quiet)
    assert [(p.step, p.value) for p in story.history[g.pace_of(0)]] == [(10, 5.5), (20, 15.5)]
    assert [p.value for p in story.history[g.DROPPED]] == [10, 20]
    assert [p.value for p in story.history[g.STALENESS_MAX]] == [9, 19]
    assert story.events == ()  # they would drown the others


@pytest.mark.parametrize("in_place", [False, True])
def test_each_change_of_the_workers_has_a_point(quiet: MLflowCallback, in_place: bool):
    """in_place: in an asynchronous mode, without another world."""
    n, now = {**dict.fromkeys(range(1, 14), 2), **dict.fromkeys(range(14, 19), 1)}, 2
    quiet.on_job(job("j", size=2))
    for k in range(1, 31):
        if n.get(k, 2) != now and not in_place:
            quiet.on_job(job("j", size=n.get(k, 2)))
        now = n.get(k, 2)
        quiet.on_step(step(k, workers=now))
    history = history_of(quiet).history
    found = [(point.step, point.value) for point in history[WORKERS]]
    assert [one for one in found if one[0] not in (13, 18)] == [(10, 2), (14, 1), (19, 2), (20, 2), (30, 2)]
    assert [one for one in found if one[0] in (13, 18)] == in_place * [(13, 2), (18, 1)]
    assert steps_of(quiet, THROUGHPUT) == [10, *in_place * (13, 18), 20, 30]


def test_readings_of_the_end_of_an_epoch_are_a_point_of_their_own(quiet: MLflowCallback):
    def size(n: int, k: int, **more: bool) -> Event:
        return rates(k, vocabulary={"user": {"size": n}}, **more)

    quiet.on_job(job("j"))
    for k in range(1, 14):
        quiet.on_step(step(k))
        if k == 3:
            quiet.on_event(size(10, k))
        if k == 11:
            quiet.on_event(size(40, k))  # older than the own point, so it is no later one
    quiet.on_event(size(60, 13, own_point=True))
    quiet.on_step(step(20))
    quiet.on_event(size(80, 20, own_point=True))  # there is no step after it
    points = history_of(quiet).history[g.vocabulary_of("user", "size")]
    assert [(point.step, point.value) for point in points] == [(10, 10), (13, 60), (20, 80)]


def test_only_the_chief_writes_points_of_their_own(quiet: MLflowCallback):
    quiet.on_job(job("j", rank=1, size=2))
    quiet.on_step(step(1))
    quiet.on_event(rates(1, vocabulary={"user": {"size": 60}}, own_point=True))
    quiet.on_job(job("j", rank=0, size=1))
    quiet.on_event(rates(2, vocabulary={"user": {"size": 70}}, own_point=True))
    points = history_of(quiet).history[g.vocabulary_of("user", "size")]
    assert [(point.step, point.value) for point in points] == [(2, 70)]


def test_no_point_is_missed_when_several_steps_are_received_at_once(quiet: MLflowCallback):
    quiet.on_job(job("j"))
    for k in (3, 8, 13, 18, 23, 49, 51):
        quiet.on_step(step(k))
    assert steps_of(quiet, THROUGHPUT) == [13, 23, 49, 51]


def test_a_worker_that_begins_in_the_middle_waits_for_the_next_point(quiet: MLflowCallback):
    quiet.on_job(job("j"))
    for k in range(105, 122):
        quiet.on_step(step(k))
    assert steps_of(quiet, THROUGHPUT) == [110, 120]


def test_no_point_is_the_mean_of_two_modes(quiet: MLflowCallback):
    quiet.on_job(job("j"))
    for k in range(1, 21):
        mode, seconds = ("gba", 0.01) if k > 14 else ("allreduce", 0.1)
        quiet.on_step(StepRecord(k, 0, 64, 64 * k, seconds, 1, mode, 0.5))
    history = history_of(quiet).history
    assert [(p.step, round(p.value)) for p in history[THROUGHPUT]] == [(10, 640), (14, 640), (20, 6400)]
    assert [p.value for p in history[MODE]] == [0, 0, 1]


def test_a_worker_that_becomes_chief_reports_no_old_readings(quiet: MLflowCallback):
    quiet.on_job(job("j", rank=1, size=2, is_host_leader=False))
    quiet.on_event(rates(5, seconds={"0": 0.01}))
    quiet.on_event(event("membership", 6))
    quiet.on_job(job("j"))
    quiet.on_step(step(10))
    story = history_of(quiet)
    assert [e["event"] for e in story.events] == ["membership"]
    assert g.pace_of(0) not in story.history


def test_a_switch_reported_by_two_chiefs_is_one_switch(quiet: MLflowCallback):
    quiet.on_job(job("j"))
    quiet.on_event(Event("switch", 5, "allreduce -> gba: slow", {"to": "gba"}, unix_s=1.0))
    quiet.on_event(Event("switch", 5, "allreduce -> gba: the chief's log has the reason", {"to": "gba"}, unix_s=2.0))
    quiet.on_event(event("membership", 5, "one"))
    quiet.on_event(event("membership", 5, "two"))
    story = history_of(quiet)
    assert [e["message"] for e in story.events] == ["allreduce -> gba: slow", "one", "two"]


def test_a_whole_job_is_reported_to_both_trackers(quiet: MLflowCallback):
    stream = io.StringIO()
    report_job([quiet, ProgressLine(stream=stream)])
    assert history_of(quiet).n_steps == 400
    assert "[switch] step 120: allreduce -> gba: worker 2 takes 6.1x the median" in stream.getvalue()
    assert "decision" not in stream.getvalue()


@pytest.mark.parametrize("clock_s", [1_795_829_872.123, 0.0])  # stands still, or was set back
def test_a_resume_supersedes_all_points_before_it_whatever_the_clock_says(
    clock_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(SpoolDelivery, "look", lambda self, is_chief: None)
    monkeypatch.setattr(time, "time_ns", lambda: 1_795_829_872_123_000_000)
    callback = MLflowCallback(spool_dir=tmp_path / "spool", log_every_steps=1, system_metrics=False)
    callback.on_job(job("j"))
    for k in range(1, 7):
        callback.on_step(step(k, loss=1.0))
    monkeypatch.setattr(time, "time_ns", lambda: int(clock_s * 1e9))
    callback.on_event(Event("resumed", 3, "full recovery", unix_s=clock_s))
    for k in range(4, 9):
        callback.on_step(step(k, loss=2.0))
    callback.on_event(Event("checkpoint_failed", 5, "no room", level="warning", unix_s=clock_s))
    assert callback.spool is not None
    found = from_files(callback.spool)
    assert [event["event"] for event in events_in_force(found.events)][-1] == "checkpoint_failed"
    assert [(point.step, point.value) for point in found.history["train/loss"]] == [
        (k, 1.0 if k <= 3 else 2.0) for k in range(1, 9)
    ]
    assert superseded_words(found.resumes, found.applied).startswith("steps 4 to 6 from before ")
