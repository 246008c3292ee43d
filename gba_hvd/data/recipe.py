"""What the input looks like and what becomes of each column. Plain values: nothing here opens a file.

A `Recipe` names the columns and their roles; `SplitFiles` and `SplitShares` say which rows are train, valid and test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from gba_hvd.errors import BadInput

Format = Literal["tsv", "csv", "parquet", "jsonl"]  # csv: a value may stand in double quotes
Part = Literal["hour", "weekday"]
PARTS: dict[Part, int] = {"hour": 24, "weekday": 7}
MAX_ROWS = 2**31 - 1  # ids are stored as int32


@dataclass(frozen=True)
class Vocabulary:
    """Ids from 1 in order of falling frequency in train. Id 0: missing, rarer than `min_count`, or not in train."""

    min_count: int = 1

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise ValueError(f"min_count is {self.min_count}, expected at least 1")


@dataclass(frozen=True)
class Hashed:
    """A table of `rows` rows; values share rows 1 .. rows-1 by a stable hash. Id 0: missing."""

    rows: int

    def __post_init__(self) -> None:
        if not 2 <= self.rows <= MAX_ROWS:
            raise ValueError(f"a hashed field has {self.rows} rows, expected 2 to {MAX_ROWS}")


@dataclass(frozen=True)
class Identity:
    """The values are integers already: id = value - offset, in 0 .. rows-1. Any other value makes a malformed row."""

    rows: int
    offset: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_ROWS:
            raise ValueError(f"an identity field has {self.rows} rows, expected 1 to {MAX_ROWS}")


Encoding = Vocabulary | Hashed | Identity


@dataclass(frozen=True)
class Categorical:
    """A column that becomes ids of one table. With `separator` or `is_list` it is multi-valued, a `Bag`.

    table: its name, default that of the column. Columns of one table share the vocabulary, so they have one encoding.
    With `part` it is a part of a time: see `of_time`.
    """

    name: str
    encoding: Encoding = Vocabulary()
    separator: str | None = None  # in text; a list in a Parquet or JSON-lines file needs `is_list` instead
    is_list: bool = False
    part: Part | None = None
    time_column: str = ""  # with part: the column it is read from
    time_format: str = ""  # with part: unix, unix_ms, iso, or a pattern of strptime
    table: str = ""

    def __post_init__(self) -> None:
        if self.part is not None and self.encoding != Identity(PARTS[self.part]):
            raise ValueError(f"{self.name}: the {self.part} has {PARTS[self.part]} values, which are ids already")
        if self.separator == "" or (self.is_list and self.separator is not None):
            raise ValueError(
                f"{self.name}: separator is {self.separator!r}, expected one in text, none for a list column"
            )

    @classmethod
    def of_time(cls, column: str, part: Part, format: str) -> Categorical:
        """`COLUMN_hour`, 0 to 23, or `COLUMN_weekday`, 0 (Monday) to 6."""
        return cls(f"{column}_{part}", Identity(PARTS[part]), part=part, time_column=column, time_format=format)

    @property
    def column(self) -> str:
        """The column of the input that it is read from."""
        return self.time_column or self.name

    @property
    def of_table(self) -> str:
        """The name of its table."""
        return self.table or self.name

    @property
    def multi_valued(self) -> bool:
        """Whether a row may have several values: a list, or text with a separator."""
        return self.is_list or self.separator is not None


@dataclass(frozen=True)
class Numeric:
    """A column that becomes one float32 of `dense`, where a missing value is 0.

    `log` is log(1 + max(x, 0)), as usual for Criteo. `standardise` then subtracts the mean and divides by the standard
    deviation, both of the values of the train split that are there: a missing value becomes the mean.
    """

    name: str
    transform: Literal["log", "none"] = "log"
    standardise: bool = False


@dataclass(frozen=True)
class Recipe:
    """Columns of the input and their roles.

    label:      a column, or several
    ratings:    labels that are any numbers, kept as float32; the others are 0 or 1
    columns:    names of the columns of a text file without header; None: the first line has them, or the format does
    delimiter:  between columns of text; default: a tab in tsv, a comma in csv
    ignored:    columns that are left out on purpose; others without a role are reported as not used
    label_from: labels are 1 where their column is at least this number, else 0; None: they are 0 or 1 already
    """

    format: Format
    label: str | tuple[str, ...]
    categorical: tuple[Categorical, ...]
    numeric: tuple[Numeric, ...] = ()
    columns: tuple[str, ...] | None = None
    delimiter: str = ""
    label_from: float | None = None
    ignored: tuple[str, ...] = ()
    ratings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.labels:
            raise ValueError("no label: name a column with 0 or 1, or with ratings")
        if unknown := [name for name in self.ratings if name not in self.labels]:
            raise ValueError(f"rating {', '.join(unknown)} is no label; the labels are {', '.join(self.labels)}")
        if self.label_from is not None and set(self.ratings) == set(self.labels):
            raise ValueError("label_from makes 0 and 1 of numbers, but all labels are ratings, kept as they are")
        for table, fields_of in self.tables.items():
            if len({(field.encoding, field.part) for field in fields_of}) > 1:
                names = ", ".join(field.name for field in fields_of)
                raise ValueError(f"table {table!r}: its columns {names} need one encoding, to share a vocabulary")
        if not self.is_text and (self.columns is not None or self.delimiter):
            raise ValueError(f"columns and delimiter are for text: a {self.format} file has its own names")
        if self.delimiter in ("\n", "\r", '"'):
            raise ValueError(f"delimiter is {self.delimiter!r}, which ends lines or quotes values")
        fields = [c.name for c in self.categorical]
        if len(set(fields)) < len(fields):
            raise ValueError(
                f"two fields have one name: {', '.join(sorted({n for n in fields if fields.count(n) > 1}))}"
            )
        if not self.categorical:
            raise ValueError("no categorical column: there would be no embedding table")
        twice = sorted({name for name in self.used if self.used.count(name) > 1})
        if twice:
            raise ValueError(f"column {', '.join(twice)} has more than one role")
        if self.columns is not None:
            require_columns(self.used, self.columns, "the recipe")

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,) if isinstance(self.label, str) else self.label

    @property
    def is_plain_label(self) -> bool:
        """Whether there is one label, 0 or 1."""
        return len(self.labels) == 1 and not self.ratings

    @property
    def tables(self) -> dict[str, list[Categorical]]:
        """The columns of each table."""
        found: dict[str, list[Categorical]] = {}
        for field in self.categorical:
            found.setdefault(field.of_table, []).append(field)
        return found

    @property
    def used(self) -> tuple[str, ...]:
        """The columns that are read, labels first. A time is there once, for any number of parts."""
        times = dict.fromkeys(c.time_column for c in self.categorical if c.part is not None)
        plain = (c.name for c in self.categorical if c.part is None)
        return (*self.labels, *(n.name for n in self.numeric), *plain, *times)

    def not_used(self, present: Iterable[str]) -> list[str]:
        """Columns of an input that have no role and are not ignored either."""
        return [name for name in present if name not in self.used and name not in self.ignored]

    @property
    def is_text(self) -> bool:
        """Whether the input is lines of columns with something between them."""
        return self.format in ("tsv", "csv")

    @property
    def between(self) -> str:
        """What stands between two columns of text."""
        return self.delimiter or ("\t" if self.format == "tsv" else ",")

    def to_json(self) -> dict[str, Any]:
        """The recipe as plain JSON values, as the manifest of a prepared dataset has it."""
        fields = [asdict(c) | {"encoding": encoding_to_json(c.encoding)} for c in self.categorical]
        numeric = [asdict(n) for n in self.numeric]
        text: dict[str, Any] = {"delimiter": self.between} if self.is_text else {}
        text |= {"label_from": self.label_from} if self.label_from is not None else {}
        text |= {"ignored": list(self.ignored)} if self.ignored else {}
        text |= {"ratings": list(self.ratings)} if self.ratings else {}
        label = self.label if isinstance(self.label, str) else list(self.label)
        return {"format": self.format, "label": label, "categorical": fields, "numeric": numeric, **text}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe of such values; the names of columns without a header are not among them.

        Raises KeyError, TypeError or ValueError where they are no recipe.
        """
        label = values["label"]
        return cls(
            values["format"],
            label if isinstance(label, str) else tuple(label),
            tuple(Categorical(**one | {"encoding": _encoding_of(one["encoding"])}) for one in values["categorical"]),
            tuple(Numeric(**one) for one in values["numeric"]),
            delimiter=values.get("delimiter", ""),
            label_from=values.get("label_from"),
            ignored=tuple(values.get("ignored", ())),
            ratings=tuple(values.get("ratings", ())),
        )


