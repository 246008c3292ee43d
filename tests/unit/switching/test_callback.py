"""GBACallback: what it wishes for, when, and what an operator or a plan makes of it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gba_hvd
from gba_hvd import BadInput, GBACallback
from gba_hvd.callbacks import Event
from gba_hvd.comm.world_formation import Forming
from gba_hvd.mode_names import BY_NAME, RECORDS, SERVER_MODES
from gba_hvd.ps.messages import JobPosition
from gba_hvd.switching import callback as callback_module
from gba_hvd.switching import enter_ps, requests
from gba_hvd.switching.decision_reports import DecisionReports
from gba_hvd.switching.measurements import N_NEWEST, N_RECENT, RecentTimes
from gba_hvd.switching.mode_limits import compression_idle, options_idle, row_average_idle, strict_idle
from gba_hvd.switching.policy import Decision
from gba_hvd.switching.predictions import Rates, expected_old_values
from gba_hvd.torch_optimizers import spec_of
from gba_hvd.tracking import gauges
from gba_hvd.tracking.gauges import mean_staleness
from gba_hvd.training.job_state import Progress
from gba_hvd.training.step_hooks import StepHooks
from gba_hvd.update_rules import RULES, stability
from gba_hvd.update_rules.delay_model import expected_ages
from recovery import CheckpointCallback
from tests.unit.thread_world import EventLog

EVEN, SLOW = [0.1, 0.1, 0.1], [0.1, 0.1, 0.6]


def measured(callback: GBACallback, seconds: list[float], steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        callback.measured_allreduce(step, seconds, 2 * max(seconds) + 0.001, 6)


def test_a_straggler_makes_it_ask_for_gba_with_a_reason() -> None:
    callback = GBACallback(min_stay=0, patience=3)
    measured(callback, SLOW, 12)
    request = callback.mode_request(12, "allreduce")
    assert request is not None and request[0] == "gba"
    assert "worker 2 takes 6.0x the median" in request[1]


def test_drops_are_expected_by_what_is_weighed() -> None:
    callback = GBACallback(min_stay=0, patience=1, tolerance=0, staleness_of="values")
    measured(callback, SLOW, 12)
    rates = Rates(tuple(SLOW), (2, 2, 2), 6, 0.001, callback_module._FIRST_SERVE_S)
    assert callback.last is not None
    assert f"with {expected_old_values(rates, 0):.1%} dropped as stale" in callback.last.reason


def test_equal_workers_leave_it_content() -> None:
    callback = GBACallback(min_stay=0, patience=3)
    measured(callback, EVEN, 30)
    assert callback.mode_request(30, "allreduce") is None


def test_times_from_before_a_switch_do_not_count() -> None:
    callback = GBACallback(min_stay=0, patience=1)
    measured(callback, SLOW, 12)
    callback.switched("allreduce", 12)
    assert callback.mode_request(13, "allreduce") is None


def test_a_fixed_mode_is_requested_until_it_is_on() -> None:
    callback = GBACallback(mode="async")
    request = callback.mode_request(1, "allreduce")
    assert request is not None and request[0] == "async"
    assert callback.mode_request(1, "async") is None


def test_a_plan_is_followed_in_order_even_when_steps_are_skipped() -> None:
    callback = GBACallback(mode="allreduce", switch_at={10: "gba", 20: "allreduce"})
    assert callback.mode_request(9, "allreduce") is None
    request = callback.mode_request(11, "allreduce")
    assert request is not None and request[0] == "gba"
    assert callback.mode_request(15, "gba") is None
    request = callback.mode_request(25, "gba")
    assert request is not None and request[0] == "allreduce"


def test_an_operator_overrules_measurements_until_auto_is_asked_for() -> None:
    callback = GBACallback(min_stay=0, patience=1)
    callback.pin("allreduce")
    measured(callback, SLOW, 12)
    assert callback.mode_request(12, "allreduce") is None
    callback.pin("auto")
    measured(callback, SLOW, 12, first=12)
    assert callback.mode_request(24, "allreduce") is not None


def test_a_learning_rate_that_staleness_makes_unstable_is_warned_of() -> None:
    callback = GBACallback(min_stay=0, patience=1, curvature=100.0)
    callback.lr = 1.0
    measured(callback, SLOW, 12)
    request = callback.mode_request(12, "allreduce")
    assert request is not None and "warning" in request[1]


def test_stability_is_worked_out_once_for_a_switch_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training stands still meanwhile, and a switch may wait for servers for many steps."""
    asked: list[Any] = []
    advise = stability.advise
    monkeypatch.setattr("gba_hvd.switching.callback.advise", lambda *a, **k: asked.append(a) or advise(*a, **k))
    callback = GBACallback(min_stay=0, patience=1, curvature=100.0)
    callback.lr = 1.0
    measured(callback, SLOW, 30)
    wish = callback.mode_request(30, "allreduce")
    assert wish is not None and "warning" in wish[1] and len(asked) == 1


