"""What a person reads while a job runs, at its end, and when it fails."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from gba_hvd.callbacks import Event, Job, StepRecord
from gba_hvd.errors import BadInput, WorldLost
from gba_hvd.tracking import ProgressLine
from tests.tracking.conftest import event, job, step


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(stream: io.StringIO) -> list[str]:
    """Without the time of day, where a line has one."""
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in stream.getvalue().splitlines()]


def run(progress: ProgressLine, jobs: list[Job], records: list[StepRecord]) -> None:
    for one in jobs:
        progress.on_job(one)
    for record in records:
        progress.on_step(record)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_lines_have_the_time_of_day_and_the_summary_has_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "strftime", lambda form: {"%H:%M:%S": "09:05:07"}[form])
    stream = io.StringIO()
    progress = ProgressLine(stream=stream, clock=Clock())
    run(progress, [job("j")], [step(1)])
    progress.on_event(event("switch", 1, "allreduce -> gba"))
    progress.on_metrics(1, {"valid_auc": 0.5})
    n_before = stream.getvalue().count("\n")
    progress.on_end("FINISHED", None)
    lines = stream.getvalue().splitlines()
    assert n_before == 3 and all(line.startswith("09:05:07 ") for line in lines[:3])
    assert lines[1] == "09:05:07 [switch] step 1: allreduce -> gba"
    assert len(lines) > 3 and not any("09:05:07" in line for line in lines[3:])


def test_in_a_pipe_plain_lines_come_every_few_seconds():
    stream = io.StringIO()
    progress = ProgressLine(total_steps=40, every_s=10.0, stream=stream, clock=Clock())
    progress.on_metrics(0, {"valid_auc": 0.5})
    run(progress, [job("j")], [step(k, workers=2, loss=0.25) for k in range(1, 31)])
    assert lines_of(stream) == [
        "step 0  valid_auc 0.5000",
        "step 1/40 (2%)  epoch 0  loss 0.2500  valid_auc 0.5000  6.4k samples/s  2 workers  allreduce",
        "step 11/40 (27%)  epoch 0  loss 0.2500  valid_auc 0.5000  6.4k samples/s  2 workers  allreduce  29s left",
        "step 21/40 (52%)  epoch 0  loss 0.2500  valid_auc 0.5000  6.4k samples/s  2 workers  allreduce  19s left",
    ]


def test_the_rate_of_a_mode_is_measured_from_its_first_step():
    """That one has the time that entering the mode took, and the steps before it are of the other mode."""
    stream = io.StringIO()
    progress = ProgressLine(every_s=3.0, stream=stream, clock=Clock())
    records = [step(k, workers=2, loss=None) for k in range(1, 4)]
    gba = replace(step(4, workers=2, loss=None), mode="gba")
    records += [replace(gba, step=k, seconds=9.0 if k == 4 else 0.005) for k in range(4, 8)]
    run(progress, [job("j")], records)
    assert lines_of(stream) == [
        "step 1  epoch 0  6.4k samples/s  2 workers  allreduce",
        "step 4  epoch 0  2 workers  gba",
        "step 7  epoch 0  12.8k samples/s  2 workers  gba",
    ]


def test_the_rate_of_a_job_that_began_in_another_mode_has_not_the_wait_for_it():
    stream = io.StringIO()
    progress = ProgressLine(every_s=2.0, stream=stream, clock=Clock())
    gba = replace(step(1, loss=None), mode="gba")
    run(progress, [job("j")], [replace(gba, seconds=60.0), replace(gba, step=2), replace(gba, step=3)])
    assert lines_of(stream) == ["step 1  epoch 0  1 worker  gba", "step 3  epoch 0  6.4k samples/s  1 worker  gba"]


def test_a_job_that_resumed_says_all_its_switches():
    before, stream = ProgressLine(stream=io.StringIO(), clock=Clock()), io.StringIO()
    before.on_event(Event("switch", 40, "allreduce -> gba", {"from": "allreduce", "to": "gba"}))
    after = ProgressLine(stream=stream, clock=Clock())
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    run(after, [job("j")], [])
    after.on_event(Event("resumed", 50, "resuming at step 50", {}))
    after.on_event(Event("switch", 60, "gba -> allreduce", {"from": "gba", "to": "allreduce"}))
    after.on_end("FINISHED", None)
    assert "switches: gba at step 40, allreduce at step 60" in lines_of(stream)


def test_on_a_terminal_one_line_is_renewed_and_events_stand_on_their_own():
    stream = Terminal()
    progress = ProgressLine(stream=stream, clock=Clock())
    run(progress, [job("j")], [step(1), step(2)])
    progress.on_event(event("worker_lost", 2, "rank 1 on h2 is gone"))
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith(" [worker lost] step 2: rank 1 on h2 is gone\n")


def test_the_summary_accounts_for_every_sample():
    stream = io.StringIO()
    progress = ProgressLine(stream=stream, clock=Clock())
    run(progress, [job("j", size=2), job("j")], [step(1)])
    account = dict(samples_total=1000, samples_applied=900, samples_dropped=60, samples_lost=40, restarts=1)
    progress.on_event(Event("finished", 1, "done", account))
    progress.on_end("FINISHED", None)
    progress.on_end("FINISHED", None)
    assert lines_of(stream)[-2:] == [
        "finished: 1 step in 2s, 1 change of workers",
        "samples: 900 applied + 60 dropped + 40 lost = 1,000",
    ]


def test_the_summary_has_the_age_that_decides_what_is_dropped() -> None:
    def summary(staleness_of: str) -> list[str]:
        stream = io.StringIO()
        progress = ProgressLine(stream=stream, clock=Clock())
        run(progress, [job("j", staleness_of=staleness_of)], [step(1)])
        progress.on_event(Event("finished", 1, "done", {"staleness": {"0": 9, "1": 1}, "lags": {"0": 3, "1": 7}}))
        progress.on_end("FINISHED", None)
        return lines_of(stream)

    ages = "age of dense values, which decides what is dropped: mean 0.70, max 1 (0: 30%, 1: 70%)"
    assert ages in summary("values")
    assert not any("age of dense values" in line for line in summary("token"))


def test_the_summary_has_the_name_that_the_job_goes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MLflow's run and `gba-hvd ps`: what TorchState was given, before the environment."""
    monkeypatch.setenv("GBA_HVD_JOB_NAME", "of-the-environment")
    stream = io.StringIO()
    progress = ProgressLine(stream=stream, clock=Clock())
    run(progress, [replace(job("j"), name="night run")], [step(1)])
    progress.on_end("FINISHED", None)
    assert lines_of(stream)[-2] == "night run: finished: 1 step in 2s, no change of workers"


