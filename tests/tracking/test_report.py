"""What can be read back of a job, and the page about it."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from gba_hvd_tools import cli
from gba_hvd_tools.report_page import page
from hypothesis import given
from hypothesis import strategies as st

from gba_hvd.errors import BadInput
from gba_hvd.switching import MODES
from gba_hvd.tracking import MLflowCallback
from gba_hvd.tracking import gauges as g
from gba_hvd.tracking.plots import MODE, Span, draw_plots, mode_spans
from gba_hvd.tracking.records import Point, Record
from gba_hvd.tracking.story import Story, by_mode, from_files
from tests.tracking.conftest import event, job, step
from tests.tracking.told_job import SWITCHES, tell


def points(*modes: tuple[int, str]) -> list[Point]:
    return [Point(MODE, float(MODES.index(mode)), 0, step) for step, mode in modes]


def switch(step: int, was: str, to: str) -> Record:
    return {"event": "switch", "step": step, "message": "", "data": {"from": was, "to": to}}


# --- modes over time -------------------------------------------------------------------------------------------------


def test_a_switch_tells_the_exact_step():
    told = points((10, "allreduce"), (20, "gba"), (30, "gba"))
    assert mode_spans(told, [switch(14, "allreduce", "gba")]) == [Span(0, 14, "allreduce"), Span(14, 30, "gba")]


def test_points_make_up_for_a_switch_whose_record_was_lost():
    told = points((10, "allreduce"), (20, "gba"), (30, "gba"))
    assert mode_spans(told, []) == [Span(0, 10, "allreduce"), Span(10, 30, "gba")]


def test_switches_are_enough_without_points():
    told = [switch(14, "allreduce", "gba"), switch(40, "gba", "allreduce"), switch(50, "allreduce", "bsp")]
    assert mode_spans([], told) == [Span(0, 14, "allreduce"), Span(14, 40, "gba"), Span(40, 50, "allreduce")]


def test_nothing_told_is_no_span():
    assert mode_spans([], []) == []


@given(st.lists(st.tuples(st.integers(1, 60), st.sampled_from(MODES), st.booleans()), max_size=12))
def test_spans_follow_each_other_without_gaps(told: list[tuple[int, str, bool]]):
    spans = mode_spans(
        points(*((step, mode) for step, mode, is_point in sorted(told) if is_point)),
        [switch(step, "allreduce", mode) for step, mode, is_point in told if not is_point],
    )
    assert all(span.first < span.last for span in spans)
    assert all(one.last == next_.first for one, next_ in itertools.pairwise(spans))
    assert not spans or spans[0].first == 0


# --- stories ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def spool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The spool of a job that saw everything."""
    monkeypatch.setattr(MLflowCallback, "_look_after_sender", lambda self: None)
    callback = MLflowCallback(spool_dir=tmp_path / "spool", log_every_steps=5, system_metrics=False, run_name="slow")
    tell([callback])
    assert callback.spool is not None
    return callback.spool


def test_a_spool_tells_the_whole_story(spool: Path):
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
    told = {MODE: points((10, "allreduce"), (20, "allreduce"), (30, "gba")), "train/samples_per_s": rates}
    allreduce, gba = by_mode(Story("t", "here", "j", "FINISHED", "", 0, 1, {}, told, ()))
    assert allreduce.samples_per_s == pytest.approx(150.0)
    assert gba.samples_per_s == pytest.approx(50.0)


def test_a_job_that_has_not_ended_has_a_story_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(MLflowCallback, "_look_after_sender", lambda self: None)
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
    monkeypatch.setattr(MLflowCallback, "_look_after_sender", lambda self: None)
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
        if tag not in ("meta", "img"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_holds_everything_and_refers_to_nothing(spool: Path):
    text = page(from_files(spool))
    shown = Page(text)
    assert len(shown.addresses) == 4
    assert all(address.startswith("data:image/svg+xml;base64,") for address in shown.addresses)
    assert not shown.tags & {"script", "link", "iframe"}
    assert "url(" not in text
    for _, _, reason in SWITCHES.values():
        assert reason in shown.text
    for heading in ("Switches", "Time in each mode", "Staleness", "Where every sample went", "Parameters"):
        assert heading in shown.text


def test_nothing_a_job_says_becomes_html(spool: Path):
    assert "<b>not bold</b>" not in page(from_files(spool))
    evil = "<script>alert(1)</script>\"'&"
    told = {"event": evil, "step": 1, "message": evil}
    switched = {"event": "switch", "step": 2, "message": evil, "data": {"from": evil, "to": evil, "reason": evil}}
    story = Story(evil, evil, evil, evil, evil, 0, 1, {evil: evil}, {}, (told, switched))
    shown = Page(page(story))
    assert "script" not in shown.tags
    assert shown.text.count("alert(1)") >= 8


def test_a_run_without_asynchronous_modes_has_no_word_of_them():
    story = Story("plain", "here", "j", "RUNNING", "", 0, None, {}, {}, (event_record("started"),))
    text = Page(page(story)).text
    assert "taleness" not in text
    assert "Switches" not in text


def event_record(kind: str) -> Record:
    one = event(kind, 0)
    return {"event": one.kind, "step": one.step, "message": one.message, "data": {}, "unix_s": one.unix_s}


def test_pictures_come_for_what_was_measured(spool: Path, tmp_path: Path):
    story = from_files(spool)
    files = draw_plots(story.history, story.events, "t", tmp_path)
    assert [file.name for file in files] == ["learning_curves.png", "throughput.png", "workers.png", "staleness.png"]
    few = {key: found for key, found in story.history.items() if not key.startswith(g.PREFIX)}
    assert len(draw_plots(few, (), "t", tmp_path)) == 2


# --- the command -----------------------------------------------------------------------------------------------------


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
