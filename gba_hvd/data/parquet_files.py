"""The files of a `ParquetStream`: which they are, their footers, and whether one is still what it was.

A stream's samples are numbered through its files, so two workers, or a job and its successor, must have the same ones.
A file is known by its URL, its size, its footer (sizes and statistics of every column of every row group) and, of
its bytes, the store's own checksum (ETag) or the first 64 KiB. What is not compared is a time: copies on several hosts
may have other ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from gba_hvd.data.sources import is_hidden
from gba_hvd.errors import BadInput
from gba_hvd.reading.slow_reads import reading
from recovery.redaction import redacted

_AT_ONCE = 16  # footers
_HEAD = 1 << 16  # bytes
_SUFFIXES = (".parquet", ".parq", ".pq")
_VERSIONS = (("ETag",), ("etag",), ("mtime", "ino"), ("LastModified",), ("updated",), ("created",))

Options = Mapping[str, Any]


@dataclass(frozen=True)
class ParquetFile:
    """url: as it is opened. metadata: its footer. digest: of what it is. version: what its file system calls that."""

    url: str
    metadata: pq.FileMetaData
    schema: pa.Schema
    digest: str
    version: tuple[str, ...]

    @property
    def group_sizes(self) -> list[int]:
        """Samples of each row group."""
        return [self.metadata.row_group(number).num_rows for number in range(self.metadata.num_row_groups)]

    def first_null(self, column: str) -> tuple[int, int] | None:
        """(row group, how many values are missing in it) of the first one where the footer says so of a column without
        lists; None: of no row group, as far as it says."""
        at = self._number_of(column)
        if at is None or self.metadata.schema.column(at).max_definition_level == 0:
            return None
        for number in range(self.metadata.num_row_groups):
            found = self.metadata.row_group(number).column(at).statistics
            if found is not None and found.has_null_count and found.null_count:
                return number, found.null_count
        return None

    def first_outside(self, column: str, low: float, high: float) -> int | None:
        """The first row group where the footer says that a column of numbers has one below `low` or above `high`."""
        at = self._number_of(column)
        for number in range(0 if at is None else self.metadata.num_row_groups):
            found = self.metadata.row_group(number).column(at).statistics
            if found is None or not found.has_min_max or not isinstance(found.min, (int, float)):
                continue
            if found.min < low or found.max > high:
                return number
        return None

    def _number_of(self, column: str) -> int | None:
        """Of the footer's columns."""
        paths = (self.metadata.schema.column(i).path for i in range(self.metadata.num_columns))
        return next((i for i, path in enumerate(paths) if path == column), None)


def open_all(urls: Iterable[str], options: Options) -> list[ParquetFile]:
    """The files at these URLs, in this order; those of a folder or of a pattern by name. Reads all footers at once.

    Raises BadInput for what is not there, or cannot be read as Parquet.
    """
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="gba-hvd footers") as threads:
        found = list(threads.map(lambda url: _expanded(url, options), urls))
        return list(threads.map(lambda url: _opened(url, options), [url for some in found for url in some]))


def read_group(file: ParquetFile, group: int, columns: list[str], options: Options) -> pa.Table:
    """Some columns of a row group. Raises BadInput when the file has changed since it was opened, or is damaged."""
    with reading(lambda: f"{redacted(file.url)}, row group {group}"):
        return _read_group(file, group, columns, options)


def _read_group(file: ParquetFile, group: int, columns: list[str], options: Options) -> pa.Table:
    refuse_change(file, options)
    try:
        with fsspec.open(file.url, **options) as opened:
            return pq.ParquetFile(opened, metadata=file.metadata).read_row_group(group, columns, use_threads=False)
    except Exception as error:  # of any kind: a store has its own
        refuse_change(file, options)
        raise BadInput(
            f"{file.url}, row group {group}: cannot be read, though the file has not changed since it was opened: "
            f"{type(error).__name__}: {error}. It is damaged, or has what pyarrow does not read, or its store fails"
        ) from error


