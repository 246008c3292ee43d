"""`gba-hvd status` and `gba-hvd switch`: which job is meant, what is shown of it, and a real server that answers."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools import cli, running_jobs
from gba_hvd_tools.commands import job
from gba_hvd_tools.health_words import health_facts, moment
from gba_hvd_tools.step_time_words import step_time_facts

import gba_hvd
from gba_hvd.callbacks import Event, StepRecord
from gba_hvd.errors import BadInput
from gba_hvd.mode_names import SETTINGS
from gba_hvd.ps import launch
from gba_hvd.ps.transport import new_key
from gba_hvd.ps.worker.host_server import HostServer
from gba_hvd.shm.shard_memory import ShardMemory
from tests.unit.conftest import Clicks, Training
from tests.unit.shm.test_shard_memory import a_layout

Start = Callable[[str], ShardMemory]

IN_GBA: dict[str, Any] = {
    "job": "ctr", "server": 0, "mode": "gba", "step": 1200, "epoch": 2, "steps_done": 200, "loss": 0.4321,
    "account": {"total": 1000, "applied": 940, "dropped": 50, "lost": 10, "not_finite": 16},
    "staleness": {"0": 70, "1": 20, "5": 10},
    "samples_per_s": 1234.4,
    "under_way": 3, "reissued": 1, "refused": 0, "wanted": "", "reason": "", "world": 0, "rates": [[0, 0.01]],
    "decisions": ["gba: worker 2 takes 6.1x the median"], "refused_gradients": [],
    "by_worker": [
        {"rank": 0, "pid": 41, "silent_s": 0.1, "idle_s": 0.2, "micro_batches": 900, "seconds_per_micro_batch": 0.01,
         "micro_batches_per_s": 12.34, "pushed_s": 8.2},
        {"rank": 1, "pid": 42, "host": "h2", "silent_s": 7.0, "micro_batches": 0, "seconds_per_micro_batch": 0.0},
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
    assert running_jobs.find_job([tmp_path], None) == memory.folder
    assert running_jobs.find_job([tmp_path], "ctr") == memory.folder


def test_one_of_several_jobs_must_be_named(start: Start, tmp_path: Path) -> None:
    start("ctr-b"), start("ctr-a")
    with pytest.raises(BadInput, match=r"2 jobs run on this host, name one with --job: ctr-a, ctr-b"):
        running_jobs.find_job([tmp_path], None)
    with pytest.raises(BadInput, match=r"job 'ctr-c' does not run here .*; did you mean 'ctr-"):
        running_jobs.find_job([tmp_path], "ctr-c")


def test_a_folder_whose_workers_are_gone_is_no_running_job(start: Start, tmp_path: Path) -> None:
    start("ctr").close(remove=False)
    assert (tmp_path / "gba-hvd-ctr").is_dir()
    with pytest.raises(BadInput, match=r"no job runs here: .*--dir"):
        running_jobs.find_job([tmp_path], None)
    with pytest.raises(BadInput, match="job 'ctr' has no living worker on this host; running here: none"):
        running_jobs.find_job([tmp_path], "ctr")


@pytest.mark.parametrize("of", [[""], ["--job", " "]])
def test_an_empty_name_is_not_the_only_job(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], of: list[str]
) -> None:
    start("ctr")
    assert cli.main(["status", *of, "--dir", str(tmp_path)]) == 1
    text = "the job's id or name is empty: expected one that `gba-hvd ps` lists; running here: ctr"
    assert text in capsys.readouterr().err


def test_a_run_in_mlflow_is_no_job(start: Start, tmp_path: Path) -> None:
    start("ctr")
    with pytest.raises(
        BadInput, match=r"does not run here .*`gba-hvd report` is for runs in MLflow\); running here: ctr"
    ):
        running_jobs.find_job([tmp_path], "0dca47bb965f4c42bee2753a4df25500")


def test_looking_does_not_keep_a_job_alive_or_end_it(start: Start, tmp_path: Path) -> None:
    memory = start("ctr")
    running_jobs.find_job([tmp_path], None)
    memory.close()
    assert not memory.folder.exists()


def test_the_folder_may_come_from_the_environment(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start("ctr")
    monkeypatch.setenv("GBA_HVD_SHARD_DIR", str(tmp_path))
    assert cli.main(["status"]) == 1
    assert "job 'ctr' is beginning: its workers have not formed a world yet" in capsys.readouterr().err


def test_a_job_that_ends_while_it_is_asked_is_said_to_have_ended(start: Start) -> None:
    memory = start("ctr")
    memory.close()
    with pytest.raises(BadInput, match="job 'ctr' has just ended"):
        running_jobs.ask_status(memory.folder, timeout_s=1.0)


@pytest.fixture
def places(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """(where this user's jobs lie, where the job "other" runs)"""
    (mine := tmp_path / "mine").mkdir()
    start("other")
    monkeypatch.setattr(running_jobs, "bases_in_use", lambda: [tmp_path])
    monkeypatch.setenv("GBA_HVD_SHARD_DIR", str(mine))
    return mine, tmp_path


def _to_change(*words: str) -> Path:
    return running_jobs.job_to_change(cli.build_parser().parse_args(["switch", "gba", *words]))


def test_no_job_is_switched_in_a_folder_that_was_not_named(places: tuple[Path, Path]) -> None:
    mine, elsewhere = places
    with pytest.raises(BadInput, match=rf"name a job with --job, or its folder with --dir: other in {elsewhere}$"):
        _to_change()
    assert _to_change("--job", "other") == _to_change("--dir", str(elsewhere)) == elsewhere / "gba-hvd-other"
    with pytest.raises(BadInput, match=f"no job runs here: {mine} holds"):
        _to_change("--dir", str(mine))
    memory = ShardMemory.create_or_open(mine, "own", a_layout(), grace_s=0)
    try:
        assert _to_change() == mine / "gba-hvd-own"
    finally:
        memory.close()


@pytest.mark.parametrize("words", [["ps"], ["ps", "--json"], ["status"], ["status", "--json"], ["switch", "gba"]])
def test_a_folder_that_does_not_exist_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "shm", tmp_path / "file"):
        assert cli.main([*words, "--dir", str(folder)]) == 1
        shown = capsys.readouterr()
        assert f"there is no folder {folder}: name the one that shards lie in with --dir" in shown.err
        assert not shown.out


