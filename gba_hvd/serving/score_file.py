"""Scores of the samples in a Parquet or CSV file, written to another one. Read and written in parts of some samples."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gba_hvd.errors import BadInput
from gba_hvd.extras import extra
from gba_hvd.serving.hashed_columns import check_hashed, hashes_of, id_columns, of_hashed_tables, refuse_strings
from gba_hvd.serving.load import OpenModel

log = logging.getLogger("gba_hvd")
_ENDINGS = (".parquet", ".csv")


def score_file(
    model: OpenModel,
    source: Path,
    out: Path,
    *,
    keep: Sequence[str] = (),
    hashed: Sequence[str] = (),
    batch: int = 4096,
    on_samples: Callable[[int], object] = lambda n: None,
) -> int:
    """Write the scores, all or nothing. Returns the number of samples.

    keep: columns of the source that are copied, before the scores. hashed: columns of strings, or of lists of them,
    which are ids of hashed tables once they are hashed, as `ParquetStream(hashed=)` does. on_samples: called with how
    many more are done.
    Raises BadInput for files of another kind, and what `OpenModel.predict` refuses, with the line or row it is near.
    """
    for path in (source, out):
        if path.suffix not in _ENDINGS:
            raise BadInput(f"{path}: expected a name that ends in {' or '.join(_ENDINGS)}")
    if source.resolve() == out.resolve():
        raise BadInput(f"{out} is the file that is read: name another one")
    with extra("data", "pyarrow", "predictions of files need"):
        import pyarrow
    check_hashed(model, hashed)
    not_hashed = set(id_columns(model)) - set(hashed)
    fresh, n, writer = out.with_name(f".{out.name}.{os.getpid()}"), 0, None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for part in _parts(source, batch, hashed):
            if missing := [name for name in (*keep, *hashed) if name not in part.schema.names]:
                raise BadInput(f"{source} has no column {missing[0]!r}; it has {', '.join(part.schema.names)}")
            if not n and source.suffix == ".csv":
                _warn_of_numbers(part, hashed)
            columns = {
                name: hashes_of(one, name) if name in hashed else one.to_numpy(zero_copy_only=False)
                for name, one in zip(part.schema.names, part.columns, strict=True)
            }
            try:
                refuse_strings({field.name: field.type for field in part.schema if field.name in not_hashed})
                with of_hashed_tables(hashed):
                    scores = model.predict(columns, batch=batch)
            except BadInput as error:
                raise BadInput(f"{source}, samples {n} to {n + part.num_rows - 1}: {error}") from error
            table = pyarrow.table({**{name: part.column(name) for name in keep}, **_arrow(scores)})
            if writer is None:
                writer = _writer(fresh, out.suffix, table.schema)
            writer.write_table(table)
            n += part.num_rows
            on_samples(part.num_rows)
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


def n_samples(source: Path) -> int | None:
    """Of a Parquet file; None: not known before a CSV file is read."""
    if source.suffix != ".parquet":
        return None
    with extra("data", "pyarrow", "predictions of files need"):
        import pyarrow.parquet
    with pyarrow.parquet.ParquetFile(source) as file:
        return int(file.metadata.num_rows)


def _warn_of_numbers(part: Any, hashed: Sequence[str]) -> None:
    """A CSV file does not say whether ids are numbers or strings of digits."""
    import pyarrow.compute

    for name in hashed:
        column = part.column(name)
        if pyarrow.compute.all(pyarrow.compute.match_substring_regex(column, r"^-?\d+$")).as_py():
            log.warning(
                "column %r holds whole numbers (%s, ...), which are hashed as strings, since --hashed names it: right "
                "where they were strings in training. Where they were numbers, leave it out of --hashed",
                name, column[0],
            )  # fmt: skip


def _parts(source: Path, batch: int, strings: Sequence[str]) -> Iterator[Any]:
    """Record batches of at most `batch` samples. strings: columns of a CSV file that are no numbers."""
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    try:
        if source.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(source) as file:
                yield from file.iter_batches(batch)
            return
        as_text = pyarrow.csv.ConvertOptions(column_types={name: pyarrow.string() for name in strings})
        with pyarrow.csv.open_csv(source, convert_options=as_text) as lines:
            for block in lines:
                yield from (block.slice(at, batch) for at in range(0, block.num_rows, batch))
    except pyarrow.ArrowInvalid as error:
        raise BadInput(f"{source} cannot be read: {error}") from error


def _arrow(scores: dict[str, np.ndarray]) -> dict[str, Any]:
    import pyarrow

    return {name: pyarrow.array(values) for name, values in scores.items()}


def _writer(path: Path, ending: str, schema: Any) -> Any:
    import pyarrow.csv
    import pyarrow.parquet

    return pyarrow.csv.CSVWriter(path, schema) if ending == ".csv" else pyarrow.parquet.ParquetWriter(path, schema)
