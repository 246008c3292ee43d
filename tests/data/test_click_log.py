"""A prepared dataset hands out any rows, and refuses to open when it is not what was written."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gba_hvd.batch import Bag
from gba_hvd.data import Categorical, ClickLog, Identity, Numeric, Recipe, RowEncoder
from gba_hvd.data.store import MANIFEST, verify, write_manifest
from gba_hvd.errors import BadInput

N = 1000
RECIPE = Recipe(
    format="csv",
    label="label",
    categorical=(
        Categorical("item", Identity(N)),
        Categorical("tags", Identity(N), separator="|"),
        Categorical("user", Identity(2 * N)),
    ),
    numeric=(Numeric("size", "none"), Numeric("age", "none")),
)


def tags_of(i: int) -> list[int]:
    return [i] * (i % 4)


@pytest.fixture
def dataset(prepared: Callable[..., dict[str, Any]], tmp_path: Path) -> Path:
    """N rows in many parts: row i has item i, user 2i, size i, age -i, and i i % 4 times as tag."""
    rows = (f"{i % 2},{i},{'|'.join(map(str, tags_of(i)))},{2 * i},{i},{-i}\n" for i in range(N))
    prepared("label,item,tags,user,size,age\n" + "".join(rows), recipe=RECIPE, rows_per_part=64, block_bytes=500)
    return tmp_path / "out"


def check(log: ClickLog, rows: list[int]) -> None:
    batch = log.take(np.array(rows, dtype=np.int64))
    assert len(batch) == len(rows)
    item, tags, user = batch.ids["item"], batch.ids["tags"], batch.ids["user"]
    assert isinstance(item, torch.Tensor)
    assert isinstance(user, torch.Tensor)
    assert isinstance(tags, Bag)
    assert item.dtype == user.dtype == tags.values.dtype == tags.offsets.dtype == torch.int64
    assert batch.dense.dtype == batch.label.dtype == torch.float32
    assert item.tolist() == rows
    assert user.tolist() == [2 * i for i in rows]
    assert batch.dense.tolist() == [[i, -i] for i in rows]
    assert batch.label.tolist() == [i % 2 for i in rows]
    assert tags.values.tolist() == [tag for i in rows for tag in tags_of(i)]
    assert tags.offsets.tolist() == [sum(j % 4 for j in rows[:at]) for at in range(len(rows))]


@pytest.mark.slow
def test_any_rows_in_any_order(dataset: Path) -> None:
    log = ClickLog.open(dataset, "train")
    assert len(log) == N
    assert len(list((dataset / "train").iterdir())) > 10
    check(log, list(range(N)))
    check(log, [999, 0, 500, 500, 1])
    check(log, [3])
    check(log, [])
    check(log, np.random.default_rng(0).integers(0, N, 300).tolist())


@pytest.mark.slow
def test_columns_of_a_batch_are_views_of_one_tensor(dataset: Path) -> None:
    ids = ClickLog.open(dataset).take(np.arange(10)).ids
    assert isinstance(ids["item"], torch.Tensor)
    assert isinstance(ids["user"], torch.Tensor)
    assert ids["item"].is_contiguous()
    assert ids["item"].untyped_storage().data_ptr() == ids["user"].untyped_storage().data_ptr()


@pytest.mark.slow
def test_it_knows_its_tables_and_says_what_it_is(dataset: Path) -> None:
    log = ClickLog.open(dataset)
    assert log.tables == {"item": N, "tags": N, "user": 2 * N}
    assert list(log.tables) == ["item", "tags", "user"]
    assert (log.n_dense, log.dense_names) == (2, ("size", "age"))
    assert json.loads(json.dumps(log.description))["samples"] == N


@pytest.mark.slow
@pytest.mark.parametrize("row", [-1, N, N + 5])
def test_a_row_outside_is_refused(dataset: Path, row: int) -> None:
    with pytest.raises(IndexError, match=f"row {row} is outside the click log, which has rows 0 to 999"):
        ClickLog.open(dataset).take(np.array([0, row]))


@pytest.mark.slow
def test_it_travels_to_other_processes_as_its_path(dataset: Path) -> None:
    packed = pickle.dumps(ClickLog.open(dataset))
    assert len(packed) < 1000
    check(pickle.loads(packed), [5, 1])


@pytest.mark.slow
def test_an_unknown_split_is_answered_with_what_there_is(dataset: Path) -> None:
    with pytest.raises(BadInput, match="no split 'trian'; there is train"):
        ClickLog.open(dataset, "trian")


def test_a_folder_without_manifest_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no dataset\.json here, so this is no prepared dataset"):
        ClickLog.open(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_cut_part_is_named(dataset: Path, keep: int) -> None:
    part = dataset / "train/part-00003.arrow"
    part.write_bytes(part.read_bytes()[:keep])
    with pytest.raises(BadInput, match=r"part-00003\.arrow: \d+ bytes, expected \d+: the file is cut or was changed"):
        ClickLog.open(dataset)


@pytest.mark.slow
def test_a_missing_part_is_named(dataset: Path) -> None:
    (dataset / "train/part-00003.arrow").unlink()
    with pytest.raises(BadInput, match=r"part-00003\.arrow: cannot be opened"):
        ClickLog.open(dataset)


@pytest.mark.slow
def test_a_part_with_damaged_ends_is_named(dataset: Path) -> None:
    part = dataset / "train/part-00003.arrow"
    whole = part.read_bytes()
    for damaged in (bytes(len(whole)), whole[:-8] + b"x" * 8, whole[:-200] + b"x" * 190 + whole[-10:]):
        part.write_bytes(damaged)
        with pytest.raises(BadInput, match=r"part-00003\.arrow: "):
            ClickLog.open(dataset)


@pytest.mark.slow
def test_parts_cannot_be_swapped(dataset: Path) -> None:
    first, last = sorted((dataset / "train").iterdir())[:: len(list((dataset / "train").iterdir())) - 1]
    manifest = json.loads((dataset / MANIFEST).read_text())
    manifest["splits"]["train"]["parts"][0]["bytes"] = last.stat().st_size
    (dataset / MANIFEST).write_text(json.dumps(manifest))
    first.write_bytes(last.read_bytes())
    with pytest.raises(BadInput, match=r"part-00000\.arrow: \d+ rows, expected \d+"):
        ClickLog.open(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_any_flipped_byte_is_found_by_verify(dataset: Path, at: int) -> None:
    assert verify(dataset) == []
    part = dataset / "train/part-00003.arrow"
    content = bytearray(part.read_bytes())
    content[len(content) * at // 4] ^= 1
    part.write_bytes(content)
    assert len(verify(dataset)) == 1
    assert "part-00003.arrow: checksum" in verify(dataset)[0]


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "other"}'])
def test_a_damaged_manifest_is_named(dataset: Path, content: str) -> None:
    (dataset / MANIFEST).write_text(content)
    with pytest.raises(BadInput, match=r"dataset\.json: "):
        ClickLog.open(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("open_it", [ClickLog.open, RowEncoder.open, verify])
def test_a_pipe_as_manifest_is_refused(dataset: Path, open_it: Callable[[Path], object]) -> None:
    (dataset / MANIFEST).unlink()
    os.mkfifo(dataset / MANIFEST)
    with pytest.raises(BadInput, match=r"dataset\.json: it is no regular file \(a pipe, .*; remove it"):
        open_it(dataset)


def test_a_manifest_of_another_version_is_refused(dataset: Path) -> None:
    manifest = json.loads((dataset / MANIFEST).read_text())
    (dataset / MANIFEST).write_text(json.dumps(manifest | {"version": 99}))
    with pytest.raises(BadInput, match="version 99, this program reads versions 1 and 2; prepare the dataset again"):
        ClickLog.open(dataset)


@pytest.mark.slow
def test_a_store_of_the_first_version_is_read(dataset: Path) -> None:
    """It has one label, and a table for each field."""
    now, manifest = ClickLog.open(dataset), json.loads((dataset / MANIFEST).read_text())
    del manifest["labels"]
    for field in manifest["fields"]:
        del field["table"]
    (dataset / MANIFEST).write_text(json.dumps(manifest | {"version": 1}))
    before = ClickLog.open(dataset)
    assert (before.tables, before.features, len(before)) == (now.tables, now.features, len(now))
    assert before.take(np.arange(3)).label.tolist() == now.take(np.arange(3)).label.tolist()


@pytest.mark.slow
def test_a_manifest_that_lacks_something_is_refused(dataset: Path) -> None:
    manifest = json.loads((dataset / MANIFEST).read_text())
    del manifest["fields"]
    (dataset / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BadInput, match=r"dataset\.json lacks 'fields'"):
        ClickLog.open(dataset)


@pytest.mark.slow
def test_samples_are_traced_to_their_files(dataset: Path) -> None:
    log = ClickLog.open(dataset)
    parts = json.loads((dataset / MANIFEST).read_text())["splits"]["train"]["parts"]
    part, second = [str(dataset / one["file"]) for one in parts], parts[0]["rows"]
    assert log.files_of(np.array([second, 1])) == f"{part[0]}, {part[1]}"
    every = log.files_of(np.arange(len(log)))
    assert every.startswith(", ".join(part[:3]) + " and ") and every.endswith(" more files")
    assert pickle.loads(pickle.dumps(log)).files_of(np.array([0])) == part[0]


@pytest.mark.parametrize("name", ["../x/part.arrow", "/x/part.arrow"])
def test_a_part_outside_the_folder_of_the_dataset_is_refused(tmp_path: Path, name: str) -> None:
    part = {"file": name, "rows": 1, "bytes": 1, "crc32": 0}
    write_manifest(tmp_path, {"splits": {"train": {"rows": 1, "parts": [part]}}, "fields": [], "numeric": []})
    for read in (ClickLog.open, verify):
        with pytest.raises(BadInput, match=f"dataset.json: the part '{name}' is not in"):
            read(tmp_path)
