"""From the arguments of `gba-hvd data prepare` and a look at the input to a recipe.

What the arguments leave open is guessed from the first lines and printed; what cannot be guessed is an error that names
the option which mends it.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from gba_hvd.data.presets import PRESETS
from gba_hvd.data.recipe import (
    PARTS,
    Categorical,
    Encoding,
    Hashed,
    Identity,
    Numeric,
    Recipe,
    Vocabulary,
    require_columns,
)
from gba_hvd.data.sniff import NAMES, Looks, have_commas, look, split, why_no_number
from gba_hvd.data.times import format_of
from gba_hvd.errors import BadInput

from ..terminal import print_line

By = Literal["random", "order"]
REST = "rest"
_NAMED = {"parquet": "Parquet", "jsonl": "JSON-lines"}
_DELIMITERS = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}
_WITHOUT_COMMAS = "write them with a point before the decimals and nothing between thousands, such as 1234.5"


def recipe_of(args: argparse.Namespace, inputs: Sequence[Path]) -> tuple[Recipe, By | None]:
    """The recipe, and how the preset cuts one input into splits (None: it has a file per split)."""
    return _of_preset(args) if args.preset is not None else (_by_hand(args, inputs), "random")


def _of_preset(args: argparse.Namespace) -> tuple[Recipe, By | None]:
    if args.preset not in PRESETS:
        near = get_close_matches(args.preset, PRESETS, n=1)
        meant = f"did you mean {near[0]}? There are" if near else "there are"
        raise BadInput(f"--preset {args.preset}: no such preset; {meant} {', '.join(PRESETS)}")
    by_hand = {"--categorical": args.categorical, "--numeric": args.numeric, "--multi": args.multi}
    by_hand |= {"--hash": args.hash, "--identity": args.identity, "--standardise": args.standardise}
    by_hand |= {"--transform": args.transform != "log", "--format": args.format, "--label": args.label}
    by_hand |= {"--rating": args.rating, "--table": args.table}
    by_hand |= {"--label-from": args.label_from is not None, "--timestamp": args.timestamp, "--columns": args.columns}
    by_hand |= {"--delimiter": args.delimiter, "--header": args.header is not None, "--ignore": args.ignore}
    if given := [flag for flag, value in by_hand.items() if value]:
        raise BadInput(f"--preset {args.preset} names the columns already: leave out {', '.join(given)}")
    preset = PRESETS[args.preset]
    return preset.recipe(_default_encoding(args, preset.encoding)), preset.split_by


@dataclass(frozen=True)
class _Columns:
    """names: all columns of the input; in_file: whether its first line, or Parquet, has them"""

    names: tuple[str, ...]
    in_file: bool


def _by_hand(args: argparse.Namespace, inputs: Sequence[Path]) -> Recipe:
    looks = look(inputs, args.format, _DELIMITERS.get(args.delimiter, args.delimiter))
    columns = _columns(args, looks)
    names, where = columns.names, str(looks.path)
    ratings = _named(args.rating, names)
    labels = list(dict.fromkeys([*_named(args.label, names), *ratings])) or ["label"]
    if not (args.label or args.rating) and "label" not in names:
        raise BadInput(
            f"{where}: no column 'label': name the one with 0 or 1, --label COLUMN; there is {_listed(names)}"
        )
    numeric = _named(args.numeric, names)
    encodings = _field_encodings(args)
    multi = {name: separator if given else None for name, given, separator in (m.partition("=") for m in args.multi)}
    times = {name: format for name, _, format in (text.partition("=") for text in args.timestamp)}
    ignored = _named(args.ignore, names)
    table_of = _shared_tables(args.table, names)
    of_fields = [name for name in encodings if name not in table_of.values()]
    require_columns([*labels, *numeric, *multi, *of_fields, *table_of, *times, *ignored], names, where)
    named = _named(args.categorical, names)
    taken = {*labels, *numeric, *times, *ignored}
    if REST in named and REST not in names:
        named = [name for name in named if name != REST] + [name for name in names if name not in taken]
    fields = list(dict.fromkeys([*named, *multi, *of_fields, *table_of]))
    if not fields and not times:
        left = _listed([name for name in names if name not in taken])
        raise BadInput(
            f"no --preset, and no columns for tables: name them with --categorical A,B,... or take all that have "
            f"no other role with --categorical rest (here: {left})"
        )
    require_columns(fields, names, where)
    if both := sorted(set(ignored) & {*labels, *fields, *numeric, *times}):
        raise BadInput(f"--ignore {', '.join(both)}: has another role as well; leave one out")
    if nested := [looks.nested[name] for name in (*labels, *fields, *numeric, *times) if name in looks.nested]:
        raise BadInput(f"{where}: {nested[0]}")
    _check_numbers(looks, names, numeric)
    default = _default_encoding(args, Vocabulary(min_count=1))
    categorical = tuple(
        Categorical(
            name, encodings.get(name, encodings.get(table_of.get(name, name), default)), multi.get(name),
            name in multi and multi[name] is None, table=table_of.get(name, ""),
        )
        for name in fields
    )  # fmt: skip
    recipe = Recipe(
        format=looks.format,
        label=labels[0] if len(labels) == 1 else tuple(labels),
        categorical=categorical + tuple(_of_times(looks, names, times)),
        numeric=tuple(Numeric(name, args.transform, args.standardise) for name in numeric),
        columns=None if columns.in_file else names,
        delimiter=looks.delimiter,
        label_from=args.label_from,
        ignored=tuple(ignored),
        ratings=tuple(ratings),
    )
    _print_findings(looks, columns, recipe.not_used(names))
    return recipe


def _columns(args: argparse.Namespace, looks: Looks) -> _Columns:
    given = tuple(_named(args.columns, ()))
    if looks.format in _NAMED:
        if given or args.header is not None or args.delimiter:
            raise BadInput(
                f"{looks.path}: a {_NAMED[looks.format]} file has its names: leave out --columns, --header, --delimiter"
            )
        return _Columns(looks.header or (), True)
    first = tuple(split(looks.first_line, looks.delimiter, looks.format == "csv"))
    if given:
        if args.header or (args.header is None and looks.header is not None and set(given) & set(first)):
            raise BadInput(f"{looks.path}: its first line names the columns ({_listed(first)}): leave out --columns")
        if len(given) != len(first):
            raise BadInput(
                f"{looks.path}, line 1: {len(first)} columns with {_shown(looks.delimiter)} between them "
                f"({looks.first_line[:80]}), --columns names {len(given)}; --delimiter says what stands between them"
            )
        return _Columns(given, False)
    if args.header or (args.header is None and looks.header is not None):
        return _Columns(first, True)
    reason = "--no-header is given" if args.header is False else "the first line looks like data, not like names"
    raise BadInput(
        f"{looks.path}: {reason} ({looks.first_line[:80]}): name its {len(first)} columns in order with "
        "--columns A,B,... (if the line does name them: --header)"
    )


def _named(texts: Iterable[str], names: Sequence[str]) -> list[str]:
    """Names between commas, as in CSV: a name with a comma stands in quotes, or is given alone."""
    found: list[str] = []
    for text in texts:
        found += [text] if text in names else next(csv.reader([text], skipinitialspace=True), [])
    return [name for name in (one if one in names else one.strip() for one in found) if name]


def _shared_tables(texts: Iterable[str], names: Sequence[str]) -> dict[str, str]:
    """The table of each field that shares one."""
    found: dict[str, str] = {}
    for text in texts:
        table, _, fields = text.partition("=")
        for name in _named([fields], names):
            if found.setdefault(name, table) != table:
                raise BadInput(f"--table: {name} is in {found[name]} and in {table}; a field has one table")
        if not table or not fields:
            raise BadInput(f"--table {text}: expected TABLE=FIELD,FIELD,... as in item=history,candidate")
    return found


def _check_numbers(looks: Looks, names: Sequence[str], numeric: Sequence[str]) -> None:
    for name in numeric:
        sample = looks.sample_of(names, name)
        if why := why_no_number(sample):
            lists = f"(lists of ids: --multi '{name}=,')"
            how = f"{_WITHOUT_COMMAS} {lists}" if have_commas(sample) else f"make it --categorical {name}"
            raise BadInput(f"--numeric {name}: {why}; {how} (file {looks.path})")


def _of_times(looks: Looks, names: Sequence[str], times: dict[str, str]) -> Iterable[Categorical]:
    for name, given in times.items():
        sample = looks.sample_of(names, name)
        format = given or format_of(sample[:1000])
        if not format:
            raise BadInput(
                f"--timestamp {name}: values such as {', '.join(sample[:3]) or 'none'} are no times in a known way "
                f"(Unix seconds or milliseconds, 2014-10-21 13:00, 14102113): say how, as in "
                f"--timestamp {name}=%d/%m/%Y"
            )
        for part in PARTS:
            yield Categorical.of_time(name, part, format)


def _print_findings(looks: Looks, columns: _Columns, not_used: Sequence[str]) -> None:
    """What was guessed, and what is left out, before anything is read."""
    if looks.format == "jsonl":
        print_line(f"{looks.path}: JSON, an object a line", file=sys.stderr)
    elif looks.format != "parquet":
        what = "a header" if columns.in_file else "no header"
        if looks.format == "csv" and looks.delimiter == "\t":
            what += ", quotes around values (--format tsv: quotes are text)"
        print_line(f"{looks.path}: {_shown(looks.delimiter)} between columns, {what}", file=sys.stderr)
    for name in not_used:
        if name in looks.nested:
            print_line(f"not used: {looks.nested[name]}", file=sys.stderr)
    if not_used := [name for name in not_used if name not in looks.nested]:
        one = _listed(not_used, 1) if len(not_used) == 1 else "COLUMN"
        print_line(
            f"not used: {_listed(not_used)}; --numeric {one} or --categorical {one} takes it in, "
            f"--ignore {one} says that it is left out on purpose",
            file=sys.stderr,
        )


def _shown(delimiter: str) -> str:
    return NAMES.get(delimiter, repr(delimiter))


def _listed(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(f'"{name}"' if "," in name else name for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def _default_encoding(args: argparse.Namespace, default: Encoding) -> Encoding:
    if args.hash_rows is not None and args.min_count is not None:
        raise BadInput("--hash-rows and --min-count: choose one, a hash has no vocabulary")
    if args.hash_rows is not None:
        return Hashed(args.hash_rows)
    return default if args.min_count is None else Vocabulary(args.min_count)


def _field_encodings(args: argparse.Namespace) -> dict[str, Encoding]:
    encodings: dict[str, Encoding] = {}
    try:
        for text in args.hash:
            name, rows = text.rsplit("=", 1)
            encodings[name] = Hashed(int(rows))
        for text in args.identity:
            name, size = text.rsplit("=", 1)
            rows, _, offset = size.partition(":")
            encodings[name] = Identity(int(rows), int(offset or 0))
    except ValueError as error:
        raise BadInput(f"{text}: expected FIELD=ROWS, for --identity also FIELD=ROWS:OFFSET ({error})") from error
    return encodings
