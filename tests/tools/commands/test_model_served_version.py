"""What `gba-hvd model serve` opens and says: the version of an alias, the patience with a store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
from gba_hvd_tools.cli import main

from gba_hvd.serving import http_server, load, logged_model
from gba_hvd.tracking import mlflow_run


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the model was opened with; the registry's alias is version 2, the model's own number 1."""
    found: dict[str, Any] = {}

    def open_model(url: str, **how: Any) -> Any:
        found.update(how, url=url)
        return SimpleNamespace(manifest=SimpleNamespace(version=1))

    @contextlib.contextmanager
    def downloaded(address: str, tracking_uri: str | None = None) -> Iterator[Path]:
        yield Path("/downloaded") / address.removeprefix("models:/")

    class Registry:
        def __init__(self, tracking_uri: str) -> None: ...

        def get_model_version_by_alias(self, name: str, alias: str) -> Any:
            assert (name, alias) == ("ctr", "champion")
            return SimpleNamespace(version="2")

    monkeypatch.setattr(load, "open_model", open_model)
    monkeypatch.setattr(http_server, "app_of", lambda *about: None)
    monkeypatch.setattr(http_server, "serve", lambda *about: None)
    monkeypatch.setattr(logged_model, "downloaded", downloaded)
    monkeypatch.setattr(mlflow_run, "ask", lambda uri: True)
    monkeypatch.setattr(mlflow, "MlflowClient", Registry)
    return found


@pytest.mark.parametrize(
    ("url", "words", "name"),
    [
        ("models:/ctr@champion", "models:/ctr/2 (models:/ctr@champion): POST http://", "models:/ctr/2"),
        ("models:/ctr/3", "models:/ctr/3: POST http://", "models:/ctr/3"),
        ("s3://bucket/ctr", "version 1 of s3://bucket/ctr: POST http://", "s3://bucket/ctr"),
    ],
)
def test_the_version_is_that_of_the_registry(
    opened: dict[str, Any], capsys: pytest.CaptureFixture[str], url: str, words: str, name: str
) -> None:
    serve = ["model", "serve", url, "--port", "0"]
    assert main(serve) == 0
    assert capsys.readouterr().out.startswith(words)
    assert opened["url"] == (name if "s3" in name else f"/downloaded/{name.removeprefix('models:/')}")
    assert main([*serve, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == name


@pytest.mark.parametrize(
    ("words", "patience"),
    [
        (["--tables", "remote"], (2, 10.0)),
        (["--tables", "remote", "--option", "tries=4"], (4, 10.0)),
        (["--tables", "remote", "--option", "timeout_s=3"], (2, 3.0)),
        ([], (None, None)),
    ],
)
def test_a_store_that_is_down_fails_a_request_within_the_limit_of_mlflow(
    opened: dict[str, Any], words: list[str], patience: tuple[int | None, float | None]
) -> None:
    assert main(["model", "serve", "s3://bucket/ctr", "--port", "0", *words]) == 0
    assert (opened.get("tries"), opened.get("timeout_s")) == patience
