"""`gba-hvd bench vocabulary`: hashed tables (`Table(keys="hash64")`) beside plain ones.

speed   samples/s of one worker in allreduce mode, all ids in one table of `--rows` rows: numbered rows (plain), and the
        same ids as raw 64-bit ones that all have a row (hash64). The goal is 0.9 of plain.
drift   AUC of each day's model on the day after, on a synthetic click log with new ids every day
frappe  test AUC, at the epoch of the best validation AUC, on a dataset that `gba-hvd data prepare` wrote (--data)

In the last two, all fields share one table of a tenth as many rows as the training data has ids (`--ids-per-row`),
shared rows included: hash64 admits ids that come again and evicts the least used; modulo takes as much memory, and lets
ids share rows by their remainder; full has a row for every id. The goal is that hash64 is better than modulo.

Rows in the result file are kept and their runs not done again.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

import gba_hvd

from .harness import measure, resumable
from .harness.measure import Row, Subparsers

KEY = ("task", "variant", "seed")
TASKS = {"speed": ("plain", "hash64"), "drift": ("modulo", "hash64", "full"), "frappe": ("modulo", "hash64", "full")}
SPEED_GOAL = 0.9
_WARM = 20  # micro-batches that are not measured
_FEW_SHARDS = 4  # where AUC is measured: in each, rows for ids are rounded up to 16, and tables are small
_DRIFT, _NEW_IDS = 0.02, 0.1
_TEST_AT = 1 << 40  # rows of the log for tests begin here
_MASK = 2**63 - 1


@dataclass(frozen=True)
class Run:
    """seed: of `speed`, the number of the repetition."""

    task: str
    variant: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task}, {self.variant}, {self.seed}"


def add_parser(subparsers: Subparsers) -> None:
    does = "samples/s, AUC and memory of tables whose ids grow, beside plain ones"
    parser = measure.add_benchmark(subparsers, "vocabulary", does, __doc__, run, help="rows in it are kept")
    measure.add_chosen(parser, "--tasks", TASKS, "TASK", help=", ".join(TASKS) + "; frappe needs --data")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="the prepared dataset, for frappe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table, for speed")
    parser.add_argument("--micro-batches", type=int, default=300, help="that are measured, for speed")
    parser.add_argument("--micro-batch", type=int, default=512)
    parser.add_argument("--samples", type=int, default=200_000, help="of a day, for drift")
    parser.add_argument("--days", type=int, default=10, help="for drift; the first half is not counted")
    parser.add_argument("--field-rows", type=int, default=100_000, help="of each of five fields, for drift")
    parser.add_argument("--epochs", type=int, default=4, help="for frappe")
    parser.add_argument("--ids-per-row", type=float, default=10.0, help="ids of the training data for each row")
    parser.add_argument("--admit-after", type=int, default=2, help="for drift and frappe")
    parser.add_argument("--limit-minutes", type=float, default=math.inf, help="start no further run after so long")


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    until = time.monotonic() + 60 * args.limit_minutes
    if "frappe" in args.tasks and args.data is None:
        raise measure.RunFailed("frappe needs --data, a folder that `gba-hvd data prepare` wrote; else give --tasks")
    names = ("dim", "rows", "micro_batches", "micro_batch", "samples", "days", "field_rows", "epochs", "ids_per_row",
             "admit_after")  # fmt: skip
    settings = {name: getattr(args, name) for name in names}
    results = resumable.Results(args.out, KEY, settings, lambda rows: {"summary": summary(rows)})
    planned = [Run(task, variant, seed) for seed in args.seeds for task in args.tasks for variant in TASKS[task]]

    def one_run(one: Run) -> None:
        row = {**asdict(one), **(speed(one, args) if one.task == "speed" else quality(one, args))}
        results.rows.append(row)
        figure = f"{row['samples_per_s']:,.0f} samples/s" if one.task == "speed" else f"AUC {row['auc']:.4f}"
        print(f"{one}: {figure}, {row['bytes_per_row']:.0f} bytes a row, {row['n_bytes'] / 1e6:.1f} MB", flush=True)

    results.run_each(results.waiting(planned), one_run, until)
    show(summary(results.rows))
    return results.end()


def summary(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """By task: of each variant the median of samples/s or the mean AUC, bytes; and whether the goal is met."""
    found: dict[str, dict[str, Any]] = {}
    for task, variants in TASKS.items():
        of_task = {name: [row for row in rows if (row["task"], row["variant"]) == (task, name)] for name in variants}
        if not all(of_task.values()):
            continue
        by_variant = {}
        for name, some in of_task.items():
            figure = "samples_per_s" if task == "speed" else "auc"
            value = (median if task == "speed" else mean)(row[figure] for row in some)
            by_variant[name] = {figure: value, **{key: some[0][key] for key in ("n_bytes", "bytes_per_row", "n_rows")}}
        if task == "speed":
            ratio = by_variant["hash64"]["samples_per_s"] / by_variant["plain"]["samples_per_s"]
            found[task] = {"variants": by_variant, "ratio": ratio, "is_met": ratio >= SPEED_GOAL}
        else:
            gain = by_variant["hash64"]["auc"] - by_variant["modulo"]["auc"]
            found[task] = {"variants": by_variant, "gain": gain, "is_met": gain > 0}
    return found


def show(found: Mapping[str, Mapping[str, Any]]) -> None:
    for task, one in found.items():
        is_speed = task == "speed"
        figure = {"samples/s": "{samples_per_s:,.0f}"} if is_speed else {"AUC": "{auc:.4f}"}
        columns = {
            "table": "{name}",
            **figure,
            "rows": "{n_rows:,}",
            "bytes/row": "{bytes_per_row:.0f}",
            "MB": "{mb:.1f}",
        }
        lines = [{"name": name, **of, "mb": of["n_bytes"] / 1e6} for name, of in one["variants"].items()]
        goal = f"{one['ratio']:.2f} of plain" if is_speed else f"{one['gain']:+.4f} against modulo"
        title = f"{task}: hash64 has {goal}, the goal is {'met' if one['is_met'] else 'not met'}"
        measure.print_figures(title, columns, lines)


# --- tables ----------------------------------------------------------------------------------------------------------


def raw_ids(field: int, ids: Any) -> Any:
    """int64 [n]: what a hash of (field, id) gives."""
    from gba_hvd.data.hashing import hash_integers, stream_key

    return (hash_integers(np.asarray(ids), stream_key(field)) & np.uint64(_MASK)).view(np.int64)


class Fields:
    """A click log whose fields share one table. n_rows: take ids modulo this; None: as they are."""

    def __init__(self, log: Any, n_rows: int | None) -> None:
        self._log, self._n_rows = log, n_rows
        self.fields = list(log.tables)

    def __len__(self) -> int:
        return len(self._log)

    def take(self, rows: Any) -> Any:
        import torch

        batch = self._log.take(rows)
        ids: dict[str, Any] = {}
        for number, name in enumerate(self.fields):
            column = batch.ids[name]
            values = raw_ids(number, column.values if isinstance(column, gba_hvd.Bag) else column)
            found = torch.from_numpy(values if self._n_rows is None else values % self._n_rows)
            ids[name] = gba_hvd.Bag(found, column.offsets) if isinstance(column, gba_hvd.Bag) else found
        return gba_hvd.Batch(ids, batch.dense, batch.label)

    def all_ids(self, part: int = 1 << 16) -> Any:
        """Distinct raw ids of the log."""
        found: Any = np.empty(0, np.int64)
        for start in range(0, len(self), part):
            batch = self.take(np.arange(start, min(len(self), start + part)))
            columns = [
                np.asarray(column.values if isinstance(column, gba_hvd.Bag) else column)
                for column in batch.ids.values()
            ]
            found = np.unique(np.concatenate([found, *columns]))
        return found


class Job:
    """One worker in allreduce mode. table: of all fields; settings: of `EmbeddingTables`"""

    def __init__(
        self, table: Any, fields: Sequence[str], n_dense: int, dim: int, seed: int, batch: int, **settings: Any
    ) -> None:  # fmt: skip
        import torch

        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self._scratch = tempfile.TemporaryDirectory(prefix="gba-hvd-bench-", ignore_cleanup_errors=True)
        features = dict.fromkeys(fields, "ids")
        self.tables = _tables(table, features=features, seed=seed, shard_dir=self._scratch.name, **settings)
        self.model = _model(self.tables, list(fields), n_dense, dim)
        self.optimizer: Any = gba_hvd.DistributedOptimizer(
            torch.optim.Adam(self.model.parameters(), lr=1e-3), self.tables, global_batch=batch, micro_batch=batch
        )
        self.state: Any = gba_hvd.elastic.TorchState(self.model, self.optimizer, epoch=0)
        group = self.tables.layout.groups[0]
        self.n_rows = self.tables.layout.n_shards * group.rows_per_shard
        self.n_bytes = _bytes(self.tables.layout)

    def about(self) -> Row:
        return {"n_rows": self.n_rows, "n_bytes": self.n_bytes, "bytes_per_row": self.n_bytes / self.n_rows}

    def epoch(self, dataset: Fields) -> Iterator[float]:
        """The time after each micro-batch."""
        import torch

        for batch in gba_hvd.batches(dataset, self.state, prefetch=2):
            self.optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch.label)
            loss.backward()
            self.optimizer.step(loss=loss)
            yield time.perf_counter()
        self.state.epoch += 1

    def without_row(self, dataset: Fields) -> dict[str, float]:
        """By field, the share of the ids in the data, as often as they come, that have no row of their own."""
        ids = dataset.take(np.arange(len(dataset))).ids
        values = {name: one.values if isinstance(one, gba_hvd.Bag) else one for name, one in ids.items()}
        return {name: 1 - float(np.mean(self.tables.admitted("ids", some))) for name, some in values.items()}

    def auc(self, dataset: Fields) -> float:
        return float(gba_hvd.evaluate(self.model, dataset, self.state, batch=4096).auc)

    def close(self) -> None:
        self.state.close()
        self._scratch.cleanup()


def _model(tables: Any, fields: list[str], n_dense: int, dim: int) -> Any:
    import torch

    from .harness import dlrm

    class Clicks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = tables
            self.mlp = dlrm.mlp((len(fields) * dim + n_dense, 256, 128, 1), last_relu=False)

        def forward(self, batch: Any) -> Any:
            rows = self.tables.stacked({name: batch.ids[name] for name in fields})
            return self.mlp(torch.cat([rows.flatten(1), batch.dense], 1)).squeeze(1)

    return Clicks()


# --- tasks -----------------------------------------------------------------------------------------------------------


class Draws:
    """Samples whose eight fields are ids of one table, drawn by Zipf's law. is_raw: 64-bit ids"""

    def __init__(self, n_samples: int, n_rows: int, is_raw: bool) -> None:
        from gba_hvd.data.synthetic import Zipf

        rng = np.random.default_rng(7)
        ranks = Zipf(n_rows, 1.05).ranks(rng.random((8, n_samples)))
        self._ids = raw_ids(0, ranks) if is_raw else rng.permutation(n_rows)[ranks]
        self._label = (rng.random(n_samples) < 0.3).astype(np.float32)
        self.fields = [f"field_{i}" for i in range(8)]

    def __len__(self) -> int:
        return len(self._label)

    def take(self, rows: Any) -> Any:
        import torch

        columns: dict[str, Any] = {name: torch.from_numpy(self._ids[i][rows]) for i, name in enumerate(self.fields)}
        return gba_hvd.Batch(columns, torch.empty(len(rows), 0), torch.from_numpy(self._label[rows]))