def test_its_stance_travels_with_the_state() -> None:
    callback = GBACallback(switch_at={5: "gba"}, mode="allreduce")
    callback.mode_request(5, "allreduce")
    other = GBACallback(switch_at={5: "gba"}, mode="allreduce")
    other.load_state_dict(callback.state_dict())
    assert other.mode == "gba" and other.mode_request(6, "gba") is None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mode": "gbaa"}, "did you mean 'gba'. Choose one of allreduce, gba, .*, auto"),
        ({"mode": "sync"}, "did you mean 'allreduce'"),
        ({"mode": "SSP"}, "did you mean 'hop_bs'"),
        ({"rule": "dana"}, "did you mean 'dana_zero' or 'dana_slim' or 'dana_dc'. Choose one of none, "),
        ({"tolerance": -1}, "tolerance .the paper's iota. must be a number of steps"),
        ({"staleness": "treshold"}, "threshold"),
        ({"switch_at": {3: "hopbs"}}, "hop_bs"),
        ({"servers_per_host": 0}, "at least 1"),
        ({"wire": "ssh"}, "wire is one of 'curve', 'plain', 'tls', got 'ssh'"),
        ({"tolerance": -1}, "tolerance"),
    ],
)
def test_bad_settings_are_refused_at_once(settings: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        GBACallback(**settings)  # type: ignore[arg-type]


def test_a_rule_is_chosen_by_name_with_the_mode_and_sent_to_all_workers() -> None:
    callback = GBACallback(mode="async", rule="dana_zero")
    assert callback.rule == "dana_zero"
    assert callback.describe()["rule"] == callback.agreed["rule"] == "dana_zero"
    assert (callback.rule_in("async").reason, callback.rule_reason) == ("requested", "requested")
    assert callback.rule_in("shadow").rule == "none"


def spec(kind: Any, **settings: Any) -> dict[str, Any]:
    return spec_of(kind([torch.nn.Parameter(torch.zeros(2))], **{"lr": 0.1, **settings}))


@pytest.mark.parametrize(
    ("optimizer", "rule", "reason"),
    [
        (spec(torch.optim.SGD, momentum=0.9), "look_ahead", "an optimizer with momentum, here SGD"),
        (spec(torch.optim.Adam), "look_ahead", "the default of mode gba for an optimizer with momentum, here Adam"),
        (spec(torch.optim.AdamW), "look_ahead", "here AdamW"),
        (spec(torch.optim.SGD), "none", "the default for SGD here: look_ahead needs momentum in every group"),
        (spec(torch.optim.Adagrad), "none", "Adagrad here: look_ahead needs momentum"),
        (spec(torch.optim.SGD, momentum=0.9, nesterov=True), "none", "has a look-ahead of its own"),
        (spec(torch.optim.NAdam), "none", "NAdam here, which has a look-ahead of its own"),
        (None, "none", "an optimizer that no server can step"),
    ],
)
def test_without_a_rule_gba_looks_ahead_where_the_optimizer_has_momentum(
    optimizer: dict[str, Any] | None, rule: str, reason: str
) -> None:
    for settings in ({"mode": "gba"}, {"mode": "auto"}, {"mode": "allreduce", "switch_at": {5: "gba"}}):
        callback = GBACallback(**settings)
        if optimizer is not None:
            callback.check_fits(optimizer)
        assert (callback.rule, callback.describe()["rule"], callback.rule_in("gba").rule) == (rule, rule, rule)
        assert reason in callback.rule_reason
        assert not callback.has_rule and callback.agreed["rule"] == "none"
        assert callback.rule_settings == {}


@pytest.mark.parametrize(
    ("settings", "mode", "reason"),
    [
        ({"mode": "async"}, "async", "the default of mode async"),
        ({"mode": "bsp"}, "bsp", "the default of mode bsp"),
        ({"mode": "gba", "lookahead": 0}, "gba", "in lock-step, where no gradient comes late"),
        ({"mode": "shadow"}, "shadow", "no dense gradient comes late; those of rows do"),
        ({"mode": "gba", "rule": "none"}, "gba", "requested"),
        ({"mode": "auto", "rule": "none"}, "gba", "requested"),
    ],
)
def test_elsewhere_or_turned_off_the_optimizer_steps_alone(settings: dict[str, Any], mode: str, reason: str) -> None:
    callback = GBACallback(**settings)
    callback.check_fits(spec(torch.optim.Adam))
    assert callback.rule == callback.rule_in(mode).rule == "none"
    assert reason in callback.rule_reason and reason in callback.rule_in(mode).reason


def test_the_default_goes_by_the_mode_that_is_entered() -> None:
    callback = GBACallback(mode="async", switch_at={10: "gba"})
    callback.check_fits(spec(torch.optim.Adam))
    assert (callback.rule, callback.rule_in("gba").rule, callback.rule_in("async").rule) == (
        "look_ahead", "look_ahead", "none",
    )  # fmt: skip


def test_a_job_with_an_optimizer_that_no_server_can_step_may_have_a_callback(training: Callable[..., Any]) -> None:
    class Own(torch.optim.Adam):
        pass

    job = training(dense=lambda p: Own(p, lr=0.1))
    job.state.register_callbacks([callback := GBACallback(mode="allreduce")])
    assert (callback.rule, "no server can step" in callback.rule_reason) == ("none", True)
    other = training(dense=lambda p: Own(p, lr=0.1))
    with pytest.raises(BadInput, match="register_optimizer"):
        other.state.register_callbacks([GBACallback(mode="gba", rule="gap_aware")])


@pytest.mark.slow
def test_the_limit_that_a_switch_is_warned_of_goes_by_the_rule() -> None:
    reasons = []
    for rule in ("none", None):
        callback = GBACallback(min_stay=0, patience=1, curvature=10.0, rule=rule)
        callback.check_fits(spec(torch.optim.SGD, momentum=0.9))
        callback.lr = 0.1
        measured(callback, SLOW, 12)
        request = callback.mode_request(12, "allreduce")
        assert request is not None and request[0] == "gba"
        reasons.append(request[1])
    assert "warning: unstable" in reasons[0] and "momentum 0.9" in reasons[0]
    assert "warning" not in reasons[1]


@pytest.mark.slow
def test_of_adam_the_warning_goes_by_its_first_moment_and_the_look_ahead() -> None:
    """The equation has the momentum that the rule looks ahead with; Adam's steps are 1 - beta of plain momentum's."""
    limits = {}
    for rule in ("none", None):
        for lr in np.geomspace(0.01, 10, 40):
            callback = GBACallback(curvature=10.0, rule=rule)
            callback.check_fits(spec(torch.optim.Adam))
            callback.lr = float(lr)
            if said := callback._warning(Rates(tuple(SLOW), (2, 2, 2), 6, 0.001, 0.003), "gba"):
                limits[rule] = lr
                assert "momentum 0.9, dampening 0.9" in said
                break
    assert limits[None] > 2 * limits["none"]


def test_the_staleness_called_gap_aware_is_the_rule() -> None:
    assert GBACallback(staleness="gap_aware").rule == "gap_aware"
    assert GBACallback(staleness="gap_aware", rule="gap_aware").rule == "gap_aware"


def test_a_staleness_that_another_rule_would_make_void_is_refused() -> None:
    with pytest.raises(BadInput, match="a job has one rule, got rule='staleness_lr'"):
        GBACallback(staleness="gap_aware", rule="staleness_lr")


def test_settings_of_a_rule_are_described_and_agreed_on() -> None:
    callback = GBACallback(mode="async", rule="dc", rule_settings={"lambda": 0.5, "adaptive": False})
    assert callback.rule_settings == {"lambda": 0.5, "adaptive": False}
    assert callback.describe()["rule_settings"] == callback.rule_settings
    assert callback.agreed["rule_settings.lambda"] == 0.5


def modes_with(option: str) -> str:
    """How a refusal of the option ends, by the records."""
    names = [mode.name for mode in RECORDS if option in mode.options]
    return f"is of mode{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"rule": "dana_zero", "rule_settings": {"lambda": 1.0}},
            "no setting 'lambda': only dc, dana_dc, look_ahead do",
        ),
        ({"rule_settings": {"lambda": 1.0}}, "are of a rule that is named"),
        ({"rule": "none", "rule_settings": {"lambda": 1.0}}, "rule 'none' has no setting 'lambda'"),
        ({"rule": "none", "staleness": "gap_aware"}, "a job has one rule, got rule='none'"),
        ({"rule": "dc", "rule_settings": {"lamda": 1.0}}, "it takes lambda, adaptive, mean_square_decay"),
        ({"rule": "dc", "rule_settings": {"lambda": 0.0}}, "with 0 the rule has no effect"),
        ({"rule": "dc", "rule_settings": {"lambda": "2"}}, "lambda is a number"),
        ({"rule": "dana_dc", "rule_settings": {"adaptive": 1}}, "adaptive is a bool"),
        ({"rule": "dana_dc", "rule_settings": {"to_look_ahead": 1.0}}, "to_look_ahead is a bool"),
        ({"rule": "dc", "rule_settings": {"to_look_ahead": True}}, "no setting 'to_look_ahead'"),
        ({"rule": "dc", "rule_settings": {"mean_square_decay": 1.0}}, "from 0 and below 1"),
        ({"rule": "dc", "rule_settings": {"adaptive": False, "mean_square_decay": 0.9}}, "no effect with a constant"),
        ({"rule": "dc", "mode": "gba", "lookahead": 0}, "in lock-step no gradient comes late"),
        ({"rule": "dc", "mode": "shadow"}, "uses no rule"),
        ({"rule": "look_ahead", "rule_settings": {"steps": 0.0}}, "steps is a number above 0"),
        ({"rule": "look_ahead", "mode": "gba", "lookahead": 0}, "in lock-step no gradient comes late"),
        (
            {"staleness_of": "values"},
            f"staleness_of='values' has no effect in mode 'async': it {modes_with('staleness_of')}",
        ),
        ({"staleness_of": "values", "mode": "gba", "lookahead": 0}, "in lock-step no values are old"),
        ({"warm_up_steps": 5}, "is of mode 'auto'"),
        ({"rule": "gap_aware", "mode": "gba", "lookahead": 0}, "in lock-step no gradient comes late"),
        ({"staleness": "gap_aware", "mode": "gba", "lookahead": 0}, "in lock-step no gradient comes late"),
        ({"rule": "staleness_lr", "mode": "bsp", "lookahead": 0}, "in lock-step no gradient comes late"),
        (
            {"mode": "gba", "backups": 2},
            f"backups=2 has no effect in mode 'gba': it {modes_with('backups')}. Leave backups out",
        ),
        ({"mode": "gba", "slack": 3}, modes_with("slack")),
        ({"lookahead": 3}, f"lookahead=3 has no effect in mode 'async': it {modes_with('lookahead')}"),
        ({"mode": "gba", "tolerance": 2, "staleness": "inverse"}, "staleness='inverse' has no limit in steps"),
        ({"mode": "auto", "tolerance": 2, "staleness": "none"}, "'threshold' and 'linear' have"),
        ({"mode": "allreduce", "tolerance": 2, "staleness": "none"}, "'threshold' and 'linear' have"),
        ({"staleness": "linear"}, modes_with("staleness")),
        ({"mode": "bsp", "tolerance": 2}, modes_with("tolerance")),
        ({"mode": "gba", "enter_gain": 1.2}, "enter_gain=1.2 has no effect in mode 'gba': it is of mode 'auto'"),
        ({"mode": "allreduce", "switch_at": {9: "gba"}, "patience": 2}, "is of mode 'auto'"),
        ({"mode": "shadow", "min_stay": 2}, "is of mode 'auto'"),
        ({"mode": "gba", "every": 5}, modes_with("every")),
        ({"mode": "gba", "elasticity": 0.5}, modes_with("elasticity")),
        ({"mode": "auto", "mixing": "difference"}, modes_with("mixing")),
        ({"mode": "easgd", "block_rate": 0.8}, "it is of mode 'bmuf', and of 'shadow' with sync='bmuf'"),
        ({"mode": "shadow", "block_rate": 0.8}, "it is of mode 'bmuf', and of 'shadow' with sync='bmuf'"),
        ({"mode": "easgd", "pause_s": 0.5}, modes_with("pause_s")),
        ({"mode": "easgd", "sync": "ma"}, modes_with("sync")),
        ({"mode": "shadow", "every": 5}, modes_with("every")),
        ({"mode": "shadow", "sync": "none", "elasticity": 0.2}, "with sync='none' there are no rounds"),
        ({"mode": "ma", "curvature": 2.0}, modes_with("curvature")),
        ({"mode": "allreduce", "switch_at": {9: "hop_bs"}, "backups": 2}, "in mode 'allreduce', 'hop_bs'"),
    ],
)
def test_a_setting_that_would_have_no_effect_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        GBACallback(**{"mode": "async", **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "allreduce", "tolerance": 2, "every": 5, "slack": 1},  # for what an operator requests
        {"mode": "allreduce", "patience": 3, "min_stay": 9},  # the same, for "auto"
        {"mode": "gba", "switch_at": {9: "hop_bw"}, "tolerance": 2, "backups": 2},
        {"mode": "gba", "switch_at": {9: "auto"}, "enter_gain": 1.2},
        {"mode": "shadow", "sync": "bmuf", "block_rate": 0.8, "pause_s": 0.5, "elasticity": 0.3},
        {"mode": "bmuf", "block_rate": 0.8, "every": 5, "mixing": "difference"},
        {"mode": "hop_bs", "slack": 3, "curvature": 2.0},
        {"mode": "bsp", "lookahead": 3},
        {"mode": "gba", "staleness": "linear", "tolerance": 2, "lookahead": 1},
    ],
    ids=str,
)
def test_an_option_that_some_mode_of_the_job_uses_is_taken(settings: dict[str, Any]) -> None:
    GBACallback(**settings)


