"""What a person sees of `gba-hvd data`: progress while it works, and what a prepared dataset holds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..terminal import print_line

if TYPE_CHECKING:
    from gba_hvd.data.splits import PrepareProgress

_LINE_EVERY_S = 5.0


@contextmanager
def shown_progress() -> Iterator[Callable[[PrepareProgress], None]]:
    """A bar on a terminal, a line every few seconds elsewhere."""
    if not sys.stderr.isatty():
        yield plain_lines(time.monotonic)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    counts = TextColumn("{task.fields[rows]:,} rows, {task.fields[bad]:,} malformed")
    name = TextColumn("{task.description:>8}")
    with Bar(
        name, BarColumn(), TaskProgressColumn(), counts, TimeRemainingColumn(), console=Console(stderr=True)
    ) as bar:
        tasks: dict[str, Any] = {}

        def show(progress: PrepareProgress) -> None:
            if progress.phase not in tasks:
                tasks[progress.phase] = bar.add_task(progress.phase, total=progress.total_bytes, rows=0, bad=0)
            task = tasks[progress.phase]
            bar.update(task, completed=progress.done_bytes, rows=progress.rows, bad=progress.bad_rows)

        yield show


def plain_lines(clock: Callable[[], float]) -> Callable[[PrepareProgress], None]:
    due = clock() + _LINE_EVERY_S

    def show(progress: PrepareProgress) -> None:
        nonlocal due
        if clock() < due:
            return
        due = clock() + _LINE_EVERY_S
        share = progress.done_bytes / max(progress.total_bytes, 1)
        print_line(
            f"{progress.phase} {share:.0%}, {progress.rows:,} rows, {progress.bad_rows:,} malformed",
            file=sys.stderr,
            flush=True,
        )

    return show


def _print_missing(manifest: dict[str, Any]) -> None:
    """Columns with missing values, and what stands for these; nothing of a dataset that was prepared uncounted."""
    rows = {split: one["rows"] for split, one in manifest["splits"].items()}
    lines = []
    for column in [*manifest["fields"], *manifest["numeric"]]:
        missing = column.get("missing", {})
        if any(missing.values()):
            shares = "  ".join(f"{split} {n / rows[split]:.2%}" for split, n in missing.items())
            lines.append(f"  {column['name']:16} {_stands_for_missing(column):24} {shares}")
    if lines:
        print_line(f"  {'missing values':16} {'become':24} share of rows by split")
        for line in lines:
            print_line(line)
    elif all("missing" in column for column in [*manifest["fields"], *manifest["numeric"]]):
        print_line("  missing values: none")


def _stands_for_missing(column: dict[str, Any]) -> str:
    if "missing_becomes" in column:
        is_fitted = (column.get("mean", 0), column.get("std", 1)) != (0, 1)
        what = " (as 0 does)" if column["missing_becomes"] else " (the mean)" if is_fitted else ""
        return f"{column['missing_becomes']:.4g}{what}"
    return "no id: a vector of zeros" if column["multi_valued"] else "id 0"


def print_summary(path: Path, manifest: dict[str, Any]) -> None:
    from gba_hvd.data.sources import shown

    splits = manifest["splits"]
    print_line(f"{path}: {len(manifest['fields'])} fields, {len(manifest['numeric'])} numeric columns")
    for name, split in splits.items():
        n_bytes = sum(part["bytes"] for part in split["parts"])
        means = split.get("label_means", {})
        labels = "  ".join(f"{label} {mean:.4g}" for label, mean in means.items()) + " on average"
        labels = labels if means else f"{split['positives'] / split['rows']:7.2%} positive"
        print_line(f"  {name:6} {split['rows']:>13,} rows  {labels}  {n_bytes / 1e6:>10,.1f} MB")
    print_line(f"  {'field':16} {'encoding':11} {'rows':>12}   id 0 (missing, rare, unseen), share of values by split")
    for field in manifest["fields"]:
        zero = "  ".join(f"{split} {n / max(1, field['values'][split]):.2%}" for split, n in field["id_0"].items())
        # With identity encoding 0 is an id like any other.
        zero = "-" if field["encoding"]["kind"] == "identity" else zero
        multi = " (multi-valued)" if field["multi_valued"] else ""
        multi += f" (table {field['table']})" if field.get("table", field["name"]) != field["name"] else ""
        print_line(f"  {field['name']:16} {field['encoding']['kind']:11} {field['rows']:>12,}   {zero}{multi}")
    _print_missing(manifest)
    if not_used := manifest["input"].get("not_used"):
        print_line(f"  columns not used: {', '.join(not_used)}")
    for what in ("files_without_rows", "files_not_read"):
        if files := manifest["input"].get(what):
            print_line(f"  {what.replace('_', ' ')}: {len(files):,} ({shown(files)})")
    bad = manifest["input"]["bad_rows"]
    print_line(f"  malformed rows left out: {bad['count']} of {bad['rows_read']:,}")
    for row in bad["first"]:
        print_line(f"    {row}")