def speed(one: Run, args: argparse.Namespace) -> Row:
    is_raw = one.variant == "hash64"
    table = gba_hvd.Table(args.rows, args.dim)
    if is_raw:
        table = gba_hvd.Table(dim=args.dim, keys="hash64", capacity=round(1.25 * args.rows))
    dataset: Any = Draws(args.micro_batch * (_WARM + args.micro_batches), args.rows, is_raw)
    job = Job(table, dataset.fields, 0, args.dim, one.seed, args.micro_batch)
    try:
        if is_raw:
            ids = raw_ids(0, np.arange(args.rows))
            job.tables.assign("ids", ids, np.zeros((args.rows, args.dim), np.float32))
        times = list(job.epoch(dataset))[_WARM - 1 :]
        return {"samples_per_s": args.micro_batch * (len(times) - 1) / (times[-1] - times[0]), **job.about()}
    finally:
        job.close()


def quality(one: Run, args: argparse.Namespace) -> Row:
    """AUC, and which ids have a row at the end. aucs: of each day, or of the validation data

    without_row: of the newest of these, by field, the share of lookups without a row
    """
    train, tests, n_dense = _drift(args, one.seed) if one.task == "drift" else _frappe(args)
    final, best = None if one.task == "drift" else _opened(args, "test"), 0.0
    logs = {id(log): log for log in train}.values()
    n_ids = len(np.unique(np.concatenate([Fields(log, None).all_ids() for log in logs])))
    table, n_rows = _table(one.variant, max(1, round(n_ids / args.ids_per_row)), n_ids, args)
    fields = list(train[0].tables)
    job = Job(table, fields, n_dense, args.dim, one.seed, args.micro_batch, n_shards=_FEW_SHARDS)
    try:
        aucs = []
        for log, test in zip(train, tests, strict=True):
            list(job.epoch(Fields(log, n_rows)))
            aucs.append(job.auc(Fields(test, n_rows)))
            if final is not None and aucs[-1] == max(aucs):
                best = job.auc(Fields(final, n_rows))
        about: Row = {"n_ids": n_ids, **job.about()}
        if one.variant == "hash64":
            about["with_row"] = len(job.tables.vocabulary("ids"))
            about["without_row"] = job.without_row(Fields(tests[-1], n_rows))
        auc = mean(aucs[len(aucs) // 2 :]) if final is None else best
        return {"auc": auc, "aucs": aucs, **about}
    finally:
        job.close()


def _table(variant: str, n_all: int, n_ids: int, args: argparse.Namespace) -> tuple[Any, int | None]:
    """The table, and how many rows ids are taken modulo of; of modulo as many as take the memory of hash64.

    n_all: rows of hash64, shared ones included
    """

    def of(capacity: int) -> Any:
        return gba_hvd.Table(dim=args.dim, keys="hash64", capacity=capacity, admit_after=args.admit_after, evict="lfu")

    many = 1 << 20  # of a table of so many, to find the share of rows that ids have for themselves
    hashed = of(max(1, round(n_all * many / (many + _tables(of(many)).tables["ids"].fallback_rows))))
    if variant == "hash64":
        return hashed, None
    n_rows = 2 * n_ids  # few of so many share a row
    if variant == "modulo":
        n_bytes = [
            _bytes(_tables(one, n_shards=_FEW_SHARDS).layout) for one in (hashed, gba_hvd.Table(1 << 20, args.dim))
        ]
        n_rows = max(1, int(n_bytes[0] / n_bytes[1] * (1 << 20)))
    return gba_hvd.Table(n_rows, args.dim), n_rows


def _tables(table: Any, **settings: Any) -> Any:
    return gba_hvd.EmbeddingTables({"ids": table}, gba_hvd.Adagrad(lr=0.05), **settings)


def _bytes(layout: Any) -> int:
    """Of the one table, in all shards, without the pages of their marks."""
    return int(4 * layout.n_shards * (layout.groups[0].end - layout.groups[0].at))


def _drift(args: argparse.Namespace, seed: int) -> tuple[list[Any], list[Any], int]:
    from gba_hvd.data import SyntheticClickLog

    tables = {f"field_{i}": args.field_rows for i in range(5)}

    def day(number: int, n: int, start: int) -> Any:
        return SyntheticClickLog(
            n, tables, seed=seed, start=start, day=number, drift=_DRIFT, new_ids=_NEW_IDS, logit_std=1.5
        )

    train = [day(number, args.samples, number * args.samples) for number in range(args.days)]
    n_test = max(1, args.samples // 4)
    tests = [day(number + 1, n_test, _TEST_AT + number * args.samples) for number in range(args.days)]
    return train, tests, train[0].n_dense


def _frappe(args: argparse.Namespace) -> tuple[list[Any], list[Any], int]:
    """Each epoch is followed by the validation data."""
    train = _opened(args, "train")
    return [train] * args.epochs, [_opened(args, "valid")] * args.epochs, train.n_dense


def _opened(args: argparse.Namespace, split: str) -> Any:
    from gba_hvd.data import ClickLog

    return ClickLog.open(args.data, split)