def refuse_change(file: ParquetFile, options: Options) -> None:
    """Raises BadInput when the file is not the one whose footer was read."""
    try:
        now = _version(_info(file.url, options))
    except FileNotFoundError as error:
        raise BadInput(f"{file.url}: the file is gone since the stream was opened: {error}. {_WHAT_TO_DO}") from error
    except Exception as error:  # of any kind: a store has its own
        raise BadInput(
            f"{file.url}: its store failed while the file was read: {type(error).__name__}: {error}. Once it answers, "
            "start the job again: with checkpoints it resumes"
        ) from error
    if now != file.version:
        raise BadInput(
            f"{file.url}: the file has changed since the stream was opened (size and version were "
            f"{', '.join(file.version)}; now {', '.join(now)}), so the samples are others. {_WHAT_TO_DO}"
        )


_WHAT_TO_DO = (
    "Put the file back as it was and start the job again: with checkpoints it resumes. Files that others write while "
    "a job reads belong under new names; to train on the new ones, start over (resume=False, or another url for "
    "checkpoints)"
)


def _info(url: str, options: Options) -> Mapping[str, Any]:
    fs, path = fsspec.core.url_to_fs(url, **options)
    fs.invalidate_cache(fs._parent(path))  # a listing of before does not show a change
    info: Mapping[str, Any] = fs.info(path)
    return info


def _version(info: Mapping[str, Any]) -> tuple[str, ...]:
    """The size, and what the file system gives a file that is written."""
    known = next((keys for keys in _VERSIONS if all(info.get(key) is not None for key in keys)), ())
    return (f"{info.get('size')} bytes", *(str(info[key]) for key in known))


def _expanded(url: str, options: Options) -> list[str]:
    """The files that a URL stands for."""
    try:
        with reading(lambda: f"the list of files at {redacted(url)}"):
            return _found(url, options)
    except BadInput:
        raise
    except Exception as error:  # of any kind: a store has its own
        raise BadInput(
            f"ParquetStream: the files of {url} cannot be listed: {type(error).__name__}: {error}. Address, "
            "credentials and the like are options of its fsspec file system: storage_options"
        ) from error


def _found(url: str, options: Options) -> list[str]:
    if url.endswith(_SUFFIXES) and not set("*?[") & set(url):
        return [url]
    fs, path = fsspec.core.url_to_fs(url, **options)
    if set("*?[") & set(url) and not ("*" not in url and fs.exists(path)):
        found = sorted(fs.unstrip_protocol(one) for one in fs.glob(path))
        if not found:
            raise BadInput(f"ParquetStream: no file matches {url}")
        return found
    if not fs.isdir(path):
        return [url]
    below = len(path.rstrip("/")) + 1
    inside = sorted(one for one in fs.find(path) if one.lower().endswith(_SUFFIXES) and not is_hidden(one[below:]))
    if not inside:
        raise BadInput(
            f"ParquetStream: {url} is a folder without a file {' or '.join('*' + s for s in _SUFFIXES)} (names that "
            "begin with _ or . are not read, nor what is in such folders: that is no finished data)"
        )
    return [fs.unstrip_protocol(one) for one in inside]


def _opened(url: str, options: Options) -> ParquetFile:
    with reading(lambda: f"the footer of {redacted(url)}"):
        return _with_footer(url, options)


def _with_footer(url: str, options: Options) -> ParquetFile:
    try:
        info = _info(url, options)
        tag = info.get("ETag") or info.get("etag")
        with fsspec.open(url, **options) as opened:
            file = pq.ParquetFile(opened)
            metadata, schema = file.metadata, file.schema_arrow
            opened.seek(info["size"] - metadata.serialized_size - 8)
            footer = opened.read(metadata.serialized_size)
            opened.seek(0)
            head = str(tag).encode() if tag else opened.read(_HEAD)
    except Exception as error:  # of any kind: a store has its own
        raise BadInput(f"ParquetStream: {url} cannot be read as Parquet: {type(error).__name__}: {error}") from error
    plain = url.partition("?")[0]  # without a signature, which is another one each day
    facts = f"{plain} {info['size']} ".encode() + head + footer
    return ParquetFile(url, metadata, schema, hashlib.blake2b(facts, digest_size=16).hexdigest(), _version(info))
