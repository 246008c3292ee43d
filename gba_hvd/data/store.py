"""The files of a prepared dataset: Arrow IPC parts, uncompressed so that they can be mapped, and `dataset.json`.

One part holds one record batch: `label` uint8 (of several labels, or ratings, a list of float32), `ids` a list of
n_fields int32 per row (all single-valued fields side by side: one random read per row instead of one per column),
`dense` a list of n_dense float32, and a list column `bag:<field>` of int32 for each multi-valued field. A part is
staged in plain files first, so its size is not bounded by memory.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gba_hvd.data.recipe import Recipe
from gba_hvd.errors import BadInput
from recovery.storage.local_store import sync

MANIFEST = "dataset.json"
FORMAT = "gba_hvd click log"
VERSION, READ_VERSIONS = 2, (1, 2)  # 2: several labels, tables of several fields
ROWS_PER_PART = 1 << 23
_BAG = "bag:"


@dataclass(frozen=True)
class DatasetLayout:
    """What a row holds, by name and in order. labels: stored as float32; none: there is one label, 0 or 1."""

    single: tuple[str, ...]
    multi: tuple[str, ...]
    dense: tuple[str, ...]
    labels: tuple[str, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe) -> DatasetLayout:
        return cls(
            tuple(c.name for c in recipe.categorical if not c.multi_valued),
            tuple(c.name for c in recipe.categorical if c.multi_valued),
            tuple(x.name for x in recipe.numeric),
            () if recipe.is_plain_label else recipe.labels,
        )

    def schema(self) -> pa.Schema:
        plain = pa.field("label", pa.uint8(), nullable=False)
        columns = [_fixed_list("label", pa.float32(), self.labels) if self.labels else plain]
        if self.single:
            columns.append(_fixed_list("ids", pa.int32(), self.single))
        if self.dense:
            columns.append(_fixed_list("dense", pa.float32(), self.dense))
        item = pa.field("item", pa.int32(), nullable=False)
        columns += [pa.field(_BAG + name, pa.large_list(item), nullable=False) for name in self.multi]
        return pa.schema(columns)


def _fixed_list(name: str, type: pa.DataType, names: Sequence[str]) -> pa.Field:
    item = pa.field("item", type, nullable=False)
    return pa.field(name, pa.list_(item, len(names)), nullable=False, metadata={"columns": json.dumps(names)})


@dataclass(frozen=True)
class DatasetPart:
    """Rows of one split, in memory or mapped. For the fields of `Layout`, in its order:

    label:   uint8 [n], or float32 [n, labels]
    ids:     int32 [n, single]
    dense:   float32 [n, dense]
    bags:    (starts int64 [n + 1], values int32) of each multi-valued field
    """

    label: npt.NDArray[np.uint8] | npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]
    dense: npt.NDArray[np.float32]
    bags: tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]], ...] = ()

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True)
class EncodedRows:
    """As `Part`, but a multi-valued field is (lengths int64 [n], values int32)."""

    label: npt.NDArray[np.uint8] | npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]
    dense: npt.NDArray[np.float32]
    bags: tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]], ...] = ()

    def keep(self, mask: npt.NDArray[np.bool_]) -> EncodedRows:
        bags = tuple((lengths[mask], values[np.repeat(mask, lengths)]) for lengths, values in self.bags)
        return EncodedRows(self.label[mask], self.ids[mask], self.dense[mask], bags)


class SplitWriter:
    """Writes the parts of one split into `folder / split`. `finish` returns what the manifest says about them."""

    def __init__(self, folder: Path, split: str, layout: DatasetLayout, rows_per_part: int = ROWS_PER_PART) -> None:
        self._folder, self._split, self._layout, self._rows_per_part = folder, split, layout, rows_per_part
        (folder / split).mkdir()
        self._staged: dict[str, BinaryIO] = {}
        self._n_staged = 0
        self._ends = [0] * len(layout.multi)
        self._parts: list[dict[str, Any]] = []

    def append(self, rows: EncodedRows) -> None:
        self._stage("label", rows.label)
        self._stage("ids", rows.ids)
        self._stage("dense", rows.dense)
        for i, (lengths, values) in enumerate(rows.bags):
            ends = np.cumsum(lengths, dtype=np.int64) + self._ends[i]
            self._ends[i] += len(values)
            self._stage(f"ends{i}", ends)
            self._stage(f"values{i}", values)
        self._n_staged += len(rows.label)
        if self._n_staged >= self._rows_per_part:
            self._write_part()

    def finish(self) -> list[dict[str, Any]]:
        if self._n_staged:
            self._write_part()
        return self._parts

    def close(self) -> None:
        for file in self._staged.values():
            file.close()
        self._staged = {}

    def _stage(self, name: str, array: npt.NDArray[Any]) -> None:
        if name not in self._staged:
            self._staged[name] = (self._folder / f"{self._split}.{name}.staged").open("wb")
        self._staged[name].write(np.ascontiguousarray(array).data)

    def _staged_buffer(self, name: str) -> pa.Buffer:
        file = self._staged[name]
        file.flush()
        # Arrow cannot map an empty file.
        return pa.memory_map(file.name).read_buffer() if os.path.getsize(file.name) else pa.py_buffer(b"")

    def _write_part(self) -> None:
        n, layout, schema = self._n_staged, self._layout, self._layout.schema()
        columns: list[pa.Array] = []
        if not layout.labels:
            columns.append(pa.Array.from_buffers(pa.uint8(), n, [None, self._staged_buffer("label")]))
        lists = (("label", layout.labels), ("ids", layout.single), ("dense", layout.dense))
        for name, names in lists:
            if names:
                kind = schema.field(name).type
                flat = pa.Array.from_buffers(kind.value_type, n * len(names), [None, self._staged_buffer(name)])
                columns.append(pa.FixedSizeListArray.from_arrays(flat, type=kind))
        for i, field in enumerate(layout.multi):
            starts = np.concatenate([[0], np.frombuffer(self._staged_buffer(f"ends{i}"), dtype=np.int64)])
            flat = pa.Array.from_buffers(pa.int32(), self._ends[i], [None, self._staged_buffer(f"values{i}")])
            columns.append(pa.LargeListArray.from_arrays(starts, flat, type=schema.field(_BAG + field).type))
        file = f"{self._split}/part-{len(self._parts):05d}.arrow"
        path = self._folder / file
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(pa.record_batch(columns, schema=schema))
        sync(path)
        del columns
        for staged in self._staged.values():
            staged.close()
            os.unlink(staged.name)
        self._staged, self._n_staged, self._ends = {}, 0, [0] * len(layout.multi)
        self._parts.append({"file": file, "rows": n, "bytes": path.stat().st_size, "crc32": crc32(path)})


def open_part(path: Path, rows: int, n_bytes: int, layout: DatasetLayout) -> DatasetPart:
    """Map one part; nothing is read yet but its schema. Raises `BadInput` when it is not what was written."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise BadInput(f"{path}: cannot be opened ({error.strerror}); prepare the dataset again") from error
    if size != n_bytes:
        raise BadInput(f"{path}: {size} bytes, expected {n_bytes}: the file is cut or was changed; prepare it again")
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        schema, batches = reader.schema, reader.num_record_batches
        if not schema.equals(layout.schema()) or batches != 1:
            raise BadInput(
                f"{path}: {batches} batches of {schema.names}, expected 1 of {layout.schema().names}: damaged"
            )
        batch = reader.get_batch(0)
        batch.validate()
    except (pa.ArrowException, OSError, EOFError) as error:
        raise BadInput(f"{path}: damaged ({error}); prepare the dataset again") from error
    if len(batch) != rows:
        raise BadInput(f"{path}: {len(batch)} rows, expected {rows}: damaged; prepare the dataset again")
    bags = tuple(_bag(batch.column(_BAG + name)) for name in layout.multi)
    label = batch.column("label")
    label = _matrix(batch, "label", layout.labels) if layout.labels else label.to_numpy(zero_copy_only=True)
    return DatasetPart(label, _matrix(batch, "ids", layout.single), _matrix(batch, "dense", layout.dense), bags)


