"""What a person sees of `gba-hvd checkpoint`: tables, sizes and ages in words, a bar while it reads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from recovery.catalog.best_step import ahead_words
from recovery.catalog.epoch_position import POSITION
from recovery.printable import one_line
from recovery.units import size


@contextmanager
def progress(doing: str, total: int | None, of: str = "bytes") -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere. Takes how many more are done, from any thread.

    total: None: not known. of: what is counted
    """
    if not sys.stderr.isatty():
        yield lambda n_bytes: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = (DownloadColumn(), TransferSpeedColumn()) if of == "bytes" else (MofNCompleteColumn(), TextColumn(of))
    columns = (TextColumn("{task.description}"), BarColumn(), *counts)
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task, lock = bar.add_task(doing, total=total), threading.Lock()

        def done(n_bytes: int) -> None:
            with lock:
                bar.advance(task, n_bytes)

        yield done


def print_line(text: object, file: TextIO | None = None, flush: bool = False) -> None:
    """As `print`, for names and texts of others: control characters are shown, not carried out."""
    print(one_line(str(text)), file=file, flush=flush)


def print_list(url: str, listed: Sequence[Mapping[str, Any]], unsaved: str = "") -> None:
    """One line for each checkpoint, newest first; what is wrong with the damaged ones below.

    unsaved: in words, the best model, where no checkpoint has it
    """
    if not listed:
        print_line(f"{url}: no checkpoints")
        return
    rows = [
        (
            short(one["name"]),
            one.get("kind", "-"),
            _count(one.get("step")),
            (one.get("position") or {}).get("words", "-"),
            _count(one.get("samples")),
            _size(one.get("n_bytes")),
            _age(one.get("age_s")),
            _count(one.get("chain")),
            "ok" + _best(one, unsaved) if one["ok"] else "DAMAGED",
        )
        for one in listed
    ]
    print_table(("name", "kind", "step", "position", "samples", "bytes", "age", "chain", ""), rows, left=(0, 1, 3, 8))
    for one in listed:
        if not one["ok"]:
            print_line(one["why"])
    if unsaved:
        print_line(unsaved)


def _best(one: Mapping[str, Any], unsaved: str) -> str:
    if "best" not in one:
        return ""
    ahead = ahead_words(one["best_ahead"])
    return f", the best model{' that is saved' * bool(unsaved)}: {one['best']}" + f" ({ahead})" * bool(ahead)


def print_one(shown: Mapping[str, Any]) -> None:
    """What `show` says."""
    print_line(f"{shown['name']}: {shown['kind']}, step {shown['step']:,}, {shown['samples']:,} samples")
    print_line(f"  saved     {_age(shown['age_s'])} ago, {_size(shown['n_bytes'])}, blobs: {shown['blobs']}")
    print_line(f"  chain     {', '.join(short(name) for name in shown['chain'])} ({_size(shown['chain_bytes'])})")
    print_line(f"  state     {_size(shown['state_bytes'])}; rows in {shown['n_shards']} shards")
    about = dict(shown["about"])
    if shown["position"] is not None:
        about[POSITION] = shown["position"]["words"]
    for key, value in about.items():
        print_line(f"  {key:9} {_words(value)}")
    rows = [
        (
            t["name"],
            _count(t["n_rows"]),
            _count(t["ids"]),
            t["columns"],
            _count(t["saved"]),
            _size(t["n_bytes"]),
            t["steps"],
        )
        for t in shown["tables"]
    ]
    print_table(("table", "rows", "ids", "columns", "saved here", "bytes", "of steps"), rows, left=(0, 3))
    if large := [t["name"] for t in shown["tables"] if t["hashed"] and t["ids"] is None]:
        print_line(f"not counted: the ids of {', '.join(large)}, whose rows are large: --ids reads them")


def print_diff(found: Mapping[str, Any]) -> None:
    print_line(
        f"{short(found['from'])} (step {found['from_step']:,}) to {short(found['to'])} (step {found['to_step']:,})"
    )
    rows = [
        (
            one["table"],
            _count(one["n_rows"]),
            _count(one["changed"]),
            f"{one['changed'] / one['n_rows']:.2%}",
            "-" if one["largest"] is None else f"{one['largest']:.6g} (row {one['largest_row']:,})",
            _count(one["only_one"]),
            _count(one["ids_came"]),
            _count(one["ids_left"]),
        )
        for one in found["tables"]
    ]
    headings = (
        "table",
        "rows",
        "changed",
        "share",
        "largest change of a weight",
        "in one only",
        "ids came",
        "ids left",
    )
    print_table(headings, rows, left=(0,))


def print_rollback(found: Mapping[str, Any]) -> None:
    for one in found["deleted"]:
        print_line(f"{short(one['name'])}  step {_count(one['step'])}")
    n, step = len(found["deleted"]), f"{found['step']:,}"
    these = f"{n} later checkpoint{'s' if n > 1 else ''}"
    if found["newest"] is None:
        print_line(f"{these}, to be deleted; {short(found['to'])} (step {step}) becomes the newest: add --yes to do it")
        return
    print_line(
        f"{these} deleted. {short(found['to'])} is the newest now, as {short(found['newest'])}: the next launch "
        f"resumes from step {step}, also where a host still has later training in memory. Saved models stay "
        "(`gba-hvd model rollback` withdraws versions of one)"
    )


def print_deletion(found: Mapping[str, Any]) -> None:
    n, n_objects = len(found["checkpoints"]), found["objects"]
    what = f"{found['url']}: {n} checkpoint{'s' * (n != 1)}, {n_objects:,} objects, {found['n_bytes']:,} bytes"
    if not n and not n_objects:
        print_line(f"{found['url']}: no checkpoints")
    elif found["deleted"]:
        print_line(f"{what} deleted. Saved models stay")
    else:
        print_line(f"{what}, to be deleted: add --yes to do it")


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (), title: str | None = None
) -> None:
    """left: columns of words, which may be wrapped, also within a word: nothing is cut off; the others are figures."""
    if title is not None:
        print_line(title)
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings):
        is_text = number in left
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for row in rows:
        table.add_row(*map(one_line, row))
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 240).print(table)


def short(name: str) -> str:
    return name.removeprefix("manifests/").removesuffix(".json")


def _words(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    known = {key: one for key, one in value.items() if one is not None}
    return ", ".join(f"{key} {one:.4g}" if isinstance(one, float) else f"{key} {one}" for key, one in known.items())


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _size(n_bytes: float | None) -> str:
    return "-" if n_bytes is None else size(n_bytes)


def _age(age_s: float | None) -> str:
    """Clocks may have been set back: then it is of now."""
    if age_s is None:
        return "-"
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * length_s:
            return f"{age_s / length_s:.0f} {unit}"
    return f"{max(0.0, age_s):.0f} s"
