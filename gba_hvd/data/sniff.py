"""What a file looks like, from its first lines: kind, delimiter, header, and samples of its columns.

Guesses are for the command line, which says them; `prepare` itself takes everything from its recipe.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from gba_hvd.data import json_lines
from gba_hvd.data.doubtful_values import TextsReadAs
from gba_hvd.data.nested_json import nested_columns
from gba_hvd.data.raw_rows import open_parquet
from gba_hvd.data.recipe import Format
from gba_hvd.data.sources import BOM, find_files, read_blocks
from gba_hvd.errors import BadInput

DELIMITERS = ("\t", "::", ",", ";", "|")
NAMES = {"\t": "tab", "::": "'::'", ",": "comma", ";": "';'", "|": "'|'", " ": "space"}
_LINES = 10_000
_PROBE_BYTES = 4096
_LEAST_AGREEING = 5  # tenths of the lines that a delimiter cuts into the same number of columns
_WITH_COMMA = re.compile(
    r"[+-]?((\d*|\d{1,3}([. \u00a0\u202f]\d{3})+),\d+(e[+-]?\d+)?|\d{1,3}(,\d{3})+(\.\d+)?)", re.IGNORECASE
)
_HEX = re.compile(r"(0x)?[0-9a-fA-F]{8,}")


@dataclass(frozen=True)
class Looks:
    """A file as it looks.

    header:  names of the columns; None when the first line seems to be data
    samples: by column, in order: values as text, missing ones left out
    nested:  by column of JSON objects, which no option takes: where the first one is, and what to do
    """

    path: Path
    format: Format
    delimiter: str
    header: tuple[str, ...] | None
    first_line: str
    samples: tuple[tuple[str, ...], ...]
    nested: Mapping[str, str] = field(default_factory=dict)

    def sample_of(self, names: Sequence[str], column: str) -> tuple[str, ...]:
        return self.samples[list(names).index(column)] if column in names and len(names) == len(self.samples) else ()


def look(inputs: Sequence[Path], format: Format | None = None, delimiter: str | None = None) -> Looks:
    """Look at the first file of an input that has rows. `format` and `delimiter`, where given, are not guessed."""
    first = None
    for path in (files := _files(inputs, format)):
        looks = _look_at(path, format, delimiter)
        if looks is not None and any(looks.samples):
            return looks
        first = first or looks
    if first is None:
        raise BadInput(f"{files[0]}: no rows in this file; give files with rows")
    return first


def _look_at(path: Path, format: Format | None, delimiter: str | None) -> Looks | None:
    """None: there is nothing in it."""
    with path.open("rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    if is_parquet != (format == "parquet") and (format is not None or is_parquet):
        if format is not None:
            found = "a Parquet file" if is_parquet else "no Parquet file"
            raise BadInput(f"{path}: this is {found}, but --format is {format}; leave --format out")
        format = "parquet"
    if format == "parquet":
        return _look_at_parquet(path)
    block = next(read_blocks(path), None)
    if block is None:
        return None
    if b"\0" in block.data[:_PROBE_BYTES]:
        raise BadInput(f"{path}: neither text nor Parquet (it has zero bytes); name the files of the table")
    data = block.data.removeprefix(BOM)
    if format == "jsonl" or (format is None and not delimiter and data.lstrip().startswith((b"{", b"["))):
        return _look_at_json(path, data)
    return _look_at_text(path, data, format, delimiter)


def _files(inputs: Sequence[Path], format: Format | None) -> list[Path]:
    if format is not None:
        return find_files(inputs, format).read
    kinds: tuple[Format, ...] = ("parquet", "csv", "jsonl")
    for kind in kinds:
        with suppress(BadInput):
            return find_files(inputs, kind).read
    return find_files(inputs, *kinds).read  # raises


def _look_at_parquet(path: Path) -> Looks:
    file = open_parquet(path)
    names = tuple(file.schema_arrow.names)
    try:
        batch = next(file.iter_batches(_LINES, use_threads=False), None)
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path}: not a whole Parquet file (cut or damaged?): {error}") from error
    columns = [] if batch is None else [batch.column(name) for name in names]
    samples = tuple(
        tuple(str(value) for value in column.to_pylist() if value is not None and not isinstance(value, list))
        for column in columns
    )
    return Looks(path, "parquet", "", names, "", samples or ((),) * len(names))


def _look_at_json(path: Path, data: bytes) -> Looks:
    first = data.partition(b"\n")[0]
    rows, flaws = json_lines.objects(data)
    names = json_lines.names_in(rows)
    if 0 in flaws or not names:
        raise BadInput(
            f"{path}: JSON, but not an object with names and values on each line ({_start(first)}); "
            "`jq -c .` makes it so (of one large array: `jq -c '.[]'`)"
        )
    columns = json_lines.columns_of(rows, dict.fromkeys(names, False), flaws)
    lists = {name for name, column in columns.items() if pa.types.is_list(column.type)}
    samples = [[] if name in lists else columns[name].drop_null().to_pylist() for name in names]
    texts = tuple(tuple(filter(None, sample)) for sample in samples)
    return Looks(path, "jsonl", "", names, _start(first), texts, nested_columns(rows))


def _start(line: bytes) -> str:
    return line[:80].decode("utf-8", errors="replace").strip()


def _look_at_text(path: Path, data: bytes, format: Format | None, delimiter: str | None) -> Looks:
    text = data.decode("utf-8", errors="replace")
    lines = [line.rstrip("\r") for line in text.split("\n")[:-1][:_LINES]]
    delimiter = delimiter or ("\t" if format == "tsv" else None) or _delimiter(lines[:100])
    if delimiter is None:
        raise BadInput(
            f"{path}: no table: its lines ({lines[0][:80]}) have no tab, '::', comma, ';' or '|' that makes as many "
            "columns of most of them; --delimiter says what stands between columns, or name the files of the table"
        )
    quoted = format != "tsv" and any('"' in line for line in lines)
    # Quotes have a meaning where a value begins with one; text between tabs seldom means them.
    kind: Format = format or ("csv" if delimiter != "\t" or quoted else "tsv")
    rows = [split(line, delimiter, kind == "csv") for line in lines]
    header = tuple(rows[0]) if _is_header(rows) else None
    body = rows[1:] if header else rows
    width = len(rows[0])
    samples = tuple(tuple(row[i] for row in body if len(row) == width and row[i]) for i in range(width))
    return Looks(path, kind, delimiter, header, lines[0], samples)


def split(line: str, delimiter: str, quoted: bool) -> list[str]:
    if not quoted or len(delimiter) > 1 or '"' not in line:
        return line.split(delimiter)
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return line.split(delimiter)


def _delimiter(lines: Sequence[str]) -> str | None:
    """The one that cuts most lines into the same number of columns; of equals the one that makes more columns.

    None when there is none that so cuts half of the lines.
    """
    best, score = None, (_LEAST_AGREEING, 1)
    for delimiter in DELIMITERS:
        widths = [len(split(line, delimiter, True)) for line in lines if line]
        common = max(set(widths), key=widths.count, default=1)
        agreeing = 10 * widths.count(common) // max(1, len(widths))  # in tenths: a few bad lines say nothing
        if common > 1 and (agreeing, common) > score:
            best, score = delimiter, (agreeing, common)
    return best


def _is_header(rows: Sequence[Sequence[str]]) -> bool:
    """Names are distinct, and none is empty, a number, or an id in hexadecimal."""
    first = [name.strip() for name in rows[0]]
    return all(first) and len(set(first)) == len(first) and not any(is_number(name) or _is_id(name) for name in first)


def _is_id(text: str) -> bool:
    return bool(_HEX.fullmatch(text)) and any(c.isdigit() for c in text)


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def why_no_number(sample: Sequence[str]) -> str | None:
    """Why a column is no numeric one, from a sample of it; None when it may be one.

    Ids in hexadecimal are no numbers although some can be read as one (1e5 is 100000, 123456 is itself).
    """
    others = [value for value in sample if not is_number(value)]
    if not sample or len(others) * 100 <= len(sample):
        return None
    numbers = [value for value in sample if is_number(value)]
    shown = ", ".join(dict.fromkeys(others[:3]))
    what, ids = "text", sum(bool(_HEX.fullmatch(value)) for value in sample)
    if have_commas(sample):
        what, shown = "numbers with commas", " and ".join(dict.fromkeys(_texts(sample)[:3]))
    elif ids * 10 >= len(sample) * 9:
        what = "ids in hexadecimal"
    finding = f"its values look like {what} ({shown})"
    if numbers:
        finding += f"; {len(numbers):,} of {len(sample):,} can be read as numbers, such as {numbers[0]}"
    return finding


def have_commas(sample: Sequence[str]) -> bool:
    """Whether the values of a column that are no numbers are some with commas: 59,12, 1.234,5 or 1 234,5, 1,234 or
    1,234.5; what stands for a missing value is neither."""
    others = _texts(sample)
    return sum(bool(_WITH_COMMA.fullmatch(value)) for value in others) * 10 >= len(others) * 9 > 0


def _texts(sample: Sequence[str]) -> list[str]:
    """The values that are no numbers and stand for no missing one."""
    others = [value.strip() for value in sample if not is_number(value)]
    missing = {"", *TextsReadAs.of("NaN", pa.array(others, pa.string())).texts.to_pylist()}
    return [value for value in others if value not in missing]
