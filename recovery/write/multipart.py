"""A checkpoint made by one writer or by several: each saves its part, one of them commits all parts.

`Checkpointer` is the case of one part. The servers of a job save the rows of their hosts, one part each; the server of
part 0 waits for the lists of the other parts and commits. Which rows are saved is decided in `recovery.selection`; what
expires afterwards is decided by the caller.

The order in which things become visible:

    1. blobs      every writer puts the rows that it holds; nothing refers to them yet          (save_part)
    2. list       a writer of a part above 0 puts the list of its blobs, all of which are durable
    3. state      part 0 has the lists of all parts, and puts what the checkpoint has beside rows    (commit_parts)
    4. look       blobs and state are in the store, with their sizes
    5. fence      the claim is still this writer's: asked last before the manifest
    6. manifest   one write, which makes the checkpoint visible
    7. verify     it is opened as a restore opens it; one that cannot be restored loses its manifest again
    8. selection  records what was saved, so that the next partial save can be on top of it

| a writer dies | consequence |
|---|---|
| part above 0, in 1 or 2 | its list never comes: part 0 gives up and deletes all blobs and lists of this save |
| part above 0, after 2 | nothing. Its successor does not know the new parent, so the next part has all rows |
| part 0, in 1 to 5 | blobs, lists and the state stay, `retention.gc` finds them; the checkpoint before is in force |
| part 0, between 6 and 7 | the new checkpoint is in force, and a restore verifies it; nothing has expired |
| part 0, between 7 and 8 | the new checkpoint is in force; the next save takes all rows |

A save that fails without a crash deletes what it has written: a part above 0 its own blobs, part 0 those of all parts,
unless the manifest may be there (from 6 on). Then they stay, since the checkpoint may be complete.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import xxhash

from recovery.config import Config
from recovery.errors import BadInput, Damaged, RecoveryError, StoreError
from recovery.format import row_codec
from recovery.format.manifest import Blob, Manifest, Section, StateBlob, from_json, kind_of, to_json
from recovery.restore.inspect import verify_saved
from recovery.rows import RowSource, Schema
from recovery.selection.selector import Selection
from recovery.storage.store import Store, blob_prefix, is_there
from recovery.write.section_pipeline import Buffers, Cancelled, PartResult
from recovery.write.writer import save_rows

_LOOK_S = 0.2


@dataclass(frozen=True)
class SaveTarget:
    """Where a checkpoint goes and what its manifest says, the same for all who save a part. See `manifest.Manifest`."""

    epoch: int
    number: int
    kind: str
    parent: str | None
    step: int
    samples: int
    schema: Schema
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """What the names of all its blobs begin with. Raises BadInput for numbers that no restore would read."""
        return blob_prefix(self.epoch, self.number)

    @property
    def manifest_name(self) -> str:
        return self.manifest((), None, 0.0).name

    def manifest(self, blobs: Sequence[Blob], state: StateBlob | None, saved_unix_s: float, **about: Any) -> Manifest:
        """about: what is known only now."""
        target = (self.epoch, self.number, kind_of(self.kind), self.parent, self.step, self.samples)
        return Manifest(*target, saved_unix_s, self.schema, tuple(blobs), state, {**self.about, **about})


def save_part(
    rows: RowSource,
    selection: Selection,
    store: Store,
    target: SaveTarget,
    config: Config,
    *,
    part: int | None = None,
    kind: str | None = None,
    extra: bytes = b"",
    newest_step: int | None = None,
    cancel: threading.Event | None = None,
    on_read: Callable[[], None] = lambda: None,
    buffers: Buffers | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> PartResult:
    """Write the rows that are here. They mean nothing before `commit_parts`, which may be another writer's.

    part: number of this one; above 0, its list is put into the store for the writer that commits. None: there is only
        this one
    kind: "full" when this writer does not know what changed since the parent; None: as the target says
    extra: what this writer adds for the state
    newest_step: the strict setting refuses rows of later steps; None: rows that are not all of one step
    on_read: called when the last row has been read. cancel, buffers: see `save_rows`

    Raises what `save_rows` raises, and BadInput when a strict save read rows of a later step. Then nothing stays of it.
    Raises BadInput, and touches nothing, when there is such a checkpoint already.
    """
    kind = kind or target.kind
    # A save that fails deletes what bears its name: of a number used twice, that would be the checkpoint before.
    if target.manifest_name in store.names(target.manifest_name):
        raise BadInput(f"{target.manifest_name} is there already: a save that is tried again takes another number")
    prefix = target.prefix if part is None else f"{target.prefix}{part:04d}-"
    try:
        written = save_rows(
            rows,
            selection.begin(kind),
            store,
            prefix,
            config,
            exact=kind == "full",
            note=selection.note,
            read_all=on_read,
            cancel=cancel,
            clock=clock,
            buffers=buffers,
        )
        if config.strict:
            _check_strict(written, newest_step)
        written = replace(written, extra=extra)
        if part:
            store.put(list_name(target.prefix, part), [encode_part(written)])
    except BaseException:
        selection.abandon()
        discard(store, prefix if part else target.prefix)
        raise
    return written


def commit_parts(
    store: Store,
    selection: Selection,
    target: SaveTarget,
    parts: Iterable[PartResult],
    state: Callable[[Sequence[PartResult]], bytes | None],
    fence: Callable[[], None] = lambda: None,
    *,
    verify: str = "state",
    unix_clock: Callable[[], float] = time.time,
) -> tuple[Manifest, PartResult]:
    """Make a checkpoint of parts that are in the store. Returns its manifest, and all parts as one.

    parts: this writer's, then the others'; taking the next one may wait for it
    state: what the checkpoint has beside rows, from all parts; None: nothing
    fence: raises Fenced when another writer has taken over. verify: see `Config.verify`

    Raises BadInput for a base that lacks rows, and before the manifest is written for what no restore would read;
    StoreError when something that was written is not there; Damaged when it is, but cannot be restored: its manifest
    is removed again; what `parts`, `state` and `fence` raise.
    """
    may_be_visible = False
    try:
        began_s, found = time.monotonic(), list(parts)
        whole = PartResult.of_all(found)
        waited_s = time.monotonic() - began_s
        beside_rows = state(found)
        if target.parent is None:
            _check_complete(target.schema, whole.sections)
        stored = _put_state(store, target, beside_rows)
        save_s = round(found[0].seconds + waited_s, 3)
        manifest = target.manifest(whole.blobs, stored, unix_clock(), save_s=save_s)
        document = to_json(manifest)
        _check_readable(manifest, document)
        _check_stored(store, target.prefix, [*whole.blobs, *([stored] if stored is not None else [])])
        fence()
        may_be_visible = True
        store.put(manifest.name, [document])  # makes the checkpoint visible, so it is written last
        if not is_there(store, manifest.name, len(document)):
            raise _lost(manifest.name)
        _verify(store, manifest, verify)
    except BaseException as error:
        selection.abandon()
        if not may_be_visible or isinstance(error, Damaged):  # `_verify` has removed the manifest then
            discard(store, target.prefix)
        raise
    selection.commit(manifest.name)
    return manifest, whole


def discard(store: Store, prefix: str) -> None:
    """Delete what a failed save has written. What cannot be deleted takes space until `gba-hvd checkpoint gc`."""
    with contextlib.suppress(BadInput, RecoveryError, OSError):
        store.delete(sorted(store.names(prefix)))


# --- lists of parts --------------------------------------------------------------------------------------------------


def list_name(prefix: str, part: int) -> str:
    return f"{prefix}part-{part:04d}"


def encode_part(part: PartResult) -> bytes:
    """With a checksum before it."""
    body = msgspec.msgpack.encode(part)
    return xxhash.xxh3_128_digest(body) + body


def decode_part(data: bytes, name: str) -> PartResult:
    """Raises Damaged."""
    if data[:16] != xxhash.xxh3_128_digest(data[16:]):
        raise Damaged(f"{name} is not what a writer wrote")
    return msgspec.msgpack.decode(data[16:], type=PartResult)


def await_part(
    store: Store, prefix: str, part: int, *, until_s: float, cancel: threading.Event, why_not: Callable[[], str]
) -> PartResult:
    """What another writer saved; returns when its list is there.

    until_s: on the monotonic clock. why_in_vain: why the list will not come, once that is known; else empty
    Raises StoreError when the list does not come, Cancelled, Damaged.
    """
    name, began_s = list_name(prefix, part), time.monotonic()
    while name not in store.names(name):
        if (why := why_not()) and name not in store.names(name):
            raise StoreError(why)
        if (now := time.monotonic()) > until_s:
            raise StoreError(f"the writer of part {part} has not saved its rows in {now - began_s:.0f} s")
        if cancel.wait(_LOOK_S):
            raise Cancelled("the save was cancelled")
    return decode_part(store.get(name), name)


# --- checks ----------------------------------------------------------------------------------------------------------


def _check_strict(written: PartResult, newest_step: int | None) -> None:
    steps = {section.step for section in written.sections}
    if not steps:
        return
    limit, newest = min(steps) if newest_step is None else newest_step, max(steps)
    if newest > limit:
        raise BadInput(
            f"strict: a row was read at step {newest}, after the checkpoint's own, {limit}: no step may be taken until "
            "all rows are read; if saving takes minutes, raise busy_timeout_s, or save without strict"
        )


def _check_complete(schema: Schema, sections: Sequence[Section]) -> None:
    found: dict[tuple[int, int], int] = {}
    for section in sections:
        part = section.table, section.shard
        found[part] = found.get(part, 0) + section.n_rows
    for number, table in enumerate(schema.tables):
        for shard in range(schema.n_shards):
            expected = table.rows_in(shard, schema.n_shards)
            if found.get((number, shard), 0) != expected:
                raise BadInput(
                    f"table {table.name!r}, shard {shard}: a full checkpoint needs all {expected} rows, "
                    f"{found.get((number, shard), 0)} were saved; all row sources must save before the commit"
                )


def _put_state(store: Store, target: SaveTarget, state: bytes | None) -> StateBlob | None:
    if state is None:
        return None
    encoded = row_codec.encode_state(state)
    stored = StateBlob(target.prefix + "state", encoded.n_bytes, encoded.raw_bytes, encoded.encoding, encoded.checksum)
    store.put(stored.name, encoded.pieces)
    return stored


def _check_readable(manifest: Manifest, document: bytes) -> None:
    try:
        from_json(document, manifest.name)
    except Damaged as error:
        raise BadInput(f"this checkpoint is not written, since no restore would take it: {error}") from error


def _check_stored(store: Store, prefix: str, blobs: Sequence[Blob | StateBlob]) -> None:
    """Before anything refers to them: a store may confirm what it then loses."""
    there = store.names(prefix)
    for blob in blobs:
        if there.get(blob.name) != blob.n_bytes and not is_there(store, blob.name, blob.n_bytes):
            raise _lost(blob.name)


def _lost(name: str) -> StoreError:
    return StoreError(f"{name} was written, and is not there, or not whole: this store loses what it has confirmed")


def _verify(store: Store, manifest: Manifest, verify: str) -> None:
    try:
        verify_saved(store, manifest, verify)
    except Damaged as error:
        with contextlib.suppress(StoreError):  # a restore passes it over, if it stays
            store.delete([manifest.name])
        raise Damaged(
            f"{manifest.name} was written and cannot be restored, so it was removed again: {error}"
        ) from error
