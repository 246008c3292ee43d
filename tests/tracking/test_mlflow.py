"""The whole way to a real MLflow: callback, spool, sender process, and a SQLite file or a server that fails."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from gba_hvd_tools import cli
from gba_hvd_tools.commands import mlflow_send

from gba_hvd.callbacks import Event
from gba_hvd.errors import BadInput
from gba_hvd.tracking import MLflowCallback, gauges, spool_delivery
from gba_hvd.tracking.find_run import read, run_id_of
from gba_hvd.tracking.mlflow_callback import job_name
from gba_hvd.tracking.run_history import RunHistory
from gba_hvd.tracking.spool import SpoolStatus, all_records, model_path, read_status, write_status
from gba_hvd.tracking.spool_delivery import SpoolDelivery
from tests.tracking.conftest import (
    FLUSH_S,
    Server,
    Worker,
    artifact,
    artifact_names,
    client,
    event,
    job,
    logged_steps,
    only_run,
    runs,
    step,
    wait_until,
)
from tests.tracking.reported_job import report_job

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(1200),  # importing MLflow takes seconds, many times over on a machine that trains meanwhile
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning"
    ),  # MLflow's use of SQLAlchemy, when a test asks it directly
]


patient = functools.partial(MLflowCallback, flush_timeout_s=FLUSH_S)


def wait_until_delivered(callback: MLflowCallback) -> None:
    """Until everything written so far has reached MLflow (samples of the host go on being added)."""
    spool = callback.spool
    assert spool is not None
    written = spool.stat().st_size
    wait_until("delivered", lambda: read_status(spool).offset >= written)


@pytest.mark.parametrize(
    ("status", "error"),
    [("FINISHED", None), ("FAILED", ValueError("loss is nan at step 5")), ("KILLED", KeyboardInterrupt())],
)
def test_a_run_ends_as_the_job_ended(
    database: str, tmp_path: Path, status: str, error: BaseException | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GBA_HVD_JOB_NAME", "night-run")
    callback = patient(
        *["ends"], tracking_uri=database, spool_dir=tmp_path / "spool", log_every_steps=1, system_every_s=0.1,
        params={"model": {"dim": 8}}, config={"hidden": [8]}, data={"rows": 10},
    )  # fmt: skip
    callback.on_job(job(f"ends-{status}", lr=0.1))
    for k in range(1, 6):
        callback.on_step(step(k, loss=1 / k))
    callback.on_metrics(5, {"valid_auc": 0.75})
    callback.on_event(event("membership", 3, "1 -> 2 workers"))
    for reported in ("the store is full", "the store is still full"):
        callback.on_event(Event("checkpoint_failed", 4, reported, level="warning"))
    callback.on_end(status, error)

    run = only_run(database, f"ends-{status}")
    assert run.info.status == status
    assert run.data.params == {"model.dim": "8", "lr": "0.1", "hidden": "[8]"}
    assert run.info.run_name == "night-run"
    assert run.data.metrics["warnings"] == 2
    assert run.data.tags["gba_hvd.warning"] == "[checkpoint_failed] step 4: the store is still full"
    recorded = [json.loads(line) for line in artifact(database, run, "events.jsonl", tmp_path / "events").splitlines()]
    assert [one["event"] for one in recorded if one.get("level") == "warning"] == 2 * ["checkpoint_failed"]
    assert logged_steps(database, run, "train/loss") == [1, 2, 3, 4, 5]
    assert run.data.metrics["valid_auc"] == 0.75
    assert run.data.tags["gba_hvd.event.membership"] == "step 3: 1 -> 2 workers"
    assert run.data.tags.get("gba_hvd.status_reason", "") == (f"{type(error).__name__}: {error}" if error else "")
    assert artifact_names(database, run) == {
        *("config.json", "data.json", "events.jsonl", "learning_curves.png", "throughput.png", "report.html")
    }
    assert json.loads(artifact(database, run, "config.json", tmp_path / "down")) == {"hidden": [8]}
    assert not (tmp_path / "spool").exists()


def test_a_job_that_continues_after_its_end_reports_to_the_same_run(database: str, tmp_path: Path) -> None:
    callback = patient(tracking_uri=database, spool_dir=tmp_path / "spool", log_every_steps=1, system_metrics=False)
    for status, steps in (("KILLED", (1, 2)), ("FINISHED", (3, 4))):
        callback.on_job(job("continues"))
        for k in steps:
            callback.on_step(step(k, loss=1 / k))
        callback.on_end(status, KeyboardInterrupt() if status == "KILLED" else None)
    run = only_run(database, "continues")
    assert run.info.status == "FINISHED"
    assert logged_steps(database, run, "train/loss") == [1, 2, 3, 4]
    assert not (tmp_path / "spool").exists()


def test_a_job_that_switched_modes_is_read_back_as_it_was(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    callback = patient(
        tracking_uri=database,
        spool_dir=tmp_path / "spool",
        log_every_steps=20,
        system_metrics=False,
        run_name="slow w2",
    )
    report_job([callback], job_id="reported")
    callback.on_end("FINISHED", None)

    run = only_run(database, "reported")
    summary = {
        name: run.data.metrics[name] for name in ("seconds_in_allreduce", "seconds_in_gba", "samples_per_s_mean")
    }
    assert min(summary.values()) > 0
    training_s = run.data.metrics["seconds_of_training"]
    assert training_s == pytest.approx(summary["seconds_in_allreduce"] + summary["seconds_in_gba"])
    assert training_s == read("reported", database).seconds
    assert logged_steps(database, run, "samples_per_s_mean") == [400]
    assert artifact_names(database, run) >= {"workers.png", "staleness.png", "throughput.png"}
    assert run.data.tags["gba_hvd.event.switch"].startswith("step 300: gba -> allreduce: ")
    for name in (run.info.run_id, "reported", "slow w2"):
        story = read(name, database)
        assert (story.job_id, story.status, story.title) == ("reported", "FINISHED", "slow w2")
        assert [(span.first, span.last, span.mode) for span in story.spans] == [
            (0, 120, "allreduce"), (120, 300, "gba"), (300, 400, "allreduce")
        ]  # fmt: skip
        assert sum(story.staleness.values()) == 6 * 180
        assert {gauges.pace_of(rank) for rank in range(3)} <= story.history.keys()
        of_the_papers = {gauges.DENSE_AGE_MEAN, f"{gauges.GAP}0", gauges.ELP, gauges.GAIN, gauges.BYTES_SENT}
        assert of_the_papers <= story.history.keys()
        assert (story.last(gauges.GAIN), story.last(gauges.BYTES_SENT)) == (1.02, 400_000.0)
        decided = [(event["step"], event["data"]["kind"]) for event in story.events_of("decision")]
        assert decided == [(5, "gain"), (120, "switch"), (130, "gain"), (299, "switch")]
    with pytest.raises(
        BadInput, match=rf"no run, job or file is called 'tolt' .*newest runs .*\n(.*\n)*  {run.info.run_id}"
    ):
        read("tolt", database)
    other = client(database).create_run(run.info.experiment_id, run_name="a notebook")
    client(database).log_metric(other.info.run_id, "loss", 1.0, step=5)
    with pytest.raises(BadInput, match=rf"was not written by a job: expected .*\n(.*\n)*  {run.info.run_id}"):
        read(other.info.run_id, database)
    client(database).delete_run(other.info.run_id)
    capsys.readouterr()
    for nothing in ([], [""]):
        assert cli.main(["report", *nothing, "--tracking-uri", database]) == 1
        assert "no run is named" in capsys.readouterr().err
    with pytest.raises(BadInput, match="no run is named"):
        run_id_of(" ", database)
    assert cli.main(["report", "--tracking-uri", database]) == 1
    asked = capsys.readouterr().err
    assert f"no run is named: gba-hvd report {run.info.run_id} is for the newest" in asked
    assert f"id, name and job:\n  {run.info.run_id}  slow w2  reported\n" in asked
    assert cli.main(["report", "reported", "--tracking-uri", database, "--out", str(tmp_path / "page.html")]) == 0
    assert "worker 2 takes 6.1x the median" in (tmp_path / "page.html").read_text()


def test_a_store_that_is_not_there_is_said_and_not_made(tmp_path: Path):
    with pytest.raises(BadInput, match="it holds no runs"):
        read("any", f"sqlite:///{tmp_path}/none.db")
    assert list(tmp_path.iterdir()) == []


def test_a_job_killed_outright_is_failed_and_its_last_records_arrive(database: str, tmp_path: Path):
    worker = Worker(tmp_path, tracking_uri=database, spool_dir="spool", log_every_steps=1, system_metrics=False)
    worker("on_job", dataclasses.asdict(job("killed")))
    wait_until("the run is there", lambda: runs(database, "killed"))
    for k in range(1, 4):
        worker("on_step", dataclasses.asdict(step(k)))
    worker.kill()
    run = wait_until("FAILED", lambda: next((r for r in runs(database, "killed") if r.info.status == "FAILED"), None))
    assert logged_steps(database, run, "train/loss") == [1, 2, 3]
    assert "killed" in run.data.tags["gba_hvd.status_reason"]
    wait_until("the sender cleaned up", lambda: not (tmp_path / "spool").exists())


def test_several_processes_share_one_sqlite_file_and_one_run(database: str, tmp_path: Path):
    callbacks = [
        patient(tracking_uri=database, spool_dir=tmp_path, log_every_steps=1, system_every_s=0.05) for _ in range(3)
    ]
    for rank, callback in enumerate(callbacks):
        callback.on_job(job("shared", rank=rank, size=3, host=f"h{rank}"))
    for k in range(1, 101):
        for callback in callbacks:
            callback.on_step(step(k, workers=3))
    names = [f"system/h{rank}/cpu_percent" for rank in range(3)]
    wait_until(
        "system metrics of all hosts",
        lambda: [r for r in runs(database, "shared") if all(name in r.data.metrics for name in names)],
    )
    for callback in reversed(callbacks):
        callback.on_end("FINISHED", None)
    run = only_run(database, "shared")
    assert logged_steps(database, run, "train/loss") == list(range(1, 101))
    assert run.info.status == "FINISHED"


def test_a_worker_that_neither_speaks_nor_leads_its_host_starts_nothing(tmp_path: Path):
    callback = MLflowCallback(tracking_uri="http://127.0.0.1:9", spool_dir=tmp_path / "spool")
    callback.on_job(job("quiet", rank=1, size=2, is_host_leader=False))
    callback.on_step(step(10))
    callback.on_event(event("membership", 10))
    callback.on_end("FINISHED", None)
    assert callback.spool is None
    assert not (tmp_path / "spool").exists()


def test_a_killed_and_restarted_server_costs_no_point_and_makes_no_second_run(server: Server, tmp_path: Path):
    chief, other = (
        patient(tracking_uri=server.uri, spool_dir=tmp_path / "spool", log_every_steps=1, system_every_s=0.2)
        for _ in range(2)
    )
    chief.on_job(job("server-dies", rank=0, size=2, host="h0", lr=1))
    other.on_job(job("server-dies", rank=1, size=2, host="h1"))
    chief.on_step(step(1))
    wait_until_delivered(chief)

    server.kill()
    for k in range(2, 1001):
        chief.on_step(step(k))
        other.on_step(step(k))
    chief.on_metrics(1000, {"valid_auc": 0.8})
    assert chief.spool is not None
    wait_until("the sender notices", lambda: read_status(chief.spool).problem)
    assert not server.is_there()

    server.start()
    wait_until_delivered(chief)
    measured = {"system/h0/cpu_percent", "system/h1/cpu_percent"}
    wait_until("both hosts", lambda: measured <= only_run(server.uri, "server-dies").data.metrics.keys())
    chief.on_step(step(1001))
    chief.on_end("FINISHED", None)
    other.on_end("FINISHED", None)

    run = only_run(server.uri, "server-dies")
    assert logged_steps(server.uri, run, "train/loss") == list(range(1, 1002))
    assert logged_steps(server.uri, run, "valid_auc") == [1000]
    assert run.info.status == "FINISHED"
    assert "learning_curves.png" in artifact_names(server.uri, run)


def test_training_goes_on_while_the_server_hangs(server: Server, tmp_path: Path):
    callback = patient(tracking_uri=server.uri, spool_dir=tmp_path, log_every_steps=1, system_metrics=False)
    callback.on_job(job("server-hangs"))
    wait_until("the run is there", lambda: runs(server.uri, "server-hangs"))
    server.freeze()
    for k in range(1, 501):
        callback.on_step(step(k))  # returns: nothing here waits for the server
    callback.on_event(event("membership", 500))
    assert callback.spool is not None
    wait_until("the sender is held up", lambda: read_status(callback.spool).problem)
    server.thaw()
    callback.on_end("FINISHED", None)
    run = only_run(server.uri, "server-hangs")
    assert logged_steps(server.uri, run, "train/loss") == list(range(1, 501))


def test_a_survivor_goes_on_in_the_run_of_a_killed_chief(server: Server, tmp_path: Path):
    settings = dict(tracking_uri=server.uri, spool_dir="spool", log_every_steps=1, system_metrics=False)
    chief, survivor = Worker(tmp_path, **settings), Worker(tmp_path, **settings)
    chief("on_job", dataclasses.asdict(job("chief-dies", rank=0, size=2, lr=0.1)))
    survivor("on_job", dataclasses.asdict(job("chief-dies", rank=1, size=2, is_host_leader=False, lr=0.1)))
    for k in range(1, 6):
        chief("on_step", dataclasses.asdict(step(k)))
        survivor("on_step", dataclasses.asdict(step(k)))
    wait_until("the first chief's run", lambda: runs(server.uri, "chief-dies"))
    chief("on_metrics", 5, {"valid_auc": 0.7})
    chief.kill()
    wait_until("its last word arrives", lambda: only_run(server.uri, "chief-dies").info.status == "FAILED")
    assert "valid_auc" in only_run(server.uri, "chief-dies").data.metrics

    survivor("on_event", dataclasses.asdict(event("worker_lost", 5, "rank 0 is gone")))
    survivor("on_job", dataclasses.asdict(job("chief-dies", rank=0, size=1, lr=0.2)))
    survivor("on_metrics", 5, {"valid_auc": 0.7})  # the evaluation it was in is done again
    for k in range(6, 11):
        survivor("on_step", dataclasses.asdict(step(k)))
    survivor("on_end", "FINISHED", None)
    survivor.leave()

    run = only_run(server.uri, "chief-dies")
    assert run.info.status == "FINISHED"
    assert run.data.params["lr"] == "0.1"
    assert logged_steps(server.uri, run, "train/loss") == list(range(1, 11))
    assert logged_steps(server.uri, run, "valid_auc") == [5]
    assert "rank 0 is gone" in artifact(server.uri, run, "events.jsonl", tmp_path / "down")


def test_a_new_worker_that_becomes_chief_goes_on_in_the_run_it_is_given(database: str, tmp_path: Path):
    first = patient(tracking_uri=database, spool_dir=tmp_path, log_every_steps=1, system_metrics=False)
    first.on_job(job("handed-over", lr=1))
    for k in (1, 2):
        first.on_step(step(k))
    wait_until_delivered(first)
    reported = first.state_dict()
    assert reported == {
        "run_id": only_run(database, "handed-over").info.run_id, "logged_step": 2, "warnings": 0,
        "run_of": "handed-over", "continues": None,
    }  # fmt: skip
    first.on_end("FAILED", RuntimeError("the whole job stopped"))

    second = patient(tracking_uri=database, spool_dir=tmp_path, log_every_steps=1, system_metrics=False)
    second.load_state_dict(reported)
    second.on_job(job("handed-over", lr=1))
    for k in (1, 2, 3):
        second.on_step(step(k))
    wait_until("running again", lambda: only_run(database, "handed-over").info.status == "RUNNING")
    second.on_end("FINISHED", None)

    run = only_run(database, "handed-over")
    assert logged_steps(database, run, "train/loss") == [1, 2, 3]
    assert run.info.status == "FINISHED"


def test_steps_that_are_made_again_in_the_same_process_supersede_the_first_ones(database: str, tmp_path: Path):
    """Full recovery: all workers went back to the checkpoint of step 3."""
    worker = Worker(tmp_path, tracking_uri=database, spool_dir="spool", log_every_steps=1, system_metrics=False)
    worker("on_job", dataclasses.asdict(job("went-back")))
    for k in range(1, 7):
        worker("on_step", dataclasses.asdict(step(k, loss=1.0)))
    state = worker("state_dict")
    worker("load_state_dict", {**state, "logged_step": 3})  # of the checkpoint
    worker("on_job", dataclasses.asdict(job("went-back")))
    costs = {"overhead_full": 0.02, "overhead_partial": 0.01}
    choice = {"strategy": "full", "strategy_reason": "full: hardly any", **costs}
    told = {"manifest": "m-3", "rows_restored": 500, "rows_lost": 0, "samples_redone": 288, "pls": 0.0, **choice}
    worker("on_event", dataclasses.asdict(Event("resumed", 3, "full recovery", told)))
    for k in range(4, 9):
        worker("on_step", dataclasses.asdict(step(k, loss=2.0)))
    worker("on_end", "FINISHED", None)
    worker.leave()
    run = only_run(database, "went-back")
    assert logged_steps(database, run, "train/loss") == [1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 8]
    found = read("went-back", database)
    history = found.history["train/loss"]
    assert [(point.step, point.value) for point in history] == [(k, 1.0 if k <= 3 else 2.0) for k in range(1, 9)]
    assert re.search(
        "^steps 4 to 6 from before .* UTC: trained again from 3$", run.data.tags["gba_hvd.superseded_steps"]
    )
    assert "curves in MLflow still have: steps 4 to 6 from" in run.data.tags["mlflow.note.content"]
    names = ("resumed_from_step", "samples_redone", "recovery_full", *(f"recovery_{name}" for name in costs))
    assert [run.data.metrics[name] for name in names] == [3, 288, 1.0, 0.02, 0.01]
    (recovery,) = found.recoveries
    assert {**recovery, **choice, "samples_redone": 288} == recovery


def test_a_job_that_goes_on_from_a_checkpoint_goes_on_in_its_run(database: str, tmp_path: Path):
    settings = dict(tracking_uri=database, spool_dir="spool", log_every_steps=1, system_metrics=False)
    first = Worker(tmp_path, **settings)
    first("on_job", dataclasses.asdict(job("resumed", lr=1)))
    for k in range(1, 4):
        first("on_step", dataclasses.asdict(step(k, loss=1.0)))
    wait_until("the run is there", lambda: runs(database, "resumed"))
    at_step_3 = first("state_dict")
    where = {"url": str(tmp_path / "checkpoints"), "manifest": "manifests/1-3.json", "saved_step": 3, "kind": "full"}
    facts = {**where, "n_bytes": 2000, "rows": 9, "seconds": 0.5}
    first("on_event", dataclasses.asdict(Event("checkpoint", 3, "step 3 saved", facts)))
    for k in range(4, 7):
        first("on_step", dataclasses.asdict(step(k, loss=1.0)))
    first.kill()
    wait_until("FAILED", lambda: only_run(database, "resumed").info.status == "FAILED")

    second = Worker(tmp_path, **settings)
    second("load_state_dict", {**at_step_3, "run_id": None})  # found by the job's name
    assert only_run(database, "resumed").data.tags["gba_hvd.status_reason"]
    second("on_job", dataclasses.asdict(job("resumed", lr=2)))
    reported = {"manifest": "manifests/1-3.json", "rows_restored": 500, "seconds": 0.1}
    second("on_event", dataclasses.asdict(Event("resumed", 3, "resuming at step 3", reported)))
    for k in range(4, 9):
        second("on_step", dataclasses.asdict(step(k, loss=2.0)))
    second("on_metrics", 6, {"valid_auc": 0.7})
    lost = {"rows_restored": 340, "rows_lost": 0, "pls": 0.0025, "age": 3.0}
    second("on_event", dataclasses.asdict(Event("rows_restored", 8, "340 rows came back", lost)))
    facts |= {"saved_step": 8, "kind": "delta", "n_bytes": 300, "manifest": "manifests/2-8.json"}
    second("on_event", dataclasses.asdict(Event("checkpoint", 8, "step 8 saved", facts)))
    second("on_end", "FINISHED", None)
    second.leave()

    run = only_run(database, "resumed")
    assert run.info.status == "FINISHED" and "gba_hvd.status_reason" not in run.data.tags
    assert (run.data.params["lr"], run.data.tags["gba_hvd.now.lr"]) == ("1", "2")  # MLflow changes no parameter
    story = read("resumed", database)
    assert (story.params["lr"], dict(story.first_params)) == ("2", {"lr": "1"})
    assert logged_steps(database, run, "train/loss") == [1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 8]  # MLflow keeps everything
    history = read("resumed", database).history["train/loss"]
    assert [(point.step, point.value) for point in history] == [(k, 1.0 if k <= 3 else 2.0) for k in range(1, 9)]
    values = run.data.metrics
    assert (values["resumed_from_step"], values["rows_restored"], values["rows_lost"], values["pls"]) == (
        3,
        340,
        0,
        0.0025,
    )
    assert (
        logged_steps(database, run, "checkpoint_bytes") == logged_steps(database, run, "checkpoint_seconds") == [3, 8]
    )
    assert run.data.tags["gba_hvd.checkpoint"] == f"{tmp_path}/checkpoints/manifests/2-8.json"
    saved = json.loads(artifact(database, run, "checkpoints.json", tmp_path / "down"))
    assert [(one["step"], one["kind"], one["bytes"]) for one in saved] == [(3, "full", 2000), (8, "delta", 300)]
    assert {one["url"] for one in saved} == {where["url"]}


def test_what_is_measured_again_at_the_step_that_a_launch_resumes_at_arrives(database: str, tmp_path: Path):
    """As of a launch that ended, and of one that went back: before its first step it evaluates on other data."""

    def launch(before_auc: float) -> str:
        callback = patient(tracking_uri=database, spool_dir=tmp_path / "spool", log_every_steps=1, system_metrics=False)
        callback.on_job(job("nights"))
        callback.on_event(Event("resumed", 3, "resuming at step 3", {"manifest": "m-3"}))
        callback.on_metrics(3, {"before_auc": before_auc})
        callback.on_end("FINISHED", None)
        return only_run(database, "nights").info.run_id

    run_id = [launch(0.6903), launch(0.6897)][-1]
    sent = client(database).get_metric_history(run_id, "before_auc")
    assert [(point.step, point.value) for point in sent] == [(3, 0.6903), (3, 0.6897)]
    assert [(one.step, one.value) for one in read("nights", database).history["before_auc"]] == [(3, 0.6897)]


@pytest.mark.parametrize("left_out", ["nothing", "run_of", "run_id"])  # of an older version; saved before the run
def test_another_job_that_resumes_from_a_checkpoint_has_a_run_of_its_own(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], left_out: str
):
    source, copy = f"source-{left_out}", f"copy-{left_out}"

    def launch(job_id: str, state: dict[str, Any], steps: range) -> tuple[dict[str, Any], str]:
        callback = patient(tracking_uri=database, spool_dir=tmp_path / "spool", log_every_steps=1, system_metrics=False)
        callback.load_state_dict(state)
        at_first = callback.state_dict()
        assert all(at_first[key] == state.get(key) for key in ("run_id", "run_of")), "as others of the job receive it"
        callback.on_job(job(job_id))
        for k in steps:
            callback.on_step(step(k))
        callback.on_end("FINISHED", None)
        return callback.state_dict(), capsys.readouterr().err

    saved, said = launch(source, {}, range(1, 4))
    assert "run of its own" not in said and saved["run_of"] == source
    client(database).set_terminated(saved["run_id"], "KILLED")
    if left_out != "nothing":
        del saved[left_out]
    before = only_run(database, source)
    own, said = launch(copy, saved, range(4, 6))
    assert f"the checkpoint is of job {source}, this one is job {copy}: it has a run of its own" in said
    after, made = only_run(database, source), only_run(database, copy)
    assert after.info.status == "KILLED" and after.data.to_dictionary() == before.data.to_dictionary()
    assert made.data.tags["gba_hvd.continues_run"] == after.info.run_id and own["run_id"] == made.info.run_id
    assert logged_steps(database, made, "train/loss") == [4, 5]
    _, said = launch(copy, own, range(6, 7))
    assert "run of its own" not in said
    assert logged_steps(database, only_run(database, copy), "train/loss") == [4, 5, 6]


def test_a_rate_that_the_script_sets_is_what_the_run_has(database: str, tmp_path: Path):
    """Also where it is that of the first launch again."""

    def launch(lr: float, now: float | None) -> tuple[str, str | None]:
        callback = patient(tracking_uri=database, spool_dir=tmp_path / "spool")
        callback.on_job(job("rates", dense_lr=lr))
        if now is not None:
            callback.on_event(Event("learning_rates_set", 0, "set", {"settings": {"dense_lr": now}}))
        callback.on_end("FINISHED", None)
        run = only_run(database, "rates")
        return read("rates", database).params["dense_lr"], run.data.tags.get("gba_hvd.now.dense_lr")

    assert launch(0.5, None) == ("0.5", None)
    assert launch(0.5, 0.1) == ("0.1", "0.1")
    assert launch(0.1, 0.5) == ("0.5", "0.5")
    assert launch(0.5, None) == ("0.5", None)


def test_a_server_that_never_comes_leaves_the_spool_and_the_command_that_sends_it(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    server.kill()
    callback = MLflowCallback(
        tracking_uri=server.uri, spool_dir=tmp_path, log_every_steps=1, flush_timeout_s=4.0, system_metrics=False
    )
    callback.on_job(job("sent-later", lr=1))
    for k in range(1, 51):
        callback.on_step(step(k))
    callback.on_end("FINISHED", None)

    reported = capsys.readouterr().err
    assert "sending the last records takes up to 2 s; nothing need be done\n" in reported
    command = re.search(r"gba-hvd (mlflow send \S+\.jsonl)", reported)
    assert command is not None, reported
    assert re.search(r"NOT everything reached MLflow \([0-9]+ records did not\)", reported)
    assert callback.spool is not None
    assert callback.spool.exists()

    server.start()
    assert runs(server.uri, "sent-later") == []
    assert run_command(*command.group(1).split()) == 0
    run = only_run(server.uri, "sent-later")
    assert logged_steps(server.uri, run, "train/loss") == list(range(1, 51))
    assert (run.info.status, run.data.params) == ("FINISHED", {"lr": "1"})
    assert not callback.spool.exists()


@pytest.mark.parametrize(
    ("status", "chief", "sent_at_once", "flush_s", "waits", "said"),
    [
        ("FINISHED", True, True, 30.0, [2.0], ""),
        ("FINISHED", True, False, 30.0, [2.0, 28.0], "up to 28 s"),
        ("FINISHED", False, False, 30.0, [2.0, 28.0], ""),
        ("FINISHED", True, False, 1.5, [1.5, 0.0], ""),
        ("FAILED", True, True, 30.0, [30.0], "up to 30 s"),
        ("KILLED", False, False, 30.0, [30.0], "up to 30 s"),
    ],
)
def test_the_wait_for_the_last_records_is_said_at_a_good_end_only_if_it_is_long(
    status: str, chief: bool, sent_at_once: bool, flush_s: float, waits: list[float], said: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    waited: list[float] = []

    def wait(is_over: object, timeout_s: float) -> bool:
        waited.append(timeout_s)
        return sent_at_once

    sender = SimpleNamespace(alive=lambda: True, wait=wait, end=lambda within_s: None)
    monkeypatch.setattr(spool_delivery, "SenderProcess", lambda spool: sender)
    callback = MLflowCallback(tracking_uri="http://127.0.0.1:9", spool_dir=tmp_path, flush_timeout_s=flush_s)
    callback.on_job(job("waits", rank=0 if chief else 1, size=2))
    capsys.readouterr()
    assert callback._delivery is not None
    callback._delivery.wait(status == "FINISHED", chief)
    reported = capsys.readouterr().err
    assert waited == waits
    assert (f"sending the last records takes {said}; nothing need be done" in reported) if said else not reported
    is_kept = f"If this process is killed meanwhile, they wait in {callback.spool}; send them with: " in reported
    assert is_kept == (status != "FINISHED")


@pytest.mark.parametrize(("n_killed", "n_started"), [(1, 2), (2, 3), (9, 4)])
def test_a_sender_that_is_killed_while_the_end_waits_has_a_successor(
    n_killed: int, n_started: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    started: list[Any] = []

    def start(spool: Path) -> Any:
        is_killed = len(started) < n_killed

        def wait(is_over: Callable[[], bool], timeout_s: float) -> bool:
            if not is_killed:
                write_status(spool, SpoolStatus(run_id="r", experiment_id="1", recorded=True, done=True))
            return True

        started.append(SimpleNamespace(alive=lambda: not is_killed, wait=wait, end=None))
        return started[-1]

    monkeypatch.setattr(spool_delivery, "SenderProcess", start)
    callback = MLflowCallback(tracking_uri="http://127.0.0.1:9", spool_dir=tmp_path)
    callback.on_job(job("killed-sender"))
    started[0].alive = iter([True, *[False] * 9]).__next__  # it dies while it is waited for
    callback.on_end("FINISHED", None)
    out, err = capsys.readouterr()
    assert len(started) == n_started
    assert ("run r is FINISHED" in out) == (n_killed < 9) == ("NOT everything" not in err)
    words = "the process that sends records has ended (killed, or out of memory?), as have 3 that were started in"
    assert (words in err) == (n_killed == 9) and "no answer" not in err


@pytest.mark.parametrize(
    ("problem", "flush_s", "waits"),
    [(None, 30.0, [2.0, 29.0, 120.0]), ("connection refused", 30.0, [2.0, 29.0]), (None, 0.0, [1.0, 0.0])],
)
def test_the_end_waits_longer_for_a_model_while_mlflow_answers(
    problem: str | None, flush_s: float, waits: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    waited: list[float] = []

    def wait(is_over: Callable[[], bool], timeout_s: float) -> bool:
        waited.append(timeout_s)
        write_status(callback.spool, SpoolStatus(recorded=True, problem=problem))
        assert not is_over()
        if timeout_s == 120.0:  # what cannot be sent now is not waited for
            write_status(callback.spool, SpoolStatus(recorded=True, problem="connection refused"))
            assert is_over()
        return False

    def write(model: Any, folder: Path, step: int, checkpoint: Any) -> int:
        folder.mkdir()
        return 8 << 20

    sender = SimpleNamespace(alive=lambda: True, wait=wait, end=lambda within_s: None, pid=4711)
    monkeypatch.setattr(spool_delivery, "SenderProcess", lambda spool: sender)
    callback: Any = MLflowCallback(
        tracking_uri="http://127.0.0.1:9", spool_dir=tmp_path, flush_timeout_s=flush_s,
        log_model=SimpleNamespace(of="last", check=lambda model: None, check_job=lambda settings: None, write=write),
    )  # fmt: skip
    callback.on_model(object())
    callback.on_job(job("waits"))
    capsys.readouterr()
    callback.on_end("FINISHED", None)
    assert waited[-len(waits) :] == waits and waited.count(120.0) == waits.count(120.0)
    reported = capsys.readouterr().err
    assert ("MLflow is logging the model, for 120 s more at most; nothing need be done" in reported) == (120.0 in waits)
    assert (
        "the model is still being logged by process 4711, which continues when this one ends: nothing need" in reported
    )
    assert f"{model_path(callback.spool)} stays: send them with: gba-hvd mlflow send {callback.spool}" in reported


@pytest.mark.parametrize(
    ("problem", "words"), [("connection refused", "did not): connection refused"), (None, "no answer within 151 s")]
)
def test_a_sender_that_cannot_log_the_model_is_ended(
    problem: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    ended: list[float] = []

    def wait(is_over: Callable[[], bool], timeout_s: float) -> bool:
        write_status(callback.spool, SpoolStatus(problem=problem if timeout_s == 120.0 else None))
        return is_over()

    def write(model: Any, folder: Path, step: int, checkpoint: Any) -> int:
        folder.mkdir()
        return 8 << 20

    def end(within_s: float) -> None:
        ended.append(within_s)

    sender = SimpleNamespace(alive=lambda: True, wait=wait, end=end, pid=4711)
    monkeypatch.setattr(spool_delivery, "SenderProcess", lambda spool: sender)
    callback: Any = MLflowCallback(
        tracking_uri="http://127.0.0.1:9", spool_dir=tmp_path, flush_timeout_s=30.0,
        log_model=SimpleNamespace(of="last", check=lambda model: None, check_job=lambda settings: None, write=write),
    )  # fmt: skip
    callback.on_model(object())
    callback.on_job(job("waits"))
    callback.on_end("FINISHED", None)
    assert ended == [5.0] and words in capsys.readouterr().err


def test_another_name_for_the_run_in_a_later_launch_is_warned_of(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def launch(run_name: str | None, mode: str) -> str:
        callback = patient(tracking_uri=database, spool_dir=tmp_path / "spool", run_name=run_name)
        callback.on_job(job("nightly", mode=mode))
        callback.on_step(step(1))
        callback.on_end("FINISHED", None)
        return capsys.readouterr().err

    assert "is not used" not in launch("shop", "allreduce")
    run_id = only_run(database, "nightly").info.run_id
    client(database).update_run(run_id, name="the shop")
    assert "is not used" not in launch("shop", "allreduce"), "a person has renamed the run"
    assert "run_name='night 2' is not used" in launch("night 2", "gba")
    run = only_run(database, "nightly")
    assert (run.info.run_name, run.data.params["mode"], run.data.tags["gba_hvd.now.mode"]) == (
        "the shop", "allreduce", "gba"
    )  # fmt: skip
    events = [json.loads(line) for line in artifact(database, run, "events.jsonl", tmp_path / "a").splitlines()]
    assert [(one["event"], one["level"]) for one in events] == [("run_name_unused", "warning")]
    assert "is not used" not in launch(None, "gba")


def test_another_experiment_in_a_later_launch_of_the_job_is_warned_of(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """It resumes: its checkpoint has the run that is continued."""
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    state: dict[str, Any] = {}

    def launch(experiment: str | None) -> str:
        callback = patient(experiment, tracking_uri=database, spool_dir=tmp_path / "spool")
        callback.load_state_dict(state)
        callback.on_job(job("resumes"))
        callback.on_step(step(1))
        callback.on_end("FINISHED", None)
        state.update(callback.state_dict() | {"run_id": only_run(database, "resumes").info.run_id})
        return capsys.readouterr().err

    assert "is not used" not in launch("first")
    assert (
        "experiment='second' is not used: all launches of a job are one run, which its first launch put into the "
        in (launch("second"))
    )
    run = only_run(database, "resumes")
    events = [json.loads(line) for line in artifact(database, run, "events.jsonl", tmp_path / "a").splitlines()]
    assert [(one["event"], one["level"]) for one in events] == [("experiment_unused", "warning")]
    assert client(database).get_experiment_by_name("second") is None, "nor is an empty one made"
    client(database).rename_experiment(run.info.experiment_id, "a better name")
    assert "is not used" not in launch("first"), "a person has renamed it"
    assert "is not used" not in launch(None)


def test_the_environment_names_an_experiment_by_its_id(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    wanted = client(database).create_experiment("the team's")
    state: dict[str, Any] = {}

    def launch(name: str, experiment_id: str) -> tuple[Any, str]:
        monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", experiment_id)
        callback = patient(None, tracking_uri=database, spool_dir=tmp_path / "spool", system_metrics=False)
        callback.load_state_dict(state)
        callback.on_job(job(name))
        callback.on_step(step(1))
        callback.on_end("FINISHED", None)
        return only_run(database, name), capsys.readouterr().err

    run, printed = launch("by id", wanted)
    assert run.info.experiment_id == wanted and "is not used" not in printed
    client(database).rename_experiment(wanted, "the team's new name")
    again, printed = launch("by id", wanted)
    assert again.info.run_id == run.info.run_id and "is not used" not in printed
    other = client(database).create_experiment("another team's")
    state["run_id"] = run.info.run_id
    assert 'experiment="another team\'s" is not used: all launches' in launch("by id", other)[1]
    state.clear()
    run, printed = launch("no such one", "777")
    assert client(database).get_experiment(run.info.experiment_id).name == "gba-hvd"
    is_in = "the run is in the experiment 'gba-hvd'"
    assert f"MLFLOW_EXPERIMENT_ID='777' is not used: {database} has no experiment with this id; {is_in}" in printed
    events = [json.loads(line) for line in artifact(database, run, "events.jsonl", tmp_path / "a").splitlines()]
    assert [(one["event"], one["level"]) for one in events] == [("experiment_id_unused", "warning")]


def test_a_trial_of_a_sweep_has_the_tags_and_the_parent_that_the_script_names(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    experiment_id = client(database).create_experiment("sweep of a test")
    parent = client(database).create_run(experiment_id).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", parent)
    args = argparse.Namespace(mode="fast", lr=0.1, data=Path("/data"))
    callback = patient(
        "sweep of a test", tracking_uri=database, spool_dir=tmp_path / "spool", system_metrics=False,
        params=vars(args), tags={"sweep": "one", "trial": 3}, parent_run_id=parent,
    )  # fmt: skip
    assert callback.run_id is None
    callback.on_job(job("trial-3", mode="gba", lr=0.1))
    run_id = wait_until("MLflow has made the run", lambda: callback.run_id)
    callback.on_step(step(1))
    callback.on_end("FINISHED", None)
    run = only_run(database, "trial-3")
    assert run.info.run_id == run_id == callback.run_id
    named = {name: run.data.tags[name] for name in ("sweep", "trial", "mlflow.parentRunId")}
    assert named == {"sweep": "one", "trial": "3", "mlflow.parentRunId": parent}
    assert run.data.params == {"mode": "gba", "script.mode": "fast", "lr": "0.1", "data": "/data"}
    assert "warning: parameters of the script that the job has with another value: mode. " in capsys.readouterr().err


def test_only_rank_0_names_the_run():
    callback = patient(tracking_uri="http://127.0.0.1:9", system_metrics=False)
    callback.load_state_dict({"run_id": "r1"})
    callback.on_job(job("ranks", rank=1, size=2, is_host_leader=False))
    assert callback.run_id is None


def test_a_parent_that_is_not_there_is_warned_of(database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    callback = patient(
        tracking_uri=database, spool_dir=tmp_path / "spool", system_metrics=False, parent_run_id="0" * 32
    )
    callback.on_job(job("orphan"))
    callback.on_step(step(1))
    callback.on_end("FINISHED", None)
    run = only_run(database, "orphan")
    assert run.info.status == "FINISHED" and "mlflow.parentRunId" not in run.data.tags
    assert f"parent_run_id={'0' * 32!r} is not used: {database} has no run with this id" in capsys.readouterr().err
    events = [json.loads(line) for line in artifact(database, run, "events.jsonl", tmp_path / "a").splitlines()]
    assert [(one["event"], one["level"]) for one in events] == [("parent_run_id_unused", "warning")]


@pytest.mark.parametrize("parent", [None, "b"])
def test_a_run_that_the_environment_names_is_refused_unless_it_is_the_parent(
    parent: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_RUN_ID", "a")
    with pytest.raises(BadInput, match=r"MLFLOW_RUN_ID=a is set, .* Unset it, or name that run as the parent: "):
        MLflowCallback(parent_run_id=parent)
    MLflowCallback(parent_run_id="a")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mlflow.runName", "is the argument run_name"),
        ("mlflow.parentRunId", "is the argument parent_run_id"),
        ("gba_hvd.mode", "begins with gba_hvd., as the job's own do"),
        ("a(b)", "'a\\(b\\)' is no name of a tag"),
        ("", "'' is no name of a tag"),
    ],
)
def test_tags_that_mlflow_or_the_run_has_no_place_for_are_refused(name: str, words: str):
    with pytest.raises(BadInput, match=words):
        MLflowCallback(tags={name: 1})


def test_a_run_has_the_scores_of_its_best_epoch_whatever_comes_after_it(database: str, tmp_path: Path):
    callback = patient(tracking_uri=database, spool_dir=tmp_path / "spool", log_every_steps=1, system_metrics=False)
    callback.on_job(job("best"))
    for k, (valid, test) in enumerate([(0.7, 0.71), (0.8, 0.79), (0.75, 0.83)]):
        callback.on_step(dataclasses.replace(step(10 * k + 10), epoch=k))
        callback.on_epoch(k)
        callback.on_metrics(10 * k + 10, {"valid_auc": valid})
        callback.on_metrics(10 * k + 10, {"test_auc": test, "seconds": 3.0})
    callback.on_end("FINISHED", None)
    run = only_run(database, "best")
    best = {name: value for name, value in run.data.metrics.items() if name.startswith("best_")}
    assert best == {"best_valid_auc": 0.8, "best_test_auc": 0.79, "best_epoch": 1, "best_step": 20}
    assert run.data.metrics["valid_auc"] == 0.75
    assert sorted({*logged_steps(database, run, "best_valid_auc")}) == [10, 20, 30], "kept up to date"
    story = read("best", database)
    assert [sorted(one.values) for one in story.measured] == 3 * [["test_auc", "valid_auc"]]


def test_settings_that_no_mode_uses_are_parameters_once_a_mode_that_uses_them_is_entered(database: str, tmp_path: Path):
    settings = {"mode": "allreduce", "slack": 1, "tolerance": 4}
    callback = patient(tracking_uri=database, spool_dir=tmp_path / "spool", system_metrics=False)
    callback.on_job(dataclasses.replace(job("idle", **settings), idle_settings=("slack", "tolerance")))
    wait_until("MLflow has made the run", lambda: callback.run_id)
    wait_until_delivered(callback)
    assert only_run(database, "idle").data.params == {"mode": "allreduce"}
    switch = {"from": "allreduce", "to": "gba", "settings_first_used": ["rule_reason", "tolerance"]}
    callback.on_event(Event("switch", 1, "allreduce -> gba: requested", switch))
    callback.on_end("FINISHED", None)
    assert only_run(database, "idle").data.params == {"mode": "allreduce", "tolerance": "4"}


def test_one_parameter_mlflow_refuses_does_not_stop_the_others(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    callback = patient(tracking_uri=database, spool_dir=tmp_path, log_every_steps=1, params={"": "no name", "good": 1})
    callback.on_job(job("refused"))
    callback.on_step(step(1))
    callback.on_end("FINISHED", None)
    run = only_run(database, "refused")
    assert run.data.params == {"good": "1"}
    assert run.info.status == "FINISHED"
    assert "1 values were not recorded" in capsys.readouterr().err


def test_a_run_left_running_by_the_same_job_is_closed_when_the_job_ends(database: str, tmp_path: Path):
    mlflow = client(database)
    experiment = mlflow.get_experiment_by_name("twice")
    experiment_id = experiment.experiment_id if experiment else mlflow.create_experiment("twice")
    mine, stray = (
        mlflow.create_run(experiment_id, start_time=time, tags={"gba_hvd.job_id": "twice"}).info.run_id
        for time in (1, 2)
    )
    callback = patient("twice", tracking_uri=database, spool_dir=tmp_path, system_metrics=False)
    callback.on_job(job("twice"))
    callback.on_end("FINISHED", None)
    assert mlflow.get_run(mine).info.status == "FINISHED"
    assert mlflow.get_run(stray).info.status == "KILLED"
    assert mlflow.get_run(stray).data.tags["gba_hvd.superseded_by"] == mine


def test_a_job_is_called_as_it_was_named_or_after_its_script(monkeypatch: pytest.MonkeyPatch):
    assert job_name({"GBA_HVD_JOB_NAME": "night-run"}) == "night-run"
    monkeypatch.setattr(sys, "argv", ["examples/train_ctr.py", "--config", "x"])
    assert job_name({}) == "train_ctr"
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert job_name({}) == "python"


def test_a_job_says_which_earlier_ones_were_never_sent(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    left = tmp_path / "spool" / "old.h1.1.0.jsonl"
    left.parent.mkdir()
    left.write_text('{"kind": "job", "job_id": "old"}\n')
    monkeypatch.setattr(SpoolDelivery, "look", lambda self, is_chief: None)
    for age_s, says in ((0, False), (3600, True)):  # another job may be starting just now
        os.utime(left, (time.time() - age_s,) * 2)
        MLflowCallback(tracking_uri=database, spool_dir=left.parent).on_job(job("new"))
        reported = capsys.readouterr().err
        assert (f"never reached MLflow and wait in {left}" in reported) == says
        assert (f"gba-hvd mlflow send {left}" in reported) == says


def test_what_kills_a_worker_and_its_children_does_not_kill_its_sender(database: str, tmp_path: Path):
    """A launcher that ends a job does so."""
    worker = Worker(tmp_path, tracking_uri=database, spool_dir="spool", log_every_steps=1, system_metrics=False)
    worker("on_job", dataclasses.asdict(job("with-children")))
    wait_until("the sender began, apart from the worker", lambda: runs(database, "with-children"))
    family = psutil.Process(worker.pid).children(recursive=True)
    worker("on_step", dataclasses.asdict(step(1)))
    worker.kill()
    for process in family:
        process.kill()
    wait_until("FAILED", lambda: [r for r in runs(database, "with-children") if r.info.status == "FAILED"])
    assert logged_steps(database, only_run(database, "with-children"), "train/loss") == [1]
    wait_until("the sender cleaned up", lambda: not (tmp_path / "spool").exists())


def test_importing_the_callback_does_not_import_mlflow():
    code = "import sys, gba_hvd.tracking; assert not {'mlflow', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_without_mlflow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'mlflow"):
        MLflowCallback()


def test_the_steps_after_the_last_point_are_a_point_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SpoolDelivery, "_start_sender", lambda self: None)
    monkeypatch.setattr(SpoolDelivery, "wait", lambda self, has_finished, is_chief: None)
    callback = MLflowCallback(spool_dir=tmp_path / "spool", log_every_steps=3)
    callback.on_job(job("tail"))
    for k in range(1, 6):
        callback.on_step(step(k, loss=float(k)))
    callback.on_end("FINISHED", None)
    assert callback.spool is not None
    records = [record for record in all_records(callback.spool) if record["kind"] == "metrics"]
    assert [(record["step"], record["values"]["train/loss"]) for record in records] == [(3, 2.0), (5, 4.5)]
    assert list(all_records(callback.spool))[-1]["kind"] == "end"


@pytest.mark.parametrize("own", ["", "lr"])
def test_a_learning_rate_that_a_schedule_moves_is_a_metric_unless_the_script_logs_it(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(SpoolDelivery, "_start_sender", lambda self: None)
    callback = MLflowCallback(spool_dir=tmp_path / "spool", log_every_steps=1)
    callback.on_job(dataclasses.replace(job("schedule"), settings={"dense_lr": 0.1}))
    if own:
        callback.on_metrics(0, {own: 0.1})
    for k, lrs in enumerate([(0.1,), (0.1,), (0.05,), (0.05,), (0.02,), ()], start=1):
        callback.on_step(dataclasses.replace(step(k), dense_lrs=lrs))
    assert callback.spool is not None
    points = [record for record in all_records(callback.spool) if record["kind"] == "metrics"]
    found = [(record["step"], record["values"]["dense_lr"]) for record in points if "dense_lr" in record["values"]]
    assert found == ([] if own else [(3, 0.05), (5, 0.02)])


def test_groups_with_learning_rates_of_their_own_have_a_metric_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SpoolDelivery, "_start_sender", lambda self: None)
    callback = MLflowCallback(spool_dir=tmp_path / "spool", log_every_steps=1)
    callback.on_job(dataclasses.replace(job("groups"), settings={"dense_lr": 0.1}))
    for k, lrs in enumerate([(0.1, 0.1), (0.1, 0.01), (0.1, 0.02), (0.05, 0.02), (0.05, 0.05)], start=1):
        callback.on_step(dataclasses.replace(step(k), dense_lrs=lrs))
    assert callback.spool is not None
    points = [record["values"] for record in all_records(callback.spool) if record["kind"] == "metrics"]
    found = [{name: value for name, value in point.items() if name.startswith("dense_lr")} for point in points]
    first, second = "dense_lr/group_0", "dense_lr/group_1"
    assert found == [{}, {first: 0.1, second: 0.01}, {second: 0.02}, {"dense_lr": 0.05, first: 0.05}, {second: 0.05}]


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(BadInput, match="log_every_steps must be at least 1, not 0"):
        MLflowCallback(log_every_steps=0)


def test_sending_what_is_not_there_says_so(tmp_path: Path):
    with pytest.raises(BadInput, match="neither a spool file nor a folder"):
        run_command("mlflow", "send", str(tmp_path / "gone.jsonl"))
    with pytest.raises(BadInput, match="nothing to send"):
        run_command("mlflow", "send", str(tmp_path))


def run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    mlflow_send.add_parser(parser.add_subparsers())
    args = parser.parse_args(arguments)
    return int(args.run(args))


def test_without_a_run_there_is_nothing_to_report_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "--tracking-uri", f"sqlite:///{tmp_path}/none.db"]) == 1
    assert "no run is named, and there are none in sqlite:///" in capsys.readouterr().err
    assert not (tmp_path / "none.db").exists()


def test_of_many_runs_the_ten_newest_are_named(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = client(database).create_experiment("many")
    for number in range(12):
        client(database).create_run(experiment, start_time=2**42 + number, run_name=f"run-{number}")
    assert cli.main(["report", "--tracking-uri", database]) == 1
    named = [line.split()[1] for line in capsys.readouterr().err.splitlines() if line.startswith("  ")]
    assert named == [f"run-{number}" for number in range(11, 1, -1)]


def test_a_setting_that_a_launch_does_not_have_any_more_is_marked_until_one_has_it_again(
    database: str, tmp_path: Path
) -> None:
    def launch(**settings: Any) -> RunHistory:
        callback = patient(tracking_uri=database, spool_dir=tmp_path / "spool", system_metrics=False)
        callback.on_job(job("thrice", **settings))
        callback.on_end("FINISHED", None)
        return read("thrice", database)

    assert launch(lr=1, clip=5).params == {"lr": "1", "clip": "5"}
    client(database).log_param(only_run(database, "thrice").info.run_id, "mine", "x")  # of a person
    without = launch(lr=1)
    assert (dict(without.params), dict(without.first_params)) == ({"lr": "1", "mine": "x"}, {"clip": "5"})
    tags = only_run(database, "thrice").data.tags
    assert tags["gba_hvd.now.clip"] == "(not set)" and "gba_hvd.now.mine" not in tags
    again = launch(lr=1, clip=5)
    assert (dict(again.params), dict(again.first_params)) == ({"lr": "1", "clip": "5", "mine": "x"}, {})


def test_the_names_of_many_parameters_are_remembered(database: str, tmp_path: Path) -> None:
    """Their list is longer than a tag, and more are gone than one call may set."""

    def launch(**settings: Any) -> RunHistory:
        callback = patient(tracking_uri=database, spool_dir=tmp_path / "spool", system_metrics=False)
        callback.on_job(job("many", **settings))
        callback.on_end("FINISHED", None)
        return read("many", database)

    many = {f"setting_{i}_{'x' * 60}": i for i in range(130)}
    assert len(launch(**many, lr=1).params) == 131
    assert dict(launch(lr=1).params) == {"lr": "1"}
    assert max(len(text) for text in only_run(database, "many").data.tags.values()) <= 5000