_OF_GBA = {"staleness", "tolerance", "staleness_of", "lookahead", "curvature"}
_OF_ROUNDS = {"sync", "elasticity", "mixing", "every", "pause_s", "block_rate"}
_OF_BACKUPS = {"slack", "backups"}


@pytest.mark.parametrize(
    ("settings", "used"),
    [
        ({"mode": "allreduce"}, set()),
        ({"mode": "gba"}, {"rule", "rule_reason", "wire", *_OF_GBA}),
        ({"mode": "gba", "staleness": "none"}, {"rule", "wire", *_OF_GBA} - {"tolerance"}),
        ({"mode": "ma"}, {"rule", "wire", "every", "elasticity", "mixing"}),
        ({"mode": "allreduce", "switch_at": {9: "hop_bs"}}, {"rule", "wire", "slack", "curvature"}),
        ({"mode": "auto"}, {"rule", "wire", "enter_gain", "min_stay", *_OF_GBA}),
    ],
    ids=lambda one: str(one) if isinstance(one, dict) else "",  # a set is in another order in each process
)
def test_settings_that_no_mode_of_the_job_uses_are_known(settings: dict[str, Any], used: set[str]) -> None:
    of_modes = {*_OF_GBA, *_OF_ROUNDS, *_OF_BACKUPS, "rule", "wire", "enter_gain", "min_stay"}
    callback = GBACallback(**settings)
    assert (of_modes | used) - callback.idle_settings == used
    assert not callback.idle_settings & {"mode", "switch_at"}
    assert callback.idle_settings <= {*callback.describe(), "rule_reason"}


