"""Inputs to a prepared dataset, in two streaming passes: fit on the train split, then encode and write every split.

The result appears under its name in one rename, when it is complete; until then it is a hidden folder beside it, which
the next `prepare` of the same name clears away.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gba_hvd.data.bad_rows import DEFAULT_LIMIT
from gba_hvd.data.encoding import Encoder, Encoders, Scaler, ScalerFit, VocabularyEncoder, VocabularyFit, encoder_of
from gba_hvd.data.recipe import Recipe, SplitFiles, SplitShares, Vocabulary, encoding_to_json
from gba_hvd.data.row_encoder import RowEncoder
from gba_hvd.data.sources import BLOCK_BYTES
from gba_hvd.data.splits import TRAIN, Input, PrepareProgress
from gba_hvd.data.store import MANIFEST, ROWS_PER_PART, DatasetLayout, EncodedRows, SplitWriter, write_manifest
from gba_hvd.data.vocabulary_files import vocabulary_digest, vocabulary_path
from gba_hvd.errors import BadInput
from recovery.storage.local_store import sync
from recovery.storage.rename import exchange

_IN_DATASET = re.compile(r"dataset\.json|vocabulary/[^/]+\.arrow|[^/]+/part-\d{5,}\.arrow")
_N_NAMED = 5


def fit(recipe: Recipe, source: Input) -> Encoders:
    """Learn vocabularies, means and deviations from the train split; no pass at all when nothing is to be learnt."""
    bad = source.tally()
    encoders, vocabularies = dict[str, Encoder](), dict[str, VocabularyFit]()
    for table, (field, *_) in recipe.tables.items():
        if isinstance(field.encoding, Vocabulary):
            vocabularies[table] = VocabularyFit(table, field.encoding)
        else:
            encoders[table] = encoder_of(field.encoding)
    scalers = {x.name: ScalerFit(x) for x in recipe.numeric if x.standardise}
    if vocabularies or scalers:
        for every, masks in source.read("fitting", TRAIN, bad):
            if TRAIN not in masks:
                continue
            rows = every if masks[TRAIN].all() else every.keep(masks[TRAIN])
            for table, vocabulary in vocabularies.items():
                for field in recipe.tables[table]:
                    vocabulary.add(rows.categorical[field.name])
            for name, scaler in scalers.items():
                scaler.add(rows.numeric[name])
    distinct = {}
    for table, vocabulary in vocabularies.items():
        encoders[table], distinct[table] = vocabulary.finish()
    numeric = {x.name: scalers[x.name].finish() if x.standardise else Scaler(x) for x in recipe.numeric}
    return Encoders(encoders, numeric, distinct)


@dataclass
class _SplitTally:
    """labels: float64, the sum of each label."""

    rows: int
    labels: npt.NDArray[np.float64]

    def to_json(self, recipe: Recipe) -> dict[str, Any]:
        if recipe.is_plain_label:
            return {"rows": self.rows, "positives": int(self.labels[0])}
        means = (self.labels / max(1, self.rows)).tolist()
        return {"rows": self.rows, "label_means": dict(zip(recipe.labels, means, strict=True))}


def prepare(
    recipe: Recipe,
    source: SplitFiles | SplitShares,
    out: str | Path,
    *,
    overwrite: bool = False,
    like: str | Path | None = None,
    max_bad_rows: float = DEFAULT_LIMIT,
    on_progress: Callable[[PrepareProgress], None] = lambda progress: None,
    rows_per_part: int = ROWS_PER_PART,
    block_bytes: int = BLOCK_BYTES,
) -> dict[str, Any]:
    """Write a dataset that `ClickLog.open(out, split)` reads; returns its manifest.

    `max_bad_rows` below 1 is a share of the rows, from 1 up a number of rows. like: another dataset, whose
    vocabularies, means and deviations are taken in place of those of this train split: ids mean the same in both.

    Raises BadInput for input that the recipe does not fit, for a `like` of other columns, for more bad rows than
    allowed, and for an `out` that is in use; MissingPackage without pyarrow. Then `out` is as it was. Where that shows
    when the dataset is complete, it is kept beside `out`, and the error has its name.
    """
    out = Path(out).absolute()
    _check_free(out, overwrite)
    layout = DatasetLayout.of(recipe)
    with _hidden_folder(out, overwrite) as folder:
        rows_of = Input(recipe, source, max_bad_rows, on_progress, block_bytes)
        encoders = fit(recipe, rows_of) if like is None else RowEncoder.open(like).encoders_for(recipe)
        bad = rows_of.tally()
        tallies = {split: _SplitTally(0, np.zeros(len(recipe.labels))) for split in rows_of.splits}
        id_0 = {c.name: dict.fromkeys(rows_of.splits, 0) for c in recipe.categorical}
        n_values = {c.name: dict.fromkeys(rows_of.splits, 0) for c in recipe.categorical}
        missing = {c.name: dict.fromkeys(rows_of.splits, 0) for c in recipe.categorical}
        missing_numbers = {x.name: dict.fromkeys(rows_of.splits, 0) for x in recipe.numeric}
        with ExitStack() as stack:
            writers = {split: SplitWriter(folder, split, layout, rows_per_part) for split in rows_of.splits}
            for writer in writers.values():
                stack.callback(writer.close)
            for rows, masks in rows_of.read("writing", None, bad):
                every = encoders.encode(rows, recipe)
                without = {name: values.missing() for name, values in rows.categorical.items()}
                without_number = {name: np.isnan(values) for name, values in rows.numeric.items()}
                for split, mask in masks.items():
                    encoded = every if mask.all() else every.keep(mask)
                    writers[split].append(encoded)
                    tallies[split].rows += len(encoded.label)
                    tallies[split].labels += encoded.label.sum(axis=0, dtype=np.float64)
                    for name, ids in _by_field(encoded, layout):
                        id_0[name][split] += int(np.count_nonzero(ids == 0))
                        n_values[name][split] += len(ids)
                    for tally_of, gone in ((missing, without), (missing_numbers, without_number)):
                        for name, is_missing in gone.items():
                            tally_of[name][split] += int(np.count_nonzero(is_missing & mask))
            parts = {split: writer.finish() for split, writer in writers.items()}
        for split, tally in tallies.items():
            if not tally.rows:
                raise BadInput(f"split {split!r} got no rows; give it a larger share or other files")
        vocabularies = {name: one for name, one in encoders.tables.items() if isinstance(one, VocabularyEncoder)}
        digests = {name: vocabulary_digest(one.values) for name, one in vocabularies.items()}
        manifest = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "recipe": recipe.to_json(),
            "input": {
                "splits": source.to_json(),
                "bad_rows": bad.to_json(),
                "not_used": rows_of.not_used,
                "files_without_rows": [str(path) for path in rows_of.files_without_rows],
                "files_not_read": [str(path) for path in rows_of.files_not_read],
            },
            "fields": [
                {
                    "name": c.name,
                    "table": c.of_table,
                    "multi_valued": c.multi_valued,
                    "rows": encoders.tables[c.of_table].rows,
                    "encoding": encoding_to_json(c.encoding),
                    **({"vocabulary": digests[c.of_table]} if c.of_table in digests else {}),
                    "distinct_in_train": encoders.distinct.get(c.of_table),
                    "values": n_values[c.name],
                    "id_0": id_0[c.name],
                    "missing": missing[c.name],  # rows without a value: id 0, or in a multi-valued field no id
                }
                for c in recipe.categorical
            ],
            "numeric": [
                {
                    "name": x.name,
                    "transform": x.transform,
                    **encoders.numeric[x.name].to_json(),
                    "missing": missing_numbers[x.name],
                }
                for x in recipe.numeric
            ],
            "labels": list(layout.labels),  # stored as float32; none: one label, 0 or 1
            "splits": {split: {**tally.to_json(recipe), "parts": parts[split]} for split, tally in tallies.items()},
        }
        _write_vocabularies(folder, encoders)
        # The manifest makes the folder a dataset, so it is written last; the exchange of the folders then shows it.
        for inside in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
            sync(inside)
        write_manifest(folder, manifest)
        sync(folder)
        try:
            _check_free(out, overwrite)  # again: files may have come since
            _put_in_place(folder, out)
        except (BadInput, OSError) as error:
            beside = _put_beside(folder, out)
            raise BadInput(f"{error}. The new dataset is complete, in {beside}: use it there, or move it") from error
        sync(out.parent)
    return manifest


def _by_field(encoded: EncodedRows, layout: DatasetLayout) -> Iterator[tuple[str, npt.NDArray[np.int32]]]:
    for i, name in enumerate(layout.single):
        yield name, encoded.ids[:, i]
    for i, name in enumerate(layout.multi):
        yield name, encoded.bags[i][1]


def _write_vocabularies(folder: Path, encoders: Encoders) -> None:
    """`vocabulary/TABLE.arrow`: row i is the value with id i + 1, and how often the train split had it, where that was
    counted."""
    (folder / "vocabulary").mkdir()
    for name, encoder in encoders.tables.items():
        if isinstance(encoder, VocabularyEncoder):
            counts = {} if encoder.counts is None else {"count": encoder.counts}
            table = pa.table({"value": encoder.values, **counts})
            path = vocabulary_path(folder, name)
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
            sync(path)


def _check_free(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MANIFEST).is_file():
        raise BadInput(f"{out}: exists and is no prepared dataset, so it is left alone; choose another --out")
    if not overwrite:
        raise BadInput(f"{out}: there is a dataset already; choose another --out, or --overwrite it")
    files = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_symlink() or not path.is_dir())
    others = [str(path) for path in files if not _IN_DATASET.fullmatch(path.as_posix())]
    if others:
        named = ", ".join(others[:_N_NAMED]) + f" and {len(others) - _N_NAMED} more" * (len(others) > _N_NAMED)
        raise BadInput(
            f"{out}: there are files that are not of the dataset, so it is left alone: {named}; move them elsewhere, "
            "or choose another --out"
        )


@contextmanager
def _hidden_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `out` that one `prepare` at a time owns; removed at the end, unless SIGKILL ends the process."""
    folder = out.parent / f".{out.name}.preparing"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{out}: cannot be written here: {error}") from error
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BadInput(f"{out}: another prepare is writing it right now ({folder})") from error
        if replaced(folder).exists():  # a prepare that was killed while it exchanged them
            if not out.exists():
                replaced(folder).rename(out)
                sync(out.parent)
                _check_free(out, overwrite)
            shutil.rmtree(replaced(folder), ignore_errors=True)
        inside = folder / "dataset"
        shutil.rmtree(inside, ignore_errors=True)  # what a killed prepare left
        inside.mkdir()
        try:
            yield inside
        except OSError as error:  # no space left, an input that cannot be read
            raise BadInput(f"while preparing {out}: {error}") from error
        finally:
            if out.exists() or not replaced(folder).exists():  # else the old dataset could not be brought back yet
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def replaced(hidden: Path) -> Path:
    """Where the old dataset is for the moment in which the new one takes its place."""
    return hidden / "replaced"


def _put_in_place(folder: Path, out: Path) -> None:
    """Show the new dataset as `out`. A crash at any point leaves the complete old one or the complete new one.

    Where `out` exists, the two are exchanged in one step (renameat2); the old one goes with the hidden folder. Where
    the file system cannot do that, the old one is moved away first: a crash just then leaves `out` missing, and
    the old one in the hidden folder, from where the next `prepare` brings it back.
    """
    old = replaced(folder.parent)
    if not out.exists():
        folder.rename(out)
    elif not exchange(folder, out):
        out.rename(old)
        try:
            folder.rename(out)
        except OSError:
            old.rename(out)
            raise


def _put_beside(folder: Path, out: Path) -> Path:
    """Show the new dataset under a free name beside `out`, whose own name it cannot get."""
    names = (out.with_name(f"{out.name}.new" + f"-{n}" * (n > 1)) for n in itertools.count(1))
    beside = next(name for name in names if not os.path.lexists(name))
    folder.rename(beside)
    sync(out.parent)
    return beside
