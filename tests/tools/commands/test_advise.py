"""`gba-hvd advise`: from figures, from a run, and what it asks for when something is not known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gba_hvd_tools import cli
from gba_hvd_tools.commands.advise import Figures, figures_of

from gba_hvd.errors import BadInput
from gba_hvd.tracking import find_run
from gba_hvd.tracking import gauges as g
from gba_hvd.tracking.records import Point
from gba_hvd.tracking.run_history import RunHistory


def a_story(**reported: Any) -> RunHistory:
    return RunHistory("run", "here", "j", "FINISHED", "", 0, 1, **reported)


def finished(ages: dict[str, int], arrivals: Any = ()) -> tuple[dict[str, Any], ...]:
    return ({"event": "finished", "step": 9, "message": "", "data": {"lags": ages, "arrivals": arrivals}},)


@pytest.mark.slow
def test_figures_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", "--lr", "0.01", "--curvature", "5", "--age", "2", "--age-max", "6"]) == 0
    assert capsys.readouterr().out.startswith("stable: learning rate 0.01 is 0.0")


def test_an_unstable_rate_is_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", "--lr", "1", "--curvature", "5", "--age", "2", "--json"]) == 1
    advice = json.loads(capsys.readouterr().out)
    assert advice["level"] == "unstable"
    assert advice["lr_limit"] == advice["lr_limit_worst"]  # no maximum was given: the mean is all there is


@pytest.mark.parametrize(
    ("arguments", "asks"),
    [
        (["--curvature", "5", "--age", "2"], "the learning rate is not known: give --lr, or a run"),
        (["--lr", "1", "--age", "2"], "the curvature is not known: measure it in the script"),
        (["--lr", "1", "--curvature", "5"], "the age of dense values is not known: give --age"),
        (["--lr", "-1", "--curvature", "5", "--age", "2"], "lr must not be negative"),
    ],
)
def test_what_is_missing_is_asked_for(arguments: list[str], asks: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", *arguments]) == 1
    assert asks in capsys.readouterr().err


def test_a_run_that_ended_reports_its_whole_histogram() -> None:
    history = {"curvature": [Point("curvature", 3.0, 0, 1), Point("curvature", 4.0, 0, 5)]}
    story = a_story(params={"config.dense.lr": "0.02"}, history=history, events=finished({"0": 3, "8": 1}))
    assert figures_of(story, needs_lr=True) == Figures(0.02, 4.0, {0: 3, 8: 1})


@pytest.mark.slow
def test_a_run_that_ended_tells_the_order_of_the_ages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    history = {"curvature": [Point("curvature", 1.0, 0, 5)]}
    arrivals = [[[0, 1.0]]] * 8 + [[[8, 1.0]]]
    story = a_story(params={"lr": "1.5"}, history=history, events=finished({"0": 8, "8": 1}, arrivals * 20))
    assert figures_of(story, needs_lr=True).arrivals == ([[(0, 1.0)]] * 8 + [[(8, 1.0)]]) * 20
    monkeypatch.setattr(find_run, "read", lambda run, uri: story)
    assert cli.main(["advise", "run", "--json"]) == 1
    advice = json.loads(capsys.readouterr().out)
    assert (advice["level"], advice["n_arrivals"]) == ("unstable", 180)
    assert advice["lr_limit"] == pytest.approx(1.0, rel=0.01) and advice["lr_limit_mean"] == pytest.approx(2.0)


def test_a_running_job_reports_what_it_has_measured() -> None:
    history = {
        g.DENSE_AGE_MEAN: [Point(g.DENSE_AGE_MEAN, 1.0, 0, 1), Point(g.DENSE_AGE_MEAN, 2.0, 0, 2)],
        g.DENSE_AGE_MAX: [Point(g.DENSE_AGE_MAX, 5.0, 0, 1), Point(g.DENSE_AGE_MAX, 3.0, 0, 2)],
    }
    ages = figures_of(a_story(history=history), needs_lr=True).ages
    assert ages is not None and max(ages) == 5
    assert sum(age * n for age, n in ages.items()) == pytest.approx(1.5)


def test_of_several_learning_rates_one_must_be_named() -> None:
    story = a_story(params={"dense.lr": "0.02", "rows.lr": "0.1", "lr": "auto"})
    with pytest.raises(BadInput, match=r"several learning rates \(dense\.lr=0\.02, rows\.lr=0\.1\): give .* --lr"):
        figures_of(story, needs_lr=True)
    assert figures_of(story, needs_lr=False) == Figures()


def test_the_dense_rate_that_the_library_recorded_wins_over_what_the_script_calls_lr() -> None:
    params = {"dense_lr": "0.02", "rows.lr": "0.1", "optimizer": "Adam", "dense_betas": "[0.9, 0.999]"}
    found = figures_of(a_story(params=params), needs_lr=True)
    assert (found.lr, found.last_lr, found.betas) == (0.02, None, "[0.9, 0.999]")
    assert (found.momentum, found.dampening) == (0.9, 0.9)
    params["dense_betas"] = "[[0.8, 0.99], [0.9, 0.999]]"
    assert figures_of(a_story(params=params), needs_lr=True).momentum == 0.9
    for name in ("dense_lr", "lr"):  # the library's metric, or the script's own
        history = {name: [Point(name, 0.05, 0, 1), Point(name, 0.01, 0, 5)]}
        found = figures_of(a_story(params=params, history=history), needs_lr=True)
        assert (found.lr, found.last_lr) == (0.05, 0.01)


@pytest.mark.slow
def test_the_largest_rate_of_a_schedule_counts_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    history = {"curvature": [Point("curvature", 1.0, 0, 5)], "dense_lr": [Point("dense_lr", 0.01, 0, 5)]}
    params = {"dense_lr": "0.1", "optimizer": "Adam", "dense_betas": "[0.9, 0.999]"}
    story = a_story(params=params, history=history, events=finished({"0": 3, "8": 1}))
    monkeypatch.setattr(find_run, "read", lambda run, uri: story)
    assert cli.main(["advise", "run"]) == 0
    said = capsys.readouterr().out
    assert "learning rate 0.1 is" in said and "the largest of the run's schedule, the newest is 0.01" in said
    assert "momentum 0.9, dampening 0.9" in said
    assert "of Adam with betas [0.9, 0.999] the equation has the first moment" in said


def test_what_is_given_wins_over_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    history = {"curvature": [Point("curvature", 4.0, 0, 5)]}
    story = a_story(params={"lr": "9"}, history=history, events=finished({"0": 3, "8": 1}))
    monkeypatch.setattr(find_run, "read", lambda run, uri: story)
    assert cli.main(["advise", "run", "--lr", "0.01", "--age", "1", "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)
    assert advice["lr"] == 0.01
    assert advice["lr_limit"] == pytest.approx(1 / 4)  # limit(1) is 1
    assert advice["lr_limit_worst"] == advice["lr_limit"]


@pytest.mark.slow
def test_a_sweep_says_at_how_many_workers_more_stop_helping(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "advise",
        "--lr",
        "0.1",
        "--curvature",
        "1",
        "--workers",
        "4",
        "8",
        "16",
        "32",
        "--micro-batch-s",
        "0.05",
    ]
    assert cli.main([*arguments, "--serve-s", "0", "0.02"]) == 0
    out = capsys.readouterr().out
    assert "more than 16 workers do not help" in out and "more than 8 workers do not help" in out
    assert cli.main([*arguments, "--step", "8", "--tolerance", "1", "4", "--json"]) == 0
    assert [one["tolerance"] for one in json.loads(capsys.readouterr().out)] == [1, 4]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--age", "1", "--step", "8"], "are for --workers"),
        (["--age", "1", "--workers", "4"], "leave --age"),
        (["--workers", "4"], "--workers needs --micro-batch-s"),
        (["--age-max", "4"], "given with --age"),
        (["--workers", "4", "--micro-batch-s", "1", "--tolerance", "2"], "no effect with --step 1"),
        (["--age", "3", "--age-max", "2"], "above the largest"),
    ],
)
def test_options_without_effect_are_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["advise", "--lr", "0.1", "--curvature", "1", *arguments]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"dense_momentum": "0.9", "rule": "dana_zero"}, ["momentum 0.9", "rule dana_zero is not in the equation"]),
        ({"dense_momentum": "0.9", "rule": "look_ahead"}, ["momentum 0.9, values 0.9 of a step ahead"]),
        (
            {"dense_momentum": "0.9", "rule": "look_ahead", "rule_settings.steps": "0.5"},
            ["momentum 0.9, values 0.5 of a step ahead"],
        ),
        ({"dense_momentum": "0.0"}, []),
        ({"dense_momentum": "high"}, ["momentum is not known and taken as 0: give --momentum"]),
        ({"optimizer": "Adagrad"}, ["momentum is not known", "is that of SGD, the run's optimizer is Adagrad"]),
        (
            {"lr": "0.01", "optimizer": "Adam", "dense_betas": "[0.9, 0.999]"},
            ["momentum 0.9, dampening 0.9", "of the preconditioned"],
        ),
        ({"lr": "0.05", "dense_momentum": "0.5", "dense_dampening": "0.5"}, ["momentum 0.5, dampening 0.5"]),
    ],
)
def test_the_run_s_momentum_counts_and_what_the_equation_lacks_is_said(
    params: dict[str, str], says: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    history = {"curvature": [Point("curvature", 5.0, 0, 5)]}
    story = a_story(params={"lr": "0.16", **params}, history=history, events=finished({"0": 3, "8": 1}))
    monkeypatch.setattr(find_run, "read", lambda run, uri: story)
    verdict = "stable"
    if params.get("dense_momentum") == "0.9":
        verdict = "near the limit" if params["rule"] == "look_ahead" else "unstable"
    assert cli.main(["advise", "run"]) == int(verdict == "unstable")
    said = capsys.readouterr().out
    assert said.startswith(verdict) and all(words in said for words in says)
    assert ("momentum" in said) == (params.get("dense_momentum") != "0.0")


@pytest.mark.slow
@pytest.mark.parametrize(("ahead", "limit_is_higher"), [([], True), (["--ahead", "0"], False)])
def test_a_sweep_for_a_run_goes_by_its_rule_and_says_what_it_lacks(
    ahead: list[str], limit_is_higher: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    history = {"curvature": [Point("curvature", 1.0, 0, 5)]}
    params = {"lr": "0.1", "dense_momentum": "0.9", "rule": "look_ahead"}
    monkeypatch.setattr(find_run, "read", lambda run, uri: a_story(params=params, history=history))
    arguments = ["advise", "run", "--workers", "3", "--micro-batch-s", "0.05", "--step", "8", *ahead]
    assert cli.main([*arguments, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["ahead"] == (0.9 if limit_is_higher else 0.0)
    assert (found["scales"][0]["lr_limit"] > 1.0) is limit_is_higher
    assert cli.main(arguments) == 0
    assert ("values are 0.9 of a step ahead" in capsys.readouterr().out) is limit_is_higher
    params["rule"] = "dana_zero"
    assert cli.main(arguments) == 0
    assert "the run's rule dana_zero is not in the equation" in capsys.readouterr().out


def test_a_run_with_too_few_steps_for_an_order_says_how_many_are_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    history = {"curvature": [Point("curvature", 1.0, 0, 5)]}
    story = a_story(params={"lr": "0.1"}, history=history, events=finished({"0": 80}, [[[0, 1.0]]] * 80))
    monkeypatch.setattr(find_run, "read", lambda run, uri: story)
    assert cli.main(["advise", "run"]) == 0
    assert "the order of 80 steps is too short, 128 are needed" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_in_which_all_numbers_help_asks_for_larger_ones(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["advise", "--lr", "0.1", "--curvature", "1", "--workers", "1", "2", "--micro-batch-s", "0.03"]
    assert cli.main(arguments) == 0
    assert "2 workers, the most of these, are the fastest: give larger numbers" in capsys.readouterr().out
