"""Several workers as threads of one process: whatever their number and their hosts, they train the same model.

That workers die is for the tests of real processes.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gba_hvd
from gba_hvd import BadInput, NonFiniteGradient, ShardMemoryError, StateMismatch
from gba_hvd.comm import groups
from gba_hvd.errors import GbaError, WorldLost
from gba_hvd.modes.allreduce_exchange import AllreduceExchange
from gba_hvd.serving.row_sources import live_rows
from gba_hvd.shm.shard_memory import ShardMemory
from recovery import CheckpointCallback
from tests.unit.thread_world import EventLog, Workers, miss_a_result, rows_of


def check_same(jobs: list[Any], expected: Any) -> None:
    for name, rows in rows_of(jobs).items():
        np.testing.assert_allclose(rows, expected.all_rows()[name], rtol=1e-4, atol=1e-6, err_msg=name)
    for job in jobs:
        for name, value in job.all_dense().items():
            np.testing.assert_allclose(value, expected.all_dense()[name], rtol=1e-4, atol=1e-6, err_msg=name)


def train(job: Any, dataset: Any, epochs: int) -> None:
    for job.state.epoch in range(job.state.epoch, epochs):
        job.epoch(dataset)


HOSTS = {
    "one worker": "a",
    "two on one host": "aa",
    "three on one host": "aaa",
    "six, of which two have nothing to do": "aaaaaa",
    "two on two hosts": "ab",
    "four on two hosts": "abba",
    "three on two hosts": "aab",
    "seven on two hosts, one of which holds no shard": "aaaaaab",
    "three on three hosts": "abc",
}


@pytest.mark.slow
@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
@pytest.mark.filterwarnings("ignore:[67] workers share 4 micro-batches")
def test_any_number_of_workers_on_any_hosts_trains_the_same_model(
    workers: Workers, on_host: Any, training: Any, clicks: Any, hosts: str
) -> None:
    jobs = [on_host(host) for host in hosts]
    torch.manual_seed(0)
    for job in jobs[1:]:
        for parameter in job.model.parameters():  # rank 0's values count, whatever the others drew
            torch.nn.init.normal_(parameter)
    workers.together(jobs, lambda job: train(job, clicks(50), 2))
    alone = on_host("alone")
    workers.together([alone], lambda job: train(job, clicks(50), 2))
    check_same(jobs, alone)
    assert {job.state.step for job in jobs} == {8}
    assert {job.state.samples.applied for job in jobs} == {100}
    assert len({job.state.job_id for job in jobs}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3], ids=["a leader", "another worker"])
def test_workers_that_cannot_be_connected_are_a_warning_and_horovod_carries_all(
    workers: Workers, on_host: Any, clicks: Any, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    def no_address() -> str:
        if workers.rank == rank:
            raise GbaError("this host has only IPv6 addresses")
        return "127.0.0.1"

    monkeypatch.setattr(groups, "own_address", no_address)
    monkeypatch.setattr(groups.Group, "alltoall", None)  # is not called
    jobs, logs = [on_host(host) for host in "abba"], [EventLog() for _ in range(4)]
    for job, log in zip(jobs, logs, strict=True):
        job.state.register_callbacks([log])
    workers.together(jobs, lambda job: train(job, clicks(50), 2))
    alone = on_host("alone")
    workers.together([alone], lambda job: train(job, clicks(50), 2))
    check_same(jobs, alone)
    (warning,) = logs[0].of("leaders_not_connected")
    assert warning.level == "warning" and "this host has only IPv6 addresses" in warning.message
    assert f"rank {rank} could not be connected" in warning.data["why"]


@pytest.mark.slow
@pytest.mark.parametrize("at_step", [1, 2])
@pytest.mark.parametrize(
    ("before", "after"),
    [("a", "aa"), ("a", "ab"), ("aa", "aabc"), ("ab", "baa"), ("a", "ba")],
    ids=["a worker joins", "a host joins", "two hosts join", "ranks change", "the late joiner is rank 0"],
)
def test_workers_that_join_in_the_middle_of_an_epoch_change_nothing(
    workers: Workers, on_host: Any, clicks: Any, before: str, after: str, at_step: int
) -> None:
    """A letter in `after` is the next worker of that host from before, or a new one when there is none left."""
    jobs = [on_host(host) for host in before]
    left = list(zip(before, jobs, strict=True))

    def leave_after_some_steps(job: Any) -> None:
        source = gba_hvd.batches(clicks(50), job.state)
        for batch in source:
            if job.state.step == at_step:
                break
            job.micro_step(batch)

    workers.together(jobs, leave_after_some_steps)
    assert {job.state.step for job in jobs} == {at_step}
    changed = []
    for host in after:
        known = next((entry for entry in left if entry[0] == host), None)
        if known is not None:
            left.remove(known)
        changed.append(on_host(host) if known is None else known[1])
    assert not left
    for job in jobs:
        job.state.on_reset()
    workers.together(changed, lambda job: train(job, clicks(50), 2))
    alone = on_host("alone")
    workers.together([alone], lambda job: train(job, clicks(50), 2))
    check_same(changed, alone)
    assert {job.state.samples.applied for job in changed} == {100}
    assert {job.state.samples.rows_lost for job in changed} == {0}
    assert {job.state.samples.shard_steps_missed for job in changed} == {0}
    for shard in range(5):
        homes = {job.tables.memory.folder for job in changed if job.tables.memory.marks().ready[shard]}
        assert len(homes) == 1


@pytest.mark.slow
def test_a_host_that_comes_back_brings_no_row_along(workers: Workers, on_host: Any, clicks: Any) -> None:
    """Its copies say that they are 50 steps old; but the other host has been given its shards meanwhile."""

    def train_until(step: int) -> Any:
        def some_steps(job: Any) -> None:
            for batch in gba_hvd.batches(clicks(50), job.state):
                if job.state.step == step:
                    break
                job.micro_step(batch)

        return some_steps

    here, away = on_host("a"), on_host("b")
    workers.together([here, away], train_until(1))
    here.state.on_reset()
    workers.together([here], train_until(2))
    assert here.state.samples.rows_lost > 0
    memory = away.tables.memory
    old = np.array(memory.ready())
    for shard in old:
        memory.region(shard)[1024:] = np.nan
    memory.begin(old, 50)
    memory.finish(old, 50)
    back = on_host("b")
    here.state.on_reset()
    workers.together([here, back], lambda job: train(job, clicks(50), 2))
    assert back.tables.memory.folder == memory.folder
    assert all(np.isfinite(rows).all() for rows in rows_of([here, back]).values())
    assert here.state.step == back.state.step == 8


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
@pytest.mark.parametrize("misses", [0, 1])
def test_a_worker_that_missed_the_result_of_a_step_applies_what_it_holds(
    workers: Workers, on_host: Any, clicks: Any, hosts: str, misses: int
) -> None:
    """Its neighbours saw the step decided and have applied it: nobody goes back, and the step counts once."""
    jobs = [on_host(host) for host in hosts]
    miss_a_result(workers, jobs, misses, 2, lambda job: train(job, clicks(50), 2))
    assert [job.state.step for job in jobs] == [1 if rank == misses else 2 for rank in range(len(jobs))]
    workers.together(jobs, lambda job: train(job, clicks(50), 2))
    alone = on_host("alone")
    workers.together([alone], lambda job: train(job, clicks(50), 2))
    check_same(jobs, alone)
    for job in jobs:
        assert (job.state.step, job.state.samples.applied, job.state.samples.shard_steps_missed) == (8, 100, 0)


@pytest.mark.slow
def test_rows_that_leave_with_their_host_start_over_and_are_counted(
    workers: Workers, on_host: Any, clicks: Any
) -> None:
    jobs = [on_host("a"), on_host("b")]
    workers.together(jobs, lambda job: train(job, clicks(50), 1))
    gone = jobs[1].tables.memory.marks().ready
    initial = on_host("alone")
    workers.together([initial], lambda job: job.state.sync())
    jobs[0].state.on_reset()
    workers.together(jobs[:1], lambda job: job.state.sync())
    lost = 0
    for name, rows in jobs[0].all_rows().items():
        new = gone[np.arange(len(rows)) % 5] == 1
        assert np.array_equal(rows[new], initial.all_rows()[name][new])
        lost += int(new.sum())
    assert jobs[0].state.samples.rows_lost == lost > 0
    assert jobs[0].state.step == 4


@pytest.mark.slow
def test_every_worker_learns_of_one_workers_bad_number(workers: Workers, on_host: Any, clicks: Any) -> None:
    jobs = [on_host("a"), on_host("a"), on_host("b")]

    def poison(job: Any) -> None:
        for batch in gba_hvd.batches(clicks(50), job.state):
            loss = job.loss(batch) * (float("nan") if batch.index == 5 else 1.0)
            loss.backward()
            job.optimizer.step(loss=loss)

    results = workers.outcomes(jobs, poison)
    assert all(isinstance(result, NonFiniteGradient) for result in results), results
    assert "micro-batch 5: loss nan" in str(results[1])
    for other in (0, 2):
        assert "micro-batch 5, on another worker" in str(results[other])
    assert {job.state.step for job in jobs} == {1}


@pytest.mark.slow
def test_the_same_workers_train_the_same_model_bit_for_bit(workers: Workers, on_host: Any, clicks: Any) -> None:
    trained = []
    for host in ("first", "second"):
        jobs = [on_host(host) for _ in range(3)]
        workers.together(jobs, lambda job: train(job, clicks(50), 2))
        trained.append(rows_of(jobs) | jobs[2].all_dense())
    first, second = trained
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name], err_msg=name)


@pytest.mark.parametrize("reads", ["rows", "forward", "forward on a device", "saved"])
def test_who_reads_after_a_step_waits_for_the_rows_that_others_apply(
    workers: Workers, on_host: Any, clicks: Any, monkeypatch: pytest.MonkeyPatch, reads: str
) -> None:
    jobs, waits, last = [on_host("a"), on_host("a")], threading.Event(), 4
    if reads == "forward on a device":
        for job in jobs:
            monkeypatch.setattr(job.tables.on_device, "_when", "on")
    apply_held, wait_finished = AllreduceExchange.apply_held, ShardMemory.wait_finished

    def apply_when_the_other_waits(self: AllreduceExchange, factor: float = 1.0) -> None:
        assert self.held is not None
        if workers.rank == 1 and self.held.step == last:
            waits.wait(30)
        apply_held(self, factor)

    def noting(self: ShardMemory, shards: np.ndarray, step: int, timeout_s: float) -> None:
        if workers.rank == 0 and step == last:
            waits.set()
        wait_finished(self, shards, step, timeout_s)

    monkeypatch.setattr(AllreduceExchange, "apply_held", apply_when_the_other_waits)
    monkeypatch.setattr(ShardMemory, "wait_finished", noting)

    def what_it_reads(job: Any) -> np.ndarray:
        if reads == "rows":
            found: np.ndarray = job.tables.rows("item", np.arange(job.tables.tables["item"].n_rows))
            return found
        if reads == "saved":
            source = live_rows([job.tables])["item"]
            return np.asarray(source.numbered(0, source.n_rows))
        with torch.no_grad():
            return np.asarray(job.model(clicks(50).take(np.arange(50))))

    def read_at_once(job: Any) -> np.ndarray | None:
        train(job, clicks(50), 1)
        assert job.state.step == last
        return what_it_reads(job) if job is jobs[0] else None

    at_once = workers.together(jobs, read_at_once)[0]
    assert waits.is_set()
    np.testing.assert_array_equal(at_once, workers.together(jobs[:1], what_it_reads)[0])


def test_learning_rates_that_drift_apart_are_noticed(workers: Workers, on_host: Any, clicks: Any) -> None:
    jobs = [on_host("a"), on_host("a")]

    def decay_on_one(job: Any) -> None:
        job.state.sync()
        if job is jobs[1]:
            job.optimizer.param_groups[0]["lr"] *= 0.5
        train(job, clicks(50), 1)

    for result in workers.outcomes(jobs, decay_on_one):
        assert isinstance(result, StateMismatch)
        assert "learning rates add up to" in str(result)
    assert {job.state.step for job in jobs} == {0}


def test_evaluating_different_data_is_noticed(workers: Workers, on_host: Any, clicks: Any) -> None:
    jobs = [on_host("a"), on_host("a")]
    sizes = dict(zip(map(id, jobs), (50, 40), strict=True))
    results = workers.outcomes(jobs, lambda job: gba_hvd.evaluate(job.model, clicks(sizes[id(job)]), job.state))
    for result in results:
        assert isinstance(result, StateMismatch)
        assert "disagree about the samples to evaluate: by rank [50, 40]" in str(result)


def test_a_late_joiner_with_other_settings_does_not_end_the_job(workers: Workers, on_host: Any, clicks: Any) -> None:
    old, new = on_host("a"), on_host("a", global_batch=32)
    workers.together([old], lambda job: train(job, clicks(50), 1))
    old.state.on_reset()
    survivor, late_joiner = workers.outcomes([old, new], lambda job: job.state.sync())
    assert isinstance(late_joiner, StateMismatch)
    assert not isinstance(survivor, StateMismatch)
    assert "continuing without them" in str(survivor)  # the error on which Horovod forms the world again
    old.state.on_reset()
    workers.together([old], lambda job: train(job, clicks(50), 2))
    assert old.state.samples.applied == 100


@pytest.mark.slow
def test_evaluation_gives_every_worker_the_same_result(workers: Workers, on_host: Any, clicks: Any) -> None:
    jobs, alone = [on_host("a"), on_host("b"), on_host("a")], on_host("alone")
    results = [
        workers.together(some, lambda job: gba_hvd.evaluate(job.model, clicks(50), job.state, batch=7))
        for some in (jobs, [alone])
    ]
    (expected,) = results[1]
    assert {(r.auc, r.n, r.exact) for r in results[0]} == {(expected.auc, 50, True)}


@pytest.mark.slow
def test_probabilities_are_not_taken_for_logits_by_any_worker(workers: Workers, on_host: Any, clicks: Any) -> None:
    jobs = [on_host("a"), on_host("b"), on_host("a")]

    def clicked(job: Any, **how: Any) -> Any:
        model = nn.Sequential(job.model, nn.Sigmoid())
        return gba_hvd.evaluate(model, clicks(50), job.state, batch=7, **how)

    for result in workers.outcomes(jobs, clicked):
        assert isinstance(result, BadInput)
        assert 'activation="none" for probabilities' in str(result)
    from_logits = workers.together(jobs, lambda job: gba_hvd.evaluate(job.model, clicks(50), job.state, batch=7))
    for ours in workers.together(jobs, lambda job: clicked(job, activation="none")):
        assert ours.auc == from_logits[0].auc
        assert ours.logloss == pytest.approx(from_logits[0].logloss, rel=1e-6)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"global_batch": 32}, "global_batch 16, here 32"),
        ({"n_shards": 6}, "n_shards 5, here 6"),
        ({"rows": gba_hvd.Adagrad(lr=0.2, eps=1e-3)}, r"row optimizer Adagrad\(lr=0.1.*here Adagrad\(lr=0.2"),
    ],
    ids=["global batch", "shards", "row optimizer"],
)
def test_workers_with_another_model_or_other_settings_are_stopped(
    workers: Workers, on_host: Any, other: dict[str, Any], message: str
) -> None:
    jobs = [on_host("a"), on_host("a"), on_host("a", **other)]
    results = workers.outcomes(jobs, lambda job: job.state.sync())
    for result in results:
        assert isinstance(result, StateMismatch), result
        assert str(result).startswith("workers [2] have another model or other settings than rank 0")
    with pytest.raises(StateMismatch, match=message):
        raise results[2]


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        ({}, {"tolerance": 1, "staleness": "linear"}, r"'staleness'. threshold, here linear; .*'tolerance'. 4, here 1"),
        ({}, {"rule": "none"}, r"GBACallback.'rule'. the default, here none;"),
        ({}, {"mode": "gba"}, "GBACallback.'mode'. auto, here gba;"),
        ({"mode": "shadow"}, {"mode": "shadow", "sync": "ma"}, "GBACallback.'sync'. easgd, here ma;"),
        ({"mode": "ma"}, {"mode": "ma", "elasticity": 0.5}, "GBACallback.'elasticity'. the default, here 0.5;"),
        ({}, {"switch_at": {20: "gba"}}, "GBACallback.'switch_at'. {}, here {'20': 'gba'};"),
        ({}, None, "rank 0 has GBACallback, here none;"),
        (None, {}, "rank 0 has no GBACallback, here one;"),
    ],
)  # fmt: skip
def test_workers_whose_callbacks_have_other_settings_are_stopped(
    workers: Workers, on_host: Any, mine: dict[str, Any] | None, theirs: dict[str, Any] | None, message: str
) -> None:
    jobs = [on_host("a"), on_host("a")]
    for job, settings in zip(jobs, (mine, theirs), strict=True):
        job.state.register_callbacks([] if settings is None else [gba_hvd.GBACallback(**settings)])
    results = workers.outcomes(jobs, lambda job: job.state.sync())
    assert all(isinstance(result, StateMismatch) for result in results), results
    assert "algorithm" not in str(results[1])
    with pytest.raises(StateMismatch, match=message):
        raise results[1]


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"resume": False}, "CheckpointCallback.'resume'. True, here False;"),
        ({"policy": "full"}, "CheckpointCallback.'policy'. delta, here full;"),
        ({"every_steps": 7}, "CheckpointCallback.'every_steps'. 5, here 7;"),
        ({"every_steps": np.int64(7)}, "CheckpointCallback.'every_steps'. 5, here 7;"),
        ({"strict": True}, "CheckpointCallback.'strict'. False, here True;"),
    ],
)
def test_workers_whose_checkpoints_have_other_settings_are_stopped(
    workers: Workers, on_host: Any, tmp_path: Path, theirs: dict[str, Any], message: str
) -> None:
    jobs = [on_host("a"), on_host("a")]
    for job, settings in zip(jobs, ({}, theirs), strict=True):
        given = {"every_steps": 5, "policy": "delta", **settings}
        job.state.register_callbacks([CheckpointCallback(str(tmp_path / "saved"), **given)])
    with pytest.raises(StateMismatch, match=message):
        raise workers.outcomes(jobs, lambda job: job.state.sync())[1]


def test_a_curvature_that_each_worker_has_measured_may_differ(workers: Workers, on_host: Any) -> None:
    jobs = [on_host("a"), on_host("a")]
    for job, curvature in zip(jobs, (2.0, 3.0), strict=True):
        job.state.register_callbacks([gba_hvd.GBACallback(curvature=curvature)])
    assert workers.outcomes(jobs, lambda job: job.state.sync()) == [None, None]


@pytest.mark.slow
def test_numbers_of_numpy_are_those_of_python(workers: Workers, on_host: Any) -> None:
    jobs = [on_host("a"), on_host("a")]
    for job, min_stay in zip(jobs, (4, np.int64(4)), strict=True):
        job.state.register_callbacks([gba_hvd.GBACallback(min_stay=min_stay)])  # type: ignore[arg-type]
    assert workers.outcomes(jobs, lambda job: job.state.sync()) == [None, None]


def test_datasets_of_different_sizes_are_noticed(workers: Workers, on_host: Any, clicks: Any) -> None:
    jobs = [on_host("a"), on_host("a")]
    results = workers.outcomes(jobs, lambda job: train(job, clicks(50 if job is jobs[0] else 49), 1))
    assert all(isinstance(result, StateMismatch) for result in results)
    assert "disagree about the samples: by rank [50, 49]" in str(results[0])


def test_a_worker_that_cannot_open_its_memory_stops_all(workers: Workers, on_host: Any, tmp_path: Path) -> None:
    jobs = [on_host("a"), on_host("b")]
    (tmp_path / "file").write_text("")
    object.__setattr__(jobs[1].tables.config, "shard_dir", tmp_path / "file")
    results = workers.outcomes(jobs, lambda job: job.state.sync())
    assert [type(result) for result in results] == [WorldLost, ShardMemoryError] and results[0].rank == 1
    assert "the worker of rank 1 could not open its host's shard memory" in str(results[0])
    assert "Not a directory" in str(results[1])


def test_an_error_that_several_workers_have_is_raised_by_the_first_of_them(
    workers: Workers, on_host: Any, tmp_path: Path
) -> None:
    jobs = [on_host("a"), on_host("b"), on_host("b")]
    (tmp_path / "file").write_text("")
    for job in jobs[1:]:
        object.__setattr__(job.tables.config, "shard_dir", tmp_path / "file")
    results = workers.outcomes(jobs, lambda job: job.state.sync())
    assert [type(result) for result in results] == [WorldLost, ShardMemoryError, WorldLost]
    assert results[2].rank == 1


@pytest.mark.slow
def test_rows_of_an_earlier_job_are_not_taken_for_ours(
    workers: Workers, on_host: Any, clicks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GBA_HVD_JOB_ID", "again")
    first, second = on_host("a"), on_host("a")
    workers.together([first], lambda job: train(job, clicks(50), 1))
    first.tables.memory.close(remove=False)
    (result,) = workers.outcomes([second], lambda job: job.state.sync())
    assert isinstance(result, ShardMemoryError)
    assert "was left by another job of this name" in str(result)
