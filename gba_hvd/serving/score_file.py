"""Scores of the samples in a file, as Parquet, CSV or JSON lines. Read and written in parts of some samples."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gba_hvd.errors import BadInput
from gba_hvd.extras import extra
from gba_hvd.serving.hashed_columns import (
    check_hashed,
    hashes_of,
    id_columns,
    of_hashed_tables,
    refuse_strings,
    with_hashes,
)
from gba_hvd.serving.inputs import plain_columns
from gba_hvd.serving.load import OpenModel
from gba_hvd.serving.sample_files import Samples, kind_of, read_samples

log = logging.getLogger("gba_hvd")
_JSON_LINES = (".jsonl", ".ndjson")
_ENDINGS = (".parquet", ".csv", *_JSON_LINES)


def score_file(
    model: OpenModel,
    source: Path,
    out: Path,
    *,
    keep: Sequence[str] = (),
    hashed: Sequence[str] = (),
    batch: int = 4096,
    encoded: bool = False,
    on_samples: Callable[[int], object] = lambda n: None,
) -> int:
    """Write the scores, all or nothing. Returns the number of samples.

    keep: columns of the source that are copied, before the scores. hashed: columns of strings, or of lists of them,
    which are ids of hashed tables once they are hashed, as `ParquetStream(hashed=)` does; a model may have been saved
    with them. encoded: the file has ids and numbers also where the model has an encoder, or hashed columns. on_samples:
    called with how many more are done.
    Raises BadInput for files of another kind, and what `OpenModel.predict` refuses, with the sample, from 0, or of JSON
    lines the line, from 1.
    """
    if out.suffix not in _ENDINGS:
        raise BadInput(f"{out}: expected a name that ends in {', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}")
    kind = kind_of(source)
    if source.resolve() == out.resolve():
        raise BadInput(f"{out} is the file that is read: name another one")
    with extra("data", "pyarrow", "predictions of files need"):
        import pyarrow
    encoder = None if encoded else model.encoder
    check_hashed(model.manifest, hashed, encoded)
    named, hashed = hashed, hashed or (() if encoded else model.manifest.hashed)
    texts = hashed if encoder is None else encoder.raw_columns
    plain = {*(plain_columns(model.manifest.input) if encoder is None else encoder.raw_columns), *keep, *hashed}
    fresh, n, writer, schema = out.with_name(f".{out.name}.{os.getpid()}"), 0, None, None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for part in read_samples(source, batch, texts=texts, plain=plain, encoder=encoder):
            if missing := [name for name in (*keep, *hashed) if name not in part.columns]:
                raise BadInput(f"{source} has no column {missing[0]!r}; it has {', '.join(part.columns)}")
            if not n and named and kind in (".csv", ".tsv"):
                _warn_of_numbers(part, hashed)
            scores = _scores(model, part, source, hashed, batch, encoded)
            if taken := [name for name in keep if name in scores]:
                raise BadInput(f"--keep {taken[0]}: the scores have this name: rename the column of {source}")
            kept = {name: _kept(part, name, schema, source) for name in keep}
            table = pyarrow.table({**kept, **scores})
            if writer is None:
                _check_kept(kept, out)
                schema = table.schema
                writer = _opened(fresh, out.suffix, schema)
            writer.write_table(table)
            n += part.n
            on_samples(part.n)
        if writer is None:
            raise BadInput(f"{source} has no samples")
        writer.close()
        os.replace(fresh, out)
    except OSError as error:
        raise BadInput(f"{out} cannot be written, or {source} read: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()
    return n


def _scores(
    model: OpenModel, part: Samples, source: Path, hashed: Sequence[str], batch: int, encoded: bool
) -> dict[str, np.ndarray]:
    """Raises BadInput naming the sample, where it is one, that the model refuses."""

    is_raw = model.manifest.encoder is not None and not encoded

    def of(first: int, n: int) -> dict[str, np.ndarray]:
        some = {name: values[first : first + n] for name, values in part.columns.items()}
        own = () if encoded else model.manifest.hashed
        with of_hashed_tables(() if own else hashed):
            request = some if is_raw else _request(model, some, hashed, None if own else "say so:")
            return model.predict(request, batch=batch, encoded=not is_raw)

    try:
        return of(0, part.n)
    except BadInput as error:
        at = _first_refused(of, part.n)
        if at is None:
            raise BadInput(f"{source}, {part.range}: {error}") from error
        try:
            of(at, 1)
        except BadInput as alone:
            raise BadInput(f"{source}, {part.where(at)}: {alone}") from error
        raise


def _first_refused(scores_of: Callable[[int, int], object], n: int) -> int | None:
    """The first sample that is refused by itself; None where all are, or only some together."""

    def is_refused(first: int, n: int) -> bool:
        try:
            scores_of(first, n)
        except BadInput:
            return True
        return False

    low, high = 0, n - 1  # the first low samples are fine together, the first high + 1 are not
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_refused(0, middle + 1) else (middle + 1, high)
    is_one = is_refused(low, 1) and (n == 1 or not is_refused(n - 1 if low == 0 else 0, 1))
    return low if is_one else None


def _request(model: OpenModel, columns: Mapping[str, Any], hashed: Sequence[str], how: str | None) -> dict[str, Any]:
    """The columns of some samples as the model takes them. Arrays of pyarrow become those of numpy. how: see
    `with_hashes`."""
    ids = set(id_columns(model.manifest.input))
    if all(isinstance(one, list) for one in columns.values()):
        return with_hashes(columns, hashed, ids, how)
    refuse_strings({name: one.type for name, one in columns.items() if name in ids}, hashed, how)
    return {
        name: hashes_of(one, name, how is None) if name in hashed else one.to_numpy(zero_copy_only=False)
        for name, one in columns.items()
    }


def _kept(part: Samples, name: str, schema: Any, source: Path) -> Any:
    """A column to copy, as an array of pyarrow. schema: of the file so far; None: this is its first part."""
    import pyarrow

    if not isinstance(part.columns[name], list):
        return part.columns[name]
    kind = None if schema is None else schema.field(name).type
    values = _parsed(part, name, source)
    try:
        found = pyarrow.array(values)
        if kind is not None and not _may_become(found.type, kind):
            raise BadInput(f"{source}, {part.range}: column {name!r} has {found.type}, and {kind} in the lines before")
        if kind is None and pyarrow.types.is_null(found.type):
            kind = pyarrow.string()
        return found if kind is None else found.cast(kind)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError, OverflowError) as error:
        expected = "" if kind is None else f", expected {kind} as in the lines before"
        raise BadInput(f"{source}, {part.range}: column {name!r} cannot be copied: {error}{expected}") from error


def _parsed(part: Samples, name: str, source: Path) -> Any:
    try:
        return part.parsed(name)
    except ValueError as error:  # a number of thousands of digits
        raise BadInput(f"{source}, {part.range}: column {name!r} cannot be copied: {error}") from error


def _may_become(kind: Any, other: Any) -> bool:
    """Whether values of a type of JSON may be cast to another: all that is missing, and numbers."""
    from pyarrow import types

    if types.is_list(kind) and types.is_list(other):
        return _may_become(kind.value_type, other.value_type)
    numbers = [types.is_integer(one) or types.is_floating(one) for one in (kind, other)]
    return bool(types.is_null(kind) or kind == other or all(numbers))


def _check_kept(kept: Mapping[str, Any], out: Path) -> None:
    """Raises BadInput for lists, where a CSV file is written, and for what JSON has not, where that is."""
    import pyarrow

    has_json = out.suffix in _JSON_LINES
    if has_json and (other := [name for name, one in kept.items() if not _is_of_json(one.type)]):
        raise BadInput(f"column {other[0]!r} has {kept[other[0]].type}, which JSON does not hold: write Parquet")
    if nested := [name for name, one in kept.items() if out.suffix == ".csv" and pyarrow.types.is_nested(one.type)]:
        raise BadInput(f"column {nested[0]!r} has lists, which a CSV file does not hold: write Parquet")


def _is_of_json(kind: Any) -> bool:
    """Whether values of a type of pyarrow are written to JSON without a change."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _is_of_json(kind.value_type)
    if types.is_nested(kind) and not (types.is_map(kind) or types.is_union(kind)):
        return all(_is_of_json(kind.field(i).type) for i in range(kind.num_fields))
    plain = (
        types.is_null,
        types.is_boolean,
        types.is_integer,
        types.is_floating,
        types.is_string,
        types.is_large_string,
        types.is_string_view,
    )
    return any(is_one(kind) for is_one in plain)


