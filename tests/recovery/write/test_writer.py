"""Rows become blobs: complete, in bounded memory, at a bounded rate, and errors are reported."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from recovery.config import Config
from recovery.errors import BadInput, Fenced, StoreError
from recovery.format.manifest import Blob, Section, from_json
from recovery.format.row_codec import EXACT, decode_rows
from recovery.rows import Choice, RowIndices, everything
from recovery.selection.selector import Selection
from recovery.storage.store import blob_prefix
from recovery.testing import RamStore, train, two_tables, values
from recovery.torch_rows.tensor_rows import RowParts, TensorRows
from recovery.write import writer
from recovery.write.consistent_read import ReadResult
from recovery.write.multipart import SaveTarget, commit_parts
from recovery.write.section_pipeline import Buffers, Cancelled, PartResult, SectionPipeline
from recovery.write.writer import save_rows
from tests.recovery.stores import FaultyStore

SMALL = Config(section_bytes=8 << 10, blob_bytes=32 << 10, level=0)
PREFIX = blob_prefix(1, 1)


def save(
    rows: TensorRows, store: RamStore | FaultyStore, config: Config = SMALL, choice: Choice | None = None
) -> PartResult:
    return save_rows(rows, choice or everything(rows), store, PREFIX, config)


def committed(rows: TensorRows, store: RamStore, blobs: Sequence[Blob], **what: object) -> str:
    about: dict[str, Any] = {"state": b"dense", "fence": lambda: None, **what}
    target = SaveTarget(1, 1, "full", None, 3, 30, rows.schema)
    manifest, _ = commit_parts(
        store, Selection(rows, SMALL), target, [PartResult(tuple(blobs))], lambda parts: about["state"], about["fence"],
        unix_clock=lambda: 1.5,
    )  # fmt: skip
    return manifest.name


def sections(written: PartResult) -> list[tuple[Blob, Section]]:
    return [(blob, section) for blob in written.blobs for section in blob.sections]


@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize("level", [0, 1])
def test_the_blobs_have_every_row_as_it_was(n_shards: int, level: int) -> None:
    rows, store = two_tables(n_shards), RamStore()
    written = save(rows, store, Config(section_bytes=8 << 10, blob_bytes=32 << 10, level=level))
    found = {name: np.zeros_like(array) for name, array in values(rows).items()}
    for blob, section in sections(written):
        table = rows.schema.tables[section.table]
        data = store.objects[blob.name][section.start : section.start + section.n_bytes]
        places, records = decode_rows(data, section, table, n_shards)
        found[table.name][section.shard + n_shards * places] = records
    for name, array in values(rows).items():
        assert found[name].tobytes() == array.tobytes()
    assert {blob.name: blob.n_bytes for blob in written.blobs} == {n: len(d) for n, d in store.objects.items()}
    assert written.n_rows == rows.schema.n_rows
    assert len(written.blobs) > 3


def test_only_the_chosen_rows_are_written_and_noted_with_their_counts() -> None:
    rows, store, noted = two_tables(n_shards=2), RamStore(), []
    train(rows, 3, seed=1)

    def choice(table: int, shard: int) -> RowIndices:
        return np.array([1, 4, 5]) if (table, shard) == (0, 1) else slice(0, 0)

    def note(table: int, shard: int, places: RowIndices, records: np.ndarray, counts: np.ndarray) -> None:
        noted.append((table, shard, np.array(places).tolist(), counts.tolist(), records.copy()))

    written = save_rows(rows, choice, store, PREFIX, SMALL, note=note)
    (blob, section), *more = sections(written)
    assert not more
    assert (section.table, section.shard, section.first, section.n_rows, section.step) == (0, 1, None, 3, 3)
    slab = rows.slab(0, 1)
    ((table, shard, places, counts, records),) = noted
    assert (table, shard, places, counts) == (0, 1, [1, 4, 5], slab.counts[[1, 4, 5]].tolist())
    assert records.tobytes() == decode_rows(store.objects[blob.name], section, rows.schema.tables[0], 2)[1].tobytes()


def test_a_save_of_nothing_writes_nothing() -> None:
    store = RamStore()
    written = save(two_tables(), store, choice=lambda table, shard: slice(0, 0))
    assert written.blobs == ()
    assert not store.objects


class Sink:
    """A store that keeps sizes only, so that what is measured is the writer."""

    url = "sink://"

    def __init__(self) -> None:
        self.n_bytes = 0

    def put(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        self.n_bytes += len(b"".join(pieces))  # a copy, as an object store makes

    def get(self, name: str, start: int = 0, n_bytes: int | None = None) -> bytes:
        raise NotImplementedError

    def names(self, prefix: str) -> dict[str, int]:
        raise NotImplementedError

    def delete(self, names: Sequence[str]) -> None:
        raise NotImplementedError


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("budget_mb", [2, 8])
@pytest.mark.parametrize("partial", [False, True])
def test_memory_stays_within_the_budget_whatever_the_size_of_the_table(
    level: int, budget_mb: int, partial: bool
) -> None:
    import torch

    rows = TensorRows({"user": RowParts(torch.zeros(400_000, 16), {"sum": torch.zeros(400_000, 16)})})
    chosen = np.arange(0, 400_000, 2)
    sink, config = Sink(), Config(budget_bytes=budget_mb << 20, level=level)
    tracemalloc.start()
    try:
        choice: Choice = (lambda table, shard: chosen) if partial else everything(rows)
        written = save_rows(rows, choice, sink, PREFIX, config)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert written.raw_bytes > (20 << 20)
    assert sink.n_bytes == written.n_bytes
    assert peak < (budget_mb << 20) + 500 * len(sections(written))  # what the manifest will say of each is not counted


def test_a_row_larger_than_the_budget_allows_is_refused() -> None:
    import torch

    rows = TensorRows({"wide": RowParts(torch.zeros(2, 1 << 18))})
    with pytest.raises(BadInput, match=r"'wide' needs 1048584 bytes.* raise budget_bytes"):
        save(rows, RamStore(), Config(budget_bytes=1 << 20))


def test_buffers_of_one_save_serve_the_next_one_also_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, store = two_tables(), RamStore()
    save(rows, store)
    buffers = Buffers(rows.schema, SMALL)
    failing = FaultyStore(RamStore()).fails("put", 2, StoreError("disk full"))
    with pytest.raises(StoreError, match="disk full"):
        save_rows(rows, everything(rows), failing, PREFIX, SMALL, buffers=buffers)
    monkeypatch.setattr(writer, "Buffers", None)  # nobody makes others
    for _ in range(2):
        again = RamStore()
        save_rows(rows, everything(rows), again, PREFIX, SMALL, buffers=buffers)
        assert again.objects == store.objects


def test_while_nothing_can_be_read_what_was_read_becomes_a_blob() -> None:
    rows, cancel = two_tables(), threading.Event()
    with SectionPipeline(
        rows.schema, RamStore(), PREFIX, SMALL, EXACT, cancel, time.monotonic, Buffers(rows.schema, SMALL)
    ) as line:
        records, _ = line.buffers(rows.schema.tables[0])
        records[:] = 1.0
        line.encode(0, 0, slice(0, len(records)), ReadResult(len(records), step=0, n_torn=0), records)
        deadline = time.monotonic() + 60
        while not line.pause(0.001):
            assert time.monotonic() < deadline
        assert not line.pause(0.0)  # all is done
        (blob,) = line.finish().blobs
    assert [section.n_rows for section in blob.sections] == [len(records)]


def test_a_save_writes_what_it_has_read_while_a_step_keeps_it_from_reading() -> None:
    """The second step ends when the first blob is in the store, which it therefore must come to during the step."""
    rows, config = two_tables(), Config(section_bytes=8 << 10, blob_bytes=8 << 10, level=0, busy_timeout_s=60.0)
    n_read = 0

    class Store(RamStore):
        def put(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
            super().put(name, pieces)
            rows.finished = rows.begun

    def note(*_: object) -> None:
        nonlocal n_read
        n_read += 1
        if n_read == 2:  # the first one fills a blob, which goes when the second one comes
            rows.begun = rows.finished + 1

    written = save_rows(rows, everything(rows), Store(), PREFIX, config, note=note)
    assert written.n_rows == rows.schema.n_rows
    assert {section.step for _, section in sections(written)} == {0, 1}


def test_the_rate_is_kept_on_the_callers_clock() -> None:
    now = [0.0]

    class Waits(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            now[0] += timeout or 0
            return False

    rows = two_tables()
    config = Config(section_bytes=8 << 10, blob_bytes=32 << 10, level=0, rate_bytes_s=50_000)
    written = save_rows(rows, everything(rows), RamStore(), PREFIX, config, cancel=Waits(), clock=lambda: now[0])
    assert now[0] == pytest.approx(written.n_bytes / 50_000)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("recovery")}


def test_a_store_that_fails_is_reported_and_leaves_no_thread() -> None:
    store = FaultyStore(RamStore()).fails("put", 2, StoreError("disk full"))
    with pytest.raises(StoreError, match="disk full"):
        save(two_tables(), store)
    assert store.fired == store.planned
    assert not threads()


def test_a_failure_is_noticed_before_everything_was_read() -> None:
    failed, rows = threading.Event(), two_tables(n_rows=50_000)
    store = FaultyStore(RamStore()).fails("put", 1, StoreError("gone"))
    n_read = 0

    def note(*_: object) -> None:
        nonlocal n_read
        n_read += 1

    with pytest.raises(StoreError, match="gone"):
        save_rows(rows, everything(rows), store, PREFIX, SMALL, note=note)
    assert not failed.is_set()
    assert n_read < 50_000 * 36 / (8 << 10)


def test_a_save_can_be_cancelled_and_leaves_no_thread() -> None:
    cancel, rows, store = threading.Event(), two_tables(), RamStore()
    with pytest.raises(Cancelled):
        save_rows(rows, everything(rows), store, PREFIX, SMALL, cancel=cancel, note=lambda *_: cancel.set())
    assert not store.objects
    assert not threads()


def test_an_encoding_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no memory to encode")

    monkeypatch.setattr("recovery.format.row_codec.encode_rows", broken)
    with pytest.raises(MemoryError, match="no memory to encode"):
        save(two_tables(), RamStore())
    assert not threads()


def test_the_manifest_comes_after_everything_it_names() -> None:
    rows, store = two_tables(), FaultyStore(RamStore())
    name = committed(rows, store, save(rows, store).blobs)  # type: ignore[arg-type]
    puts = [about for operation, about in store.calls if operation == "put"]
    assert puts[-2:] == [PREFIX + "state", name]
    manifest = from_json(store.get(name), name)
    assert (manifest.step, manifest.samples, manifest.saved_unix_s) == (3, 30, 1.5)


def test_a_writer_that_was_replaced_does_not_commit() -> None:
    rows, store = two_tables(), RamStore()

    def not_mine() -> None:
        raise Fenced("another writer has the place")

    written = save(rows, store)
    with pytest.raises(Fenced):
        committed(rows, store, written.blobs, fence=not_mine)
    assert not store.names("manifests/")


def test_a_full_checkpoint_that_lacks_a_shard_is_refused() -> None:
    rows, store = two_tables(n_shards=2), RamStore()
    whole = everything(rows)
    written = save(rows, store, choice=lambda table, shard: whole(table, shard) if shard == 0 else slice(0, 0))
    with pytest.raises(BadInput, match=r"'user', shard 1: .* all 2500 rows, 0 were saved"):
        committed(rows, store, written.blobs)
    assert not store.names("manifests/")


def test_several_writers_save_their_shards_and_one_commits_them() -> None:
    class Some:
        def __init__(self, rows: TensorRows, shard: int) -> None:
            self.schema, self.slab, self.step_marks = rows.schema, rows.slab, rows.step_marks
            self.shard = shard

        def shards(self) -> list[int]:
            return [self.shard]

    rows, store, blobs = two_tables(n_shards=2), RamStore(), list[Blob]()
    for shard in (0, 1):
        part = Some(rows, shard)
        blobs += save_rows(part, everything(part), store, f"{PREFIX}writer{shard}-", SMALL).blobs
    name = committed(rows, store, blobs)
    assert sum(s.n_rows for blob in from_json(store.get(name), name).blobs for s in blob.sections) == rows.schema.n_rows


def test_only_partial_saves_are_quantised() -> None:
    rows, store = two_tables(), RamStore()
    config = Config(bits=8, section_bytes=8 << 10)
    lossy = save_rows(rows, everything(rows), store, PREFIX, config)
    exact = save_rows(rows, everything(rows), store, PREFIX + "x", config, exact=True)
    assert lossy.n_bytes < exact.n_bytes
    assert lossy.worst_error > 0 == exact.worst_error
