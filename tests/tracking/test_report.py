"""What can be read back of a job, and the page about it."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import math
import re
import time
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools import cli
from hypothesis import given
from hypothesis import strategies as st

from gba_hvd.callbacks import Event
from gba_hvd.errors import BadInput
from gba_hvd.mode_names import MODES
from gba_hvd.tracking import MLflowCallback, plots
from gba_hvd.tracking import gauges as g
from gba_hvd.tracking.plots import MODE, THROUGHPUT, ModeSpan, ceiling, draw_plots, mode_spans
from gba_hvd.tracking.records import Point, Record
from gba_hvd.tracking.recovery_records import history_in_force, metrics_of
from gba_hvd.tracking.report import overview, timeline
from gba_hvd.tracking.report.next_steps import next_steps
from gba_hvd.tracking.report.overview import headline, how_well, warnings, what_trained, what_went_wrong
from gba_hvd.tracking.report.page import page
from gba_hvd.tracking.report.run_note import run_note
from gba_hvd.tracking.report.tables import breakable
from gba_hvd.tracking.run_history import END_NOT_REPORTED, RunHistory, as_json, by_mode, from_files
from gba_hvd.tracking.spool import SpoolStatus, read_status, write_status
from gba_hvd.tracking.spool_delivery import SpoolDelivery, how_to_open
from tests.tracking.conftest import event, job, step
from tests.tracking.reported_job import DECISIONS, SWITCHES, report_job


def points(*modes: tuple[int, str]) -> list[Point]:
    return [Point(MODE, float(MODES.index(mode)), 0, step) for step, mode in modes]


def switch(step: int, was: str, to: str) -> Record:
    return {"event": "switch", "step": step, "message": "", "data": {"from": was, "to": to}}


# --- modes over time -------------------------------------------------------------------------------------------------


def test_a_switch_reports_the_exact_step():
    history_of = points((10, "allreduce"), (20, "gba"), (30, "gba"))
    assert mode_spans(history_of, [switch(14, "allreduce", "gba")]) == [
        ModeSpan(0, 14, "allreduce"),
        ModeSpan(14, 30, "gba"),
    ]


def test_steps_before_the_first_launch_are_of_no_mode():
    started = {"event": "started", "step": 118, "message": "", "data": {}}
    again = started | {"step": 148}
    history_of = points((120, "allreduce"), (130, "gba"), (148, "gba"), (150, "allreduce"), (178, "allreduce"))
    assert mode_spans(history_of, [started, switch(124, "allreduce", "gba"), again]) == [
        ModeSpan(118, 124, "allreduce"),
        ModeSpan(124, 148, "gba"),
        ModeSpan(148, 178, "allreduce"),
    ]


def test_points_make_up_for_a_switch_whose_record_was_lost():
    history_of = points((10, "allreduce"), (20, "gba"), (30, "gba"))
    assert mode_spans(history_of, []) == [ModeSpan(0, 10, "allreduce"), ModeSpan(10, 30, "gba")]


def test_switches_are_enough_without_points():
    history_of = [switch(14, "allreduce", "gba"), switch(40, "gba", "allreduce"), switch(50, "allreduce", "bsp")]
    assert mode_spans([], history_of) == [
        ModeSpan(0, 14, "allreduce"),
        ModeSpan(14, 40, "gba"),
        ModeSpan(40, 50, "allreduce"),
    ]


def test_nothing_reported_is_no_span():
    assert mode_spans([], []) == []


@given(st.lists(st.tuples(st.integers(1, 60), st.sampled_from(MODES), st.booleans()), max_size=12))
def test_spans_follow_each_other_without_gaps(history_of: list[tuple[int, str, bool]]):
    spans = mode_spans(
        points(*((step, mode) for step, mode, is_point in sorted(history_of) if is_point)),
        [switch(step, "allreduce", mode) for step, mode, is_point in history_of if not is_point],
    )
    assert all(span.first < span.last for span in spans)
    assert all(one.last == next_.first for one, next_ in itertools.pairwise(spans))
    assert not spans or spans[0].first == 0


# --- stories ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The spool of a job that saw everything. Tests read it and write nothing there."""
    folder = tmp_path_factory.mktemp("reported") / "spool"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(SpoolDelivery, "look", lambda self, is_chief: None)
        callback = MLflowCallback(spool_dir=folder, log_every_steps=5, system_metrics=False, run_name="slow")
        report_job([callback])
    assert callback.spool is not None
    return callback.spool


@pytest.fixture(scope="module")
def whole_page(spool: Path) -> str:
    """The page about that job, with its pictures."""
    return page(from_files(spool))


def test_a_spool_reports_the_whole_story(spool: Path):
    story = from_files(spool.parent)
    assert (story.title, story.job_id, story.status, story.n_steps) == ("slow", "ctr-42", "FINISHED", 400)
    assert story.params["lr"] == "0.05"
    assert story.account["applied"] + story.account["dropped"] + story.account["lost"] == story.account["total"]
    assert sum(story.staleness.values()) == 6 * 180
    assert [(span.first, span.last, span.mode) for span in story.spans] == [
        (0, 120, "allreduce"), (120, 300, "gba"), (300, 400, "allreduce")
    ]  # fmt: skip
    allreduce, gba = by_mode(story)
    assert (allreduce.steps, allreduce.visits, gba.steps, gba.visits) == (220, 2, 180, 1)
    assert allreduce.samples_per_s is not None
    assert gba.samples_per_s is not None


def test_the_throughput_of_a_mode_is_its_samples_over_its_time():
    rates = [Point("train/samples_per_s", rate, 0, step) for step, rate in ((10, 100.0), (20, 300.0), (30, 50.0))]
    history_of = {MODE: points((10, "allreduce"), (20, "allreduce"), (30, "gba")), "train/samples_per_s": rates}
    allreduce, gba = by_mode(RunHistory("t", "here", "j", "FINISHED", "", 0, 1, {}, history_of, ()))
    assert allreduce.samples_per_s == pytest.approx(150.0)
    assert gba.samples_per_s == pytest.approx(50.0)


def test_a_point_of_few_steps_counts_as_few():
    rates = [Point("train/samples_per_s", rate, 0, step) for step, rate in ((1, 10.0), (10, 1000.0))]
    history_of = {MODE: points((1, "allreduce"), (10, "allreduce")), "train/samples_per_s": rates}
    (allreduce,) = by_mode(RunHistory("t", "here", "j", "FINISHED", "", 0, 1, {}, history_of, ()))
    assert allreduce.samples_per_s == pytest.approx(10 / (1 / 10.0 + 9 / 1000.0))


@pytest.mark.slow
def test_a_job_that_has_not_ended_has_a_story_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(SpoolDelivery, "look", lambda self, is_chief: None)
    callback = MLflowCallback(spool_dir=tmp_path, log_every_steps=1, system_metrics=False)
    callback.on_job(job("young"))
    callback.on_step(step(1))
    story = from_files(tmp_path)
    assert (story.status, story.account, story.staleness) == ("not ended", {}, {})
    assert "young" in page(story)


