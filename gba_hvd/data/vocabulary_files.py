"""The vocabularies of a prepared dataset, `vocabulary/TABLE.arrow`, and digests that tell one from another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from gba_hvd.data.hashing import hash_strings
from gba_hvd.data.list_columns import one_array
from gba_hvd.data.store import refuse_irregular
from gba_hvd.errors import BadInput


def vocabulary_path(folder: Path, table: str) -> Path:
    return folder / "vocabulary" / f"{quote(table, safe='')}.arrow"


def read_vocabulary(folder: Path, table: str, n_rows: int) -> pa.Array:
    """large_string [n_rows - 1]: the value of id i is at i - 1. Raises BadInput where it is missing or damaged."""
    path = vocabulary_path(folder, table)
    refuse_irregular(path)
    try:
        with pa.memory_map(str(path)) as file:
            stored = pa.ipc.open_file(file).read_all()
        stored.validate(full=True)
    except (OSError, pa.ArrowException) as error:
        raise BadInput(f"{path}: missing or damaged ({error}); prepare the dataset again") from error
    if stored.num_rows + 1 != n_rows:
        raise BadInput(f"{path}: {stored.num_rows} values, expected {n_rows - 1}: damaged; prepare the dataset again")
    return one_array(stored["value"])


def vocabulary_digest(values: pa.Array) -> str:
    """Of the values in the order of their ids, the same on every machine."""
    return hashlib.blake2b(hash_strings(values).astype("<u8").tobytes(), digest_size=8).hexdigest()


class VocabularyDigests:
    """Of the tables with a vocabulary. See `reading.trained_vocabularies.Vocabularies`.

    name: of what has them. values: of a table, large_string [n]. digests: by table, with the number of values
    """

    def __init__(self, name: str, values: Callable[[str], pa.Array], digests: Mapping[str, tuple[int, str]]) -> None:
        self.name, self._values, self.digests = name, values, digests

    @classmethod
    def of_store(cls, folder: Path, manifest: Mapping[str, Any]) -> VocabularyDigests:
        """Those of its manifest, which is the same on all hosts. One of an earlier version has none."""
        rows = {f.get("table", f["name"]): f["rows"] for f in manifest["fields"]}
        digests = {f.get("table", f["name"]): f["vocabulary"] for f in manifest["fields"] if "vocabulary" in f}
        known = {table: (rows[table] - 1, digest) for table, digest in digests.items()}
        return cls(str(folder), partial(_read, folder, rows), known)

    def digest_of(self, table: str, n_values: int) -> str:
        """Of the first values of a table."""
        return vocabulary_digest(self._values(table)[:n_values])


def _read(folder: Path, rows: Mapping[str, int], table: str) -> pa.Array:
    return read_vocabulary(folder, table, rows[table])
