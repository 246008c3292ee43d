"""The trained model in MLflow: logged, registered, opened where there is no Horovod; and a registry that fails."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from gba_hvd_tools import cli
from mlflow import MlflowClient
from torch import nn

import gba_hvd
from gba_hvd import BadInput
from gba_hvd.callbacks import Event
from gba_hvd.tracking import MLflowCallback
from gba_hvd.tracking.mlflow_model import register
from gba_hvd.tracking.spool import all_records, model_path
from gba_hvd.tracking.spool_delivery import SpoolDelivery
from recovery.restore.open_checkpoint import open_checkpoint
from tests.tools.commands.test_model import frame_of
from tests.tracking.conftest import FLUSH_S, Server, artifact, client, job, only_run, port_of_our_own, step, wait_until
from tests.unit.conftest import _no_keeper as _no_keeper
from tests.unit.serving import model_code
from tests.unit.serving.conftest import CODE, batch, evaluated
from tests.unit.serving.conftest import job_memory as job_memory
from tests.unit.serving.conftest import trained as trained
from tests.unit.serving.test_export import checkpoint
from tests.unit.test_without_horovod import BLOCKED

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
Trained = Callable[..., nn.Module]
patient = functools.partial(MLflowCallback, flush_timeout_s=FLUSH_S, system_metrics=False)
SAVED = {
    "url": "file:///jobs/ctr",
    "manifest": "manifests/000001-00000003.json",
    "checksum": "ab" * 16,
    "saved_step": 3,
}


def run_job(callback: MLflowCallback, model: nn.Module, job_id: str, status: str = "FINISHED") -> None:
    callback.on_model(model)
    callback.on_job(job(job_id))
    for k in range(1, 4):
        callback.on_step(step(k))
    callback.on_event(Event("checkpoint", 3, "saved", SAVED))
    callback.on_end(status, None)


def logged_models(uri: str, job_id: str) -> list[Any]:
    outputs = only_run(uri, job_id).outputs
    return [client(uri).get_logged_model(one.model_id) for one in (outputs.model_outputs if outputs else ())]


def log_model(**how: Any) -> gba_hvd.LogModel:
    return gba_hvd.LogModel(**{"name": "ctr", "input_example": batch(3), "build": CODE, **how})


PREDICT = (
    BLOCKED
    + """