def test_a_mode_that_an_operator_requests_has_settings_that_were_of_no_use_before() -> None:
    callback = GBACallback(mode="allreduce", tolerance=2)
    callback.pin("gba")
    first_used = set(callback.settings_first_used_in("gba"))
    assert first_used >= {"rule", "rule_settings", "wire", *_OF_GBA} and "enter_gain" not in first_used
    callback.pin("auto")
    assert {"enter_gain", *_OF_GBA} <= set(callback.settings_first_used_in("gba"))
    assert GBACallback(mode="gba").settings_first_used_in("gba") == []
    assert GBACallback(mode="gba").settings_first_used_in("bsp") == []
    assert GBACallback(mode="gba").settings_first_used_in("hop_bs") == ["slack"]


def test_what_an_operators_mode_does_not_use_is_said_when_it_is_entered() -> None:
    callback = GBACallback(mode="gba", tolerance=2, lookahead=3)
    assert options_idle(callback, "gba", 9) is None
    event = options_idle(callback, "bsp", 9)
    assert event is not None and (event.kind, event.level) == ("options_idle", "warning")
    assert event.data == {"mode": "bsp", "options": ["tolerance"]}
    assert f"tolerance (it {modes_with('tolerance')})" in event.message
    planned = GBACallback(mode="gba", switch_at={9: "bsp"}, tolerance=2)
    planned.pin("gba")
    assert options_idle(planned, "bsp", 9) is None
    assert options_idle(GBACallback(tolerance=2), "gba", 9) is None


