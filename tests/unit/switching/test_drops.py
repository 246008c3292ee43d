"""When it is a warning that gba drops gradients as too stale, and when it is over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gba_hvd.callbacks import Event
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.ps.messages import JobPosition
from gba_hvd.switching import requests
from gba_hvd.switching.callback import GBACallback
from gba_hvd.switching.drops import WINDOW, WORKER_WINDOW, DropWatch, WorkerDropWatch
from gba_hvd.training.job_state import Progress
from gba_hvd.training.step_hooks import StepHooks


class Watched:
    """A `DropWatch` that is shown windows: how many micro-batches of each age come to those before."""

    def __init__(self, **rules: Any) -> None:
        self.watch, self.by_values = DropWatch(Discipline(**rules)), rules.get("staleness_of") == "values"
        self.so_far: dict[int, int] = {}
        self.show({})

    def show(self, window: dict[int, int]) -> Event | None:
        for age, n in window.items():
            self.so_far[age] = self.so_far.get(age, 0) + n
        fresh = {0: sum(self.so_far.values())}
        return self.watch.look(7, *((fresh, self.so_far) if self.by_values else (self.so_far, fresh)))


@pytest.mark.parametrize(
    ("rules", "window", "is_said"),
    [
        ({"tolerance": 2}, {0: 80, 3: 20}, True),
        ({"tolerance": 2}, {0: 90, 3: 10}, False),
        ({"tolerance": 3}, {0: 80, 3: 20}, False),
        ({"tolerance": 0, "staleness_of": "values"}, {0: 30, 1: 70}, True),
        ({"tolerance": 2, "staleness": "linear"}, {0: 80, 3: 20}, True),
        ({"staleness": "inverse"}, {0: 10, 30: 90}, False),
        ({"tolerance": 2}, {3: WINDOW - 1}, False),
    ],
)
def test_a_share_above_the_bound_is_a_warning(rules: dict[str, Any], window: dict[int, int], is_said: bool) -> None:
    event = Watched(**rules).show(window)
    assert (event is not None) is is_said
    if event is not None:
        assert (event.kind, event.level) == ("many_dropped", "warning")
        assert f"tolerance={rules['tolerance']} " in event.message and "Raise the tolerance" in event.message


def test_the_warning_names_the_age_that_decides() -> None:
    by_values = Watched(tolerance=0, staleness_of="values").show({0: 30, 1: 60, 3: 10})
    assert by_values is not None
    assert by_values.message.startswith(
        "70% of the newest 100 micro-batches were dropped as too stale, more than 10%: the dense values that they "
        "came of were more than tolerance=0 steps old (staleness_of='values'), up to 3."
    )
    by_token = Watched(tolerance=0).show({0: 30, 1: 70})
    assert by_token is not None and "their data was more than tolerance=0 steps late" in by_token.message


@pytest.mark.parametrize("n_servers", [1, 2])
def test_the_remedy_names_the_servers_where_they_are_several(n_servers: int) -> None:
    watch = DropWatch(Discipline(tolerance=2), n_servers)
    watch.look(1, {}, {})
    event = watch.look(2, {0: 50, 5: 50}, {})
    assert event is not None
    assert ("fewer servers_per_host, or more cores" in event.message) == (n_servers > 1)


def test_it_is_said_once_and_over_once_and_only_well_below_the_bound() -> None:
    watched = Watched(tolerance=1)
    kinds = [
        None if (event := watched.show({0: 100 - late, 2: late})) is None else event.kind
        for late in (20, 30, 8, 4, 4, 8, 11)
    ]
    assert kinds == ["many_dropped", None, None, "many_dropped_over", None, None, "many_dropped"]


def test_windows_begin_anew_after_a_rollback_and_with_the_mode() -> None:
    watched = Watched(tolerance=1)
    watched.show({0: 100})
    watched.so_far = {0: 90}
    assert watched.show({2: 60}) is None, "the histogram is an older one: what it has is no window"
    assert watched.show({2: 60}) is not None
    watched.watch.forget()
    assert watched.show({2: 60}) is None
    assert watched.show({2: 60}) is not None


def test_the_chief_reports_it_while_the_job_is_in_gba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_RATES_EVERY_S", 0.0)
    progress, events = Progress(None, StepHooks()), list[Event]()
    engine: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0, size=2), progress=progress, elp=12, emit=events.append,
        model=SimpleNamespace(together=1, micro_batch=4, global_batch=16, dense_lrs=[0.1]),
    )  # fmt: skip
    participant = requests.ModeRequests(engine, GBACallback(mode="gba", tolerance=0, staleness_of="values"))
    participant.mode_entered()
    for ages in ({0: 100}, {0: 120, 1: 80}, {0: 140, 1: 160}, {0: 300, 1: 160}):
        progress.step, progress.dense_ages, progress.staleness = progress.step + 1, ages, {0: sum(ages.values())}
        position = JobPosition(step=progress.step, rates=[(0, 0.2), (1, 0.2)])
        servers: Any = SimpleNamespace(
            name="gba", position=position, drain_metrics=lambda: ({}, []), contact=SimpleNamespace(report={})
        )
        participant.before_micro_batch(servers, 0.004)
    said = [(event.kind, event.step) for event in events if event.kind.startswith("many_dropped")]
    assert said == [("many_dropped", 2), ("many_dropped_over", 4)]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_window_that_is_open_at_the_end_of_an_epoch_counts(rank: int) -> None:
    """A job that is over within a few seconds has no other."""
    progress, events = Progress(None, StepHooks()), list[Event]()
    engine: Any = SimpleNamespace(world=SimpleNamespace(rank=rank, size=2), progress=progress, emit=events.append)
    participant = requests.ModeRequests(engine, GBACallback(mode="gba", tolerance=2))
    progress.staleness = {0: 400}  # of the steps before
    participant.mode_entered()
    progress.step, progress.staleness = 9, {0: 433, 5: 27}
    servers: Any = SimpleNamespace(name="gba", position=JobPosition(step=9))
    participant.epoch_over(servers)
    said = [(event.kind, event.data["share"], event.data["micro_batches"]) for event in events]
    assert said == ([] if rank else [("many_dropped", 0.45, 60)])


def test_a_worker_of_which_all_is_dropped_is_named_once_until_its_gradients_count() -> None:
    watch, n = WorkerDropWatch(tolerance=3), WORKER_WINDOW
    said = [
        watch.look(step, [(0, 70, 9 * n, 0), (1, 71, pushes, dropped)])
        for step, (pushes, dropped) in enumerate([(n - 1, n - 1), (n, n), (2 * n, 2 * n), (3 * n, 2 * n + n // 2)])
    ]
    assert [[event.kind for event in events] for events in said] == [[], ["worker_dropped"], [], ["worker_kept"]]
    warning = said[1][0]
    assert warning.level == "warning" and warning.data["rank"] == 1 and warning.data["worker"] == 71
    assert warning.message.startswith(
        "100% of the newest 20 micro-batches of rank 1 were dropped as too stale (tolerance=3)"
    )
    watch.forget()
    assert [event.kind for event in watch.look(9, [(1, 71, n, n)])] == ["worker_dropped"]
    assert watch.look(10, [(1, 71, n // 2, 0)]) == [], "its server was started again: a new window"


def test_a_worker_that_is_late_at_times_is_not_named() -> None:
    watch = WorkerDropWatch(tolerance=3)
    assert watch.look(1, [(0, 70, 100, 90)]) == []
