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

Format = Literal["tsv", "csv", "parquet"]
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
    """A column that becomes ids of one table. With `separator` or `is_list` it is multi-valued, a `Bag`."""

    name: str
    encoding: Encoding = Vocabulary()
    separator: str | None = None  # in text; a list column of a Parquet file needs `is_list` instead
    is_list: bool = False

    def __post_init__(self) -> None:
        if self.separator == "" or (self.is_list and self.separator is not None):
            raise ValueError(
                f"{self.name}: separator is {self.separator!r}, expected one in text, none for a list column"
            )

    @property
    def multi_valued(self) -> bool:
        return self.is_list or self.separator is not None


@dataclass(frozen=True)
class Numeric:
    """A column that becomes one float32 of `dense`. Missing values are 0 before the transform.

    `log` is log(1 + max(x, 0)), as usual for Criteo. `standardise` then subtracts the mean and divides by the
    standard deviation of the train split.
    """

    name: str
    transform: Literal["log", "none"] = "log"
    standardise: bool = False


@dataclass(frozen=True)
class Recipe:
    """Columns of the input and their roles. `columns` names those of a file without header (tsv), else None."""

    format: Format
    label: str
    categorical: tuple[Categorical, ...]
    numeric: tuple[Numeric, ...] = ()
    columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if (self.columns is None) == (self.format == "tsv"):
            raise ValueError(f"columns: a tsv file has no header and needs them, {self.format} has its own names")
        if not self.categorical:
            raise ValueError("no categorical column: there would be no embedding table")
        twice = sorted({name for name in self.used if self.used.count(name) > 1})
        if twice:
            raise ValueError(f"column {', '.join(twice)} has more than one role")
        if self.columns is not None:
            require_columns(self.used, self.columns, "the recipe")

    @property
    def used(self) -> tuple[str, ...]:
        """The columns that are read, label first."""
        return (self.label, *(n.name for n in self.numeric), *(c.name for c in self.categorical))

    def to_json(self) -> dict[str, Any]:
        fields = [asdict(c) | {"encoding": encoding_to_json(c.encoding)} for c in self.categorical]
        numeric = [asdict(n) for n in self.numeric]
        return {"format": self.format, "label": self.label, "categorical": fields, "numeric": numeric}


def encoding_to_json(encoding: Encoding) -> dict[str, Any]:
    return {"kind": type(encoding).__name__.lower(), **asdict(encoding)}


@dataclass(frozen=True)
class SplitFiles:
    """Each split from its own files or folders."""

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
            near = get_close_matches(name, present, n=3) or list(present)[:8]
            raise BadInput(f"{where}: no column {name!r}; nearest: {', '.join(near)} ({len(present)} columns in all)")
        if list(present).count(name) > 1:
            raise BadInput(f"{where}: column {name!r} is there {list(present).count(name)} times, rename one")
