"""What a checkpoint consists of, as a JSON document. Written last: it makes the checkpoint visible.

A checkpoint is a base (all rows) or a partial save (some rows) on top of its parent. Restoring one means its chain:
the base, then every partial save up to it.

The document is canonical: sorted keys, no white space, and its own checksum among the keys, computed without it. So
what is read differently from how it was written is known to be altered, by a disk or by a person. What has the
right checksum is still not trusted to be sensible: names, indices and sizes are checked before anybody uses them.
Whether the bytes of the blobs are right is not decided here, see `row_codec`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import msgspec
import xxhash

from recovery.errors import BadInput, Damaged
from recovery.policies import POLICIES
from recovery.registry import NAME
from recovery.rows import FILTER, Column, Schema, Table
from recovery.storage.store import MOST_EPOCH, MOST_NUMBER, age_of, is_name

FORMAT = 1
_TWO_HASHES = 2  # the format of a manifest that has a table with two `shared_hashes`: earlier versions know none
_REGISTERED = "registered:"
_SEAL_BYTES = len(b'{"checksum":"",') + 32  # before the rest of a document
LIMIT_BYTES = 256 << 20
LEAST_SECTION_BYTES = 120  # in the document


@dataclass(frozen=True)
class Section:
    """Some rows of one table in one shard: consecutive bytes of a blob.

    start, n_bytes: where it is in the blob. raw_bytes: its size when decoded.
    first: the index of its first row, of `n_rows` consecutive ones; None: the indices are in the section, before the
        records.
    step: every row is as of this step: weights, slots, together.
    encoding: how to decode it, see `row_codec`. checksum: of the bytes in the blob, hexadecimal.
    """

    table: int
    shard: int
    n_rows: int
    first: int | None
    step: int
    start: int
    n_bytes: int
    raw_bytes: int
    encoding: str
    checksum: str


@dataclass(frozen=True)
class Blob:
    """One object of the store, and the sections it consists of: they cover it without gaps."""

    name: str
    n_bytes: int
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class StateBlob:
    """The one object that has what is not a row: dense parameters, optimizer state, position. Opaque bytes, encoded."""

    name: str
    n_bytes: int
    raw_bytes: int
    encoding: str
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """One checkpoint.

    epoch: of the writer's claim (see `claims`); number: counts this run's checkpoints. Newer is larger (epoch, number).
    kind: "full" | "delta" | "mfu" | "ssu" | "scar" | "registered:NAME", by a policy that a distribution registered.
    parent: name of the checkpoint it is on top of; None for a base.
    step: of the state; rows have the steps of their sections. samples: applied so far.
    saved_unix_s: for people, and for the age of a model that follows a job.
    about: plain JSON of the caller (job, mode, versions ...).
    """

    epoch: int
    number: int
    kind: str
    parent: str | None
    step: int
    samples: int
    saved_unix_s: float
    schema: Schema
    blobs: tuple[Blob, ...]
    state: StateBlob | None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Ordered by `age_of`: numbers have at least eight digits, and may have more."""
        return f"manifests/{self.epoch:06d}-{self.number:08d}.json"

    @property
    def n_bytes(self) -> int:
        """Bytes in the store, without this document."""
        return sum(blob.n_bytes for blob in self.blobs) + (self.state.n_bytes if self.state else 0)


def to_json(manifest: Manifest) -> bytes:
    """Raises BadInput when `about` is not plain JSON, or when no restore would read a document of this size."""
    try:
        document = _document(_plain(manifest), _format_of(manifest.schema))
    except (TypeError, ValueError) as error:
        raise BadInput(f"{manifest.name}: `about` must be plain JSON with string keys, without NaN: {error}") from error
    if len(document) > LIMIT_BYTES:
        n_sections = sum(len(blob.sections) for blob in manifest.blobs)
        raise BadInput(
            f"{manifest.name} would have {len(document):,} bytes for {n_sections:,} sections, a restore reads at most "
            f"{LIMIT_BYTES:,}: raise section_bytes and budget_bytes (larger sections are fewer), or `about` is too long"
        )
    return document


