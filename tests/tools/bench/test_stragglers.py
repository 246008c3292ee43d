"""What `bench gba` runs and keeps. No launch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gba_hvd_tools.bench.harness import emulated_accelerators as emulated
from gba_hvd_tools.bench.harness import measure
from gba_hvd_tools.bench.stragglers import command as gba

from tests.tools.bench.test_interrupted import options


class Launches:
    """Prepares no samples. The third one is interrupted."""

    bayes_auc = 0.8
    done = 0

    def __init__(self, *_: object) -> None: ...

    def run(
        self, scenario: emulated.Scenario, rows: list[measure.Row], contestant: measure.Variant, number: int
    ) -> None:
        Launches.done += 1
        if Launches.done == 3:
            raise KeyboardInterrupt
        rows.append({"scenario": scenario.name, "mode": contestant.name, "run": number, "samples_per_s": 100.0})


def test_an_interrupted_benchmark_goes_on_and_refuses_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gba, "Launches", Launches)
    monkeypatch.setattr(Launches, "done", 0)
    out = tmp_path / "gba.json"
    words = ["gba", "--out", str(out), "--modes", "gba", "allreduce", "--scenarios", "straggler_5x", "--runs", "2"]
    with pytest.raises(KeyboardInterrupt):
        (args := options(*words)).run(args)
    first = json.loads(out.read_text())
    assert [(row["mode"], row["run"]) for row in first["rows"]] == [("gba", 0), ("allreduce", 0)]
    assert first["gba_vs_allreduce"] == 1.0 and first["bayes_auc"] == 0.8
    args = options(*words)
    assert args.run(args) == 0 and Launches.done == 5
    assert args.run(args) == 0 and Launches.done == 5, "nothing is left to do"
    whole = json.loads(out.read_text())
    assert whole["rows"][:2] == first["rows"] and len(whole["rows"]) == 4 and whole["bayes_auc"] == 0.8
    args = options("gba", "--out", str(out), "--modes", "async", "--scenarios", "straggler_5x")
    assert args.run(args) == 0
    whole = json.loads(out.read_text())
    assert whole["commands"].keys() == {"gba", "allreduce", "async"}
    capsys.readouterr()
    for more, difference in (
        (["--noise", "0.3"], "noise: None in the file, 0.3 now"),
        (["--seconds", "9"], "measured_s: 5.0 in the file, 9.0 now"),
        (["--scenarios", "come_and_go"], "samples: "),
    ):
        args = options(*words, *more)
        assert args.run(args) == 1 and difference in capsys.readouterr().err
    assert json.loads(out.read_text()) == whole