def test_the_events_of_an_artifact_folder_are_a_story(tmp_path: Path):
    (tmp_path / "events.jsonl").write_text(json.dumps({**switch(5, "allreduce", "gba"), "unix_s": 3.0}) + "\n")
    assert [span.mode for span in from_files(tmp_path).spans] == ["allreduce"]


@pytest.mark.parametrize("text", ["", "no json\n", '{"a": 1}\n'])
def test_other_files_are_refused(tmp_path: Path, text: str):
    (tmp_path / "other.jsonl").write_text(text)
    with pytest.raises(BadInput, match="holds no records of a job"):
        from_files(tmp_path)


def test_two_jobs_are_not_one_story(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(SpoolDelivery, "look", lambda self, is_chief: None)
    for name in ("one", "two"):
        MLflowCallback(spool_dir=tmp_path, system_metrics=False).on_job(job(name))
    with pytest.raises(BadInput, match=r"records of 2 jobs \(one, two\): name one of its files"):
        from_files(tmp_path)


# --- the page --------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Every address a page refers to, its text, and whether its tags close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses, self.tags, self.text, self._open = list[str](), set[str](), "", list[str]()
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "source"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.slow
def test_a_page_holds_everything_and_refers_to_nothing(whole_page: str):
    shown = Page(whole_page)
    assert len(shown.addresses) == 5
    assert all(address.startswith("data:image/svg+xml;base64,") for address in shown.addresses)
    assert not shown.tags & {"script", "link", "iframe"}
    assert "url(" not in whole_page
    for _, _, reason in SWITCHES.values():
        assert reason in shown.text
    for heading in ("Switches", "Time in each mode", "Staleness", "Where every sample went", "Parameters"):
        assert heading in shown.text


@pytest.mark.slow
def test_nothing_a_job_says_becomes_html(whole_page: str):
    assert "<b>not bold</b>" not in whole_page
    evil = "<script>alert(1)</script>\"'&"
    history_of = {"event": evil, "step": 1, "message": evil}
    switched = {"event": "switch", "step": 2, "message": evil, "data": {"from": evil, "to": evil, "reason": evil}}
    story = RunHistory(evil, evil, evil, evil, evil, 0, 1, {evil: evil}, {}, (history_of, switched))
    shown = Page(page(story))
    assert "script" not in shown.tags
    assert shown.text.count("alert(1)") >= 8


def test_a_run_without_asynchronous_modes_has_no_word_of_them():
    story = RunHistory("plain", "here", "j", "RUNNING", "", 0, None, {}, {}, (event_record("started"),))
    text = Page(page(story)).text
    assert "taleness" not in text
    assert "Switches" not in text


def event_record(kind: str) -> Record:
    one = event(kind, 0)
    return {"event": one.kind, "step": one.step, "message": one.message, "data": {}, "unix_s": one.unix_s}


def test_each_switch_of_auto_has_what_was_predicted_and_what_was_achieved():
    def decision(step: int, mode: str, reason: str) -> Record:
        data = {"mode": mode, "kind": "switch", "gba_samples_per_s": 2400.0, "allreduce_samples_per_s": 1000.0}
        return {"event": "decision", "step": step, "message": f"to {mode}: {reason}", "data": data}

    def switch(step: int, mode: str, reason: str) -> Record:
        return {"event": "switch", "step": step, "message": reason, "data": {"to": mode, "reason": reason}}

    events = (
        decision(20, "gba", "slow"), switch(20, "gba", "slow; a warning"), switch(60, "allreduce", "an operator's"),
        decision(90, "gba", "slow again"), switch(91, "gba", "slow again"),
    )  # fmt: skip
    name = g.RATES["gba_samples_per_s"]
    rates = [Point(name, value, 0, step) for step, value in ((20, 9.0), (30, 1800.0), (40, 1920.0), (50, 2000.0))]
    made = [
        Point(plots.THROUGHPUT, value, 0, step) for step, value in ((50, 1.0), (70, 990.0), (80, 1010.0), (99, 1.0))
    ]
    history = {name: rates, plots.THROUGHPUT: made}
    story = RunHistory("one", "here", "j", "RUNNING", "", 0, None, {}, history, events)
    shown = timeline.switches(story)
    assert shown is not None
    columns = [shown.headings.index(heading) for heading in ("predicted", "achieved")]
    assert [tuple(row[at].text for at in columns) for row in shown.rows] == [
        ("2,400", "1,920 (0.80x)"),
        ("-", "1,000"),  # asked for
        ("2,400", "-"),
    ]


@pytest.mark.slow
def test_the_page_answers_at_a_glance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(SpoolDelivery, "look", lambda self, is_chief: None)
    name = "<script>alert(1)</script>"
    config = {"model": {"kind": "deepfm", "hidden": [8, 4]}, "data": {"dir": "/data/clicks"}, "seed": 7}
    callback = MLflowCallback(spool_dir=tmp_path, log_every_steps=1, system_metrics=False, run_name=name, config=config)
    callback.on_job(job("j"))
    quality = {100: (0.70, 0.68), 200: (0.75, 0.71), 300: (0.74, 0.73)}  # the test is best where validation is not
    for epoch, (end, (valid, test)) in enumerate(quality.items()):
        callback.on_step(dataclasses.replace(step(end), epoch=epoch))
        callback.on_metrics(end, {"valid_auc": valid, "test_auc": test, "test_logloss": 1 - test})
    callback.on_event(Event("traffic", 300, "", {"all_workers": {"sent_allreduce_dense": 12_345_678}}))
    missed = "mode gba was asked for; 0 of 300 steps were in it: no server was up. GBACallback(wait_s=60) makes ..."
    callback.on_event(Event("checkpoint_late", 260, "none was begun", level="warning"))
    callback.on_event(Event("checkpoint", 270, "step 270 saved", {"url": "memory://x", "manifest": "m"}))
    callback.on_event(Event("checkpoint_failed", 290, "the store does not answer: name another", level="warning"))
    callback.on_event(Event("mode_missed", 300, missed, level="warning"))
    callback.on_event(Event("stopped_early", 300, "stopped early: no gain in valid AUC for 2 epochs"))
    story = from_files(tmp_path)
    assert story.best is not None
    assert (story.best.epoch, story.best.values["test_auc"]) == (1, 0.71)
    html = page(story)
    shown = Page(html)
    assert "script" not in shown.tags and f"<title>{escape(name)}</title>" in html
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html))
    assert (facts["model"], facts["data"], facts["widths"], facts["seed"]) == ("deepfm", "/data/clicks", "[8, 4]", "7")
    assert facts["best epoch"] == "epoch 1, by valid_auc"
    assert (facts["valid_auc"], facts["test_auc"], facts["test_logloss"]) == ("0.75000", "0.71000", "0.29000")
    assert (facts["warnings"], facts["sent by all workers"]) == ("3, 1 of them over", "12.3 MB")
    assert facts["end"] == "stopped early: no gain in valid AUC for 2 epochs"
    assert facts["mode"] == "mode gba was asked for; 0 of 300 steps were in it: no server was up"
    assert [[*row[:2], *row[3:]] for row in table(html, "Warnings")] == [
        ["260", "checkpoint late", "since step 270", "none was begun"],
        ["290", "checkpoint failed", "", "the store does not answer: name another"],
        ["300", "mode missed", "", missed],
    ]
    assert [row[0] for row in table(html, "Epochs")] == ["epoch 0", "epoch 1", "epoch 2"]
    assert "The ground shows the mode" not in shown.text and "Upright lines" not in shown.text
    assert "prefers-color-scheme: dark" in html


