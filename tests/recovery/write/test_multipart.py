"""Two writers save a part each and one commits: in which order, and what is left when one of them fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from recovery.errors import BadInput, Damaged, Fenced, StoreError
from recovery.restore import restore
from recovery.selection.selector import Selection
from recovery.storage.store import Store
from recovery.testing import SMALL, RamStore, train, two_tables, values
from recovery.torch_rows.tensor_rows import TensorRows
from recovery.write.multipart import SaveTarget, await_part, commit_parts, list_name, save_part
from recovery.write.section_pipeline import PartResult
from tests.recovery.holders import assert_same
from tests.recovery.stores import FaultyStore

LARGE = replace(SMALL, blob_bytes=16 << 20)  # one blob a part
N_PUTS = 5  # two parts' rows, a list, the state, the manifest


class OneShard:
    """What a writer holds of rows in two shards."""

    def __init__(self, rows: TensorRows, shard: int) -> None:
        self.schema, self.slab, self.step_marks, self._shard = rows.schema, rows.slab, rows.step_marks, shard

    def shards(self) -> list[int]:
        return [self._shard]


class Writers:
    def __init__(self, store: Store) -> None:
        self.store, self.rows = store, two_tables(2)
        self.target = SaveTarget(1, 1, "full", None, 3, 30, self.rows.schema)
        self.holders = [OneShard(self.rows, shard) for shard in (0, 1)]
        self.selections = [Selection(holder, LARGE) for holder in self.holders]  # type: ignore[arg-type]

    def part(self, part: int) -> PartResult:
        holder, extra = self.holders[part], b"extra %d" % part
        return save_part(holder, self.selections[part], self.store, self.target, LARGE, part=part, extra=extra)  # type: ignore[arg-type]

    def other(self, until_s: float) -> PartResult:
        prefix, never = self.target.prefix, threading.Event()
        return await_part(self.store, prefix, 1, until_s=until_s, cancel=never, why_not=lambda: "")

    def save(self, fence: Callable[[], None] = lambda: None) -> None:
        def state(parts: Sequence[PartResult]) -> bytes:
            return b"+".join(one.extra for one in parts)

        self.part(1)
        parts = (make() for make in (lambda: self.part(0), lambda: self.other(time.monotonic())))
        commit_parts(self.store, self.selections[0], self.target, parts, state, fence)


def test_what_is_visible_comes_last_and_says_what_all_parts_have() -> None:
    store = FaultyStore(RamStore())
    writers = Writers(store)
    writers.save()
    puts = [name.removeprefix(writers.target.prefix) for operation, name in store.calls if operation == "put"]
    assert puts == ["0001-0000", "part-0001", "0000-0000", "state", writers.target.manifest_name]
    rows = two_tables(2, seed=None)
    report = restore(store, rows)
    assert report is not None and (report.state, report.step) == (b"extra 0+extra 1", 3)
    assert_same(values(rows), values(writers.rows))
    assert [one.is_valid_for(writers.target.manifest_name) for one in writers.selections] == [True, False]


@pytest.mark.parametrize("fails_at", range(1, N_PUTS + 1))
def test_a_failure_leaves_nothing_unless_the_manifest_may_be_there(fails_at: int) -> None:
    ram = RamStore()
    store = FaultyStore(ram).fails("put", fails_at, StoreError("planned"))
    writers = Writers(store)
    with pytest.raises(StoreError, match="planned"):
        writers.save()
    assert store.fired == store.planned
    assert bool(ram.objects) == (fails_at == N_PUTS)
    assert not ram.names("manifests/")
    assert not writers.selections[0].is_valid_for(writers.target.manifest_name)


def test_a_writer_that_was_fenced_leaves_nothing() -> None:
    def fence() -> None:
        raise Fenced("another writer has taken over")

    ram = RamStore()
    with pytest.raises(Fenced):
        Writers(ram).save(fence)
    assert not ram.objects


def test_a_part_that_fails_leaves_the_other_one_alone() -> None:
    ram = RamStore()
    store = FaultyStore(ram).fails("put", 3, StoreError("planned"))  # its list
    writers = Writers(store)
    writers.part(0)
    with pytest.raises(StoreError, match="planned"):
        writers.part(1)
    assert store.fired == store.planned
    assert list(ram.objects) == [writers.target.prefix + "0000-0000"]


def test_a_list_that_does_not_come_ends_the_wait_and_an_altered_one_is_refused() -> None:
    ram = RamStore()
    writers = Writers(ram)
    with pytest.raises(StoreError, match="the writer of part 1 has not saved its rows"):
        writers.other(until_s=0.0)
    writers.part(1)
    name = list_name(writers.target.prefix, 1)
    ram.objects[name] = ram.objects[name][:-1] + b"?"
    with pytest.raises(Damaged, match="part-0001 is not what a writer wrote"):
        writers.other(until_s=0.0)


@pytest.mark.parametrize(("newest_step", "is_refused"), [(None, True), (0, True), (1, False)])
def test_a_strict_part_takes_no_row_of_a_later_step(newest_step: int | None, is_refused: bool) -> None:
    """A step is made as soon as the first rows are written. None: all rows have to be of one step."""
    rows, trained = two_tables(1), threading.Event()

    class Trains(RamStore):
        def put(self, name: str, pieces: object) -> None:
            super().put(name, pieces)  # type: ignore[arg-type]
            if not trained.is_set():
                trained.set()
                train(rows, 1, seed=1)

    store, config = Trains(), replace(SMALL, strict=True, budget_bytes=1 << 20)
    target = SaveTarget(1, 1, "full", None, 0, 0, rows.schema)
    if is_refused:
        with pytest.raises(BadInput, match="strict: a row was read at step 1, after the checkpoint's own, 0"):
            save_part(rows, Selection(rows, config), store, target, config, newest_step=newest_step)
        assert not store.objects
    else:
        written = save_part(rows, Selection(rows, config), store, target, config, newest_step=newest_step)
        assert {section.step for section in written.sections} == {0, 1}
    assert trained.is_set()


@pytest.mark.parametrize("part", [0, 1])
def test_a_number_that_a_checkpoint_has_is_refused_and_that_checkpoint_stays(part: int) -> None:
    """Its blobs would have the same names, and a save that fails deletes what bears its name."""
    store = RamStore()
    writers = Writers(store)
    writers.save()
    before, saved = dict(store.objects), values(writers.rows)
    train(writers.rows, 2, seed=1)
    with pytest.raises(BadInput, match="is there already: a save that is tried again takes another number"):
        writers.part(part)
    assert store.objects == before
    rows = two_tables(2, seed=None)
    assert restore(store, rows) is not None
    assert_same(values(rows), saved)