def test_metrics_are_of_the_epoch_that_reports_them() -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream=stream, clock=Clock())
    run(progress, [job("j")], [replace(step(9), epoch=2)])
    progress.on_epoch(2)
    progress.on_metrics(9, {"valid_auc": 0.75})
    progress.on_epoch(3)
    progress.on_metrics(9, {"before_auc": 0.5})
    progress.on_end("FINISHED", None)
    assert lines_of(stream)[-2:] == [
        "last: epoch 3: before_auc 0.5000",
        "best: epoch 2, by valid_auc: valid_auc 0.7500",
    ]


def test_counters_of_bytes_do_not_hide_the_auc() -> None:
    """An event reports them, with units."""
    stream = io.StringIO()
    progress = ProgressLine(stream=stream, clock=Clock())
    progress.on_metrics(9, {"bytes_sent_allreduce_rows": 123_456_789.0, "bytes_received_gba_dense": 720.0})
    progress.on_metrics(9, {"job/bytes_sent": 123_456_789.0, "job/bytes_received": 123_456_789.0})
    progress.on_metrics(9, {"valid_logloss": 0.25, "valid_auc": 0.75, "bytes": 2000.0})
    progress.on_end("FINISHED", None)
    assert lines_of(stream) == [
        "step 9  valid_auc 0.7500  valid_logloss 0.2500  bytes 2000",
        "finished: 0 steps in 1s, no change of workers",
        "last: step 9: valid_auc 0.7500  valid_logloss 0.2500  bytes 2000",
        "best: step 9, by valid_auc: valid_auc 0.7500  valid_logloss 0.2500  bytes 2000",
    ]


