"""Larger batches in allreduce mode: the same steps, positions and accounts; sizes that do not fit are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gba_hvd
from gba_hvd import BadInput, GBACallback
from gba_hvd.data import ShardedStream
from gba_hvd.epoch import EpochPlan, micro_batches_together, shares
from gba_hvd.errors import StateMismatch
from gba_hvd.switching.predictions import Rates, predicted
from gba_hvd.switching.requests import ModeRequests
from tests.unit.reading.test_segments import Shards
from tests.unit.reading.test_segments import step as step_of_shards


def test_neighbours_go_together_and_an_epoch_may_end_with_fewer() -> None:
    cut = EpochPlan(n_samples=61, global_batch=24, micro_batch=4)
    assert cut.batches_of_step(0, 3) == [range(3), range(3, 6)]
    assert cut.batches_of_step(2, 3) == [range(12, 15), range(15, 16)]
    assert cut.batches_of_step(1) == [range(i, i + 1) for i in range(6, 12)]
    assert shares(8, 3, together=2) == [4, 2, 2]
    assert shares(5, 2, together=2) == [3, 2]


@pytest.mark.parametrize("size", [3, 6, 24, 0, -8, True, 8.5, 8.0])
def test_a_size_that_does_not_fit_is_refused_with_those_that_do(size: Any) -> None:
    with pytest.raises(BadInput, match="no multiple of micro_batch that divides global_batch; choose one of 4, 8, 16"):
        micro_batches_together(size, 16, 4)


def test_the_micro_batch_itself_is_what_is_done_without_it() -> None:
    """So that `global_batch // hvd.size()` goes with any number of workers."""
    assert [micro_batches_together(size, 16, 4) for size in (None, 4, 8, 16)] == [1, 1, 2, 4]
    assert micro_batches_together(16, 16, 16) == 1


@pytest.mark.slow
@pytest.mark.parametrize("row_average", ["global", "contributors"])
@pytest.mark.parametrize(("hosts", "size"), [("a", 8), ("a", 16), ("aa", 8), ("ab", 8)])
def test_parameters_losses_and_accounts_are_those_of_micro_batches(
    workers: Any, on_host: Any, clicks: Any, hosts: str, size: int, row_average: str
) -> None:
    jobs = [on_host(host, row_average=row_average, more={"sync_micro_batch": size}) for host in hosts]
    plain = [on_host(host.upper(), row_average=row_average) for host in hosts]
    losses: dict[int, list[float]] = {id(jobs[0]): [], id(plain[0]): []}
    for some in (jobs, plain):
        some[0].state.register_callbacks([Losses(losses[id(some[0])])])
        for job in some[1:]:
            job.state.register_callbacks([Losses([])])
        workers.together(some, lambda job: [job.epoch(clicks(54)) for job.state.epoch in range(2)])  # the last step: 6
    assert losses[id(jobs[0])] == pytest.approx(losses[id(plain[0])], rel=1e-5) and len(losses[id(jobs[0])]) == 8
    for job, other in zip(jobs, plain, strict=True):
        assert job.state.samples == other.state.samples and job.state.samples.applied == 2 * 54
        assert job.state.step == other.state.step
        for name, values in other.all_dense().items():
            np.testing.assert_allclose(job.all_dense()[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
        ready = job.tables.memory.marks().ready
        for name, rows in job.all_rows().items():
            here = ready[np.arange(len(rows)) % len(ready)] == 1
            np.testing.assert_allclose(rows[here], other.all_rows()[name][here], rtol=1e-4, atol=1e-6, err_msg=name)


class Losses(gba_hvd.Callback):
    def __init__(self, into: list[float]) -> None:
        self._into = into

    def on_step(self, record: gba_hvd.StepRecord) -> None:
        assert record.loss is not None
        self._into.append(record.loss)


def test_batches_have_the_size_and_the_samples_in_order(training: Any, clicks: Any) -> None:
    large, small, data, same = training(more={"sync_micro_batch": 8}), training(), clicks(54), clicks(54)
    large.epoch(data)
    small.epoch(same)
    assert [len(rows) for rows in data.taken] == [8, 8] * 3 + [6]
    np.testing.assert_array_equal(np.concatenate(data.taken), np.concatenate(same.taken))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"mode": "auto"}, [8] * 8 + [4] * 4 + [8] * 2),
        ({"mode": "allreduce"}, [8] * 14),
        ({"mode": "allreduce", "switch_at": {99: "auto"}}, [8] * 14),
        ({"mode": "allreduce", "switch_at": {2: "auto"}}, [8] * 8 + [4] * 4 + [8] * 2),
    ],
    ids=str,
)
def test_single_micro_batches_are_measured_where_measurements_decide(
    training: Any, clicks: Any, settings: dict[str, Any], sizes: list[int]
) -> None:
    job, data = training(more={"sync_micro_batch": 8}), clicks(16 * len(sizes) // 2 - (16 if 4 in sizes else 0))
    job.state.register_callbacks([GBACallback(**settings)])
    job.epoch(data)
    assert [len(rows) for rows in data.taken] == sizes


@pytest.mark.slow
def test_single_micro_batches_are_those_of_a_worker_s_usual_batches(workers: Any, training: Any) -> None:
    """So a worker decodes no lane of another one to measure."""
    jobs = [training(epoch=0, more={"sync_micro_batch": 8}) for _ in range(2)]  # M = 4: two batches a step
    shards = {id(job): Shards([32] * 4) for job in jobs}
    sizes: dict[int, list[int]] = {id(job): [] for job in jobs}

    def act(job: Any) -> None:
        job.state.register_callbacks([GBACallback(mode="auto")])
        own = shards[id(job)]
        for batch in gba_hvd.batches(ShardedStream(own.names, own.read, count=own.count), job.state):
            sizes[id(job)].append(len(batch["label"]))
            step_of_shards(job, batch)

    workers.together(jobs, act)
    assert list(sizes.values()) == [[8] * 4 + [4, 4] + [8] * 3] * 2
    assert [len(set(own.read_so_far)) for own in shards.values()] == [2, 2]


@pytest.mark.slow
def test_an_operator_s_auto_reaches_the_chief_from_any_host_and_all_workers_measure(
    workers: Any, on_host: Any, clicks: Any
) -> None:
    jobs, asked = [on_host(host, more={"sync_micro_batch": 8}) for host in "ab"], [("auto", "asked for")]
    callbacks = [GBACallback(mode="allreduce") for _ in jobs]
    for job, callback in zip(jobs, callbacks, strict=True):
        job.state.register_callbacks([callback])
    data = [clicks(96), clicks(96)]

    def train(job: Any) -> None:
        job.state.sync()
        if job is jobs[1]:  # where the line to the host's server stands otherwise
            requests = job.state.engine.participant(ModeRequests)
            requests.operator_request = lambda: asked.pop() if asked else None
        job.epoch(data[jobs.index(job)])

    workers.together(jobs, train)
    assert [callback.mode for callback in callbacks] == ["auto", "auto"]
    for own in data:
        assert [len(rows) for rows in own.taken] == [8, 8, 8, 8, 4, 4, 8]


def test_an_operator_s_request_counts_more_than_rank_0_s_in_the_same_commit(training: Any) -> None:
    job, callback = training(), GBACallback(mode="auto")
    job.state.register_callbacks([callback])
    job.state.sync()
    requests = job.state.engine.participant(ModeRequests)
    callback.mode_request = lambda step, current: ("gba", "measured")
    requests.operator_request = lambda: ("allreduce", "a demonstration")
    fields = torch.zeros(requests.n_fields())
    requests.before_commit(fields)
    requests.after_commit(fields.tolist())
    assert callback.mode == "allreduce" and job.state.engine.signals.requested_mode is None


def test_emulated_times_and_the_parallelism_are_those_of_all_its_micro_batches(
    training: Any, clicks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, slept = training(more={"sync_micro_batch": 8}), []
    job.state.register_callbacks([gba_hvd.FaultSchedule().serve(1000.0).gamma(seed=3)])
    monkeypatch.setattr("gba_hvd.training.engine.time.sleep", slept.append)
    job.epoch(clicks(16))
    alone = gba_hvd.FaultSchedule().serve(1000.0).gamma(seed=3)
    times = [alone.service(0, 0, 0.0, micro=i) for i in range(4)]
    assert slept == pytest.approx([times[0] + times[1], times[2] + times[3]], rel=0.01)
    assert job.state.engine.elp == 8


def test_workers_that_disagree_on_it_do_not_train_together(workers: Any, on_host: Any, clicks: Any) -> None:
    jobs = [on_host("a", more={"sync_micro_batch": 8}), on_host("a")]
    with pytest.raises(StateMismatch, match=r"workers .1. have another model or other settings"):
        workers.together(jobs, lambda job: job.epoch(clicks(54)))


def test_a_pass_over_other_samples_is_refused_where_contributors_count(training: Any, clicks: Any) -> None:
    job = training(row_average="contributors", more={"sync_micro_batch": 8})
    embed = job.tables

    def apart(ids: Any) -> Any:
        first, more = embed({"user": ids["user"], "item": ids["item"][:3]}), embed({"item": ids["item"][3:]})
        return {**first, "item": torch.cat([first["item"], more["item"]])}

    del job.model.embed
    job.model.embed = apart
    with pytest.raises(BadInput, match=r"a forward pass over . samples in a batch of 8.*use row_average='global'"):
        job.epoch(clicks(50))


def test_a_field_with_fewer_samples_than_the_others_is_refused_where_contributors_count(make_tables: Any) -> None:
    """One row for the whole batch is in every micro-batch of it, which its place does not say."""
    tables = make_tables({"user": (20, 4), "item": (9, 4)})
    tables.notes_samples = True
    out = tables({"user": torch.tensor([5, 5, 5, 6]), "item": torch.tensor([3])})
    with torch.no_grad():
        tables({"user": torch.tensor([1])})
    tables({"user": torch.tensor([2])})  # nothing is computed with it
    (out["user"] + out["item"]).sum().backward()
    with pytest.raises(BadInput, match=r"a forward pass over 1 and 4 samples in a batch of 4"):
        tables.contributors(2, 4)
    tables.take_gradients()
    tables({"user": torch.tensor([2])})
    (found,) = tables.contributors(2, 4)
    assert not len(found.keys)


def test_rows_of_bags_count_once_for_each_micro_batch_that_has_them(make_tables: Any) -> None:
    tables = make_tables({"user": (20, 4), "item": (9, 4)})
    tables.notes_samples = True
    bag = gba_hvd.Bag(torch.tensor([1, 1, 2, 1, 3]), torch.tensor([0, 2, 2, 4]))  # samples: 1 1 | - | 2 1 | 3
    ids = {"user": torch.tensor([5, 5, 5, 6]), "item": bag}
    for _ in range(2):  # twice the same: a micro-batch contains a row once
        sum(out.sum() for out in tables(ids).values()).backward()
    (found,) = tables.contributors(2, 4)
    tables.take_gradients()
    key = {name: tables.keys_of(0, [(name, torch.arange(7))]) for name in ("user", "item")}
    counts = dict(zip(found.keys.tolist(), found.values[:, 0].tolist(), strict=True))
    expected = {key["user"][5]: 2, key["user"][6]: 1, key["item"][1]: 2, key["item"][2]: 1, key["item"][3]: 1}
    assert counts == {int(k): float(n) for k, n in expected.items()}
    tables.stacked({"user": ids["user"], "item": torch.tensor([0, 1, 1, 1])}).sum().backward()
    (found,) = tables.contributors(2, 4)
    assert found.values[:, 0].tolist() == [2.0, 1.0, 1.0, 2.0]  # user 5, user 6, item 0, item 1


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"mode": "gba"}, {"mode": "async", "switch_at": {9: "gba"}}], ids=str)
def test_a_job_of_asynchronous_modes_only_refuses_it(training: Any, settings: dict[str, Any]) -> None:
    job = training(more={"sync_micro_batch": 8})
    with pytest.raises(BadInput, match=r"sync_micro_batch=8 is for .* and this job asks for '.*only"):
        job.state.register_callbacks([GBACallback(**settings)])


@pytest.mark.parametrize("settings", [{}, {"mode": "gba", "switch_at": {9: "allreduce"}}], ids=str)
def test_a_job_that_may_be_in_allreduce_mode_takes_it(training: Any, settings: dict[str, Any]) -> None:
    training(more={"sync_micro_batch": 8}).state.register_callbacks([GBACallback(**settings)])


# --- the decision for a mode -----------------------------------------------------------------------------------------


def test_a_prediction_takes_large_batches_for_allreduce_only() -> None:
    rates = Rates((0.1, 0.1), (4, 4), 8, exchange_s=0.0, serve_s=0.0)
    allreduce, gba = predicted(rates)
    large = Rates((0.1, 0.1), (4, 4), 8, exchange_s=0.0, serve_s=0.0, sync_share=0.5)
    assert predicted(large) == (pytest.approx(2 * allreduce), pytest.approx(gba))


def test_what_single_micro_batches_take_is_measured_before_anything_is_decided() -> None:
    """Two workers, one three times slower; 8 micro-batches, of which 4 at once take half of their time."""
    callback = GBACallback(min_stay=0, patience=1)
    for step in range(4):
        callback.measured_allreduce(step, [0.05, 0.15], 0.61, 8, together=4)
    assert callback.last is None
    callback.measured_allreduce(4, [0.1, 0.3], 1.21, 8, together=1, is_sample=True)
    for step in range(5, 20):
        callback.measured_allreduce(step, [0.05, 0.15], 0.61, 8, together=4)
    assert callback.last is not None
    gba, allreduce = 1 / 0.103 + 1 / 0.303, 8 / 0.61
    assert callback.last.gain == pytest.approx(gba / allreduce, rel=0.02)
    callback.switched("gba", 20)
    for step in range(20, 30):
        callback.measured_async(step, [0.1, 0.3], 8, 0.003, together=4)
    assert callback.last.gain == pytest.approx(gba / allreduce, rel=0.02), "seen from gba it is the same"
