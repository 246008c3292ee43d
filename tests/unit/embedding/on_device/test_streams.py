"""The order between a GPU's streams, followed on a CPU through the code that a GPU runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gba_hvd
from gba_hvd import EmbeddingTables
from gba_hvd.embedding.on_device import host_view, streams
from gba_hvd.embedding.on_device.host_view import HostWrites, NumberOnItsWay
from gba_hvd.embedding.on_device.prepared_ids import PreparedIds, prepare
from gba_hvd.embedding.on_device.row_gradients import MergedRowGrad
from gba_hvd.embedding.on_device.rows import DeviceRows
from tests.unit.embedding.on_device.followed_streams import FollowedStream, FollowedStreams

MakeTables = Callable[..., EmbeddingTables]
SIZES = {"user": (50, 4), "item": (90, 4)}
CPU = torch.device("cpu")


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> FollowedStreams:
    found = FollowedStreams()
    monkeypatch.setattr(streams, "of", lambda device: found)
    return found


def rows_of(tables: EmbeddingTables, hot_rows: int) -> DeviceRows:
    assert tables.memory is not None
    return DeviceRows(tables.memory.flat, tables.layout, CPU, hot_rows)


def train(rows: DeviceRows, tables: EmbeddingTables, steps: int = 4) -> None:
    """Neighbouring steps have rows in common."""
    for step in range(1, steps + 1):
        keys = torch.from_numpy(np.random.default_rng(step).integers(0, 60, 40))
        found, index, weights = rows.look_up(0, keys)
        counts = torch.bincount(index, minlength=len(found.keys)).to(torch.int32)
        grad = MergedRowGrad(found.keys, weights * 0.1, counts, found)
        rows.apply(0, grad, tables.optimizers, 0.5, 0.1, step)
        rows.finish(step)


@pytest.mark.parametrize("hot_rows", [0, 16, 1000])
def test_steps_read_rows_after_they_are_written_and_keep_what_is_being_written(
    followed: FollowedStreams, make_tables: MakeTables, hot_rows: int
) -> None:
    tables = make_tables(SIZES, gba_hvd.Adagrad(lr=0.1))
    rows = rows_of(tables, hot_rows)
    flat = torch.from_numpy(rows._view.tensor.numpy())
    with followed:
        train(rows, tables)
        assert (followed.races, followed.not_kept) == ([], [])
        to_host = [op for name, op in followed.written if name == "stream 1"]
        assert to_host.count("aten::fill_") == 4 and to_host[-1] == "aten::fill_", "the mark is written last"
        assert to_host.count("aten::scatter_") == 4
        assert not followed.host_reads(flat), "the host does not wait"
        rows.wait()
        assert followed.host_reads(flat)
    rows.close()


@contextlib.contextmanager
def no_wait_before_writing(self: HostWrites, *used: Tensor) -> Iterator[None]:
    assert self._streams is not None and self._stream is not None
    with self._streams.using(self._stream):
        yield
    self._streams.used_by(self._stream, *used)


@pytest.mark.parametrize(
    ("where", "name", "what", "found"),
    [
        (HostWrites, "before_reading", lambda self: None, "aten::index_select in first does not wait for"),
        (HostWrites, "after", no_wait_before_writing, "in stream 1 does not wait for"),
        (FollowedStreams, "used_by", lambda *given: None, "in stream 1 uses memory of first"),
    ],
)
def test_a_wait_that_is_missing_is_found(
    followed: FollowedStreams,
    make_tables: MakeTables,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    what: Any,
    found: str,
) -> None:
    tables = make_tables(SIZES, gba_hvd.Adagrad(lr=0.1))
    rows = rows_of(tables, 0)
    monkeypatch.setattr(where, name, what)
    with followed:
        train(rows, tables)
        assert any(found in one for one in (*followed.races, *followed.not_kept))
    rows.close()


@pytest.mark.parametrize("breaks", ["", "wait_event", "used_by"])
def test_keys_that_are_copied_ahead_are_waited_for_and_kept(
    followed: FollowedStreams, make_tables: MakeTables, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    tables = make_tables(SIZES)
    rows = rows_of(tables, 0)
    if breaks:
        monkeypatch.setattr(FollowedStream if breaks == "wait_event" else FollowedStreams, breaks, lambda *given: None)
    ids = {"user": torch.tensor([1, 2, 3]), "item": torch.tensor([4, 5, 4])}
    plain = tables._plain(tuple(ids))
    assert plain is not None
    with followed:
        prepared = prepare(ids, plain, rows)
        assert isinstance(prepared, PreparedIds)
        there = prepared.of(rows)
        assert there is not None
        rows.look_up(0, there.keys.reshape(-1))
        assert [bool(followed.races), bool(followed.not_kept)] == [breaks == "wait_event", breaks == "used_by"]
    rows.close()


def test_a_number_is_read_when_its_copy_is_there(followed: FollowedStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    with followed:
        loss = torch.ones(3).sum()
        assert NumberOnItsWay(loss).get() == 3.0 and not followed.races
        monkeypatch.setattr(host_view.NumberOnItsWay, "get", lambda self: float(self._number))
        assert NumberOnItsWay(loss + 1).get() == 4.0 and followed.races