def _matrix(batch: pa.RecordBatch, name: str, names: Sequence[str]) -> npt.NDArray[Any]:
    if not names:
        return np.empty((len(batch), 0), dtype=np.int32 if name == "ids" else np.float32)
    matrix: npt.NDArray[Any] = batch.column(name).values.to_numpy(zero_copy_only=True).reshape(len(batch), len(names))
    return matrix


def _bag(column: pa.LargeListArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    return column.offsets.to_numpy(zero_copy_only=True), column.values.to_numpy(zero_copy_only=True)


def crc32(path: Path) -> int:
    sum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            sum = zlib.crc32(chunk, sum)
    return sum


def part_path(folder: Path, name: str) -> Path:
    """Of a part that the manifest names. Raises BadInput for a name that leads out of the dataset's folder."""
    if {"", ".."} & set(name.split("/")):
        raise BadInput(f"{folder / MANIFEST}: the part {name!r} is not in {folder}; prepare the dataset again")
    return folder / name


def verify(folder: Path) -> list[str]:
    """Read every part and compare its checksum; the parts that differ from what was written, as sentences."""
    flaws = []
    for split in read_manifest(folder)["splits"].values():
        for part in split["parts"]:
            path = part_path(folder, part["file"])
            if not path.is_file():
                flaws.append(f"{path}: missing")
            elif (found := crc32(path)) != part["crc32"]:
                flaws.append(f"{path}: checksum {found:08x}, expected {part['crc32']:08x}: damaged")
    return flaws


def refuse_irregular(path: Path) -> None:
    """Raises BadInput for what is there and no regular file: opening a pipe would wait for its writer."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise BadInput(f"{path}: it is no regular file (a pipe, a device or a folder); remove it")


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "version": VERSION, **manifest}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    refuse_irregular(path)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInput(
            f"{folder}: no {MANIFEST} here, so this is no prepared dataset; "
            f"`gba-hvd data prepare ... --out {folder}` makes one"
        ) from error
    except (ValueError, OSError) as error:
        raise BadInput(f"{path}: cut or damaged ({error}); prepare the dataset again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BadInput(f"{path}: not the manifest of a prepared dataset")
    if manifest.get("version") not in READ_VERSIONS:
        found, known = manifest.get("version"), " and ".join(map(str, READ_VERSIONS))
        raise BadInput(f"{path}: version {found}, this program reads versions {known}; prepare the dataset again")
    return manifest