def test_what_is_without_effect_is_said_once_for_each_mode_that_is_entered(training: Callable[..., Any]) -> None:
    job, log = training(row_average="contributors", compression=gba_hvd.Compression.fp16), EventLog()
    callback = GBACallback(mode="allreduce", tolerance=3, every=7)
    job.state.register_callbacks([log, callback])
    for mode in ("ma", "hop_bs", "bsp", "ma"):
        enter_ps._report_what_is_idle(job.state.engine, callback, mode, n_hosts=1)
    said = [(event.kind, event.data["mode"]) for event in log.events if event.kind.endswith("_idle")]
    assert [mode for kind, mode in said if kind == "options_idle"] == ["ma", "hop_bs", "bsp"]
    assert [mode for kind, mode in said if kind == "row_average_idle"] == ["ma", "hop_bs"]
    assert [mode for kind, mode in said if kind == "compression_idle"] == ["ma", "hop_bs", "bsp"]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "n_pushes"), [("gba", 6), ("async", 1), ("hop_bw", 2), ("ma", None)])
def test_a_rate_that_is_unstable_in_a_mode_is_said_once_when_the_speeds_are_known(
    mode: str, n_pushes: int | None
) -> None:
    """Also where the mode is fixed, planned or an operator's."""
    callback = GBACallback(mode="allreduce", switch_at={5: "gba", 7: "ma"}, curvature=100.0, rule="none")
    callback.check_fits(spec(torch.optim.SGD, momentum=0.9))
    callback.switched(mode, 5)
    events: list[Event] = []
    model = SimpleNamespace(dense_lrs=[0.1], global_batch=96, micro_batch=16)
    engine: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0, size=3), model=model, progress=SimpleNamespace(step=7), emit=events.append
    )
    servers: Any = SimpleNamespace(name=mode, position=JobPosition(rates=[(0, 0.1), (1, 0.1), (2, 0.0)]))
    participant = requests.ModeRequests(engine, callback)
    participant._report_unstable_rate(servers, 0.003)
    assert events == [], "the third worker has computed nothing yet"
    servers.position.rates[2] = (2, 0.6)
    for _ in range(2):
        participant._report_unstable_rate(servers, 0.003)
    assert [event.kind for event in events] == ([] if n_pushes is None else ["rate_unstable"])
    for event in events:
        assert event.message.startswith(f"mode {mode}, with the workers' speeds in it: unstable: learning rate 0.1")
        mean = mean_staleness(expected_ages([0.103, 0.103, 0.603], n_pushes or 1))
        said = re.search(r"for dense values (\S+) steps", event.message)
        assert said is not None and float(said[1]) == pytest.approx(mean, rel=0.1)
    callback.switched("allreduce", 9)
    callback.switched(mode, 12)
    participant._report_unstable_rate(servers, 0.003)
    assert len(events) == (0 if n_pushes is None else 2)


def test_a_misspelt_rule_is_refused() -> None:
    with pytest.raises(BadInput, match="did you mean 'dana_zero'"):
        GBACallback(mode="async", rule="dana_zer")


def test_a_rule_that_does_not_go_with_the_jobs_optimizer_is_refused_at_registration(
    training: Callable[..., Any],
) -> None:
    job = training(dense=lambda p: torch.optim.Adam(p, lr=0.1))
    with pytest.raises(BadInput, match=r"does not go with this optimizer.*SGD\(\.\.\., momentum=0\.9\)"):
        job.state.register_callbacks([GBACallback(mode="async", rule="dana_zero")])


@pytest.mark.parametrize(("optimizer", "is_named"), [(torch.optim.AdamW, True), (torch.optim.Adagrad, False)])
def test_of_the_rules_that_fit_the_default_one_is_named_where_it_does(
    optimizer: type[torch.optim.Optimizer], is_named: bool
) -> None:
    spec = spec_of(optimizer([torch.nn.Parameter(torch.zeros(1))], lr=0.1))  # type: ignore[call-arg]
    with pytest.raises(BadInput, match="gap_aware, dc and staleness_lr take any") as refusal:
        GBACallback(mode="gba", rule="dana_zero").check_fits(spec)
    assert ("look_ahead, the default of mode gba, takes this one" in str(refusal.value)) == is_named


def without_dense(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    for parameter in parameters:
        parameter.requires_grad_(False)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "none"])
def test_a_rule_for_a_model_without_dense_parameters_is_refused(training: Callable[..., Any], rule: str) -> None:
    job = training(dense=without_dense)
    with pytest.raises(BadInput, match=rf"rule '{rule}' would correct nothing in mode 'gba': .*no\s+dense parameter"):
        job.state.register_callbacks([GBACallback(mode="gba", rule=rule)])


def test_staleness_that_goes_by_dense_values_is_refused_without_any(training: Callable[..., Any]) -> None:
    with pytest.raises(BadInput, match="rule 'gap_aware' would correct nothing"):
        training(dense=without_dense).state.register_callbacks([GBACallback(staleness="gap_aware")])
    with pytest.raises(BadInput, match=r"staleness_of='values' goes by the age of dense values.*staleness_of='token'"):
        training(dense=without_dense).state.register_callbacks([GBACallback(mode="gba", staleness_of="values")])
    training(dense=without_dense).state.register_callbacks([GBACallback(mode="gba", staleness="inverse")])


