"""`ParquetStream`: its order, what it reads, and what it refuses."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import gba_hvd
from gba_hvd.data import ParquetStream
from gba_hvd.data.hashing import hash_strings
from gba_hvd.data.row_group_order import RowGroupOrder
from gba_hvd.epoch import EpochPlan
from gba_hvd.reading.datasets import Block
from tests.unit.shm.test_shard_memory import until

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


@pytest.mark.parametrize("n_micro", [1, 2, 3, 8])
@pytest.mark.parametrize("window", [1, 2, 100, None])
def test_an_epoch_has_every_sample_once_and_any_part_is_found_by_its_position(window: int | None, n_micro: int):
    sizes, plan = np.array([30, 30, 17, 30, 1]), EpochPlan(108, 4 * n_micro, 4)
    order = RowGroupOrder(sizes, 3, 1, plan, window)
    whole = order.rows(0, 108)
    assert sorted(whole.tolist()) == list(range(108))
    for first in range(0, 108, 7):
        n = min(16, 108 - first)
        np.testing.assert_array_equal(order.rows(first, n), whole[first : first + n])
    assert whole.tolist() != RowGroupOrder(sizes, 3, 2, plan, window).rows(0, 108).tolist()
    assert whole.tolist() != RowGroupOrder(sizes, 4, 1, plan, window).rows(0, 108).tolist()


def test_the_micro_batches_of_a_lane_share_the_row_groups_of_a_window():
    sizes, plan = np.full(40, 25), EpochPlan(1000, 100, 25)
    order = RowGroupOrder(sizes, 0, 0, plan, window=2)
    rows = order.rows(0, 1000).reshape(10, 4, 25)
    groups_of = [[set((rows[step, lane] // 25).tolist()) for step in range(10)] for lane in range(4)]
    for lane, steps in enumerate(groups_of):
        for at in range(0, 10, 2):
            assert steps[at] | steps[at + 1] == set(order.block(4 * at + lane).groups)
            assert len(steps[at] | steps[at + 1]) == 2
        assert len(set().union(*steps)) == 10
    assert (np.diff(rows[0, 0]) != 1).mean() > 0.7
    block = order.block(2)
    windows = [block]
    while (block := order.after(block)) is not None:
        windows.append(block)
    assert [(one.lane, one.window) for one in windows] == [(2, window) for window in range(5)]


def test_few_row_groups_are_cut_in_pieces_for_several_lanes():
    rng = np.random.default_rng(2)
    for _ in range(50):
        sizes = rng.integers(1, 60, int(rng.integers(1, 30)))
        n, n_micro = int(sizes.sum()), int(rng.integers(1, 12))
        plan = EpochPlan(n, 5 * n_micro, 5)
        rows = RowGroupOrder(sizes, 1, 0, plan).rows(0, n)
        assert sorted(rows.tolist()) == list(range(n))
        lane_of = (np.arange(n) // 5) % n_micro
        group_of = np.repeat(np.arange(len(sizes)), sizes)[rows]
        assert len(set(zip(lane_of.tolist(), group_of.tolist(), strict=True))) <= len(sizes) + n_micro - 1


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


@pytest.mark.parametrize(("row", "place"), [(0, (0, 0, 0)), (59, (0, 1, 29)), (60, (0, 2, 0)), (107, (1, 1, 0))])
def test_a_sample_is_found_in_its_file_by_row_group_and_row(files: list[str], row: int, place: tuple[int, int, int]):
    number, group, inside = place
    assert stream(files).place_of(row) == f"{files[number]}, row group {group}, row {inside}"


def test_several_labels_and_tables_of_other_names(files: list[str]):
    batch = stream(files, ids={"customer": "user"}, label=["click", "buy"], ratings=["buy"]).take(np.array([4, 5]))
    assert list(batch.ids) == ["customer"]
    assert batch.label.tolist() == [[1.0, 1.0], [0.0, 2.0]]


def test_a_row_group_is_read_once_while_it_is_kept(files: list[str], decoded: list[tuple[str, int]]):
    data = stream(files[0], cached_groups=2)
    for rows in ([0, 1, 31], [29, 32], [61], [31], [0]):
        data.take(np.array(rows))
    assert [group for _, group in decoded] == [0, 1, 2, 0]


def test_what_is_announced_is_decoded_ahead_and_kept(files: list[str], decoded: list[tuple[str, int]]):
    data = stream(files)
    data.will_read(Block(0, 0, (1, 3)), Block(0, 1, (4,)))
    until(lambda: len(decoded) == 3)
    assert sorted(decoded) == [("part-0.parquet", 1), ("part-1.parquet", 0), ("part-1.parquet", 1)]
    data.end_reading()
    data.take(np.array([31, 78, 107]))
    assert len(decoded) == 3
    assert not [thread for thread in threading.enumerate() if thread.name == "gba-hvd groups"]


def test_a_failed_read_ahead_is_raised_where_the_samples_are_read(files: list[str]):
    data = stream(files)
    Path(files[1].removeprefix("file://")).unlink()
    data.will_read(Block(0, 0, (3,)), None)
    data.end_reading()
    with pytest.raises(gba_hvd.BadInput, match="the file is gone since the stream was opened"):
        data.take(np.array([100]))


@pytest.mark.parametrize("pattern", ["*.parquet", "part-[01].parquet", "part-?.parquet", "", "/"])
def test_a_pattern_or_folder_is_the_files_in_the_order_of_their_names(files: list[str], tmp_path: Path, pattern: str):
    (tmp_path / "_SUCCESS").touch()
    found = stream(f"file://{tmp_path}/{pattern}" if pattern != "" else str(tmp_path))
    assert len(found) == 108
    assert found.take(np.array([107])).ids["user"].tolist() == [107]


def test_a_file_may_have_a_name_that_looks_like_a_pattern(files: list[str], tmp_path: Path):
    (tmp_path / "part-0.parquet").rename(tmp_path / "part[0].parquet")
    assert len(stream(f"{tmp_path}/part[0].parquet")) == 77


def test_it_travels_to_another_process_without_what_it_has_read(files: list[str]):
    data = stream(files)
    data.take(np.arange(108))
    copy = pickle.loads(pickle.dumps(data))
    assert not copy._groups._kept
    assert copy.order_digest == data.order_digest != stream(files, window=2).order_digest
    assert copy.take(np.array([5])).ids["user"].tolist() == [5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ids": ["usr"]}, "has no column 'usr'; it has user, words"),
        ({"ids": ["price"]}, "column 'price' has double, and ids are whole numbers"),
        ({"ids": "user"}, "ids and dense are lists of columns"),
        ({"ids": ["price"]}, "fill those in and write the column as int64"),
        ({"hashed": ["user"]}, "column 'user' of hashed= has int64, expected strings"),
        ({"hashed": ["price"]}, r"hashed is a list of columns that ids has too \(user, words\), got \['price'\]"),
        ({"label": "words"}, r"column 'words' has list<.*>, expected numbers\. Write it as float32"),
        ({"ratings": ["buy"]}, r"ratings is a list of columns that label has too \(click\), got \['buy'\]"),
        ({"ratings": "click"}, "ratings is a list of columns"),
        ({"missing_becomes": {"user": 0}}, r"missing_becomes is for columns of dense \(price\), got 'user'"),
        ({"missing_becomes": {"click": 0}, "dense": []}, r"for columns of dense \(none\), got 'click'"),
        ({"missing_becomes": {"price": float("nan")}}, r"missing_becomes\['price'\] must be a finite number, got nan"),
        ({"missing_becomes": {"price": 1e39}}, "must be a finite number, got 1e"),
        ({"missing_becomes": {"price": "0"}}, "must be a finite number, got '0'"),
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
    with pytest.raises(gba_hvd.BadInput, match=r"the files of nowhere://bucket/\* cannot be listed: ValueError"):
        stream("nowhere://bucket/*")
    (tmp_path / "day=1").mkdir()
    path.rename(tmp_path / "day=1" / "holes.parquet")
    with pytest.raises(
        gba_hvd.BadInput, match=r"has no column 'day'; it has .*; day=\.\.\. in its path is no column here"
    ):
        stream(f"{tmp_path}/day=1", ids=["day"])


# --- the files are still the same ------------------------------------------------------------------------------------


def write(path: Path, rows: np.ndarray) -> str:
    pq.write_table(pa.table({"user": rows, "words": rows, "price": rows / 2, "click": rows % 2}), path)
    return str(path)


def test_other_files_or_another_order_of_them_are_another_digest(tmp_path: Path):
    one = write(tmp_path / "a.parquet", np.arange(40))
    two = write(tmp_path / "b.parquet", np.arange(40)[::-1].copy())  # the same sizes and statistics
    digests = {stream(urls).order_digest for urls in ([one, two], [two, one], [one, one], [one])}
    assert len(digests) == 4
    assert stream([one, two]).order_digest == stream([one, two]).order_digest
    assert stream([one, two], window=3).order_digest not in digests


def test_another_days_content_of_the_same_sizes_is_another_digest(tmp_path: Path):
    path = write(tmp_path / "a.parquet", np.arange(40))
    before = stream(path).order_digest
    write(tmp_path / "a.parquet", np.arange(1, 41))
    assert stream(path).order_digest != before


def test_a_copy_with_another_time_is_the_same_file(tmp_path: Path):
    path = write(tmp_path / "a.parquet", np.arange(40))
    before = stream(path).order_digest
    os.utime(path, (1, 1))
    assert stream(path).order_digest == before


@pytest.mark.parametrize("n", [40, 7])
def test_a_file_that_is_rewritten_after_it_was_opened_is_refused(tmp_path: Path, n: int):
    data = stream(write(tmp_path / "a.parquet", np.arange(40)))
    os.utime(write(tmp_path / "a.parquet", np.arange(100, 100 + n)), (5, 5))
    with pytest.raises(gba_hvd.BadInput, match=r"a.parquet: the file has changed since the stream was opened .*resume"):
        data.take(np.array([3]))


def test_a_damaged_file_is_said_to_be_damaged(tmp_path: Path):
    path = Path(write(tmp_path / "a.parquet", np.arange(40)))
    path.write_bytes(path.read_bytes()[:4] + bytes(60) + path.read_bytes()[64:])
    with pytest.raises(gba_hvd.BadInput, match="row group 0: cannot be read, though the file has not changed"):
        stream(str(path)).take(np.array([3]))


# --- values ----------------------------------------------------------------------------------------------------------


def taken(tmp_path: Path, rows: list[int], columns: dict[str, Any], **settings: Any) -> gba_hvd.Batch:
    pq.write_table(pa.table({"click": pa.array([0.0, 1.0, 0.0]), **columns}), tmp_path / "a.parquet")
    settings = {"ids": ["user"], "label": "click", **settings}
    return ParquetStream(str(tmp_path / "a.parquet"), **settings).take(np.array(rows))


def test_an_unsigned_id_is_the_signed_one_of_the_same_bits(tmp_path: Path):
    user = pa.array([1, 2**63 + 5, 2**64 - 1], pa.uint64())
    assert taken(tmp_path, [0, 1, 2], {"user": user}).ids["user"].tolist() == [1, -(2**63) + 5, -1]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_strings_that_are_named_become_their_hashes(tmp_path: Path, kind: pa.DataType):
    columns = {"user": pa.array(["ann", "bob", "ann"], kind), "words": pa.array([["x", "ann"], None, ["x"]])}
    batch = taken(tmp_path, [0, 1, 2], columns, ids=["user", "words"], hashed=["user", "words"])
    ann, bob, x = hash_strings(pa.chunked_array([["ann"], ["bob", "x"]])).view(np.int64).tolist()
    assert (batch.ids["user"].dtype, batch.ids["user"].tolist()) == (torch.int64, [ann, bob, ann])
    bag = batch.ids["words"]
    assert isinstance(bag, gba_hvd.Bag)
    assert (bag.values.tolist(), bag.offsets.tolist()) == ([x, ann, x], [0, 2, 2])
    with pytest.raises(gba_hvd.BadInput, match=r"column 'user' has .*hashed=\['user'\] makes 64-bit ids of strings"):
        taken(tmp_path, [0], columns)


def test_a_missing_string_has_no_hash(tmp_path: Path):
    with pytest.raises(gba_hvd.BadInput, match="row group 0, column 'user': 1 of 3 values are missing"):
        taken(tmp_path, [0], {"user": ["ann", None, ""]}, hashed=["user"])
    with pytest.raises(gba_hvd.BadInput, match="1 of 2 strings are null, and a missing value has no hash"):
        hash_strings(pa.array(["", None]))
    with pytest.raises(gba_hvd.BadInput, match="expected strings, or lists of them, got int64"):
        hash_strings(pa.array([1]))


LISTS = [["ann", "x"], [], None, ["bob"], ["x", "x"]]


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.large_list(pa.dictionary(pa.int32(), pa.string()))])
def test_lists_of_strings_are_hashed_list_by_list(kind: pa.DataType):
    """Also of a part of an array, and of one in chunks."""
    ann, bob, x = hash_strings(pa.array(["ann", "bob", "x"])).tolist()
    expected = [[ann, x], [], [], [bob], [x, x]]
    array = pa.array(LISTS, pa.list_(pa.string())).cast(kind)
    for column, first in ((array, 0), (array[3:], 3), (pa.chunked_array([array[:2], array[2:]]), 0)):
        found = hash_strings(column)
        assert [one.tolist() for one in found] == expected[first:]
        assert all(one.dtype == np.uint64 for one in found)
    assert len(hash_strings(pa.chunked_array([], kind))) == 0


def test_strings_in_lists_of_lists_and_of_a_fixed_size_are_hashed():
    ann, bob = hash_strings(pa.array(["ann", "bob"])).tolist()
    nested = hash_strings(pa.array([[["ann"], ["bob", "ann"]], []]))
    assert [[one.tolist() for one in some] for some in nested] == [[[ann], [bob, ann]], []]
    pairs = hash_strings(pa.array([["ann", "bob"], ["bob", "ann"]], pa.list_(pa.string(), 2)))
    assert [one.tolist() for one in pairs] == [[ann, bob], [bob, ann]]


def test_lists_of_something_else_and_null_in_a_list_are_refused():
    with pytest.raises(gba_hvd.BadInput, match=r"expected strings, or lists of them, got list<.*int64>"):
        hash_strings(pa.array([[1]]))
    with pytest.raises(gba_hvd.BadInput, match="1 of 2 strings are null"):
        hash_strings(pa.array([["a"], [None]]))


@pytest.mark.parametrize("strings", [["a"], np.array(["a"]), "a"])
def test_strings_in_no_pyarrow_array_are_refused_with_what_to_do(strings: Any):
    why = rf"expected a pyarrow array of strings, got {type(strings).__name__}: make it one with pyarrow\.array"
    with pytest.raises(gba_hvd.BadInput, match=why):
        hash_strings(strings)


@pytest.mark.parametrize("has_statistics", [True, False])
def test_a_missing_value_in_any_row_group_is_found_at_the_start_where_the_footer_counts_them(
    tmp_path: Path, has_statistics: bool
):
    columns = {"words": [[1], None, [2, 3], []], "user": [1, 2, 3, 4], "price": [1.0, 2.0, None, 4.0], "click": [0] * 4}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=2, write_statistics=has_statistics)
    said = r"a\.parquet, row group 1, column 'price': 1 of 2 values are missing\. Fill them in"
    if has_statistics:
        with pytest.raises(gba_hvd.BadInput, match=said):
            stream(str(tmp_path / "a.parquet"), ids=["user", "words"])
        return
    late = stream(str(tmp_path / "a.parquet"), ids=["user", "words"])
    assert len(late.take(np.array([0, 1])).label) == 2
    with pytest.raises(gba_hvd.BadInput, match=said):
        late.take(np.array([3]))


def test_null_lists_are_empty_bags_and_no_missing_values(tmp_path: Path):
    columns = {"words": pa.array([[1], None, []], pa.list_(pa.int64())), "user": [1, 2, 3]}
    bag = taken(tmp_path, [0, 1, 2], columns, ids=["user", "words"]).ids["words"]
    assert isinstance(bag, gba_hvd.Bag) and (bag.values.tolist(), bag.offsets.tolist()) == ([1], [0, 1, 1])


@pytest.mark.parametrize("bad", [float("nan"), -float("inf"), 1e39])
def test_a_dense_value_that_is_not_finite_is_named_by_column_file_and_row(tmp_path: Path, bad: float):
    said = rf"a\.parquet, row group 0, column 'price': 1 of 3 values .*at row 1 of the row group, is {bad}".replace(
        "+", r"\+"
    )
    with pytest.raises(gba_hvd.BadInput, match=said):
        taken(tmp_path, [0], {"user": [5, 6, 7], "price": [1.0, bad, 2.0]}, dense=["price"])


@pytest.mark.parametrize(
    "prices",
    [
        pa.array([1.5, None, float("nan")]),
        pa.array(np.array([1.5, 0, np.nan], np.float16), mask=np.array([False, True, False])),
    ],
)
def test_missing_numbers_become_what_is_given_for_their_column(tmp_path: Path, prices: pa.Array):
    columns = {"user": [5, 6, 7], "price": prices, "age": pa.array([None, 2**40, None], pa.uint64())}
    columns |= {"known": pa.array([True, None, False]), "whole": [1, 2, 3]}
    becomes = {"price": -1, "age": np.float32(30.5), "known": 0.5}
    batch = taken(tmp_path, [0, 1, 2], columns, dense=["price", "age", "known", "whole"], missing_becomes=becomes)
    assert batch.dense.T.tolist() == [[1.5, -1, -1], [30.5, 2.0**40, 30.5], [1, 0.5, 0], [1, 2, 3]]
    del becomes["known"]
    message = r"column 'known': 1 of 3 values are missing\. .*missing_becomes= a number for this column"
    with pytest.raises(gba_hvd.BadInput, match=message):
        taken(tmp_path, [0], columns, dense=["price", "age", "known"], missing_becomes=becomes)


def test_infinity_is_no_missing_number(tmp_path: Path):
    columns = {"user": [5, 6, 7], "price": [None, float("inf"), float("nan")]}
    with pytest.raises(gba_hvd.BadInput, match=r"1 of 3 values are NaN, infinite .*at row 1 of the row group, is inf"):
        taken(tmp_path, [0], columns, dense=["price"], missing_becomes={"price": 0})


def test_infinity_is_answered_with_a_substitute_only_beside_nan(tmp_path: Path):
    columns = {"user": [5, 6, 7], "price": [1.0, float("inf"), 2.0]}
    with pytest.raises(gba_hvd.BadInput, match=r"Replace them in the file$"):
        taken(tmp_path, [0], columns, dense=["price"])
    columns["price"][2] = float("nan")
    with pytest.raises(gba_hvd.BadInput, match=r"in the file; for NaN missing_becomes= has a substitute$"):
        taken(tmp_path, [0], columns, dense=["price"])


@pytest.mark.parametrize("becomes", [31.1, 70000.0])
def test_a_substitute_is_not_rounded_to_the_type_of_the_file(tmp_path: Path, becomes: float):
    prices = pa.array(np.array([1.5, np.nan, 2], np.float16))
    batch = taken(
        tmp_path, [1], {"user": [5, 6, 7], "price": prices}, dense=["price"], missing_becomes={"price": becomes}
    )
    assert batch.dense.tolist() == [[float(np.float32(becomes))]]


def test_a_column_whose_values_are_all_missing_is_filled(tmp_path: Path):
    columns = {"user": [5, 6, 7], "price": pa.nulls(3)}
    assert taken(tmp_path, [0, 2], columns, dense=["price"], missing_becomes={"price": 2}).dense.tolist() == [[2], [2]]
    with pytest.raises(gba_hvd.BadInput, match="column 'price' has null, expected numbers"):
        taken(tmp_path, [0], columns, dense=["price"])


def test_other_substitutes_are_another_digest_in_any_order(files: list[str]):
    def digest(**becomes: float) -> int:
        return stream(files, dense=["price", "user"], missing_becomes=becomes).order_digest

    assert digest() == stream(files, dense=["price", "user"]).order_digest
    assert len({digest(), digest(price=1), digest(price=2), digest(user=1)}) == 4
    assert digest(price=1, user=2) == digest(user=2, price=1)


def test_what_missing_numbers_become_can_be_given_to_requests_too(files: list[str]):
    assert stream(files, missing_becomes={"price": 2}).missing_becomes == {"price": 2.0}


def test_lists_of_a_fixed_size_are_bags(tmp_path: Path):
    user = pa.array([[1, 2], [5, 6], [3, 4]], pa.list_(pa.int64(), 2))
    bag = taken(tmp_path, [2, 1, 0], {"user": user}).ids["user"]
    assert isinstance(bag, gba_hvd.Bag)
    assert (bag.values.tolist(), bag.offsets.tolist()) == ([3, 4, 5, 6, 1, 2], [0, 2, 4])


def test_files_without_a_label_give_batches_without_one(tmp_path: Path):
    batch = taken(tmp_path, [2, 0], {"user": [5, 6, 7]}, label=None)
    assert batch.label.shape == (2, 0)
    assert (len(batch), batch.ids["user"].tolist()) == (2, [7, 5])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"click": [0.0, float("nan"), 1.0]}, "column 'click': 1 of 3 labels are NaN"),
        ({"click": [1, 2**24 + 1, 0], "ratings": ["click"]}, "labels are float32, .*one is 16777217"),
        (
            {"click": [1, float("inf"), 0], "ratings": ["click"]},
            r"1 of 3 labels are infinite or beyond float32 \(the first, at row 1 of the row group, is inf\)",
        ),
        ({"click": [1, 2, -1e300], "ratings": ["click"]}, r"at row 2 of the row group, is -1e\+300\)"),
        ({"click": [0, None, 1]}, "column 'click': 1 of 3 values are missing. Leave these samples out"),
    ],
)
def test_labels_that_are_missing_or_would_change_are_refused(tmp_path: Path, columns: Any, message: str):
    settings = {"ratings": columns.pop("ratings")} if "ratings" in columns else {}
    with pytest.raises(gba_hvd.BadInput, match=message):
        taken(tmp_path, [0], {"user": [5, 6, 7], **columns}, **settings)


def test_large_ratings_that_float32_holds_are_kept(tmp_path: Path):
    columns = {"user": [5, 6, 7], "click": [0, 2**25, 1]}
    assert taken(tmp_path, [1], columns, ratings=["click"]).label.tolist() == [2.0**25]


@pytest.mark.parametrize(
    ("click", "n", "row", "shown"),
    [([0, 1, 2, 2], 2, 0, "2"), ([1, 0, 1, -1], 1, 1, "-1"), ([0.0, 1.0, 1.0, 0.25], 1, 1, "0.25")],
)
@pytest.mark.parametrize("has_statistics", [True, False])
def test_a_label_that_is_not_0_or_1_is_named_by_file_row_group_column_and_row(
    tmp_path: Path, click: list[Any], n: int, row: int, shown: str, has_statistics: bool
):
    """At the start where the footer shows it, which has the least and the greatest number of each row group."""
    table = pa.table({"user": [1, 2, 3, 4], "click": click})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2, write_statistics=has_statistics)
    message = (
        rf"a\.parquet, row group 1, column 'click': {n} of 2 labels are not 0 or 1 \(the first, at row {row} of the "
        rf"row group, is {shown}\)\. .*named in ratings="
    )
    settings: dict[str, Any] = {"ids": ["user"], "label": "click"}
    if has_statistics and shown != "0.25":
        with pytest.raises(gba_hvd.BadInput, match=message):
            ParquetStream(str(tmp_path), **settings)
    else:
        data = ParquetStream(str(tmp_path), **settings)
        assert data.take(np.array([0, 1])).label.tolist() == click[:2]
        with pytest.raises(gba_hvd.BadInput, match=message):
            data.take(np.array([2]))
    assert ParquetStream(str(tmp_path), **settings, ratings=["click"]).take(np.arange(4)).label.tolist() == click


@pytest.mark.parametrize("kind", [pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float64()])
def test_labels_0_and_1_of_any_type_are_taken(tmp_path: Path, kind: pa.DataType):
    click = pa.array(np.array([0, 1, 1], kind.to_pandas_dtype()), kind)
    assert taken(tmp_path, [0, 1, 2], {"user": [5, 6, 7], "click": click}).label.tolist() == [0.0, 1.0, 1.0]


def test_no_samples_are_no_batch(files: list[str]):
    with pytest.raises(gba_hvd.BadInput, match="a batch has at least one sample"):
        stream(files).take(np.array([], dtype=np.int64))


def test_a_folder_without_parquet_files_is_refused(tmp_path: Path):
    with pytest.raises(gba_hvd.BadInput, match="is a folder without a file"):
        stream(str(tmp_path))
