"""Raw files become a store once, whoever comes first; other data just opens."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gba_hvd_tools import cli

from ctr.config import Data, Synthetic
from ctr.datasets import open_splits, prepared_splits, store_of
from gba_hvd.data.presets import FRAPPE_FIELDS
from gba_hvd.errors import BadInput


@pytest.fixture
def frappe(tmp_path: Path) -> Data:
    """A folder as Frappe comes, much smaller."""
    folder, rng = tmp_path / "frappe", np.random.default_rng(3)
    folder.mkdir()
    for split, n in (("train", 60), ("valid", 20), ("test", 10)):
        rows = [
            ",".join(map(str, [int(rng.random() < 0.4), *rng.integers(0, 5, len(FRAPPE_FIELDS))])) for _ in range(n)
        ]
        (folder / f"{split}.csv").write_text("\n".join(["label," + ",".join(FRAPPE_FIELDS), *rows, ""]))
    (folder / "README.txt").write_text("not data")
    return Data(preset="frappe", dir=str(folder), cache=str(tmp_path / "cache"))


def test_raw_files_are_prepared_into_the_cache_and_read_from_there(frappe: Data) -> None:
    assert prepared_splits(frappe) is None
    splits = open_splits(frappe)
    assert splits.sizes == {"train": 60, "valid": 20, "test": 10}
    assert list(splits.train.tables) == list(FRAPPE_FIELDS)
    again = prepared_splits(frappe)
    assert again is not None and again.description == splits.description


def test_workers_that_start_together_prepare_once(frappe: Data, capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(4) as workers:
        sizes = [splits.sizes for splits in workers.map(open_splits, [frappe] * 4)]
    assert sizes == 4 * [{"train": 60, "valid": 20, "test": 10}]
    assert capsys.readouterr().err.count("once, into") == 1


def test_changed_files_or_settings_are_prepared_again(frappe: Data) -> None:
    first, _ = store_of(frappe)
    other_setting, _ = store_of(Data(preset="frappe", dir=frappe.dir, cache=frappe.cache, min_count=3))
    os.utime(Path(frappe.dir) / "train.csv", ns=(1, 1))
    other_files, _ = store_of(frappe)
    assert len({first, other_setting, other_files}) == 3


def test_a_prepared_store_is_opened_as_it_is(frappe: Data) -> None:
    store, _ = store_of(frappe)
    open_splits(frappe)
    assert open_splits(Data(preset="frappe", dir=str(store), cache="/nowhere")).sizes["train"] == 60


def test_a_store_without_test_samples_is_refused_with_what_to_do(
    frappe: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("test.csv", "README.txt"):
        (tmp_path / "frappe" / name).unlink()
    options = ["--label", "label", "--categorical", "rest", "--out", str(tmp_path / "store")]
    assert cli.main(["data", "prepare", str(tmp_path / "frappe"), *options]) == 0
    assert "no split test: examples/train_ctr.py needs it" in capsys.readouterr().out
    with pytest.raises(BadInput, match=r"the splits train, valid, and .*--test PATH .*or cut all files with --split"):
        open_splits(Data(dir=str(tmp_path / "store")))


def test_synthetic_splits_are_different_rows_of_one_truth() -> None:
    splits = open_splits(Data(synthetic=Synthetic(train=1000, valid=300, test=20_000)))
    assert splits.sizes == {"train": 1000, "valid": 300, "test": 20_000}
    starts = [splits.description[name]["start"] for name in ("train", "valid", "test")]
    assert starts == [0, 1000, 1300]
    assert splits.auc_bayes is not None and 0.75 < splits.auc_bayes < 0.85


@pytest.mark.slow
def test_each_epoch_of_a_log_by_day_has_its_own_samples_and_is_tested_on_the_day_after() -> None:
    made = Synthetic(train=1000, valid=300, test=200, by_day=True, drift=0.2)
    splits = open_splits(Data(synthetic=made))
    assert splits.auc_bayes is None, "each day has its own"
    taken: list[int] = []
    for epoch in range(3):
        day = splits.of_epoch(epoch)
        about = [day.description[name] for name in ("train", "valid", "test")]
        assert [part["day"] for part in about] == [epoch, epoch, epoch + 1]
        for part in about:
            taken += range(part["start"], part["start"] + part["samples"])
        assert day.auc_bayes is not None and 0.6 < day.auc_bayes < 0.95
    assert len(set(taken)) == len(taken), "no sample twice"


def test_a_log_without_days_is_the_same_in_every_epoch() -> None:
    splits = open_splits(Data(synthetic=Synthetic(train=100, valid=50, test=50)))
    assert splits.of_epoch(7) is splits


def test_a_folder_that_lacks_a_split_is_refused(frappe: Data) -> None:
    (Path(frappe.dir) / "valid.csv").unlink()
    with pytest.raises(BadInput, match="no file for valid; frappe has train, valid and test"):
        open_splits(frappe)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Data(preset="frappe"), "name the folder of its files, or a prepared store, with --data DIR"),
        (Data(preset="frappe", dir="/nowhere"), "--data /nowhere: no such file or folder"),
        (Data(preset="netflix", dir="/tmp"), r"expected one of synthetic, behaviour, criteo-kaggle, .*, got 'netflix'"),
    ],
)
def test_data_that_cannot_be_found_is_refused_with_what_to_do(data: Data, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        open_splits(data)
