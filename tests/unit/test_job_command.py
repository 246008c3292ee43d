"""`gba-hvd status` and `gba-hvd switch`: which job is meant, what is told of it, and a real server that answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools import cli, job_command

import gba_hvd
from gba_hvd.callbacks import Event, StepRecord
from gba_hvd.errors import BadInput
from gba_hvd.ps import process
from gba_hvd.ps.transport import new_key
from gba_hvd.shard.memory import ShardMemory
from tests.unit.conftest import Clicks, Training
from tests.unit.test_memory import a_layout

Start = Callable[[str], ShardMemory]

IN_GBA: dict[str, Any] = {
    "job": "ctr", "server": 0, "mode": "gba", "step": 1200, "epoch": 2, "steps_done": 200, "loss": 0.4321,
    "account": {"total": 1000, "applied": 940, "dropped": 50, "lost": 10}, "staleness": {"0": 70, "1": 20, "5": 10},
    "under_way": 3, "reissued": 1, "refused": 0, "wanted": "", "reason": "", "world": 0, "rates": [[0, 0.01]],
    "decisions": ["gba: worker 2 takes 6.1x the median"], "refused_gradients": [],
    "by_worker": [
        {"rank": 0, "pid": 41, "silent_s": 0.1, "micro_batches": 900, "seconds_per_micro_batch": 0.01},
        {"rank": 1, "pid": 42, "silent_s": 7.0, "micro_batches": 0, "seconds_per_micro_batch": 0.0},
    ],
}  # fmt: skip


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Be a job's only worker on this host."""
    made: list[ShardMemory] = []

    def job(job_id: str) -> ShardMemory:
        made.append(ShardMemory.create_or_open(tmp_path, job_id, a_layout(), grace_s=0))
        return made[-1]

    yield job
    for memory in made:
        memory.close()


# --- which job is meant ----------------------------------------------------------------------------------------------


def test_the_only_job_needs_no_name(start: Start, tmp_path: Path) -> None:
    memory = start("ctr")
    assert job_command.find_job(tmp_path, None) == memory.folder
    assert job_command.find_job(tmp_path, "ctr") == memory.folder


def test_one_of_several_jobs_must_be_named(start: Start, tmp_path: Path) -> None:
    start("ctr-b"), start("ctr-a")
    with pytest.raises(BadInput, match=r"2 jobs run on this host, name one with --job: ctr-a, ctr-b"):
        job_command.find_job(tmp_path, None)
    with pytest.raises(BadInput, match=r"job 'ctr-c' does not run here .*; did you mean 'ctr-"):
        job_command.find_job(tmp_path, "ctr-c")


def test_a_folder_whose_workers_are_gone_is_no_running_job(start: Start, tmp_path: Path) -> None:
    start("ctr").close(remove=False)
    assert (tmp_path / "gba-hvd-ctr").is_dir()
    with pytest.raises(BadInput, match=r"no job runs here: .*--dir"):
        job_command.find_job(tmp_path, None)
    with pytest.raises(BadInput, match="job 'ctr' has no living worker on this host; running here: none"):
        job_command.find_job(tmp_path, "ctr")


def test_looking_does_not_keep_a_job_alive_or_end_it(start: Start, tmp_path: Path) -> None:
    memory = start("ctr")
    job_command.find_job(tmp_path, None)
    memory.close()
    assert not memory.folder.exists()


