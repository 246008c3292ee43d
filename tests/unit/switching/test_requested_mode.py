"""What the end of a job says of a mode that it was asked to be in."""

from __future__ import annotations

from gba_hvd.callbacks import Event
from gba_hvd.switching.callback import GBACallback
from gba_hvd.switching.requested_mode import SERVERS_NOT_UP, AskedMode


def after(asked: AskedMode, *modes: tuple[int, str], obstacle: str = "") -> list[Event]:
    """Steps until the given ones, in these modes."""
    step = 0
    for until, mode in modes:
        for step in range(step + 1, until + 1):
            asked.step(step, mode)
    return asked.shortfall(step, obstacle)


def test_a_start_reports_the_mode_it_is_in_and_when_that_changes() -> None:
    assert AskedMode("allreduce", {}).at_start("allreduce", "", 0.0) == "allreduce"
    assert AskedMode("gba", {}).at_start("gba", "", 0.0) == "gba"
    up = "it begins after a step, when the companion servers of all hosts are up"
    assert AskedMode("gba", {}).at_start("allreduce", "", 0.0) == f"allreduce (gba was asked for: {up})"
    assert "up; training waits for them, 60 s at most)" in AskedMode("gba", {}).at_start("allreduce", "", 60.0)
    planned = AskedMode("allreduce", {100: "gba", 2000: "auto"})
    assert planned.at_start("allreduce", "", 0.0) == "allreduce (gba from step 100 on; auto from step 2,000 on)"
    planned.step(150, "allreduce")  # where a job resumes
    assert planned.at_start("allreduce", "", 0.0) == f"allreduce (gba was asked for: {up}; auto from step 2,000 on)"


def test_auto_starts_in_allreduce_and_names_the_first_step_that_may_be_in_gba() -> None:
    auto = "auto was asked for: gba when measurements predict 1.01 times the speed or more, from step"
    assert GBACallback().mode_at_start(0, "allreduce") == f"allreduce ({auto} 20 on)"
    assert GBACallback(warm_up_steps=500).mode_at_start(0, "allreduce") == f"allreduce ({auto} 500 on)"
    resumed, gone = GBACallback(), GBACallback()
    gone.switched("gba", 100)
    resumed.load_state_dict(gone.state_dict())
    assert resumed.mode_at_start(300, "allreduce") == f"allreduce ({auto} 320 on)"


def test_a_mode_that_was_never_entered_is_named_with_what_was_in_its_way() -> None:
    (reported,) = after(AskedMode("gba", {}), (224, "allreduce"), obstacle="no server was up")
    assert reported.message.startswith("mode gba was asked for; 0 of 224 steps were in it: no server was up. ")
    assert (reported.kind, reported.level, reported.step) == ("mode_missed", "warning", 224)
    assert (reported.data["steps_in_it"], reported.data["steps_asked"]) == (0, 224)


def test_a_mode_that_was_hardly_ever_on_is_reported_with_its_first_step() -> None:
    asked = AskedMode("gba", {})
    asked.obstacle = "the companion servers were not up"
    (reported,) = after(asked, (200, "allreduce"), (224, "gba"))
    assert (
        "24 of 224 steps were in it: it was first entered at step 201; the companion servers were" in reported.message
    )


def test_what_a_try_failed_of_is_the_reason_also_where_servers_are_not_up_at_the_end() -> None:
    asked = AskedMode("gba", {})
    asked.obstacle = "a server refused a gradient: no room"
    (reported,) = after(asked, (224, "allreduce"), obstacle="the companion servers came up when the job had ended")
    assert "0 of 224 steps were in it: a server refused a gradient: no room. " in reported.message


def test_the_newest_obstacle_is_the_reason_and_none_outlasts_a_try_that_got_there():
    asked = AskedMode("gba", {})
    asked.obstacle = SERVERS_NOT_UP
    asked.step(5, "allreduce")
    asked.step(9, "gba")
    resumed = AskedMode("gba", {})
    resumed.load(asked.state())
    for one in (asked, resumed):
        assert one.obstacle == ""
        one.step(59, "allreduce")
        one.step(60 + 9, "allreduce")
        (late,) = one.shortfall(60, "")
        assert f"it was first entered at step 9; {SERVERS_NOT_UP}. " in late.message
        one.obstacle = "a server refused a gradient: no room"
        (refused,) = one.shortfall(60, "")
        assert "it was first entered at step 9; a server refused a gradient: no room. " in refused.message


def test_some_steps_until_the_servers_are_up_are_no_shortfall() -> None:
    assert after(AskedMode("gba", {}), (20, "allreduce"), (224, "gba")) == []


def test_a_job_that_decides_for_itself_or_asks_for_allreduce_misses_nothing() -> None:
    for mode in ("auto", "allreduce"):
        assert after(AskedMode(mode, {}), (50, "allreduce")) == []


def test_a_plan_asks_for_the_steps_after_each_of_its_own() -> None:
    plan = {100: "gba", 200: "allreduce"}
    (reported,) = after(AskedMode("allreduce", plan), (300, "allreduce"))
    assert (
        "0 of 100 steps since then, of 300 in all, were in it: the job ended before it was entered" in reported.message
    )
    assert after(AskedMode("allreduce", plan), (100, "allreduce"), (200, "gba"), (300, "allreduce")) == []


def test_an_operator_who_wants_allreduce_asks_for_nothing_more() -> None:
    asked = AskedMode("gba", {})
    after(asked, (10, "gba"))
    asked.now = "allreduce"
    assert after(asked, (90, "allreduce")) == []


def test_steps_that_pass_while_a_worker_computes_one_micro_batch_count() -> None:
    asked = AskedMode("gba", {})
    asked.step(1, "allreduce")
    asked.step(9, "gba")
    assert asked.shortfall(9, "") == []


def test_counts_travel_with_the_state() -> None:
    asked, other = AskedMode("gba", {}), AskedMode("gba", {})
    after(asked, (30, "allreduce"))
    other.load(asked.state())
    other.step(31, "gba")
    (reported,) = other.shortfall(31, "")
    assert "1 of 31 steps were in it" in reported.message


def test_what_is_missing_now() -> None:
    asked = AskedMode("gba", {})
    assert (asked.missing("allreduce"), asked.missing("gba"), AskedMode("auto", {}).missing("gba")) == ("gba", "", "")
