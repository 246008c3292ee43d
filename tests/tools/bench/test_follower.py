"""What the benchmark of followers concludes from notes of workers and followers; a real job of tiny size."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gba_hvd_tools import bench, cli
from gba_hvd_tools.bench.follower import analysis
from gba_hvd_tools.bench.follower import command as follower
from gba_hvd_tools.bench.follower.published import Published

from tests.processes import prefork


def update(step: int, at: float, **more: Any) -> dict[str, Any]:
    return {"name": f"save-{step}", "step": step, "at": at, "state": f"state {step}", **more}


def saved(*steps: int) -> list[Published]:
    """Newest first."""
    return [Published(f"save-{n}", n, f"state {n}", f"answer {n}") for n in sorted(steps, reverse=True)]


def test_a_step_is_served_by_the_first_update_of_it_or_of_a_later_one() -> None:
    steps = {number: float(number) for number in range(1, 9)}
    found = analysis.lags(steps, [update(2, 3.5), update(5, 7.0)], 1.0, 6.0)
    assert found.tolist() == [2.5, 1.5, 4.0, 3.0, 2.0, math.inf]
    assert analysis.lags(steps, [], 1.0, 2.0).tolist() == [math.inf, math.inf]
    assert analysis.spread(np.array([1.0, 2.0, 3.0]))["max_s"] == 3.0


def test_a_step_counts_from_the_first_worker_that_noted_it_and_half_a_line_is_none(tmp_path: Path) -> None:
    (tmp_path / "11").write_text("1 10.0\n2 11.5\n3 1")
    (tmp_path / "12").write_text("2 11.0\n")
    (tmp_path / "last-epoch").write_text("4")
    assert analysis.steps_in(tmp_path) == {1: 10.0, 2: 11.0}


def test_speed_is_of_the_steps_between_two_times() -> None:
    steps = {1: 0.0, 2: 1.0, 3: 2.0, 4: 4.0, 5: 9.0}
    assert analysis.samples_per_s(steps, 0.5, 5.0, 30) == pytest.approx(20.0)
    assert math.isnan(analysis.samples_per_s(steps, 8.0, 10.0, 30))


def test_updates_that_read_all_rows_are_counted_by_their_cause() -> None:
    updates = [
        update(1, 0.0, pid=7, is_full=True),
        update(2, 1.0, pid=7, is_full=False),
        update(3, 2.0, pid=7, is_full=True),
        update(14, 3.0, pid=7, is_full=True),
        update(15, 4.0, pid=8, is_full=True),
        update(16, 5.0, pid=8, is_full=False),
    ]
    found = analysis.full_loads(updates, lambda name: int(name[5:]) // 10)
    assert list(found.values()) == [2, 1, 1] and list(found) == list(analysis.FULL_LOADS)


def test_what_was_published_and_served_has_no_flaws() -> None:
    found = analysis.flaws_of(saved(1, 2), [update(1, 0.0), update(2, 1.0)], {"answer 1": 3, "answer 2": 4}, "state 2")
    assert found == {}


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("answers of no checkpoint", {"answers": {"answer 1": 3, "half of 1": 1}}),
        ("updates whose state is not that of their checkpoint", {"updates": [update(2, 1.0, state="another")]}),
        ("behind", {"updates": [update(1, 0.0)]}),
        ("behind", {"updates": []}),
        ("lost", {"trained": "state 3"}),
        ("lost", {"checkpoints": [], "updates": [], "answers": {}}),
        ("answers that several steps give", {"checkpoints": [*saved(1, 2), Published("save-0", 0, "", "answer 1")]}),
        ("checkpoints that cannot be opened", {"checkpoints": [*saved(1, 2), Published("save-0", -1, "", "", "cut")]}),
    ],
)
def test_a_flaw_is_named(what: str, changes: dict[str, Any]) -> None:
    usual = {"checkpoints": saved(1, 2), "updates": [update(2, 1.0)], "answers": {"answer 1": 3}, "trained": "state 2"}
    assert what in analysis.flaws_of(**{**usual, **changes})  # type: ignore[arg-type]


def test_the_headline_has_medians_and_what_of_the_speed_is_lost() -> None:
    lag = {"p50_s": 3.0, "max_s": 9.0, "update_bytes": 10, "update_s": 0.1, "blocked_s": 0.01}
    rows: list[dict[str, Any]] = [{"variant": "alone", "samples_per_s": speed} for speed in (99.8, 100.0, 100.1)]
    rows += [{"variant": "followed", "samples_per_s": 98.0, "p95_s": p95, **lag} for p95 in (6.0, 7.0, 20.0)]
    found = follower.headline(rows)
    assert found["cost"] == {"followed": pytest.approx(0.02)}
    assert found["goals"]["lag, p95, s"] == {"value": 7.0, "goal": 15.0, "noise": 0.0, "is_met": True}
    assert found["goals"]["cost, followed"]["is_met"] is False
    noisy = follower.headline([*rows, {"variant": "alone", "samples_per_s": 104.0}])
    assert noisy["goals"]["cost, followed"]["is_met"] is None
    assert follower.headline(rows[:3])["goals"] == {}
    of_one = follower.headline(rows[2:4])["goals"]["cost, followed"]
    assert of_one["is_met"] is None and of_one["noise"] is None


def test_processor_time_of_saving_is_that_of_the_server_and_what_workers_take_more() -> None:
    rows: list[dict[str, Any]] = [
        {"variant": "alone", "samples_per_s": speed, "worker_cpu_us": us, "server_cpu_share": 0.001}
        for speed, us in ((90.0, 60.0), (100.0, 60.0), (110.0, 60.03))
    ]
    rows.append({"variant": "published", "samples_per_s": 99.0, "worker_cpu_us": 60.12, "server_cpu_share": 0.005})
    found = follower.headline(rows)
    assert found["processor_time"] == {"server": 0.005, "workers": pytest.approx(0.002)}
    (value, is_met) = (found["goals"]["processor time of saving"][name] for name in ("value", "is_met"))
    assert value == pytest.approx(0.007) and is_met
    assert found["goals"]["cost, published"]["is_met"] is None


def test_processor_time_is_counted_from_a_moment_on() -> None:
    counted = follower.CpuTime({os.getpid()})
    until_s = time.process_time() + 0.05
    while time.process_time() < until_s:
        pass
    assert 0.03 < counted.since() <= time.process_time()
    assert follower.CpuTime(set()).since() == 0


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "follower", *words])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--runs", "0"), "nothing to do"),
        (("--rows", "3"), "--rows must be at least"),
        (("--every-s", "0"), "--every-s must be positive"),
        (("--kills", "-1"), "--kills must be at least 0"),
        (("--kills", "1", "--workers", "1"), "does not survive"),
    ],
)
def test_what_would_fail_after_minutes_is_refused_at_once(
    tmp_path: Path, words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = options("--out", str(tmp_path / "found.json"), *words)
    assert args.run(args) == 1
    assert text in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_what_is_served_was_published_through_kills_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, interpreter = tmp_path / "scratch", prefork.interpreter()
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(sys, "executable", interpreter)
    out = tmp_path / "found.json"
    words = ["bench", "follower", "--out", str(out), "--rows", "2600", "--every-s", "0.5", "--look-s", "0.2"]
    words += ["--variants", "followed", "--runs", "1", "--warm-s", "0", "--seconds", "2", "--kills", "3", "--seed", "2"]
    assert cli.main(words) == 0
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    assert row["worker_cpu_us"] > 0 and 0 < row["server_cpu_share"] < 1
    assert row["samples_per_s"] > 0 and row["updates"] > 1 and 0 < row["p50_s"] <= row["p95_s"] <= row["max_s"]
    killed = found["kills"]
    assert {one["victim"] for one in killed["kills"]} == {"follower", "server", "worker"}
    assert not killed["flaws"] and killed["updates"] > 3 and killed["requests"] > killed["answers"] > 1
    assert not list(scratch.iterdir())
