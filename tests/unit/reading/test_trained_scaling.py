"""Numbers of a prepared dataset that are scaled otherwise than in training are reported, and refused in an export."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gba_hvd
from gba_hvd.data import Categorical, ClickLog, Hashed, Numeric, Recipe, RowEncoder, SplitFiles, prepare
from gba_hvd.reading.trained_scaling import of_state, other_scaling, scaling_of, to_state, trained_with
from recovery import state_codec

RECIPE = Recipe("csv", "label", (Categorical("user", Hashed(9)),), (Numeric("price", standardise=True),))
Stored = Callable[..., ClickLog]


def test_a_column_with_another_mean_is_named_and_a_difference_by_rounding_is_none() -> None:
    trained = {"age": ("none", 0.0, 1.0), "price": ("log", 2.0, 0.5)}
    assert of_state(state_codec.decode(state_codec.encode(to_state(trained)))) == trained
    near = {"price": ("log", 2.0 + 1e-9, 0.5 - 1e-9), "age": ("none", 0.0, 1.0), "new": ("none", 9.0, 9.0)}
    assert not other_scaling(trained, near, "it") and not other_scaling({}, near, "it")
    assert not other_scaling(trained, {}, "it")
    assert other_scaling(trained, {"price": ("log", 2.0, 0.75)}, "it") == (
        "column 'price': expected the scaling that was trained last, transform log, mean 2, deviation 0.5, got "
        "transform log, mean 2, deviation 0.75, in it: the same value is another number of the dense input"
    )
    both = {"price": ("log", 2.25, 0.5), "age": ("log", 0.0, 1.0)}
    assert "column 'price' (and 1 more columns): " in other_scaling(trained, both, "it")
    wide = {"time": ("none", 1e9, 1.0)}  # 1e9 + 1 is near as a number, and a whole deviation away
    assert "mean 1000000001" in other_scaling(wide, {"time": ("none", 1e9 + 1, 1.0)}, "it")


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    def make(name: str, prices: str, like: str | None = None) -> ClickLog:
        (tmp_path / f"{name}.csv").write_text("label,user,price\n" + "".join(f"1,a,{one}\n" for one in prices))
        files = SplitFiles({"train": [tmp_path / f"{name}.csv"]})
        prepare(RECIPE, files, tmp_path / name, like=like and tmp_path / like)
        return ClickLog.open(tmp_path / name)

    return make


def job_of(training: Any, saved: Any = None) -> tuple[Any, list[str]]:
    """A job, which resumes what was saved, and the warnings of scalings that it reports."""
    job = training(epoch=0, global_batch=4, micro_batch=2)
    job.model.forward = lambda batch: job.tables({"user": batch.ids["user"]})["user"].sum(dim=1) + batch.dense[:, 0]
    if saved is not None:
        job.state.sync()
        job.state.training_state.load_state_dict(saved)
        for shard in range(3):
            job.tables.memory.set_ready(shard, job.state.step)
        job.state.epoch = 1
    warnings: list[str] = []
    emit = job.state.engine.reports.emit

    def note(event: Any, only_here: bool = False) -> None:
        if event.kind == "scaling_differs" and event.level == "warning":
            warnings.append(event.message)
        emit(event, only_here)

    job.state.engine.reports.emit = note
    return job, warnings


def saved_of(job: Any) -> Any:
    return state_codec.decode(state_codec.encode(job.state.training_state.state_dict()))


@pytest.mark.slow
def test_a_resume_with_other_means_goes_on_with_a_warning_and_the_newest_count(training: Any, stored: Stored) -> None:
    first, other, like = stored("first", "1234"), stored("other", "5679"), stored("like", "5679", like="first")
    job, warnings = job_of(training)
    job.epoch(first)
    gba_hvd.evaluate(job.model, like, job.state)
    assert not warnings and scaling_of(like) == scaling_of(first) == scaling_of(
        RowEncoder.open(like.description["path"])
    )
    assert scaling_of(pickle.loads(pickle.dumps(first))) == scaling_of(first)
    resumed, warnings = job_of(training, saved_of(job))
    resumed.epoch(other)
    assert resumed.state.samples.applied == 8
    assert resumed.state.engine.progress.scaling == resumed.tables.trained_scaling == scaling_of(other)
    gba_hvd.evaluate(resumed.model, first, resumed.state)
    gba_hvd.evaluate(resumed.model, first, resumed.state)
    trained, evaluated = warnings
    assert trained.startswith("column 'price': expected the scaling that was trained last, transform log, mean 1.1")
    assert "mean 2.0" in trained and "deviation 0.3" in trained and "--like STORE" in trained
    assert "in the dataset that is trained now:" in trained and "in the evaluated dataset:" in evaluated


def test_a_dataset_that_leaves_the_comparison_out_leaves_its_columns_without_a_scaling_to_compare_with() -> None:
    trained = {"age": ("none", 0.0, 1.0), "price": ("log", 2.0, 0.5)}
    left_out = SimpleNamespace(dense_scaling=None, dense_names=("price", "new"))
    assert trained_with(trained, left_out) == {"age": ("none", 0.0, 1.0)}
    assert trained_with(trained, SimpleNamespace(dense_scaling=None)) == {}
    assert trained_with(trained, SimpleNamespace(dense_names=("price",))) == trained  # of no store
    assert trained_with(trained, SimpleNamespace(dense_scaling={"price": ("log", 3.0, 0.5)}))["price"][1] == 3.0


@pytest.mark.slow
def test_workers_whose_stores_are_scaled_otherwise_are_warned_of(training: Any, stored: Stored) -> None:
    first, other = stored("first", "1234"), stored("other", "5679")
    job, warnings = job_of(training)
    job.epoch(first)  # the world has formed
    nearly = {name: (transform, mean * (1 + 1e-15), std) for name, (transform, mean, std) in scaling_of(first).items()}
    everyone = [scaling_of(first), {}, nearly]
    world = job.state.engine.world
    gather_bytes = world.gather_bytes

    def gathered(name: str, data: bytes) -> Any:
        if name != "epoch.scaling":
            return gather_bytes(name, data)
        assert json.loads(data) == to_state(scaling_of(first))
        return [np.frombuffer(json.dumps(to_state(one)).encode(), np.uint8) for one in everyone]

    world.gather_bytes = gathered
    job.state.epoch = 1
    job.epoch(first)
    assert not warnings, "a worker without its own, or with rounding"
    everyone.append(scaling_of(other))
    job.state.epoch = 2
    job.epoch(first)
    (warning,) = warnings
    assert warning.startswith("column 'price': expected the scaling of rank 0, transform log")
    assert "in the dataset of rank 3: " in warning


@pytest.mark.slow
def test_an_epoch_that_is_complete_is_not_warned_of(training: Any, stored: Stored) -> None:
    first, other = stored("first", "1234"), stored("other", "5679")
    job, _ = job_of(training)
    job.epoch(first)
    resumed, warnings = job_of(training, saved_of(job))
    resumed.state.epoch = 0
    resumed.epoch(other)
    assert not warnings and resumed.state.engine.progress.scaling == scaling_of(first)


@pytest.mark.slow
def test_a_state_without_means_and_a_log_without_its_own_are_not_compared(training: Any, stored: Stored) -> None:
    first, other = stored("first", "1234"), stored("other", "5679")
    job, _ = job_of(training)
    job.epoch(first)
    saved = saved_of(job)
    other.dense_scaling = None
    resumed, warnings = job_of(training, saved)
    resumed.epoch(other)
    assert not warnings and resumed.state.engine.progress.scaling == resumed.tables.trained_scaling == {}
    del saved["position"]["scaling"]
    resumed, warnings = job_of(training, saved)
    resumed.epoch(ClickLog.open(other.description["path"]))
    assert not warnings
