"""From rows in memory to blobs in a store, in bounded memory, while training goes on. Then the manifest.

Which rows are saved is the caller's choice, and so is when; how they become blobs is in `assembly`. Saving rows and
committing them are two things, so that several writers can save the shards they hold and one of them commits
everybody's blobs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from recovery.config import Config
from recovery.errors import BadInput, Damaged, StoreError
from recovery.format import row_codec
from recovery.format.manifest import Blob, Manifest, StateBlob, from_json, kind_of, to_json
from recovery.format.row_codec import Encoding
from recovery.restore.inspect import verify_saved
from recovery.rows import Choice, Holder, Places, Schema, everything, n_places, some_places
from recovery.storage.store import Store, is_there
from recovery.write import consistent_read
from recovery.write.section_pipeline import Buffers, Cancelled, Line, Written

__all__ = ["Cancelled", "Choice", "Note", "Written", "commit", "everything", "save_rows"]

"""(table, shard) -> the rows to save; asked once for each, when its turn comes."""


class Note(Protocol):
    """Told of everything that was read: table, shard, places, records float32 [n, W], counts uint32 [n].

    The arrays are the writer's and will be overwritten.
    """

    def __call__(self, table: int, shard: int, places: Places, records: np.ndarray, counts: np.ndarray) -> None: ...


def save_rows(
    holder: Holder,
    choice: Choice,
    store: Store,
    prefix: str,
    config: Config,
    *,
    exact: bool = False,
    note: Note | None = None,
    read_all: Callable[[], None] = lambda: None,
    cancel: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
    buffers: Buffers | None = None,
) -> Written:
    """Write rows of all shards that are here to blobs named `prefix` + number. They mean nothing before `commit`.

    exact: never quantised, whatever the settings. read_all: called when the last row has been read. buffers: of the
    saves before, which are over; None: new ones, for this save.

    Raises what the store raises, Busy, or Cancelled within one section after `cancel` was set.
    """
    encoding = Encoding(config.level, bits=None if exact else config.bits)
    buffers = buffers or Buffers(holder.schema, config)
    with Line(holder.schema, store, prefix, config, encoding, cancel or threading.Event(), clock, buffers) as line:
        for shard in holder.shards():
            for number, table in enumerate(holder.schema.tables):
                places, start = choice(number, shard), 0
                while start < n_places(places):
                    records, counts = line.buffers(table)
                    part = some_places(places, start, min(n_places(places), start + len(records)))
                    records, counts = records[: n_places(part)], counts[: n_places(part)]
                    got = consistent_read.read(
                        holder,
                        number,
                        shard,
                        part,
                        records,
                        counts,
                        timeout_s=config.busy_timeout_s,
                        clock=clock,
                        pause=line.pause,
                    )
                    part = some_places(part, 0, got.n_rows)
                    records, counts = records[: got.n_rows], counts[: got.n_rows]
                    if note is not None:
                        note(number, shard, part, records, counts)
                    line.encode(number, shard, part, got, records)
                    start += got.n_rows
        read_all()
        return line.finish()


def commit(
    store: Store,
    prefix: str,
    *,
    epoch: int,
    number: int,
    kind: str,
    parent: str | None,
    step: int,
    samples: int,
    schema: Schema,
    blobs: Sequence[Blob],
    state: bytes | None,
    about: Mapping[str, Any] | None = None,
    still_mine: Callable[[], None] = lambda: None,
    encoding: Encoding = row_codec.EXACT,
    verify: str = "state",
    clock: Callable[[], float] = time.time,
) -> Manifest:
    """Make a checkpoint of blobs that are in the store, of all who have saved a part of it.

    still_mine: raises Fenced when another writer has taken over; asked last. verify: see `Config.verify`.

    Raises BadInput for a base that lacks rows, and before the manifest is written for what no restore would read;
    StoreError when something that was written is not there; Damaged when it is, but cannot be restored: its manifest
    is removed again.
    """
    if parent is None:
        _check_whole(schema, blobs)
    kept = None
    if state is not None:
        encoded = row_codec.encode_state(state, Encoding(encoding.level))
        kept = StateBlob(prefix + "state", encoded.n_bytes, encoded.raw_bytes, encoded.encoding, encoded.checksum)
        store.put(kept.name, encoded.pieces)
    manifest = Manifest(
        epoch, number, kind_of(kind), parent, step, samples, clock(), schema, tuple(blobs), kept, dict(about or {})
    )
    document = to_json(manifest)
    _require_readable(manifest, document)
    _require_stored(store, prefix, [*blobs, *([kept] if kept is not None else [])])
    still_mine()
    store.put(manifest.name, [document])  # makes the checkpoint visible, so it is written last
    if not is_there(store, manifest.name, len(document)):
        raise _lost(manifest.name)
    try:
        verify_saved(store, manifest, verify)
    except Damaged as error:
        with contextlib.suppress(StoreError):  # a restore passes it over, if it stays
            store.delete([manifest.name])
        raise Damaged(
            f"{manifest.name} was written and cannot be restored, so it was removed again: {error}"
        ) from error
    return manifest


def _require_readable(manifest: Manifest, document: bytes) -> None:
    try:
        from_json(document, manifest.name)
    except Damaged as error:
        raise BadInput(f"this checkpoint is not written, since no restore would take it: {error}") from error


def _require_stored(store: Store, prefix: str, blobs: Sequence[Blob | StateBlob]) -> None:
    """Before anything refers to them: a store may confirm what it then loses."""
    there = store.names(prefix)
    for blob in blobs:
        if there.get(blob.name) != blob.n_bytes and not is_there(store, blob.name, blob.n_bytes):
            raise _lost(blob.name)


def _lost(name: str) -> StoreError:
    return StoreError(f"{name} was written, and is not there, or not whole: this store loses what it has confirmed")


def _check_whole(schema: Schema, blobs: Sequence[Blob]) -> None:
    found: dict[tuple[int, int], int] = {}
    for section in (section for blob in blobs for section in blob.sections):
        part = section.table, section.shard
        found[part] = found.get(part, 0) + section.n_rows
    for number, table in enumerate(schema.tables):
        for shard in range(schema.n_shards):
            expected = table.rows_in(shard, schema.n_shards)
            if found.get((number, shard), 0) != expected:
                raise BadInput(
                    f"table {table.name!r}, shard {shard}: a full checkpoint needs all {expected} rows, "
                    f"{found.get((number, shard), 0)} were saved; every holder must save its shards before the commit"
                )
