"""`ShardedStream`: epochs of unknown length, as segments that are counted before they are trained."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import gba_hvd
from gba_hvd.data import ShardedStream
from gba_hvd.epoch import EpochPlan
from gba_hvd.reading.datasets import reads
from tests.unit.thread_world import EventLog

SIZES = [13, 0, 30, 7, 22, 1, 18, 40, 5, 0]


class Shards:
    """Reads shards of samples that know who they are; remembers which were read."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.read_so_far = sizes, list[str]()

    @property
    def names(self) -> list[str]:
        return [f"shard-{number}" for number in range(len(self.sizes))]

    def read(self, name: str) -> Iterator[dict[str, Any]]:
        self.read_so_far.append(name)
        shard = int(name.partition("-")[2])
        for number in range(self.sizes[shard]):
            ids = {"user": (7 * shard + number) % 20, "item": number % 7}
            yield {
                "ids": ids,
                "dense": torch.full((2,), number / 50),
                "label": float(number % 2),
                "row": (shard, number),
            }

    def count(self, name: str) -> int:
        return self.sizes[int(name.partition("-")[2])]

    @property
    def samples(self) -> list[tuple[int, int]]:
        return sorted((shard, number) for shard, n in enumerate(self.sizes) for number in range(n))


def step(job: Any, batch: Any) -> list[tuple[int, int]]:
    job.optimizer.zero_grad()
    out = job.tables(batch["ids"])
    logits = job.model.mlp(torch.cat([out["user"], out["item"], batch["dense"]], dim=1)).squeeze(1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["label"].float())
    loss.backward()
    job.optimizer.step(loss=loss)
    return list(zip(*(column.tolist() for column in batch["row"]), strict=True))


def train(job: Any, dataset: Any, **how: Any) -> list[tuple[int, int]]:
    found = []
    for batch in gba_hvd.batches(dataset, job.state, **how):
        found += step(job, batch)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"prefetch": 0}, {"shuffle": False}])
@pytest.mark.parametrize("segment", [1, 3, 100, None])
@pytest.mark.parametrize("counts", [True, False])
def test_an_epoch_has_every_sample_once(
    training: Callable[..., Any], segment: int | None, counts: bool, how: dict[str, Any]
):
    job, shards = training(epoch=0), Shards(SIZES)
    data = ShardedStream(shards.names, shards.read, count=shards.count if counts else None, segment=segment)
    found = train(job, data, **how)
    assert sorted(found) == shards.samples
    assert job.state.samples.applied == job.state.samples.total == sum(SIZES)
    if how.get("shuffle", True):
        assert found != shards.samples
        job.state.epoch = 1
        again = train(job, data, **how)
        assert sorted(again) == shards.samples
        assert again != found
    assert not [thread for thread in threading.enumerate() if thread.name == "gba-hvd groups"]


@pytest.mark.parametrize("counts", [True, False])
def test_a_shard_is_read_once_to_be_counted_and_trained(training: Callable[..., Any], counts: bool):
    job, shards = training(epoch=0), Shards(SIZES)
    train(job, ShardedStream(shards.names, shards.read, count=shards.count if counts else None, segment=4))
    assert max(Counter(shards.read_so_far).values()) == 1


