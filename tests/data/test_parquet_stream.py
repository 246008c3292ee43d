"""`ParquetStream`: its order, what it reads, and what it refuses."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gba_hvd
from gba_hvd.data import ParquetStream
from gba_hvd.data.row_group_order import RowGroupOrder

SIZES = ([30, 30, 17], [30, 1])  # rows of the row groups of two files


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    first, urls = 0, []
    for number, groups in enumerate(SIZES):
        path = tmp_path / f"part-{number}.parquet"
        rows = np.arange(first, first := first + sum(groups))
        lists = pa.array([None if row % 5 == 4 else [row] * (row % 3) for row in rows.tolist()], pa.list_(pa.int32()))
        columns = {"user": rows, "words": lists, "price": rows / 2, "click": rows % 2 == 0, "buy": rows % 3}
        table = pa.table(columns)
        with pq.ParquetWriter(path, table.schema) as writer:
            at = 0
            for n in groups:
                writer.write_table(table.slice(at, n))
                at += n
        urls.append(f"file://{path}")
    return urls


def stream(urls: Any, **more: Any) -> ParquetStream:
    settings: dict[str, Any] = {"ids": ["user", "words"], "dense": ["price"], "label": "click"}
    return ParquetStream(urls, **{**settings, **more})


@pytest.mark.parametrize("window", [1, 2, 3, 100])
def test_an_epoch_has_every_sample_once_and_any_part_is_found_by_its_position(window: int):
    sizes = np.array([30, 30, 17, 30, 1])
    order = RowGroupOrder(sizes, seed=3, epoch=1, window=window)
    whole = order.rows(0, 108)
    assert sorted(whole.tolist()) == list(range(108))
    for first in range(0, 108, 7):
        n = min(16, 108 - first)
        np.testing.assert_array_equal(order.rows(first, n), whole[first : first + n])
    assert whole.tolist() != RowGroupOrder(sizes, 3, 2, window).rows(0, 108).tolist()
    assert whole.tolist() != RowGroupOrder(sizes, 4, 1, window).rows(0, 108).tolist()


def test_neighbouring_samples_share_the_row_groups_of_a_window():
    sizes = np.full(40, 25)
    rows = RowGroupOrder(sizes, seed=0, epoch=0, window=4).rows(0, 1000).reshape(10, 100)
    assert [len(set((window // 25).tolist())) for window in rows] == [4] * 10
    assert (np.diff(rows[0]) != 1).mean() > 0.9


def test_samples_arrive_whole_in_the_order_asked_for(files: list[str]):
    data = stream(files)
    rows = np.array([107, 3, 77, 3, 76, 14, 59, 60])
    batch = data.take(rows)
    assert len(data) == 108
    assert batch.ids["user"].tolist() == rows.tolist()
    assert batch.dense[:, 0].tolist() == (rows / 2).tolist()
    assert batch.label.tolist() == [float(row % 2 == 0) for row in rows]
    bag = batch.ids["words"]
    assert isinstance(bag, gba_hvd.Bag)
    words = np.split(bag.values.numpy(), bag.offsets.numpy()[1:])
    assert [one.tolist() for one in words] == [[] if row % 5 == 4 else [row] * (row % 3) for row in rows.tolist()]


def test_several_labels_and_tables_of_other_names(files: list[str]):
    batch = stream(files, ids={"customer": "user"}, label=["click", "buy"]).take(np.array([4, 5]))
    assert list(batch.ids) == ["customer"]
    assert batch.label.tolist() == [[1.0, 1.0], [0.0, 2.0]]


def test_a_row_group_is_read_once_while_it_is_kept(files: list[str], monkeypatch: pytest.MonkeyPatch):
    data, read = stream(files, cached_groups=2), []
    decoded = ParquetStream._decoded

    def counted(self: ParquetStream, *which: Any) -> Any:
        read.append(which[1])
        return decoded(self, *which)

    monkeypatch.setattr(ParquetStream, "_decoded", counted)
    for rows in ([0, 1, 31], [29, 32], [61], [31], [0]):
        data.take(np.array(rows))
    assert read == [0, 1, 2, 0]


def test_a_glob_is_the_files_in_the_order_of_their_names(files: list[str], tmp_path: Path):
    assert stream(f"file://{tmp_path}/*.parquet").take(np.array([107])).ids["user"].tolist() == [107]


def test_it_travels_to_another_process_without_what_it_has_read(files: list[str]):
    data = stream(files)
    data.take(np.arange(108))
    copy = pickle.loads(pickle.dumps(data))
    assert not copy._kept
    assert copy.order_digest == data.order_digest != stream(files, window=2).order_digest
    assert copy.take(np.array([5])).ids["user"].tolist() == [5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ids": ["usr"]}, "has no column 'usr'; it has user, words"),
        ({"ids": ["price"]}, "column 'price' has double, and ids are whole numbers"),
        ({"ids": "user"}, "ids and dense are lists of columns"),
        ({"label": "words"}, "column 'words' has list"),
        ({"window": 0}, "window and cached_groups must be 1 or more"),
    ],
)
def test_columns_and_settings_that_cannot_be_used_are_refused(files: list[str], settings: dict[str, Any], message: str):
    with pytest.raises(gba_hvd.BadInput, match=message):
        stream(files, **settings)


def test_missing_values_and_files_are_refused(tmp_path: Path):
    path = tmp_path / "holes.parquet"
    pq.write_table(pa.table({"user": [1, None], "words": [[1], [2]], "price": [1.0, 2.0], "click": [0, 1]}), path)
    with pytest.raises(gba_hvd.BadInput, match=r"row group 0, column 'user': 1 of 2 values are missing"):
        stream(str(path)).take(np.array([0]))
    (tmp_path / "text.parquet").write_text("no Parquet at all, but long enough")
    with pytest.raises(gba_hvd.BadInput, match=r"text.parquet cannot be read as Parquet"):
        stream(str(tmp_path / "text.parquet"))
    with pytest.raises(gba_hvd.BadInput, match="no file matches"):
        stream(f"{tmp_path}/*.pq")
