"""Rows as the input has them: strings (or Parquet's own types) by column, each with its place in the input.

Here a row must have the right number of columns and be UTF-8 text; what its values must be is checked in
`checked_rows`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from gba_hvd.data import json_lines
from gba_hvd.data.bad_rows import BadRows
from gba_hvd.data.list_columns import one_array
from gba_hvd.data.recipe import Recipe, require_columns
from gba_hvd.data.sources import BLOCK_BYTES, BOM, Block, read_blocks
from gba_hvd.errors import BadInput

_PARQUET_ROWS = 32_768
_MOST_QUOTED_BYTES = 1 << 20  # of the lines in which the end of a value over several lines is looked for
_ONE_FOR_MANY = b"\x1f"  # the separator of units, which text does not have
_QUOTED = rb'(?:[^"]++|"")*+'  # what stands between two quotes
_LONE_QUOTE = re.compile(_QUOTED + rb'"')
_NOT_SUPPORTED = "(values with line ends are not supported)"


@dataclass(frozen=True)
class RawRows:
    """Some consecutive rows of one file.

    numbers:    int64 [n]  line (text) or row (Parquet) in the file, from 1
    positions:  int64 [n]  place among all rows of the split's input, malformed ones included: splits go by it
    columns:    by name, an Arrow array [n] for each column the recipe uses
    n_read:     rows read to get these n, malformed ones included
    read_bytes: how far into the file on disk
    """

    file: str
    unit: str
    numbers: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    columns: dict[str, pa.Array]
    n_read: int
    read_bytes: int

    def where(self, row: int) -> str:
        return f"{self.unit} {self.numbers[row]}"

    def without(self, flaws: Mapping[int, str], bad: BadRows) -> RawRows:
        """The rows that have no flaw; the others are reported to `bad`, each with its flaw."""
        for row in sorted(flaws):
            bad.report(self.file, self.where(row), flaws[row])
        mask = np.ones(len(self.numbers), dtype=bool)
        mask[list(flaws)] = False
        arrow_mask = pa.array(mask)
        columns = {name: column.filter(arrow_mask) for name, column in self.columns.items()}
        return RawRows(
            self.file, self.unit, self.numbers[mask], self.positions[mask], columns, self.n_read, self.read_bytes
        )


def read_rows(
    files: Sequence[Path], recipe: Recipe, bad: BadRows, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[int, RawRows]]:
    """(index of the file, rows), one block at a time. Malformed rows go to `bad`, which may stop it."""
    position = 0
    for index, path in enumerate(files):
        if recipe.format == "parquet":
            read = _read_parquet(path, recipe, bad)
        else:
            read = (_read_text if recipe.is_text else _read_json)(path, recipe, bad, block_bytes)
        start = position
        for raw in read:
            bad.rows_read += raw.n_read
            bad.check()
            position += raw.n_read
            # The readers count positions within the file.
            raw.positions[:] += start
            yield index, raw


def count_rows(path: Path, recipe: Recipe) -> int:
    """Rows of a file, malformed ones included, without parsing them."""
    if recipe.format == "parquet":
        return int(open_parquet(path).metadata.num_rows)
    lines = sum(block.n_lines for block in read_blocks(path))
    return max(0, lines - (recipe.is_text and recipe.columns is None))


def columns_of(path: Path, recipe: Recipe) -> tuple[str, ...]:
    """The columns of a file, used or not; of JSON lines those of the first lines."""
    if recipe.format == "parquet":
        return tuple(open_parquet(path).schema_arrow.names)
    if recipe.columns is not None:
        return recipe.columns
    first = next(read_blocks(path), None)
    if first is None:
        return ()
    data = first.data.removeprefix(BOM)
    if recipe.is_text:
        return _header(path, data.partition(b"\n")[0], recipe)
    return json_lines.names_in(json_lines.objects(data)[0])


def _read_text(path: Path, recipe: Recipe, bad: BadRows, block_bytes: int) -> Iterator[RawRows]:
    columns = recipe.columns
    n_before = 0
    delimiter = recipe.between.encode() if recipe.format == "csv" else None
    for block, flaws in _with_flaws_of_quotes(read_blocks(path, block_bytes), delimiter):
        data, first_line, n_lines = block.data, block.first_line, block.n_lines
        if first_line == 1:
            data = data.removeprefix(BOM)
            if columns is None:
                header, _, data = data.partition(b"\n")
                columns = _header(path, header, recipe)
                require_columns(recipe.used, columns, f"{path}, line 1")
                first_line, n_lines = 2, n_lines - 1
        assert columns is not None
        if data:
            sound, kept = _sound_lines(path, data, first_line, n_lines, flaws, bad)
            last = n_lines - 1 if block.ends_in_line else None
            kept, arrays = _parse(path, sound, kept, first_line, last, columns, recipe, bad)
            rows = RawRows(str(path), "line", kept + first_line, kept, arrays, n_lines, block.read_bytes)
            rows.positions[:] += n_before
            n_before += rows.n_read
            yield rows


def _read_json(path: Path, recipe: Recipe, bad: BadRows, block_bytes: int) -> Iterator[RawRows]:
    lists = {c.name for c in recipe.categorical if c.is_list}
    for block in read_blocks(path, block_bytes):
        columns, flaws = json_lines.parse(block.data.removeprefix(BOM), {name: name in lists for name in recipe.used})
        numbers = np.arange(block.first_line, block.first_line + block.n_lines, dtype=np.int64)
        rows = RawRows(str(path), "line", numbers, numbers - 1, columns, block.n_lines, block.read_bytes)
        yield rows.without(flaws, bad) if flaws else rows


def _header(path: Path, line: bytes, recipe: Recipe) -> tuple[str, ...]:
    try:
        text, quoted = line.decode("utf-8").rstrip("\r"), recipe.format == "csv" and len(recipe.between) == 1
        return tuple(next(csv.reader([text], delimiter=recipe.between)) if quoted else text.split(recipe.between))
    except (UnicodeDecodeError, csv.Error, StopIteration) as error:
        raise BadInput(f"{path}, line 1: expected a header with the names of the columns: {error}") from error


def _with_flaws_of_quotes(blocks: Iterable[Block], delimiter: bytes | None) -> Iterator[tuple[Block, dict[int, str]]]:
    """Blocks, and what `_flaws_of_quotes` finds in them, by the number of the line. delimiter: None without quotes.

    Lines that the lines after them decide about are in one block with these.
    """
    held: Block | None = None
    flaws: dict[int, str] = {}
    for after in blocks:
        block = after if held is None else held.joined(after)
        held = None
        flaws, opened = {}, None
        if delimiter is not None and b'"' in block.data:
            data = block.data.removeprefix(BOM) if block.first_line == 1 else block.data
            flaws, opened = _flaws_of_quotes(data.split(b"\n")[:-1], block.first_line, delimiter)
        if opened is not None:
            block, held = block.cut(opened)
        if block.n_lines:
            yield block, flaws
    if held is not None:
        yield held, flaws


def _flaws_of_quotes(lines: Sequence[bytes], first_line: int, delimiter: bytes) -> tuple[dict[int, str], int | None]:
    """By number, the lines that a quoted value leaves open, goes through and ends in; and the line whose open value
    may end in lines to come.

    The next line with a quote decides: where that stands at the end of a value, it closes the open one, and all lines
    between are a part of it. Else, or where none comes within `_MOST_QUOTED_BYTES`, only the line left open has a flaw.
    """
    sound, closing = _patterns_of_quotes(delimiter)
    flaws: dict[int, str] = {}
    opened, n_bytes = None, 0
    for number, line in enumerate(lines, first_line):
        if opened is not None:
            n_bytes += len(line) + 1
            is_near = n_bytes <= _MOST_QUOTED_BYTES
            if is_near and not (b'"' in line and _LONE_QUOTE.match(line)):
                continue
            end = closing.match(line) if is_near else None
            if end is not None:
                part = f"a part of a quoted value that line {opened} leaves open {_NOT_SUPPORTED}"
                flaws |= {inside: flaws.get(inside, part) for inside in range(opened, number + 1)}
                opened = None if sound.fullmatch(line, end.end()) else opened
                continue
            opened = None
        if b'"' in line and not sound.fullmatch(line):
            flaws[number] = f"a quote is not closed in this line {_NOT_SUPPORTED}"
            opened, n_bytes = number, 0
    return flaws, opened


@cache
def _patterns_of_quotes(delimiter: bytes) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """A line whose values are all closed; and a line's part up to the quote that ends a value of lines before, which
    stands before a delimiter or the line's end. Only a value's first character opens it, other quotes are text."""
    between = re.escape(delimiter)
    text = rb"[^%b]*+" % between if len(delimiter) == 1 else rb"(?:(?!%b).)*+" % between
    value = rb'(?:"%b"%b|(?!")%b)' % (_QUOTED, text, text)
    return (
        re.compile(rb"%b(?:%b%b)*+" % (value, between, value), re.DOTALL),
        re.compile(rb'%b"(?=%b|\r?\Z)' % (_QUOTED, between)),
    )


def _sound_lines(
    path: Path, data: bytes, first_line: int, n_lines: int, flaws: Mapping[int, str], bad: BadRows
) -> tuple[bytes, npt.NDArray[np.int64]]:
    """The lines that are proper text, and which of the n_lines they are. flaws: of some, by number."""
    if not flaws and _plainly_sound(data):
        return data, np.arange(n_lines, dtype=np.int64)
    sound: list[bytes] = []
    kept: list[int] = []
    for i, line in enumerate(data.split(b"\n")[:-1]):
        if flaw := _flaw(line) or flaws.get(first_line + i):
            bad.report(str(path), f"line {first_line + i}", flaw)
        else:
            sound.append(line + b"\n")
            kept.append(i)
    return b"".join(sound), np.array(kept, dtype=np.int64)


def _parse(
    path: Path,
    data: bytes,
    lines: npt.NDArray[np.int64],
    first_line: int,
    cut_line: int | None,
    columns: Sequence[str],
    recipe: Recipe,
    bad: BadRows,
) -> tuple[npt.NDArray[np.int64], dict[str, pa.Array]]:
    """The lines that have the right number of columns, and their columns as strings."""
    quoted, delimiter = recipe.format == "csv", recipe.between
    if not data:
        return lines, {name: pa.array([], pa.string()) for name in recipe.used}
    if len(delimiter) > 1:  # pyarrow takes one character
        if _ONE_FOR_MANY in data:
            raise BadInput(f"{path}: has the character 0x1f, which stands for the delimiter {delimiter!r} meanwhile")
        data, delimiter = data.replace(delimiter.encode(), _ONE_FOR_MANY), _ONE_FOR_MANY.decode()
    skipped: list[int] = []

    def skip(row: Any) -> str:
        line = int(lines[row.number - 1])
        skipped.append(row.number - 1)
        reason = f"{row.actual_columns} columns, expected {row.expected_columns}"
        if line == cut_line:
            reason += "; the file ends in the middle of this row"
        bad.report(str(path), f"line {first_line + line}", reason)
        return "skip"

    table = pa.csv.read_csv(
        pa.BufferReader(data),
        # One thread: only then pyarrow numbers the rows it refuses. One block, so that numbers and lines agree.
        read_options=pa.csv.ReadOptions(column_names=list(columns), use_threads=False, block_size=len(data) + 1),
        parse_options=pa.csv.ParseOptions(
            delimiter=delimiter,
            quote_char='"' if quoted else False,
            double_quote=quoted,
            ignore_empty_lines=False,
            invalid_row_handler=skip,
        ),
        convert_options=pa.csv.ConvertOptions(
            column_types={name: pa.string() for name in columns}, include_columns=list(recipe.used), check_utf8=False
        ),
    )
    lines = np.delete(lines, skipped)
    if len(lines) != table.num_rows:
        at = f"{path}, from line {first_line} on"
        raise BadInput(f"{at}: {table.num_rows} rows parsed from {len(lines)} lines; write values without quotes here")
    return lines, {name: one_array(table[name]) for name in recipe.used}


def _plainly_sound(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\r" not in data or data.count(b"\r") == data.count(b"\r\n")


def _flaw(line: bytes) -> str | None:
    if flaw := _not_utf8(line):
        return flaw
    if b"\r" in line.removesuffix(b"\r"):
        return "a carriage return inside the line"
    return None


def _not_utf8(text: bytes) -> str | None:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"not UTF-8: byte 0x{text[error.start]:02x} at column {error.start + 1}"
    return None


def open_parquet(path: Path) -> Any:
    try:
        return pa.parquet.ParquetFile(path, memory_map=False)
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path}: not a whole Parquet file (cut or damaged?): {error}") from error


def _read_parquet(path: Path, recipe: Recipe, bad: BadRows) -> Iterator[RawRows]:
    file = open_parquet(path)
    require_columns(recipe.used, file.schema_arrow.names, str(path))
    size, n_rows, n_before = path.stat().st_size, file.metadata.num_rows, 0
    try:
        for batch in file.iter_batches(_PARQUET_ROWS, columns=list(recipe.used), use_threads=False):
            positions = np.arange(n_before, n_before + len(batch), dtype=np.int64)
            n_before += len(batch)
            columns = {name: batch.column(name) for name in recipe.used}
            read_bytes = size * n_before // max(n_rows, 1)
            rows = RawRows(str(path), "row", positions + 1, positions, columns, len(batch), read_bytes)
            yield _without_broken_text(rows, bad)
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path}, after row {n_before}: damaged: {error}") from error


def _without_broken_text(rows: RawRows, bad: BadRows) -> RawRows:
    """Leave out rows whose text is not UTF-8: a Parquet file need not keep what its types promise."""
    flaws: dict[int, str] = {}
    for name, column in rows.columns.items():
        if column.type not in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
            continue
        text = column.cast(pa.large_binary())
        try:
            text.cast(pa.large_string())
        except pa.ArrowInvalid:
            for row, value in enumerate(text.to_pylist()):
                if value is not None and (flaw := _not_utf8(value)):
                    flaws.setdefault(row, f"{name}: {flaw}")
    return rows.without(flaws, bad) if flaws else rows
