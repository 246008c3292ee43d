"""A row counts as saved once the manifest that has it is there, and not before; also across processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recovery.selection.update_tracker import Tracker
from recovery.testing import two_tables
from recovery.torch_rows.tensor_rows import TensorRows

MANIFEST = "manifests/000001-00000001.json"
NEXT = "manifests/000001-00000002.json"


@pytest.fixture
def rows() -> TensorRows:
    return two_tables(n_rows=6)


def touch(rows: TensorRows, *ids: int) -> None:
    rows.touched("user", np.array(ids))
    with rows.step():
        pass


def saved(tracker: Tracker, rows: TensorRows, manifest: str | None, full: bool = True) -> None:
    tracker.begin(full)
    for table in (0, 1):
        n = len(rows.slab(table, 0))
        tracker.record(table, 0, slice(0, n), rows.slab(table, 0).counts)
    if manifest:
        tracker.commit(manifest)


def test_updates_since_the_last_save_are_counted(rows: TensorRows) -> None:
    tracker = Tracker(rows)
    saved(tracker, rows, MANIFEST)
    touch(rows, 1, 4)
    touch(rows, 4)
    assert tracker.updates_since_save(0, 0).tolist() == [0, 1, 0, 0, 2, 0]
    assert tracker.is_valid_for(MANIFEST)


def test_an_update_during_a_save_is_not_lost(rows: TensorRows) -> None:
    tracker = Tracker(rows)
    tracker.begin(full=False)
    read = rows.slab(0, 0).counts.copy()
    touch(rows, 2)  # after the row was read, before the commit
    tracker.record(0, 0, slice(0, 6), read)
    tracker.commit(MANIFEST)
    assert tracker.updates_since_save(0, 0).tolist() == [0, 0, 1, 0, 0, 0]


def test_counters_may_go_round(rows: TensorRows) -> None:
    tracker = Tracker(rows)
    rows.slab(0, 0).counts[3] = 0xFFFFFFFF
    saved(tracker, rows, MANIFEST)
    touch(rows, 3)
    touch(rows, 3)
    assert tracker.updates_since_save(0, 0).tolist() == [0, 0, 0, 2, 0, 0]


def test_a_partial_save_that_fails_changes_nothing(rows: TensorRows) -> None:
    tracker = Tracker(rows)
    saved(tracker, rows, MANIFEST)
    touch(rows, 1)
    tracker.begin(full=False)
    tracker.record(0, 0, np.array([1]), rows.slab(0, 0).counts[[1]])
    tracker.rollback()
    assert tracker.updates_since_save(0, 0).tolist() == [0, 1, 0, 0, 0, 0]
    assert tracker.is_valid_for(MANIFEST)


def test_what_is_noted_may_be_overwritten_at_once(rows: TensorRows) -> None:
    tracker = Tracker(rows)
    saved(tracker, rows, MANIFEST)
    touch(rows, 1)
    places, counts = np.array([1]), rows.slab(0, 0).counts[[1]]
    tracker.begin(full=False)
    tracker.record(0, 0, places, counts)
    places[0], counts[0] = 5, 99
    tracker.commit(NEXT)
    assert tracker.updates_since_save(0, 0).tolist() == [0] * 6


def test_a_full_save_that_fails_makes_the_tracker_worthless(rows: TensorRows) -> None:
    tracker = Tracker(rows)
    saved(tracker, rows, MANIFEST)
    saved(tracker, rows, None)
    tracker.rollback()
    assert not tracker.is_valid_for(MANIFEST)
    assert not tracker.is_valid_for(None)


def test_what_was_restored_is_saved(rows: TensorRows) -> None:
    touch(rows, 1)
    tracker = Tracker(rows)
    tracker.restored(MANIFEST)
    assert tracker.is_valid_for(MANIFEST)
    assert not tracker.updates_since_save(0, 0).any()


def test_after_a_partial_restore_the_other_shards_keep_what_they_have() -> None:
    rows = two_tables(n_shards=2, n_rows=6)
    tracker = Tracker(rows)
    tracker.restored(MANIFEST)
    touch(rows, 0, 1)
    tracker.restored(MANIFEST, [1])
    assert tracker.is_valid_for(MANIFEST)
    assert (tracker.updates_since_save(0, 0).sum(), tracker.updates_since_save(0, 1).sum()) == (1, 0)
    tracker.restored("an older one", [1])
    assert not tracker.is_valid_for(MANIFEST)


def test_in_a_file_it_survives_its_process(rows: TensorRows, tmp_path: Path) -> None:
    first = Tracker(rows, tmp_path / "tracker", "memory 1")
    saved(first, rows, MANIFEST)
    touch(rows, 5)
    first.close()
    second = Tracker(rows, tmp_path / "tracker", "memory 1")
    assert second.is_valid_for(MANIFEST)
    assert second.updates_since_save(0, 0).tolist() == [0, 0, 0, 0, 0, 1]
    second.close()


@pytest.mark.parametrize("when", ["in a full save", "in a commit", "with a torn header", "with other counters"])
def test_after_a_death_the_file_is_worth_nothing(rows: TensorRows, tmp_path: Path, when: str) -> None:
    path = tmp_path / "tracker"
    first = Tracker(rows, path, "memory 1")
    saved(first, rows, MANIFEST)
    if when == "in a full save":
        saved(first, rows, None)
    elif when == "in a commit":
        first.begin(full=False)
        first.record(0, 0, np.array([7]), np.array([1], np.uint32))  # applying it fails
        with pytest.raises(IndexError):
            first.commit(NEXT)
    first.close()
    if when == "with a torn header":
        data = bytearray(path.read_bytes())
        data[60] ^= 1
        path.write_bytes(data)
    second = Tracker(rows, path, "memory 2" if when == "with other counters" else "memory 1")
    assert not second.is_valid_for(MANIFEST)
    assert not second.is_valid_for(NEXT)
    second.close()
