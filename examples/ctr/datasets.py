"""The three splits of a log: from a prepared store, from raw files, or synthetic.

Raw files are prepared once into a cache: by whichever process of a host comes first, while the others wait for it.
The name of a store in the cache follows from the files and the settings, so a change of either prepares again.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctr.chosen_items import ChosenItems
from ctr.config import Behaviour, Data, Synthetic
from ctr.sequences import SequenceLog
from gba_hvd.data import (
    ClickLog,
    Hashed,
    Recipe,
    SplitFiles,
    SplitShares,
    SyntheticBehaviourLog,
    SyntheticClickLog,
    Vocabulary,
    prepare,
)
from gba_hvd.data.presets import PRESETS
from gba_hvd.data.splits import PrepareProgress
from gba_hvd.data.store import MANIFEST, read_manifest
from gba_hvd.errors import BadInput

SPLITS = ("train", "valid", "test")
RECALL_AT = 50  # items that a retrieval is evaluated with
Log = ClickLog | ChosenItems | SequenceLog | SyntheticClickLog | SyntheticBehaviourLog


@dataclass(frozen=True)
class Splits:
    """One log in three parts. The Bayes AUC or recall, the best that is possible, is known for synthetic logs only.

    of_day: of a log by day, the parts of each day; the other fields are then those of day 0, without a Bayes AUC
    """

    train: Log
    valid: Log
    test: Log
    auc_bayes: float | None = None
    of_day: Callable[[int], Splits] | None = None
    recall_bayes: float | None = None

    def of_epoch(self, epoch: int) -> Splits:
        """What an epoch trains and evaluates on: a day of a log by day, else always the same."""
        return self if self.of_day is None else self.of_day(epoch)

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(getattr(self, name)) for name in SPLITS}

    @property
    def description(self) -> dict[str, Any]:
        """JSON values, for MLflow."""
        return {name: getattr(self, name).description for name in SPLITS}


def open_splits(data: Data, of_sequences: bool = False) -> Splits:
    """Open the log, and prepare it first where that has not been done. of_sequences: for a model that reads them."""
    if (found := prepared_splits(data, of_sequences)) is not None:
        return found
    store, raw = store_of(data)
    assert raw is not None, "else it is prepared"
    with _one_at_a_time(store):
        if not (store / MANIFEST).is_file():
            print(f"preparing {data.dir} as {data.preset}, once, into {store}", file=sys.stderr, flush=True)
            prepare(*raw, store, on_progress=_print_progress())
    return _opened(store, data, of_sequences)


def prepared_splits(data: Data, of_sequences: bool = False) -> Splits | None:
    """Open the log if it is there; None when raw files would have to be prepared first."""
    if is_behaviour(data):
        return _behaviour(data.behaviour)
    if is_synthetic(data):
        return _synthetic(data)
    store, _ = store_of(data)
    return _opened(store, data, of_sequences) if (store / MANIFEST).is_file() else None


def as_read_by(kind: str, splits: Splits) -> Splits:
    """The log as a model of this kind reads it: youtube_dnn the chosen items of a click log, others all samples."""
    if kind != "youtube_dnn" or not isinstance(splits.train, ClickLog):
        return splits
    train, valid, test = (
        ChosenItems(part) for part in (splits.train, splits.valid, splits.test) if isinstance(part, ClickLog)
    )
    return Splits(train, valid, test)


def is_behaviour(data: Data) -> bool:
    """Whether the log is a computed behaviour log. Raises `BadInput` for settings that would be ignored."""
    if data.preset != "behaviour":
        if data.changed("behaviour"):
            raise BadInput(
                f"data.behaviour has settings, but data.preset is {data.preset!r}: set data.preset=behaviour, or leave "
                "them out"
            )
        return False
    others = [name for name in ("dir", "shares", "min_count", "hash_rows", "synthetic") if data.changed(name)]
    if others:
        raise BadInput(
            f"data.preset is behaviour, a log that is made up, but {' and '.join(f'data.{name}' for name in others)} "
            f"{'is set, which has' if len(others) == 1 else 'are set, which have'} no effect on it: leave out one of "
            "the two. 'data={dir: STORE}' in place of --data trains on a prepared store: it replaces the whole section"
        )
    return True


def is_synthetic(data: Data) -> bool:
    """Whether the log is computed. Raises `BadInput` when the settings name no data, or two kinds at once."""
    known = f"synthetic, behaviour, {', '.join(PRESETS)}"
    if data.preset not in ("", "synthetic", *PRESETS):
        beside = f" (data.dir is {data.dir}; a prepared store needs no preset: leave it out)" if data.dir else ""
        raise BadInput(f"data.preset: expected one of {known}, got {data.preset!r}{beside}")
    if data.preset in PRESETS:
        return False
    asked = [f"data.preset is {data.preset}"] if data.preset == "synthetic" else []
    asked += ["data.synthetic has settings"] if data.changed("synthetic") else []
    if not asked and not data.dir:
        raise BadInput(
            f"no data: name a prepared store or the folder of raw files with --data DIR, or set data.preset ({known})"
        )
    if not asked:
        return False
    if data.dir:
        raise BadInput(
            f"{' and '.join(asked)}, which makes up a log, but data.dir (--data) is {data.dir}: choose one. "
            "To read the files leave out the settings of the synthetic log; a prepared store needs no preset"
        )
    return True


def store_of(data: Data) -> tuple[Path, tuple[Recipe, SplitFiles | SplitShares] | None]:
    """Where the prepared store is or will be, and for raw files what makes it."""
    if not data.dir:
        raise BadInput(
            f"data.preset is {data.preset}: name the folder of its files, or a prepared store, with --data DIR"
        )
    folder = Path(data.dir).expanduser().absolute()
    if not folder.exists():
        raise BadInput(f"--data {folder}: no such file or folder")
    if (folder / MANIFEST).is_file():
        _check_store(data, folder)
        return folder, None
    if not data.preset:
        raise BadInput(
            f"--data {folder}: no prepared store (it has no {MANIFEST}), and no data.preset says how to read raw "
            f"files: `gba-hvd data prepare {folder} --out STORE ...` makes a store, or set data.preset "
            f"({', '.join(PRESETS)})"
        )
    raw = _recipe(data), _source(data, folder)
    return Path(data.cache).expanduser().absolute() / f"{data.preset}-{_fingerprint(folder, *raw)}", raw


def _check_store(data: Data, store: Path) -> None:
    """Settings that say how raw files are prepared must be those the store was prepared with."""
    manifest = read_manifest(store)
    encodings = [field.get("encoding", {}) for field in manifest.get("fields", [])]
    for name, key in (("min_count", "min_count"), ("hash_rows", "rows")):
        wanted = getattr(data, name)
        found = {one.get(key) if name == "min_count" or one.get("kind") == "hashed" else None for one in encodings}
        if wanted and found != {wanted}:
            raise BadInput(
                f"data.{name} is {wanted}, but the store {store} was prepared otherwise: prepare it again with "
                f"--{name.replace('_', '-')} {wanted}, or leave out data.{name} (data.{name}=0)"
            )
    shares = manifest.get("input", {}).get("splits", {}).get("shares")
    if data.changed("shares") and shares != data.shares:
        raise BadInput(
            f"data.shares is {data.shares}, but the store {store} was cut into {shares or 'splits by files'}: prepare "
            "it again with --split, or leave out data.shares"
        )


def _opened(store: Path, data: Data, of_sequences: bool) -> Splits:
    splits = read_manifest(store).get("splits", {})
    if missing := [split for split in SPLITS if split not in splits]:
        raise BadInput(
            f"{store}: has the splits {', '.join(splits)}, and this trainer reads train, valid and test: prepare it "
            f"again with --train, --valid and --test PATH (of {' and '.join(missing)} samples of their own), or cut "
            "all files with --split 0.8,0.1,0.1"
        )
    logs = [ClickLog.open(store, split) for split in SPLITS]
    if means := logs[0].description.get("label_means"):
        raise BadInput(
            f"{store}: has the labels {', '.join(means)}, and these models learn one label that is 0 or 1: prepare it "
            "with one --label (of ratings --label-from N makes it)"
        )
    train, valid, test = (SequenceLog(log, data.max_history) if of_sequences else log for log in logs)
    return Splits(train, valid, test)


def _synthetic(data: Data) -> Splits:
    made = data.synthetic
    if made.by_day:
        first = _synthetic_day(made, 0)
        return Splits(first.train, first.valid, first.test, of_day=functools.partial(_synthetic_day, made))

    def rows(n_samples: int, start: int) -> SyntheticClickLog:
        return SyntheticClickLog(n_samples, made.tables, made.n_dense, made.seed, made.zipf, start)

    test = rows(made.test, made.train + made.valid)
    return Splits(rows(made.train, 0), rows(made.valid, made.train), test, auc_bayes=test.bayes_auc(made.test))


def _behaviour(made: Behaviour) -> Splits:
    train, valid = made.log(made.train, 0), made.log(made.valid, made.train)
    test = made.log(made.test, made.train + made.valid)
    if made.target == "next_item":
        return Splits(train, valid, test, recall_bayes=test.bayes_recall(min(RECALL_AT, made.items)))
    return Splits(train, valid, test, auc_bayes=test.bayes_auc(made.test))


def _synthetic_day(made: Synthetic, day: int) -> Splits:
    """train and valid are of the day, test is of the day after. Every day has rows of its own."""

    def rows(n_samples: int, of_day: int, start: int) -> SyntheticClickLog:
        at = of_day * (made.train + made.valid + made.test) + start
        return SyntheticClickLog(
            n_samples, made.tables, made.n_dense, made.seed, made.zipf, at,
            day=of_day, drift=made.drift, new_ids=made.new_ids,
        )  # fmt: skip

    test = rows(made.test, day + 1, made.train + made.valid)
    train, valid = rows(made.train, day, 0), rows(made.valid, day, made.train)
    return Splits(train, valid, test, auc_bayes=test.bayes_auc(made.test))


def _recipe(data: Data) -> Recipe:
    preset = PRESETS[data.preset]
    encoding = preset.encoding
    if data.hash_rows:
        encoding = Hashed(rows=data.hash_rows)
    elif data.min_count:
        encoding = Vocabulary(min_count=data.min_count)
    return preset.recipe(encoding)


def _source(data: Data, folder: Path) -> SplitFiles | SplitShares:
    by = PRESETS[data.preset].split_by
    if by == "random" or by == "order":
        return SplitShares([folder], data.shares, by)
    if data.changed("shares"):
        raise BadInput(f"data.shares: {data.preset} comes with a file for each split; leave data.shares out")
    files = {split: sorted(p for p in folder.iterdir() if p.name.split(".")[0] == split) for split in SPLITS}
    missing = [split for split in SPLITS if not files[split]]
    if missing:
        raise BadInput(
            f"{folder}: no file for {', '.join(missing)}; {data.preset} has train, valid and test (.csv, .csv.gz)"
        )
    return SplitFiles(files)


def _fingerprint(folder: Path, recipe: Recipe, source: SplitFiles | SplitShares) -> str:
    files = sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else [folder]
    facts: list[Any] = [str(folder), recipe.to_json(), dataclasses.asdict(source)]
    facts += [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in files]
    return hashlib.blake2b(json.dumps(facts, default=str).encode(), digest_size=6).hexdigest()


@contextmanager
def _one_at_a_time(store: Path) -> Iterator[None]:
    store.parent.mkdir(parents=True, exist_ok=True)
    with open(store.parent / f".{store.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed, also by a crash
        yield


def _print_progress(every_s: float = 5.0) -> Callable[[PrepareProgress], None]:
    next_s = time.monotonic() + every_s

    def show(progress: PrepareProgress) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + every_s
            share = progress.done_bytes / max(1, progress.total_bytes)
            print(f"preparing: {progress.phase} {share:.0%}, {progress.rows:,} rows", file=sys.stderr, flush=True)

    return show
