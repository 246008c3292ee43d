"""The SQLite file in which MLflow keeps its runs: a new one appears whole, and one that is there is looked at first.

MLflow makes missing tables whenever it opens a file, also to read, statement by statement: killed meanwhile, it leaves
a file that it never opens again. Nothing here needs MLflow.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from glob import escape
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from gba_hvd.errors import BadInput
from recovery.storage.rename import rename_new

T = TypeVar("T")
BUSY_S = 5.0  # a reader waits so long for another process that holds the file
_PREFIX = "sqlite:///"
_IN_THE_MAKING_S = 60.0
_OF_HALF_MADE = ("already exists", "duplicate column name", "out-of-date database schema")  # what MLflow says of one


class UnusableDatabase(BadInput):
    """MLflow cannot use the file until a person has acted."""


def file_of(uri: str) -> Path | None:
    return Path(unquote(uri[len(_PREFIX) :].partition("?")[0])) if uri.startswith(_PREFIX) else None


@contextlib.contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """The lock is on the folder, so it leaves no file behind and stays clear of SQLite's own locks."""
    folder = os.open(file.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def make(file: Path, make_tables: Callable[[str], object]) -> None:
    """`make_tables(uri)` fills a file beside it, which then gets the name; one that has tables by then stays.

    Call it within `one_at_a_time`. An empty file of that name is replaced.
    """
    left_over = file.parent.glob(f".{escape(file.name)}.*.making*")  # of makers that were killed
    for path in (*left_over, file.with_name(f"{file.name}-journal")):  # SQLite would take it for one of the new file
        path.unlink(missing_ok=True)
    # A new name each time: MLflow keeps connections, by name.
    half = file.with_name(f".{file.name}.{time.time_ns()}.making")
    try:
        make_tables(f"{_PREFIX}{half}")
        if is_missing(file):
            file.unlink(missing_ok=True)
        if not rename_new(half, file):
            half.rename(file)
    except FileExistsError:
        half.unlink()
    except BaseException:
        for path in (half, half.with_name(f"{half.name}-journal")):
            path.unlink(missing_ok=True)
        raise


def is_missing(file: Path) -> bool:
    """Also where it is empty, as one that is about to be filled."""
    return not file.exists() or file.stat().st_size == 0


def tables_of(file: Path) -> set[str]:
    """Their names; none where there is no file. Raises BadInput where it cannot be read, or is locked for `BUSY_S`."""
    if not file.exists():
        return set()
    return {str(name) for (name,) in _asked(file, "SELECT name FROM sqlite_master WHERE type = 'table'")}


def opened(file: Path, open_it: Callable[[], T]) -> T:
    """What `open_it` returns. Where it fails for what the file is, `unusable` is raised; other errors may pass."""
    changed_s = file.stat().st_mtime  # before it is tried, which may add tables
    try:
        return open_it()
    except Exception as error:  # of SQLAlchemy, SQLite or MLflow
        if not any(words in str(error) for words in _OF_HALF_MADE):
            raise
        raise unusable(file, str(error).strip().splitlines()[0], changed_s) from error


def unusable(file: Path, why: str, changed_s: float) -> BadInput:
    """What to do with a file that lacks some of MLflow's tables or columns: by whether there are runs to lose.

    An UnusableDatabase where it had not changed for a while: before, another process may be making it.
    """
    kind = UnusableDatabase if time.time() - changed_s > _IN_THE_MAKING_S else BadInput
    if n_runs := _n_runs(file):
        return kind(
            f"{file} is of another version of MLflow, or was being upgraded by a process that was killed ({why}). It "
            f"holds {n_runs:,} runs: keep a copy, then `mlflow db upgrade {_PREFIX}{file}`; where that fails, put back "
            "a copy from before the upgrade"
        )
    return kind(
        f"{file} was left half made by a process that was killed ({why}), and holds no runs: move it away, unless "
        "another process (mlflow ui) is making it now; then send what waits in the spool: gba-hvd mlflow send SPOOL"
    )


def _n_runs(file: Path) -> int:
    tables = tables_of(file) & {"runs", "_alembic_tmp_runs"}  # the latter while columns change
    return sum(int(_asked(file, f"SELECT count(*) FROM {table}")[0][0]) for table in tables)


def _asked(file: Path, query: str) -> list[tuple[Any, ...]]:
    # mode rw: makes no file, but may roll back what a killed process left.
    uri = f"file:{quote(str(file.absolute()))}?mode=rw"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=BUSY_S)) as db:
            return db.execute(query).fetchall()
    except sqlite3.Error as error:
        if "locked" in str(error):
            raise BadInput(f"{file} was locked by another process for {BUSY_S:.0f} s: try again later") from error
        raise BadInput(f"{file} cannot be read as a SQLite database: {error}") from error