import mlflow, pandas, warnings
warnings.simplefilter("ignore")
mlflow.set_tracking_uri(sys.argv[1])
found = mlflow.pyfunc.load_model(sys.argv[2]).predict(pandas.read_parquet("in.parquet"))
found.to_parquet("out.parquet")
assert not [name for name in sys.modules if name.split(".")[0] == "horovod"]
"""
)


def predicted(uri: str, model_uri: str, one: gba_hvd.Batch, folder: Path) -> np.ndarray:
    """By a process that cannot import Horovod."""
    frame_of(one).to_parquet(folder / "in.parquet")
    done = subprocess.run(
        [sys.executable, "-c", PREDICT, uri, model_uri], cwd=folder, capture_output=True, text=True, timeout=500,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: np.ndarray = pd.read_parquet(folder / "out.parquet")["score"].to_numpy()
    return found


def test_the_model_is_logged_registered_and_predicts_without_horovod(
    trained: Trained, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, one = trained(), batch(30)
    how = {"registered_model_name": "ctr", "alias": "champion", "requirements": ["my-models==1.2"]}
    callback = patient(*["m"], tracking_uri=database, spool_dir=tmp_path / "spool", log_model=log_model(**how))
    run_job(callback, model, "logs")
    run = only_run(database, "logs")
    assert run.info.status == "FINISHED"
    assert "The model is models:/ctr/1, of step 3. Alias champion: version 1. " in capsys.readouterr().out
    registered = client(database).get_model_version_by_alias("ctr", "champion")
    assert registered.tags["gba_hvd.checkpoint_checksum"] == SAVED["checksum"]
    assert registered.tags["gba_hvd.checkpoint"] == f"{SAVED['url']}/{SAVED['manifest']}"
    assert (registered.tags["gba_hvd.step"], registered.tags["gba_hvd.checkpoint_step"]) == ("3", "3")
    assert not (tmp_path / "spool").exists()
    assert np.array_equal(predicted(database, "models:/ctr@champion", one, tmp_path), evaluated(model, one).numpy())
    (logged,) = logged_models(database, "logs")
    assert logged.experiment_id == run.info.experiment_id != "0"
    files = Path(logged.artifact_location.removeprefix("file://"))
    signature = yaml.safe_load((files / "MLmodel").read_text())["signature"]
    assert [one["name"] for one in json.loads(signature["inputs"])] == ["user", "item", "history", "dense"]
    assert [(one["name"], one["type"]) for one in json.loads(signature["outputs"])] == [("score", "float")]
    requirements = (files / "requirements.txt").read_text().splitlines()
    assert not [one for one in requirements if "horovod" in one]
    assert {f"torch=={version('torch')}", "my-models==1.2", f"gba-hvd=={version('gba-hvd')}"} <= set(requirements)
    assert (files / "input_example.json").exists()


class Samples:
    """Batches of `conftest.batch`, of any samples."""

    def __len__(self) -> int:
        return 24

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        made = batch(len(rows), seed=int(rows[0]))
        return gba_hvd.Batch(made.ids, made.dense, torch.from_numpy((rows % 2).astype(np.float32)))


def test_a_job_logs_the_model_that_it_has_trained(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GBA_HVD_SHARD_DIR", str(tmp_path / "shm"))
    monkeypatch.setenv("GBA_HVD_JOB_ID", "trains")
    (tmp_path / "shm").mkdir()
    model = model_code.make_model()
    optimizer: Any = gba_hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.tables, global_batch=8, micro_batch=4
    )
    state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
    how = {"registered_model_name": "trained", "alias": "newest", "tables": "touched", "activation": "sigmoid"}
    state.register_callbacks([patient(
        *["m"], tracking_uri=database, spool_dir=tmp_path / "spool", log_model=log_model(**how)
    )])  # fmt: skip
    found = {}

    @gba_hvd.elastic.run
    def train(state: Any) -> None:
        for samples in gba_hvd.batches(Samples(), state):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(samples), samples.label).backward()
            optimizer.step()
        found["scores"] = torch.sigmoid(evaluated(model, batch(30)))

    train(state)
    assert state.step == 3
    scores = predicted(database, "models:/trained@newest", batch(30), tmp_path)
    assert np.array_equal(scores, found["scores"].numpy())


# What an answer with status 400 has, and what is wrong with the request. `mlflow models serve` casts columns to the
# types of the signature: 0.5 would become the id 0, 2**63 a negative one.
BAD_REQUESTS: list[tuple[str, Callable[[pd.DataFrame], pd.DataFrame]]] = [
    ("table 'user' has rows 0 to 49, got id 50", lambda frame: frame.assign(user=50)),
    ("field 'user': expected int64, got float64", lambda frame: frame.assign(user=0.5)),
    ("field 'user': expected int64, got float64", lambda frame: frame.assign(user=[None, 1, 2, 3, 4])),
    ("field 'user': sample 0: 9223372036854775808 does not fit", lambda frame: frame.assign(user=np.uint64(2**63))),
    ("field 'item': expected int64, got", lambda frame: frame.assign(item="1")),
    ("missing inputs ['history']", lambda frame: frame.drop(columns=["history"])),
    ("column history", lambda frame: frame.assign(history=[["a"]] * 5)),
    ("column history", lambda frame: frame.assign(history=[[0.5]] * 5)),
    ("has rows 0 to 8, got id 9", lambda frame: frame.assign(history=[[9]] * 5)),
    ("field 'dense': expected [B, 2] of float32, got [5, 1]", lambda frame: frame.assign(dense=[[1.0]] * 5)),
    ("column dense", lambda frame: frame.assign(dense=[["x", 1.0]] * 5)),
]


def test_a_served_model_answers_over_http(trained: Trained, database: str, tmp_path: Path) -> None:
    model, one = trained(), batch(5)
    callback = patient(*["m"], tracking_uri=database, spool_dir=tmp_path / "spool", log_model=log_model())
    run_job(callback, model, "served")
    (logged,) = logged_models(database, "served")
    port = port_of_our_own()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", logged.model_uri, "--env-manager", "local"]
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"  # it starts uvicorn by its name
    settings = {"MLFLOW_TRACKING_URI": database, "MLFLOW_DISABLE_TELEMETRY": "true", "PATH": path}
    with (tmp_path / "log").open("wb") as log:
        served = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], env=os.environ | settings, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    answers: list[tuple[int, str, str]] = []
    try:

        def answer(path: str, data: bytes | None = None) -> tuple[int, bytes]:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", data, headers)
            try:
                with urllib.request.urlopen(request, timeout=60) as found:
                    return found.status, found.read()
            except urllib.error.HTTPError as error:
                return error.code, error.read()
            except OSError:
                return 0, b""

        def is_up() -> bool:
            assert served.poll() is None, (tmp_path / "log").read_text()
            return answer("ping")[0] == 200

        wait_until("the model is served", is_up)
        frame = frame_of(one).drop(columns=["request"])
        status, text = answer("invocations", json.dumps({"dataframe_split": frame.to_dict("split")}).encode())
        assert status == 200, text
        scores = [row["score"] for row in json.loads(text)["predictions"]]
        assert np.array_equal(np.array(scores, np.float32), evaluated(model, one).numpy())
        for words, wrong in BAD_REQUESTS:
            bad = json.dumps({"dataframe_split": wrong(frame).to_dict("split")})
            status, text = answer("invocations", bad.encode())
            answers.append((status, words, json.loads(text).get("message", text)))
        assert [one for one in answers if one[0] != 400 or one[1] not in one[2]] == []
        assert answer("invocations", json.dumps({"dataframe_split": frame.to_dict("split")}).encode())[0] == 200
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself, and the test fails
            os.killpg(served.pid, signal.SIGTERM)
        served.wait(60)


def test_a_job_that_failed_logs_no_model(trained: Trained, database: str, tmp_path: Path) -> None:
    callback = patient(*["m"], tracking_uri=database, spool_dir=tmp_path / "spool", log_model=log_model())
    run_job(callback, trained(), "fails", "FAILED")
    assert only_run(database, "fails").info.status == "FAILED"
    assert not logged_models(database, "fails")


def test_a_model_that_cannot_be_written_is_an_event_and_the_run_ends(
    trained: Trained, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained()
    build = CODE.replace("make_model", "forgetful")
    callback = patient(*["m"], tracking_uri=database, spool_dir=tmp_path / "spool", log_model=log_model(build=build))
    run_job(callback, model, "wrong")
    run = only_run(database, "wrong")
    assert run.info.status == "FINISHED"
    events = [json.loads(line) for line in artifact(database, run, "events.jsonl", tmp_path / "a").splitlines()]
    (found,) = [one for one in events if one["event"] == "model_not_logged"]
    assert found["level"] == "warning"
    assert "differs from the model's on input_example" in found["message"]
    assert f"`gba-hvd model export` makes it from the checkpoint {SAVED['url']}/" in found["message"]
    assert "the model was not logged" in capsys.readouterr().err


def test_a_server_or_store_that_is_down_keeps_the_model_until_it_is_sent(
    trained: Trained,
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, one, spool_dir = trained(), batch(30), tmp_path / "spool"
    callback = MLflowCallback(
        *["m"], tracking_uri=server.uri, spool_dir=spool_dir, log_model=log_model(registered_model_name="later"),
        flush_timeout_s=3, system_metrics=False,
    )  # fmt: skip
    server.kill()
    run_job(callback, model, "down")
    assert f"gba-hvd mlflow send {callback.spool}" in capsys.readouterr().err
    assert callback.spool is not None
    assert (model_path(callback.spool) / "log.json").exists()

    server.start()
    fails: list[Path] = []

    def refuse(uri: str, run_id: str, folder: Path) -> str:
        fails.append(folder)
        raise OSError("the artifact store is full")

    with monkeypatch.context() as patched:
        patched.setattr("gba_hvd.tracking.mlflow_model.log_model", refuse)
        assert cli.main(["mlflow", "send", str(spool_dir), "--timeout", "3"]) == 1
    assert fails
    assert only_run(server.uri, "down").info.status == "FINISHED"
    assert "The model is still being logged" in only_run(server.uri, "down").data.tags["mlflow.note.content"]
    events = artifact(server.uri, only_run(server.uri, "down"), "events.jsonl", tmp_path / "a")
    assert "model_not_logged" in events
    assert f"the artifact store is full; send it with: gba-hvd mlflow send {callback.spool}" in events

    assert cli.main(["mlflow", "send", str(spool_dir)]) == 0
    assert client(server.uri).get_model_version("later", "1").tags["gba_hvd.step"] == "3"
    assert "model_logged" in artifact(server.uri, only_run(server.uri, "down"), "events.jsonl", tmp_path / "b")
    assert "still being logged" not in only_run(server.uri, "down").data.tags["mlflow.note.content"]
    assert not spool_dir.exists()
    assert np.array_equal(predicted(server.uri, "models:/later/1", one, tmp_path), evaluated(model, one).numpy())


def test_a_registry_that_is_down_gets_the_model_that_is_logged_already(
    trained: Trained, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool_dir = tmp_path / "spool"
    with monkeypatch.context() as patched:
        patched.setattr(SpoolDelivery, "_start_sender", lambda self: None)
        how = log_model(registered_model_name="once_up", alias="newest")
        callback = patient(*["m"], tracking_uri=database, spool_dir=spool_dir, log_model=how)
        run_job(callback, trained(), "registry down")

    def down(*args: Any) -> str:
        raise ConnectionError("the registry does not answer")

    with monkeypatch.context() as patched:
        patched.setattr("gba_hvd.tracking.mlflow_model.register", down)
        assert cli.main(["mlflow", "send", str(spool_dir), "--timeout", "3"]) == 1
    run = only_run(database, "registry down")
    assert run.info.status == "FINISHED"
    events = artifact(database, run, "events.jsonl", tmp_path / "a")
    assert f"the registry does not answer; send it with: gba-hvd mlflow send {callback.spool}" in events
    assert cli.main(["mlflow", "send", str(spool_dir)]) == 0
    (logged,) = logged_models(database, "registry down")
    found = client(database).get_model_version_by_alias("once_up", "newest")
    assert (found.source, not spool_dir.exists()) == (logged.model_uri, True)


def test_a_registry_that_refuses_costs_the_version_only(
    trained: Trained, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:  # a name that only MLflow knows to be none
        patched.setattr("gba_hvd.serving.log_model.check_names", lambda *_: None)
        logs = log_model(registered_model_name="not/allowed: name")
    callback = patient(*["m"], tracking_uri=database, spool_dir=tmp_path / "spool", log_model=logs)
    run_job(callback, trained(), "refused name")
    run = only_run(database, "refused name")
    assert run.info.status == "FINISHED"
    events = [json.loads(line) for line in artifact(database, run, "events.jsonl", tmp_path / "a").splitlines()]
    (found,) = [one for one in events if one["event"] == "model_not_logged"]
    assert re.search(r"is logged as models:/\S+ and was not registered: call mlflow.register_model", found["message"])
    assert found["message"] in capsys.readouterr().err
    (logged,) = logged_models(database, "refused name")
    assert f"mlflow models serve --env-manager local -m {logged.model_uri}" in run.data.tags["mlflow.note.content"]
    assert logged.name == "ctr"


def test_the_end_is_on_record_before_the_model_is_written(
    trained: Trained, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = patient(*["m"], tracking_uri=database, spool_dir=tmp_path / "spool", log_model=log_model())
    kinds = []

    def write(*args: Any) -> int:
        assert callback.spool is not None
        kinds.extend(record["kind"] for record in all_records(callback.spool))
        raise OSError("the disk is full")

    monkeypatch.setattr(gba_hvd.LogModel, "write", write)
    run_job(callback, trained(), "ends")
    assert kinds[-1] == "end"
    run = only_run(database, "ends")
    assert run.info.status == "FINISHED"
    assert "the disk is full" in artifact(database, run, "events.jsonl", tmp_path / "a")


def test_an_alias_that_fails_at_first_leaves_one_version(
    trained: Trained, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = patient(*["m"], tracking_uri=database, spool_dir=tmp_path / "spool", log_model=log_model())
    run_job(callback, trained(), "alias")
    (logged,) = logged_models(database, "alias")
    facts = {"registered_model_name": "once", "alias": "best", "tags": {}}

    def fail(*args: Any) -> None:
        raise ConnectionError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "set_registered_model_alias", fail)
        with pytest.raises(ConnectionError):
            register(database, logged.model_uri, facts)
    assert register(database, logged.model_uri, facts) == "1"
    assert client(database).get_model_version_by_alias("once", "best").version in (1, "1")
    assert len(client(database).search_model_versions("name='once'")) == 1


# --- what is refused before the training -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"name": "a/b"}, "MLflow takes names without"),
        ({"alias": "best"}, "alias='best' needs registered_model_name"),
        ({"alias": "V1", "registered_model_name": "ctr"}, "alias='V1': MLflow takes letters.* a v with a number"),
        ({"alias": "latest", "registered_model_name": "ctr"}, "alias='latest'.*neither 'latest'"),
        ({"alias": "a/b", "registered_model_name": "ctr"}, "alias='a/b'"),
        ({"requirements": "my-models"}, "requirements must be a list"),
    ],
)
def test_settings_that_cannot_be(how: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        log_model(**how)


def test_what_would_fail_at_the_end_is_refused_at_the_start(trained: Trained, tmp_path: Path) -> None:
    model = trained()
    one_sample = {"input_example": batch(1), "dense_program": True}
    refused = (
        ({"build": "nowhere.py:f"}, "cannot be read"), ({"input_example": "text"}, "batch is a str"),
        (one_sample, "at least 2 are needed"), ({"dense_names": ["price"]}, "dense_names has 1 names"),
        ({"input_example": {"tags": torch.arange(9), "tags_off": torch.arange(3)}}, "{'tags': 9, 'tags_off': 3}"),
    )  # fmt: skip
    for how, words in refused:
        callback = MLflowCallback(log_model=log_model(**how), spool_dir=tmp_path)
        with pytest.raises(BadInput, match=words):
            callback.on_model(model)


def test_the_request_of_a_logged_model_has_the_names_of_its_dense_columns(trained: Trained, tmp_path: Path) -> None:
    log_model(dense_names=["price", "age"]).write(trained(), tmp_path, 5, None)
    columns = json.loads((tmp_path / "log.json").read_text())["columns"]
    assert [*columns] == ["user", "item", "history", "price", "age"]
    assert columns["age"] == batch(3).dense[:, 1].tolist()


def test_the_best_model_comes_from_the_checkpoint_that_is_kept_for_it(trained: Trained, tmp_path: Path) -> None:
    model, one = trained(), batch(20)
    checkpoint(model, model.tables, tmp_path / "c")
    expected = evaluated(model, one)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    checkpoint(model, model.tables, tmp_path / "c", 2, {"best_step": 4})
    best = log_model(of="best")
    with pytest.raises(BadInput, match="of='best' is asked for, and the job has saved no checkpoint"):
        best.write(model, tmp_path / "none", 6, None)
    (tmp_path / "w").mkdir()
    best.write(model, tmp_path / "w", 6, {"url": str(tmp_path / "c"), "saved_step": 6})
    facts = json.loads((tmp_path / "w" / "log.json").read_text())
    assert (facts["step"], facts["tags"]["gba_hvd.checkpoint_step"]) == (5, "5")
    assert torch.equal(gba_hvd.load_for_inference(tmp_path / "w" / "model")(one), expected)


def test_where_the_best_model_was_not_saved_the_best_one_that_is_says_so_with_its_value(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model, best = trained(), log_model(of="best")
    missed = {"best_unsaved_step": 3, "best_unsaved_value": 0.8, "best_unsaved_why": "no server", "best_metric": "auc"}
    checkpoint(model, model.tables, tmp_path / "c", 1, missed)
    (tmp_path / "w").mkdir()
    with pytest.raises(BadInput, match=r"the best model, auc 0\.8000 of step 3, was not saved: no server"):
        best.write(model, tmp_path / "w", 6, {"url": str(tmp_path / "c"), "saved_step": 5})
    checkpoint(model, model.tables, tmp_path / "c", 2, {"best_step": 6, "best_value": 0.7, **missed})
    best.write(model, tmp_path / "w", 6, {"url": str(tmp_path / "c"), "saved_step": 6})
    assert "the logged model is the best one that is saved: auc 0.7000 of step 6" in capsys.readouterr().err
    assert "auc 0.8000 of step 3, was not saved: no server. This is the best one that is saved: auc 0.7" in caplog.text


def test_the_best_model_is_refused_at_the_start_where_none_is_kept(trained: Trained, tmp_path: Path) -> None:
    callback = patient(spool_dir=tmp_path, log_model=log_model(of="best"))
    with pytest.raises(BadInput, match="of='best' is the model of the checkpoint that keep_best keeps"):
        callback.on_job(job("j", rank=1, size=2, is_host_leader=False))
    callback.on_job(job("j", rank=1, size=2, is_host_leader=False, keep_best="valid_auc"))


@pytest.mark.parametrize(("best_step", "says"), [(1, True), (3, False), (None, False)])
def test_the_log_says_that_a_better_model_than_the_logged_one_was_kept(
    best_step: int | None,
    says: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(SpoolDelivery, "look", lambda self, is_chief: None)
    monkeypatch.setattr(SpoolDelivery, "wait", lambda self, has_finished, is_chief: None)
    monkeypatch.setattr(gba_hvd.LogModel, "check", lambda self, model: None)
    monkeypatch.setattr(gba_hvd.LogModel, "write", lambda self, *args: 1)
    callback = patient(spool_dir=tmp_path, log_model=log_model())
    callback.on_model(nn.Linear(1, 1))
    callback.on_job(job("j"))
    best = {} if best_step is None else {"best_step": best_step, "best_metric": "valid_auc", "best_value": 0.7}
    for k in range(1, 4):
        callback.on_step(step(k))
        callback.on_event(Event("checkpoint", k, "saved", {**SAVED, "saved_step": k, **best}))
    callback.on_end("FINISHED", None)
    err = capsys.readouterr().err
    assert ("the logged model is of step 3, the last one. The best one has valid_auc 0.7000 of step 1: " in err) == says
    assert ("gba-hvd model export file:///jobs/ctr MODEL_URL --best" in err) == says


def test_rows_on_several_hosts_come_from_the_checkpoint(trained: Trained, tmp_path: Path) -> None:
    model, one = trained(), batch(20)
    checkpoint(model, model.tables, tmp_path / "c")
    expected = evaluated(model, one)
    model.tables.memory.set_absent(0)
    with pytest.raises(BadInput, match="are on several hosts, and the job has saved no checkpoint"):
        log_model().write(model, tmp_path / "none", 5, None)
    (tmp_path / "w").mkdir()
    log_model(dense_program=True).write(model, tmp_path / "w", 7, {"url": str(tmp_path / "c"), "saved_step": 5})
    assert len(list((tmp_path / "w").rglob("*.pt2"))) == 1
    facts = json.loads((tmp_path / "w" / "log.json").read_text())
    assert (facts["step"], facts["tags"]["gba_hvd.step"], facts["tags"]["gba_hvd.checkpoint_step"]) == (5, "5", "5")
    assert facts["tags"]["gba_hvd.checkpoint_checksum"] == open_checkpoint(tmp_path / "c").checksum
    with pytest.raises(BadInput, match="takes no storage options, got key"):
        log_model(checkpoint_options={"key": "k"}).write(model, tmp_path / "x", 7, {"url": str(tmp_path / "c")})
    assert torch.equal(gba_hvd.load_for_inference(tmp_path / "w" / "model")(one), expected)


def test_a_saved_model_is_logged_with_the_run_of_its_job(
    trained: Trained, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, one = trained(), batch(30)
    checkpoint(model, model.tables, tmp_path / "c")
    build = ["--build", CODE, "--example", CODE.replace("make_model", "example")]
    assert cli.main(["model", "export", str(tmp_path / "c"), str(tmp_path / "m"), *build]) == 0
    gba_hvd.save_model(trained(users=51), tmp_path / "m", build=CODE, arguments={"users": 51}, input_example=batch(2))
    run = client(database).create_run(client(database).create_experiment("of a job"), run_name="the job")
    client(database).set_terminated(run.info.run_id)
    where = ["--tracking-uri", database, "--run", "the job", "--version", "1"]
    names = ["--name", "ctr", "--registered-model-name", "exported", "--alias", "champion"]
    capsys.readouterr()
    assert cli.main(["model", "log", str(tmp_path / "m"), *names, *where, "--requirements", "my-models==1.2"]) == 0
    assert f"run {run.info.run_id}: version 1 of step 5 is models:/exported/1" in capsys.readouterr().out
    registered = client(database).get_model_version_by_alias("exported", "champion")
    place = f"{tmp_path}/c/manifests/"
    assert registered.tags["gba_hvd.step"] == "5" and place in registered.tags["gba_hvd.checkpoint"]
    (logged,) = client(database).get_run(run.info.run_id).outputs.model_outputs
    found = client(database).get_logged_model(logged.model_id)
    assert found.experiment_id == run.info.experiment_id
    files = Path(found.artifact_location.removeprefix("file://"))
    assert "my-models==1.2" in (files / "requirements.txt").read_text()
    assert np.array_equal(
        predicted(database, "models:/exported@champion", one, tmp_path), evaluated(model, one).numpy()
    )


def test_a_job_that_moves_an_alias_says_which_version_had_it(
    trained: Trained, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client(database).create_registered_model("moved")
    client(database).create_model_version("moved", (tmp_path / "other").as_uri())
    client(database).set_registered_model_alias("moved", "champion", "1")
    logs = log_model(registered_model_name="moved", alias="champion")
    run_job(patient(*["m"], tracking_uri=database, spool_dir=tmp_path / "spool", log_model=logs), trained(), "moves")
    assert "Alias champion: version 1 -> 2. " in capsys.readouterr().out
    events = artifact(database, only_run(database, "moves"), "events.jsonl", tmp_path / "a")
    assert "version 2; alias champion: version 1 -> 2" in events


@pytest.fixture
def two_registered(
    trained: Trained, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[nn.Module, tuple[str, ...]]:
    """The second one, and its addresses. The folders that they were logged from are gone."""
    model, name = trained(), tmp_path.name
    gba_hvd.save_model(trained(users=51), tmp_path / "m", build=CODE, arguments={"users": 51}, input_example=batch(2))
    gba_hvd.save_model(model, tmp_path / "n", build=CODE, input_example=batch(2))
    names = ["--name", "ctr", "--registered-model-name", name, "--alias", "champion", "--tracking-uri", database]
    for folder, move in (("m", "champion: version 1\n"), ("n", "champion: version 1 -> 2\n")):
        assert cli.main(["model", "log", str(tmp_path / folder), *names]) == 0
        assert capsys.readouterr().out.endswith(f"models:/{name}@champion\n{move}")
        shutil.rmtree(tmp_path / folder)
    (logged,) = [one for one in client(database).search_model_versions(f"name='{name}'") if str(one.version) == "2"]
    addresses = (f"models:/{name}/2", f"models:/{name}@champion", logged.source, f"runs:/{logged.run_id}/ctr")
    return model, addresses


@pytest.mark.usefixtures("no_folders_left")
def test_registered_models_are_read_by_their_addresses(
    two_registered: Any, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, addresses = two_registered
    first, one = f"models:/{tmp_path.name}/1", batch(20)
    frame_of(one).to_parquet(tmp_path / "in.parquet")
    predict = ["--tracking-uri", database, "--out", str(tmp_path / "out.parquet")]
    for address, tables in zip(addresses, ("memory", "mmap", "remote", "memory"), strict=True):
        how = ["model", "predict", address, str(tmp_path / "in.parquet"), "--tables", tables, *predict]
        assert cli.main(how) == 0, address
        found = pd.read_parquet(tmp_path / "out.parquet")["score"].to_numpy()
        assert np.array_equal(found, evaluated(model, one).numpy()), address
    assert cli.main(["model", "verify", addresses[1], "--tracking-uri", database]) == 0
    capsys.readouterr()
    diff = ["model", "diff", first, "--new-url", addresses[1], "--tracking-uri", database]
    assert cli.main(diff) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"version 1 to 1 of {addresses[1]}\n") and "builder" in out


def test_the_page_promotes_a_model_and_rolls_back(
    two_registered: Any, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    name = tmp_path.name
    client(database).set_registered_model_alias(name, "champion", "1")
    client(database).set_registered_model_alias(name, "challenger", "2")
    for alias, scores in (("champion", [0.1, 0.2, 0.3, 0.4]), ("challenger", [0.1, 0.3, 0.2, 0.4])):
        pd.DataFrame({"label": [0, 1, 0, 1], "score": scores}).to_parquet(tmp_path / f"{alias}.parquet")
    page = (Path(__file__).parents[2] / "docs" / "SERVING.md").read_text().partition("### Promote a model")[2]
    block = page.partition("```python\n")[2].partition("```")[0].replace('"ctr"', repr(name))
    promotes, rolls_back = block.split("client.set_registered_model_alias")[:2], block.splitlines()[-1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    capsys.readouterr()
    names: dict[str, Any] = {}
    exec("client.set_registered_model_alias".join(promotes), names)
    assert capsys.readouterr().out.splitlines() == ["champion 0.75", "challenger 1.0"]
    assert str(client(database).get_model_version_by_alias(name, "champion").version) == "2"
    exec(rolls_back, names)
    assert str(client(database).get_model_version_by_alias(name, "champion").version) == "1"


@pytest.fixture
def no_folders_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is in the folder for temporary ones at the end."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    yield
    assert not list((tmp_path / "tmp").glob("gba-hvd-*"))


def test_addresses_that_cannot_be_read_are_one_line(
    two_registered: Any, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where, name = ["--tracking-uri", database], tmp_path.name
    first, other = f"models:/{name}/1", f"models:/{name}.other/1"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "MLmodel").write_text("flavors: {}")
    client(database).create_registered_model(f"{name}.other")
    client(database).create_model_version(f"{name}.other", (tmp_path / "other").as_uri())
    capsys.readouterr()
    for how, words in (
        (["verify", f"models:/{name}/7", *where], "gba-hvd: MLflow: "),
        (["verify", f"models:/{name}@nobody", *where], "gba-hvd: MLflow: "),
        (["verify", other, *where], f"{other} was logged by other means than LogModel"),
        (["verify", first, *where, "--option", "a=b"], "--option a=b is for the store of a model"),
        (["verify", str(tmp_path), *where], "--tracking-uri is for an address in MLflow"),
        (["log", first, "--name", "again", *where], f"{first} is in MLflow already"),
        (["export", first, str(tmp_path / "e"), "--build", CODE], f"{first} is a model, and export"),
        (["diff", str(tmp_path)], "which version is the old one?"),
    ):
        assert cli.main(["model", *how]) == 1, how
        last = capsys.readouterr().err.splitlines()[-1]
        assert words in last, how
    with pytest.raises(BadInput, match=r"gba_hvd\.serving\.logged_model\.downloaded"):
        gba_hvd.load_for_inference(first)


def test_a_saved_model_is_logged_with_a_run_of_its_own(
    trained: Trained,
    database: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gba_hvd.save_model(trained(), tmp_path / "m", build=CODE, input_example=batch(2))
    how = ["model", "log", str(tmp_path / "m"), "--name", "alone", "--tracking-uri", database, "--json"]
    assert cli.main([*how, "--experiment", "of saved models"]) == 0
    found = json.loads(capsys.readouterr().out)
    run = client(database).get_run(found["run_id"])
    assert (run.info.run_name, run.info.status, found["version"]) == ("alone", "FINISHED", "")
    assert client(database).get_experiment(run.info.experiment_id).name == "of saved models"
    assert found["model_uri"] == f"models:/{run.outputs.model_outputs[0].model_id}"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", run.info.experiment_id)
    assert cli.main(how) == 0
    other = client(database).get_run(json.loads(capsys.readouterr().out)["run_id"])
    assert other.info.experiment_id == run.info.experiment_id and other.info.run_id != run.info.run_id
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "777")
    assert cli.main(how) == 1
    assert f"MLFLOW_EXPERIMENT_ID='777': {database} has no experiment with this id" in capsys.readouterr().err


def test_a_saved_model_that_cannot_be_logged_is_refused_before_a_run_is_made(
    trained: Trained, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained()
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=batch(2))
    gba_hvd.save_model(model, tmp_path / "no example", build=CODE)
    log = ["model", "log", str(tmp_path / "m"), "--name", "ctr", "--tracking-uri", database]
    twins = [client(database).create_run("0", run_name="twin").info.run_id for _ in range(2)]
    for run_id in twins:
        client(database).set_terminated(run_id)
    for more, words in (
        (["--alias", "champion"], "alias='champion' needs registered_model_name"),
        (["--name", "a/b"], "MLflow takes names without"),
        (["--run", "no such run"], "no run, job or file is called 'no such run'"),
        (["--run", "twin"], "2 runs are called 'twin': name one by its id"),
        (["--run", "a", "--experiment", "b"], "leave out one of the two"),
        (["--version", "7"], "has no version 7"),
    ):
        assert cli.main([*log, *more]) == 1
        assert words in capsys.readouterr().err
    how = ["--name", "ctr", "--tracking-uri", database, "--experiment", "not made"]
    assert cli.main(["model", "log", str(tmp_path / "no example"), *how]) == 1
    assert "saved without input_example" in capsys.readouterr().err
    assert client(database).get_experiment_by_name("not made") is None


def test_a_server_that_is_down_is_asked_before_a_model_is_copied(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gba_hvd.save_model(trained(), tmp_path / "m", build=CODE, input_example=batch(2))
    copied: list[str] = []
    monkeypatch.setattr("gba_hvd.serving.log_saved._copy", lambda *args: copied.append("all"))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = f"http://user:secret@127.0.0.1:{port_of_our_own()}"
    assert cli.main(["model", "log", str(tmp_path / "m"), "--name", "ctr", "--tracking-uri", uri]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("gba-hvd: MLflow: API request to") and "secret" not in last and not copied
