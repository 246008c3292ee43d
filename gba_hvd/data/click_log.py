"""A click log that hands out any of its rows as a micro-batch: mapped from a prepared dataset, or wholly in memory.

Which rows, and in which order, is decided by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gba_hvd.batch import Bag, Batch
from gba_hvd.data.store import DatasetLayout, DatasetPart, open_part, part_path, read_manifest
from gba_hvd.data.vocabulary_files import VocabularyDigests
from gba_hvd.errors import BadInput

Rows = npt.NDArray[np.int64]
_NAMED = 3  # files, at most


def check_range(rows: Rows, n_samples: int) -> None:
    """Raise `IndexError` unless all rows are in 0 .. n_samples-1."""
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= n_samples):
        outside = rows[(rows < 0) | (rows >= n_samples)]
        raise IndexError(f"row {outside[0]} is outside the click log, which has rows 0 to {n_samples - 1}")


class ClickLog:
    """One split. The pages of a mapped log are shared by all processes of a host, and read when touched.

    tables:      rows of each table, in the order of their first fields
    features:    the table of each field; `Batch.ids` has one entry for each
    n_dense:     width of `Batch.dense`
    dense_names: of its columns, as `save_model(dense_names=)` takes them
    description: JSON values that say what this is
    vocabulary_digests: of what ids stand for (`reading.trained_vocabularies`); None of a log in memory
    dense_scaling: of each numeric column, how values become numbers (`reading.trained_scaling`); None of one in memory

    `open` raises BadInput for a dataset that is missing, cut or damaged; `take` raises IndexError for rows out of
    range.
    """

    def __init__(
        self,
        tables: Mapping[str, int],
        layout: DatasetLayout,
        parts: Sequence[DatasetPart],
        description: Mapping[str, Any],
        features: Mapping[str, str] | None = None,
    ) -> None:
        self.tables = dict(tables)
        self.features = dict(features or {name: name for name in tables})
        self.n_dense, self.dense_names = len(layout.dense), layout.dense
        self.description = dict(description)
        self._layout, self._parts = layout, tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        self.vocabulary_digests: VocabularyDigests | None = None
        self.dense_scaling: dict[str, tuple[str, float, float]] | None = None
        self._opened: tuple[str, str] | None = None
        self._files = ["a click log in memory"] * len(parts)

    @classmethod
    def open(cls, path: str | Path, split: str = "train") -> ClickLog:
        """Map one split of what `gba-hvd data prepare` wrote. Raises `BadInput` when it is missing, cut or damaged."""
        folder = Path(path)
        manifest = read_manifest(folder)
        try:
            splits, fields = manifest["splits"], manifest["fields"]
            if split not in splits:
                near = get_close_matches(split, splits, n=1) or list(splits)
                raise BadInput(f"{folder}: no split {split!r}; there is {', '.join(near)}")
            layout = DatasetLayout(
                tuple(f["name"] for f in fields if not f["multi_valued"]),
                tuple(f["name"] for f in fields if f["multi_valued"]),
                tuple(column["name"] for column in manifest["numeric"]),
                tuple(manifest.get("labels", ())),
            )
            parts = [
                open_part(part_path(folder, p["file"]), p["rows"], p["bytes"], layout) for p in splits[split]["parts"]
            ]
            features = {f["name"]: f.get("table", f["name"]) for f in fields}  # a version before had no tables
            tables = {features[f["name"]]: int(f["rows"]) for f in fields}
            digests = VocabularyDigests.of_store(folder, manifest)
            scaling = {x["name"]: (x["transform"], x["mean"], x["std"]) for x in manifest["numeric"]}
        except (KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{folder}: its dataset.json lacks {error}; prepare the dataset again") from error
        about = {"kind": "click log", "path": str(folder), "split": split, "samples": splits[split]["rows"]}
        about |= {key: splits[split][key] for key in ("positives", "label_means") if key in splits[split]}
        about |= {"tables": tables, "n_dense": len(layout.dense)}
        about |= {key: manifest[key] for key in ("created", "recipe", "input") if key in manifest}
        log = cls(tables, layout, parts, about, features)
        log.vocabulary_digests, log.dense_scaling = digests, scaling
        log._opened, log._files = (str(folder), split), [str(folder / p["file"]) for p in splits[split]["parts"]]
        return log

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __reduce__(self) -> Any:
        # A mapped log travels to another process as its path.
        if self._opened is not None:
            return ClickLog.open, self._opened
        return ClickLog, (self.tables, self._layout, self._parts, self.description, self.features)

    def take(self, rows: Rows) -> Batch:
        """The samples at `rows`, int64 [n] in any order. Raises `IndexError` for a row outside the log."""
        rows = np.asarray(rows, dtype=np.int64)
        check_range(rows, len(self))
        groups = self._by_part(rows)
        if len(groups) == 1:
            part, _, inside = groups[0]
            label, ids, dense = part.label[inside], part.ids.take(inside, axis=0), part.dense.take(inside, axis=0)
        else:
            n = len(rows)
            label = np.empty((n, *self._parts[0].label.shape[1:]), dtype=self._parts[0].label.dtype)
            ids = np.empty((n, len(self._layout.single)), dtype=np.int32)
            dense = np.empty((n, self.n_dense), dtype=np.float32)
            for part, at, inside in groups:
                label[at], ids[at], dense[at] = part.label[inside], part.ids[inside], part.dense[inside]
        columns: dict[str, Tensor | Bag] = {name: self._bag(i, groups) for i, name in enumerate(self._layout.multi)}
        # One [F, n] tensor, so that each column is contiguous.
        by_field = torch.from_numpy(ids.T.astype(np.int64, order="C"))
        columns |= dict(zip(self._layout.single, by_field.unbind(0), strict=True))
        by_feature = {name: columns[name] for name in self.features}
        if len(self._layout.labels) == 1:
            label = label[:, 0]
        return Batch(by_feature, torch.from_numpy(dense), torch.from_numpy(label.astype(np.float32)))

    def files_of(self, rows: Rows) -> str:
        """Names of files that have some of these samples."""
        found = [self._files[part] for part in np.unique(np.searchsorted(self._ends, rows, side="right"))]
        more = len(found) - _NAMED
        return ", ".join(dict.fromkeys(found[:_NAMED])) + (f" and {more} more files" if more > 0 else "")

    def _by_part(self, rows: Rows) -> list[tuple[DatasetPart, Rows, Rows]]:
        """For each part that holds some of `rows`: (part, where in `rows`, row inside the part)."""
        if len(self._parts) == 1 or not len(rows):
            return [(self._parts[0], np.arange(len(rows)), rows)]
        part_of = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(part_of, kind="stable")
        present, first = np.unique(part_of[order], return_index=True)
        groups = []
        for index, at in zip(present, np.split(order, first[1:]), strict=True):
            part = self._parts[index]
            groups.append((part, at, rows[at] - (self._ends[index] - len(part))))
        return groups

    def _bag(self, field: int, groups: list[tuple[DatasetPart, Rows, Rows]]) -> Bag:
        lengths = np.empty(sum(len(at) for _, at, _ in groups), dtype=np.int64)
        for part, at, inside in groups:
            starts = part.bags[field][0]
            lengths[at] = starts[inside + 1] - starts[inside]
        ends = np.cumsum(lengths)
        offsets = ends - lengths
        values = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
        for part, at, inside in groups:
            starts, stored = part.bags[field]
            n = lengths[at]
            within = np.arange(int(n.sum())) - np.repeat(np.cumsum(n) - n, n)
            values[np.repeat(offsets[at], n) + within] = stored[np.repeat(starts[inside], n) + within]
        return Bag(torch.from_numpy(values), torch.from_numpy(offsets))
