"""The replay arrives at what a real job ended with, and finds what was falsified in trace or result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gba_hvd_tools.chaos.job import ChaosJob
from gba_hvd_tools.chaos.plan import plan_of

from gba_hvd.data.row_group_order import RowGroupOrder
from gba_hvd.epoch import EpochOrder, EpochPlan
from gba_hvd.shm.layout import Layout
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.trace import TRACE

from .facts import NotReplayable, Wrong, lines_of
from .model import Rows, first_rows, order, order_in_lanes, permutation, seed_of
from .replay import TOLERANCE, replay

Line = dict[str, Any]
LOG = {"samples": 1000, "data": "log", "features": False}
START_S = 400.0  # for one job; on a busy machine its server takes long to start


def test_tracing_is_off_by_default() -> None:
    assert TRACE is None


@pytest.mark.parametrize(("n", "epoch"), [(1, 0), (7, 3), (1000, 4)])
def test_the_order_of_samples_is_the_same(n: int, epoch: int) -> None:
    np.testing.assert_array_equal(order(n, 5, epoch), EpochOrder(n, 5, epoch).rows(0, n))


@pytest.mark.parametrize("window", [1, 2])
def test_the_order_of_samples_in_groups_is_the_same(window: int) -> None:
    rng = np.random.default_rng(5)
    for n_micro in (1, 3, 6):
        sizes = rng.integers(0, 40, 11)
        n = int(sizes.sum())
        plan = EpochPlan(n, 4 * n_micro, 4)
        groups = permutation(len(sizes), seed_of(5, "row groups of epoch 2"))
        ours = order_in_lanes(sizes.tolist(), groups, 5, 2, 4, n_micro, window)
        np.testing.assert_array_equal(ours, RowGroupOrder(sizes, 5, 2, plan, window).rows(0, n))


def test_the_first_rows_are_the_same(tmp_path: Path) -> None:
    layout = Layout.of({"user": (30, 8), "item": (9, 5)}, (), 3, 5, 0.01)
    memory = ShardMemory.create_or_open(tmp_path, "job", layout, 0.0)
    try:
        memory.reserve([0, 1, 2])
        for shard in range(3):
            memory.init_shard(shard, 0)
        group = layout.groups[1]
        place = int(layout.record_starts(np.array([layout.place_of_table["item"][1] + 4]), group)[0])
        np.testing.assert_allclose(memory.flat[place : place + 5], first_rows(9, 5, 5, "item", 0.01)[4], atol=1e-9)
    finally:
        memory.close()


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RowAdagrad", "Adam"])
def test_a_row_whose_gradient_is_what_is_left_of_larger_ones_may_be_off_by_their_rounding(kind: str) -> None:
    """The first step of an adaptive optimizer has the size of the learning rate, also by a gradient of 1e-7."""
    rows = Rows(kind, {"eps": 1e-10, "betas": (0.9, 0.999)}, np.zeros((3, 2)))
    rows.step(np.array([0, 2]), np.array([[1e-7, -1e-7], [1e-3, 2e-3]]), 0.1, 1, np.array([1e-3, 1e-3]))
    assert rows.rounding[1] == 0.0 < rows.rounding[2] < 1e-7
    assert rows.rounding[0] < 1e-7 if kind == "SGD" else 1e-5 < rows.rounding[0] < 1e-3


def traced_job(folder: Path, rule: str, row_average: str, **data: Any) -> Path:
    """A job of one worker, gba for twenty steps within allreduce."""
    faults = [{"kind": "serve", "seconds": 0.002}]
    plan = replace(plan_of(1), workers=1, mode="allreduce", switch_at={"10": "gba", "30": "allreduce"}, inside=faults)
    plan = replace(plan, outside=[], checkpoints=None, tracking=None, apart=False, optimizer="momentum", replay=True)
    plan = replace(plan, row_average=row_average, rule=rule, **{"data": "log", "readers": 0, "features": False, **data})
    job = ChaosJob(replace(plan, row_optimizer="Adagrad"), folder / "job")
    try:
        job.start(alone=True)
        assert job.launcher is not None and job.launcher.wait(START_S) == 0, job.log_file.read_text()[-3000:]
    finally:
        job.kill()
        shutil.rmtree(job.shard_dir, ignore_errors=True)
    shutil.copy(job.out / "result.npz", job.trace)
    return job.trace


@pytest.fixture(scope="module", params=["global", "contributors"])
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced_job(tmp_path_factory.mktemp("traced"), "none", request.param)


@pytest.fixture(scope="module")
def traced_ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced_job(tmp_path_factory.mktemp("ahead"), "look_ahead", "global")


@pytest.fixture
def falsified(traced: Path, tmp_path: Path) -> Callable[[Callable[[list[Line]], None]], Path]:
    def make(change: Callable[[list[Line]], None]) -> Path:
        lines = lines_of(traced)
        change(lines)
        (tmp_path / "all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path

    return make


def last(lines: list[Line], what: str) -> Line:
    return next(line for line in reversed(lines) if line["is"] == what)


@pytest.mark.processes
def test_a_job_is_computed_again_from_its_trace(traced: Path) -> None:
    steps, worst = replay(traced, traced / "result.npz", LOG)
    assert steps == 55
    assert worst <= TOLERANCE
    modes = {line["is"] for line in lines_of(traced)}
    assert {"commit", "apply", "push"} <= modes  # both modes took part


@pytest.mark.processes
def test_a_job_whose_workers_are_shown_values_ahead_is_computed_again(traced_ahead: Path, tmp_path: Path) -> None:
    steps, worst = replay(traced_ahead, traced_ahead / "result.npz", LOG)
    assert (steps, worst <= TOLERANCE) == (55, True)
    changes: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (Wrong, r"dense\[|read row", {"rule": "none"}),
        (Wrong, r"dense\[|read row", {"rule_settings": {"steps": 0.8}}),
        (NotReplayable, "rule dana_zero is not replayed", {"rule": "dana_zero"}),
    ]
    for number, (error, says, falsified) in enumerate(changes):
        lines = [line | falsified if line["is"] == "apply" else line for line in lines_of(traced_ahead)]
        (folder := tmp_path / str(number)).mkdir()
        (folder / "all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(error, match=says):
            replay(folder, traced_ahead / "result.npz", LOG)


@pytest.mark.processes
@pytest.mark.variant  # a random schedule of `tests/processes` is replayed, too
@pytest.mark.parametrize("data", ["shards", "parquet"])
def test_a_job_on_a_stream_with_features_of_one_table_is_computed_again(tmp_path: Path, data: str) -> None:
    trace = traced_job(tmp_path, "none", "contributors", data=data, features=True)
    steps, worst = replay(trace, trace / "result.npz", {**LOG, "data": data, "features": True})
    assert (steps >= 55, worst <= TOLERANCE) == (True, True)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["dense", "user", "item"])
def test_another_result_is_found(traced: Path, tmp_path: Path, name: str) -> None:
    with np.load(traced / "result.npz") as stored:
        arrays = dict(stored)
    arrays[name].flat[3] += 3e-5
    np.savez(tmp_path / "result.npz", **arrays)
    with pytest.raises(Wrong, match=rf"{name}\["):
        replay(traced, tmp_path / "result.npz", LOG)


def twice(lines: list[Line]) -> None:
    apply = last(lines, "apply")
    apply["members"][0] = apply["members"][1]


def too_light(lines: list[Line]) -> None:
    last(lines, "apply")["members"][0][2] = 0.0


def dropped(lines: list[Line]) -> None:
    apply = last(lines, "apply")
    decided = next(line for line in lines if line["is"] == "decided" and line["step"] == apply["step"])
    micro, serial, _ = apply["members"].pop(0)
    decided["dropped"].append([micro, serial])


def another_row(lines: list[Line]) -> None:
    last(lines, "push")["tables"]["user"]["values"][0][0] += 1e-3


def of_the_future(lines: list[Line]) -> None:
    last(lines, "push")["dense_steps"] = [99]


def without_a_step(lines: list[Line]) -> None:
    lines.remove(next(line for line in lines if line["is"] == "commit"))


def without_a_share(lines: list[Line]) -> None:
    last(lines, "attempt")["micros"].pop()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (twice, "more than one step"),
        (too_light, "counts 0.0, expected 1.0"),
        (dropped, "counts 0.0, expected 1.0"),
        (lambda lines: last(lines, "apply")["members"].pop(0), "members of no step"),
        (another_row, "read row"),
        (of_the_future, "dense values of step 99"),
        (without_a_step, r"steps \[1\] are in no line"),
        (without_a_share, "was made of micro-batches"),
        (lambda lines: last(lines, "apply").update(scale=0.5), "scale 0.5"),
    ],
)
def test_a_trace_that_contradicts_itself_is_found(
    traced: Path, falsified: Any, change: Callable[[list[Line]], None], says: str
) -> None:
    with pytest.raises(Wrong, match=says):
        replay(falsified(change), traced / "result.npz", LOG)


@pytest.mark.processes
def test_what_no_log_of_facts_explains_is_not_replayed(traced: Path, falsified: Any) -> None:
    lost = {"is": "event", "at": 0.0, "kind": "rows_lost", "step": 3, "message": "10 rows are reinitialised"}
    with pytest.raises(NotReplayable, match="10 rows are reinitialised"):
        replay(falsified(lambda lines: lines.append(lost)), traced / "result.npz", LOG)