def test_a_failure_begins_with_its_root_cause():
    stream = io.StringIO()
    progress = ProgressLine(stream=stream, clock=Clock(), every_s=1e9)
    run(progress, [job("j7", rank=0, size=2, host="h1")], [step(12)])
    n_before = len(lines_of(stream))
    try:
        try:
            raise ValueError("row 7: label 2, expected 0 or 1")
        except ValueError as cause:
            raise RuntimeError("reading failed") from cause
    except RuntimeError as error:
        progress.on_end("FAILED", error)
    lines = lines_of(stream)[n_before:]
    assert lines[0] == "error: ValueError: row 7: label 2, expected 0 or 1"
    assert "test_progress.py" in lines[1]
    assert lines[2:5] == [
        "  which led to RuntimeError: reading failed",
        "  on rank 0 of 2, host h1, job j7",
        "  after step 12, epoch 0",
    ]
    assert lines[5].startswith("failed: 12 steps")


def test_a_refused_input_is_its_own_cause():
    stream = io.StringIO()
    refused = BadInput("a batch of type dict has no `ids`: name them")
    refused.__cause__ = AttributeError("'dict' object has no attribute 'ids'")
    ProgressLine(stream=stream, clock=Clock()).on_end("FAILED", refused)
    assert lines_of(stream)[0] == "error: BadInput: a batch of type dict has no `ids`: name them"
    assert "AttributeError" not in stream.getvalue()


def test_a_worker_that_ends_with_a_refused_launch_reports_nothing_of_its_own():
    stream = io.StringIO()
    progress = ProgressLine(stream=stream, clock=Clock())
    progress.on_event(event("failed", 0))
    progress.on_end("FAILED", WorldLost("the worker of rank 0 could not resume", rank=0))
    assert stream.getvalue() == ""


class HorovodInternalError(RuntimeError):
    pass


def test_other_ranks_report_only_of_errors_that_began_with_them():
    for error, n_lines in ((HorovodInternalError("a peer is gone"), 0), (ValueError("mine"), 3)):
        stream = io.StringIO()
        progress = ProgressLine(stream=stream, clock=Clock())
        run(progress, [job("j", rank=1, size=2)], [step(1)])
        progress.on_event(event("membership", 1))
        progress.on_end("FAILED", error)
        assert len(lines_of(stream)) == n_lines


@pytest.mark.parametrize("trouble", [BrokenPipeError(), OSError(28, "No space left on device"), ValueError("closed")])
def test_an_output_that_takes_nothing_does_not_stop_training(trouble: Exception):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise trouble

    tried: list[str] = []
    run(ProgressLine(stream=Full(), clock=Clock()), [job("j")], [step(1)])
    assert tried


def test_an_output_that_was_closed_before_the_start_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    run(ProgressLine(clock=Clock()), [job("j")], [step(1)])


def test_warnings_are_named_in_the_line_and_reported_in_the_summary() -> None:
    out = io.StringIO()
    line = ProgressLine(stream=out, every_s=0.0, clock=lambda: 0.0)
    line.on_event(Event("server_late", 3, "no server yet; look at its log", level="warning"))
    line.on_step(StepRecord(4, 0, 8, 32, 0.1, 2, "allreduce", None))
    line.on_end("FINISHED", None)
    running, *summary = lines_of(out)
    assert running.endswith("warnings: server late")
    assert "warning: [server late] step 3: no server yet; look at its log" in summary


