"""Training on a virtual clock: what the clock does, that servers' code is what runs, and the limit it observes."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gba_hvd_tools import cli
from gba_hvd_tools.bench import delay
from gba_hvd_tools.bench.harness import small_ctr
from gba_hvd_tools.commands.simulate import agreement as agreement_command
from gba_hvd_tools.commands.simulate import training
from gba_hvd_tools.simulated import agreement
from gba_hvd_tools.simulated.agreement import JobSettings, compared, distance, draws, together
from gba_hvd_tools.simulated.event_loop import Setting, TrainingOutcome, train
from gba_hvd_tools.simulated.experiment import Experiment, run, run_grid
from gba_hvd_tools.simulated.service_times import Fleet
from gba_hvd_tools.simulated.stability_limit import observe, observe_fleet
from gba_hvd_tools.simulated.tasks import Quadratic

from gba_hvd import BadInput, update_rules
from gba_hvd.epoch import EpochPlan
from gba_hvd.mode_names import REPLICA_MODES
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.torch_optimizers import spec_of
from gba_hvd.update_rules import stability

STEADY: dict[str, Any] = {"shape": math.inf}


def sgd(lr: float, **settings: Any) -> dict[str, Any]:
    return spec_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr, **settings))


def trained(
    discipline: Discipline, workers: int, micro_batches: int = 60, lr: float = 0.1, **setting: Any
) -> TrainingOutcome:
    """A quadratic, by equal workers that start evenly spread."""
    setting = {"rule": "none", "optimizer": sgd(lr), "start_over": 1.0, **setting}
    made = Setting(EpochPlan(micro_batches, 4, 1), discipline, **setting)
    return train(Quadratic([1.0, 0.5]), made, workers, Fleet(workers, shape=math.inf).draws())


# --- the clock -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_values_are_as_old_as_there_are_other_workers(workers: int) -> None:
    dense_ages = trained(Discipline("async"), workers).dense_ages
    assert set(dense_ages) == set(range(workers))
    assert dense_ages[workers - 1] == 60 - (workers - 1)  # the first push of each finds fewer


def test_one_worker_without_delay_is_gradient_descent() -> None:
    expected = np.array([0.9, 0.95]) ** 60
    np.testing.assert_allclose(trained(Discipline("async"), 1).values, expected, rtol=1e-4)


def test_steps_of_a_global_batch_are_those_of_its_mean() -> None:
    outcome = trained(Discipline("gba", lookahead=0), 4, latency=0.01)
    assert (outcome.steps, outcome.staleness, outcome.dense_ages) == (15, {0: 60}, {0: 60})
    np.testing.assert_allclose(outcome.values, np.array([0.9, 0.95]) ** 15, rtol=1e-4)


@pytest.mark.slow
def test_time_passes_as_the_fleet_says() -> None:
    assert trained(Discipline("async"), 1, start_over=0.0).time == pytest.approx(60.0)
    assert trained(Discipline("async"), 4, start_over=0.0).time == pytest.approx(15.0)
    busy = trained(Discipline("async"), 4, start_over=0.0, serve=0.5)
    assert busy.time == pytest.approx(1 + 60 * 0.5)  # no more than two pushes in a unit of time


def test_a_worker_goes_on_without_waiting_for_its_own_push_to_arrive() -> None:
    assert max(trained(Discipline("async"), 1, latency=0.3).dense_ages) == 1
    assert max(trained(Discipline("async"), 1).dense_ages) == 0


def test_a_slow_worker_holds_nobody_up_and_its_pushes_are_dropped() -> None:
    setting = Setting(EpochPlan(400, 4, 1), Discipline("gba", tolerance=2), "none", sgd(0.1))
    outcome = train(Quadratic([1.0]), setting, 4, lambda worker: 30.0 if worker == 3 else 1.0)
    assert outcome.applied + outcome.dropped == 400
    assert 0 < outcome.dropped < 20
    assert max(outcome.staleness) > 2
    assert outcome.time < 400 / 3 + 60


@pytest.mark.parametrize("mode", ["gba", "bsp", "async", "hop_bs", "hop_bw"])
def test_every_mode_gets_through_its_epoch(mode: str) -> None:
    outcome = run(Experiment(workers=5, mode=mode, micro_batches=80, lr=0.001, spread=0.5, latency=0.02))
    assert outcome.applied + outcome.dropped == 80 * 64
    assert math.isfinite(outcome.loss)


@pytest.mark.slow
def test_a_run_is_the_same_every_time_and_another_with_another_seed() -> None:
    def loss(seed: int) -> float:
        return run(Experiment(workers=3, micro_batches=60, seed=seed)).loss

    assert loss(0) == loss(0) != loss(1)


@pytest.mark.slow
def test_a_thousand_workers_are_simulated_like_three() -> None:
    outcome = run(Experiment(workers=1000, micro_batches=1500, lr=1e-5))
    assert outcome.applied == 1500 * 64
    assert outcome.time < 4
    assert max(outcome.dense_ages) > 700


@pytest.mark.slow
def test_ten_thousand_workers_are_simulated_in_seconds() -> None:
    settings: dict[str, Any] = {"mode": "bsp", "n_micro": 100, "micro_batch": 1, "lr": 1e-6}
    outcome = run(Experiment(workers=10_000, micro_batches=12_000, **settings))
    assert (outcome.applied, outcome.steps) == (12_000, 120)
    assert outcome.time < 4
    assert sum(outcome.dense_ages.values()) == 12_000
    assert max(outcome.dense_ages) >= 99, "the last of the first 10,000 finds the steps of all the others"


def test_what_diverges_ends_early_and_says_so() -> None:
    outcome = run(Experiment(workers=16, micro_batches=2000, lr=1.0))
    assert outcome.loss == math.inf
    assert outcome.why
    assert outcome.curve[-1][1] < 2000


@pytest.mark.slow
@pytest.mark.parametrize("rule", update_rules.RULES)
def test_learning_rates_side_by_side_are_as_each_alone(rule: str) -> None:
    experiment, lrs = Experiment(workers=6, rule=rule, micro_batches=150), [0.3, 0.01, 0.001]
    alone = [run(replace(experiment, lr=lr)).loss for lr in lrs]
    assert run_grid(experiment, lrs) == pytest.approx(alone, rel=1e-4)
    assert math.isfinite(alone[1])


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["none", "gap_aware"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "nadam"])
def test_they_are_so_with_every_optimizer(optimizer: str, rule: str) -> None:
    experiment, lrs = Experiment(workers=4, rule=rule, optimizer=optimizer, micro_batches=100), [0.03, 0.01]
    alone = [run(replace(experiment, lr=lr)).loss for lr in lrs]
    assert run_grid(experiment, lrs) == pytest.approx(alone, rel=1e-3)


# --- speeds ----------------------------------------------------------------------------------------------------------


def test_speeds_have_the_mean_and_the_spread_asked_for() -> None:
    fleet = Fleet(4000, spread=0.5, seed=1)
    assert fleet.means().mean() == pytest.approx(1, abs=0.05)
    assert fleet.means().std() == pytest.approx(0.5, abs=0.05)
    draw = Fleet(1, seed=1).draws()
    times = np.array([draw(0) for _ in range(4000)])
    assert times.mean() == pytest.approx(1, abs=0.01)
    assert times.std() == pytest.approx(0.1, abs=0.01)


def test_a_simulated_worker_draws_what_its_emulated_accelerator_draws() -> None:
    from gba_hvd_tools.bench.harness.emulated_accelerators import Accelerator

    job, now, slept = JobSettings(2, slow=3.0), [0.0], []
    draw = draws(job)

    def sleep(seconds: float) -> None:
        slept.append(seconds)

    accelerator = Accelerator(job.scenario(), 1, seed=job.seed, clock=lambda: now[0], sleep=sleep)
    for _ in range(3):
        accelerator.begin()
        accelerator.wait()
    assert slept == pytest.approx([job.service_s * draw(1) for _ in range(3)])


def test_the_distance_of_histograms() -> None:
    assert distance({0: 5, 1: 5}, {"1": 50, "0": 50}) == 0
    assert distance({0: 1}, {1: 7}) == 1
    assert distance({0: 3, 1: 1}, {0: 1, 1: 3}) == 0.5


def outcome_of(staleness: dict[Any, int], time: float) -> dict[str, Any]:
    """What a job reports; a real one's histograms come through JSON."""
    same = {"auc": 0.7, "log_loss": 0.5, "steps": 9, "dropped": 0, "late": 0}
    return {"staleness": staleness, "lags": {0: 1}, "time": time, **same}