@pytest.mark.slow
def test_the_order_depends_on_the_seed_and_not_on_how_it_is_counted(training: Callable[..., Any]):
    orders = []
    for seed, counts in ((0, True), (0, False), (1, False)):
        shards = Shards(SIZES)
        data = ShardedStream(shards.names, shards.read, count=shards.count if counts else None, segment=4)
        orders.append(train(training(epoch=0), data, seed=seed))
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.slow
def test_counting_is_reported_once_and_each_time_that_it_is_slow(
    training: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    for slow_s, n_slow in ((1e9, 0), (0.0, 4)):
        monkeypatch.setattr(sys.modules["gba_hvd.batches"], "_SLOW_COUNT_S", slow_s)
        job, shards, reported = training(epoch=0), Shards(SIZES), EventLog()
        job.state.register_callbacks([reported])
        train(job, ShardedStream(shards.names, shards.read, segment=3))
        (counting,) = reported.of("counting")
        assert counting.message == "epoch 0, segment 1 of 4: 3 shards are counted before they are trained"
        found = reported.of("counted")
        assert len(found) == n_slow
    assert sum(event.data["samples"] for event in found) == sum(SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("n_workers", [2, 3])
def test_each_worker_counts_the_shards_of_its_lanes(training: Callable[..., Any], workers: Any, n_workers: int):
    jobs = [training(epoch=0) for _ in range(n_workers)]
    shards = {id(job): Shards([20] * 16) for job in jobs}
    found: dict[int, list[Any]] = {}

    def act(job: Any) -> None:
        mine = shards[id(job)]
        found[id(job)] = train(job, ShardedStream(mine.names, mine.read, segment=8))

    workers.together(jobs, act)
    assert sorted(row for rows in found.values() for row in rows) == Shards([20] * 16).samples
    read = Counter(name for one in shards.values() for name in one.read_so_far)
    assert sum(read.values()) == 16, read


def test_workers_with_other_shards_name_those_that_are_missing(training: Callable[..., Any], workers: Any):
    jobs, errors = [training(epoch=0) for _ in range(2)], list[str]()

    def act(job: Any) -> None:
        shards = Shards([20] * 6)
        names = shards.names if job is jobs[0] else [name for name in shards.names if name != "shard-4"]
        with pytest.raises(gba_hvd.StateMismatch) as refused:
            train(job, ShardedStream(names, shards.read, segment=3))
        assert not shards.read_so_far
        errors.append(str(refused.value))

    workers.together(jobs, act)
    assert len(errors) == 2
    assert all("6 on rank 0; 5 on rank 1, missing: shard-4. All need" in error for error in errors), errors


@pytest.mark.slow
@pytest.mark.parametrize(("n_workers", "n_shards", "n_warned"), [(1, 1, 0), (2, 16, 0), (2, 1, 1)])
def test_workers_that_read_the_same_shards_are_warned_of(
    training: Callable[..., Any], workers: Any, n_workers: int, n_shards: int, n_warned: int
):
    jobs, shards, reported = [training(epoch=0) for _ in range(n_workers)], Shards([100] * n_shards), EventLog()
    jobs[0].state.register_callbacks([reported])
    workers.together(jobs, lambda job: train(job, ShardedStream(shards.names, shards.read)))
    warned = reported.of("few_row_groups")
    assert len(warned) == n_warned
    assert all("the samples are in 1 row groups or shards" in event.message for event in warned)


@pytest.mark.slow
def test_an_epoch_resumes_in_the_segment_where_it_stands(training: Callable[..., Any]):
    whole, shards = training(epoch=0), Shards(SIZES)
    expected = train(whole, ShardedStream(shards.names, shards.read, segment=3))
    job = training(epoch=0)
    batches = gba_hvd.batches(ShardedStream(shards.names, shards.read, segment=3), job.state)
    found = []
    while job.state.engine.progress.cursor.segment < 2 or job.state.engine.progress.cursor.steps_done < 1:
        found += step(job, next(batches))
    batches.close()
    n = len(found)
    later = train(job, ShardedStream(shards.names, shards.read, segment=3))
    assert found + later == expected
    assert 0 < n < len(expected)
    assert job.state.samples.total == sum(SIZES)


def test_a_segment_that_has_changed_is_not_resumed(training: Callable[..., Any]):
    job, shards = training(epoch=0), Shards([40, 40])
    batches = gba_hvd.batches(ShardedStream(shards.names, shards.read), job.state)
    for _ in range(5):
        step(job, next(batches))
    batches.close()
    shards.sizes = [40, 41]
    with pytest.raises(gba_hvd.StateMismatch, match="samples 80, here 81"):
        next(gba_hvd.batches(ShardedStream(shards.names, shards.read), job.state))


def stopped(training: Callable[..., Any], steps_done: int) -> Any:
    """A job that has trained two segments of 4 of 16 shards, and so many steps of the third."""
    job, shards = training(epoch=0), Shards([16] * 16)
    batches = gba_hvd.batches(ShardedStream(shards.names, shards.read, segment=4), job.state, seed=4)
    for _ in range(32 + 4):
        step(job, next(batches))
    batches.close()
    progress = job.state.engine.progress
    assert (progress.cursor.segment, progress.cursor.steps_done) == (2, 1)
    progress.cursor.steps_done = steps_done  # 0: a coordinator has opened the ledger, and nothing is decided
    return job


@pytest.mark.slow
@pytest.mark.parametrize("steps_done", [0, 1])
@pytest.mark.parametrize("segment_of_order", [1, 2])  # in an asynchronous mode rank 0 may be behind
@pytest.mark.parametrize(
    ("n_shards", "segment", "how", "words"),
    [
        (16, 100, {}, "shards in a segment 4, here 100"),
        (16, 2, {}, "shards in a segment 4, here 2"),
        (8, 4, {}, "shards 16, here 8"),
        (24, 4, {}, "shards 16, here 24"),
        (16, 4, {"seed": 5}, "seed 4, here 5"),
        (16, 4, {"shuffle": False}, "shuffle True, here False"),
    ],
)
def test_an_epoch_is_not_resumed_with_other_shards(
    training: Callable[..., Any], n_shards: int, segment: int, how: dict[str, Any], words: str,
    segment_of_order: int, steps_done: int,
):  # fmt: skip
    job, shards = stopped(training, steps_done), Shards([16] * n_shards)
    progress = job.state.engine.progress
    progress.order = dataclasses.replace(progress.order, segment=segment_of_order)
    with pytest.raises(
        gba_hvd.StateMismatch,
        match=f"epoch 0 stands at step {steps_done} of segment 2 of what was begun with.* {words}",
    ):
        train(job, ShardedStream(shards.names, shards.read, segment=segment), **{"seed": 4, **how})
    assert shards.read_so_far == []


def test_an_epoch_is_not_resumed_with_shards_in_another_order(training: Callable[..., Any]):
    job, shards = stopped(training, 1), Shards([16] * 16)
    with pytest.raises(gba_hvd.StateMismatch, match="digest of their names"):
        train(job, ShardedStream(shards.names[::-1], shards.read, segment=4), seed=4)


@pytest.mark.slow
def test_a_position_beyond_the_last_segment_is_refused_without_a_record_of_the_shards(training: Callable[..., Any]):
    job, shards = stopped(training, 1), Shards([16] * 16)
    progress = job.state.engine.progress
    progress.order = dataclasses.replace(progress.order, n_shards=0, in_segment=0, shards=0)  # of a version before
    with pytest.raises(gba_hvd.StateMismatch, match="stands in segment 2, and the dataset has segments 0 to 1 here"):
        train(job, ShardedStream(shards.names, shards.read, segment=8), seed=4)
    found = train(job, ShardedStream(shards.names, shards.read, segment=4), seed=4)
    assert len(found) == 16 * 16 - 9 * 16
    assert job.state.samples.total == 16 * 16


@pytest.mark.slow
def test_the_next_epoch_may_have_other_shards(training: Callable[..., Any]):
    job = training(epoch=0)
    for job.state.epoch, (n_shards, segment) in enumerate([(16, 4), (24, 4), (24, 5)]):
        shards = Shards([16] * n_shards)
        found = train(job, ShardedStream(shards.names, shards.read, segment=segment))
        assert sorted(found) == shards.samples


def test_a_shard_with_another_number_of_samples_than_counted_is_refused(training: Callable[..., Any]):
    shards = Shards([20, 20])
    data = ShardedStream(shards.names, shards.read, count=lambda name: 21)
    with pytest.raises(gba_hvd.BadInput, match="has 20 samples, and 21 were counted"):
        train(training(epoch=0), data)


def test_a_stream_without_any_sample_is_an_empty_epoch_with_a_warning(training: Callable[..., Any]):
    job, shards = training(epoch=0), Shards([0, 0, 0])
    with pytest.warns(UserWarning, match="epoch 0: no shard of the ShardedStream has a sample"):
        assert train(job, ShardedStream(shards.names, shards.read, segment=1)) == []
    assert job.state.samples.total == 0


@pytest.mark.parametrize("how", [{}, {"prefetch": 0}, {"num_workers": 1}])
def test_a_shard_that_cannot_be_read_is_named(training: Callable[..., Any], how: dict[str, Any]):
    def read(name: str) -> Iterator[Any]:
        yield from Shards([5]).read("shard-0")
        if name == "shard-1":
            raise EOFError("half a line")

    with pytest.raises(gba_hvd.BadInput, match=r"read\('shard-1'\) failed: EOFError: half a line"):
        train(training(epoch=0), ShardedStream(["shard-0", "shard-1"], read), **how)
    counted = ShardedStream(["shard-0", "shard-1"], read, count={"shard-0": 5}.__getitem__)
    with pytest.raises(gba_hvd.BadInput, match=r"count\('shard-1'\) failed: KeyError"):
        train(training(epoch=0), counted, **how)


def test_only_datasets_of_known_length_are_evaluated(training: Callable[..., Any]):
    job, shards = training(epoch=0), Shards(SIZES)
    stream = ShardedStream(shards.names, shards.read)
    with pytest.raises(gba_hvd.BadInput, match="how many samples a ShardedStream has is not known"):
        gba_hvd.evaluate(job.model, stream, job.state)  # type: ignore[arg-type]


@pytest.mark.slow
def test_shards_that_were_counted_ahead_are_given_up_after_a_switch(training: Callable[..., Any]):
    job, shards = training(epoch=0), Shards([16] * 48)
    data = ShardedStream(shards.names, shards.read, segment=12)
    found, n_kept = [], dict[int, int]()
    for batch in gba_hvd.batches(data, job.state):
        found += step(job, batch)
        segment = job.state.engine.progress.cursor.segment
        n_kept[segment] = max(n_kept.get(segment, 0), len(data._samples._kept))
        job.state.engine.mode.steps_together = segment == 0  # as in a mode with servers
    assert sorted(found) == shards.samples
    assert n_kept[0] > 12 and max(n_kept[2], n_kept[3]) <= 9  # of 4 lanes 2 windows each, and one more shard


@pytest.mark.slow
@pytest.mark.parametrize("size", [6, 10, 16, 40])
@pytest.mark.parametrize("how", [{}, {"prefetch": 6}])
def test_a_shard_is_kept_until_what_is_read_ahead_of_it_is_read(
    training: Callable[..., Any], how: dict[str, Any], size: int
):
    """With one lane, batches of several windows are read ahead, and three shards are kept."""
    job, shards = training(epoch=0, micro_batch=16), Shards([size] * 24)
    train(job, ShardedStream(shards.names, shards.read, count=shards.count, segment=24), **how)
    assert set(Counter(shards.read_so_far).values()) == {1}


def test_each_shard_of_a_batch_is_looked_up_once(monkeypatch: pytest.MonkeyPatch):
    shards = Shards([40, 40])
    part = ShardedStream(shards.names, shards.read).segment(0, 0, 0, 4, False)
    part.counted([40, 40])
    looked_up, get = Counter[int](), part._stream._samples.get
    monkeypatch.setattr(part._stream._samples, "get", lambda shard: looked_up.update([shard]) or get(shard))
    numbers = [79, 3, 40, 4, 39]
    assert [one["row"] for one in part.__getitems__(numbers)] == [(1, 39), (0, 3), (1, 0), (0, 4), (0, 39)]
    assert looked_up == {0: 1, 1: 1}
    assert [one["row"] for one in part] == shards.samples


def test_leaving_the_loop_ends_what_reads_ahead(training: Callable[..., Any]):
    shards = Shards([20] * 16)
    batches = gba_hvd.batches(ShardedStream(shards.names, shards.read, segment=4), training(epoch=0).state)
    next(batches)
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gba-hvd")]


def test_the_state_needs_an_epoch(training: Callable[..., Any]):
    shards = Shards(SIZES)
    with pytest.raises(gba_hvd.BadInput, match="the state needs an epoch"):
        train(training(), ShardedStream(shards.names, shards.read))


def test_a_segment_travels_to_another_process_with_its_counts():
    shards = Shards(SIZES)
    part = ShardedStream(shards.names, shards.read, segment=4).segment(0, 0, 0, 4, True)
    part.counted([part.count(at) for at in range(4)])
    copy = pickle.loads(pickle.dumps(part))
    numbers = list(range(len(part)))
    taken = reads(copy, collate_fn=list)(np.array(numbers))
    assert [one["row"] for one in taken] == [one["row"] for one in part.__getitems__(numbers)]
    assert copy.order_digest == part.order_digest
    plan = EpochPlan(len(part), 16, 4)
    assert sorted(copy.order(0, 0, plan).rows(0, len(part)).tolist()) == numbers


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shards": []}, "names of one or more shards"),
        ({"shards": ["a", 3]}, "names of one or more shards, got 3"),
        ({"shards": ["a", "b", "a"]}, "shard 'a' is there twice"),
        ({"read": "a"}, "read is a function"),
        ({"count": 3}, "count is a function"),
        ({"segment": 0}, "segment must be 1 or more"),
        ({"window": 0}, "window must be 1 or more"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(gba_hvd.BadInput, match=message):
        ShardedStream(**{"shards": ["a"], "read": Shards([1]).read, **settings})


def test_a_count_that_is_no_number_is_refused(training: Callable[..., Any]):
    data = ShardedStream(["a"], Shards([1]).read, count=lambda name: "many")  # type: ignore[arg-type, return-value]
    with pytest.raises(gba_hvd.BadInput, match=r"count\('a'\) is a number of samples, 0 or more, got 'many'"):
        train(training(epoch=0), data)
