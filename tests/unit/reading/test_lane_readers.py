"""Reading a `ParquetStream` in training: who decodes which row groups, how often, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import gba_hvd
from gba_hvd.data import ParquetStream
from gba_hvd.epoch import EpochPlan
from gba_hvd.reading.datasets import Block
from gba_hvd.reading.lane_readers import LaneReaders

GROUPS, SIZE = 64, 48


class Clicks(ParquetStream):
    """For the model of these tests."""

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        batch = super().take(rows)
        user = batch.ids["user"]
        assert isinstance(user, torch.Tensor)
        return gba_hvd.Batch({"user": user % 20, "item": user % 7}, torch.zeros(len(rows), 2), batch.label)


def write(path: Path, rows: np.ndarray, kind: type[ParquetStream] = Clicks) -> Any:
    pq.write_table(pa.table({"user": rows, "click": rows % 2}), path, row_group_size=SIZE)
    return kind(str(path), ids=["user"], label="click")


def read_epoch(data: ParquetStream, plan: EpochPlan, n_workers: int, n_readers: int, together: int = 1) -> list[int]:
    """As in allreduce mode; the samples in the order of the micro-batches."""
    order, found = data.order(3, 0, plan), dict[int, list[int]]()
    all_streams = [[pickle.loads(pickle.dumps(data)) for _ in range(n_readers)] for _ in range(n_workers)]
    for worker, streams in enumerate(all_streams):

        def announce(reader: int, now: Block, after: Block | None, streams: list[Any] = streams) -> None:
            streams[reader].will_read(now, after)

        readers = LaneReaders(order, n_readers, int, announce)
        for step in range(plan.n_steps):
            for share in plan.batches_of_step(step, together)[worker::n_workers]:
                reader = readers.reader_of((share[0], len(share)))
                n = sum(plan.samples_of_micro(micro) for micro in share)
                readers.will_read((share[0], len(share)))
                rows = order.rows(share[0] * plan.micro_batch, n)
                found[share[0]] = streams[reader].take(rows).ids["user"].tolist()
        for one in streams:
            one.end_reading()
    return [sample for first in sorted(found) for sample in found[first]]


@pytest.mark.slow
@pytest.mark.parametrize(("n_workers", "n_readers"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (3, 1), (1, 16)])
def test_each_row_group_is_decoded_about_once_by_all_workers_together(
    tmp_path: Path, decoded: list[tuple[str, int]], n_workers: int, n_readers: int
):
    data = write(tmp_path / "a.parquet", np.arange(GROUPS * SIZE), ParquetStream)
    plan = EpochPlan(GROUPS * SIZE, 8 * 16, 16)
    samples = read_epoch(data, plan, n_workers, n_readers)
    assert sorted(samples) == list(range(GROUPS * SIZE))
    assert sorted(decoded) == [("a.parquet", group) for group in range(GROUPS)]


@pytest.mark.slow
def test_uneven_groups_are_decoded_once_more_at_most_where_lanes_share_them(
    tmp_path: Path, decoded: list[tuple[str, int]]
):
    data = write(tmp_path / "a.parquet", np.arange(GROUPS * SIZE - 20), ParquetStream)
    plan = EpochPlan(GROUPS * SIZE - 20, 6 * 16, 16)
    samples = read_epoch(data, plan, n_workers=3, n_readers=1)
    assert sorted(samples) == list(range(GROUPS * SIZE - 20))
    assert len(decoded) <= GROUPS + 5


@pytest.mark.slow
def test_the_order_is_the_same_for_any_number_of_workers(tmp_path: Path):
    data = write(tmp_path / "a.parquet", np.arange(GROUPS * SIZE), ParquetStream)
    plan = EpochPlan(GROUPS * SIZE, 8 * 16, 16)
    orders = [read_epoch(data, plan, n_workers, n_readers=1, together=two) for n_workers in (1, 3) for two in (1, 2)]
    assert orders[0] == orders[1] == orders[2] == orders[3]


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"prefetch": 0}, {"prefetch": 2}])
def test_training_on_a_stream_decodes_each_row_group_once(
    tmp_path: Path, training: Callable[..., Any], decoded: list[tuple[str, int]], how: dict[str, int]
):
    job = training()
    job.epoch(write(tmp_path / "a.parquet", np.arange(600)), **how)
    assert job.state.samples.applied == 600
    assert sorted(decoded) == [("a.parquet", group) for group in range(13)]


def test_an_epoch_that_began_with_other_files_is_not_resumed(tmp_path: Path, training: Callable[..., Any]):
    job, path = training(), tmp_path / "a.parquet"
    batches = gba_hvd.batches(write(path, np.arange(60)), job.state)
    for _ in range(5):
        job.micro_step(next(batches))
    batches.close()
    with pytest.raises(gba_hvd.StateMismatch, match="order or content of the dataset"):
        next(gba_hvd.batches(write(path, np.arange(60) % 59), job.state))