def test_options_without_effect_are_in_the_summary_for_each_mode() -> None:
    out = io.StringIO()
    line = ProgressLine(stream=out, every_s=0.0, clock=lambda: 0.0)
    for at, mode in ((3, "ma"), (5, "bsp")):
        line.on_event(Event("options_idle", at, f"of {mode}", {"mode": mode}, level="warning"))
    line.on_step(StepRecord(6, 0, 8, 32, 0.1, 2, "bsp", None))
    line.on_end("FINISHED", None)
    running, *summary = lines_of(out)
    assert running.endswith("warnings: options idle")
    shown = [text for text in summary if text.startswith("warning")]
    assert shown == ["warning: [options idle] step 3: of ma", "warning: [options idle] step 5: of bsp"]


def test_pauses_are_in_the_summary_by_what_they_were_for() -> None:
    """As the end has them, which knows those of an earlier rank 0, and the one that no step ended."""
    out = io.StringIO()
    line = ProgressLine(stream=out, clock=Clock())
    line.on_event(Event("training_continues", 50, "training continues after", {"seconds": 9.0, "cause": "joined"}))
    assert lines_of(out) == ["[training continues] step 50: training continues after"]
    pauses = [["loss", 12.34, 40], ["joined", 9.0, 50], ["joined", 12.8, 1060], ["loss", 2.0, None], ["left", 1, None]]
    line.on_event(Event("finished", 1060, "finished", {"pauses": pauses, "lasted_s": 3720.0}))
    line.on_end("FINISHED", None)
    assert "in 1h02m, " in out.getvalue(), "the launch is older than this rank 0"
    assert (
        "training stood still for 37.1 s: 14.3 s after a loss of workers (before step 40 and at the end), 21.8 s to "
        "let workers in (before step 50 and 1,060), 1.0 s since workers left (at the end)"
    ) in out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("dropped_for", "words"),
    [
        ({"stale": 64}, "64 dropped (too stale when they arrived) +"),
        ({"not_finite": 64}, "64 dropped (with a gradient that was not finite) +"),
        ({"stale": 40, "not_finite": 16, "overflow": 8},
         "64 dropped (40 too stale when they arrived, 16 with a gradient that was not finite, 8 of steps that "
         "overflowed) +"),
        ({}, "0 dropped +"),
    ],
)  # fmt: skip
def test_the_summary_gives_the_reason_of_dropped_samples(dropped_for: dict[str, int], words: str) -> None:
    out, dropped = io.StringIO(), sum(dropped_for.values())
    line = ProgressLine(stream=out, clock=Clock())
    account = {"samples_total": 640, "samples_applied": 640 - dropped, "samples_dropped": dropped, "samples_lost": 0}
    line.on_event(Event("finished", 10, "finished", {**account, "dropped_for": dropped_for, "staleness": {"0": 9}}))
    line.on_end("FINISHED", None)
    assert words in out.getvalue()


@pytest.mark.parametrize(
    ("kinds", "times"), [(["membership"], "no change"), (["membership", "worker_lost"], "1 change")]
)
def test_a_loss_after_which_no_world_has_formed_is_a_change_of_workers(kinds: list[str], times: str) -> None:
    out = io.StringIO()
    line = ProgressLine(stream=out, clock=Clock())
    for kind in kinds:
        line.on_event(Event(kind, 40, kind))
    line.on_end("FINISHED", None)
    assert f", {times} of workers" in out.getvalue()


def test_a_checkpoint_that_a_new_rank_0_finds_is_in_the_summary_only() -> None:
    out = io.StringIO()
    line = ProgressLine(stream=out, clock=Clock())
    line.on_event(
        Event("checkpoint", 9, "step 4 saved", {"saved_step": 4, "url": "/c", "manifest": "m", "found": True})
    )
    line.on_end("FINISHED", None)
    assert [text for text in lines_of(out) if "checkpoint" in text] == ["newest checkpoint: of step 4, /c/m"]


