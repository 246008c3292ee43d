"""Training on a virtual clock: what the clock does, that servers' code is what runs, and the limit it observes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gba_hvd_tools import cli
from gba_hvd_tools.simulated.agreement import Job, distance, draws
from gba_hvd_tools.simulated.experiment import Experiment, run, run_grid
from gba_hvd_tools.simulated.fleet import Fleet
from gba_hvd_tools.simulated.limits import observe
from gba_hvd_tools.simulated.tasks import Quadratic
from gba_hvd_tools.simulated.training import Outcome, Setting, train

from gba_hvd import BadInput, rules, stability
from gba_hvd.order import Cut
from gba_hvd.tokens import Discipline
from gba_hvd.torch_optimizers import spec_of

STEADY: dict[str, Any] = {"shape": math.inf}


def sgd(lr: float, **settings: Any) -> dict[str, Any]:
    return spec_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr, **settings))


def trained(discipline: Discipline, workers: int, micro_batches: int = 60, lr: float = 0.1, **setting: Any) -> Outcome:
    """A quadratic, by equal workers that start evenly spread."""
    setting = {"rule": "none", "optimizer": sgd(lr), "start_over": 1.0, **setting}
    made = Setting(Cut(micro_batches, 4, 1), discipline, **setting)
    return train(Quadratic([1.0, 0.5]), made, workers, Fleet(workers, shape=math.inf).draws())


# --- the clock -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_values_are_as_old_as_there_are_other_workers(workers: int) -> None:
    lags = trained(Discipline("async"), workers).lags
    assert set(lags) == set(range(workers))
    assert lags[workers - 1] == 60 - (workers - 1)  # the first push of each finds fewer


def test_one_worker_without_delay_is_gradient_descent() -> None:
    expected = np.array([0.9, 0.95]) ** 60
    np.testing.assert_allclose(trained(Discipline("async"), 1).values, expected, rtol=1e-4)


def test_steps_of_a_global_batch_are_those_of_its_mean() -> None:
    outcome = trained(Discipline("gba", lookahead=0), 4, latency=0.01)
    assert (outcome.steps, outcome.staleness, outcome.lags) == (15, {0: 60}, {0: 60})
    np.testing.assert_allclose(outcome.values, np.array([0.9, 0.95]) ** 15, rtol=1e-4)


def test_time_passes_as_the_fleet_says() -> None:
    assert trained(Discipline("async"), 1, start_over=0.0).time == pytest.approx(60.0)
    assert trained(Discipline("async"), 4, start_over=0.0).time == pytest.approx(15.0)
    busy = trained(Discipline("async"), 4, start_over=0.0, serve=0.5)
    assert busy.time == pytest.approx(1 + 60 * 0.5)  # no more than two pushes in a unit of time


def test_a_worker_goes_on_without_waiting_for_its_own_push_to_arrive() -> None:
    assert max(trained(Discipline("async"), 1, latency=0.3).lags) == 1
    assert max(trained(Discipline("async"), 1).lags) == 0


def test_a_slow_worker_holds_nobody_up_and_its_pushes_are_dropped() -> None:
    setting = Setting(Cut(400, 4, 1), Discipline("gba", tolerance=2), "none", sgd(0.1))
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


def test_a_run_is_the_same_every_time_and_another_with_another_seed() -> None:
    def loss(seed: int) -> float:
        return run(Experiment(workers=3, micro_batches=60, seed=seed)).loss

    assert loss(0) == loss(0) != loss(1)


def test_a_thousand_workers_are_simulated_like_three() -> None:
    outcome = run(Experiment(workers=1000, micro_batches=1500, lr=1e-5))
    assert outcome.applied == 1500 * 64
    assert outcome.time < 4
    assert max(outcome.lags) > 700


def test_what_diverges_ends_early_and_says_so() -> None:
    outcome = run(Experiment(workers=16, micro_batches=2000, lr=1.0))
    assert outcome.loss == math.inf
    assert outcome.why
    assert outcome.curve[-1][1] < 2000


@pytest.mark.parametrize("rule", rules.RULES)
def test_learning_rates_side_by_side_are_as_each_alone(rule: str) -> None:
    experiment, lrs = Experiment(workers=6, rule=rule, micro_batches=150), [0.3, 0.01, 0.001]
    alone = [run(replace(experiment, lr=lr)).loss for lr in lrs]
    assert run_grid(experiment, lrs) == pytest.approx(alone, rel=1e-4)
    assert math.isfinite(alone[1])


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
    from gba_hvd_tools.bench.emulated import Accelerator

    job, now, slept = Job(2, slow=3.0), [0.0], []
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


# --- the adviser -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1, 3, 10])
def test_the_predicted_limit_is_the_observed_one(delay: int) -> None:
    found = observe(delay)
    assert found.predicted == stability.limit(delay)
    assert found.stable < found.unstable < 1.001 * found.stable
    assert found.predicted == pytest.approx(found.observed, rel=2e-3)


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
        ({"tolerance": -1}, "tolerance must be"),
    ],
)
def test_what_cannot_be_simulated_is_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(BadInput, match=what):
        Experiment(**settings)


def test_a_job_that_cannot_be_compared_is_refused() -> None:
    with pytest.raises(BadInput, match="slow of at least 1"):
        Job(2, slow=0.5)


# --- commands --------------------------------------------------------------------------------------------------------


def test_the_command_prints_draws_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "found.json", tmp_path / "found.png"
    few = ["--workers", "2", "16", "--rule", "none", "dana_zero", "--micro-batches", "200", "--lr", "0.1"]
    assert cli.main(["simulate", "training", *few, "--out", str(out), "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    assert "diverged" in said and "dana_zero" in said
    assert '"loss": null' in out.read_text()
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_limits_are_printed_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "limits", "--delays", "2"]) == 0
    assert "0.61803" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--rule", "danazero"], ["--lr", "-1"], ["--workers", "0"]])
def test_the_command_says_what_is_wrong_in_a_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "training", *arguments]) == 1
    said = capsys.readouterr().err
    assert said.startswith("gba-hvd: ") and said.count("\n") == 1


def test_the_benchmark_says_which_rules_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    out = tmp_path / "delay.json"
    few = ["--workers", "4", "16", "--tasks", "quadratic", "--micro-batches", "200", "--seeds", "1"]
    assert cli.main(["bench", "delay", "--out", str(out), *few]) == 0
    found = json.loads(out.read_text())["tasks"]["quadratic"]
    assert found["loss"]["none"]["16"] is None, "plain momentum was to diverge with 16 workers"
    assert found["loss"]["dana_zero"]["16"] < found["one_worker"]["loss_at_start"]
    assert found["largest_lr"]["dana_zero"]["16"] > found["largest_lr"]["none"]["16"]
    assert "holds_to_at_best_lr" in capsys.readouterr().out


def test_the_click_model_learns_through_real_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gba_hvd_tools.bench import small_ctr

    monkeypatch.setattr(small_ctr, "N_HELD_OUT", 2000)
    small_ctr.write(tmp_path, 40 * 64)
    experiment = Experiment("clicks", 3, "gba", optimizer="adagrad", lr=0.05, micro_batches=40)
    outcome = run(experiment, tmp_path)
    assert outcome.steps == 5
    assert outcome.loss < outcome.curve[0][2]
    assert 0.5 < outcome.judged["auc"] < 1