def test_metrics_are_of_the_epoch_that_reports_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """An epoch ends and the next begins at one step; the first of a launch begins before any step."""
    clock = itertools.count(1_000_000, 5)
    monkeypatch.setattr("gba_hvd.tracking.mlflow_callback._now_ms", lambda: next(clock))
    monkeypatch.setattr(SpoolDelivery, "look", lambda self, is_chief: None)
    callback = MLflowCallback(spool_dir=tmp_path, log_every_steps=1, system_metrics=False)
    callback.on_job(job("j"))
    for epoch, end in ((2, 10), (3, 20)):
        callback.on_epoch(epoch)
        callback.on_metrics(end - 10, {"before_auc": 0.1 * epoch})
        callback.on_step(dataclasses.replace(step(end), epoch=epoch))
        callback.on_epoch(epoch)
        callback.on_metrics(end, {"valid_auc": 0.3 * epoch})
    assert [(one.step, one.epoch, list(one.values)) for one in from_files(tmp_path).measured] == [
        (0, 2, ["before_auc"]), (10, 2, ["valid_auc"]), (10, 3, ["before_auc"]), (20, 3, ["valid_auc"])
    ]  # fmt: skip


@pytest.mark.slow
def test_only_time_within_launches_counts():
    """Two launches of 10 s, 1,000 s apart; each measures before and after an epoch."""
    launches = [{"event": kind, "step": k, "message": "", "data": {}, "unix_s": s} for kind, k, s in (
        ("started", 0, 1.0), ("finished", 10, 10.0), ("started", 10, 1010.0), ("finished", 20, 1020.0))]  # fmt: skip
    scores = [("before_auc", 0, 2.0, 0), ("valid_auc", 10, 9.0, 0), ("before_auc", 10, 1012.0, 1),
              ("valid_auc", 20, 1018.0, 1)]  # fmt: skip
    history_of: dict[str, list[Point]] = {}
    for name, k, s, epoch in scores:
        history_of.setdefault(name, []).append(Point(name, 0.5, int(1000 * s), k))
        history_of.setdefault("epoch", []).append(Point("epoch", epoch, int(1000 * s), k))
    story = story_of(*launches, history=history_of, ended_ms=1_020_000)
    assert story.launches == [(0, 10_000), (1_010_000, 1_020_000)]
    html = page(story)
    assert [row[:3] for row in table(html, "Epochs")] == [
        ["epoch 0", "0", "2.0 s"], ["epoch 0", "10", "7.0 s"], ["epoch 1", "10", "3.0 s"], ["epoch 1", "20", "6.0 s"]
    ]  # fmt: skip
    assert story.epoch_seconds == [9.0, 9.0]
    assert "took 20.0 s in 2 launches" in html and ", 20.0 s in 2 launches." in headline(story)


def test_the_time_of_a_job_ends_with_its_training_not_with_the_sending_of_its_model():
    launches = [
        {"event": kind, "step": 1, "message": "", "data": {}, "unix_s": s}
        for kind, s in (("started", 1.0), ("finished", 61.0), ("model_logged", 104.0))
    ]
    story = RunHistory("t", "here", "j", "FINISHED", "", 1_000, 62_000, {}, {}, launches)
    assert story.seconds == 60.0
    story = dataclasses.replace(story, events=launches[:1])
    assert story.seconds == 61.0, "its end is not in the events"


def story_of(*events: Record, **about: object) -> RunHistory:
    return dataclasses.replace(RunHistory("t", "here", "j", "FINISHED", "", 0, 61_000, {}, {}, events), **about)


SAVED = {
    "event": "checkpoint",
    "step": 40,
    "message": "",
    "data": {"url": "s3://b/job", "manifest": "m", "saved_step": 40},
}
TO_REPAIR = {"event": "failed", "step": 45, "message": "", "data": {"to_repair": True}}
RESUMED = {"event": "resumed", "step": 30, "message": "", "data": {"manifest": "m"}}


def started(checkpoints: str) -> Record:
    return {"event": "started", "step": 30, "message": "", "data": {"workers": 2, "checkpoints": checkpoints}}


def test_equal_warnings_are_one_row() -> None:
    def failed(step: int, unix_s: float, why: str, **data: Any) -> Record:
        about = {"why": f"blobs/{step}: {why}", **data}
        return {**OPEN, "step": step, "message": f"of step {step}", "unix_s": unix_s, "data": about}

    story = story_of(
        failed(7, 60.0, "no"), failed(8, 120.0, "no"), failed(9, 180.0, "yes"), failed(9, 180.0, "no", rank=1)
    )
    found = warnings(story)
    assert found is not None
    clock = [time.strftime("%H:%M", time.localtime(s)) for s in (60, 120, 180)]
    assert [[cell.text for cell in row] for row in found.rows] == [
        ["7 to 8", "checkpoint failed", f"2 times, {clock[0]} to {clock[1]}", "", "of step 8"],
        ["9", "checkpoint failed", clock[2], "", "of step 9"],
        ["9", "checkpoint failed", clock[2], "", "of step 9"],
    ]


LOGGED = {"event": "model_logged", "step": 50, "message": "", "data": {"model_uri": "models:/m-1", "name": "ctr"}}
OPEN = {"event": "checkpoint_failed", "step": 9, "message": "why", "level": "warning", "unix_s": 1.0}
BACK = {"event": "rows_restored", "step": 9, "message": "", "data": {"rows_restored": 5, "rows_lost": 0, "pls": 0.1,
                                                                     "pls_total": 0.25}}  # fmt: skip


