"""Which ratios of `gba-hvd bench smoke` are worse than the committed ones."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools import bench
from gba_hvd_tools.bench import smoke


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "smoke", *words])


class Measured(smoke.Short):
    """Measures nothing: its arguments are the ratios."""

    def run(self, out: Path) -> dict[str, float]:
        return {name: float(value) for name, value in (one.split("=") for one in self.arguments)}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    def these(*ratios: str) -> None:
        monkeypatch.setattr(smoke, "shorts", lambda: [Measured(None, [one], lambda found: {}, 0.1) for one in ratios])

    return these


def test_a_ratio_below_the_committed_one_by_more_than_its_noise_is_worse(
    measured: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    committed = ["--committed", str(tmp_path / "bench.json")]
    measured("a=2.0", "b=1.0", "peer=3.0")
    args = options(*committed, "--write")
    assert args.run(args) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["ratios"]["a"] == {"value": 2.0, "noise": 0.1} and "load_average_before" in found["machine"]
    measured("a=1.79", "b=0.91")
    args = options(*committed)
    assert args.run(args) == 1
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("worse")] == [
        "worse: a is 1.79; committed 2.00, noise 10%"
    ]
    assert "peer: not compared, the peer is not installed" in printed


def test_writing_keeps_the_noise_and_what_was_not_measured(measured: Any, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"ratios": {"a": {"value": 1, "noise": 0.3}, "peer": {"value": 2, "noise": 0.2}}}))
    measured("a=5")
    args = options("--committed", str(path), "--write")
    assert args.run(args) == 0
    assert json.loads(path.read_text())["ratios"] == {
        "a": {"value": 5.0, "noise": 0.3},
        "peer": {"value": 2.0, "noise": 0.2},
    }


def test_another_file_is_refused(measured: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    path.write_text("{}")
    args = options("--committed", str(path))
    assert args.run(args) == 1
    assert "expected ratios with `value` and `noise`" in capsys.readouterr().err


def test_the_committed_file_can_be_read() -> None:
    committed = set(smoke._read(smoke._COMMITTED))
    assert {"gba / allreduce, straggler_5x", "ours / torch, serving 1,024 samples"} <= committed
