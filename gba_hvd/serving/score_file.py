"""Scores of the samples in a Parquet or CSV file, written to another one. Read and written in parts of some samples."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gba_hvd.errors import BadInput
from gba_hvd.extras import extra
from gba_hvd.serving.load import OpenModel

_ENDINGS = (".parquet", ".csv")


def score_file(
    model: OpenModel,
    source: Path,
    out: Path,
    *,
    keep: Sequence[str] = (),
    batch: int = 4096,
    on_samples: Callable[[int], object] = lambda n: None,
) -> int:
    """Write the scores, all or nothing. Returns the number of samples.

    keep: columns of the source that are copied, before the scores. on_samples: called with how many more are done.
    Raises BadInput for files of another kind, and what `OpenModel.predict` refuses, with the line or row it is near.
    """
    for path in (source, out):
        if path.suffix not in _ENDINGS:
            raise BadInput(f"{path}: expected a name that ends in {' or '.join(_ENDINGS)}")
    if source.resolve() == out.resolve():
        raise BadInput(f"{out} is the file that is read: name another one")
    with extra("data", "pyarrow", "predictions of files need"):
        import pyarrow
    fresh, n, writer = out.with_name(f".{out.name}.{os.getpid()}"), 0, None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for part in _parts(source, batch):
            if missing := [name for name in keep if name not in part.schema.names]:
                raise BadInput(f"{source} has no column {missing[0]!r}; it has {', '.join(part.schema.names)}")
            columns = {name: part.column(name).to_numpy(zero_copy_only=False) for name in part.schema.names}
            try:
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


def _parts(source: Path, batch: int) -> Iterator[Any]:
    """Record batches of at most `batch` samples."""
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    try:
        if source.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(source) as file:
                yield from file.iter_batches(batch)
            return
        with pyarrow.csv.open_csv(source) as lines:
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