def test_workers_that_hang_are_counted_until_they_work_again_or_the_world_changes() -> None:
    out = io.StringIO()
    line = ProgressLine(stream=out, every_s=0.0, clock=lambda: 0.0)

    def shown(kind: str, **data: Any) -> str:
        line.on_event(Event(kind, 4, "", data, level="warning" if kind == "worker_hangs" else "info"))
        line.on_step(StepRecord(4, 0, 8, 32, 0.1, 3, "gba", None))
        (workers,) = [part for part in lines_of(out)[-1].split("  ") if "workers" in part]
        return workers

    assert shown("checkpoint") == "3 workers"
    assert shown("worker_hangs", rank=1, pid=41) == "3 workers, 1 not active"
    assert shown("worker_hangs", rank=2, pid=42) == "3 workers, 2 not active"
    assert shown("worker_works", pid=41) == "3 workers, 1 not active"
    assert shown("membership") == "3 workers"
    assert shown("worker_hangs", rank=2, pid=42) == "3 workers, 1 not active"
    assert shown("switch", to="allreduce") == "3 workers"


def test_a_warning_that_is_over_is_named_in_the_summary_only() -> None:
    out = io.StringIO()
    line = ProgressLine(stream=out, every_s=0.0, clock=lambda: 0.0)
    line.on_event(Event("server_missing", 3, "no server yet", {"waiting": ["mode gba"]}, level="warning"))
    line.on_event(Event("checkpoint_failed", 4, "the disk is full", level="warning"))
    line.on_event(Event("rows_lost", 4, "5 rows are lost", level="warning"))
    line.on_step(StepRecord(4, 0, 8, 32, 0.1, 2, "allreduce", None))
    line.on_event(Event("switch", 5, "", {"from": "allreduce", "to": "gba"}))
    line.on_event(Event("checkpoint", 6, "step 6 saved", {"url": "x", "manifest": "m"}))
    line.on_step(StepRecord(7, 0, 8, 32, 0.1, 2, "gba", None))
    line.on_end("FINISHED", None)
    said = lines_of(out)
    first, second = (text for text in said if text.startswith("step ") and "workers" in text)
    assert first.endswith("warnings: server missing, checkpoint failed, rows lost")
    assert second.endswith("warnings: rows lost")
    assert [text for text in said if text.startswith("warning")] == [
        "warning, over since step 5: [server missing] step 3: no server yet",
        "warning, over since step 6: [checkpoint failed] step 4: the disk is full",
        "warning: [rows lost] step 4: 5 rows are lost",
    ]


@pytest.mark.parametrize(("status", "n_notes"), [("FINISHED", 0), ("KILLED", 1), ("FAILED", 1), ("NOT_SAVED", 1)])
def test_what_a_restart_will_lack_is_one_note_where_there_is_something_to_resume(status: str, n_notes: int) -> None:
    out = io.StringIO()
    line = ProgressLine(stream=out, clock=lambda: 0.0)
    line.on_event(Event("memory_not_kept", 21, "it takes 0.4 ms of a step's 4 ms"))
    line.on_event(Event("traffic", 22, "3 MB"))
    line.on_end(status, None)
    said = [text for text in lines_of(out) if "memory not kept" in text or "traffic" in text]
    note = "note: [memory not kept] step 21: it takes 0.4 ms of a step's 4 ms"
    assert said == ["[traffic] step 22: 3 MB", *[note] * n_notes]


def test_of_several_scores_the_summary_says_which_chose_and_how_to_choose() -> None:
    out = io.StringIO()
    line = ProgressLine(stream=out, clock=lambda: 0.0)
    line.on_metrics(9, {"valid_click_auc": 0.7, "valid_buy_auc": 0.6, "valid_buy_logloss": 0.3})
    line.on_end("FINISHED", None)
    assert lines_of(out)[-1].startswith(
        "best: step 9, by valid_buy_auc (the first by name, before valid_click_auc; one that is reported as valid_auc "
        "comes first): valid_"
    )


def test_a_warning_that_comes_again_stands_again() -> None:
    out = io.StringIO()
    line = ProgressLine(stream=out, every_s=0.0, clock=lambda: 0.0)
    for kind, level in (("checkpoint_late", "warning"), ("checkpoint", "info"), ("checkpoint_late", "warning")):
        line.on_event(Event(kind, 1, "", {"url": "x", "manifest": "m"}, level=level))  # type: ignore[arg-type]
    line.on_step(StepRecord(2, 0, 8, 32, 0.1, 2, "allreduce", None))
    assert lines_of(out)[-1].endswith("warnings: checkpoint late")


