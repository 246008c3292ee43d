"""Scores of the samples in a Parquet or CSV file, written to another one. Read and written in parts of some samples."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gba_hvd.errors import BadInput
from gba_hvd.extras import extra
from gba_hvd.serving import inputs
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
    of_ids = _id_columns(model)
    if model.manifest.input is not None and (unknown := [name for name in hashed if name not in of_ids]):
        raise BadInput(f"hashed column {unknown[0]!r} is no field of ids of the model: these are {', '.join(of_ids)}")
    fresh, n, writer = out.with_name(f".{out.name}.{os.getpid()}"), 0, None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for part in _parts(source, batch, hashed):
            if missing := [name for name in (*keep, *hashed) if name not in part.schema.names]:
                raise BadInput(f"{source} has no column {missing[0]!r}; it has {', '.join(part.schema.names)}")
            if not n and source.suffix == ".csv":
                _warn_of_numbers(part, hashed)
            columns = {
                name: _hashes(part, name) if name in hashed else part.column(name).to_numpy(zero_copy_only=False)
                for name in part.schema.names
            }
            try:
                _refuse_strings(part, [name for name in of_ids if name not in hashed])
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


def _id_columns(model: OpenModel) -> list[str]:
    """Columns that may be fields of whole numbers. None are known where a model was saved without an example."""
    spec = model.manifest.input
    found = () if spec is None else inputs.fields(spec)
    return [name for field in found if field["dtype"].startswith("int") for name in inputs.columns_for(field)]


def _hashes(part: Any, name: str) -> np.ndarray | list[np.ndarray]:
    """int64 [n], or [n] arrays of them, of strings or lists of strings."""
    import pyarrow

    from gba_hvd.data.parquet_columns import ids_of

    column = part.column(name)
    if not _holds_strings(column.type):
        raise BadInput(f"hashed column {name!r} holds {column.type}, not strings: whole numbers are ids as they are")
    found = ids_of(pyarrow.chunked_array([column]), f"column {name!r}")
    if not isinstance(found, tuple):
        return found
    values, starts = found
    return [values[first:last] for first, last in pairwise(starts)]


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


def _refuse_strings(part: Any, names: Sequence[str]) -> None:
    """Raises BadInput for fields whose column holds strings."""
    for name in names:
        if name in part.schema.names and _holds_strings(kind := part.column(name).type):
            raise BadInput(
                f"field {name!r}: expected numbers, got {kind}. Where they are ids of a hashed table, and were hashed "
                f"for the training (ParquetStream(hashed=), hash_strings), say so: --hashed {name}"
            )


def _holds_strings(kind: Any) -> bool:
    from gba_hvd.data.hashing import is_text
    from gba_hvd.data.parquet_columns import is_list

    return is_text(kind.value_type if is_list(kind) else kind)


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
