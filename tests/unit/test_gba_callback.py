"""GBACallback: what it wishes for, when, and what an operator or a plan makes of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gba_hvd import BadInput, GBACallback

EVEN, SLOW = [0.1, 0.1, 0.1], [0.1, 0.1, 0.6]


def measured(callback: GBACallback, seconds: list[float], steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        callback.measured_allreduce(step, seconds, 2 * max(seconds) + 0.001, 6)


def test_a_straggler_makes_it_wish_for_gba_with_a_reason() -> None:
    callback = GBACallback(min_stay=0, patience=3)
    measured(callback, SLOW, 12)
    wish = callback.wish(12, "allreduce")
    assert wish is not None and wish[0] == "gba"
    assert "worker 2 takes 6.0x the median" in wish[1]


def test_equal_workers_leave_it_content() -> None:
    callback = GBACallback(min_stay=0, patience=3)
    measured(callback, EVEN, 30)
    assert callback.wish(30, "allreduce") is None


def test_times_from_before_a_switch_do_not_count() -> None:
    callback = GBACallback(min_stay=0, patience=1)
    measured(callback, SLOW, 12)
    callback.switched("allreduce", 12)
    assert callback.wish(13, "allreduce") is None


def test_a_fixed_mode_is_wished_for_until_it_is_on() -> None:
    callback = GBACallback(mode="async")
    wish = callback.wish(1, "allreduce")
    assert wish is not None and wish[0] == "async"
    assert callback.wish(1, "async") is None


def test_a_plan_is_followed_in_order_even_when_steps_are_skipped() -> None:
    callback = GBACallback(mode="allreduce", switch_at={10: "gba", 20: "allreduce"})
    assert callback.wish(9, "allreduce") is None
    wish = callback.wish(11, "allreduce")
    assert wish is not None and wish[0] == "gba"
    assert callback.wish(15, "gba") is None
    wish = callback.wish(25, "gba")
    assert wish is not None and wish[0] == "allreduce"


def test_an_operator_overrules_measurements_until_told_auto() -> None:
    callback = GBACallback(min_stay=0, patience=1)
    callback.pin("allreduce")
    measured(callback, SLOW, 12)
    assert callback.wish(12, "allreduce") is None
    callback.pin("auto")
    measured(callback, SLOW, 12, first=12)
    assert callback.wish(24, "allreduce") is not None


def test_a_learning_rate_that_staleness_makes_unstable_is_warned_of() -> None:
    callback = GBACallback(min_stay=0, patience=1, curvature=100.0)
    callback.lr = 1.0
    measured(callback, SLOW, 12)
    wish = callback.wish(12, "allreduce")
    assert wish is not None and "warning" in wish[1]


def test_its_stance_travels_with_the_state() -> None:
    callback = GBACallback(switch_at={5: "gba"}, mode="allreduce")
    callback.wish(5, "allreduce")
    other = GBACallback(switch_at={5: "gba"}, mode="allreduce")
    other.load_state_dict(callback.state_dict())
    assert other.mode == "gba" and other.wish(6, "gba") is None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mode": "gbaa"}, "did you mean 'gba'"),
        ({"staleness": "treshold"}, "threshold"),
        ({"switch_at": {3: "hopbs"}}, "hop_bs"),
        ({"servers_per_host": 0}, "at least 1"),
        ({"tolerance": -1}, "tolerance"),
    ],
)
def test_bad_settings_are_refused_at_once(settings: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        GBACallback(**settings)  # type: ignore[arg-type]


def test_a_rule_is_chosen_by_name_with_the_mode_and_told_to_all_workers() -> None:
    callback = GBACallback(mode="async", rule="dana_zero")
    assert callback.rule == "dana_zero"
    assert callback.describe()["rule"] == callback.agreed["rule"] == "dana_zero"
    assert GBACallback().rule == "none"


def test_the_staleness_called_gap_aware_is_the_rule() -> None:
    assert GBACallback(staleness="gap_aware").rule == "gap_aware"
    assert GBACallback(staleness="gap_aware", rule="staleness_lr").rule == "staleness_lr"


def test_a_misspelt_rule_is_refused() -> None:
    with pytest.raises(BadInput, match="did you mean 'dana_zero'"):
        GBACallback(mode="async", rule="dana_zer")


def test_a_rule_that_does_not_go_with_the_jobs_optimizer_is_refused_at_registration(
    training: Callable[..., Any],
) -> None:
    job = training(dense=lambda p: torch.optim.Adam(p, lr=0.1))
    with pytest.raises(BadInput, match=r"does not go with this optimizer.*SGD\(\.\.\., momentum=0\.9\)"):
        job.state.register_callbacks([GBACallback(mode="async", rule="dana_zero")])


def test_in_allreduce_mode_a_rule_changes_nothing(training: Callable[..., Any], clicks: Callable[..., Any]) -> None:
    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)

    plain, with_rule = training(dense=momentum), training(dense=momentum)
    with_rule.state.register_callbacks([GBACallback(mode="allreduce", rule="dana_zero")])
    for job in (plain, with_rule):
        job.epoch(clicks())
    for name, values in plain.all_dense().items():
        np.testing.assert_array_equal(with_rule.all_dense()[name], values)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "shadow", "sync": "eagsd"}, "did you mean 'easgd'"),
        ({"mode": "shaddow"}, "did you mean 'shadow'"),
        ({"mode": "shadow", "elasticity": 1.01}, "elasticity"),
        ({"mode": "ma", "every": 0}, "every"),
        ({"mode": "shadow", "mixing": "add"}, "mixing"),
    ],
)
def test_settings_of_replicas_that_make_no_sense_are_refused_at_once(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        GBACallback(**settings)


def test_shadow_runs_in_the_background_and_its_counterparts_every_k_steps() -> None:
    callback = GBACallback(mode="shadow", sync="bmuf", every=5, elasticity=0.25)
    shadow, foreground = callback.averaging("shadow"), callback.averaging("ma")
    assert (shadow.algorithm, shadow.every, shadow.elasticity) == ("bmuf", None, 0.25)
    assert (foreground.algorithm, foreground.every, foreground.elasticity) == ("ma", 5, 0.25)


def test_workers_whose_rounds_differ_do_not_describe_themselves_alike() -> None:
    assert GBACallback(sync="ma").describe() != GBACallback(sync="easgd").describe()
    assert GBACallback(every=5).rounds != GBACallback(every=6).rounds


@pytest.mark.parametrize("mode", ["shadow", "easgd", "ma", "bmuf"])
@pytest.mark.parametrize("asked", [{"rule": "dana_zero"}, {"staleness": "gap_aware"}])
def test_a_rule_that_a_job_of_replicas_would_never_use_is_refused(
    training: Callable[..., Any], mode: str, asked: dict[str, str]
) -> None:
    job = training(dense=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    with pytest.raises(BadInput, match=rf"mode '{mode}' uses no rule, got '(dana_zero|gap_aware)'.*Leave `rule` out"):
        job.state.register_callbacks([GBACallback(mode=mode, **asked)])  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="uses no rule"):
        GBACallback(mode=mode, switch_at={100: "allreduce", 200: "ma"}, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "auto"},
        {"mode": "allreduce"},
        {"mode": "allreduce", "switch_at": {100: "shadow"}},
        {"mode": "gba", "switch_at": {100: "shadow"}},
        {"mode": "shadow", "switch_at": {100: "gba"}},
        {"mode": "shadow", "switch_at": {100: "auto"}},
    ],
)
def test_a_job_that_may_come_to_a_mode_without_replicas_keeps_its_rule(settings: dict[str, Any]) -> None:
    assert GBACallback(rule="staleness_lr", **settings).rule == "staleness_lr"


def test_it_describes_itself_by_its_arguments_whatever_became_of_the_mode() -> None:
    callback = GBACallback(mode="allreduce", switch_at={100: "gba"}, sync="bmuf", every=5, tolerance=2, min_stay=7)
    before = callback.describe()
    asked = {"mode": "allreduce", "rule": "none", "switch_at": {"100": "gba"}, "sync": "bmuf", "every": 5}
    assert before.items() >= {**asked, "tolerance": 2, "min_stay": 7, "servers_per_host": 1}.items()
    arguments = set(inspect.signature(GBACallback).parameters)
    assert set(before) == arguments
    callback.pin("gba")
    assert callback.describe() == before


def test_a_mode_can_be_required_only_where_one_is_asked_for() -> None:
    for mode in ("auto", "allreduce"):
        with pytest.raises(BadInput, match=f"required=True is for a mode that is asked for.*mode '{mode}' is content"):
            GBACallback(mode=mode, required=True)
    assert GBACallback(mode="allreduce", switch_at={100: "gba"}, required=True).wait_s == 60
    assert GBACallback(mode="gba", required=True, wait_s=0).wait_s == 0
    with pytest.raises(BadInput, match="wait_s is a number of seconds, 0 or more, got -1"):
        GBACallback(wait_s=-1)


def test_training_waits_for_servers_at_most_once_in_vain() -> None:
    callback = GBACallback(mode="gba", wait_s=30)
    assert callback.waits and not GBACallback(mode="gba").waits
    callback.failed(step=10, why="no server")
    assert not callback.waits and callback.paused_until == 30
    assert callback.wish(29, "allreduce") is None and callback.wish(30, "allreduce") is not None