def _warn_of_numbers(part: Samples, hashed: Sequence[str]) -> None:
    """A CSV file does not say whether ids are numbers or strings of digits."""
    import pyarrow.compute

    for name in hashed:
        column = part.columns[name]
        if pyarrow.compute.all(pyarrow.compute.match_substring_regex(column, r"^-?\d+$")).as_py():
            log.warning(
                "column %r holds whole numbers (%s, ...), which are hashed as strings, since --hashed names it: right "
                "where they were strings in training. Where they were numbers, leave it out of --hashed",
                name, column[0],
            )  # fmt: skip


def _as_json(value: Any) -> Any:
    """Numbers that JSON has not, NaN and infinite ones, are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_as_json(one) for one in value]
    return {name: _as_json(one) for name, one in value.items()} if isinstance(value, dict) else value


def _shortest(column: Any) -> Any:
    """float32 as the float64 that is written with as few digits."""
    import pyarrow

    if not pyarrow.types.is_float32(column.type):
        return column
    return column.cast(pyarrow.string()).cast(pyarrow.float64())


class _JsonLines:
    """Writes tables as pyarrow's writers do: an object a row."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write_table(self, table: Any) -> None:
        short = table.from_arrays([_shortest(column) for column in table.columns], names=table.column_names)
        lines = (json.dumps(_as_json(row), ensure_ascii=False, allow_nan=False) for row in short.to_pylist())
        self._file.writelines(f"{line}\n" for line in lines)

    def close(self) -> None:
        self._file.close()


def _opened(path: Path, ending: str, schema: Any) -> Any:
    """A file that is written in parts."""
    if ending in _JSON_LINES:
        return _JsonLines(path)
    import pyarrow.csv
    import pyarrow.parquet

    return (pyarrow.csv.CSVWriter if ending == ".csv" else pyarrow.parquet.ParquetWriter)(path, schema)
