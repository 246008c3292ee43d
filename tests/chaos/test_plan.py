"""A seed is a schedule: always the same, of every kind of fault in time, within what a job survives."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
from gba_hvd_tools.chaos.command import seeds
from gba_hvd_tools.chaos.plan import INSIDE, KINDS, OUTSIDE, REPLAYED_RULES, RULES, STEPS, TRACKING, FaultPlan, plan_of
from gba_hvd_tools.cli import main

from gba_hvd import GBACallback
from gba_hvd.faults import Fault

PLANS = [plan_of(seed) for seed in range(200)]


@pytest.mark.processes
def test_the_same_seed_gives_the_same_plan_in_another_process() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "tools.cli", "chaos", "show", "17"], capture_output=True, text=True, check=True
    ).stdout
    text = "\n".join(line for line in shown.splitlines() if not line.startswith("#"))
    assert json.loads(text) == json.loads(json.dumps(asdict(plan_of(17))))


def test_two_hundred_schedules_have_faults_of_every_kind() -> None:
    found = Counter(kind for plan in PLANS for kind in plan.kinds)
    assert set(found) == set(KINDS)
    assert min(found.values()) >= 3, found
    assert sum(plan.replay for plan in PLANS) > 40


def test_every_fault_is_due_before_the_job_ends() -> None:
    for plan in PLANS:
        pace = 6 if "shadow" in (plan.mode, *plan.switch_at.values()) else 1
        due = [fault.get("at_step", 0) for fault in (*plan.inside, *plan.outside)]
        assert all(at < 6 * STEPS for at in due)
        assert pace == 6 or all(at < STEPS for at in due)


def test_some_worker_is_never_killed() -> None:
    for plan in PLANS:
        killed = {fault["worker"] for fault in plan.inside if fault["kind"] == "kill"}
        assert len(killed) < plan.workers
        assert all(Fault.of(fault).kind in (*INSIDE, "serve", "slow") for fault in plan.inside)
        assert all(fault["kind"] in OUTSIDE and fault["kind"] not in TRACKING for fault in plan.outside)


def test_a_schedule_survives_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "show", "--json", "8"]) == 0
    file = tmp_path / "plan.json"
    file.write_text(capsys.readouterr().out)
    assert FaultPlan.load(file) == plan_of(8)
    file.write_text('{"seed": 8}')
    assert main(["chaos", "run", "--plan", str(file)]) == 1
    assert "is no schedule" in capsys.readouterr().err


def test_the_mode_can_be_given() -> None:
    assert all("gba" not in (p.mode, *p.switch_at.values()) for p in (plan_of(s, "shadow") for s in range(30)))


def test_look_ahead_is_drawn_where_its_optimizers_are_and_replayed() -> None:
    with_it = [plan for plan in PLANS if plan.rule == "look_ahead"]
    assert len(with_it) > 20 and {plan.optimizer for plan in with_it} == {"momentum", "Adam"}
    assert all(plan.replay != plan.apart for plan in with_it)


def test_the_rule_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rule, optimizers in RULES.items():
        plans = [plan_of(seed, "gba", rule) for seed in range(30)]
        assert all(plan.rule == rule and plan.optimizer in optimizers for plan in plans)
        assert all(plan.replay == (rule in REPLAYED_RULES and not plan.apart) for plan in plans)
        GBACallback(rule=rule)
    assert "shadow" not in {plan_of(seed, rule="look_ahead").mode for seed in range(30)}
    assert plan_of(8, "gba", plan_of(8, "gba").rule) == plan_of(8, "gba")
    assert main(["chaos", "show", "8", "--mode", "shadow", "--rule", "look_ahead"]) == 1
    assert "mode 'shadow' uses no rule" in capsys.readouterr().err
    assert main(["chaos", "run", "--plan", str(tmp_path), "--rule", "look_ahead"]) == 1
    assert "--mode and --rule choose among drawn schedules" in capsys.readouterr().err


def test_results_in_a_folder_that_cannot_be_on_a_path_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", "run", "--seeds", "0:1", "--out", str(tmp_path / "0:1")]) == 1
    assert "its path may have no ':'" in capsys.readouterr().err


def test_a_stored_schedule_without_the_newest_fields_is_read() -> None:
    stored = sorted((Path(__file__).parents[1] / "processes" / "schedules").glob("**/*.json"))
    assert stored and all(FaultPlan.load(path).rule in RULES for path in stored)


@pytest.mark.parametrize("text", ["5", "a:b", "5:5", "x0:4", "7:3"])
def test_bad_ranges_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chaos", "run", "--seeds", text])
    assert "such as 0:200" in capsys.readouterr().err


def test_ranges() -> None:
    assert seeds("0:200") == range(200)


def test_a_job_that_begins_in_allreduce_mode_reaches_its_first_switch_and_its_faults() -> None:
    """Also where the mode that it switches to makes a step of each micro-batch."""
    plans = [plan_of(seed) for seed in range(300)]
    found = [plan for plan in plans if plan.mode == "allreduce" and "shadow" in plan.switch_at.values()]
    assert len(found) > 10
    for plan in found:
        first, *later = map(int, plan.switch_at)
        assert first < STEPS and [first, *later] == sorted([first, *later])
        done = sum((b - a) * (6 if mode == "allreduce" else 1) for a, b, mode in intervals(plan))
        assert done <= 6 * STEPS, "in micro-batches"
    by_hand = plan_of(9079)
    assert by_hand.switch_at == {"27": "shadow", "51": "allreduce"}  # drawn as 162 and 186 micro-batches
    assert [one["at_step"] for one in by_hand.inside if one["kind"] == "kill"] == [59, 53]  # 234, 198


def intervals(plan: FaultPlan) -> list[tuple[int, int, str]]:
    """First step, last step and mode, up to the last fault."""
    faults = [*plan.inside, *plan.outside]
    last = max(int(fault.get("at_step", fault.get("from_step", 0))) for fault in faults)
    changes = [(0, plan.mode), *((int(at), mode) for at, mode in plan.switch_at.items()), (10**6, "")]
    return [(a, min(b, last), mode) for (a, mode), (b, _) in pairwise(changes) if a < last]
