"""`gba-hvd model serve`: answers over HTTP are those of the model; what cannot be answered says why."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from gba_hvd_tools.cli import main
from torch import nn

import gba_hvd
from gba_hvd.serving.http_server import bound
from tests.unit.conftest import _no_keeper as _no_keeper
from tests.unit.serving.conftest import CODE, batch, change_rows, evaluated
from tests.unit.serving.conftest import job_memory as job_memory
from tests.unit.serving.conftest import trained as trained
from tests.unit.serving.test_export import checkpoint

from .test_model import STRINGS, frame_of
from .test_model import of_strings as of_strings

pytestmark = pytest.mark.processes
Trained = Callable[..., nn.Module]
Answer = tuple[int, Any]


def request_of(frame: pd.DataFrame) -> dict[str, Any]:
    return {"dataframe_split": frame.to_dict("split")}


class Served:
    """The command in a process of its own. lines: of its standard output"""

    def __init__(self, log: Path, *words: object) -> None:
        command = [
            sys.executable,
            "-m",
            "gba_hvd_tools.cli",
            "model",
            "serve",
            *map(str, words),
            "--port",
            "0",
            "--json",
        ]
        self._log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, log.read_text()
        self.url = json.loads(line)["url"]

    def ask(self, data: object, path: str = "invocations") -> Answer:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/{path}", json.dumps(data).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=100) as found:
                return found.status, json.loads(found.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def health(self) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=100) as found:
                return found.status, found.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def errors(self) -> str:
        return self._log.read_text()

    def scores(self, frame: pd.DataFrame) -> np.ndarray:
        status, found = self.ask(request_of(frame))
        assert status == 200, found
        return np.array([one["score"] for one in found["predictions"]], np.float32)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=100)
        return self.process.returncode


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(*words: object) -> Served:
        made.append(Served(tmp_path / f"log{len(made)}", *words))
        return made[-1]

    yield start
    for one in made:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.process.pid, signal.SIGKILL)
        one.process.communicate(timeout=100)


@pytest.mark.parametrize("tables", ["memory", "mmap", "remote"])
def test_answers_are_the_models_and_mistakes_are_named(
    trained: Trained, tmp_path: Path, served: Callable[..., Served], tables: str
) -> None:
    model, one = trained(), batch(5)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=batch(2))
    here = served(tmp_path / "m", "--tables", tables)
    frame = frame_of(one)
    assert np.array_equal(here.scores(frame), evaluated(model, one).numpy())
    for wrong, words in (
        (frame.assign(user=50), "table 'user' has rows 0 to 49, got id 50"),
        (frame.assign(user=0.5), "field 'user': expected int64, got float64"),
        (frame.drop(columns=["item"]), "item"),
    ):
        status, found = here.ask(request_of(wrong))
        assert status == 400 and words in found["message"], found
    one_null = json.loads(frame.iloc[:1].to_json(orient="records"))[0] | {"dense": [None, 0.5]}
    status, found = here.ask({"dataframe_records": [one_null]})
    assert status == 400 and "field 'dense': NaN, and the example" in found["message"], found
    status, found = here.ask({"inputs": [[1.0, 2.0]]})
    assert status == 400 and "expected columns by name" in found["message"]
    assert np.array_equal(here.scores(frame), evaluated(model, one).numpy())
    assert here.end() == 0


def test_strings_of_hashed_tables_are_hashed_as_in_training(of_strings: Any, served: Callable[..., Served]) -> None:
    model, one, folder = of_strings
    here = served(folder / "m", "--hashed", "user", "history")
    frame = pd.DataFrame({name: column.to_pylist() for name, column in STRINGS.items()}).assign(dense_0=0.0)
    found = here.scores(frame)
    assert np.array_equal(found, evaluated(model, one).numpy()) and len(set(found)) == 20
    status, answer = here.ask({"dataframe_records": [{"user": "u3", "history": [], "dense_0": 0.0}]})
    assert status == 200, answer
    no_history = gba_hvd.Bag(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    one = gba_hvd.Batch({"user": one.ids["user"][3:4], "history": no_history}, torch.zeros(1, 1), torch.zeros(1))
    assert np.float32(answer["predictions"][0]["score"]) == evaluated(model, one).item()
    for wrong, words in (
        ({"user": 7}, "hashed column 'user' holds int64, not strings: whole numbers are ids as they are"),
        ({"user": None}, "column 'user': 20 of 20 values are missing"),
        ({"user": ["a", 7] * 10}, "hashed column 'user': expected strings, or lists of strings"),
    ):
        status, answer = here.ask(request_of(frame.assign(**wrong)))
        assert status == 400 and words in answer["message"], answer
    status, answer = here.ask(request_of(frame.drop(columns=["user"])))
    assert status == 400 and "field 'user' is missing" in answer["message"], answer


def test_strings_that_are_not_hashed_are_named_with_what_to_do(of_strings: Any, served: Callable[..., Served]) -> None:
    here = served(of_strings[2] / "m", "--hashed", "user")
    frame = pd.DataFrame({name: column.to_pylist() for name, column in STRINGS.items()}).assign(dense_0=0.0)
    status, answer = here.ask(request_of(frame))
    assert status == 400 and "field 'history': expected numbers, got strings" in answer["message"], answer
    assert answer["message"].partition(". Those of a dataset")[0].endswith("start the server with --hashed history")


def test_hashes_for_a_table_that_is_not_hashed_are_refused(
    trained: Trained, tmp_path: Path, served: Callable[..., Served]
) -> None:
    gba_hvd.save_model(trained(), tmp_path / "m", build=CODE, input_example=batch(2))
    here = served(tmp_path / "m", "--hashed", "user")
    status, answer = here.ask(request_of(frame_of(batch(5)).assign(user="u1")))
    assert status == 400 and "table 'user' has rows 0 to 49, got id" in answer["message"], answer
    assert "The columns of --hashed (user) have to be ids of hashed tables" in answer["message"]


def test_dense_values_come_by_the_names_that_the_model_was_saved_with(
    trained: Trained, tmp_path: Path, served: Callable[..., Served]
) -> None:
    model, one = trained(), batch(5)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=batch(2), dense_names=["price", "age"])
    here, frame = served(tmp_path / "m"), frame_of(one)
    by_name = [{"age": age, "price": price} for price, age in one.dense.tolist()]
    assert np.array_equal(here.scores(frame.assign(dense=by_name)), evaluated(model, one).numpy())
    columns = frame.drop(columns=["dense"]).assign(age=one.dense[:, 1].tolist(), price=one.dense[:, 0].tolist())
    assert np.array_equal(here.scores(columns), evaluated(model, one).numpy())
    status, answer = here.ask(request_of(columns.drop(columns=["age"])))
    assert status == 400 and "field 'dense': age is missing" in answer["message"], answer
    status, answer = here.ask(request_of(frame.assign(dense=[one | {"hight": 1.0} for one in by_name])))
    assert status == 400 and "sample 0 has 'hight', which is no name of it" in answer["message"], answer


def test_rows_that_cannot_be_read_are_status_503_and_the_next_request_is_answered(
    trained: Trained, tmp_path: Path, served: Callable[..., Served]
) -> None:
    model, one = trained(), batch(5)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=batch(2))
    here = served(tmp_path / "m", "--tables", "remote")
    (tmp_path / "m" / "rows").rename(tmp_path / "away")
    status, found = here.ask(request_of(frame_of(one)))
    assert status == 503 and "is gone" in found["message"]
    (tmp_path / "away").rename(tmp_path / "m" / "rows")
    assert np.array_equal(here.scores(frame_of(one)), evaluated(model, one).numpy())


def test_a_served_model_follows_its_job(trained: Trained, tmp_path: Path, served: Callable[..., Served]) -> None:
    model, one = trained(), batch(5)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=batch(2))
    before = evaluated(model, one).numpy()
    change_rows(model, "user", np.arange(50), seed=9)
    checkpoint(model, model.tables, tmp_path / "c")
    here, now = served(tmp_path / "m", "--follow", tmp_path / "c"), evaluated(model, one).numpy()
    assert not np.array_equal(before, now)
    arrived, deadline = threading.Event(), 100.0
    while not np.array_equal(here.scores(frame_of(one)), now):
        assert deadline > 0, "no update"
        arrived.wait(0.2)
        deadline -= 0.2
    assert here.health() == (200, "\n")
    assert here.end() == 0
    assert " s after it was saved" in here.errors()


def test_a_model_that_is_not_updated_any_more_is_not_healthy(
    trained: Trained, tmp_path: Path, served: Callable[..., Served]
) -> None:
    gba_hvd.save_model(trained(), tmp_path / "m", build=CODE, input_example=batch(2))
    other = trained(hashed=True)
    checkpoint(other, other.tables, tmp_path / "c")
    here = served(tmp_path / "m", "--follow", tmp_path / "c")
    arrived, deadline = threading.Event(), 100.0
    while here.health()[0] != 503:
        assert deadline > 0, "still healthy"
        arrived.wait(0.2)
        deadline -= 0.2
    assert here.health()[1].startswith("BadInput: ")
    assert len(here.scores(frame_of(batch(5)))) == 5
    assert here.end() == 1


def test_what_cannot_be_served_is_said(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gba_hvd.save_model(trained(), tmp_path / "m", build=CODE)
    gba_hvd.save_model(trained(), tmp_path / "e", build=CODE, input_example=batch(2))
    with contextlib.closing(bound("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, text in (
            ([tmp_path / "m", "--port", port], f"127.0.0.1:{port} cannot be listened on: Address already in use"),
            ([tmp_path / "m", "--port", 0], "saved without input_example"),
            ([tmp_path / "e", "--port", 0, "--hashed", "usr"], "hashed column 'usr' is no field of ids of the model"),
            ([tmp_path / "m", "--port", 99999], "--port must be 0 to 65535, got 99999"),
            ([tmp_path / "nothing", "--port", 0], "nothing"),
            ([tmp_path / "m", "--port", 0, "--host", "no such host"], "--host no such host"),
            ([tmp_path / "m", "--port", 0, "--follow-option", "a=b"], "--follow-option is for the store of --follow"),
        ):
            assert main(["model", "serve", *map(str, words)]) == 1
            assert text in capsys.readouterr().err
        assert taken.getsockname()[1] == port and isinstance(taken, socket.socket)