def test_how_far_a_simulation_is_off_stands_beside_how_far_two_jobs_are() -> None:
    real = [outcome_of({"0": 1}, 10.0), outcome_of({"0": 3, "1": 1}, 13.0), outcome_of({"0": 1, "1": 1}, 12.0)]
    found = compared(real, outcome_of({0: 1, 1: 1}, 11.0))
    assert found["apart"]["staleness"] == pytest.approx(0.25)  # .5, .25 and 0
    assert found["noise"]["staleness"] == pytest.approx(0.25)  # .25, .5 and .25
    assert (found["apart"]["time"], found["noise"]["time"]) == (1.0, 2.0)
    alone = compared(real[:1], outcome_of({0: 1, 1: 1}, 11.0))
    assert (alone["apart"]["staleness"], alone["noise"]["staleness"]) == (0.5, None)


def test_histograms_of_several_jobs_are_one() -> None:
    assert together([{"0": 1, "2": 3}, {0: 4}]) == {0: 5, 2: 3}


# --- the adviser -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 1, 3, 10])
def test_the_predicted_limit_is_the_observed_one(delay: int) -> None:
    found = observe(delay)
    assert found.predicted == stability.limit(delay)
    assert found.stable < found.unstable < 1.001 * found.stable
    assert found.predicted == pytest.approx(found.observed, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fleet",
    [
        {"workers": 4, "steps": 2000},
        {"workers": 8, "momentum": 0.9, "steps": 2000},
        {"workers": 8, "n_micro": 8, "steps": 300},
        {"workers": 3, "n_micro": 8, "momentum": 0.9, "ahead": 0.9, "steps": 300},
        {"workers": 8, "n_micro": 8, "momentum": 0.9, "ahead": 0.9, "steps": 400},
        {"workers": 3, "n_micro": 8, "momentum": 0.9, "ahead": 0.9, "steps": 300, "optimizer": "adam"},
        {"workers": 4, "momentum": 0.9, "steps": 1000, "optimizer": "adam"},
    ],
    ids=str,
)
def test_the_limit_of_a_fleet_is_predicted_within_a_tenth(fleet: dict[str, Any]) -> None:
    found = observe_fleet(**fleet)
    assert abs(found.error) < 0.1
    assert abs(found.roots / found.observed - 1) < 0.1, "they are about equally fast, so that the mean of the ages does"


