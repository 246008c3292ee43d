"""What commands print: lines and tables with the names and texts of others, a bar while something is read."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from recovery.printable import one_line


def print_line(text: object, file: TextIO | None = None, flush: bool = False) -> None:
    """As `print`, for names and texts of others: control characters are shown, not carried out."""
    print(one_line(str(text)), file=file, flush=flush)


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
