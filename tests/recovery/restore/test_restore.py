"""What was saved is what is restored: bit for bit, into any number of shards, and only where it was asked for."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recovery.config import Config
from recovery.errors import BadInput, Damaged, StoreError
from recovery.format import row_codec
from recovery.format.manifest import _TWO_HASHES, to_json
from recovery.restore import TrainingPoint, restore
from recovery.restore.row_loader import spread
from recovery.storage.store import Store
from recovery.testing import SMALL, RamStore, Saver, train, two_tables, values
from recovery.torch_rows.tensor_rows import RowParts, TensorRows
from tests.recovery.holders import assert_same, shard_values
from tests.recovery.stores import FaultyStore

SHARDS = (1, 2, 3, 4, 6)
Expected = dict[str, np.ndarray]


def empty(n_shards: int = 1) -> TensorRows:
    return two_tables(n_shards, seed=None)


def delta_chain(store: Store, n_shards: int = 2) -> tuple[Saver, list[Expected]]:
    """A base and three deltas; and the rows as they were at each."""
    saver, expected = Saver(two_tables(n_shards), store), []
    for _ in range(4):
        saver.save()
        expected.append(values(saver.rows))
        train(saver.rows, 2, seed=1)
    return saver, expected


def test_an_empty_store_restores_nothing(ram: RamStore) -> None:
    assert restore(ram, empty()) is None


@pytest.mark.slow
def test_a_base_comes_back_from_every_kind_of_store(store: Store) -> None:
    saver = Saver(two_tables(), store)
    train(saver.rows, 3, seed=1)
    saver.save()
    rows = empty()
    report = restore(store, rows)
    assert report is not None
    assert_same(values(rows), values(saver.rows))
    assert (report.step, report.samples, report.state) == (3, 30, b"state of step 3")
    assert (report.n_rows, report.n_lost, report.skipped) == (5011, 0, ())


def test_a_checkpoint_that_is_saved_between_two_listings_is_not_taken_for_damaged(ram: RamStore) -> None:
    saver, rows = Saver(two_tables(), ram), empty()
    saver.save()
    before = values(saver.rows)
    train(saver.rows, 3, seed=1)
    store = FaultyStore(ram).slows("names", 2, saver.save)
    report = restore(store, rows)
    assert store.fired == store.planned and len(saver.made) == 2
    assert report is not None and report.skipped == ()
    assert_same(values(rows), before)


@pytest.mark.parametrize("level", [0, 3])
def test_a_chain_of_deltas_comes_back_as_its_newest_save(ram: RamStore, level: int) -> None:
    saver = Saver(two_tables(2), ram, replace(SMALL, level=level))
    for _ in range(4):
        saver.save()
        train(saver.rows, 2, seed=1)
    saver.save()
    rows = empty(2)
    report = restore(ram, rows)
    assert report is not None
    assert_same(values(rows), values(saver.rows))
    assert len(report.chain.manifests) == 5
    assert saver.made[1].n_bytes < saver.made[0].n_bytes / 10


@pytest.mark.slow
@pytest.mark.parametrize("saved_in", SHARDS)
@pytest.mark.parametrize("n_shards", SHARDS)
def test_any_number_of_shards_goes_into_any_other(ram: RamStore, saved_in: int, n_shards: int) -> None:
    saver, expected = delta_chain(ram, saved_in)
    rows = empty(n_shards)
    report = restore(ram, rows)
    assert report is not None
    assert report.n_rows == saver.rows.schema.n_rows
    assert_same(values(rows), expected[-1])


@pytest.mark.slow
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 200))
def test_every_row_of_a_shard_is_spread_to_where_it_belongs(saved_in: int, n_shards: int, n_rows: int) -> None:
    found = {}
    for shard in range(saved_in):
        n_places = len(range(shard, n_rows, saved_in))
        for into, start, stride in spread(shard, saved_in, n_shards):
            cycle = len(spread(shard, saved_in, n_shards))
            for i, place in enumerate(range(start, n_places, cycle)):
                found[shard + saved_in * place] = (into, (shard + saved_in * start) // n_shards + stride * i)
    assert found == {row: (row % n_shards, row // n_shards) for row in range(n_rows)}


@pytest.mark.parametrize("saved_in", SHARDS)
def test_lost_shards_come_back_and_no_other_byte_changes(ram: RamStore, saved_in: int) -> None:
    _, expected = delta_chain(ram, saved_in)
    rows = two_tables(4, seed=99)
    before = {shard: shard_values(rows, shard) for shard in (0, 3)}
    report = restore(ram, rows, [1, 2], with_state=False)
    assert report is not None
    assert {shard: shard_values(rows, shard) for shard in (0, 3)} == before
    whole = empty(4)
    restore(ram, whole)
    assert [shard_values(rows, s) for s in (1, 2)] == [shard_values(whole, s) for s in (1, 2)]
    assert report.n_rows == sum(t.rows_in(s, 4) for t in rows.schema.tables for s in (1, 2))
    assert report.state is None
    assert_same(values(whole), expected[-1])


def test_only_what_lost_shards_need_is_read(ram: RamStore) -> None:
    saver, _ = delta_chain(ram, 4)
    report = restore(ram, empty(4), [2], with_state=False)
    assert report is not None
    assert report.n_bytes < 0.3 * sum(manifest.n_bytes for manifest in saver.made)


def test_shards_that_are_not_here_cannot_be_restored(ram: RamStore) -> None:
    with pytest.raises(BadInput, match=r"shards \[7\] are not here"):
        restore(ram, empty(2), [0, 7])


def test_the_report_says_how_old_each_row_is_and_what_was_lost(ram: RamStore) -> None:
    saver = Saver(two_tables(2), ram)
    saver.save()
    for _ in range(10):
        train(saver.rows, 1, seed=1)
    changed = np.count_nonzero(saver.rows.slab(0, 0).counts) + np.count_nonzero(saver.rows.slab(1, 0).counts)
    saver.save()
    rows = empty(2)
    report = restore(ram, rows, [0], now=TrainingPoint(step=15, samples=150, total_samples=1000))
    assert report is not None
    assert (report.age.least, report.age.most) == (5, 15)
    assert report.age.mean == pytest.approx(15 - 10 * changed / report.n_rows)
    assert report.samples_since == 50
    # The second save has all that changed: no row lost more than what came since.
    assert report.saved_samples == 100
    assert report.pls == pytest.approx(50 / 1000 * report.n_rows / 5011)


def test_rows_of_another_step_than_the_state_are_counted_by_step(ram: RamStore) -> None:
    """Also where a save follows: rows that it has not were of another step than their own save, which is long past."""
    saver, found = Saver(two_tables(2), ram), []
    saver.save()
    for ahead in (2, -1, 0):
        train(saver.rows, 3, seed=1)
        n = sum(section.n_rows for blob in saver.save(ahead=ahead).blobs for section in blob.sections)
        report = restore(ram, empty(2))
        assert report is not None
        found.append(report.of_other_steps == ({saver.rows.last_step: n} if ahead else {}))
    assert found == [True, True, True]


def test_a_row_that_a_save_left_out_lost_what_came_since_its_own_last_save(ram: RamStore) -> None:
    saver = Saver(two_tables(2), ram, config=replace(SMALL, policy="mfu", row_fraction=0.002))
    saver.save()
    for _ in range(2):
        train(saver.rows, 4, seed=1)
        saver.save()
    rows = empty(2)
    report = restore(ram, rows, [0], now=TrainingPoint(step=10, samples=100, total_samples=1000))
    assert report is not None and report.samples_since == 20
    # The newest saves have the small table and at most 10 rows of the other.
    mean = sum(10 * step * n for step, n in counted(saver, 0).items()) / report.n_rows
    assert report.saved_samples == pytest.approx(mean) and mean < 5
    assert report.pls == pytest.approx((100 - mean) / 1000 * report.n_rows / 5011)


def test_a_delta_speaks_for_every_row_also_with_saves_after_it_that_leave_rows_out(ram: RamStore) -> None:
    """As when a worker that leaves has had a `delta` made, and the others go on by `mfu`."""
    saver = Saver(two_tables(2), ram, config=replace(SMALL, policy="mfu", row_fraction=0.002))
    saver.save()
    for kind in ("mfu", "delta", "mfu"):
        train(saver.rows, 4, seed=1)
        saver.save(kind)
    assert [manifest.kind for manifest in saver.made] == ["full", "mfu", "delta", "mfu"]
    report = restore(ram, empty(2), [0], now=TrainingPoint(step=14, samples=140, total_samples=1000))
    assert report is not None
    mean = sum(10 * max(8, step) * n for step, n in counted(saver, 0).items()) / report.n_rows
    assert 80 < mean < 90
    assert report.saved_samples == pytest.approx(mean)


def counted(saver: Saver, shard: int) -> dict[int, int]:
    """Rows of a shard by the step of the newest save that has them."""
    newest: dict[tuple[int, int], int] = {}
    for manifest in saver.made:
        for blob in manifest.blobs:
            for section in blob.sections:
                if section.shard == shard:
                    data = saver.store.get(blob.name, section.start, section.n_bytes)
                    table = manifest.schema.tables[section.table]
                    places, _ = row_codec.decode_rows(data, section, table, manifest.schema.n_shards, blob.name)
                    newest |= {(section.table, int(place)): manifest.step for place in places}
    found: dict[int, int] = {}
    for step in newest.values():
        found[step] = found.get(step, 0) + 1
    return found


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(store: RamStore, name: str, bit: int = 77) -> None:
    data = bytearray(store.objects[name])
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    store.objects[name] = bytes(data)


@pytest.mark.parametrize("part", ["manifest", "blob", "state"])
@pytest.mark.parametrize("how", ["flipped", "cut", "longer", "deleted", "empty", "replaced by the one before"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_restored(ram: RamStore, part: str, how: str) -> None:
    saver, expected = delta_chain(ram)
    newest, before = saver.made[-1], saver.made[-2]
    name, older = {
        "manifest": (newest.name, before.name),
        "blob": (newest.blobs[0].name, before.blobs[0].name),
        "state": (newest.state.name, before.state.name),  # type: ignore[union-attr]
    }[part]
    data = ram.objects.pop(name)
    if how == "flipped":
        ram.objects[name] = data
        flip(ram, name)
    elif how != "deleted":
        ram.objects[name] = {"cut": data[:-1], "longer": data + b"\0", "empty": b""}.get(how, ram.objects[older])
    rows = empty(2)
    report = restore(ram, rows)
    assert report is not None
    assert report.manifest.name == before.name
    assert_same(values(rows), expected[-2])
    assert report.state == b"state of step 4"
    if (part, how) != ("manifest", "deleted"):  # that is a checkpoint which never was
        assert [skipped.name for skipped in report.skipped] == [newest.name]
        assert name in report.skipped[0].why
        assert report.skipped[0].words.count(newest.name) == 1
        assert report.skipped[0].step == (None if part == "manifest" else newest.step)


def test_a_state_that_its_job_cannot_read_spoils_its_checkpoint(ram: RamStore) -> None:
    saver, expected = delta_chain(ram)
    *_, before, newest = saver.made

    def refuse_newest(name: str, state: bytes) -> None:
        if name == newest.name:
            raise Damaged(f"{name}: the state is {state!r}")

    rows = empty(2)
    report = restore(ram, rows, check_state=refuse_newest)
    assert report is not None and (report.manifest.name, report.state) == (before.name, b"state of step 4")
    assert_same(values(rows), expected[-2])
    assert [skipped.words for skipped in report.skipped] == [f"{newest.name}: the state is b'state of step 6'"]


def test_damage_in_the_base_spoils_all_that_is_on_top_of_it(ram: RamStore) -> None:
    saver, _ = delta_chain(ram)
    saver.save("full")
    train(saver.rows, 1, seed=3)
    expected = values(saver.rows)
    saver.save()
    last = saver.made[-1]
    flip(ram, saver.made[0].blobs[2].name)
    rows = empty(2)
    report = restore(ram, rows)
    assert report is not None
    assert report.manifest.name == last.name  # on top of another base
    assert_same(values(rows), expected)
    flip(ram, saver.made[4].blobs[0].name)
    with pytest.raises(Damaged, match="no checkpoint that is whole") as died:
        restore(ram, empty(2))
    assert all(manifest.name in str(died.value) for manifest in saver.made)


def test_blobs_in_each_others_place_are_noticed(ram: RamStore) -> None:
    saver = Saver(two_tables(2), ram)
    saver.save()
    one, other = (blob.name for blob in saver.made[0].blobs[:2])
    assert len(ram.objects[one]) == len(ram.objects[other])
    ram.objects[one], ram.objects[other] = ram.objects[other], ram.objects[one]
    with pytest.raises(Damaged, match="checksum"):
        restore(ram, empty(2))


def test_an_object_that_vanishes_while_it_is_read_spoils_only_its_checkpoint(ram: RamStore) -> None:
    _, expected = delta_chain(ram)
    store = FaultyStore(ram).truncates("get", 6, keep_bytes=3)  # four manifests, the state, then the first blob
    rows = empty(2)
    report = restore(store, rows)
    assert store.fired == store.planned
    assert report is not None
    assert len(report.skipped) == 1
    assert_same(values(rows), expected[-2])


def test_a_store_that_fails_is_no_reason_to_go_back_to_an_older_checkpoint(ram: RamStore) -> None:
    delta_chain(ram)
    store = FaultyStore(ram).fails("get", 6, StoreError("no route to host"))
    with pytest.raises(StoreError, match="no route to host"):
        restore(store, empty(2))
    assert store.fired == store.planned
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("recovery")]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: TensorRows({"user": RowParts(torch.zeros(5000, 4))}), "'colour' was saved, this model has none"),
        (lambda: two_tables(n_rows=4000, seed=None), "saved with 5000 rows, here it has 4000"),
        (lambda: two_tables(dim=8, seed=None), r"weight \[4\].* here it has weight \[8\]"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_the_differences(
    ram: RamStore, make: Callable[[], TensorRows], what: str
) -> None:
    Saver(two_tables(), ram).save()
    with pytest.raises(BadInput, match=what) as refused:
        restore(ram, make())
    assert str(refused.value).endswith("start over: at another url, or with resume=False")


def test_a_checkpoint_of_a_newer_version_is_refused_and_not_passed_over(
    ram: RamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, _ = delta_chain(ram)
    newest = saver.made[-1]
    monkeypatch.setattr("recovery.format.manifest._format_of", lambda schema: _TWO_HASHES + 1)
    ram.objects[newest.name] = to_json(newest)
    monkeypatch.undo()
    with pytest.raises(BadInput, match="update"):
        restore(ram, empty(2))


# --- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1])
def test_memory_stays_within_the_budget_whatever_the_size_of_the_table(level: int) -> None:
    def tables() -> TensorRows:
        return TensorRows({"user": RowParts(torch.zeros(400_000, 32))})

    store = RamStore()
    Saver(tables(), store, Config(level=level, section_bytes=1 << 20)).save()
    rows, config = tables(), Config(budget_bytes=8 << 20, section_bytes=1 << 20, readers=4)
    tracemalloc.start()
    try:
        restore(store, rows, config=config)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < config.budget_bytes


def test_a_newer_epoch_wins_over_a_higher_number(ram: RamStore) -> None:
    old = Saver(two_tables(), ram)
    old.save()
    new = Saver(two_tables(seed=8), ram, epoch=2)
    new.save()
    for _ in range(3):  # a writer that was cut off goes on
        train(old.rows, 1, seed=1)
        old.save()
    rows = empty()
    report = restore(ram, rows)
    assert report is not None
    assert report.manifest.name == new.made[-1].name
    assert_same(values(rows), values(new.rows))