@pytest.mark.slow
def test_the_limit_of_workers_of_different_speeds_is_predicted_within_a_tenth() -> None:
    """From the ages of another run in their order. Their mean is wrong by a fifth, and the plain formula by half."""
    found = observe_fleet(8, spread=0.5)
    assert abs(found.error) < 0.1
    assert abs(found.speeds / found.observed - 1) < 0.1
    assert found.roots / found.observed > 1.15
    assert found.plain / found.observed < 0.5


@pytest.mark.slow
def test_the_look_ahead_raises_the_limit_as_predicted() -> None:
    plain, ahead = (observe_fleet(3, 8, 0.9, steps=300, ahead=steps) for steps in (0.0, 0.9))
    assert ahead.observed > 3 * plain.observed
    assert ahead.predicted / plain.predicted == pytest.approx(ahead.observed / plain.observed, rel=0.1)


def test_a_look_ahead_without_momentum_is_refused() -> None:
    with pytest.raises(BadInput, match="a look-ahead needs momentum"):
        observe_fleet(3, 8, ahead=0.9)


def test_a_run_keeps_the_ages_of_its_steps_in_their_order() -> None:
    outcome = trained(Discipline("gba", lookahead=0), 4, latency=0.01)
    assert [list(step) for step in outcome.arrivals] == [[(0, 1.0)]] * 15
    outcome = trained(Discipline("async"), 3)
    ages = [age for step in outcome.arrivals for age, _ in step]
    assert ages == [0, 1] + [2] * 58
    assert {age: ages.count(age) for age in set(ages)} == outcome.dense_ages


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"workers": 0}, "workers must be a whole number, 1 or more"),
        ({"lr": 0.0}, "lr must be a number above 0"),
        ({"micro_batches": 0}, "micro_batches must be"),
        ({"micro_batch": -1}, "micro_batch must be"),
        ({"spread": -0.1}, "spread must be"),
        ({"shape": 0.0}, "shape must be above 0"),
        ({"latency": -1.0}, "latency must be"),
        ({"serve": math.nan}, "serve must be"),
        ({"task": "quadratics"}, "did you mean 'quadratic'"),
        ({"optimizer": "adma"}, "did you mean 'adam'"),
        ({"rule": "dana_slm"}, "did you mean 'dana_slim'"),
        ({"mode": "asink"}, "no asynchronous mode 'asink'"),
        ({"rule": "dana_zero", "optimizer": "sgd"}, "SGD has none"),
        ({"tolerance": -1}, "tolerance .* must be"),
    ],
)
def test_what_cannot_be_simulated_is_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(BadInput, match=what):
        Experiment(**settings)