def from_json(data: bytes, name: str) -> Manifest:
    """The manifest that was saved under this name.

    Raises Damaged when it is not what was written, or when it makes no sense; BadInput when a newer version wrote it.
    """
    if len(data) > LIMIT_BYTES:
        raise Damaged(f"{name}: {len(data)} bytes, no manifest is larger than {LIMIT_BYTES}")
    try:
        document = json.loads(data)
        _ = document["manifest"], document["format"]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise Damaged(f"{name} is cut off or overwritten: it is not the JSON that was written ({error!r})") from error
    if _sealed(b"{" + data[_SEAL_BYTES:]) != data:
        raise Damaged(f"{name} was altered after it was written: its checksum does not fit")
    # Only now: a flipped bit can look like a newer version.
    if document["format"] not in (FORMAT, _TWO_HASHES):
        raise BadInput(
            f"{name} is in format {document['format']}, and this program reads formats up to {_TWO_HASHES}: "
            "update gba-hvd to the version that saved it, or a later one"
        )
    try:
        manifest = msgspec.convert(document["manifest"], Manifest)
    except (msgspec.ValidationError, BadInput) as error:
        raise Damaged(f"{name} makes no sense: {error}") from error
    if document["format"] != _format_of(manifest.schema):
        raise Damaged(f"{name} makes no sense: format {document['format']} of another kind of tables")
    for flaw in _flaws(manifest, name):
        raise Damaged(f"{name} makes no sense: {flaw}")
    return manifest


def _format_of(schema: Schema) -> int:
    return _TWO_HASHES if any(table.shared_hashes > 1 for table in schema.tables) else FORMAT


def difference(saved: Schema, mine: Schema) -> list[str]:
    """What keeps a checkpoint of `saved` out of `mine`, in words; empty when it fits.

    Shards may differ, and in keyed tables the number of rows, how many shared ones a key has, and whether they have a
    filter.
    """
    theirs, ours = ({table.name: table for table in schema.tables} for schema in (saved, mine))
    found = [f"table {name!r} was saved, this model has none of this name" for name in theirs if name not in ours]
    found += [f"table {name!r} is not in the checkpoint" for name in ours if name not in theirs]
    for name in [name for name in theirs if name in ours]:
        a, b = theirs[name], ours[name]
        if a.is_keyed != b.is_keyed:
            kinds = [f"{table.n_rows} numbered rows" if not table.is_keyed else "rows by key" for table in (a, b)]
            found.append(f"table {name!r} was saved with {kinds[0]}, here it has {kinds[1]}")
            continue
        if a.n_rows != b.n_rows and not a.is_keyed:
            found.append(f"table {name!r} was saved with {a.n_rows} rows, here it has {b.n_rows}")
        if _but_filter(a) != _but_filter(b):
            found.append(f"table {name!r} was saved with {_columns(a)}, here it has {_columns(b)}")
    if not found and list(theirs) != list(ours):
        found.append(f"the tables were saved in the order {list(theirs)}, here it is {list(ours)}")
    return found


def _plain(manifest: Manifest) -> Any:
    """Without what only keyed tables have, where it says nothing: other checkpoints are as they always were."""
    found = msgspec.to_builtins(manifest)
    for table in found["schema"]["tables"]:
        for part, name in ((table, "shared_rows"), *((column, "exact") for column in table["columns"])):
            if not part.get(name):  # (what was read from a document has not even the default)
                part.pop(name, None)
        if table.get("shared_hashes") == 1:
            del table["shared_hashes"]
    return found


def _but_filter(table: Table) -> list[Column]:
    return [column for column in table.columns if column != FILTER]


def _columns(table: Table) -> str:
    return ", ".join(f"{column.name} [{column.width}]" for column in table.columns)


