"""A job that resumes trains with the saved learning rates, and says so where the script has others; it may set them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gba_hvd
from gba_hvd.elastic import learning_rates
from gba_hvd.elastic.learning_rates import Rate, ReplacedRates, rates_of
from recovery import CheckpointCallback

OWN = {"user": (20, 4), "item": gba_hvd.Table(7, 3, optimizer=gba_hvd.Adagrad(lr=0.2))}


class Received(gba_hvd.Callback):
    def __init__(self) -> None:
        self.events: list[gba_hvd.Event] = []
        self.settings: dict[str, Any] = {}

    def on_job(self, job: gba_hvd.Job) -> None:
        self.settings = dict(job.settings)

    def on_event(self, event: gba_hvd.Event) -> None:
        self.events.append(event)

    def of(self, *kinds: str) -> list[gba_hvd.Event]:
        return [event for event in self.events if event.kind in kinds]


def launched(
    training: Any, data: Any, url: Path, lr: float, row_lr: float, epochs: int,
    set_rates: Callable[[Any], None] | None = None, tables: Any = None, **values: Any,
) -> tuple[Any, Received]:  # fmt: skip
    job = training(
        epoch=0, dense=lambda p: torch.optim.SGD(p, lr=lr), rows=gba_hvd.SGD(lr=row_lr), tables=tables, **values
    )
    received = Received()
    job.state.register_callbacks([CheckpointCallback(str(url)), received])

    @gba_hvd.elastic.run
    def train(state: Any) -> None:
        if set_rates is not None:
            set_rates(job.optimizer)
        for state.epoch in range(state.epoch, epochs):
            job.epoch(data)
        received.rows, received.dense = job.all_rows(), job.all_dense()  # type: ignore[attr-defined]

    train(job.state)
    return job, received


def set_all(lr: float) -> Callable[[Any], None]:
    def set_rates(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr

    return set_rates


@pytest.mark.slow
def test_the_saved_rates_are_used_and_a_warning_has_both(training: Any, clicks: Any, tmp_path: Path) -> None:
    url = tmp_path / "saved"
    _, first = launched(training, clicks(20), url, 0.5, 0.1, 1, tables=OWN, best=0.75, seen=[1])
    assert not first.of("learning_rates_kept", "learning_rates_set")
    job, second = launched(training, clicks(20), url, 0.05, 0.02, 2, tables=OWN, best=0.0, added=3)
    assert [group["lr"] for group in job.optimizer.param_groups] == [0.5, 0.1]
    (kept,) = second.of("learning_rates_kept", "learning_rates_set")
    assert (kept.kind, kept.level, kept.step) == ("learning_rates_kept", "warning", 2)
    said = "learning rates are those that were saved: dense 0.5 (script: 0.05), rows 0.1 (script: 0.02)."
    assert kept.message.startswith(said) and "optimizer.param_groups" in kept.message
    assert kept.data == {"rates": {"dense": 0.5, "rows": 0.1}, "script": {"dense": 0.05, "rows": 0.02}}
    (resumed,) = second.of("resumed")
    assert resumed.message.partition("; ")[2] == (
        "restored, too: dense values, the state of the optimizers, learning rates (dense 0.5, rows 0.1), epoch 0, best "
        "0.75, streams of random numbers; as the script begins: added (not saved); saved, and not used: seen"
    )
    described = {name: second.settings[name] for name in ("dense_lr", "row_optimizer", "own_row_optimizers")}
    assert described == {
        "dense_lr": 0.5, "row_optimizer": repr(gba_hvd.SGD(lr=0.1)),
        "own_row_optimizers": {"item": repr(gba_hvd.Adagrad(lr=1.0))},  # as ever in proportion: .2 / .02 x .1
    }  # fmt: skip


@pytest.mark.slow
def test_every_launch_of_a_script_whose_rates_are_not_used_says_so(training: Any, clicks: Any, tmp_path: Path) -> None:
    url = tmp_path / "saved"
    launched(training, clicks(20), url, 0.5, 0.5, 1)
    for epochs in (2, 3):
        _, received = launched(training, clicks(20), url, 0.05, 0.5, epochs)
        (kept,) = received.of("learning_rates_kept", "learning_rates_set")
        assert (kept.level, kept.data["script"]["dense"], kept.data["rates"]["dense"]) == ("warning", 0.05, 0.5)


@pytest.mark.slow
def test_what_the_training_function_sets_is_used_for_dense_values_and_rows(
    training: Any, clicks: Any, tmp_path: Path
) -> None:
    url = tmp_path / "saved"
    _, first = launched(training, clicks(20), url, 0.5, 0.5, 1)
    job, second = launched(training, clicks(20), url, 0.5, 0.5, 2, set_all(0.0))
    assert job.state.step == 4
    for name, rows in first.rows.items():  # type: ignore[attr-defined]
        np.testing.assert_array_equal(second.rows[name], rows)  # type: ignore[attr-defined]
    for name, values in first.dense.items():  # type: ignore[attr-defined]
        np.testing.assert_array_equal(second.dense[name], values)  # type: ignore[attr-defined]
    (event,) = second.of("learning_rates_kept", "learning_rates_set")
    assert (event.kind, event.level) == ("learning_rates_set", "info")
    assert event.message == "the script has set dense 0 (saved: 0.5), rows 0 (saved: 0.5)"
    assert event.data["settings"] == {"dense_lr": 0.0, "row_optimizer": repr(gba_hvd.SGD(lr=0.0))}


@pytest.mark.slow
def test_the_same_rates_are_no_news_and_rows_follow_their_own(training: Any, clicks: Any, tmp_path: Path) -> None:
    url = tmp_path / "saved"
    launched(training, clicks(20), url, 0.5, 0.5, 1)
    _, second = launched(training, clicks(20), url, 0.5, 0.5, 2)
    assert not second.of("learning_rates_kept", "learning_rates_set")

    def set_rows(optimizer: Any) -> None:
        optimizer.param_groups[-1]["lr"] = 0.25

    _, third = launched(training, clicks(20), url, 0.05, 0.05, 3, set_rows)
    kept, new = third.of("learning_rates_kept", "learning_rates_set")
    assert kept.message.startswith("learning rates are those that were saved: dense 0.5 (script: 0.05). To train")
    assert new.message == "the script has set rows 0.25 (saved: 0.5)"


@pytest.mark.slow
def test_a_schedule_for_each_night_begins_again(training: Any, clicks: Any, tmp_path: Path) -> None:
    """As docs/NIGHTLY.md has it."""
    url = tmp_path / "saved"

    def launch(night: int, n_samples: int, leave_at: int = -1) -> list[float]:
        n_steps = math.ceil(n_samples / 16)
        job, received, used = training(epoch=0, scheduled=-1, first_step=0), Received(), list[float]()
        state, optimizer = job.state, job.optimizer
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]

        def cosine() -> None:
            done = min(1.0, (state.step - state.first_step) / n_steps)
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (1 + math.cos(math.pi * done)) / 2

        state.on_step(cosine)
        state.register_callbacks([CheckpointCallback(str(url), every_steps=1), received])

        @gba_hvd.elastic.run
        def train(state: Any) -> None:
            for state.epoch in range(max(state.epoch, night), night + 1):
                if state.scheduled < state.epoch:
                    state.first_step, state.scheduled = state.step, state.epoch
                cosine()
                for batch in gba_hvd.batches(clicks(n_samples), state):
                    if state.step == leave_at:
                        return
                    used.append(optimizer.param_groups[-1]["lr"])
                    job.micro_step(batch)

        train(state)
        state.close()
        assert not received.of("learning_rates_kept", "learning_rates_set")
        return used[::4]  # of a step's first micro-batch

    def expected(n_steps: int) -> list[float]:
        return [0.25 * (1 + math.cos(math.pi * k / n_steps)) for k in range(n_steps)]

    assert launch(0, 48) == pytest.approx(expected(3))
    assert launch(1, 64, leave_at=5) == pytest.approx(expected(4)[:2])
    assert launch(1, 64) == pytest.approx(expected(4)[2:])


def test_the_place_in_a_schedule_is_no_difference() -> None:
    def optimizer(lr: float, steps: int, *, scheduled: bool = True) -> torch.optim.Optimizer:
        made = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
        if scheduled:
            scheduler = torch.optim.lr_scheduler.StepLR(made, step_size=1, gamma=0.5)
            for _ in range(steps):
                made.step()
                scheduler.step()
        return made

    def said(script: torch.optim.Optimizer, saved: torch.optim.Optimizer) -> list[str]:
        replaced = ReplacedRates(rates_of(script), rates_of(saved))
        return [event.message.partition(". To")[0] for event in learning_rates.events_of(replaced, saved, {}, 7)]

    begin = "learning rates are those that were saved: "
    assert said(optimizer(0.4, 0), optimizer(0.4, 3)) == []
    assert said(optimizer(0.2, 0), optimizer(0.4, 1)) == [begin + "dense 0.4 (script: 0.2)"], (
        "as the schedule by chance"
    )
    assert said(optimizer(0.4, 0, scheduled=False), optimizer(0.4, 3)) == [begin + "dense 0.05 (script: 0.4)"]


def kept_events(script: Any, saved: Any, now: Any, before: Any) -> list[str]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=now)
    rates = [None if lr is None else {"dense": Rate(lr, None)} for lr in (script, saved, before)]
    replaced = ReplacedRates(rates[0] or {}, rates[1] or {}, rates[2])
    events = learning_rates.events_of(replaced, optimizer, {}, 7)
    return [event.level for event in events if event.kind == "learning_rates_kept"]


def test_a_rate_that_fell_while_the_job_trained_is_no_difference_of_the_scripts() -> None:
    """As ReduceLROnPlateau lowers it, which keeps no initial rate."""
    assert kept_events(script=0.1, saved=0.001, now=0.001, before=0.1) == []
    assert kept_events(script=0.2, saved=0.001, now=0.001, before=0.1) == ["warning"]
    assert kept_events(script=0.1, saved=0.001, now=0.001, before=None) == ["info"]