@pytest.mark.parametrize(
    ("story", "words"),
    [
        (story_of(status="RUNNING", job_id="a b"), "gba-hvd status 'a b'"),
        (story_of(SAVED, status="FAILED"), "it resumes from the checkpoint of step 40"),
        (story_of(started(""), status="KILLED"), "The job saved no checkpoint, so it starts over"),
        (story_of(started("/ck 1"), status="FAILED"), "The records name none, but one may have been saved"),
        (story_of(started("/ck 1"), status="FAILED"), "gba-hvd checkpoint ls '/ck 1'"),
        (story_of(status="FAILED"), "The records name none, but one may have been saved"),
        (story_of(RESUMED, status="FAILED"), "it resumes from the checkpoint of step 30."),
        (story_of(RESUMED, SAVED, status="FAILED"), "it resumes from the checkpoint of step 40."),
        (
            story_of(started("/ck"), RESUMED, status="FAILED", reason=END_NOT_REPORTED),
            "resumes from the checkpoint of step 30, or from a newer one.",
        ),
        (
            story_of(SAVED, status="FAILED", reason=END_NOT_REPORTED),
            "See what is there: gba-hvd checkpoint ls s3://b/job",
        ),
        (story_of(SAVED, TO_REPAIR, status="FAILED"), "Repair first what the job ended with, which is met again"),
        (
            story_of(SAVED, TO_REPAIR, status="FAILED"),
            "same command: it resumes from the newest checkpoint, so far of s",
        ),
        (story_of(TO_REPAIR, status="FAILED"), "Then start the same command."),
        (
            story_of(started(""), TO_REPAIR, status="FAILED"),
            "Then start the same command.  The job saved no checkpoint, so it starts over.",
        ),
        (
            story_of(SAVED, TO_REPAIR, {"event": "membership", "step": 46, "message": "", "data": {}}, status="FAILED"),
            "Start the same command again: it resumes from the checkpoint of step 40.",
        ),
        (story_of(SAVED, TO_REPAIR, started("/ck"), status="FAILED"), "it resumes from the checkpoint of step 40."),
        (story_of(OPEN), "Read the table of warnings (1 not over)"),
        (story_of(BACK), "Rows came back older than they were (PLS 0.25000)"),
        (story_of(SAVED), "gba-hvd model export s3://b/job MODEL_URL"),
        (story_of(SAVED), "No model was logged with this run."),
        (story_of(SAVED, model_awaited=True), "The model is still being logged"),
        (story_of(), "Neither a model nor a checkpoint was saved"),
        (
            story_of({"event": "model_not_logged", "step": 50, "message": "", "data": {"model_uri": "models:/m-2"}}),
            "mlflow models serve --env-manager local -m models:/m-2",
        ),
        (story_of(LOGGED), "mlflow models serve --env-manager local -m models:/m-1"),
        (
            story_of({**LOGGED, "data": {**LOGGED["data"], "version": "3"}}),
            "mlflow models serve --env-manager local -m models:/ctr/3",
        ),
        (story_of(), "report scores of data it was not trained on"),
    ],
)
def test_what_to_do_next_follows_from_the_records(story: RunHistory, words: str):
    assert words in " ".join(f"{one.text} {one.command}" for one in next_steps(story))


@pytest.mark.parametrize(("more", "is_awaited"), [([], True), ([True], True), ([False], False)])
def test_a_spool_that_is_there_still_has_its_model_unless_none_was_written(
    more: list[bool], is_awaited: bool, tmp_path: Path
):
    records = [{"kind": "job", "job_id": "j", "ms": 1}, {"kind": "end", "status": "FINISHED", "model": True}]
    records += [{"kind": "model", "written": one} for one in more]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    assert from_files(tmp_path / "s.jsonl").model_awaited is is_awaited


def test_a_job_in_auto_that_never_switched_says_why():
    stayed = {"event": "auto_stayed", "step": 40, "message": 'mode "auto" never left allreduce: gba is no faster'}
    facts = {fact.name: fact.value for fact in what_trained(story_of(stayed))}
    assert facts["changes of mode"] == 'none: mode "auto" never left allreduce: gba is no faster'
    assert "changes of mode" not in {fact.name for fact in what_trained(story_of())}
    later = {fact.name: fact.value for fact in what_trained(story_of(stayed, switch(50, "allreduce", "gba")))}
    assert later["changes of mode"] == "1"


def scored(*values: float) -> dict[str, list[Point]]:
    return {"valid_auc": [Point("valid_auc", value, 0, 10 * i) for i, value in enumerate(values, start=1)]}


def test_whether_more_epochs_help():
    texts = [
        " ".join(one.text for one in next_steps(story_of(LOGGED, history=scored(*values))))
        for values in ((0.7, 0.8), (0.8, 0.7, 0.6), (0.8, 0.7))
    ]
    assert "more epochs may be better" in texts[0]
    assert "No epoch after step 10 was better: 2 epochs could be saved" in texts[1]
    assert "epoch" not in texts[2]


def finished(unix_s: float) -> Record:
    return {"event": "finished", "step": 0, "message": "", "data": {}, "unix_s": unix_s}


@pytest.mark.parametrize(
    ("epochs", "ends_s", "adds"),
    [
        ([1, 2], [15.0, 25.0], True),  # each in a launch that finished
        ([0, 1, 2], [25.0], True),  # several at first
        ([1, 2, 2], [15.0], True),  # a launch failed, and the same epoch came again
        ([1, 2], [25.0], False),  # in one launch
        ([1, 2], [], False),  # the launch before failed
        ([0, 1, 2], [15.0], False),  # two were added
        ([1, 1], [15.0], False),  # the same again
        ([0, 1, 2, 2], [35.0], False),  # the last one of several
    ],
)
def test_an_epoch_with_data_of_its_own_gives_no_advice_on_the_number_of_epochs(
    epochs: list[int], ends_s: list[float], adds: bool
):
    at = [(10 * i, 10_000 * i) for i in range(1, len(epochs) + 1)]
    scores = [Point("valid_auc", step / 100, ms, step) for step, ms in at]
    points = [Point("epoch", float(epoch), ms, step) for epoch, (step, ms) in zip(epochs, at, strict=True)]
    story = story_of(*map(finished, ends_s), history={"valid_auc": scores, "epoch": points})
    table = overview.epochs(story)
    assert table is not None and story.adds_an_epoch is adds
    assert ("the ones to quote" in table.note, "do not compare" in table.note) == (not adds, adds)
    assert any("more epochs may be better" in one.text for one in next_steps(story)) is not adds


def test_a_score_measured_again_where_a_finished_job_is_launched_again_adds_no_epoch():
    """At the same step, so the newest value is in force."""
    reported = [(10, 10_000, 0), (20, 20_000, 1), (30, 30_000, 2), (30, 40_000, 2)]
    points = {
        "valid_auc": [Point("valid_auc", step / 100, ms, step) for step, ms, _ in reported],
        "epoch": [Point("epoch", float(epoch), ms, step) for step, ms, epoch in reported],
    }
    story = story_of(finished(35.0), history=history_in_force(points))
    assert len(story.history["valid_auc"]) == 3 and not story.adds_an_epoch
    points["valid_auc"].append(Point("valid_auc", 0.4, 50_000, 40))
    points["epoch"].append(Point("epoch", 3.0, 50_000, 40))
    assert story_of(finished(35.0), finished(45.0), history=history_in_force(points)).adds_an_epoch


