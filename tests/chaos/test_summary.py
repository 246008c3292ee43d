"""The table counts schedules, faults, losses and waits by kind; an interrupted batch resumes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools.chaos import run
from gba_hvd_tools.chaos.oracle import Record
from gba_hvd_tools.chaos.plan import FaultPlan, plan_of
from gba_hvd_tools.chaos.run import ScheduleOutcome
from gba_hvd_tools.chaos.summary import summarise
from gba_hvd_tools.cli import main


def outcome(record: Record, planned: list[str], fired: list[str], lost: int = 0, wrong: list[str] | None = None) -> Any:
    record = Record(**json.loads(json.dumps(asdict(record))))
    record.plan |= {"inside": [], "outside": [{"kind": kind} for kind in planned]}
    record.fired = [{"kind": kind, "step": 1, "time": 1.0} for kind in fired]
    assert record.result is not None
    record.result["lost"] = lost
    return ScheduleOutcome(record, wrong or []).as_json()


def test_the_table_counts_by_kind(record: Record) -> None:
    results = [
        outcome(record, ["kill_server", "kill_server", "neighbour"], ["kill_server", "neighbour"], lost=96),
        outcome(record, ["kill_server"], ["kill_server"], wrong=["left behind"]),
        ScheduleOutcome(record, [], "no root").as_json(),
    ]
    lines = summarise(results)
    servers = lines["kill_server"]
    assert (servers.planned, servers.fired, servers.schedules, servers.survived, servers.lost) == (3, 2, 2, 1, 96)
    assert lines["neighbour"].survived == 1 and lines["neighbour"].wait_s == 1.0
    assert lines["all"].schedules == 2


@pytest.mark.slow
def test_a_batch_goes_on_where_it_was_interrupted(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def carried_out(plan: FaultPlan, folder: Path, keep: bool) -> ScheduleOutcome:
        if plan.seed == 3 and len(asked) < 4:
            asked.append(-1)
            raise KeyboardInterrupt
        asked.append(plan.seed)
        wrong = ["exit code 1, expected 0"] if plan.seed == 2 else []
        return ScheduleOutcome(Record(asdict(plan_of(plan.seed)), exit_code=0, result=record.result), wrong)

    monkeypatch.setattr(run, "run_plan", carried_out)
    arguments = ["chaos", "run", "--seeds", "0:5", "--out", str(tmp_path)]
    assert main(arguments) == 130
    assert main(arguments) == 1  # seed 2 failed, before the interruption
    assert asked == [0, 1, 2, -1, 3, 4]
    assert main(["chaos", "run", "--seed", "1", "--out", str(tmp_path)]) == 0  # again, though it has a result
    assert asked[-1] == 1
    capsys.readouterr()
    assert main(["chaos", "summary", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "| kill |" in shown and "seed 2 failed: exit code 1, expected 0" in shown


def test_a_summary_of_nothing_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "summary", str(tmp_path)]) == 1
    assert "chaos run --seeds" in capsys.readouterr().err
