"""Measurements that are done in pieces: rows of the result file are kept, and only what has none is run.

A result file is a JSON object with lists of rows. Which columns identify a row, and which settings all rows of a file
share, is each benchmark's own.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .measure import PACKAGES, Row, RunFailed, machine, write_whole

Run = TypeVar("Run")


def read(path: Path) -> dict[str, Any]:
    """What earlier invocations wrote; {} where there is no file, or an empty one. Raises RunFailed for another file."""
    try:
        found = json.loads(path.read_text()) if _has_content(path) else {}
    except ValueError as error:
        raise _not_ours(path) from error
    if not isinstance(found, dict):
        raise _not_ours(path)
    return found


def earlier(path: Path, key: Sequence[str], settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The same of a file whose list `rows` was measured with these settings; `rows` is [] where there is no file.

    key: columns that every row has
    Raises RunFailed for another file, and for other settings.
    """
    if not _has_content(path):
        return {"rows": []}
    found = read(path)
    try:
        for row in found["rows"]:
            _ = [row[name] for name in key]
        before = found["settings"] if settings is not None else {}
        differ = {name: (before.get(name), now) for name, now in (settings or {}).items() if before.get(name) != now}
    except (KeyError, TypeError, AttributeError) as error:
        raise _not_ours(path) from error
    if differ:
        names = ", ".join(_difference(name, *values) for name, values in differ.items())
        raise RunFailed(f"{path} has rows that were measured with other settings ({names}): give --out another name")
    return found


def missing(runs: Iterable[Run], rows: Iterable[Row], key: Sequence[str]) -> list[Run]:
    """Runs without a row. key: columns of a row that are attributes of a run. RunFailed where a row lacks one."""
    try:
        done = {tuple(row[name] for name in key) for row in rows}
    except KeyError as error:
        raise RunFailed(f"a row of the result file has no {error}: give --out another name") from error
    return [run for run in runs if tuple(getattr(run, name) for name in key) not in done]


class Results:
    """A result file with the list `rows`. Raises RunFailed for another file, and for other settings.

    out: None keeps nothing
    key: columns that identify a row, attributes of a run
    settings: what all rows of a file have in common; None: nothing
    more: other entries of the file, from the rows. has: other columns of every row
    before: what was in the file. failures: what could not be measured this time, with the reason
    """

    def __init__(
        self, out: Path | None, key: Sequence[str], settings: Mapping[str, Any] | None,
        more: Callable[[list[Row]], Mapping[str, Any]], *, has: Sequence[str] = (), packages: Sequence[str] = PACKAGES,
    ) -> None:  # fmt: skip
        settings = json.loads(json.dumps(settings))  # lists, not tuples, as in the file
        self.before = earlier(out, (*key, *has), settings) if out is not None else {"rows": []}
        self.rows: list[Row] = self.before["rows"]
        self.failures: dict[str, str] = {}
        self._out, self._key, self._more = out, key, more
        self._head = {"machine": self.before.get("machine") or machine(packages), "settings": settings or {}}

    def waiting(self, runs: Iterable[Run]) -> list[Run]:
        """Those without a row."""
        found = missing(runs, self.rows, self._key)
        if self._out is not None:
            print(f"{len(self.rows)} rows in {self._out}, {len(found)} runs to do", flush=True)
        return found

    def run_each(self, waiting: Sequence[Run], run: Callable[[Run], None], until: float = math.inf) -> None:
        """Run one after the other, each of which adds to the rows; see the function of that name."""
        run_each(waiting, run, self.write, self.failures, until=until)
        self.write()

    def write(self) -> None:
        if self._out is not None:
            found = {**self._head, **self._more(self.rows), "failures": self.failures, "rows": self.rows}
            write_whole(self._out, found)

    def end(self) -> int:
        """The status of the command."""
        if self._out is not None:
            print(f"written to {self._out}")
        return 1 if self.failures else 0


def run_each(
    waiting: Sequence[Run], run: Callable[[Run], None], write: Callable[[], None], failures: dict[str, str], *,
    noun: str = "runs", until: float = math.inf,
) -> None:  # fmt: skip
    """Run one after the other and write the result after each.

    failures: filled with what failed (`str` of the run) -> why, for `write`; the next run starts
    until: time.monotonic() after which no further run starts
    """
    for number, one in enumerate(waiting):
        if time.monotonic() > until:
            print(f"no time left for {len(waiting) - number} {noun}; the same command continues with them")
            break
        try:
            run(one)
        except RunFailed as error:
            failures[str(one)] = str(error)
            print(f"gba-hvd: {one}: {error}", file=sys.stderr, flush=True)
        write()


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _not_ours(path: Path) -> RunFailed:
    return RunFailed(f"{path} is no result of this benchmark: give --out another name")


def _difference(name: str, before: Any, now: Any) -> str:
    values = f"{name}: {before!r} in the file, {now!r} now"
    return values if len(values) < 80 else name