def test_a_later_epoch_with_data_of_its_own_is_not_behind_the_best_one():
    history = {"valid_auc": [Point("valid_auc", 0.8, 10_000, 10), Point("valid_auc", 0.7, 20_000, 20)]}
    history["epoch"] = [Point("epoch", 0.0, 10_000, 10), Point("epoch", 1.0, 20_000, 20)]
    texts = []
    for end in (finished(25.0), finished(15.0)):
        story = story_of(SAVED, end, history=history)
        logged = story_of(
            {"event": "model_logged", "step": 20, "message": "", "data": {"model_uri": "m", "model_step": 20}},
            end, history=history,
        )  # fmt: skip
        texts.append((next_steps(story)[0].text, logged.better_than_logged))
    assert "which is not the model of epoch 0" in texts[0][0] and texts[0][1] == "epoch 0, at step 10"
    assert "which is not" not in texts[1][0] and texts[1][1] == ""


def test_the_headline_is_the_story_in_short():
    params = {"model.kind": "deepfm", "data.dir": "/data/clicks"}
    workers = {"workers": [Point("workers", 3.0, 0, 10), Point("workers", 2.0, 0, 20)]}
    story = story_of(SAVED, params=params, history=scored(0.7, 0.81) | workers)
    assert headline(story) == (
        "deepfm on /data/clicks: 40 steps, 2 to 3 workers, 1 min 01 s. The best valid_auc is 0.8100, in step 20. "
        "Nothing went wrong that still holds."
    )
    assert headline(story_of(OPEN)) == "A model: 9 steps, 1 min 01 s. What went wrong: warnings (1)."
    assert "What went wrong: end (why)" in headline(story_of(status="FAILED", reason="why"))


def test_the_data_of_a_job_is_on_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(SpoolDelivery, "look", lambda self, is_chief: None)
    data = {"train": {"kind": "click log", "samples": 1200}, "valid": {"kind": "click log", "samples": 60}}
    callback = MLflowCallback(spool_dir=tmp_path, system_metrics=False, data=data)
    callback.on_job(job("data"))
    story = from_files(tmp_path)
    assert story.data == data
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page(story)))
    assert (facts["data"], facts["samples, train"], facts["samples, valid"]) == ("click log", "1,200", "60")
    assert ["train.samples", "1200"] in table(story, "Data")


def test_the_saved_model_and_its_version_are_on_the_page():
    story = story_of({**LOGGED, "data": {**LOGGED["data"], "version": "3"}})
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page(story)))
    assert (facts["saved model"], facts["its address"]) == ("ctr, version 3", "models:/m-1")


def test_a_logged_model_that_is_not_the_best_one_is_named_with_the_checkpoint_of_that():
    best = {"best_step": 18, "best_metric": "valid_auc", "best_value": 0.8}
    saved = [
        {**SAVED, "step": k, "data": {**SAVED["data"], "saved_step": k, "manifest": f"m{k}", **best}}
        for k in (15, 20, 40)
    ]
    logged = {**LOGGED, "data": {**LOGGED["data"], "version": "3", "model_step": 40}}
    story = story_of(*saved, logged, history=scored(0.7, 0.8, 0.6, 0.5))
    facts = {fact.name: fact.value for fact in [*what_trained(story), *how_well(story)]}
    assert facts["saved model"] == "ctr, version 3, of step 40"
    assert facts["better than the saved model"] == "valid_auc 0.8000 of step 18, in the checkpoint of step 20"
    assert facts["best checkpoint"] == "valid_auc 0.8000 of step 18, saved at step 20: s3://b/job/m20"
    first = next_steps(story)[0]
    assert "LogModel(of='best') logs and registers it in the next job" in first.text
    assert first.command == "gba-hvd model export s3://b/job MODEL_URL --step 20 --build FILE.py:CALLABLE"
    assert as_json(story)["kept_best"]["saved_step"] == 20
    of_the_best = {**logged, "data": {**logged["data"], "model_step": 20}}
    assert story_of(*saved, of_the_best, history=scored(0.7, 0.8, 0.6)).better_than_logged == ""
    assert "--step 20 is, with valid_auc 0.8000" in next_steps(story_of(*saved))[0].text
    none_kept = story_of(logged, history=scored(0.7, 0.8, 0.6, 0.5))
    assert "no checkpoint was kept of it" in next_steps(none_kept)[0].text
    assert story_of(logged, history=scored(0.6, 0.7, 0.8)).better_than_logged == "", "no score since"


def checkpoint_of(k: int, **best: Any) -> dict[str, Any]:
    about = {"best_metric": "valid_auc", **best}
    return {**SAVED, "step": k, "data": {**SAVED["data"], "saved_step": k, "manifest": f"m{k}", **about}}


@pytest.mark.slow
def test_a_best_model_that_was_not_saved_is_a_warning_that_holds_and_the_best_one_that_is_has_its_own_value():
    missed = {"best_unsaved_step": 10, "best_unsaved_value": 0.8, "best_unsaved_why": "no server"}
    text = "the best model, valid_auc 0.8000 of step 10, was not saved: no server"
    warned = {"event": "best_not_saved", "step": 20, "level": "warning", "message": text, "data": {"best_step": 10}}
    saved = [checkpoint_of(k, best_step=20, best_value=0.7, **missed) for k in (20, 40)]
    story = story_of(warned, *saved, history=scored(0.8, 0.7, 0.6, 0.5))
    facts = {fact.name: fact.value for fact in how_well(story)}
    assert facts["best checkpoint that is saved"] == "valid_auc 0.7000 of step 20, saved at step 20: s3://b/job/m20"
    assert "best checkpoint" not in facts
    assert text in page(story) and "Nothing went wrong that still holds" not in page(story)
    assert as_json(story)["kept_best"]["unsaved"]["step"] == 10


def test_a_checkpoint_after_a_resume_is_not_that_of_a_best_model_from_before_it():
    resumed = {"event": "resumed", "step": 20, "data": {}}
    later = checkpoint_of(40, best_step=10, best_value=0.8)
    assert story_of(resumed, later).kept_best is None
    kept = story_of(checkpoint_of(12, best_step=10, best_value=0.8), resumed, later).kept_best
    assert kept is not None and kept.saved_step == 12


def test_failures_are_counted_with_their_pls():
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page(story_of(BACK, BACK | {"step": 20}))))
    assert facts["recoveries"] == "2"
    assert facts["rows back from a checkpoint"] == "10"
    assert facts["portion of lost samples (PLS)"] == "0.25000"


def test_the_note_of_a_run_is_the_first_part_as_markdown():
    note = run_note(story_of(LOGGED, params={"model": "a*b_c<b>`"}), "#/report")
    assert note.startswith("a\\*b\\_c\\<b\\>\\`: 50 steps")
    assert "**What went wrong**: warnings: none" in note
    assert "1. Serve the model" in note
    assert "[The whole report](#/report)" in note


