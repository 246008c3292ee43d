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


def a_story(**told: Any) -> RunHistory:
    return RunHistory("run", "here", "j", "FINISHED", "", 0, 1, **told)


def finished(staleness: dict[str, int]) -> tuple[dict[str, Any], ...]:
    return ({"event": "finished", "step": 9, "message": "", "data": {"staleness": staleness}},)


def test_figures_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", "--lr", "0.01", "--curvature", "5", "--staleness", "2", "--staleness-max", "6"]) == 0
    assert capsys.readouterr().out.startswith("stable: learning rate 0.01 is 0.08x the limit")


def test_an_unstable_rate_is_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", "--lr", "1", "--curvature", "5", "--staleness", "2", "--json"]) == 1
    advice = json.loads(capsys.readouterr().out)
    assert advice["level"] == "unstable"
    assert advice["lr_limit"] == advice["lr_limit_worst"]  # no maximum was given: the mean is all there is


@pytest.mark.parametrize(
    ("arguments", "asks"),
    [
        (["--curvature", "5", "--staleness", "2"], "the learning rate is not known: give --lr, or a run"),
        (["--lr", "1", "--staleness", "2"], "the curvature is not known: measure it in the script"),
        (["--lr", "1", "--curvature", "5"], "the staleness is not known: give --staleness"),
        (["--lr", "-1", "--curvature", "5", "--staleness", "2"], "lr must not be negative"),
    ],
)
def test_what_is_missing_is_asked_for(arguments: list[str], asks: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", *arguments]) == 1
    assert asks in capsys.readouterr().err


def test_a_run_that_ended_tells_its_whole_histogram() -> None:
    history = {"curvature": [Point("curvature", 3.0, 0, 1), Point("curvature", 4.0, 0, 5)]}
    story = a_story(params={"config.dense.lr": "0.02"}, history=history, events=finished({"0": 3, "8": 1}))
    assert figures_of(story, needs_lr=True) == Figures(0.02, 4.0, 2.0, 8.0)


def test_a_run_under_way_tells_what_it_has_measured() -> None:
    history = {
        g.STALENESS_MEAN: [Point(g.STALENESS_MEAN, 1.0, 0, 1), Point(g.STALENESS_MEAN, 2.0, 0, 2)],
        g.STALENESS_MAX: [Point(g.STALENESS_MAX, 5.0, 0, 1), Point(g.STALENESS_MAX, 3.0, 0, 2)],
    }
    assert figures_of(a_story(history=history), needs_lr=True) == Figures(None, None, 1.5, 5.0)


def test_of_several_learning_rates_one_must_be_named() -> None:
    story = a_story(params={"dense.lr": "0.02", "rows.lr": "0.1", "lr": "auto"})
    with pytest.raises(BadInput, match=r"several learning rates \(dense\.lr=0\.02, rows\.lr=0\.1\): give .* --lr"):
        figures_of(story, needs_lr=True)
    assert figures_of(story, needs_lr=False) == Figures()


def test_what_is_given_wins_over_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    history = {"curvature": [Point("curvature", 4.0, 0, 5)]}
    story = a_story(params={"lr": "9"}, history=history, events=finished({"0": 3, "8": 1}))
    monkeypatch.setattr(find_run, "read", lambda run, uri: story)
    assert cli.main(["advise", "run", "--lr", "0.01", "--staleness", "1", "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)
    assert advice["lr"] == 0.01
    assert advice["lr_limit"] == pytest.approx(1 / 4)  # limit(1) is 1
    assert advice["lr_limit_worst"] == advice["lr_limit"]
