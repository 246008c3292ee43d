"""Which rows are train, valid and test, and how often the input is read: every pass goes through `Input`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gba_hvd.data.bad_rows import BadRows
from gba_hvd.data.checked_rows import CheckedRows, check_rows
from gba_hvd.data.hashing import hash_integers, stream_key, unit_interval
from gba_hvd.data.raw_rows import columns_of, count_rows, read_rows
from gba_hvd.data.recipe import Recipe, SplitFiles, SplitShares, require_columns
from gba_hvd.data.sources import find_files, refuse_same_file_twice
from gba_hvd.errors import BadInput

TRAIN = "train"

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class PrepareProgress:
    """How far `prepare` is. Bytes are of the input files on disk."""

    phase: str  # "counting", "fitting", "writing"
    done_bytes: int
    total_bytes: int
    rows: int
    bad_rows: int


class Input:
    """The rows of all splits in input order; can be read several times."""

    def __init__(
        self,
        recipe: Recipe,
        source: SplitFiles | SplitShares,
        max_bad_rows: float,
        on_progress: Callable[[PrepareProgress], None],
        block_bytes: int,
    ) -> None:
        self._recipe, self._source, self._max_bad_rows = recipe, source, max_bad_rows
        self._on_progress, self._block_bytes = on_progress, block_bytes
        if isinstance(source, SplitFiles):
            self.splits = list(source.files)
            found = {split: find_files(paths, recipe.format) for split, paths in source.files.items()}
            self._shares: SplitShares | None = None
        else:
            self.splits = list(source.shares)
            found = {"": find_files(source.files, recipe.format)}
            self._shares = source
        for one in found.values():
            one.refuse_others(recipe.format)
        self._files = {split: one.read for split, one in found.items()}
        self.files_not_read = [path for one in found.values() for path in one.notes]
        self._without_rows = {path for one in found.values() for path in one.empty}
        if TRAIN not in self.splits:
            raise BadInput(f"splits are {', '.join(self.splits)}: one must be called train, everything is fitted on it")
        files = [path for paths in self._files.values() for path in paths]
        refuse_same_file_twice(files)
        present = list(dict.fromkeys(name for path in files for name in columns_of(path, recipe)))
        if recipe.format == "jsonl":  # a line may lack a name; that no line has it is known of all files together
            require_columns(recipe.used, present, f"{files[0]}, first lines")
        self.not_used = recipe.not_used(present)
        self._total_rows = 0
        if self._shares is not None and self._shares.by == "order":
            self._total_rows = self._count()

    def _count(self) -> int:
        files, rows, done = self._files[""], 0, 0
        for path in files:
            rows += count_rows(path, self._recipe)
            done += path.stat().st_size
            self._on_progress(PrepareProgress("counting", done, _size(files), rows, 0))
        return rows

    def read(self, phase: str, only: str | None, bad: BadRows) -> Iterator[tuple[CheckedRows, dict[str, Mask]]]:
        """Rows, and for each split that has some of them, which. `only` leaves out files of other splits.

        Raises `BadInput` when too many rows were malformed, at the end too.
        """
        groups = {s: f for s, f in self._files.items() if only is None or s in ("", only)}
        total = sum(_size(files) for files in groups.values())
        before = 0
        for split, files in groups.items():
            finished, current = 0, 0
            with_rows: set[int] = set()
            for index, raw in read_rows(files, self._recipe, bad, self._block_bytes):
                if index != current:
                    finished, current = _size(files[:index]), index
                if raw.n_read:
                    with_rows.add(index)
                rows = check_rows(raw, self._recipe, bad)
                yield rows, self._cut(rows) if self._shares is not None else {split: np.ones(len(rows), dtype=bool)}
                done = before + finished + raw.read_bytes
                self._on_progress(PrepareProgress(phase, done, total, bad.rows_read, bad.count))
            if not with_rows:
                among = f", nor in the {len(files) - 1:,} others of this input" if len(files) > 1 else ""
                raise BadInput(f"{files[0]}: no rows in this file{among}; give files with rows, or leave them out")
            self._without_rows |= {path for index, path in enumerate(files) if index not in with_rows}
            before += _size(files)
        bad.check(at_end=True)

    @property
    def files_without_rows(self) -> list[Path]:
        """Those that are passed over, once all is read."""
        return sorted(self._without_rows)

    def _cut(self, rows: CheckedRows) -> dict[str, Mask]:
        assert self._shares is not None
        split_of = assign(rows.positions, self._shares, self._total_rows)
        masks = {split: split_of == i for i, split in enumerate(self._shares.shares)}
        return {split: mask for split, mask in masks.items() if mask.any()}

    def tally(self) -> BadRows:
        return BadRows(self._max_bad_rows)


def assign(positions: npt.NDArray[np.int64], shares: SplitShares, total_rows: int) -> npt.NDArray[np.int64]:
    """Which split each row belongs to, as an index into `shares`. Contents of rows do not matter."""
    if shares.by == "order":
        place = (positions + 0.5) / total_rows
    else:
        place = unit_interval(hash_integers(positions, stream_key(shares.seed, 1)))
    edges = np.cumsum(list(shares.shares.values()))
    edges[-1] = 1.0  # sums of shares are rounded
    return np.searchsorted(edges, place, side="right")


def _size(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)