def test_the_folder_may_come_from_the_environment(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start("ctr")
    monkeypatch.setenv("GBA_HVD_SHARD_DIR", str(tmp_path))
    assert cli.main(["status"]) == 1
    assert "job 'ctr' has no companion server: it was started without a gba_hvd.GBACallback" in capsys.readouterr().err


def test_a_job_that_ends_while_it_is_asked_is_said_to_have_ended(start: Start) -> None:
    memory = start("ctr")
    memory.close()
    with pytest.raises(BadInput, match="job 'ctr' has just ended"):
        job_command.ask_status(memory.folder, timeout_s=1.0)


# --- what is told ----------------------------------------------------------------------------------------------------


def test_a_report_reads_as_sentences() -> None:
    assert job_command.facts(IN_GBA) == [
        ("mode", "gba"),
        ("step", "1,200, epoch 2 (step 200 of it)"),
        ("loss", "0.4321"),
        ("samples", "940 applied + 50 dropped + 10 lost = 1,000"),
        ("staleness", "mean 0.70, max 5 (0: 70%, 1: 20%, 5: 10%)"),
        ("micro-batches", "3 under way, 1 reissued"),
        ("decided", "gba: worker 2 takes 6.1x the median"),
    ]


def test_a_switch_on_its_way_is_told_with_its_reason() -> None:
    report = {"job": "ctr", "mode": "gba", "wanted": "allreduce", "reason": "worker 2 recovered"}
    assert ("on the way to", "allreduce: worker 2 recovered") in job_command.facts(report)


def test_in_allreduce_the_last_decision_is_told() -> None:
    report = {"job": "ctr", "mode": "allreduce", "step": 9, "epoch": 0, "workers": 3, "last_decision": "stay: 1.0x"}
    assert job_command.facts(report) == [
        ("mode", "allreduce"),
        ("step", "9, epoch 0"),
        ("workers", "3"),
        ("last decision", "stay: 1.0x"),
    ]


def test_the_least_a_server_may_say_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    job_command.print_report({"job": "ctr", "server": 0, "mode": "allreduce", "decisions": []})
    assert capsys.readouterr().out.split() == ["job", "ctr", "mode", "allreduce"]


def test_workers_are_listed_with_their_rates(capsys: pytest.CaptureFixture[str]) -> None:
    job_command.print_report(IN_GBA)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0", "10.0", "100.0", "900", "0.1", "s", "ago", "41"] in rows
    assert ["1", "-", "-", "0", "7.0", "s", "ago", "42"] in rows


# --- asking for a mode -----------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, start: Start) -> list[tuple[str, str]]:
    """A job in allreduce that changes as soon as it is asked to; what it was asked for."""
    start("ctr")
    wishes: list[tuple[str, str]] = []

    def status(folder: Path, timeout_s: float) -> dict[str, Any]:
        return {"job": "ctr", "mode": wishes[-1][0] if wishes else "allreduce", "step": 7}

    monkeypatch.setattr(job_command, "ask_status", status)
    monkeypatch.setattr(job_command, "ask_switch", lambda folder, mode, reason, s: wishes.append((mode, reason)))
    return wishes


def test_a_switch_is_asked_for_and_waited_for(
    asked: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["switch", "gba", "--dir", str(tmp_path), "--reason", "a slow disk"]) == 0
    assert asked == [("gba", "a slow disk")]
    assert capsys.readouterr().out.splitlines() == [
        "job ctr: asked for gba; it is in allreduce now",
        "job ctr: in gba at step 7",
    ]


def test_a_mode_the_job_is_in_is_not_asked_for(asked: list[tuple[str, str]], tmp_path: Path) -> None:
    assert cli.main(["switch", "allreduce", "--dir", str(tmp_path)]) == 0
    assert asked == []


def test_a_misspelt_mode_suggests_the_right_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["switch", "alreduce", "--dir", str(tmp_path)]) == 1
    assert "did you mean 'allreduce'?" in capsys.readouterr().err


def test_a_switch_that_does_not_come_is_an_error(
    asked: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_command, "_wait_for", lambda *_: None)
    assert cli.main(["switch", "gba", "--dir", str(tmp_path), "--wait", "5"]) == 1
    assert "still not in gba after 5 s" in capsys.readouterr().err


# --- real servers ----------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_server_that_serves_no_step_yet_answers_and_notes_the_wish(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = start("ctr")
    process.write_settings(memory.folder, "ctr", new_key(), a_layout(), gba_hvd.RowAdagrad(lr=0.1))
    assert cli.main(["switch", "gba", "--dir", str(tmp_path), "--wait", "0", "--timeout", "90"]) == 0
    assert capsys.readouterr().out == "job ctr: asked for gba; it is in allreduce now\n"
    assert cli.main(["status", "--json", "--dir", str(tmp_path), "--timeout", "90"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["job"], report["mode"]) == ("ctr", "allreduce")
    assert [text for text in report["decisions"] if text.startswith("gba: asked for by ")]


class Operator(gba_hvd.Callback):
    """Looks at the job it is part of, and asks for allreduce at a step."""

    def __init__(self, base: Path) -> None:
        self.base, self.reports, self.switches = base, list[dict[str, Any]](), list[Event]()

    def on_step(self, record: StepRecord) -> None:
        if record.mode == "gba" and len(self.reports) < 2:
            folder = job_command.find_job(self.base, None)
            self.reports.append(job_command.ask_status(folder, 60.0))
            if len(self.reports) == 2:
                job_command.ask_switch(folder, "allreduce", "enough seen", 60.0)

    def on_event(self, event: Event) -> None:
        if event.kind == "switch":
            self.switches.append(event)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_job_in_gba_mode_tells_its_rates_and_leaves_when_asked(tmp_path: Path) -> None:
    operator = Operator(tmp_path)
    training = Training(tmp_path)
    training.state.register_callbacks([operator, gba_hvd.GBACallback(mode="gba")])
    for _ in range(3):
        training.epoch(Clicks(96))
    training.state.close()
    first, second = operator.reports
    assert first["mode"] == second["mode"] == "gba"
    assert second["step"] >= first["step"] >= 1
    assert [worker["pid"] for worker in job_command.workers(second)] == [os.getpid()]
    assert sum(second["staleness"].values()) > 0
    assert [(event.data["from"], event.data["to"]) for event in operator.switches] == [
        ("allreduce", "gba"),
        ("gba", "allreduce"),
    ]
    assert operator.switches[1].data["reason"] == "enough seen"