def _encoding_of(values: Mapping[str, Any]) -> Encoding:
    kinds: dict[str, type[Encoding]] = {one.__name__.lower(): one for one in (Vocabulary, Hashed, Identity)}
    return kinds[values["kind"]](**{name: value for name, value in values.items() if name != "kind"})


def encoding_to_json(encoding: Encoding) -> dict[str, Any]:
    return {"kind": type(encoding).__name__.lower(), **asdict(encoding)}


@dataclass(frozen=True)
class SplitFiles:
    """Each split from files or folders of its own: `SplitFiles({"train": [Path("day_0")], "test": [Path("day_1")]})`.

    files: by split, in the order in which they are read; `prepare` raises BadInput for one that is not there.
    """

    files: Mapping[str, Sequence[Path]]

    def to_json(self) -> dict[str, Any]:
        return {name: [str(path) for path in paths] for name, paths in self.files.items()}


@dataclass(frozen=True)
class SplitShares:
    """All splits from the same files: in the order of the rows, or by a hash of (seed, position of the row)."""

    files: Sequence[Path]
    shares: Mapping[str, float]
    by: Literal["random", "order"] = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        shares = self.shares.values()
        if not shares or not all(share > 0 for share in shares) or abs(sum(shares) - 1) > 1e-6:
            raise ValueError(f"shares of the splits are {dict(self.shares)}, expected positive numbers that sum to 1")

    def to_json(self) -> dict[str, Any]:
        return {"files": [str(p) for p in self.files], "shares": dict(self.shares), "by": self.by, "seed": self.seed}


def require_columns(wanted: Iterable[str], present: Sequence[str], where: str) -> None:
    """Raise `BadInput` with the nearest names when a column is missing or there twice."""
    for name in wanted:
        if name not in present:
            near = [one[:40] for one in get_close_matches(name, present, n=3) or list(present)[:8]]
            raise BadInput(f"{where}: no column {name!r}; nearest: {', '.join(near)} ({len(present)} columns in all)")
        if list(present).count(name) > 1:
            raise BadInput(f"{where}: column {name!r} is there {list(present).count(name)} times, rename one")
