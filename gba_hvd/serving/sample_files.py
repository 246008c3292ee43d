"""Samples in Parquet, CSV and JSON-lines files, read in parts of some samples.

What a column has to hold is decided by the model; here a file must be whole, and a line of JSON an object.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gba_hvd.errors import BadInput
from gba_hvd.extras import extra

if TYPE_CHECKING:
    from gba_hvd.data.row_encoder import RowEncoder

PACKED = (".gz", ".zst")
_JSON_LINES = (".jsonl", ".ndjson")
_KINDS = (".parquet", ".csv", ".tsv", *_JSON_LINES)
_SHOWN = 5  # bad lines in an error


@dataclass(frozen=True)
class Samples:
    """Consecutive samples of a file.

    columns: by name n values: an array of pyarrow, or of JSON lines a list of what JSON has; numbers of raw rows are
    `NumberText` there. first: number of the first sample, from 0, or of its line, from 1, as `unit` says
    """

    n: int
    columns: Mapping[str, Any]
    unit: str
    first: int

    def where(self, at: int) -> str:
        return f"{self.unit} {self.first + at}"

    @property
    def range(self) -> str:
        return f"{self.unit}s {self.first} to {self.first + self.n - 1}"

    def parsed(self, name: str) -> Any:
        """A column, of JSON lines with numbers."""
        from gba_hvd.data.json_lines import with_numbers

        values = self.columns[name]
        return with_numbers(values) if isinstance(values, list) else values


def kind_of(path: Path) -> str:
    """ ".parquet", ".csv" or ".jsonl", by the name. Raises BadInput for another one."""
    ending = path.suffix
    if ending in PACKED:
        ending = path.with_suffix("").suffix
        if ending == ".parquet":
            raise BadInput(f"{path}: Parquet files are compressed inside: unpack it")
    if ending not in _KINDS:
        raise BadInput(
            f"{path}: expected a name that ends in .parquet, .csv, .tsv or .jsonl (all but the first also .gz, .zst)"
        )
    return ".jsonl" if ending in _JSON_LINES else ending


def n_samples(path: Path) -> int | None:
    """Of a Parquet file; None: not known before the file is read."""
    if path.suffix != ".parquet":
        return None
    with extra("data", "pyarrow", "predictions of files need"):
        import pyarrow.parquet
    with pyarrow.parquet.ParquetFile(path) as file:
        return int(file.metadata.num_rows)


def read_samples(
    path: Path,
    batch: int,
    *,
    texts: Collection[str],
    plain: Collection[str],
    encoder: RowEncoder | None = None,
) -> Iterator[Samples]:
    """Parts of at most `batch` samples.

    texts: columns of a CSV file that are no numbers. plain: columns of JSON lines that must not hold objects.
    encoder: of the raw rows that the file has: numbers of JSON lines are wanted as the text that the file has, and its
    input says how a text file is written.
    Raises BadInput for a file that is damaged, or has a column twice, a line that is no JSON object, and such a column
    of objects.
    """
    if kind_of(path) == ".jsonl":
        yield from _json_lines(path, batch, plain, is_raw=encoder is not None)
        return
    first = 0
    for part in _arrow_batches(path, batch, texts, encoder):
        columns = _by_name(part, str(path))
        yield Samples(part.num_rows, columns, "sample", first)
        first += part.num_rows


def _arrow_batches(path: Path, batch: int, texts: Collection[str], encoder: RowEncoder | None) -> Iterator[Any]:
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    try:
        if kind_of(path) == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                yield from file.iter_batches(batch)
            return
        as_text = pyarrow.csv.ConvertOptions(column_types={name: pyarrow.string() for name in texts})
        parsing = _parsing(kind_of(path), encoder)
        with (
            pyarrow.input_stream(str(path), compression="detect") as data,
            pyarrow.csv.open_csv(data, parse_options=parsing, convert_options=as_text) as lines,
        ):
            for block in lines:
                yield from (block.slice(at, batch) for at in range(0, block.num_rows, batch))
    except pyarrow.ArrowInvalid as error:
        raise BadInput(f"{path} cannot be read: {error}") from error


def _parsing(ending: str, encoder: RowEncoder | None) -> Any:
    """Options of pyarrow. Raises BadInput for a delimiter that it does not take."""
    import pyarrow.csv

    default = ("\t", False) if ending == ".tsv" else (",", True)
    delimiter, is_quoted = default if encoder is None else encoder.text_format(ending)
    if len(delimiter) > 1:
        raise BadInput(
            f"the input that the model was trained on has {delimiter!r} between columns, and here a delimiter is one "
            "character: give the samples as Parquet or JSON lines"
        )
    return pyarrow.csv.ParseOptions(delimiter=delimiter, quote_char='"' if is_quoted else False)


def raw_csv(data: bytes, encoder: RowEncoder) -> dict[str, list[Any]]:
    """The `columns` and `data` (rows) of CSV with raw values, which are as written.

    Columns that the encoder does not need have None. Raises BadInput.
    """
    import pyarrow
    import pyarrow.csv

    wanted = encoder.raw_columns
    as_text = pyarrow.csv.ConvertOptions(column_types={name: pyarrow.string() for name in wanted})
    try:
        table = pyarrow.csv.read_csv(
            pyarrow.BufferReader(data), parse_options=_parsing(".csv", encoder), convert_options=as_text
        )
    except pyarrow.ArrowInvalid as error:
        raise BadInput(f"the request cannot be read as CSV: {error}") from error
    found = _by_name(table, "the request")
    values = [one.to_pylist() if name in wanted else [None] * len(one) for name, one in found.items()]
    return {"columns": [*found], "data": [list(row) for row in zip(*values, strict=True)]}


def _by_name(part: Any, where: str) -> dict[str, Any]:
    names = part.schema.names
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise BadInput(f"{where}: column {twice[0]!r} is there {names.count(twice[0])} times: rename one")
    return dict(zip(names, part.columns, strict=True))


def _json_lines(path: Path, batch: int, plain: Collection[str], *, is_raw: bool) -> Iterator[Samples]:
    from gba_hvd.data import json_lines
    from gba_hvd.data.nested_json import nested_columns
    from gba_hvd.data.sources import BOM, find_files, read_blocks

    find_files([path], "jsonl")  # (it is there, and not empty)
    names: dict[str, None] = {}
    for block in read_blocks(path):
        data = block.data.removeprefix(BOM)
        rows, flaws = json_lines.objects(data, number=json_lines.NumberText if is_raw else None)
        if flaws:
            raise BadInput(_flawed(path, block.first_line, flaws))
        names |= dict.fromkeys(json_lines.names_in(rows))
        nested = nested_columns(rows, first_line=block.first_line, may_ignore=False)
        if found := [why for name, why in nested.items() if name in plain]:
            raise BadInput(f"{path}: {found[0]}")
        for at in range(0, len(rows), batch):
            some = rows[at : at + batch]
            columns = {name: [row.get(name) for row in some] for name in names}
            yield Samples(len(some), columns, "line", block.first_line + at)


def _flawed(path: Path, first_line: int, flaws: Mapping[int, str]) -> str:
    lines = [f"line {first_line + i}: {flaws[i]}" for i in sorted(flaws)]
    if len(lines) == 1:
        return f"{path}, {lines[0]}"
    shown = "".join(f"\n  {line}" for line in lines[:_SHOWN])
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return f"{path}: {len(lines)} lines cannot be read, and each line is a sample that needs a score:{shown}{more}"