@pytest.mark.parametrize("mode", SERVER_MODES)
def test_an_average_of_rows_is_reported_where_a_step_is_one_push(mode: str) -> None:
    assert row_average_idle(mode, "global", 3) is None
    event = row_average_idle(mode, "contributors", 3)
    if BY_NAME[mode].step_of != "push":
        assert event is None
        return
    assert event is not None and (event.kind, event.level, event.step) == ("row_average_idle", "warning", 3)
    assert f"row_average='contributors' has no effect in mode '{mode}'" in event.message
    assert "leave row_average out" in event.message
    counts_in = [record.name for record in RECORDS if record.step_of != "push"]
    assert all(repr(name) in event.message.partition("It counts in")[2] for name in counts_in)


@pytest.mark.slow
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
    callback = GBACallback(mode="shadow", switch_at={9: "ma"}, sync="bmuf", every=5, elasticity=0.25)
    shadow, foreground = callback.averaging("shadow"), callback.averaging("ma")
    assert (shadow.algorithm, shadow.every, shadow.elasticity) == ("bmuf", None, 0.25)
    assert (foreground.algorithm, foreground.every, foreground.elasticity) == ("ma", 5, 0.25)


def test_averaging_in_the_foreground_is_plain_unless_an_elasticity_is_asked_for() -> None:
    modes = ("shadow", "easgd", "ma", "bmuf")
    shares = [GBACallback(mode="shadow", sync="ma").averaging(mode).elasticity for mode in modes]
    assert shares == [0.5, 0.5, 1.0, 1.0]
    asked = GBACallback(mode="ma", elasticity=0.5)
    assert {asked.averaging(mode).elasticity for mode in modes} == {0.5}
    assert asked.rounds != GBACallback(mode="ma").rounds, "such workers must not form one world"
    assert [GBACallback(mode=mode).describe()["elasticity"] for mode in ("shadow", "ma")] == [0.5, 1.0]


def test_workers_whose_rounds_differ_do_not_describe_themselves_alike() -> None:
    assert GBACallback("shadow", sync="ma").describe() != GBACallback("shadow", sync="easgd").describe()
    assert GBACallback("ma", every=5).rounds != GBACallback("ma", every=6).rounds


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
    at = {100: "auto", 200: "shadow", 300: "ma"}
    callback = GBACallback(mode="allreduce", switch_at=at, sync="bmuf", every=5, tolerance=2, min_stay=7)
    before = callback.describe()
    asked = {"mode": "allreduce", "rule": "none", "sync": "bmuf", "every": 5}
    assert before.items() >= {**asked, "tolerance": 2, "min_stay": 7, "servers_per_host": 1}.items()
    assert before["switch_at"] == {str(step): mode for step, mode in at.items()}
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
    assert callback.mode_request(29, "allreduce") is None and callback.mode_request(30, "allreduce") is not None


def test_tries_grow_rarer_until_a_mode_has_lasted() -> None:
    callback, pauses, step = GBACallback(mode="gba"), [], 0
    for lasts in (0, 5, 19, 20, 0):
        callback.switched("gba", step)
        step += lasts
        callback.on_step(SimpleNamespace(step=step, mode="gba"))  # type: ignore[arg-type]
        callback.failed(step, "no room")
        pauses.append(callback.paused_until - step)
        step = callback.paused_until
        callback.on_step(SimpleNamespace(step=step, mode="allreduce"))  # type: ignore[arg-type]
    assert pauses == [20, 40, 80, 20, 40]
    assert callback.mode_request(step - 1, "allreduce") is None and callback.mode_request(step, "allreduce")


def test_each_decision_says_of_what_kind_its_reason_is() -> None:
    callback, kinds = GBACallback(min_stay=14, patience=3, warm_up_steps=18), []
    for step in range(20):
        measured(callback, EVEN if step < 2 else SLOW, 1, step)
        assert callback.last is not None
        kinds.append(callback.last.kind)
    assert kinds == sorted(kinds, key=["gain", "patience", "min_stay", "warm_up", "switch"].index)
    assert len(set(kinds)) == 5
    assert callback.last.is_switch and callback.last.gain > 1.05


def test_a_job_in_auto_that_never_switched_knows_why() -> None:
    callback = GBACallback(min_stay=0, patience=3)
    assert callback.why_never_switched() == "no decision was made, since the speed of every worker is measured first"
    measured(callback, EVEN, 12)
    assert re.fullmatch(r"gba predicted 0\.\d+x as fast, enter at [\d.]+x", callback.why_never_switched())
    measured(callback, SLOW, 12, 12)
    assert callback.why_never_switched().startswith("the last decision was not carried out before the end: to gba: ")
    assert callback.why_never_switched().endswith("; not carried out: the job ended first")
    assert callback.why_never_switched("the servers were not up").endswith("; not carried out: the servers were not up")
    callback.failed(23, "no room")
    tried = "; not carried out: it was tried before (no room), and again from step 43 on"
    assert callback.why_never_switched("the servers were not up").endswith(tried)
    callback.switched("gba", 24)
    assert callback.why_never_switched() == ""
    assert GBACallback(mode="gba").why_never_switched() == ""