def test_a_job_that_stopped_early_says_why_at_its_end() -> None:
    out = io.StringIO()
    line = ProgressLine(stream=out, clock=lambda: 0.0)
    line.on_event(Event("stopped_early", 215, "stopped early: no gain in valid AUC for 2 epochs"))
    line.on_event(Event("interrupted", 215, "by Ctrl-C", {"goes_on": "the same command resumes from step 215"}))
    line.on_end("KILLED", None)
    assert lines_of(out)[-2:] == [
        "stopped early: no gain in valid AUC for 2 epochs",
        "the same command resumes from step 215",
    ]


def test_a_resumed_job_tells_its_own_steps_from_those_of_all_launches():
    stream = io.StringIO()
    progress = ProgressLine(stream=stream, clock=Clock())
    progress.on_job(job("j"))
    progress.on_event(Event("resumed", 250, "", {}))
    progress.on_step(step(400, workers=2, loss=None))
    progress.on_event(Event("finished", 400, "", {"pauses": [["joined", 9.0, 50]]}))
    progress.on_end("FINISHED", None)
    assert "training stood still for 9.0 s in all launches: 9.0 s to let workers in (before step 50)" in lines_of(
        stream
    )
    (line,) = [line for line in lines_of(stream) if "finished: " in line]
    assert "finished: 400 steps in all launches, 150 of them in this one's 2s, no change of workers" in line


def test_a_job_that_rolled_back_was_launched_once() -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream=stream, clock=Clock())
    progress.on_job(job("j"))
    progress.on_event(Event("resumed", 93, "full recovery", {"from_step": 102, "strategy": "full"}))
    progress.on_step(step(188, workers=1, loss=None))
    progress.on_event(Event("finished", 188, "done", {"restarts": 2}))
    progress.on_end("FINISHED", None)
    (line,) = [line for line in lines_of(stream) if "finished" in line]
    assert line == "finished: 188 steps in 2s, 2 changes of workers"


def test_the_summary_counts_the_warnings_of_the_job_and_has_those_of_an_earlier_rank_0() -> None:
    def summary(n: int, over: int, standing: list[list[Any]]) -> list[str]:
        out = io.StringIO()
        line = ProgressLine(stream=out, clock=lambda: 0.0)
        line.on_event(Event("checkpoint_failed", 9, "the disk is full", level="warning"))
        warnings = {"n": n, "over": over, "standing": standing}
        line.on_event(Event("finished", 9, "", {"warnings": warnings}))
        line.on_end("FINISHED", None)
        return [text for text in lines_of(out) if text.startswith("warning")]

    own, of_another = ["checkpoint_failed", 9, "the disk is full"], ["rows_lost", 4, "5 rows are lost"]
    shown = ["warning: [checkpoint failed] step 9: the disk is full", "warning: [rows lost] step 4: 5 rows are lost"]
    assert summary(1, 0, [own]) == shown[:1]
    assert summary(2, 0, [of_another, own]) == shown
    *first, last = summary(43, 41, [of_another, own])
    assert first == shown and last.startswith("warnings: 43 in the job so far, 41 of them over; ")


def test_a_job_that_continues_after_its_end_has_another_summary() -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream=stream, clock=Clock())
    run(progress, [job("j")], [step(1)])
    progress.on_event(Event("interrupted", 1, "by Ctrl-C", {"goes_on": "a further call continues at step 1"}))
    progress.on_end("KILLED", None)
    n_before = len(lines_of(stream))
    run(progress, [job("j")], [step(2)])
    progress.on_end("FINISHED", None)
    after = lines_of(stream)[n_before:]
    (summary,) = (line for line in after if "finished" in line)
    assert re.search(r"finished: 2 steps in \S+, no change of workers$", summary)
    assert not any("a further call" in line for line in after)
