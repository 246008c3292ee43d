"""What a saved model consists of, as a JSON document. It is written last and makes a version visible.

Names in the store: `versions/000001.json` is a version, `rows/ab/SHA256` a shard of rows, `files/SHA256.KIND` all else.
A writer takes the number of a version by `versions/000001-NONCE`, since a store may overwrite what has a name.
`versions/000001.withdrawn` keeps the number of a version that was withdrawn (`withdrawal`).
A document has its own checksum, computed without it. What it says is checked before it is used; whether the bytes of
its objects are right is not decided here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gba_hvd.errors import BadInput
from recovery.errors import Damaged, NotFound, StoreError
from recovery.hashed_ids import HASHES
from recovery.storage.store import Store

FORMAT = 1
_TWO_HASHES = 2  # of a model that has a table with two `shared_hashes`: readers of format 1 know none
_WITH_ENCODER = 3  # of a model that has an encoder: earlier readers would take its requests for ids and numbers
_WITH_HASHED = 4  # of a model that has `hashed` columns: the same
_WITH_WEIGHTS = 5  # of a model that takes bags with weights: earlier readers would leave them out
ALIGNMENT = 64  # of the rows in a shard that has keys
_VERSION = re.compile(r"versions/(\d{6})\.json")
_CLAIM = re.compile(r"versions/(\d{6})-[0-9a-f]{16}")
_WITHDRAWN = re.compile(r"versions/(\d{6})\.withdrawn")
_DELETES = "versions/deletes-"  # names of objects of `no_new_version` begin so
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class StoredObject:
    """An object of the store. sha256: of its bytes, hexadecimal."""

    name: str
    n_bytes: int
    sha256: str


@dataclass(frozen=True)
class Shard:
    """Rows of one bucket, in ascending order of their keys: an object `rows/ab/SHA256`.

    has_keys: the keys (int64 [n], little-endian, padded with zeros to a multiple of ALIGNMENT bytes) come before the
    rows (float32 [n, dim]); otherwise the rows are those of all keys of the bucket.
    """

    bucket: int
    n_rows: int
    has_keys: bool
    n_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        return shard_name(self.sha256)

    @property
    def rows_at(self) -> int:
        """The byte at which the rows start."""
        return rows_at(self.n_rows) if self.has_keys else 0


@dataclass(frozen=True)
class RowShards:
    """Rows by key, cut in buckets.

    rows_per_bucket: bucket b has the keys from b * rows_per_bucket on; 0: keys are any int64, and bucket b has those
    whose upper `bucket_bits` bits, plus 2^(bucket_bits - 1), are b. n_keys: keys are below it; 0: any int64.
    """

    shards: tuple[Shard, ...]
    rows_per_bucket: int = 0
    bucket_bits: int = 0
    n_keys: int = 0

    @property
    def is_complete(self) -> bool:
        """Every key below n_keys has a row, and no shard has keys of its own."""
        n_rows = sum(one.n_rows for one in self.shards)
        return 0 < self.n_keys == n_rows and not any(one.has_keys for one in self.shards)


@dataclass(frozen=True)
class Initial:
    """How a row that is not stored is computed: normal(0, std), a function of (seed, row, column) (`kernels`)."""

    seed: int
    std: float


@dataclass(frozen=True)
class StoredTable:
    """One table.

    keys: "numbered": the key of an id is the id, from 0 to n_rows - 1. "hash64": it is `recovery.hashed_ids` of the id,
    and a key without a row has the sum of `shared_hashes` rows of `shared`, which lie in `shared_in` shards of a job:
    `recovery.hashed_ids.shared_rows_of` says which.
    initial: of rows that are not stored; None: all are.
    """

    name: str
    dim: int
    keys: str
    n_rows: int
    rows: RowShards
    shared: RowShards | None = None
    initial: Initial | None = None
    shared_hashes: int = 1
    shared_in: int = 1

    @property
    def is_hashed(self) -> bool:
        return self.keys == "hash64"

    @property
    def parts(self) -> tuple[RowShards, ...]:
        return (self.rows,) if self.shared is None else (self.rows, self.shared)


@dataclass(frozen=True)
class ConvertedModule:
    """A module that `gba_hvd.convert` has made a lookup: its path, and the names of its feature and table."""

    path: str
    feature: str
    table: str


@dataclass(frozen=True)
class BuilderRecord:
    """What builds the module: `target` is "package.module:callable", or with `code` the callable of that file."""

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    code: StoredObject | None = None


@dataclass(frozen=True)
class StoredLookup:
    """What the rows of a feature are, that a program takes: of the ids in a column, in a table.

    pooling: of several ids, "sum", "mean" or "max"; None: each has its row. padding: an id that stands for no value
    """

    feature: str
    column: str
    table: str
    pooling: str | None
    padding: int | None = None


@dataclass(frozen=True)
class StoredProgram:
    """The dense part as a program (`dense_program`)."""

    file: StoredObject
    lookups: tuple[StoredLookup, ...]


@dataclass(frozen=True)
class StoredOnnx:
    """The same in the ONNX format. rows: by feature, fields: by column, names of inputs; outputs: names, in order"""

    file: StoredObject
    lookups: tuple[StoredLookup, ...]
    rows: Mapping[str, str]
    fields: Mapping[str, str]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class StoredBlocks:
    """What verifies parts of shards (`block_index`). block_bytes: of a block; the last one of a shard is shorter."""

    file: StoredObject
    block_bytes: int


@dataclass(frozen=True)
class StoredEncoder:
    """What makes ids and numbers of raw values (`stored_encoder`). vocabularies: by table"""

    file: StoredObject
    vocabularies: Mapping[str, StoredObject]

    @property
    def n_bytes(self) -> int:
        return self.file.n_bytes + sum(one.n_bytes for one in self.vocabularies.values())


@dataclass(frozen=True)
class ModelManifest:
    """One version of a model.

    dense: parameters, buffers and the padding rows of converted modules, as safetensors. example: an input, the same.
    input: how requests become inputs (`inputs`). activation: of predictions, "none" or "sigmoid".
    source: plain JSON: where it comes from (step, checkpoint, its checksum).
    versions: of the packages it was saved with. lookup_dtypes: by path, of what modules that look up tables return.
    blocks: None: no shard is larger than a block, or the model was saved before there were blocks.
    encoder: with it requests hold raw values. hashed: columns of requests that hold strings, ids of hashed tables.
    """

    version: int
    saved_unix_s: float
    builder: BuilderRecord
    tables: tuple[StoredTable, ...]
    dense: StoredObject
    converted: tuple[ConvertedModule, ...] = ()
    input: Mapping[str, Any] | None = None
    example: StoredObject | None = None
    activation: str = "none"
    source: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    lookup_dtypes: Mapping[str, str] = field(default_factory=dict)
    program: StoredProgram | None = None
    blocks: StoredBlocks | None = None
    onnx: StoredOnnx | None = None
    encoder: StoredEncoder | None = None
    hashed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return version_name(self.version)

    @property
    def takes_raw(self) -> bool:
        """Whether requests hold raw values, of which the model makes ids."""
        return self.encoder is not None or bool(self.hashed)

    def shards(self) -> Iterator[tuple[StoredTable, Shard]]:
        for table in self.tables:
            for part in table.parts:
                yield from ((table, shard) for shard in part.shards)

    def files(self) -> Iterator[StoredObject]:
        """All objects but shards."""
        yield from (one for one in (self.dense, self.builder.code, self.example) if one is not None)
        yield from (one.file for one in (self.program, self.onnx, self.blocks, self.encoder) if one is not None)
        yield from () if self.encoder is None else self.encoder.vocabularies.values()

    def objects(self) -> Iterator[StoredObject]:
        """Every object, shards first."""
        for _, shard in self.shards():
            yield StoredObject(shard.name, shard.n_bytes, shard.sha256)
        yield from self.files()

    @property
    def n_bytes(self) -> int:
        """Of all objects, each once."""
        return sum({one.name: one.n_bytes for one in self.objects()}.values())


def shard_name(sha256: str) -> str:
    return f"rows/{sha256[:2]}/{sha256}"


def version_name(version: int) -> str:
    return f"versions/{version:06d}.json"


def withdrawn_name(version: int) -> str:
    return f"versions/{version:06d}.withdrawn"


def rows_at(n_keys: int) -> int:
    """The byte at which rows start behind so many keys."""
    return -(-8 * n_keys // ALIGNMENT) * ALIGNMENT


def to_json(manifest: ModelManifest) -> bytes:
    """Raises BadInput when it is not plain JSON."""
    try:
        return _document(msgspec.to_builtins(manifest), _format_of(manifest))
    except (TypeError, ValueError) as error:
        raise BadInput(f"{manifest.name}: what describes the model must be plain JSON, without NaN: {error}") from error


def from_json(data: bytes, name: str) -> ModelManifest:
    """Raises Damaged when it is not what was written, BadInput when another version of this program wrote it."""
    try:
        document = json.loads(data)
        found = _document(document["model"], document["format"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged(f"{name} is cut off or overwritten: it is not the JSON that was written ({error})") from error
    if found != data:
        raise Damaged(f"{name} was altered after it was written: its checksum does not fit")
    if document["format"] not in (FORMAT, _TWO_HASHES, _WITH_ENCODER, _WITH_HASHED, _WITH_WEIGHTS):
        raise BadInput(
            f"{name} is in format {document['format']}, and this program reads formats up to {_WITH_WEIGHTS}: install "
            "the version of gba-hvd that saved it, or save the model again with this one"
        )
    try:
        manifest = msgspec.convert(document["model"], ModelManifest)
    except msgspec.ValidationError as error:
        raise Damaged(f"{name} makes no sense: {error}") from error
    if document["format"] not in (_format_of(manifest), _format_of_tables(manifest)):
        raise Damaged(f"{name} makes no sense: format {document['format']} of another kind of model")
    for flaw in _flaws(manifest, name):
        raise Damaged(f"{name} makes no sense: {flaw}")
    return manifest


def _format_of(manifest: ModelManifest) -> int:
    if _has_weights(manifest.input):
        return _WITH_WEIGHTS
    if manifest.hashed:
        return _WITH_HASHED
    return _format_of_tables(manifest) if manifest.encoder is None else _WITH_ENCODER


def _format_of_tables(manifest: ModelManifest) -> int:
    """Also of models with an encoder that were saved before these had a format."""
    return _TWO_HASHES if any(table.shared_hashes > 1 for table in manifest.tables) else FORMAT


def _has_weights(part: Any) -> bool:
    """Whether a part of `input` is a bag with weights, or has one."""
    if isinstance(part, Mapping):
        return (part.get("kind") == "field" and "weights" in part) or any(map(_has_weights, part.values()))
    return isinstance(part, (list, tuple)) and any(map(_has_weights, part))


def versions(store: Store) -> list[int]:
    """Of all manifests, ascending."""
    return sorted(int(found[1]) for name in store.names("versions/") if (found := _VERSION.fullmatch(name)))


@contextlib.contextmanager
def next_version(store: Store) -> Iterator[int]:
    """A number that no version has and no other writer gets: its manifest is to be written in this context.

    Each writer writes a claim, then lists. Of two that take one number, the later to list sees the claim of the other,
    or its version, which is written before its claim is deleted. What a crash leaves is a number that is not used.
    Raises StoreError where another writer is at it.
    """
    number = 1 + max((int(found[1]) for name in store.names("versions/") if (found := _numbered(name))), default=0)
    claim = f"versions/{number:06d}-{secrets.token_hex(8)}"
    store.put(claim, [b"claimed"])
    try:
        claims = [name for name in store.names(f"versions/{number:06d}-") if _CLAIM.fullmatch(name)]
        names = store.names("versions/")  # listed after the claims
        if claims != [claim] or version_name(number) in names or withdrawn_name(number) in names:
            raise StoreError(f"{store.url}: another process saves version {number} at the same time; save again")
        if others := sorted(store.names(_DELETES)):
            raise StoreError(
                f"{store.url}: `gba-hvd model gc` or `rollback` deletes versions; save again when it has ended (if it "
                f"was killed: that command with --yes --force removes {others[0]} and completes it)"
            )
        yield number
    finally:
        with contextlib.suppress(StoreError):
            store.delete([claim])


@contextlib.contextmanager
def no_new_version(store: Store) -> Iterator[None]:
    """No save makes a version in this context, and no other process deletes any. Raises StoreError where one is at it.

    Both this and `next_version` write, then list: so at least one sees the other.
    """
    mark = f"{_DELETES}{secrets.token_hex(8)}"
    store.put(mark, [b"claimed"])
    try:
        names = store.names("versions/").keys() - {mark}
        if others := sorted(name for name in names if _CLAIM.fullmatch(name) or name.startswith(_DELETES)):
            what = (
                "another process deletes versions" if others[0].startswith(_DELETES) else "a save completes a version"
            )
            raise StoreError(
                f"{store.url}: {what}; try again when it has ended (if it was killed: --yes --force removes "
                f"{others[0]} first)"
            )
        yield
    finally:
        with contextlib.suppress(StoreError):
            store.delete([mark])


def remove_marks(store: Store) -> None:
    """What `next_version` and `no_new_version` of killed processes left."""
    store.delete([name for name in store.names("versions/") if _CLAIM.fullmatch(name) or name.startswith(_DELETES)])


def _numbered(name: str) -> re.Match[str] | None:
    return _VERSION.fullmatch(name) or _CLAIM.fullmatch(name) or _WITHDRAWN.fullmatch(name)


def read_manifest(store: Store, version: int | str = "newest") -> ModelManifest:
    """Raises BadInput where there is no model, or not this version; Damaged and StoreError.

    The newest is the newest whose manifest is whole: a store without atomic writes, such as sftp, keeps the beginning
    of one whose save was interrupted. It is passed over with a warning.
    """
    there = versions(store)
    if not there:
        raise BadInput(f"{store.url} has no model: gba_hvd.save_model and `gba-hvd model export` write one")
    if version != "newest" and version not in there:
        gone = isinstance(version, int) and withdrawn_name(version) in store.names("versions/")
        why = ", which `gba-hvd model rollback` has withdrawn" if gone else ""
        raise BadInput(f"{store.url} has no version {version!r}{why}; it has {', '.join(map(str, there))}")
    numbers = there[::-1] if version == "newest" else [int(version)]
    for name in map(version_name, numbers):
        try:
            data = store.get(name)
        except NotFound as error:
            if version == "newest" and versions(store) != there:  # withdrawn meanwhile
                return read_manifest(store)
            raise BadInput(f"{store.url}: {name} was deleted meanwhile") from error
        if name == version_name(numbers[-1]) or not _is_cut_off(data):
            return from_json(data, name)
        warnings.warn(f"{store.url}: {name} was not written to its end, the version before is used", stacklevel=2)
    raise AssertionError("the last one is returned or raises")


def _is_cut_off(data: bytes) -> bool:
    """Whether it is the beginning of a document: none of these is JSON."""
    try:
        json.loads(data)
    except ValueError:
        return data[:1] in (b"", b"{")
    return False


def _document(model: Any, format_version: Any) -> bytes:
    body = {"format": format_version, "model": model}
    checksum = hashlib.sha256(_canonical(body)).hexdigest()
    return _canonical({**body, "sha256": checksum})


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _flaws(manifest: ModelManifest, name: str) -> Iterator[str]:
    if manifest.name != name:
        yield f"it is {manifest.name}, in the place of another"
    names = [table.name for table in manifest.tables]
    if len(set(names)) != len(names):
        yield "two tables of one name"
    for one in manifest.objects():
        if not _SHA256.fullmatch(one.sha256) or one.n_bytes < 0:
            yield f"{one.name!r} has the checksum {one.sha256!r} and {one.n_bytes} bytes"
    if manifest.blocks is not None and (manifest.blocks.block_bytes < 8 or manifest.blocks.block_bytes % 8):
        yield f"blocks of {manifest.blocks.block_bytes} bytes"
    for table in manifest.tables:
        if table.dim < 1 or table.keys not in ("numbered", "hash64") or table.is_hashed != (table.shared is not None):
            yield f"table {table.name!r}: dim {table.dim}, keys {table.keys!r}"
        n_shared = 0 if table.shared is None else table.shared.n_keys
        hashes, n_shards = table.shared_hashes, table.shared_in
        if hashes not in HASHES or n_shards < 1 or n_shared % (hashes * n_shards):
            yield f"table {table.name!r}: {n_shared} shared rows, {hashes} hashes, {n_shards} shards"
        for part in table.parts:
            for shard in part.shards:
                if shard.n_rows < 1 or shard.n_bytes != shard.rows_at + 4 * table.dim * shard.n_rows:
                    yield f"{shard.name}: {shard.n_bytes} bytes for {shard.n_rows} rows of {table.dim}"