def test_the_chief_reports_the_predicted_gain_and_decisions_that_are_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_RATES_EVERY_S", 0.0)
    events: list[Event] = []
    progress = Progress(None, StepHooks())
    engine: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0),
        model=SimpleNamespace(together=1, micro_batch=4),
        progress=progress,
        elp=12,
        emit=events.append,
    )
    participant = requests.ModeRequests(engine, GBACallback(patience=3, min_stay=9))
    for progress.step in range(1, 16):
        participant.after_step(SLOW, 1.3, 6, 1)
    decided = [event for event in events if event.kind == "decision"]
    assert [(event.data["mode"], event.data["kind"]) for event in decided] == [
        ("allreduce", "min_stay"), ("gba", "switch")
    ]  # fmt: skip
    assert decided[0].message.startswith("stay in allreduce: worker 2 takes 6.0x the median")
    gain = decided[-1].data["gain"]
    assert gain > 2
    read = gauges.Readings().take([event for event in events if event.kind == "rates"][-1].data)
    assert read[gauges.GAIN] == pytest.approx(gain, abs=1e-3)
    assert read["job/allreduce_samples_per_s"] == pytest.approx(4 * 6 / 1.3, abs=0.1), "as achieved"
    assert read["job/gba_samples_per_s"] == pytest.approx(gain * 4 * 6 / 1.3, rel=1e-2)
    assert decided[-1].data["gba_samples_per_s"] == read["job/gba_samples_per_s"]
    engine.world.rank, progress.step, n = 1, 16, len(events)
    participant.after_step(SLOW, 1.3, 6, 1)
    assert len(events) == n and participant.callback.decided_at_step == 15, "another worker decides nothing"


def test_a_decision_is_reported_when_its_kind_is_another_one_and_has_lasted() -> None:
    reports = DecisionReports(patience=3)
    taken = []
    for kind in (*["gain"] * 4, "patience", "patience", *["gain"] * 4, *["min_stay"] * 5, "switch", "switch"):
        reports.add(Decision("gba" if kind == "switch" else "allreduce", kind, 1.2, 5.0, 6.0, kind))
        taken.append(decision.kind if (decision := reports.take(stays_too=True)) is not None else "")
    assert taken == ["", "", "gain", *[""] * 9, "min_stay", "", "", "switch", ""]
    reports.add(Decision("gba", "fast", 1.2, 5.0, 6.0, "gain"))
    assert reports.take(stays_too=True) is None  # not for long enough
    for _ in range(2):
        reports.add(Decision("gba", "fast", 1.2, 5.0, 6.0, "gain"))
    assert reports.take(stays_too=False) is None  # not now
    assert reports.take(stays_too=True) == Decision("gba", "fast", 1.2, 5.0, 6.0, "gain")


# --- what mode auto remembers ----------------------------------------------------------------------------------------


def in_gba(callback: GBACallback, seconds: list[float], steps: int, first: int, per_step_s: float) -> None:
    for step in range(first, first + steps):
        callback.measured_async(step, seconds, 6, 0.003, n_pushed=6, elapsed_s=per_step_s)


@pytest.mark.slow
def test_a_switch_that_does_not_pay_is_undone_and_remembered_through_a_restart() -> None:
    callback = GBACallback()
    for step in range(1, 100):
        callback.measured_allreduce(step, EVEN, 0.26, 6)
    request = callback.mode_request(99, "allreduce")
    assert request is not None and request[0] == "gba"
    callback.switched("gba", 100)
    in_gba(callback, EVEN, 60, 101, per_step_s=0.4)  # as fast as before by its workers' times, and not by its pushes
    request = callback.mode_request(160, "gba")
    assert request is not None and request[0] == "allreduce"
    assert "gba was promised 1.26x, and is 0.65x" in request[1]
    callback.switched("allreduce", 161)
    successor = GBACallback()
    successor.load_state_dict(callback.state_dict())
    for step in range(162, 400):
        successor.measured_allreduce(step, EVEN, 0.26, 6)
    assert successor.mode_request(400, "allreduce") is None
    assert successor.last is not None and "gba was 0.5" in successor.last.reason
    successor.members_changed()
    for step in range(400, 500):
        successor.measured_allreduce(step, [0.1, 0.1], 0.36, 6)
    assert successor.last.allreduce == pytest.approx(6 / 0.36), "times of those that left are gone"


@pytest.mark.slow
def test_gba_stays_while_the_launcher_replaces_a_lost_worker() -> None:
    callback = GBACallback(trial_budget=0.0)
    for step in range(1, 100):
        callback.measured_allreduce(step, [0.05, 0.3], 1.0, 6)
    request = callback.mode_request(99, "allreduce")
    assert request is not None and request[0] == "gba"
    callback.switched("gba", 100)
    callback.workers_train(2, False, 0.0)
    in_gba(callback, [0.05, 0.3], 20, 101, per_step_s=0.3)
    callback.workers_train(1, True, 20.0)
    callback.members_changed()
    in_gba(callback, [0.05], 60, 121, per_step_s=0.5)
    assert callback.mode_request(180, "gba") is None
    assert callback.last is not None and callback.last.kind == "awaited"
    callback.workers_train(1, False, 1000.0)  # it did not come
    in_gba(callback, [0.05], 60, 181, per_step_s=0.5)
    request = callback.mode_request(240, "gba")
    assert request is not None and request[0] == "allreduce" and "promised" not in request[1]


def test_a_mode_that_auto_does_not_measure_is_not_left_while_a_lost_worker_may_come_back() -> None:
    callback = GBACallback("async")
    callback.workers_train(2, False, 0.0)
    callback.pin("auto")
    callback.workers_train(1, True, 20.0)
    assert callback.mode_request(10, "async") is None
    callback.workers_train(2, False, 30.0)
    assert callback.mode_request(11, "async") == ("allreduce", "auto was asked for: it measures allreduce first")