def test_where_no_folder_is_named_and_jobs_run_in_several_one_must_be_named(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, elsewhere = places
    monkeypatch.delenv("GBA_HVD_SHARD_DIR")
    monkeypatch.setattr(running_jobs, "_shard_dir", lambda: mine)
    memory = ShardMemory.create_or_open(mine, "own", a_layout(), grace_s=0)
    try:
        with pytest.raises(BadInput, match=rf"own in {mine}, other in {elsewhere}"):
            _to_change()
        with pytest.raises(BadInput, match=rf"running here: own in {mine}, other in {elsewhere}"):
            running_jobs.find_job([mine, elsewhere], "zzz")
    finally:
        memory.close()


# --- what is shown -------------------------------------------------------------------------------------------------


def test_a_report_reads_as_sentences() -> None:
    assert job.facts(IN_GBA) == [
        ("mode", "gba"),
        ("step", "1,200, epoch 2 (step 200 of it)"),
        ("speed", "1,234 samples/s applied in the last 10 s"),
        ("loss", "0.4321"),
        (
            "samples",
            "940 applied + 50 dropped (34 too stale when they arrived, 16 with a gradient that was not finite) "
            "+ 10 lost = 1,000",
        ),
        ("staleness", "mean 0.70, max 5 (0: 70%, 1: 20%, 5: 10%)"),
        ("micro-batches", "3 in flight, 1 reissued"),
        ("decided", "gba: worker 2 takes 6.1x the median"),
    ]


def test_a_switch_on_its_way_is_reported_with_its_reason() -> None:
    report = {"job": "ctr", "mode": "gba", "wanted": "allreduce", "reason": "worker 2 recovered"}
    assert ("on the way to", "allreduce: worker 2 recovered") in job.facts(report)


@pytest.mark.parametrize("wanted", ["auto", "gba"])
def test_what_needs_no_switch_is_not_on_its_way(wanted: str) -> None:
    facts = job.facts({"job": "ctr", "mode": "gba", "wanted": wanted, "reason": "asked for"})
    assert "on the way to" not in dict(facts)


def test_the_help_of_switch_names_every_mode() -> None:
    parser = cli.build_parser()
    (group,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    (mode,) = (action for action in group.choices["switch"]._actions if action.dest == "mode")
    assert set(str(mode.help).replace(" or ", ", ").split(", ")) == set(SETTINGS)


def _health(**changes: Any) -> dict[str, Any]:
    return {"n": 0, "over": 0, "standing": [], "checkpoint": None, "chief": True, "problems": [], **changes}


@pytest.mark.parametrize(
    ("health", "words"),
    [
        (_health(), "none yet"),
        (_health(chief=False), "rank 0's host shows it"),
        (_health(checkpoint={"step": 1586, "unix_s": None}), "step 1,586, which this launch resumed from"),
        (_health(checkpoint={"step": 1586, "unix_s": 730.0}), "step 1,586, saved 270 s ago"),
    ],
)
def test_the_newest_checkpoint_is_shown_with_its_age(health: dict[str, Any], words: str) -> None:
    shown = dict(health_facts({"checkpoints": "s3://b/shop", "health": health}, 1000.0))
    assert shown == {"newest checkpoint": words}
    assert health_facts({"checkpoints": "", "health": health}, 1000.0) == [], "the job saves none"


def test_troubles_are_shown_with_how_long_they_have_lasted() -> None:
    failed = {
        "kind": "checkpoint_failed", "step": 1600, "message": "no bucket", "n": 30, "since_unix_s": 800.0,
        "unix_s": 990.0,
    }  # fmt: skip
    lost = {**failed, "kind": "rows_lost", "message": "5 rows", "n": 1, "unix_s": 700.0}
    newest = {"step": 1586, "unix_s": 730.0}
    health = _health(n=43, over=12, standing=[lost, failed], checkpoint=newest, problems=["MLflow: records wait"])
    first, last, once = (moment(at) for at in (800.0, 990.0, 700.0))
    assert health_facts({"checkpoints": "s3://b/shop", "health": health}, 1000.0) == [
        ("newest checkpoint", f"step 1,586, saved 270 s ago; none was saved since {first}, see the warning"),
        ("problem", "MLflow: records wait"),
        ("warnings", "43, 12 of them over, so far"),
        ("warning", f"[checkpoint failed] x 30, {first} to {last}, step 1,600: no bucket"),
        ("warning", f"[rows lost] {once}, step 1,600: 5 rows"),
    ]


def test_in_allreduce_the_last_decision_is_reported() -> None:
    report = {"job": "ctr", "mode": "allreduce", "step": 9, "epoch": 0, "workers": 3, "last_decision": "stay: 1.0x"}
    assert job.facts(report) == [
        ("mode", "allreduce"),
        ("step", "9, epoch 0"),
        ("workers", "3"),
        ("last decision", "stay: 1.0x"),
    ]


def test_the_least_a_server_may_say_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    job.print_report({"job": "ctr", "server": 0, "mode": "allreduce", "decisions": []})
    assert capsys.readouterr().out.split() == ["job", "ctr", "mode", "allreduce"]


def test_each_server_of_the_host_has_a_line_with_its_process_and_its_restarts() -> None:
    started = time.mktime((*time.localtime()[:3], 1, 2, 3, 0, 0, -1))
    first = {"server": 0, "pid": 41, "started_unix_s": started, "n_restarts": 0}
    second = {"server": 1, "pid": 42, "started_unix_s": started, "n_restarts": 2}
    report = {"job": "ctr", "mode": "gba", "servers_here": [first]}
    assert job.facts(report)[1:] == [("server", "process 41 on this host, started at 01:02:03")]
    assert job.facts({**report, "servers_here": [first, second]})[1:] == [
        ("server 0", "process 41 on this host, started at 01:02:03"),
        ("server 1", "process 42 on this host, started again at 01:02:03: 2 before it died"),
    ]


def test_workers_are_listed_with_their_rates(capsys: pytest.CaptureFixture[str]) -> None:
    job.print_report(IN_GBA)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0", "10.0", "12.3,", "none", "for", "8", "s", "900", "0.2", "s", "ago", "0.1", "s", "ago", "41"] in rows
    assert ["1", "-", "-", "0", "-", "7.0", "s", "ago", "42"] in rows


STEPPING: dict[str, Any] = {
    "job": "ctr", "mode": "allreduce", "step": 90, "workers": 3, "step_unix_s": 1000.0,
    "step_times": {
        "rank": 0, "steps": 17, "samples_per_s": 4000.0, "step_s": 0.12, "slowest_s": 0.1, "waiting_s": 0.06,
        "reading_s": 0.01, "rows_s": 0.05, "sum_s": 0.02, "pids": {"0": 71},
        "by_rank": [[2, 2.0, 0.08, 0.018], [0, 2.0, 0.03, 0.01], [1, 2.0, 0.03, 0.0]],
    },
}  # fmt: skip


def test_in_allreduce_the_slowest_worker_and_the_waits_are_shown() -> None:
    assert step_time_facts(STEPPING, 1001.0) == [
        ("step time", "120.0 ms, the mean of 17; 4,000 samples/s while steps are made"),
        (
            "waits for",
            "100.0 ms the slowest worker of each step, most of all rank 2 (98.0 ms, of which 18.0 ms waiting for "
            "batches; the median worker 40.0 ms), 20.0 ms the exchange and the update",
        ),
        (
            "rank 0",
            "30.0 ms computing, 10.0 ms waiting for batches, 60.0 ms waiting for slower workers, 10.0 ms the sum of "
            "dense gradients",
        ),
    ]


def test_without_slower_workers_the_exchange_is_what_a_step_waits_for() -> None:
    times = {**STEPPING["step_times"], "slowest_s": 0.04, "waiting_s": 0.0}
    assert dict(step_time_facts({**STEPPING, "step_times": times}, 1001.0))["waits for"].startswith("80.0 ms the exch")
    assert "50.0 ms rows of other hosts" in dict(step_time_facts({**STEPPING, "step_times": times}, 1001.0))["rank 0"]


def test_a_step_that_takes_many_times_as_long_is_shown() -> None:
    assert "last step" not in dict(step_time_facts(STEPPING, 1009.0))
    assert dict(step_time_facts(STEPPING, 1047.0))["last step"].startswith("47 s ago: ")


def test_times_of_steps_that_were_made_long_ago_are_not_shown() -> None:
    dated = {**STEPPING, "step_times": {**STEPPING["step_times"], "unix_s": 999.0}}
    assert step_time_facts(dated, 1001.0) == step_time_facts(STEPPING, 1001.0)
    assert [word for word, _ in step_time_facts(dated, 1047.0)] == ["last step"]
    assert job.workers(dated) == []


def test_that_training_stands_still_is_shown_with_the_cause() -> None:
    report = {**STEPPING, "step_times": None, "stands_still": "a worker is gone"}
    assert step_time_facts(report, 1012.0) == [
        ("stands still", "a worker is gone, and a new world of workers forms; the last step was 12 s ago")
    ]


def test_times_of_steps_in_allreduce_are_not_shown_in_another_mode() -> None:
    assert step_time_facts({**STEPPING, "mode": "gba"}, 1047.0) == []


def test_in_allreduce_workers_are_listed_with_their_part_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    job.print_report(STEPPING)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0", "15.0", "2", "30.0", "10.0", "71"] in rows and ["2", "40.0", "2", "80.0", "18.0", "-"] in rows


@pytest.mark.parametrize("report", [lambda: IN_GBA, lambda: STEPPING])
def test_headings_are_whole_where_the_output_is_no_terminal(
    report: Callable[[], dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    job.print_report(report())
    found = capsys.readouterr().out
    rows = [job._of_a_step(one) if "computing_s" in one else job._of_leases(one) for one in job.workers(report())]
    assert all(heading in found for heading in rows[0]) and "…" not in found


def test_another_host_than_rank_0_s_shows_no_decision_of_its_own() -> None:
    report = {"job": "ctr", "mode": "allreduce", "setting": "auto", "decided_elsewhere": True}
    assert dict(job.facts(report))["last decision"].startswith("rank 0 decides")


def test_decisions_have_their_step_and_requests_their_time() -> None:
    report = {"job": "ctr", "mode": "gba", "last_decision": "stay", "decided_at_step": 1234}
    assert dict(job.facts(report))["last decision"] == "stay (at step 1,234)"
    report = {"job": "ctr", "mode": "gba", "decisions": ["gba: slow"], "decided_unix_s": [0.0]}
    assert dict(job.facts(report))["decided"].startswith("gba: slow (at 19")  # 1970, or 1969


@pytest.mark.processes
def test_a_running_job_in_allreduce_shows_where_its_time_goes(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []

    class Look(gba_hvd.Callback):
        def on_step(self, record: StepRecord) -> None:
            found.append(running_jobs.report_of(running_jobs.find_job([tmp_path], None), 10.0))

    training = Training(tmp_path)
    training.state.register_callbacks([Look()])
    training.epoch(Clicks(32))
    (worker,) = job.workers(found[-1])
    assert worker["rank"] == 0 and worker["micro_batches"] == 4 and worker["seconds"] > 0
    assert [word for word, _ in step_time_facts(found[-1], found[-1]["step_unix_s"])] == [
        "step time", "waits for", "rank 0",
    ]  # fmt: skip
    training.state.close()


# --- asking for a mode -----------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, start: Start) -> list[tuple[str, str]]:
    """A job in allreduce that changes as soon as it is asked to; what it was asked for."""
    start("ctr")
    mode_requests: list[tuple[str, str]] = []

    def status(folder: Path, timeout_s: float) -> dict[str, Any]:
        return {"job": "ctr", "mode": mode_requests[-1][0] if mode_requests else "allreduce", "step": 7}

    monkeypatch.setattr(job, "ask_status", status)
    monkeypatch.setattr(job, "ask_switch", lambda folder, mode, reason, s: mode_requests.append((mode, reason)))
    return mode_requests


@pytest.mark.slow
def test_a_switch_is_asked_for_and_waited_for(
    asked: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["switch", "gba", "--dir", str(tmp_path), "--reason", "a slow disk"]) == 0
    assert asked == [("gba", "a slow disk")]
    assert capsys.readouterr().out.splitlines() == [
        "job ctr: asked for gba; it is in allreduce now",
        "job ctr: in gba at step 7",
    ]


def test_a_mode_the_job_is_in_is_asked_for_too_and_the_answer_says_that_it_stays(
    asked: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["switch", "allreduce", "--dir", str(tmp_path), "--reason", "a demonstration"]) == 0
    assert asked == [("allreduce", "a demonstration")]
    assert capsys.readouterr().out.splitlines() == [
        "job ctr: asked for allreduce; it is in allreduce already",
        "job ctr: in allreduce at step 7, and stays there until another mode or auto is asked for",
    ]


def test_it_is_held_once_the_workers_report_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = ["auto", "auto", "allreduce"]
    monkeypatch.setattr(job, "_LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(job, "ask_status", lambda *_: {"mode": "allreduce", "setting": settings.pop(0)})
    assert job._wait_for(tmp_path, "allreduce", 60.0, 1.0) == {"mode": "allreduce", "setting": "allreduce"}


def test_a_misspelt_mode_suggests_the_right_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["switch", "alreduce", "--dir", str(tmp_path)]) == 1
    assert "did you mean 'allreduce'?" in capsys.readouterr().err


def test_a_switch_that_does_not_come_is_an_error(
    asked: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "_wait_for", lambda *_, **__: None)
    assert cli.main(["switch", "gba", "--dir", str(tmp_path), "--wait", "5"]) == 1
    assert "still not in gba after 5 s" in capsys.readouterr().err


# --- real servers ----------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_what_is_inactive_is_named_with_what_to_do() -> None:
    assert job.inactive_workers(IN_GBA) == []
    (line,) = job.inactive_workers({**IN_GBA, "hanging": [[1, 42, 61.7]]})
    assert line == (
        "rank 1 on h2 (process 42) has not been active for 62 s, and the switch waits for it. It may come back; else "
        "end it there with `kill -9 42`: the launcher of an elastic job starts another worker, a job without one ends"
    )
    assert job.inactive_workers({"mode": "gba", "hanging": [[1, 42, 61.7]]})[0].startswith("rank 1 (process 42) has")


@pytest.mark.slow
def test_a_server_that_serves_no_step_yet_answers_and_notes_the_request(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = start("ctr")
    launch.write_settings(memory.folder, "ctr", new_key(), a_layout(), gba_hvd.RowAdagrad(lr=0.1))
    assert cli.main(["switch", "gba", "--dir", str(tmp_path), "--wait", "0", "--timeout", "90"]) == 0
    assert capsys.readouterr().out == "job ctr: asked for gba; it is in allreduce now\n"
    assert cli.main(["status", "--json", "--dir", str(tmp_path), "--timeout", "90"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["job"], report["mode"]) == ("ctr", "allreduce")
    assert [text for text in report["decisions"] if text.startswith("gba: asked for by ")]
    (server,) = report["servers_here"]
    killed = launch.pid_of(memory.folder, 0)
    assert killed is not None and (server["server"], server["pid"], server["n_restarts"]) == (0, killed, 0)
    os.kill(killed, signal.SIGKILL)
    assert cli.main(["status", "--dir", str(tmp_path), "--timeout", "90"]) == 0
    found = launch.process_of(memory.folder, 0)
    assert found is not None and found.pid != killed
    assert f"process {found.pid} on this host, started again at " in capsys.readouterr().out


class Operator(gba_hvd.Callback):
    """Looks at the job it is part of, and asks for allreduce at a step."""

    def __init__(self, base: Path) -> None:
        self.base, self.reports, self.switches = base, list[dict[str, Any]](), list[Event]()

    def on_step(self, record: StepRecord) -> None:
        if record.mode == "gba" and len(self.reports) < 2:
            folder = running_jobs.find_job([self.base], None)
            self.reports.append(running_jobs.ask_status(folder, 60.0))
            if len(self.reports) == 2:
                running_jobs.ask_switch(folder, "allreduce", "enough seen", 60.0)

    def on_event(self, event: Event) -> None:
        if event.kind == "switch":
            self.switches.append(event)


@pytest.mark.processes
def test_a_job_in_gba_mode_reports_its_rates_and_leaves_when_asked(tmp_path: Path) -> None:
    operator = Operator(tmp_path)
    training = Training(tmp_path)
    training.state.register_callbacks([operator, gba_hvd.GBACallback(mode="gba", wait_s=120)])
    for _ in range(3):
        training.epoch(Clicks(96))
    training.state.close()
    first, second = operator.reports
    assert first["mode"] == second["mode"] == "gba"
    assert second["step"] >= first["step"] >= 1
    assert [worker["pid"] for worker in job.workers(second)] == [os.getpid()]
    assert sum(second["staleness"].values()) > 0
    assert [(event.data["from"], event.data["to"]) for event in operator.switches] == [
        ("allreduce", "gba"),
        ("gba", "allreduce"),
    ]
    assert operator.switches[1].data["reason"] == "enough seen"


class Holds(gba_hvd.Callback):
    """Asks for a mode once the job is in it, and again for "auto" later; the modes it was in, and what was held."""

    def __init__(self, base: Path, mode: str, callback: gba_hvd.GBACallback) -> None:
        self.base, self.mode, self.callback = base, mode, callback
        self.held: dict[str, Any] | None = None
        self.settings, self.events, self.asked = list[str](), list[Event](), list[str]()

    def on_step(self, record: StepRecord) -> None:
        self.settings.append(self.callback.mode)
        if record.mode != self.mode:
            return
        wanted = self.mode if not self.asked else "auto" if self.asked == [self.mode] and self.events else ""
        if wanted:
            self.asked.append(wanted)
            folder = running_jobs.find_job([self.base], None)
            if wanted == "auto":  # what `gba-hvd switch` waits for
                self.held = job._wait_for(folder, self.mode, 60.0, 60.0)
            running_jobs.ask_switch(folder, wanted, "for the demonstration", 60.0)

    def on_event(self, event: Event) -> None:
        if event.kind == "mode_held":
            self.events.append(event)


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["allreduce", "gba"])
def test_the_mode_that_auto_is_in_is_held_until_auto_is_asked_for(mode: str, tmp_path: Path) -> None:
    plan = {1: "gba", 2: "auto"} if mode == "gba" else None
    callback = gba_hvd.GBACallback(mode="auto", switch_at=plan, min_stay=10_000, wait_s=120)
    operator, training = Holds(tmp_path, mode, callback), Training(tmp_path)
    training.state.register_callbacks([operator, callback])
    deadline = time.monotonic() + 120
    while operator.settings[-1:] != ["auto"] or len(operator.asked) < 2:
        assert time.monotonic() < deadline, (operator.asked, operator.settings)
        training.epoch(Clicks(96))
    training.state.close()
    assert operator.asked == [mode, "auto"] and mode in operator.settings
    assert operator.held is not None and operator.held["setting"] == mode
    (held,) = operator.events
    assert held.data == {"mode": mode, "reason": "for the demonstration"}
    assert training.state.engine.mode is None or training.state.engine.mode.name == mode


# --- jobs without servers --------------------------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    """A job in allreduce mode with no callback at all, after two steps of its first epoch."""
    monkeypatch.setenv("GBA_HVD_JOB_ID", "ctr-1")
    monkeypatch.setenv("GBA_HVD_JOB_NAME", "click model")
    training = Training(tmp_path)
    for number, batch in enumerate(gba_hvd.batches(Clicks(96), training.state)):
        training.micro_step(batch)
        if number == 7:  # the last micro-batch of the second step
            break
    yield training
    training.state.close()


@pytest.mark.processes
def test_a_plain_allreduce_job_is_shown_with_its_name_and_step(
    plain: Training, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start("beginning")
    assert cli.main(["ps", "--dir", str(tmp_path)]) == 0
    listed = {line.split()[1 if "beginning" in line else 2]: line for line in capsys.readouterr().out.splitlines()[3:5]}
    words = listed["ctr-1"].split()
    assert words[:4] == ["click", "model", "ctr-1", "allreduce"]
    assert "2 (epoch 0: 2 of 6)" in listed["ctr-1"] and "s ago" in listed["ctr-1"]
    assert cli.main(["ps", "--json", "--dir", str(tmp_path)]) == 0
    reported = {job["job"]: job for job in json.loads(capsys.readouterr().out)}
    mine = reported["ctr-1"]
    assert (mine["name"], mine["mode"], mine["step"], mine["epoch"], mine["steps_of_epoch"], mine["workers"]) == (
        "click model", "allreduce", 2, 0, 6, 1,
    )  # fmt: skip
    assert mine["samples_applied"] == 32 and mine["switchable"] is False and mine["dir"] == str(tmp_path)
    assert reported["beginning"]["mode"] == "beginning"

    trouble = Event("checkpoint_failed", 2, "the disk is full", level="warning")
    plain.state.engine.emit(trouble)
    assert cli.main(["status", "ctr-1", "--json", "--dir", str(tmp_path)]) == 0
    (standing,) = json.loads(capsys.readouterr().out)["health"]["standing"]
    assert standing["message"] == "the disk is full"
    for name in (["ctr-1"], ["click model"], ["--job", "ctr-1"]):
        assert cli.main(["status", *name, "--dir", str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert "job ctr-1 (click model)" in said and "2, epoch 0 (step 2 of 6)" in said
        assert "none: the job has no gba_hvd.GBACallback" in said
        assert re.search(r"warning +\[checkpoint failed\] \d\d:\d\d:\d\d, step 2: the disk is full", said)
    assert cli.main(["status", "--dir", str(tmp_path)]) == 1
    assert "2 jobs run on this host, name one with --job: beginning, ctr-1 (click model)" in capsys.readouterr().err
    for unknown in (["status", "zzz"], ["switch", "gba", "--job", "zzz"]):
        assert cli.main([*unknown, "--dir", str(tmp_path)]) == 1
        assert "; running here: beginning, ctr-1 (click model)\n" in capsys.readouterr().err
    assert cli.main(["switch", "gba", "--job", "ctr-1", "--dir", str(tmp_path)]) == 1
    assert "job ctr-1 (click model) cannot be switched: it was started without a" in capsys.readouterr().err


@pytest.mark.processes
def test_a_job_with_a_memory_elsewhere_is_listed_and_found_by_its_id(
    plain: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("GBA_HVD_SHARD_DIR", str(tmp_path / "other"))
    assert cli.main(["ps", "--json"]) == 0
    assert str(tmp_path) in [job["dir"] for job in json.loads(capsys.readouterr().out) if job["job"] == "ctr-1"]
    monkeypatch.setattr(running_jobs, "bases_in_use", lambda: [tmp_path])  # other tests may run a job of this id
    for name in ("ctr-1", "click model"):
        assert cli.main(["status", name]) == 0
        assert "job ctr-1 (click model)" in capsys.readouterr().out
    assert cli.main(["status"]) == 0, "what ps lists, status finds"
    start = running_jobs.find_job([tmp_path / "other", tmp_path], "ctr-1")
    assert start == plain.state.engine.folder


@pytest.mark.processes
def test_a_mode_that_was_asked_for_and_is_not_on_is_shown_and_reported_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(HostServer, "is_ready", lambda self, to_enter=False: False)
    monkeypatch.setattr(HostServer, "why_not_ready", lambda self, to_enter=False: "server 0 has not answered yet")
    training, reported = Training(tmp_path), io.StringIO()
    training.state.register_callbacks([gba_hvd.GBACallback(mode="gba"), gba_hvd.ProgressLine(stream=reported)])
    training.epoch(Clicks(96))
    place = ["--dir", str(tmp_path)]
    for command in (["status", *place], ["ps", *place]):
        assert cli.main(command) == 0
        assert "allreduce (gba asked for, its server is not up yet)" in capsys.readouterr().out
    training.state.close()
    missed = (
        "mode gba was asked for; 0 of 6 steps were in it: the companion servers were not up at the end; server 0 has"
    )
    assert [
        line
        for line in reported.getvalue().splitlines()
        if line.startswith("warning: [mode missed]") and missed in line
    ]


@pytest.mark.processes
def test_a_job_whose_training_is_over_is_ending(
    plain: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Sends(gba_hvd.Callback):
        def on_end(self, status: str, error: BaseException | None) -> None:
            for command in ("ps", "status"):
                assert cli.main([command, "--dir", str(tmp_path)]) == 0

    plain.state.register_callbacks([Sends()])
    plain.state.close()
    listed, status = capsys.readouterr().out.split("job ctr-1")[0], "ending: the training is over"
    assert "ending" in listed and "allreduce" not in listed, status


@pytest.mark.parametrize(
    ("argument", "environ", "name"), [(None, None, "train"), (None, "from env", "from env"), ("mine", "x", "mine")]
)
def test_a_jobs_name_is_the_argument_else_the_environments_else_the_scripts(
    argument: str | None, environ: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/models/train.py", "--lr", "3"])
    if environ:
        monkeypatch.setenv("GBA_HVD_JOB_NAME", environ)
    training = Training(tmp_path, name=argument)
    assert training.state.name == name
    with pytest.raises(BadInput, match="1 to 100 printable characters"):
        gba_hvd.elastic.TorchState(training.model, training.optimizer, name="two\nlines")