def _document(manifest: Any, format_version: Any = FORMAT) -> bytes:
    body = {"format": format_version, "manifest": manifest}
    return _sealed(json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


def _sealed(body: bytes) -> bytes:
    """The document: a JSON object, and before its other keys the checksum of its bytes without it."""
    return b'{"checksum":"%s",%s' % (xxhash.xxh3_128_hexdigest(body).encode(), body[1:])


# --- what makes sense ------------------------------------------------------------------------------------------------


def kind_of(policy: str) -> str:
    """What a save of this policy is called in a manifest. A restore needs its rows only, not the policy."""
    return policy if policy in POLICIES else _REGISTERED + policy


def _is_registered(kind: str) -> bool:
    return kind.startswith(_REGISTERED) and NAME.fullmatch(kind.removeprefix(_REGISTERED)) is not None


def _flaws(manifest: Manifest, name: str) -> Iterator[str]:
    if not (0 <= manifest.epoch <= MOST_EPOCH and 0 <= manifest.number <= MOST_NUMBER):
        yield f"epoch {manifest.epoch} and number {manifest.number}"
    if manifest.step < 0 or manifest.samples < 0:
        yield f"step {manifest.step}, {manifest.samples} samples"
    if manifest.name != name:
        yield f"it is {manifest.name}, in the place of another"
    if manifest.kind not in POLICIES and not _is_registered(manifest.kind):
        yield f"kind {manifest.kind!r} is none of {', '.join(POLICIES)} and {_REGISTERED}NAME"
    if (manifest.parent is None) != (manifest.kind == "full"):
        yield f"kind {manifest.kind!r} with parent {manifest.parent}: full ones have none, all others need one"
    if manifest.parent is not None and not _is_older(manifest.parent, manifest):
        yield f"its parent {manifest.parent!r} is not an earlier checkpoint"
    if manifest.schema.n_shards < 1:
        yield f"{manifest.schema.n_shards} shards"
    tables = [table.name for table in manifest.schema.tables]
    if len(set(tables)) != len(tables):
        yield "two tables of one name"
    for table in manifest.schema.tables:
        n_shards = max(1, manifest.schema.n_shards)
        if table.is_keyed and (table.n_rows % n_shards or table.n_rows <= n_shards * table.shared_rows):
            yield f"table {table.name!r}: {table.n_rows} rows in {n_shards} shards, {table.shared_rows} shared in each"
    names = [blob.name for blob in manifest.blobs] + ([manifest.state.name] if manifest.state else [])
    for blob_name in names:
        if not is_name(blob_name, "blobs"):
            yield f"{blob_name!r} is not the name of a blob"
    if len(set(names)) != len(names):
        yield "two blobs of one name"
    if manifest.state and not 0 <= manifest.state.n_bytes <= manifest.state.raw_bytes:
        yield f"{manifest.state.n_bytes} bytes of state, {manifest.state.raw_bytes} when decoded"
    for blob in manifest.blobs:
        yield from (f"{blob.name}: {flaw}" for flaw in _blob_flaws(blob, manifest.schema))
    yield from _doubled_rows(manifest)


def _is_older(name: str, manifest: Manifest) -> bool:
    age = age_of(name)
    return age is not None and age < (manifest.epoch, manifest.number)


def _blob_flaws(blob: Blob, schema: Schema) -> Iterator[str]:
    end = 0
    for section in blob.sections:
        if section.start != end:
            yield f"a section starts at byte {section.start}, the one before ends at {end}"
        end = section.start + section.n_bytes
        if not (0 <= section.table < len(schema.tables) and 0 <= section.shard < schema.n_shards):
            yield f"table {section.table} and shard {section.shard}, there are {len(schema.tables)}, {schema.n_shards}"
            return
        table = schema.tables[section.table]
        rows_in_shard, first = table.rows_in(section.shard, schema.n_shards), section.first or 0
        if section.n_rows < 1 or first < 0 or first + section.n_rows > rows_in_shard:
            yield f"{section.n_rows} rows from {first} on, the shard has {rows_in_shard}"
        # The most that is ever needed: exact records, a place of 8 bytes for each, 8 for padding.
        if not 0 < section.n_bytes <= section.raw_bytes <= section.n_rows * (table.record_bytes + 16) + 16:
            yield f"{section.n_bytes} bytes, {section.raw_bytes} when decoded, for {section.n_rows} rows"
        if section.step < 0:
            yield f"rows of step {section.step}"
    if end != blob.n_bytes:
        yield f"its sections are {end} bytes, it has {blob.n_bytes}"


def _doubled_rows(manifest: Manifest) -> Iterator[str]:
    runs = [section for blob in manifest.blobs for section in blob.sections if section.first is not None]
    runs.sort(key=lambda run: (run.table, run.shard, run.first or 0))
    for (table, shard), group in groupby(runs, key=lambda run: (run.table, run.shard)):
        end = 0
        for run in group:
            assert run.first is not None
            if run.first < end:
                yield f"table {table}, shard {shard}: rows from {run.first} on are there twice"
            end = run.first + run.n_rows