def test_lines_differ_without_their_colours():
    looks = [(line["color"], line["linestyle"]) for line in map(plots._line, range(12))]
    assert len(set(looks)) == 12
    dashes = [dash for _, dash in looks]
    assert all(a != b for a, b in itertools.pairwise(dashes))
    signs = [sign for _, sign in plots._MARKED.values()]
    assert len(set(signs)) == len(signs)


@pytest.mark.slow
def test_every_colour_of_a_picture_has_one_for_dark_ground(whole_page: str):
    for data in re.findall(r"base64,([^\"]+)", whole_page):
        svg = base64.b64decode(data).decode()
        left = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", svg)) - {plots._ORANGE, plots._SKY}
        assert not left and "prefers-color-scheme:dark" in svg


def test_settings_of_a_job_that_was_launched_again_are_the_new_ones_beside_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(SpoolDelivery, "look", lambda self, is_chief: None)
    for launch, settings in enumerate(({"mode": "gba", "clip": 5}, {"mode": "auto"})):
        callback = MLflowCallback(spool_dir=tmp_path, system_metrics=False)
        callback.on_job(job("again", lr=1, **settings))
        callback.on_event(Event("resumed" if launch else "table_full", 5, "x", level="info" if launch else "warning"))
    story = from_files(tmp_path)
    assert dict(story.params) == {"mode": "auto", "lr": "1"}
    assert dict(story.first_params) == {"mode": "gba", "clip": "5"}
    assert table(story, "Parameters") == [["clip", "not set any more", "5"], ["lr", "1", ""], ["mode", "auto", "gba"]]
    assert [row[3] for row in table(story, "Warnings")] == ["since step 5"]


@pytest.mark.slow
def test_captions_speak_of_colours_where_there_are_some(whole_page: str):
    text = Page(whole_page).text
    assert "Throughput and workers. The ground shows the mode. Upright lines show what happened." in text


@pytest.mark.slow
def test_pictures_come_for_what_was_measured(spool: Path, tmp_path: Path):
    story = from_files(spool)
    files = draw_plots(story.history, story.events, "t", tmp_path)
    assert [file.name for file in files] == [
        "learning_curves.png",
        "throughput.png",
        "workers.png",
        "gain.png",
        "staleness.png",
    ]
    few = {key: found for key, found in story.history.items() if not key.startswith(g.PREFIX)}
    assert len(draw_plots(few, (), "t", tmp_path)) == 2


# --- rounds of replicas ----------------------------------------------------------------------------------------------


def gauge(key: str, *values: float) -> dict[str, list[Point]]:
    return {key: [Point(key, value, step, step) for step, value in enumerate(values, start=1)]}


def drawn(history: dict[str, list[Point]], folder: Path) -> dict[str, str]:
    """The pictures of a run by name, as SVG, in which every word stands as a comment."""
    return {file.stem: file.read_text() for file in draw_plots(history, (), "t", folder, form="svg")}


PACE = (
    gauge("job/rounds_per_s", 4, 5) | gauge("job/local_steps_per_round", 6, 7) | gauge("job/spread_of_replicas", 1e-3)
)


@pytest.mark.slow
def test_rounds_are_one_picture_with_a_panel_for_what_was_reported(tmp_path: Path):
    pictures = drawn(PACE | gauge("job/rounds_dropped", 0, 0), tmp_path)
    assert list(pictures) == ["rounds"]
    for label in ("rounds/s", "local steps a round", "spread of replicas"):
        assert f"<!-- {label} -->" in pictures["rounds"]
    assert "<!-- rounds dropped so far -->" not in pictures["rounds"]


def test_rounds_that_were_all_dropped_are_shown_as_such(tmp_path: Path):
    picture = drawn(gauge("job/rounds_dropped", 1, 3), tmp_path)["rounds"]
    assert "<!-- rounds dropped so far -->" in picture
    assert "<!-- rounds/s -->" not in picture


@pytest.mark.slow
def test_the_page_has_the_rounds_that_a_job_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(SpoolDelivery, "look", lambda self, is_chief: None)
    callback = MLflowCallback(spool_dir=tmp_path, log_every_steps=1, system_metrics=False)
    callback.on_job(job("replicas"))
    rates = {"rounds_per_s": 4.0, "seconds_per_round": 0.1, "steps_per_round": 6.0, "spread": 0.01, "rounds_dropped": 0}
    callback.on_event(Event("rates", 1, "4.0 rounds/s", rates))
    callback.on_step(step(1))
    assert "Rounds that keep the replicas" in page(from_files(tmp_path))


@pytest.mark.slow
def test_decisions_are_shown_with_the_gain_that_was_predicted_and_the_reason(spool: Path, whole_page: str):
    story = from_files(spool)
    assert table(whole_page, "Decisions of mode") == [
        [f"{at:,}", mode, f"{gain:.2f}", "10,000", f"{10_000 * gain:,.0f}", reason]
        for at, (mode, gain, _, reason) in DECISIONS.items()
    ]
    assert "decision" not in [row[2] for row in table(whole_page, "Membership, recovery and other events")]
    assert [point.value for point in story.history[g.GAIN]][:1] == [1.02]


@pytest.mark.slow
def test_the_delays_and_what_the_papers_measure_are_on_the_page(spool: Path, whole_page: str):
    story = from_files(spool)
    for metric in (g.DENSE_AGE_MEAN, f"{g.GAP}0", f"{g.GAP_IN_STEPS}0", g.ELP, g.BYTES_SENT, g.BYTES_RECEIVED):
        assert story.history[metric], metric
    assert table(whole_page, "Age of the dense values") and table(whole_page, "Gap by worker")
    assert "<dt>samples computed on at once (ELP)</dt><dd>1,024</dd>" in whole_page


# --- bytes and compression -------------------------------------------------------------------------------------------


def traffic(step: int, n_bytes: dict[str, int], unix_s: float = 0.0, **data: object) -> Record:
    data["all_workers"] = n_bytes
    return {"event": "traffic", "step": step, "message": "", "data": data, "unix_s": unix_s or float(step)}


def decided(step: int, reason: str, **data: object) -> Record:
    data["compressor"] = "int8"
    return {"event": "compression", "step": step, "message": reason, "data": data, "unix_s": step}


def history_of(*events: Record) -> RunHistory:
    return RunHistory("t", "here", "j", "FINISHED", "", 0, 1, {}, {}, events)