def test_rates_over_all_steps_since_a_switch_are_worked_out_only_while_they_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callback, last = GBACallback(), list[int]()
    for step in range(1, 100):
        callback.measured_allreduce(step, EVEN, 0.26, 6)
    callback.switched("gba", 100)
    times = RecentTimes.times
    monkeypatch.setattr(RecentTimes, "times", lambda own, n=N_RECENT: last.append(n) or times(own, n))
    in_gba(callback, EVEN, N_RECENT, 101, per_step_s=0.2)
    assert N_RECENT in last
    last.clear()
    in_gba(callback, EVEN, 20, 101 + N_RECENT, per_step_s=0.2)
    assert set(last) == {N_NEWEST}


def test_a_state_of_an_older_version_is_read() -> None:
    callback = GBACallback()
    state = callback.state_dict()
    state["stance"] = {"mode": "allreduce", "since_step": 3, "in_favour": 1}
    del state["trained_s"]
    callback.load_state_dict(state)
    measured(callback, SLOW, 40)
    assert callback.mode_request(40, "allreduce") is not None


class GbaChief:
    """The chief's ModeRequests in gba, on a clock of its own; two workers push four micro-batches in each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(requests.time, "perf_counter", lambda: self.now_s)
        self.progress, self.callback = Progress(None, StepHooks()), GBACallback()
        engine: Any = SimpleNamespace(
            world=SimpleNamespace(rank=0, size=2), progress=self.progress, elp=12, emit=lambda event: None,
            model=SimpleNamespace(together=1, micro_batch=4, global_batch=16, dense_lrs=[0.1]),
            forming=Forming(),
        )  # fmt: skip
        self.engine, self.requests = engine, requests.ModeRequests(engine, self.callback)
        self.requests.mode_entered()

    def step(self, seconds: float) -> None:
        self.now_s += seconds
        self.progress.step += 1
        step = self.progress.step
        newest = [(0, 7, 3 * step, 0.1), (1, 9, step, 0.3)]
        position = JobPosition(step=step, rates=[(0, 0.2), (1, 0.2)], newest=newest)
        self.contact = SimpleNamespace(report={})
        servers: Any = SimpleNamespace(
            name="gba", position=position, contact=self.contact, drain_metrics=lambda: ({}, [])
        )
        self.requests.before_micro_batch(servers, 0.004)


def test_the_chief_measures_in_gba_what_all_workers_have_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    chief = GbaChief(monkeypatch)
    for _ in range(11):
        chief.step(0.5)
    assert chief.callback.state_dict()["trained_s"] == pytest.approx(10 * 0.5)
    last = chief.callback.last
    assert last is not None
    shown = {"setting": "auto", "last_decision": last.reason, "decided_at_step": chief.progress.step}
    assert chief.contact.report == shown, "for people, with heartbeats"
    chief.engine.world.rank = 1
    assert chief.requests.for_people() == {"setting": "auto", "decided_elsewhere": True}, "its callback decides nothing"
    assert last.gba == pytest.approx(4 / 0.5), "four in each step after the first look"
    allreduce = 4 / (2 * 0.3)
    assert last.allreduce == pytest.approx(allreduce, rel=0.01), "by the newest times, not by their means"


def test_an_evaluation_is_no_time_in_gba(monkeypatch: pytest.MonkeyPatch) -> None:
    chief = GbaChief(monkeypatch)
    for step in range(30):
        if step % 3 == 2:
            chief.now_s += 60.0
            chief.requests.paused()
        chief.step(0.5)
    last = chief.callback.last
    assert last is not None and last.gba == pytest.approx(4 / 0.5)
    assert chief.callback.state_dict()["trained_s"] == pytest.approx(19 * 0.5)


def test_the_wire_is_among_the_settings_and_agreed_on_where_it_is_not_the_default() -> None:
    curve, plain = GBACallback(mode="gba"), GBACallback(mode="gba", wire="plain")
    assert (curve.describe()["wire"], plain.describe()["wire"]) == ("curve", "plain")
    assert (curve.agreed.get("wire"), plain.agreed["wire"]) == (None, "plain")


def test_compression_in_a_job_of_replicas_only_is_refused(training: Callable[..., Any]) -> None:
    job = training(compression=gba_hvd.Compression.dct(keep=0.1))
    with pytest.raises(BadInput, match=r"compression=dct\(.*is for dense gradients that are sent.*'shadow' only"):
        job.state.register_callbacks([GBACallback("shadow")])
    job = training(compression=gba_hvd.Compression.dct(keep=0.1))
    job.state.register_callbacks([GBACallback("shadow", switch_at={9: "gba"})])


@pytest.mark.parametrize(("mode", "hosts", "is_idle"), [("gba", 1, True), ("gba", 2, False), ("ma", 2, True)])
def test_compression_without_effect_in_the_mode_that_is_entered_is_reported(
    training: Callable[..., Any], mode: str, hosts: int, is_idle: bool
) -> None:
    engine = training(compression=gba_hvd.Compression.fp16).state.engine
    event = compression_idle(engine, mode, hosts)
    assert (event is not None) == is_idle and compression_idle(training().state.engine, mode, hosts) is None
    if event is not None:
        assert (event.kind, event.level) == ("compression_idle", "warning")
        assert f"compression=fp16 has no effect in mode '{mode}' on" in event.message and "eave it out" in event.message


def test_strict_checkpoints_in_an_asynchronous_mode_are_reported(training: Callable[..., Any], tmp_path: Path) -> None:
    for strict in (True, False):
        job = training()
        job.state.register_callbacks([CheckpointCallback(str(tmp_path), strict=strict)])
        event = strict_idle(job.state.engine, "gba")
        assert (event is not None) == strict
        assert event is None or "CheckpointCallback(strict=True) has no effect in mode 'gba'" in event.message
