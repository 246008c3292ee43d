"""Ctrl-C in the first run of a benchmark: nothing was measured, and what an earlier one has measured stays."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools import bench
from gba_hvd_tools.bench.follower import command as follower
from gba_hvd_tools.bench.harness import measure
from gba_hvd_tools.bench.row_dtypes import command as row_dtypes


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["membership", "row-dtypes", "follower"])
def test_an_interruption_before_the_first_result_leaves_the_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "interleave", interrupt)
    monkeypatch.setattr(row_dtypes, "measured", interrupt)
    monkeypatch.setattr(follower.Launches, "measured", interrupt)
    out = tmp_path / "found.json"
    out.write_text("before")
    args = options(name, "--out", str(out), *(("--data", str(tmp_path)) if name == "row-dtypes" else ()))
    with pytest.raises(KeyboardInterrupt):
        args.run(args)
    assert out.read_text() == "before" and capsys.readouterr().out == ""


def options(*words: str) -> Any:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", *words])
