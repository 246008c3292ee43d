"""What records say of checkpoints and recoveries, and which of them are superseded when a job resumes from one."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.entities import Metric, RunTag

from gba_hvd.callbacks import Event
from gba_hvd.tracking import MLflowCallback, ProgressLine
from gba_hvd.tracking.mlflow_run import SUPERSEDED_STEPS_TAG, JobRun
from gba_hvd.tracking.plots import THROUGHPUT, ModeSpan
from gba_hvd.tracking.progress_line import recovery_words
from gba_hvd.tracking.records import LogBatch, Point, Record, merge_events
from gba_hvd.tracking.recovery_records import (
    APPLIED,
    RESUMED_FROM,
    Resume,
    events_in_force,
    in_force,
    is_superseded,
    metrics_of,
    place_of,
    pointers,
    recoveries,
    resumes_of_points,
    superseded_words,
    without_survived,
)
from gba_hvd.tracking.report import timeline
from gba_hvd.tracking.report.next_steps import next_steps
from gba_hvd.tracking.report.overview import headline, what_went_wrong
from gba_hvd.tracking.report.page import page
from gba_hvd.tracking.run_history import RunHistory, as_json, from_files
from gba_hvd.tracking.spool import all_records
from gba_hvd.tracking.spool_delivery import SpoolDelivery
from tests.tracking.conftest import job, step

BACK = {"rows_restored": 340, "rows_lost": 0, "pls": 0.0025, "age": 12.0, "workers": 2, "shard_steps_missed": 0}
GONE = {"rows_restored": 0, "rows_lost": 170, "workers": 2, "shard_steps_missed": 0}


def saved(k: int, kind: str = "full", **more: Any) -> Event:
    data = {"url": "s3://bucket/job", "manifest": f"manifests/000001-{k:08d}.json", "kind": kind, "n_bytes": 2_000_000}
    return Event("checkpoint", k + 2, f"step {k} saved", {**data, "saved_step": k, "rows": 9, "seconds": 0.5, **more})


def resumed(k: int) -> Event:
    return Event("resumed", k, f"resuming at step {k}", {"manifest": "m", "rows_restored": 500, "seconds": 0.25})


def record_of(event: Event) -> Record:
    return {"event": event.kind, "step": event.step, "message": event.message, "data": dict(event.data),
            "unix_s": event.unix_s}  # fmt: skip


# --- events as metrics and pointers ----------------------------------------------------------------------------------


def test_a_checkpoint_is_points_at_the_step_that_was_saved():
    points = {"checkpoint_seconds": 0.5, "checkpoint_bytes": 2e6}
    assert metrics_of("checkpoint", 42, saved(40).data) == (40, points)
    stalled = {**saved(40).data, "stall_s": 0.01}
    assert metrics_of("checkpoint", 42, stalled) == (40, points | {"checkpoint_stall_seconds": 0.01})
    assert metrics_of("checkpoint", 42, {**stalled, "stall_s": None}) == (40, points)


def test_a_recovery_is_a_point_of_what_came_back_and_what_did_not():
    assert metrics_of("rows_restored", 7, BACK) == (7, {"rows_restored": 340, "rows_lost": 0, "pls": 0.0025})
    assert metrics_of("rows_lost", 7, GONE) == (7, {"rows_restored": 0, "rows_lost": 170})
    planned = {"interval_s": 40.0, "kind": "delta", "overhead": 0.01, "pls": 0.0, "reason": "delta saves every 40 s"}
    expected = {"checkpoint_interval_s": 40.0, "checkpoint_overhead_expected": 0.01, "pls_expected": 0.0}
    assert metrics_of("checkpoint_plan", 7, planned) == (7, expected)
    assert metrics_of("resumed", 7, resumed(7).data) == (7, {"rows_restored": 500, RESUMED_FROM: 7})


def test_rows_that_are_lost_beside_others_that_came_back_are_reported_once():
    partly = {**BACK, "rows_lost": 30}
    reported = [Event("rows_restored", 7, "", partly), Event("rows_lost", 7, "", partly)]
    assert [metrics_of(event.kind, 7, event.data)[1].get("rows_lost") for event in reported] == [30, None]
    assert [one["rows_lost"] for one in recoveries(map(record_of, reported))] == [30]


@pytest.mark.parametrize("kind", ["membership", "checkpoint_failed", "switch"])
def test_other_events_are_no_points(kind: str):
    assert metrics_of(kind, 7, BACK) == (7, {})


def test_pointers_say_where_and_carry_nothing():
    (one,) = pointers(map(record_of, [resumed(3), saved(40, "delta", checksum="0a1b")]))
    assert (one["step"], one["kind"], one["bytes"], one["url"]) == (40, "delta", 2_000_000, "s3://bucket/job")
    assert one["checksum"] == "0a1b"
    assert place_of(one) == "s3://bucket/job/manifests/000001-00000040.json"


# --- superseded ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "ms", "superseded"),
    [(10, 500, False), (11, 500, True), (99, 999, True), (11, 1000, False), (11, 2000, False)],
)
def test_later_steps_of_earlier_times_are_superseded(at: int, ms: int, superseded: bool):
    assert is_superseded(Point("train/loss", 1.0, ms, at), [Resume(10, 1000)]) is superseded


def test_what_was_measured_of_a_host_stays_true():
    assert not is_superseded(Point("system/h1/cpu_percent", 1.0, 500, 11), [Resume(10, 1000)])


def test_every_resume_counts_also_one_that_was_superseded_itself():
    marks = [Point(RESUMED_FROM, 20.0, 1000, 20), Point(RESUMED_FROM, 10.0, 2000, 10)]
    resumes = resumes_of_points(marks)
    points = [
        Point("loss", v, ms, k) for v, ms, k in ((1, 100, 9), (2, 200, 15), (3, 300, 25), (4, 1500, 25), (5, 2500, 15))
    ]
    assert [(one.step, one.value) for one in in_force(points, resumes)] == [(9, 1), (15, 5)]


def test_the_steps_that_were_trained_again_are_named():
    """240 of a launch that was lost, 250 of one that was rolled back to 160, and what has no later steps."""
    applied = [Point(APPLIED, 0.0, ms, at) for at, ms in ((160, 10), (240, 20), (210, 1010), (250, 1020), (170, 9020))]
    resumes = [Resume(200, 1000), Resume(160, 9000), Resume(170, 10_000)]
    assert superseded_words(resumes, applied) == (
        "steps 161 to 250 from before 1970-01-01 00:00:09 UTC: trained again from 160; "
        "steps 201 to 240 from before 1970-01-01 00:00:01 UTC: trained again from 200"
    )
    assert superseded_words(resumes[2:], applied[:1]) == ""


@pytest.mark.parametrize(("n", "earlier"), [(3, ""), (4, "; and an earlier one"), (103, "; and 100 earlier ones")])
def test_of_many_resumes_the_newest_are_named(n: int, earlier: str):
    """Each after 2 steps more than are saved."""
    applied = [Point(APPLIED, 0.0, 10 * i, i + 2) for i in range(n)]
    words = superseded_words([Resume(i, 10 * i + 5) for i in range(n)], applied)
    begins = re.findall(r"steps ([\d,]+) to", words)
    assert begins == [f"{i + 1:,}" for i in range(n - 1, n - 4, -1)]
    assert words.endswith(f": trained again from {n - 3:,}{earlier}")


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(1, 20))
def test_what_is_in_force_is_one_line_of_training(stops: list[int], more: int):
    """A job that resumes from any earlier step again and again: each step is there once, from its last doing."""
    points, marks, resumes, done, ms, life = list[Point](), list[Point](), list[Resume](), 0, 0, 0
    wanted: dict[int, float] = {}
    for stop in stops:
        for k in range(done + 1, done + more + 1):
            ms += 1
            points.append(Point("loss", float(life), ms, k))
            wanted[k] = float(life)
        done, ms, life = min(stop, done + more), ms + 1, life + 1
        marks.append(Point(RESUMED_FROM, float(done), ms, done))
        wanted = {k: value for k, value in wanted.items() if k <= done}
    resumes = resumes_of_points(marks)
    assert {one.step: one.value for one in in_force(points, resumes)} == wanted


def test_what_is_reported_again_after_a_resume_happened_again():
    first = {"event": "switch", "step": 70, "message": "a", "data": {"to": "gba"}, "unix_s": 1.0}
    went_on = {"event": "resumed", "step": 50, "message": "b", "data": {}, "unix_s": 2.0}
    again = {**first, "unix_s": 3.0}
    merged = merge_events([first, went_on], [again, {**again, "unix_s": 3.5}])
    assert merged == [first, went_on, again]
    assert events_in_force(merged) == [went_on, again]


# --- in a run that others wrote to -----------------------------------------------------------------------------------


class Points:
    """Stands for MLflow: keeps the points and the tags of one run."""

    def __init__(self) -> None:
        self.kept: list[Metric] = []
        self.tags: dict[str, str] = {}

    def get_metric_history(self, run_id: str, key: str) -> list[Metric]:
        return [one for one in self.kept if one.key == key]

    def log_batch(self, run_id: str, metrics: Sequence[Metric] = (), tags: Sequence[RunTag] = (), **more: Any) -> None:
        self.kept += metrics
        self.tags |= {tag.key: tag.value for tag in tags}


def send(mlflow: Points, *points: Point) -> None:
    """By a process that finds the run already there."""
    info = SimpleNamespace(run_id="r", experiment_id="1", run_name="job")
    run: Any = SimpleNamespace(info=info, data=SimpleNamespace(params={}, tags={}))
    client: Any = mlflow
    JobRun(client, run, "stamp", joined=True).send(LogBatch(1, list(points)))


def lossy(k: int, ms: int) -> Point:
    return Point("train/loss", 0.5, ms, k)


def test_steps_that_are_done_again_are_sent_again_and_others_are_not():
    mlflow = Points()
    send(mlflow, *(lossy(k, 100 + k) for k in range(1, 7)))
    send(mlflow, *(lossy(k, 200 + k) for k in range(1, 7)))  # a survivor reports what the chief reported
    assert [one.step for one in mlflow.kept] == [1, 2, 3, 4, 5, 6]
    send(mlflow, Point(RESUMED_FROM, 4, 300, 4), *(lossy(k, 300 + k) for k in range(3, 8)))
    assert [one.step for one in mlflow.kept if one.timestamp > 300] == [4, 5, 6, 7]  # (of 4: measured again)
    send(mlflow, *(lossy(k, 400 + k) for k in range(3, 9)))  # a survivor of the second start
    assert [one.step for one in mlflow.kept if one.timestamp > 400] == [8]


def test_a_job_may_go_on_from_one_checkpoint_again_and_again():
    mlflow = Points()
    for ms in (100, 200, 300):
        send(mlflow, Point(RESUMED_FROM, 4, ms, 4), lossy(5, ms + 5))
        send(mlflow, Point(RESUMED_FROM, 4, ms, 4), lossy(5, ms + 5))  # a sender that was killed before it noted it
    assert [(one.key, one.timestamp) for one in mlflow.kept] == [
        (key, ms + at) for ms in (100, 200, 300) for key, at in ((RESUMED_FROM, 0), ("train/loss", 5))
    ]


def score(value: float, ms: int) -> Point:
    return Point("before_auc", value, ms, 4)


def test_a_score_at_the_step_that_a_launch_resumes_at_arrives_once_for_each_launch():
    """It is measured before the first step, as on other data."""
    mlflow = Points()
    send(mlflow, Point(RESUMED_FROM, 4, 100, 4), score(0.69, 110))
    for _ in range(2):  # a sender that was killed before it noted it
        send(mlflow, Point(RESUMED_FROM, 4, 200, 4), score(0.68, 210))
    send(mlflow, score(0.68, 213))  # a survivor
    assert [(one.value, one.timestamp) for one in mlflow.get_metric_history("r", "before_auc")] == [
        (0.69, 110), (0.68, 210)
    ]  # fmt: skip


def test_steps_that_a_launch_trains_again_are_a_tag_of_the_run():
    mlflow = Points()
    send(mlflow, Point(APPLIED, 64.0, 100, 4), Point(RESUMED_FROM, 4, 200, 4), Point(APPLIED, 96.0, 300, 6))
    assert mlflow.tags == {}
    send(mlflow, Point(RESUMED_FROM, 2, 2000, 2))
    words = "steps 3 to 6 from before 1970-01-01 00:00:02 UTC: trained again from 2"
    assert mlflow.tags.pop(SUPERSEDED_STEPS_TAG) == words
    send(mlflow, Point(RESUMED_FROM, 2, 2000, 2))  # by a sender that died before the tag
    assert mlflow.tags == {SUPERSEDED_STEPS_TAG: words}


# --- through the spool -----------------------------------------------------------------------------------------------


def callback_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> MLflowCallback:
    monkeypatch.setattr(SpoolDelivery, "look", lambda self, is_chief: None)
    monkeypatch.setattr(SpoolDelivery, "wait", lambda self, has_finished, is_chief: None)
    return MLflowCallback(spool_dir=folder, log_every_steps=1, system_metrics=False)


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunHistory:
    """Killed at step 6, resumed from step 4, lost a host at step 7."""
    clock = itertools.count(1_000_000, 5)
    monkeypatch.setattr("gba_hvd.tracking.mlflow_callback._now_ms", lambda: next(clock))

    def now(event: Event) -> Event:
        return dataclasses.replace(event, unix_s=next(clock) / 1000)

    first = callback_in(tmp_path, monkeypatch)
    first.on_job(job("j"))
    for k in range(1, 7):
        first.on_step(step(k, loss=1.0))
        if k == 5:
            first.on_event(now(Event("switch", 5, "lost with the job", {"from": "allreduce", "to": "gba"})))
    first.on_event(now(saved(4)))
    second = callback_in(tmp_path, monkeypatch)
    second.load_state_dict({"run_id": None, "logged_step": 4})
    second.on_job(job("j"))
    second.on_event(now(resumed(4)))
    for k in range(5, 9):
        second.on_step(step(k, loss=2.0))
        if k == 7:
            second.on_event(now(Event("rows_restored", 7, "340 rows came back", BACK)))
    second.on_event(now(saved(8, "delta")))
    second.on_event(now(Event("finished", 8, "done", {})))
    return from_files(tmp_path)


def test_a_story_leaves_out_what_was_superseded(reported: RunHistory):
    assert [(p.step, p.value) for p in reported.history["train/loss"]] == [
        *((k, 1.0) for k in range(1, 5)),
        *((k, 2.0) for k in range(5, 9)),
    ]
    assert [p.step for p in reported.history[THROUGHPUT]] == list(range(1, 9))
    assert reported.spans == [ModeSpan(0, 8, "allreduce")]


def test_the_report_names_the_steps_whose_points_stay_in_mlflow(reported: RunHistory):
    (named,) = [one.value for one in what_went_wrong(reported) if one.name.startswith("superseded points")]
    assert re.fullmatch(r"steps 5 to 6 from before [-0-9]+ [:0-9]+ UTC: trained again from 4", named)
    never = replace(reported, events=(), status="FINISHED")
    assert not [one for one in what_went_wrong(never) if one.name.startswith("superseded points")]


def test_a_story_has_checkpoints_and_recoveries_in_figures(reported: RunHistory):
    figures = json.loads(json.dumps(as_json(reported)))
    assert [(one["step"], one["kind"]) for one in figures["checkpoints"]] == [(4, "full"), (8, "delta")]
    assert [(one["kind"], one["step"], one["rows_restored"]) for one in figures["recoveries"]] == [
        ("resumed", 4, 500), ("rows_restored", 7, 340)
    ]  # fmt: skip
    assert reported.history["checkpoint_bytes"][-1].step == 8
    assert reported.history["pls"][0].value == 0.0025


def test_scores_that_were_measured_while_rank_0_died_are_reported_by_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = itertools.count(1_000_000, 5)
    monkeypatch.setattr("gba_hvd.tracking.mlflow_callback._now_ms", lambda: next(clock))
    chief, survivor = callback_in(tmp_path, monkeypatch), callback_in(tmp_path, monkeypatch)
    chief.on_job(job("j", rank=0, size=2))
    survivor.on_job(job("j", rank=1, size=2, is_host_leader=False))
    for callback in (chief, survivor):
        callback.on_epoch(1)
        callback.on_metrics(10, {"valid_auc": 0.7})
    assert survivor.spool is None, "the chief alone reports"
    survivor.on_epoch(2)
    survivor.on_metrics(20, {"valid_auc": 0.8})  # the chief died in this evaluation
    survivor.on_job(job("j", rank=0, size=1))
    story = from_files(tmp_path)
    assert [(one.step, one.epoch, one.values) for one in story.measured] == [
        (10, 1, {"valid_auc": 0.7}), (20, 2, {"valid_auc": 0.8})
    ]  # fmt: skip
    assert story.best is not None and story.best.epoch == 2


def test_scores_of_an_earlier_world_are_its_rank_0_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    survivor = callback_in(tmp_path, monkeypatch)
    survivor.on_job(job("j", rank=1, size=3, is_host_leader=False))
    survivor.on_metrics(10, {"valid_auc": 0.7})
    survivor.on_job(job("j", rank=1, size=2, is_host_leader=False))  # rank 0 is still there
    survivor.on_job(job("j", rank=0, size=1))
    assert from_files(tmp_path).measured == []


def test_the_newest_checkpoint_is_a_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    callback = callback_in(tmp_path, monkeypatch)
    callback.on_job(job("j"))
    callback.on_event(saved(4))
    assert callback.spool is not None
    tags = [record["values"] for record in all_records(callback.spool) if record["kind"] == "tags"]
    assert tags == [{"gba_hvd.checkpoint": "s3://bucket/job/manifests/000001-00000004.json"}]


@pytest.mark.slow
def test_the_page_shows_them_and_says_what_was_superseded(reported: RunHistory):
    text = page(reported)
    for words in ("<h2>Checkpoints</h2>", "<h2>Recoveries</h2>", "340 rows came back", "the whole job", "a lost host",
                  "superseded: the job resumed from an earlier checkpoint; lost with the job"):  # fmt: skip
        assert words in text
    assert "Checkpoints" not in page(RunHistory("t", "here", "j", "RUNNING", "", 0, None))


def test_the_page_shows_the_choice_and_what_was_trained_again():
    full = {"strategy": "full", "strategy_reason": "full: partial costs 2 %", "samples_redone": 1288, "manifest": "m-4"}
    events = [Event("resumed", 4, "all went back", {**BACK, **full}), Event("resumed", 8, "started again", BACK)]
    text = page(RunHistory("t", "here", "j", "RUNNING", "", 0, None, {}, {}, tuple(map(record_of, events))))
    table = text[text.index("<h2>Recoveries</h2>") :]
    for words in ("samples redone", "full or partial", "full: partial costs 2 %", "1,288", "m-4"):
        assert words in table
    assert table.index("a lost host") < table.index("the whole job"), "one lost a host, one all its workers"


def launch(k: int) -> Event:
    return Event("started", k, "2 workers")


@pytest.mark.parametrize(
    ("before", "skipped", "cause", "shown"),
    [
        ([launch(0), saved(4), Event("finished", 4, "")], [], "", []),
        (
            [launch(0), saved(4), Event("finished", 8, "")],
            [],
            "",
            ["nothing: the launch before had finished, at a later step"],
        ),
        ([launch(0), saved(4), Event("finished", 8, "")], ["m-8: torn"], " after a failure", ["the whole job"]),
        ([launch(0), saved(4), Event("failed", 6, "")], [], " after a failure", ["the whole job"]),
        (
            [launch(0), saved(4)],
            [],
            "; the launch before has no end on record",
            ["the whole job: the launch before has no end on record"],
        ),
        (
            [launch(0), saved(4), Event("interrupted", 6, "")],
            [],
            "",
            ["nothing: it was interrupted (Ctrl-C or SIGTERM)"],
        ),
        ([], [], "", ["resumed"]),
    ],
)
def test_a_launch_that_was_asked_for_is_no_recovery(
    before: list[Event], skipped: list[str], cause: str, shown: list[str]
):
    """Shown as lost only where the records have a launch that did not end well."""
    counts, comes_back = bool(cause), resumed(4)
    comes_back = dataclasses.replace(comes_back, data={**comes_back.data, "skipped": skipped})
    events = tuple(map(record_of, [*before, launch(4), comes_back]))
    story = RunHistory("t", "here", "j", "FINISHED", "", 0, 1, {}, {}, events)
    facts = {fact.name: fact.value for fact in what_went_wrong(story)}
    assert facts.get("rows back from a checkpoint") == ("500" if counts else None)
    assert facts.get("recoveries") == ("1" if counts else None)
    for words, name in (
        ("interrupted", "launches after an interruption, not counted as recoveries"),
        ("at a later step", "launches from an earlier step than was finished, not counted as recoveries"),
    ):
        assert facts.get(name) == ("1" if any(words in what for what in shown) else None)
    assert ("500 rows came back" in headline(story)) == counts
    assert (
        f"500 rows came back from a checkpoint when the job was launched again{cause}." in headline(story) or not counts
    )
    table = timeline.recoveries(story)
    assert [row[1].text for row in (table.rows if table is not None else ())] == shown
    assert "resuming at step 4" in str(timeline.events(story))


@pytest.mark.parametrize(
    ("end", "points", "age", "redone"),
    [
        (Event("interrupted", 3768, "by Ctrl-C", {"samples_applied": 1_400_000}), [(15, 3760)], 193, 74_000),
        (Event("finished", 3575, "", {"samples_applied": 1_326_000}), [(15, 3575)], 0, None),
        (saved(3575), [(5, 3999), (12, 3575), (15, 3760), (25, 3600)], 185, 74_000),  # killed: by its newest point
        (saved(3575), [(5, 3999), (25, 3600)], None, None),  # how far it came is not known
    ],
)
def test_what_a_job_that_was_launched_again_makes_again_follows_from_its_end(
    end: Event, points: list[tuple[int, int]], age: int | None, redone: int | None
):
    resumed = Event("resumed", 3575, "", {"rows_restored": 8543, "age": -0.6, "samples_then": 1_326_000})
    applied = [Point("samples_applied", 1_326_000 if step == 3575 else 1_400_000, 1000 * at_s, step)
               for at_s, step in points]  # fmt: skip
    events = [(10, launch(0)), (11, saved(3575)), (19, end), (20, launch(3575)), (21, resumed)]
    records = tuple({**record_of(event), "unix_s": at_s} for at_s, event in events)
    story = dataclasses.replace(story_with(), events=records, applied=applied)
    (one,) = story.recoveries
    assert (one["age"], one["samples_redone"]) == (age, redone)
    facts = {fact.name: fact.value for fact in what_went_wrong(story)}
    assert facts.get("samples trained again") == (None if redone is None else "74,000")


@pytest.mark.parametrize(
    ("more", "dropped_for"),
    [
        ({"staleness": {"1": 3}}, {"stale": 300}),  # records of an older version
        ({"staleness": {}}, {}),  # it was in no asynchronous mode
        ({"staleness": {"1": 3}, "dropped_for": {"overflow": 300}}, {"overflow": 300}),
    ],
)
def test_samples_that_older_records_have_as_dropped_were_stale(more: Record, dropped_for: dict[str, int]):
    account = {"samples_total": 1000, "samples_applied": 700, "samples_dropped": 300, "samples_lost": 0}
    story = story_with(launch(0), Event("finished", 9, "", {**account, **more}))
    assert story.dropped_for == dropped_for
    assert any("too stale and dropped" in step.text for step in next_steps(story)) == ("stale" in dropped_for)


def story_with(*events: Event) -> RunHistory:
    return RunHistory("t", "here", "j", "FINISHED", "", 0, None, {}, {}, tuple(map(record_of, events)))


def test_a_lost_worker_and_rows_that_came_back_are_two_sentences():
    events = [launch(0), Event("worker_lost", 5, "", {"workers": 2}), Event("membership", 5, "", {"workers": 1}),
              Event("failed", 6, ""), launch(4), resumed(4), Event("rows_restored", 7, "", BACK)]  # fmt: skip
    text = headline(RunHistory("t", "here", "j", "FINISHED", "", 0, 1, {}, {}, tuple(map(record_of, events))))
    assert (
        "1 worker was lost. 340 rows came back from a checkpoint after a host was lost. "
        "500 rows came back from a checkpoint when the job was launched again after a failure."
    ) in text


def test_many_checkpoints_do_not_drown_what_else_happened():
    events = [saved(k) for k in range(1, 301)] + [Event("rows_restored", 301, "340 rows came back", BACK)]
    text = page(RunHistory("t", "here", "j", "RUNNING", "", 0, None, {}, {}, tuple(map(record_of, events))))
    assert "300 checkpoints until step 302: 600.0 MB" in text
    assert "340 rows came back" in text
    assert "Checkpoints, the newest 20 of 300" in text


# --- what a person sees ----------------------------------------------------------------------------------------------


def test_the_progress_line_reports_them_and_sums_up():
    stream = io.StringIO()
    progress = ProgressLine(stream=stream, clock=lambda: 0.0)
    progress.on_job(job("j"))
    partly = {**BACK, "rows_lost": 30}
    for event in (
        resumed(4),
        saved(8),
        Event("rows_restored", 9, "back", partly),
        Event("rows_lost", 9, "gone", partly),
    ):
        progress.on_event(event)
    progress.on_end("FINISHED", None)
    lines = stream.getvalue().splitlines()
    assert [line.partition(" ")[2] for line in lines[:2]] == [
        "[resumed] step 4: resuming at step 4",
        "[checkpoint] step 10: step 8 saved",
    ]
    assert "newest checkpoint: of step 8, s3://bucket/job/manifests/000001-00000008.json" in lines
    assert "resumed at step 4: 500 rows restored" in lines
    assert "recoveries: step 9: 340 rows restored, 30 lost, PLS 0.0025" in lines


def test_a_job_that_went_on_from_memory_is_reported_in_a_word() -> None:
    event = Event("resumed", 8, "going on", {"manifest": "", "from_memory": True, "rows_restored": 0, "rows_lost": 0})
    assert recovery_words(event) == "resumed at step 8: all from memory"
    assert metrics_of("resumed", 8, event.data)[1][RESUMED_FROM] == 8


def test_the_choice_between_full_and_partial_recovery_is_told():
    full = {"rows_restored": 500, "strategy": "full", "samples_redone": 1288, "pls": 0.0, "pls_total": 0.0}
    redone = "full recovery, 1,288 samples trained again"
    words = f"resumed at step 8: 500 rows restored, {redone}, PLS 0.0000 (0.0000 so far)"
    assert recovery_words(Event("resumed", 8, "", full)) == words
    partial = Event("rows_restored", 8, "", {"rows_restored": 500, "strategy": "partial"})
    assert recovery_words(partial) == "step 8: 500 rows restored, partial recovery"
    assert metrics_of("rows_restored", 8, partial.data) == (8, {"rows_restored": 500, "recovery_full": 0.0})


def test_a_failure_that_others_survived_is_no_end_of_a_launch() -> None:
    events = [{"event": kind} for kind in ("started", "failed", "membership", "switch", "failed", "started", "failed")]
    kept = [event["event"] for event in without_survived(events)]
    assert kept == ["started", "membership", "switch", "failed", "started", "failed"]
