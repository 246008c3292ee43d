"""The emulated day, and what the benchmark of it keeps and concludes. No launch."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from gba_hvd_tools.bench import cluster_load
from gba_hvd_tools.bench.harness import emulated_accelerators as emulated
from gba_hvd_tools.bench.harness import measure

from tests.tools.bench.test_emulated_accelerators import Clock

DAY = emulated.cluster_day(0.1, 240.0)


def row(mode: str, rate: float, run: int = 0, switches: int = 0) -> measure.Row:
    told = {"samples_per_s": rate, "ideal_share": 0.5, "auc": 0.78, "dropped_share": 0.0}
    return {"mode": mode, "run": run, **told, "switches": [{}] * switches, "by_part": [rate] * cluster_load.HOURS}


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cluster_load.add_parser(parser.add_subparsers())
    return parser.parse_args(["cluster-load", *words])


def test_the_night_is_quiet_and_every_worker_is_hit_hardest_once():
    def factors(hour: int) -> list[float]:
        at = DAY.warmup_s + (hour + 0.5) * 10.0
        return [round(DAY.mean_service_s(worker, at) / 0.1, 6) for worker in range(emulated.N_WORKERS)]

    assert factors(2) == [1.0] * 4
    assert factors(9) == [2.0, 3.0, 5.0, 1.5]
    assert sorted(factors(19)) == sorted(factors(9)) and factors(19) != factors(9)
    slowest = {max(range(4), key=lambda worker: factors(hour)[worker]) for hour in (0, 9, 15, 19)}
    assert slowest == {0, 1, 2, 3}


def test_the_ideal_of_an_hour_is_the_sum_of_the_workers_rates():
    ideal = cluster_load.ideal_by_hour(DAY)
    assert len(ideal) == 24
    assert ideal[2] == pytest.approx(4 / 0.1 * emulated.MICRO_BATCH)
    assert ideal[9] == pytest.approx((1 / 2 + 1 / 3 + 1 / 5 + 1 / 1.5) / 0.1 * emulated.MICRO_BATCH)


def test_the_rate_by_part_is_of_applied_samples_within_it():
    clock = Clock()
    scenario = emulated.Scenario("x", 1.0, warmup_s=10.0, end_s=20.0)
    accelerator = emulated.Accelerator(scenario, 0, clock=clock, sleep=clock.sleep)
    progress = emulated.EmulatedProgress(accelerator)
    accelerator.begin()
    for at_s, applied in ((5, 50), (10, 100), (15, 200), (17.5, 400), (20, 600), (25, 9999)):
        clock.now = 100.0 + at_s
        progress.note(applied)
    assert progress.samples_per_s(2) == pytest.approx([20.0, 80.0])
    assert progress.samples_per_s(4) == pytest.approx([20.0, 20.0, 80.0, 80.0])


def test_a_day_without_two_steps_has_no_rates():
    progress = emulated.EmulatedProgress(emulated.Accelerator(DAY, 0))
    with pytest.raises(ValueError, match="0 steps in the measured time"):
        progress.samples_per_s(24)


def test_auto_is_compared_with_each_fixed_mode():
    rows = [row("auto", 300.0, switches=3), row("allreduce", 100.0), row("allreduce", 200.0, run=1), row("gba", 310.0)]
    found = cluster_load.headline(rows, DAY)
    assert list(found) == ["auto", "allreduce", "gba"]
    assert found["allreduce"]["auto_gain"] == pytest.approx(2.0), "against the median of its runs"
    assert found["gba"]["auto_gain"] == pytest.approx(300 / 310)
    assert (found["auto"]["switches"], found["allreduce"]["runs"]) == (3, 2)


def test_autos_share_of_the_better_mode_is_shown_by_minute(capsys: pytest.CaptureFixture[str]):
    rates = {"auto": [1, 300, 300, 280, 300], "allreduce": [100] * 5, "gba": [310] * 5}
    cluster_load.show([row(mode, sum(rates[mode]) / 5) | {"by_minute": rates[mode]} for mode in rates], DAY)
    assert capsys.readouterr().out.splitlines()[-1].startswith("cluster_day run 1: auto has 0.762 of gba over the")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--day", "10"], "the day takes at least 24 s"),
        (["--runs", "0"], "--runs must be at least 1"),
        (["--plot", "day.txt"], "must end in .svg or .png"),
    ],
)
def test_what_would_fail_later_is_refused_at_once(tmp_path: Path, words: list[str], message: str):
    with pytest.raises(measure.RunFailed, match=message):
        cluster_load.check(options("--out", str(tmp_path / "out.json"), *words))


@pytest.mark.slow
def test_the_picture_is_small_and_the_same_each_time(tmp_path: Path):
    rows = [row("auto", 300.0), row("gba", 310.0)]
    for name in ("one.svg", "two.svg"):
        cluster_load.draw(rows, DAY, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert 5000 < len((tmp_path / "one.svg").read_bytes()) < 200_000