@pytest.mark.parametrize("mode", REPLICA_MODES)
def test_modes_with_replicas_are_refused_and_the_others_named(mode: str) -> None:
    for made in (Experiment, partial(JobSettings, 2)):
        with pytest.raises(BadInput, match=f"'{mode}' cannot be simulated: .* one of gba, bsp, async, hop_bs, hop_bw"):
            made(mode=mode)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"slow": 0.5}, "slow of at least 1"),
        ({"rule": "dana_zero"}, "'dana_zero' does not go with this optimizer: .* Adagrad"),
    ],
)
def test_a_job_that_cannot_be_compared_is_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(BadInput, match=what):
        JobSettings(2, **settings)


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_prints_draws_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "found.json", tmp_path / "found.png"
    few = ["--workers", "2", "16", "--rule", "none", "dana_zero", "--micro-batches", "200", "--lr", "0.1"]
    assert cli.main(["simulate", "training", *few, "--out", str(out), "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    assert "diverged" in said and "dana_zero" in said
    assert '"loss": null' in out.read_text()
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_what_diverged_has_no_score(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = run(Experiment(micro_batches=20)), run(Experiment(workers=16, micro_batches=2000, lr=1.0))
    outcomes = [bad, replace(good, scores={"auc": 0.8}), bad]
    monkeypatch.setattr("gba_hvd_tools.simulated.experiment.run", lambda experiment, clicks: outcomes.pop())
    line = training.simulated([Experiment()] * 3, None)
    assert line.scores == {"auc": 0.8} and line.loss == math.inf
    outcomes = [bad]
    diverged = training.simulated([Experiment()], None)
    training.show([line, diverged], argparse.Namespace(task="clicks", mode="gba", optimizer="sgd", lr=1.0))
    said = capsys.readouterr().out
    assert "0.8000" in said and "0.0000" not in said


@pytest.mark.slow
def test_the_limits_are_printed_side_by_side(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gba_hvd_tools.simulated.stability_limit.observe_fleet", partial(observe_fleet, steps=300))
    assert cli.main(["simulate", "limits", "--delays", "2"]) == 0
    assert "0.61803" in capsys.readouterr().out
    fleet = ["--workers", "2", "--step", "4", "--momentum", "0.9", "--ahead", "0.9", "--optimizer", "adam"]
    assert cli.main(["simulate", "limits", *fleet]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "4 pushes a step, adam, momentum 0.9" in said and "values 0.9 of a step ahead" in said
    assert cli.main(["simulate", "limits", "--delays", "2", "--ahead", "0.9"]) == 1
    assert "--ahead: of fleets" in capsys.readouterr().err


def test_real_jobs_of_every_setting_are_compared_with_one_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[tuple[int, str, str]] = []

    def real_run(job: JobSettings, folder: Path) -> dict[str, Any]:
        jobs.append((job.workers, job.mode, job.rule))
        return outcome_of({"0": len(jobs), "1": 1}, 10.0 + len(jobs))

    monkeypatch.setattr(agreement_command, "real_run", real_run)
    monkeypatch.setattr(agreement, "simulate", lambda job, data: outcome_of({0: 1}, 12.0))
    monkeypatch.setattr(small_ctr, "write", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "found.json"
    options = ["--mode", "async", "--rule", "none", "gap_aware", "--runs", "2", "--out", str(out)]
    assert cli.main(["simulate", "agreement", *options]) == 0
    assert jobs == [(n, "async", rule) for n in (2, 4, 8) for rule in ("none", "gap_aware") for _ in range(2)]
    said = capsys.readouterr().out
    assert "two real jobs" in said and "8 workers, async, rule gap_aware, 2 real" in said
    found = json.loads(out.read_text())["jobs"]
    assert [len(job["real"]) for job in found] == [2] * 6
    first = found[0]
    assert first["apart"]["staleness"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert first["noise"]["staleness"] == pytest.approx(1 / 2 - 1 / 3)
    assert first["noise"]["time"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "what"),
    [(["--runs", "0"], "--runs must be 1 or more"), (["--mode", "shadow"], "'shadow' cannot be simulated")],
)
def test_what_cannot_be_compared_is_refused_in_a_line(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", "agreement", *arguments]) == 1
    said = capsys.readouterr().err
    assert what in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["--mode", "shadow"], ["--seeds", "0"], ["--rule", "danazero"], ["--lr", "-1"], ["--workers", "0"]]
)
def test_the_command_says_what_is_wrong_in_a_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "training", *arguments]) == 1
    said = capsys.readouterr().err
    assert said.startswith("gba-hvd: ") and said.count("\n") == 1


@pytest.mark.slow
def test_the_benchmark_says_which_rules_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "delay.json"
    few = ["--workers", "4", "16", "--tasks", "quadratic", "--micro-batches", "200", "--seeds", "1"]
    assert cli.main(["bench", "delay", "--out", str(out), *few]) == 0
    found = json.loads(out.read_text())["tasks"]["quadratic"]
    assert found["loss"]["none"]["16"] is None, "plain momentum was to diverge with 16 workers"
    assert found["loss"]["dana_zero"]["16"] < found["one_worker"]["loss_at_start"]
    assert found["largest_lr"]["dana_zero"]["16"] > found["largest_lr"]["none"]["16"]
    assert "holds_to_at_best_lr" in capsys.readouterr().out


def test_the_benchmark_simulates_only_what_its_file_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Experiment] = []
    interrupted_after = 2

    def grid(experiment: Experiment, rates: Sequence[float]) -> list[float]:
        if len(ran) == interrupted_after:
            raise KeyboardInterrupt
        ran.append(experiment)
        return [float("inf"), *rates[1:]] if experiment.workers > 1 else list(rates)

    def command(*words: str) -> int:
        few = ["--tasks", "quadratic", "--micro-batches", "20", "--rules", "none", "dc", "--workers", "4"]
        return cli.main(["bench", "delay", "--out", str(out), *few, *words])

    monkeypatch.setattr("gba_hvd_tools.simulated.experiment.run_grid", grid)
    out = tmp_path / "delay.json"
    assert command("--seeds", "1") == 130
    first = json.loads(out.read_text())
    assert {(row["rule"], row["workers"]) for row in first["rows"]} == {("none", 1), ("none", 4)}
    assert first["tasks"] == {}, "not complete"
    ran.clear()
    interrupted_after = 99
    assert command("--seeds", "1") == 0
    assert [(one.rule, one.workers) for one in ran] == [("dc", 4)]
    whole = json.loads(out.read_text())
    found = whole["tasks"]["quadratic"]
    assert whole["rows"][: len(first["rows"])] == first["rows"]
    assert max(delay.RATES["momentum"]["quadratic"]) not in (found["largest_lr"]["dc"]["4"], found["best"]["dc"]["4"])
    assert found["one_worker"]["lr"] == 0.001 and found["holds_to_at_best_lr"] == {"none": 4, "dc": 4}
    ran.clear()
    capsys.readouterr()
    assert command("--seeds", "1", "--rules", "gap_aware", "--tasks", "logistic", "--workers", "8", "4") == 0
    assert command("--seeds", "1", "--rules", "dc", "--workers", "2") == 0
    grown = json.loads(out.read_text())["tasks"]
    assert {rule: list(some) for rule, some in grown["logistic"]["best"].items()} == {"gap_aware": ["4", "8"]}
    assert {rule: list(some) for rule, some in grown["quadratic"]["best"].items()} == {"none": ["4"], "dc": ["2", "4"]}
    said = capsys.readouterr().out
    assert "logistic, momentum: final loss" in said and re.search(r"2 workers[ |]+4 workers", said)
    whole = json.loads(out.read_text())
    assert command("--seeds", "2") == 1 and "seeds: 1 in the file, 2 now" in capsys.readouterr().err
    assert json.loads(out.read_text()) == whole


@pytest.mark.parametrize(
    ("optimizer", "rules_of_it"),
    [
        ("sgd", ["none", "gap_aware", "dc", "staleness_lr"]),
        ("adam", ["none", "gap_aware", "dc", "look_ahead", "staleness_lr"]),
        ("nadam", ["none", "gap_aware", "dc", "delayed_nesterov", "look_ahead", "staleness_lr"]),
        ("momentum", list(update_rules.RULES)),
    ],
)
def test_the_benchmark_has_the_rules_that_go_with_an_optimizer(optimizer: str, rules_of_it: list[str]) -> None:
    assert delay.rules_for(optimizer) == rules_of_it


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "nadam"])
def test_the_benchmark_measures_rules_with_other_optimizers(
    optimizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "delay.json"
    few = ["--workers", "4", "--tasks", "quadratic", "--micro-batches", "100", "--seeds", "1"]
    assert cli.main(["bench", "delay", "--out", str(out), "--optimizer", optimizer, *few]) == 0
    outcome_of = json.loads(out.read_text())
    assert outcome_of["settings"]["optimizer"] == optimizer
    assert (
        "betas" in outcome_of["settings"]["optimizer_settings"]
        and "lr" not in outcome_of["settings"]["optimizer_settings"]
    )
    found = outcome_of["tasks"]["quadratic"]
    assert list(found["best"]) == delay.rules_for(optimizer)
    assert found["best"]["none"]["4"] < found["one_worker"]["loss_at_start"]
    assert found["best"]["gap_aware"]["4"] != found["best"]["none"]["4"]
    if optimizer == "nadam":
        assert found["best"]["delayed_nesterov"] == found["best"]["none"], "NAdam has it in its own step"
    assert f"quadratic, {optimizer}: final loss" in capsys.readouterr().out


@pytest.mark.slow
def test_the_click_model_learns_through_real_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_ctr, "N_HELD_OUT", 2000)
    small_ctr.write(tmp_path, 40 * 64)
    experiment = Experiment("clicks", 3, "gba", optimizer="adagrad", lr=0.05, micro_batches=40)
    outcome = run(experiment, tmp_path)
    assert outcome.steps == 5
    assert outcome.loss < outcome.curve[0][2]
    assert 0.5 < outcome.scores["auc"] < 1