def table(story: RunHistory | str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading of the page, row by row; empty when there is none. story: or its page"""
    html = story if isinstance(story, str) else page(story)
    found = re.search(rf"<h2>{re.escape(heading)}.*?<tbody>(.*?)</tbody>", html, re.S)
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", found[1], re.S) if found else []
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]


BYTES = "Bytes on the wires of all workers"


def test_bytes_are_those_of_all_workers_at_the_newest_end_of_an_epoch():
    before = {"sent_allreduce_dense": 1000, "received_allreduce_dense": 900, "sent_hop_bs_header": 5}
    now = {**before, "sent_allreduce_dense": 3000, "received_hop_bs_rows": 70}
    assert table(history_of(traffic(10, before), traffic(20, now)), BYTES) == [
        ["allreduce", "dense", "3.0 kB", "900 B"],
        ["hop_bs", "header", "5 B", "0 B"],
        ["hop_bs", "rows", "0 B", "70 B"],
    ]


def test_bytes_of_steps_that_were_done_again_are_left_out():
    resumed = {"event": "resumed", "step": 5, "message": "", "unix_s": 50.0}
    lost, again = traffic(10, {"sent_gba_rows": 7}, 10.0), traffic(10, {"sent_gba_rows": 9}, 60.0)
    assert table(history_of(lost, resumed, again), BYTES) == [["gba", "rows", "9 B", "0 B"]]


def test_density_is_that_of_the_newest_end_of_an_epoch():
    before = traffic(10, {"sent_gba_dense": 1}, density={"w": 0.5}, row_density=[0.4])
    newest = traffic(20, {"sent_gba_dense": 1}, density={"w": 0.0125, "<b>": 1.0}, row_density=[0.25])
    assert table(history_of(before, newest), "Density") == [
        ["w", "1.25%"],
        ["&lt;b&gt;", "100.00%"],
        ["rows", "25.00%"],
    ]
    two_groups = traffic(30, {"sent_gba_dense": 1}, row_density=[0.25, 0.5])
    assert table(history_of(newest, two_groups), "Density") == [
        ["rows, group 0", "25.00%"],
        ["rows, group 1", "50.00%"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("second", "is_noted"), [("shadow", True), ("allreduce", False)])
def test_staleness_of_several_modes_is_said_to_be_of_all_together(second: str, is_noted: bool):
    changes = [("allreduce", "gba", 2), ("gba", second, 9), (second, "allreduce" if second == "shadow" else "gba", 20)]
    events = [
        {"event": "switch", "step": at, "message": "", "data": {"from": a, "to": b}, "unix_s": float(at)}
        for a, b, at in changes
    ]
    ended = {"event": "finished", "step": 30, "message": "", "data": {"staleness": {"0": 8, "3": 2}}, "unix_s": 30.0}
    text = page(history_of(*events, ended))
    assert ("Of gba, shadow together" in text) is is_noted
    assert ("0.60 steps, all asynchronous modes together" in text) is is_noted and "0.60 steps" in text


def test_a_recovery_stands_beside_what_was_expected_and_the_target():
    data = {"rows_restored": 5, "pls": 0.03, "pls_total": 0.034, "pls_expected": 0.01, "target_pls": 0.02}
    (row,) = table(history_of({"event": "rows_restored", "step": 9, "data": data, "unix_s": 9.0}), "Recoveries")
    assert row[5:9] == ["0.03000", "0.03400", "0.01000", "0.02000"]
    without = {"event": "rows_restored", "step": 9, "data": {"rows_restored": 5}, "unix_s": 9.0}
    assert table(history_of(without), "Recoveries")[0][5:9] == ["-"] * 4


def test_densities_are_said_to_be_of_what_was_compressed_where_something_was_not():
    sent = traffic(30, {"sent_gba_dense": 1}, density={"w": 0.5}, row_density=[0.18])
    bypassed, note = decided(12, "rows go as they are", compress=False, bypassed={}), "Compression was bypassed"
    assert table(history_of(bypassed, sent), "Density") == [["w", "50.00%"], ["rows", "18.00%"]]
    assert note in page(history_of(bypassed, sent))
    assert note in page(history_of(decided(13, "1 of 2", compress=True, bypassed={"v": "why"}), sent))
    assert note not in page(history_of(decided(12, "rows go compressed", compress=True, bypassed={}), sent))


def test_many_tensors_are_counted_beyond_the_first():
    rows = table(history_of(traffic(10, {}, density={f"w{i}": 0.1 for i in range(203)})), "Density")
    assert (len(rows), rows[-1]) == (201, ["... and 3 more", ""])


def test_the_newest_decisions_about_compressing_are_shown_in_their_words():
    assert table(history_of(decided(8, "dense gradients go compressed: why")), "Compression") == [
        ["8", "int8", "dense gradients go compressed: why"]
    ]
    many = history_of(*(decided(step, f"reason {step}") for step in range(1, 8)))
    assert [row[2] for row in table(many, "Compression, the newest 5 of 7 decisions")] == [
        f"reason {step}" for step in (7, 6, 5, 4, 3)
    ]


@pytest.mark.slow
def test_a_run_without_compression_or_other_hosts_has_no_heading_for_them(whole_page: str):
    nothing_selected = traffic(10, {}, density={}, row_density=[0.0, 0.0])
    for text in (whole_page, page(history_of()), page(history_of(nothing_selected))):
        headings = re.findall(r"<h2>(.*?)</h2>", text)
        assert not [heading for heading in headings if heading.startswith(("Bytes", "Density", "Compression"))]
        assert "Rounds that keep" not in text


def test_bytes_and_decisions_come_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    events = [traffic(10, {"sent_gba_rows": 7}, density={"w": 0.5}), decided(11, "why")]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    assert cli.main(["report", "--json", str(tmp_path)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["bytes"] == [{"mode": "gba", "kind": "rows", "sent": 7, "received": 0}]
    assert (figures["density"], figures["row_density"]) == ({"w": 0.5}, [])
    (decision,) = figures["compression"]
    assert (decision["step"], decision["compressor"], decision["reason"]) == (11, "int8", "why")


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_writes_the_page(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", str(spool)]) == 0
    assert capsys.readouterr().out.startswith("report-slow.html (")
    assert (tmp_path / "report-slow.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.glob("*report*")) == ["report-slow.html"]


def test_the_figures_come_as_json(spool: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["report", "--json", str(spool)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [(one["step"], one["from"], one["to"]) for one in figures["switches"]] == [
        (step, was, to) for step, (was, to, _) in SWITCHES.items()
    ]
    assert figures["modes"][1]["mode"] == "gba"


def test_a_page_that_cannot_be_written_is_said(spool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    assert cli.main(["report", str(spool), "--out", str(tmp_path / "file" / "page.html")]) == 1
    assert re.search(r"page\.html cannot be written: .*--out", capsys.readouterr().err)


# --- what must not be seen -------------------------------------------------------------------------------------------

SECRET_URI = "https://joe:hunter2@tracking.example/path?access_token=hunter2"


def test_passwords_are_in_no_record_log_or_page_and_the_sender_still_has_the_uri(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(SpoolDelivery, "look", lambda self, is_chief: None)
    callback = MLflowCallback(
        spool_dir=tmp_path, system_metrics=False, tracking_uri=SECRET_URI, run_name="slow",
        params={"checkpoint": {"url": "s3://key:hunter2@bucket/job", "storage_options": {"secret": "hunter2"}}},
        config={"tracking": SECRET_URI},
    )  # fmt: skip
    callback.on_job(job("secret"))
    callback.on_event(Event("checkpoint", 1, f"saved to {SECRET_URI}", {"url": SECRET_URI}))
    assert callback.spool is not None
    first, *others = callback.spool.read_text().splitlines()
    assert json.loads(first)["tracking_uri"] == SECRET_URI, "the sender needs it"
    assert others and "hunter2" not in "".join(others)
    write_status(callback.spool, SpoolStatus(tracking_uri=SECRET_URI, run_id="r", experiment_id="1"))
    assert "hunter2" not in how_to_open(read_status(callback.spool))
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o077 == 0, f"{path.name}: others can read it"
    assert "hunter2" not in page(from_files(tmp_path))


@pytest.mark.slow
def test_a_run_may_have_any_name(spool: Path, tmp_path: Path):
    story = replace(from_files(spool.parent), title=r"costs $5 and $\frac{1 here")
    assert draw_plots(story.history, story.events, story.title, tmp_path)


# --- workers that were lost ------------------------------------------------------------------------------------------


def told(kind: str, **data: object) -> Record:
    return {"event": kind, "step": 1, "message": "", "data": data}


def lost(workers: int) -> Record:
    return told("worker_lost", workers=workers)


def formed(workers: int) -> Record:
    return told("membership", workers=workers)


def failed(pid: int) -> Record:
    return told("worker_failed", host="h1", pid=pid)


@pytest.mark.parametrize(
    ("events", "n"),
    [
        ([told("started", workers=4), formed(3), formed(4)], 1),
        ([told("started", workers=4), lost(4), formed(3), formed(2)], 1),
        ([told("started", workers=2), formed(4)], 0),
    ],
)
def test_workers_that_are_fewer_without_a_reported_loss_are_a_fact_of_their_own(events: list[Record], n: int) -> None:
    """As of one that died in an asynchronous mode."""
    facts = {fact.name: fact.value for fact in what_went_wrong(history_of(*events))}
    assert facts.get("workers that left, or died in an asynchronous mode") == (str(n) if n else None)


LOST, FORMED = {"event": "worker_lost", "data": {"workers": 3}}, {"event": "membership", "data": {"workers": 2}}


@pytest.mark.parametrize(
    ("events", "n"),
    [
        ([], 0),
        ([LOST, FORMED], 1),
        ([FORMED, FORMED], 2),
        ([LOST, FORMED, LOST], 2),
        ([LOST, LOST, FORMED], 1),
        ([LOST, {"event": "started", "data": {"workers": 3}}, FORMED], 2),
        ([FORMED, told("membership", workers=2, same_workers=True), FORMED], 2),
        ([LOST, told("membership", workers=3, same_workers=True)], 0),
    ],
)
def test_changes_of_workers_are_worlds_that_formed_and_losses_without_one(events: list[Record], n: int) -> None:
    facts = {fact.name: fact.value for fact in what_went_wrong(history_of(*events))}
    assert facts.get("changes of workers") == (str(n) if n else None)


def test_servers_that_died_and_were_started_again_are_counted() -> None:
    facts = {fact.name: fact.value for fact in what_went_wrong(history_of(told("server_restarted"), told("switch")))}
    assert facts["other failures"] == "server restarted x 1"


def test_pauses_are_a_fact_with_what_they_were_for() -> None:
    pauses = [("training_continues", {"seconds": 12.34}), ("training_continues", {"seconds": 9.0, "cause": "joined"})]
    pauses += [("ended_in_pause", {"seconds": 70.0, "cause": "loss"})]
    events = [{"event": kind, "step": 1, "message": "", "data": data} for kind, data in pauses]
    facts = {fact.name: fact.value for fact in what_went_wrong(history_of(*events))}
    assert facts["training stood still"] == (
        "1 min 31 s: 12.3 s + 1 min 10 s after a loss of workers, 9.0 s to let workers in"
    )
    joined = {"seconds": 9.0, "cause": "joined", "so_far_s": 21.0}
    for kind in ("training_continues", "ended_in_pause"):
        assert metrics_of(kind, 1, joined) == (1, {"pause_to_let_workers_in_s": 9.0, "paused_s": 21.0})
    assert metrics_of("training_continues", 1, {"seconds": 12.34}) == (1, {"pause_after_loss_s": 12.34})


@pytest.mark.parametrize(
    ("events", "n"),
    [
        ([told("started")], 0),
        ([told("started"), formed(3)], 0),
        ([lost(2), formed(2)], 1),
        ([record for pid in range(5) for record in (lost(2), formed(2), failed(pid))], 5),
        ([lost(4), formed(4), failed(1), failed(2), failed(2)], 2),
        ([lost(8), formed(4)], 4),
        ([lost(3), lost(3), formed(2), failed(9), formed(3)], 1),
        ([formed(2), failed(9)], 1),
        ([lost(3), told("started"), lost(3), formed(2)], 2),
        ([lost(3)], 1),
        ([{"event": "worker_lost"}, {"event": "membership"}], 1),
        ([lost(2), told("membership", workers=2, same_workers=True)], 0),
        ([lost(2), told("membership", workers=2, same_workers=True), lost(2), formed(1)], 1),
    ],
)
def test_workers_that_were_lost_are_counted_once(events: list[Record], n: int) -> None:
    story = history_of(*({"step": 1, "message": "", **record} for record in events))
    words = f"{n} worker{'s were' if n > 1 else ' was'} lost"
    assert story.n_workers_lost == n
    assert (words in headline(story)) == (n > 0) == ("lost" in headline(story))
    assert f"workers lost: {n or 'none'}" in run_note(story, "http://x")


def test_only_long_names_may_be_broken_in_a_table():
    manifest, url = "manifests/000004-00003575.json", f"s3://bucket/{'x' * 60}/job"
    assert breakable(f"allreduce in {manifest}") == [(f"allreduce in {manifest}", False)]
    assert breakable(f"at {url}, full") == [("at ", False), (f"{url},", True), (" full", False)]
    assert breakable("") == []


def test_one_odd_value_does_not_flatten_the_throughput():
    values = [10_000.0 + 100 * (k % 30) for k in range(400)]
    assert ceiling(values) is None
    top = ceiling([*values, 110_000.0, math.nan])
    assert top is not None and 12_900 < top < 20_000
    assert ceiling([1.0, 1.0, 50.0]) is None, "of few values none is odd"


def test_what_is_above_the_picture_is_named(tmp_path: Path):
    points = [Point(THROUGHPUT, 110_000.0 if k == 70 else 10_000.0, k, k) for k in range(1, 101)]
    (file,) = draw_plots({THROUGHPUT: points}, [], "ctr", tmp_path, form="svg")
    assert "1 value above, up to 110,000" in file.read_text()
