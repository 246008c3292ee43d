"""However a job ends: what callbacks get, the status of its MLflow run and the exit code say the same."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from gba_hvd.tracking.sender_process import send_left_behind

from .cluster import Cluster, cluster, wait_for

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # MLflow's use of SQLAlchemy, when a test asks it
]
NOWHERE = {"tracking_uri": "http://127.0.0.1:9", "flush_timeout_s": 0.1, "system_metrics": False}


def at_step_5(do: str, rank: int = 0, **more: Any) -> dict[str, Any]:
    return {"point": "before exchange", "do": do, "step": 5, "rank": rank, **more}


def end_in_spool(job: Cluster) -> dict[str, Any]:
    """What is on its way to MLflow, which cannot be reached."""
    records = [
        json.loads(line) for file in job.folder.glob("gba-hvd-spool/*.jsonl") for line in file.read_text().splitlines()
    ]
    (end,) = [record for record in records if record["kind"] == "end" and record["status"]]
    return end


@pytest.mark.parametrize(
    ("fault", "plan", "status", "of_the_run", "reason"),
    [
        pytest.param(at_step_5("mark"), {}, "FINISHED", "FINISHED", "", marks=pytest.mark.variant),
        (at_step_5("raise"), {}, "FAILED", "FAILED", "RuntimeError: planned failure"),
        (at_step_5("int"), {}, "KILLED", "KILLED", "KeyboardInterrupt"),
        (at_step_5("term"), {}, "KILLED", "KILLED", "SIGTERM"),
        (at_step_5("exit", code=0), {}, "FINISHED", "FINISHED", ""),
        pytest.param(at_step_5("exit", code=3), {}, "FAILED", "FAILED", "SystemExit: 3", marks=pytest.mark.variant),
        (at_step_5("exit", code=3), {"plain_loop": True}, "FAILED", "FAILED", "SystemExit: 3"),
        pytest.param(
            at_step_5("exit", code=0), {"plain_loop": True}, "FINISHED", "FINISHED", "", marks=pytest.mark.variant
        ),
        pytest.param(
            at_step_5("raise"), {"plain_loop": True}, "FAILED", "FAILED", "planned failure", marks=pytest.mark.variant
        ),
    ],
    ids=["end", "raise", "ctrl-c", "term", "exit-0", "exit-3", "exit-3-loop", "exit-0-loop", "raise-loop"],
)
def test_one_worker(
    tmp_path: Path, fault: dict[str, Any], plan: dict[str, Any], status: str, of_the_run: str, reason: str
) -> None:
    with cluster(tmp_path, horovod=False, epochs=1, faults=[fault], mlflow=NOWHERE, **plan) as job:
        job.start_alone()
        code = job.wait()
        assert job.fired() == 1, job.log()
        assert [end["end"] for end in job.notes("end")] == [status], job.log()
        end = end_in_spool(job)
        assert end["status"] == of_the_run
        assert reason in end["reason"] and bool(reason) == bool(end["reason"])
        assert (code == 0) == (of_the_run == "FINISHED")
        job.assert_nothing_left()


def test_a_last_checkpoint_that_fails_is_how_the_job_ends(tmp_path: Path) -> None:
    """All steps are done; nobody would find them again: not FINISHED, and the log says what to do."""
    url = str(tmp_path / "store")
    plan = {"horovod": False, "epochs": 1, "mlflow": NOWHERE, "checkpoint": {"url": url, "every_steps": 1000}}
    with cluster(tmp_path / "job", faults=[at_step_5("spoil the store")], **plan) as job:
        job.start_alone()
        assert job.wait() != 0
        assert job.fired() == 1, job.log()
        assert job.result()["step"] == 11, "the training was to end"
        (end,) = job.notes("end")
        assert end["end"] == "NOT_SAVED"
        assert "the training is done (step 11), but the checkpoint of its last step was not saved" in end["error"]
        assert url in end["error"] and "start the same command again" in end["error"]
        of_the_run = end_in_spool(job)
        assert (of_the_run["status"], of_the_run["reason"]) == ("FAILED", f"LastCheckpointFailed: {end['error']}")
        assert "[not saved] step 11: LastCheckpointFailed: the training is done" in job.said()
        assert "LastCheckpointFailed" in job.said().rpartition("Traceback")[2]
        job.assert_nothing_left()


def test_a_worker_that_exits_with_0_within_an_epoch_leaves_nobody_waiting_for_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    """It would wait for the others to save, and they for its gradients."""
    plan = {"mlflow": NOWHERE, "checkpoint": {"url": str(tmp_path / "store"), "every_steps": 1000}}
    with cluster(tmp_path / "job", faults=[at_step_5("exit", 1, code=0)], **plan) as job:
        job.start_static(2)
        assert job.wait() != 0
        assert job.fired() == 1, job.log()
        ends = {note["end"] for note in job.notes("end")}
        assert "FAILED" in ends and "ended first (it left the loop over batches of epoch 0" in job.said(), job.log()
        job.assert_nothing_left()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of MLflow's with its tables made: that takes seconds."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    MlflowClient(tracking_uri=uri).create_experiment("gba-hvd")
    return uri


def run_of(uri: str, job: Cluster) -> Run:
    """The run, when all is delivered: on a busy machine a short job may end before its sender has MLflow loaded."""
    for spool in job.folder.glob("gba-hvd-spool/*.jsonl"):
        assert send_left_behind(spool, 300.0).done  # what `gba-hvd mlflow send` does
    mlflow, (name,) = MlflowClient(tracking_uri=uri), {line["job"] for line in job.notes("job")}
    (run,) = mlflow.search_runs(
        [one.experiment_id for one in mlflow.search_experiments()], f"tags.`gba_hvd.job_id` = '{name}'"
    )
    return run


def test_a_worker_that_is_killed_while_it_reports_its_end_has_said_why(tmp_path: Path) -> None:
    """It waits for an MLflow that cannot be reached, and the launcher kills it 5 s after the other one."""
    with cluster(tmp_path, faults=[at_step_5("raise", 1)], mlflow=NOWHERE | {"flush_timeout_s": 120.0}) as job:
        job.start_static(2)
        assert job.wait() != 0
        assert job.fired() == 1 and "Terminating remaining workers" in job.said(), job.log()
        # The launcher kills the worker, then ends the shell that started it: whichever of the two ends first is seen.
        by = (signal.SIGKILL, signal.SIGTERM)
        assert any(f"Process 0 exit with status code {128 + number}" in job.said() for number in by), job.log()
        assert "sending the last records" in job.said() and "NOT everything reached MLflow" not in job.said(), "killed"
        assert "WorldLost: rank 1 (process" in job.said() and "ended first (RuntimeError: planned" in job.said()
        assert job.said().count("RuntimeError: planned failure\n") == 1, job.log()  # each traceback once


@pytest.mark.parametrize(
    ("do", "rank", "said"),
    [
        ("kill", 1, r"was killed, or died without a word, and without an elastic launcher it is not replaced"),
        pytest.param("kill", 0, "", marks=pytest.mark.variant),  # the chief: its sender says so
        ("raise", 1, r"ended first (RuntimeError: planned failure)"),
        pytest.param(
            "exit",
            1,
            r"ended first (it left the loop over batches of epoch 0 within step 5, ",
            marks=pytest.mark.variant,
        ),
    ],
    ids=["other-killed", "chief-killed", "other-raises", "other-exits"],
)
def test_two_workers_without_elasticity(tmp_path: Path, database: str, do: str, rank: int, said: str) -> None:
    """The launcher kills whoever is left 5 s after one worker has died: each learns of the end before, and why."""
    mlflow = {"tracking_uri": database, "flush_timeout_s": 120, "system_metrics": False}
    with cluster(tmp_path, faults=[at_step_5(do, rank, code=0)], mlflow=mlflow) as job:
        job.start_static(2)
        assert job.wait() != 0
        assert job.fired() == 1, job.log()
        assert ("Process name: 1" in job.said()) == (do != "exit" and rank == 1), "which one the launcher blames"
        job.assert_nothing_left()  # the senders have ended, too
        ends = job.notes("end")
        assert [end["end"] for end in ends] == {
            "kill": ["FAILED"], "raise": ["FAILED", "FAILED"], "exit": ["FINISHED", "FAILED"],
        }[do], job.log()  # fmt: skip
        survivor = max(ends, key=lambda end: float(end["time"]))
        assert f"rank {rank} (process" in survivor["error"] and said in survivor["error"]
        assert "after step 4" in survivor["error"]
        assert survivor["error"][:40] in job.said(), "the log says it, too"
        died_s = json.loads((job.out / "fault-0").read_text())["time"]
        assert float(survivor["time"]) - died_s < 30
        run = run_of(database, job)
        assert run.info.status == "FAILED"
        reason = run.data.tags["gba_hvd.status_reason"]
        assert (f"WorldLost: rank {rank}" in reason) if rank else ("ended without reporting its end" in reason)


def test_ctrl_c_is_killed_on_all_workers_although_one_ends_first(tmp_path: Path) -> None:
    with cluster(tmp_path, epochs=1000, sleep_s=0.01, mlflow=NOWHERE) as job:
        job.start_static(2)
        assert job.launcher is not None
        wait_for(lambda: job.last_step() > 3, "training")
        os.killpg(job.launcher.pid, signal.SIGINT)
        job.wait()
        job.assert_nothing_left()
        assert [end["end"] for end in job.notes("end")] == ["KILLED", "KILLED"], job.log()
        assert end_in_spool(job)["status"] == "KILLED"
