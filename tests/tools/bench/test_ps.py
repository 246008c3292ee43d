"""What `bench ps` runs, keeps and prints. No launch, but for the last test."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools.bench.harness import measure, noise
from gba_hvd_tools.bench.ps import command as ps


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ps.add_parser(parser.add_subparsers())
    return parser.parse_args(["ps", *words])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In place of launches: the names of what would be launched."""
    found: list[str] = []

    def result_of(variant: measure.Variant, more: list[Any], *_: object) -> list[measure.Row]:
        found.append(variant.name)
        name, servers = variant.name.split()[:2]
        about = {"contestant": name, "servers": int(servers), "rows": more[1]}
        times = {"rows_per_s": 2e6, "ms": 4.0, "cpu_ms_client": 1.5, "cpu_ms_servers": 2.5}
        return [{**about, "what": what, **times} for what in ("pull", "push")]

    monkeypatch.setattr(measure, "result_of", result_of)
    return found


def test_the_result_and_the_tables_say_that_contestants_ran_beside_noise(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: noise.Noise) -> noise.Noise:
        launched.append(f"noise {self._share}")
        return self

    monkeypatch.setattr(noise.Noise, "__enter__", run)
    words = ["--rows", "8", "--runs", "1", "--contestants", "ours"]
    for name, more in (("quiet", []), ("noisy", ["--noise", "0.3"])):
        args = options("--out", str(tmp_path / name), *words, *more)
        assert args.run(args) == 0
        printed = capsys.readouterr().out
        assert ("pull, medians, beside noise of 0.3 of each core" in printed) == (name == "noisy")
    assert launched == ["noise 0.0", "ours 1", "ours 2", "noise 0.3", "ours 1", "ours 2"]
    quiet, noisy = (json.loads((tmp_path / name).read_text())["settings"] for name in ("quiet", "noisy"))
    assert noisy == {**quiet, "noise": 0.3} and "noise" not in quiet
